#include "fermi.cuh"

#define BLOCK 256

extern "C" __global__ __launch_bounds__(BLOCK) void moe_combine(moe_combine_args a)
{
    unsigned n = (unsigned)a.n, count = (unsigned)a.tokens * n;
    int k = (int)a.k;
    for (unsigned i = blockIdx.x * BLOCK + threadIdx.x; i < count; i += gridDim.x * BLOCK) {
        int64_t t = i / n;
        const float *column = a.expert_out + i % n, *weights = a.weights + t * k;
        const int32_t *row_of = a.row_of + t * k;
        float sum = 0.0f;
#pragma unroll 4
        for (int slot = 0; slot < k; slot++)
            sum = fmaf(weights[slot], column[row_of[slot] * a.n], sum);
        if (a.shared)
            sum = fmaf(f32_sigmoid(a.shared_gate[t * a.gate_stride]), a.shared[i], sum);
        a.y[i] = sum;
    }
}
