#include "rows.cuh"

#define LARGEST 3.402823466e38f

extern "C" __global__ __launch_bounds__(ROW_BLOCK) void gdn_gates(gdn_gates_args a)
{
    int64_t n = a.tokens * a.heads;
    for (int64_t i = (int64_t)blockIdx.x * ROW_BLOCK + threadIdx.x; i < n; i += (int64_t)gridDim.x * ROW_BLOCK) {
        int head = (int)(i % a.heads);
        float rate = f32_exp(a.A_log[head]);
        rate = LARGEST < rate ? LARGEST : rate; /* infinity times a softplus of 0 would be NaN */
        a.g[i] = -(rate * f32_softplus(a.a[i] + a.dt_bias[head]));
        a.beta[i] = f32_sigmoid(a.b[i]);
    }
}
