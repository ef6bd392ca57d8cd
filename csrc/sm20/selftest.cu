#include "fermi.cuh"

#define BLOCK 256

extern "C" __global__ __launch_bounds__(BLOCK) void selftest(selftest_args a)
{
    __shared__ uint32_t tile[BLOCK];
    int64_t first = (int64_t)blockIdx.x * BLOCK;
    int count = (int)min_of<int64_t>(BLOCK, a.n - first);
    int i = (int)threadIdx.x;
    if (i < count)
        tile[i] = a.x[first + i];
    __syncthreads();
    if (i >= count)
        return;
    a.y[first + i] = tile[count - 1 - i] * 1664525u + 1013904223u;
    uint32_t bits = tile[i];
    float x = float_of(0x3f800000u | (bits & 0x7fffffu));
    float *f = a.f + (first + i) * 4;
    f[0] = x / 3.0f;
    f[1] = sqrtf(x);
    f[2] = fmaf(x, x, -1.0f);
    f[3] = half_to_float((uint16_t)(bits & 0x7fffu));
}
