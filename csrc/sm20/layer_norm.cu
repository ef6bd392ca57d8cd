#include "rows.cuh"

/* The elements of a row, summed as square_sum sums squares. */
INLINE float plain_sum(float *shared, const float *x, int64_t n, int lanes)
{
    float acc = 0.0f;
    for (int64_t i = 4 * (threadIdx.x & (lanes - 1)); i < n; i += 4 * lanes) {
        float4 v = load_quad(x + i, n - i);
        acc = (((acc + v.x) + v.y) + v.z) + v.w;
    }
    return row_sum(shared, acc, lanes);
}

/* v - mean; zeros from the `left`th on, which are not there. */
INLINE float4 centred(float4 v, float mean, int64_t left)
{
    return make_float4(v.x - mean, left > 1 ? v.y - mean : 0.0f, left > 2 ? v.z - mean : 0.0f, left > 3 ? v.w - mean : 0.0f);
}

INLINE float centred_square_sum(float *shared, const float *x, float mean, int64_t n, int lanes)
{
    float acc = 0.0f;
    for (int64_t i = 4 * (threadIdx.x & (lanes - 1)); i < n; i += 4 * lanes)
        acc = add_squares(acc, centred(load_quad(x + i, n - i), mean, n - i));
    return row_sum(shared, acc, lanes);
}

extern "C" __global__ __launch_bounds__(ROW_BLOCK) void layer_norm(layer_norm_args a)
{
    __shared__ float sums[ROW_BLOCK];
    int lanes = row_lanes(a.n), together = ROW_BLOCK / lanes, lane = (int)threadIdx.x & (lanes - 1);
    for (int64_t first = (int64_t)blockIdx.x * together; first < a.rows; first += (int64_t)gridDim.x * together) {
        int64_t row = first + threadIdx.x / lanes, n = row < a.rows ? a.n : 0;
        const float *x = a.x + row * a.n;
        float *y = a.y + row * a.n;
        float mean = plain_sum(sums, x, n, lanes) / (float)a.n;
        float scale = f32_rsqrt(centred_square_sum(sums, x, mean, n, lanes) / (float)a.n + a.eps);
        for (int64_t i = 4 * lane; i < n; i += 4 * lanes) {
            float4 v = centred(load_quad(x + i, n - i), mean, n - i);
            float4 w = load_quad(a.w + i, n - i), b = load_quad(a.b + i, n - i);
            v.x = fmaf(v.x * scale, w.x, b.x);
            v.y = fmaf(v.y * scale, w.y, b.y);
            v.z = fmaf(v.z * scale, w.z, b.z);
            v.w = fmaf(v.w * scale, w.w, b.w);
            store_quad(y + i, v, n - i);
        }
    }
}
