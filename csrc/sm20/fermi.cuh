/* The one header of every csrc/sm20/<op>.cu. It makes the same source compile three ways:
 *   nvcc <= 8.0  -arch=sm_20 (-std=c++11), with the toolkit's own headers;
 *   clang >= 14  for sm_20 without any CUDA toolkit (fermi_engine/kernels/ptx.py has the flags);
 *   g++, clang++ for the emulator: FERMI_EMULATED is defined, csrc/emulator/device.h stands in for the device.
 *
 * What it offers, beside the CUDA keywords, threadIdx, blockIdx, blockDim, gridDim and __syncthreads():
 *   fmaf, fmaxf, fminf, fabsf, sqrtf (correctly rounded), min_of, max_of, operator / (correctly rounded);
 *   float2, float4, int2, int4, uint2, uint4 and make_<type>;
 *   float_of, bits_of, double_of, bits_of_double; half_to_float, float_to_half; popcount;
 *   __syncthreads_count/_and/_or, warp_ballot, atomicAdd (int, unsigned);
 *   reread_thread, reread_block_x, reread_block_y: threadIdx.x, blockIdx.x and .y read anew; what is made of them behind a
 *   loop takes no registers in it;
 *   DYNAMIC_SHARED(type, name): the launch's dynamic shared memory, aligned to 16 bytes;
 *   math.cuh: f32_exp, f32_log1p, f32_tanh, f32_sin, f32_cos, f32_sigmoid, f32_silu, f32_softplus, f32_rsqrt,
 *   f32_gelu_tanh, f32_gelu_erf;
 *   ops.h: the argument structs.
 *
 * Rules for a kernel: extern "C" __global__ void <op>_<part>(<op>_args a), declared by an ENTRY line of ops.h. Blocks of at
 * most 1024 threads, grids of at most 65535 each way, 48 KiB of shared memory, 63 registers: newer cards hold kernels without
 * launch bounds to 64, and give those with them what their compiler likes. A warp is never implicitly
 * synchronous: what one thread writes and another reads has a __syncthreads() between, which every thread of the block
 * reaches, none having left. Helpers are `static __device__`, so that every .cu stands alone. Shared variables start as
 * rubbish. a * b + c may be fused on the device and is not in the emulator: write fmaf where it matters.
 */
#ifndef FERMI_CUH
#define FERMI_CUH

#if defined(__clang__) && defined(__CUDA__)
#include "clang.cuh"
#elif defined(__CUDACC__)
#include "nvcc.cuh"
#else
#define FERMI_EMULATED 1
#include "../emulator/device.h"
#endif

#include <stdint.h>

#define ENTRY(op, entry, args) extern "C" __global__ void entry(args a);
#include "ops.h"

#define INLINE static __device__ __forceinline__

template <class T> INLINE T min_of(T a, T b)
{
    return b < a ? b : a;
}

template <class T> INLINE T max_of(T a, T b)
{
    return a < b ? b : a;
}

/* ceil(a / b) for a >= 0, b > 0 */
template <class T> INLINE T blocks_of(T a, T b)
{
    return (a + b - 1) / b;
}

#include "math.cuh"

#endif
