/* fermi.cuh for nvcc 8.0: the toolkit has everything but a few names of ours. */
#ifndef FERMI_NVCC_CUH
#define FERMI_NVCC_CUH

#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ < 200
#error "the kernels need compute capability 2.0: nvcc -arch=sm_20"
#endif

#define FERMI_BUILTIN static __device__ __forceinline__

FERMI_BUILTIN float float_of(unsigned bits)
{
    return __int_as_float((int)bits);
}

FERMI_BUILTIN unsigned bits_of(float x)
{
    return (unsigned)__float_as_int(x);
}

FERMI_BUILTIN double double_of(unsigned long long bits)
{
    return __longlong_as_double((long long)bits);
}

FERMI_BUILTIN unsigned long long bits_of_double(double x)
{
    return (unsigned long long)__double_as_longlong(x);
}

FERMI_BUILTIN int popcount(unsigned x)
{
    return __popc(x);
}

FERMI_BUILTIN unsigned warp_ballot(int p)
{
    unsigned mask;
    asm volatile("{ .reg .pred p; setp.ne.s32 p, %1, 0; vote.ballot.b32 %0, p; }" : "=r"(mask) : "r"(p) : "memory");
    return mask;
}

#define FERMI_REREAD(name, sreg)                                                                                        \
    FERMI_BUILTIN int name()                                                                                            \
    {                                                                                                                   \
        int x;                                                                                                          \
        asm volatile("mov.u32 %0, %%" sreg ";" : "=r"(x));                                                              \
        return x;                                                                                                       \
    }
FERMI_REREAD(reread_thread, "tid.x")
FERMI_REREAD(reread_block_x, "ctaid.x")
FERMI_REREAD(reread_block_y, "ctaid.y")

#define FERMI_HALF_ASM 1
extern __shared__ float4 fermi_dynamic_shared[];
#define DYNAMIC_SHARED(type, name) type *const name = (type *)fermi_dynamic_shared

#endif
