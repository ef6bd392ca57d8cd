#include "gemm_entry.cuh"

extern "C" __global__ __launch_bounds__(gemm_large::THREADS) void grouped_gemm_q4_0(grouped_gemm_args a)
{
    __shared__ float4 shared[gemm_large::FLOATS / 4];
    gemm_grouped<gemm_large, q4_0_source>(a, (float *)shared);
}

extern "C" __global__ __launch_bounds__(gemm_small::THREADS) void grouped_gemm_q4_0_small(grouped_gemm_args a)
{
    __shared__ float4 shared[gemm_small::FLOATS / 4];
    gemm_grouped<gemm_small, q4_0_source>(a, (float *)shared);
}
