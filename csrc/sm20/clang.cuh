/* fermi.cuh for clang without a CUDA toolkit: keywords, special registers, votes and the few PTX instructions that C++ lacks. */
#ifndef FERMI_CLANG_CUH
#define FERMI_CLANG_CUH

#define __global__ __attribute__((global))
#define __device__ __attribute__((device))
#define __host__ __attribute__((host))
#define __shared__ __attribute__((shared))
#define __constant__ __attribute__((constant))
#define __launch_bounds__(...) __attribute__((launch_bounds(__VA_ARGS__)))
#define __forceinline__ inline __attribute__((always_inline))
#define __align__(n) __attribute__((aligned(n)))
#define FERMI_BUILTIN static __device__ __forceinline__

struct fermi_index {
    unsigned x, y, z;
};

/* Registers that are not used fall away. */
#define FERMI_REGISTERS(name, sreg)                                                                                     \
    FERMI_BUILTIN fermi_index name()                                                                                    \
    {                                                                                                                   \
        return {(unsigned)__nvvm_read_ptx_sreg_##sreg##_x(), (unsigned)__nvvm_read_ptx_sreg_##sreg##_y(),               \
                (unsigned)__nvvm_read_ptx_sreg_##sreg##_z()};                                                           \
    }
FERMI_REGISTERS(fermi_thread, tid)
FERMI_REGISTERS(fermi_block, ctaid)
FERMI_REGISTERS(fermi_threads, ntid)
FERMI_REGISTERS(fermi_blocks, nctaid)
#define threadIdx fermi_thread()
#define blockIdx fermi_block()
#define blockDim fermi_threads()
#define gridDim fermi_blocks()

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

#define FERMI_VECTOR2(name, type)                                                                                       \
    struct __align__(8) name {                                                                                          \
        type x, y;                                                                                                      \
    };                                                                                                                  \
    FERMI_BUILTIN name make_##name(type x, type y)                                                                      \
    {                                                                                                                   \
        return {x, y};                                                                                                  \
    }
#define FERMI_VECTOR4(name, type)                                                                                       \
    struct __align__(16) name {                                                                                         \
        type x, y, z, w;                                                                                                \
    };                                                                                                                  \
    FERMI_BUILTIN name make_##name(type x, type y, type z, type w)                                                      \
    {                                                                                                                   \
        return {x, y, z, w};                                                                                            \
    }
FERMI_VECTOR2(float2, float)
FERMI_VECTOR2(int2, int)
FERMI_VECTOR2(uint2, unsigned)
FERMI_VECTOR4(float4, float)
FERMI_VECTOR4(int4, int)
FERMI_VECTOR4(uint4, unsigned)

#define fmaf(a, b, c) __builtin_fmaf(a, b, c)
#define fmaxf(a, b) __builtin_fmaxf(a, b)
#define fminf(a, b) __builtin_fminf(a, b)
#define fabsf(a) __builtin_fabsf(a)

FERMI_BUILTIN float sqrtf(float x)
{
    float y;
    asm("sqrt.rn.f32 %0, %1;" : "=f"(y) : "f"(x));
    return y;
}

FERMI_BUILTIN float float_of(unsigned bits)
{
    return __builtin_bit_cast(float, bits);
}

FERMI_BUILTIN unsigned bits_of(float x)
{
    return __builtin_bit_cast(unsigned, x);
}

FERMI_BUILTIN double double_of(unsigned long long bits)
{
    return __builtin_bit_cast(double, bits);
}

FERMI_BUILTIN unsigned long long bits_of_double(double x)
{
    return __builtin_bit_cast(unsigned long long, x);
}

FERMI_BUILTIN int popcount(unsigned x)
{
    return __builtin_popcount(x);
}

/* clang's vote builtins are the .sync forms of newer cards. */
FERMI_BUILTIN unsigned warp_ballot(int p)
{
    unsigned mask;
    asm volatile("{ .reg .pred p; setp.ne.s32 p, %1, 0; vote.ballot.b32 %0, p; }" : "=r"(mask) : "r"(p) : "memory");
    return mask;
}

FERMI_BUILTIN int __syncthreads_count(int p)
{
    return __nvvm_bar0_popc(p);
}

FERMI_BUILTIN int __syncthreads_and(int p)
{
    return __nvvm_bar0_and(p);
}

FERMI_BUILTIN int __syncthreads_or(int p)
{
    return __nvvm_bar0_or(p);
}

FERMI_BUILTIN int atomicAdd(int *p, int v)
{
    return __nvvm_atom_add_gen_i(p, v);
}

FERMI_BUILTIN unsigned atomicAdd(unsigned *p, unsigned v)
{
    return (unsigned)__nvvm_atom_add_gen_i((int *)p, (int)v);
}

#define FERMI_HALF_ASM 1
extern __shared__ float4 fermi_dynamic_shared[];
#define DYNAMIC_SHARED(type, name) type *const name = (type *)fermi_dynamic_shared

#endif
