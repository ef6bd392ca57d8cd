/* What csrc/sm20/fermi.cuh stands on when the kernels are compiled for the CPU: CUDA's keywords and built-ins, one fiber per
 * CUDA thread behind them (runtime.cc). */
#ifndef FERMI_EMULATOR_DEVICE_H
#define FERMI_EMULATOR_DEVICE_H

#include <stdint.h>

#define __global__
#define __device__
#define __host__
#define __constant__
#ifndef FERMI_LIST_BOUNDS /* the build reads the bounds from the preprocessed source */
#define __launch_bounds__(...)
#endif
#define __forceinline__ inline __attribute__((always_inline))
#define __align__(n) __attribute__((aligned(n)))
/* A section of their own, so that the runtime finds, poisons and watches shared variables. */
#define __shared__ static __attribute__((section("fermi_shared")))
#define FERMI_BUILTIN static inline

struct fermi_index {
    unsigned x, y, z;
};

/* Where the running thread is; the scheduler sets it before it lets a thread go on. */
struct fermi_position {
    fermi_index thread, block, threads, blocks;
    void *dynamic_shared;
};
#pragma GCC visibility push(hidden)
extern fermi_position fermi_here;
#define threadIdx fermi_here.thread
#define blockIdx fermi_here.block
#define blockDim fermi_here.threads
#define gridDim fermi_here.blocks
#define reread_thread() ((int)threadIdx.x)
#define reread_block_x() ((int)blockIdx.x)
#define reread_block_y() ((int)blockIdx.y)
#define DYNAMIC_SHARED(type, name) type *const name = (type *)fermi_here.dynamic_shared

/* Barriers are told apart by their line: threads of a block that wait at different lines have diverged. */
int fermi_barrier(int line, int predicate);
unsigned fermi_ballot(int line, int predicate);
#define FERMI_COMPILER_BARRIER() asm volatile("" ::: "memory")
#define __syncthreads()                                                                                                 \
    do {                                                                                                                \
        FERMI_COMPILER_BARRIER();                                                                                       \
        fermi_barrier(__LINE__, 0);                                                                                     \
        FERMI_COMPILER_BARRIER();                                                                                       \
    } while (0)
#define __syncthreads_count(p) fermi_barrier(__LINE__, (p) != 0)
#define __syncthreads_or(p) (fermi_barrier(__LINE__, (p) != 0) != 0)
#define __syncthreads_and(p) (fermi_barrier(__LINE__, (p) == 0) == 0)
#define warp_ballot(p) fermi_ballot(__LINE__, (p) != 0)

unsigned fermi_atomic_add(unsigned *p, unsigned v);
#pragma GCC visibility pop

FERMI_BUILTIN int atomicAdd(int *p, int v)
{
    return (int)fermi_atomic_add((unsigned *)p, (unsigned)v);
}

FERMI_BUILTIN unsigned atomicAdd(unsigned *p, unsigned v)
{
    return fermi_atomic_add(p, v);
}

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
#define sqrtf(a) __builtin_sqrtf(a)

FERMI_BUILTIN float float_of(unsigned bits)
{
    float x;
    __builtin_memcpy(&x, &bits, sizeof x);
    return x;
}

FERMI_BUILTIN unsigned bits_of(float x)
{
    unsigned bits;
    __builtin_memcpy(&bits, &x, sizeof bits);
    return bits;
}

FERMI_BUILTIN double double_of(unsigned long long bits)
{
    double x;
    __builtin_memcpy(&x, &bits, sizeof x);
    return x;
}

FERMI_BUILTIN unsigned long long bits_of_double(double x)
{
    unsigned long long bits;
    __builtin_memcpy(&bits, &x, sizeof bits);
    return bits;
}

FERMI_BUILTIN int popcount(unsigned x)
{
    return __builtin_popcount(x);
}

#endif
