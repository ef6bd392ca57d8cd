/* Kernels with a planted fault each, and right ones beside them: tests/test_emulator.py runs them. */
#include "fermi.cuh"

#define BLOCK 128
#define I ((int)threadIdx.x)

/* y[i] = x[BLOCK - 1 - i]; without the barrier where a.flag is set. */
extern "C" __global__ void planted_reverse(planted_args a)
{
    __shared__ float tile[BLOCK];
    tile[I] = a.x[I];
    if (!a.flag)
        __syncthreads();
    a.y[I] = tile[BLOCK - 1 - I];
}

/* Sum of 32 floats as if a warp ran in lockstep (flag) or with barriers. */
extern "C" __global__ void planted_warp_sum(planted_args a)
{
    __shared__ float part[32];
    part[I] = a.x[I];
    __syncthreads();
    for (int step = 16; step > 0; step /= 2) {
        if (I < step)
            part[I] += part[I + step];
        if (!a.flag)
            __syncthreads();
    }
    if (I == 0)
        a.y[0] = part[0];
}

/* flag 0: nothing; 1: half of the block skips a barrier; 2: two barriers in two branches; 3: some threads leave before one;
 * 4: a ballot that half of a warp skips; 5: half of a warp at a barrier, half at a ballot; 6: each half at a ballot. */
extern "C" __global__ void planted_diverge(planted_args a)
{
    unsigned mask = 0;
    if (a.flag == 1 && I < BLOCK / 2)
        __syncthreads();
    if (a.flag == 2) {
        if (I % 2)
            __syncthreads();
        else
            __syncthreads();
    }
    if (a.flag == 3 && I >= BLOCK - 3)
        return;
    if (a.flag == 4 && I % 32 < 16)
        mask = warp_ballot(1);
    if (a.flag == 5) {
        if (I % 32 < 16)
            mask = warp_ballot(1);
        else
            __syncthreads();
    }
    if (a.flag == 6) {
        if (I % 32 < 16)
            mask = warp_ballot(1);
        else
            mask = warp_ballot(1);
    }
    __syncthreads();
    a.y[I] = (float)(mask & 1);
}

/* Two threads write an element: flag 1 of shared, 2 of device memory; 3: of both, with a barrier between. */
extern "C" __global__ void planted_clash(planted_args a)
{
    __shared__ float tile[2];
    if (a.flag == 3) {
        if (I == 0)
            tile[0] = a.y[0] = 1.0f;
        __syncthreads();
        if (I == 1)
            tile[0] = a.y[0] = 2.0f;
    } else if (I < 2) {
        if (a.flag == 1)
            tile[0] = (float)I;
        else
            a.y[0] = (float)I;
    }
    __syncthreads();
    if (I == 0)
        a.y[1] = tile[0];
}

/* y[i + offset] = x[i + n] */
extern "C" __global__ void planted_offset(planted_args a)
{
    a.y[I + a.offset] = a.x[I + a.n];
}

/* A byte of shared memory that nobody wrote; dynamic memory of `n` floats, written up to `offset` floats beyond its end. */
extern "C" __global__ void planted_shared(planted_args a)
{
    __shared__ float tile[BLOCK];
    DYNAMIC_SHARED(float, more);
    if (a.flag == 1)
        more[a.n + a.offset] = 1.0f;
    a.y[I] = a.flag == 2 ? more[I] : tile[I];
    tile[I] = 7.0f;
}

/* An index beyond an array of shared memory, with another array behind it. */
extern "C" __global__ void planted_index(planted_args a)
{
    __shared__ float first[4][BLOCK];
    __shared__ float second[BLOCK];
    second[I] = 2.0f;
    first[a.n][I + a.offset] = 1.0f;
    __syncthreads();
    a.y[I] = second[I] + first[3][I];
}

/* Every block writes y[blockIdx.x]; flag 1: and reads its neighbour's; flag 2: and all write one element; 3: all add to one. */
extern "C" __global__ void planted_blocks(planted_args a)
{
    if (I)
        return;
    int b = (int)blockIdx.x, next = (b + 1) % (int)gridDim.x;
    a.y[b] = 1.0f;
    if (a.flag == 1)
        a.y[b] += a.x == a.y ? a.y[next] : 0.0f;
    if (a.flag == 2)
        a.y[0] = (float)b;
    if (a.flag == 3)
        atomicAdd((int *)a.z, b);
}

extern "C" __global__ void planted_vector(planted_args a)
{
    float4 v = *(const float4 *)(a.x + a.offset);
    a.y[0] = v.x + (float)(1 << a.n);
}

extern "C" __global__ void planted_fault(planted_args a)
{
    a.y[0] = *(const float *)(a.n);
}

/* y[0..3]: how many, whether all, whether any of the block have x > 0, and the warp's ballot. */
extern "C" __global__ __launch_bounds__(4 * 32, 2) void planted_votes(planted_args a)
{
    int p = a.x[I] > 0.0f;
    int count = __syncthreads_count(p), all = __syncthreads_and(p), any = __syncthreads_or(p);
    unsigned mask = warp_ballot(p);
    if (I == 0) {
        a.y[0] = (float)count;
        a.y[1] = (float)all;
        a.y[2] = (float)any;
    }
    if (I % 32 == 0)
        a.y[3 + I / 32] = (float)popcount(mask);
}

/* Static shared memory beyond what the card has. */
extern "C" __global__ void planted_too_much(planted_args a)
{
    __shared__ float tile[48 * 256 + 1];
    tile[I] = a.x[I];
    __syncthreads();
    a.y[I] = tile[a.n];
}

extern "C" __global__ void planted_big_arguments(planted_big_args a)
{
    a.y[0] = a.values[a.n];
}

extern "C" __global__ void planted_where(planted_args a)
{
    int64_t thread = threadIdx.x + blockDim.x * (threadIdx.y + (int64_t)blockDim.y * threadIdx.z);
    int64_t block = blockIdx.x + gridDim.x * (blockIdx.y + (int64_t)gridDim.y * blockIdx.z);
    a.y[block * blockDim.x * blockDim.y * blockDim.z + thread] += (float)(block * 1000 + thread);
}

/* y[i] = f(x[i]), f by flag. */
extern "C" __global__ void planted_math(planted_args a)
{
    int64_t i = (int64_t)blockIdx.x * blockDim.x + threadIdx.x;
    if (i >= a.n)
        return;
    float x = a.x[i], y = 0.0f;
    switch (a.flag) {
    case 0: y = f32_exp(x); break;
    case 1: y = f32_log1p(x); break;
    case 2: y = f32_tanh(x); break;
    case 3: y = f32_sin(x); break;
    case 4: y = f32_cos(x); break;
    case 5: y = f32_sigmoid(x); break;
    case 6: y = f32_silu(x); break;
    case 7: y = f32_softplus(x); break;
    case 8: y = f32_rsqrt(x); break;
    case 9: y = half_to_float((uint16_t)(bits_of(x) & 0xffffu)); break;
    case 10: y = float_of(float_to_half(x)); break;
    }
    a.y[i] = y;
}
