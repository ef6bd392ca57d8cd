/* What the kernels over rows of floats share: reading and writing four floats at a time wherever a row starts and ends,
 * walking all quads of many rows, and sums along a row whose order depends on the row's length only. */
#ifndef FERMI_ROWS_CUH
#define FERMI_ROWS_CUH

#include "fermi.cuh"

#define ROW_BLOCK 256

INLINE bool is_quad(const float *p, int64_t left)
{
    return left >= 4 && ((uintptr_t)p & 15) == 0;
}

/* p[0..3]; zeros from p[left] on. */
INLINE float4 load_quad(const float *p, int64_t left)
{
#ifndef FERMI_EMULATED /* a compiler of the host may load an aligned type before it has looked at the address */
    if (is_quad(p, left))
        return *(const float4 *)p;
#endif
    return make_float4(left > 0 ? p[0] : 0.0f, left > 1 ? p[1] : 0.0f, left > 2 ? p[2] : 0.0f, left > 3 ? p[3] : 0.0f);
}

/* p[0..3] = v, short of p[left]. */
INLINE void store_quad(float *p, float4 v, int64_t left)
{
#ifndef FERMI_EMULATED
    if (is_quad(p, left)) {
        *(float4 *)p = v;
        return;
    }
#endif
    if (left > 0)
        p[0] = v.x;
    if (left > 1)
        p[1] = v.y;
    if (left > 2)
        p[2] = v.z;
    if (left > 3)
        p[3] = v.w;
}

/* Quads of [rows, n], each row's last one perhaps short: a thread takes one, then the one a whole grid further on.
 * rows * n stays below 2^31, which spares 64-bit divisions. */
struct quad_walk {
    unsigned index, count, width, step;

    __device__ __forceinline__ quad_walk(int64_t rows, int64_t n)
    {
        width = (unsigned)blocks_of<int64_t>(n, 4);
        count = (unsigned)rows * width;
        index = blockIdx.x * blockDim.x + threadIdx.x;
        step = gridDim.x * blockDim.x;
    }

    __device__ __forceinline__ bool more() const
    {
        return index < count;
    }

    __device__ __forceinline__ void next()
    {
        index += step;
    }

    __device__ __forceinline__ int64_t row() const
    {
        return index / width;
    }

    __device__ __forceinline__ int64_t column() const
    {
        return index % width * 4;
    }
};

/* Threads that share a row of n floats: the power of two in 32..256 that leaves each one quad, or more beyond 1024. */
INLINE int row_lanes(int64_t n)
{
    int lanes = 32;
    while (lanes < ROW_BLOCK && lanes * 4 < n)
        lanes *= 2;
    return lanes;
}

/* acc + the squares of a quad, in order. */
INLINE float add_squares(float acc, float4 v)
{
    return fmaf(v.w, v.w, fmaf(v.z, v.z, fmaf(v.y, v.y, fmaf(v.x, v.x, acc))));
}

/* Sum of x over the `lanes` threads of this row: lane i adds lane i + s for s = lanes / 2 .. 1. All threads of the
 * block call it; `shared` has ROW_BLOCK floats. */
INLINE float row_sum(float *shared, float x, int lanes)
{
    int t = (int)threadIdx.x, lane = t & (lanes - 1);
    __syncthreads();
    shared[t] = x;
    __syncthreads();
    for (int s = lanes / 2; s > 0; s /= 2) {
        if (lane < s)
            shared[t] += shared[t + s];
        __syncthreads();
    }
    return shared[t - lane];
}

/* The squares of a row, summed: lane i takes quads i, i + lanes, ..., then row_sum. x is not read when `n` is 0. */
INLINE float square_sum(float *shared, const float *x, int64_t n, int lanes)
{
    float acc = 0.0f;
    for (int64_t i = 4 * (threadIdx.x & (lanes - 1)); i < n; i += 4 * lanes)
        acc = add_squares(acc, load_quad(x + i, n - i));
    return row_sum(shared, acc, lanes);
}

#endif
