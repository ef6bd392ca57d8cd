#include "rows.cuh"

extern "C" __global__ __launch_bounds__(ROW_BLOCK) void rope_tables(rope_tables_args a)
{
    int64_t n = a.tokens * a.half;
    for (int64_t i = (int64_t)blockIdx.x * ROW_BLOCK + threadIdx.x; i < n; i += (int64_t)gridDim.x * ROW_BLOCK) {
        int64_t t = i / a.half, j = i % a.half;
        float angle = (float)a.positions[a.axis[j] * a.tokens + t] * a.inv_freq[j];
        a.cos[i] = f32_cos(angle);
        a.sin[i] = f32_sin(angle);
    }
}

extern "C" __global__ __launch_bounds__(ROW_BLOCK) void rope(rope_args a)
{
    unsigned half = (unsigned)a.half, heads = (unsigned)a.heads, n = (unsigned)a.tokens * heads * half;
    for (unsigned i = blockIdx.x * ROW_BLOCK + threadIdx.x; i < n; i += gridDim.x * ROW_BLOCK) {
        unsigned row = i / half, j = i % half;
        float *x = a.x + (int64_t)row * a.x_stride + j;
        int64_t angle = (int64_t)(row / heads) * half + j;
        float cos = a.cos[angle], sin = a.sin[angle], first = x[0], second = x[half];
        x[0] = fmaf(first, cos, -(second * sin));
        x[half] = fmaf(second, cos, first * sin);
    }
}
