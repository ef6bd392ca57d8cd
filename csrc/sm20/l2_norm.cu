#include "rows.cuh"

extern "C" __global__ __launch_bounds__(ROW_BLOCK) void l2_norm(l2_norm_args a)
{
    __shared__ float sums[ROW_BLOCK];
    int lanes = row_lanes(a.n), together = ROW_BLOCK / lanes, lane = (int)threadIdx.x & (lanes - 1);
    int64_t rows = a.tokens * a.heads;
    for (int64_t first = (int64_t)blockIdx.x * together; first < rows; first += (int64_t)gridDim.x * together) {
        int64_t row = first + threadIdx.x / lanes, n = row < rows ? a.n : 0;
        const float *x = a.x + row / a.heads * a.token_stride + row % a.heads * a.n;
        float scale = f32_rsqrt(square_sum(sums, x, n, lanes) + a.eps);
        for (int64_t i = 4 * lane; i < n; i += 4 * lanes) {
            float4 v = load_quad(x + i, n - i);
            v.x = v.x * scale * a.scale;
            v.y = v.y * scale * a.scale;
            v.z = v.z * scale * a.scale;
            v.w = v.w * scale * a.scale;
            store_quad(a.y + row * a.n + i, v, n - i);
        }
    }
}
