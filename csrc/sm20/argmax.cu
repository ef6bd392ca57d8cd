#include "fermi.cuh"

#define BLOCK 256

/* Whether x at i comes before y at j: the larger, of equals the lower index; NaN never. An index of -1 is none. */
INLINE bool before(float x, int i, float y, int j)
{
    return i >= 0 && x == x && (j < 0 || x > y || (x == y && i < j));
}

INLINE void choose(float *values, int *indices)
{
    int t = (int)threadIdx.x;
    for (int s = BLOCK / 2; s > 0; s /= 2) {
        __syncthreads();
        if (t < s && before(values[t + s], indices[t + s], values[t], indices[t])) {
            values[t] = values[t + s];
            indices[t] = indices[t + s];
        }
    }
    __syncthreads();
}

extern "C" __global__ __launch_bounds__(BLOCK) void argmax_part(argmax_args a)
{
    __shared__ float values[BLOCK];
    __shared__ int indices[BLOCK];
    int t = (int)threadIdx.x, best = -1, step = (int)gridDim.x * BLOCK;
    float value = 0.0f;
#pragma unroll 4
    for (int64_t i = (int64_t)blockIdx.x * BLOCK + t; i < a.n; i += step) {
        float x = a.x[i];
        if (before(x, (int)i, value, best)) {
            value = x;
            best = (int)i;
        }
    }
    values[t] = value;
    indices[t] = best;
    choose(values, indices);
    if (t == 0) {
        a.part_x[blockIdx.x] = values[0];
        a.part_index[blockIdx.x] = indices[0];
    }
}

extern "C" __global__ __launch_bounds__(BLOCK) void argmax_join(argmax_args a)
{
    __shared__ float values[BLOCK];
    __shared__ int indices[BLOCK];
    int t = (int)threadIdx.x;
    values[t] = t < a.parts ? a.part_x[t] : 0.0f;
    indices[t] = t < a.parts ? a.part_index[t] : -1;
    choose(values, indices);
    if (t == 0)
        *a.index = indices[0];
}
