#include "rows.cuh"

extern "C" __global__ __launch_bounds__(ROW_BLOCK) void gated_rms_norm(gated_rms_norm_args a)
{
    __shared__ float sums[ROW_BLOCK];
    int lanes = row_lanes(a.n), together = ROW_BLOCK / lanes, lane = (int)threadIdx.x & (lanes - 1);
    for (int64_t first = (int64_t)blockIdx.x * together; first < a.rows; first += (int64_t)gridDim.x * together) {
        int64_t row = first + threadIdx.x / lanes, n = row < a.rows ? a.n : 0, at = row * a.n;
        float scale = f32_rsqrt(square_sum(sums, a.o + at, n, lanes) / (float)a.n + a.eps);
        for (int64_t i = 4 * lane; i < n; i += 4 * lanes) {
            float4 o = load_quad(a.o + at + i, n - i), z = load_quad(a.z + at + i, n - i);
            float4 w = load_quad(a.w + i, n - i);
            o.x = o.x * scale * w.x * f32_silu(z.x);
            o.y = o.y * scale * w.y * f32_silu(z.y);
            o.z = o.z * scale * w.z * f32_silu(z.z);
            o.w = o.w * scale * w.w * f32_silu(z.w);
            store_quad(a.y + at + i, o, n - i);
        }
    }
}
