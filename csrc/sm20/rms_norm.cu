#include "rows.cuh"

extern "C" __global__ __launch_bounds__(ROW_BLOCK) void rms_norm(rms_norm_args a)
{
    __shared__ float sums[ROW_BLOCK];
    int lanes = row_lanes(a.n), together = ROW_BLOCK / lanes, lane = (int)threadIdx.x & (lanes - 1);
    for (int64_t first = (int64_t)blockIdx.x * together; first < a.rows; first += (int64_t)gridDim.x * together) {
        int64_t row = first + threadIdx.x / lanes, n = row < a.rows ? a.n : 0;
        const float *x = a.x + row * a.x_stride;
        float *y = a.y + row * a.y_stride;
        float scale = f32_rsqrt(square_sum(sums, x, n, lanes) / (float)a.n + a.eps);
        for (int64_t i = 4 * lane; i < n; i += 4 * lanes) {
            float4 v = load_quad(x + i, n - i), w = load_quad(a.w + i, n - i);
            v.x = v.x * scale * (a.offset + w.x);
            v.y = v.y * scale * (a.offset + w.y);
            v.z = v.z * scale * (a.offset + w.z);
            v.w = v.w * scale * (a.offset + w.w);
            store_quad(y + i, v, n - i);
        }
    }
}
