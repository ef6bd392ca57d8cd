/* CPUID, asked at run time: nothing in this module may assume more than plain x86-64 before the answer is known. */
#include "kernels.h"

unsigned fermi_cpu_features(void)
{
    unsigned bits = 0;
    __builtin_cpu_init();
    bits |= (unsigned)!!__builtin_cpu_supports("ssse3") << 0;
    bits |= (unsigned)!!__builtin_cpu_supports("sse4.1") << 1;
    bits |= (unsigned)!!__builtin_cpu_supports("sse4.2") << 2;
    bits |= (unsigned)!!__builtin_cpu_supports("popcnt") << 3;
    bits |= (unsigned)!!__builtin_cpu_supports("avx") << 4;
    bits |= (unsigned)!!__builtin_cpu_supports("avx2") << 5;
    bits |= (unsigned)!!__builtin_cpu_supports("fma") << 6;
    bits |= (unsigned)!!__builtin_cpu_supports("f16c") << 7;
    bits |= (unsigned)!!__builtin_cpu_supports("avx512f") << 8;
    bits |= (unsigned)!!__builtin_cpu_supports("avx512vnni") << 9;
    return bits;
}
