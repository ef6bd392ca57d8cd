#include "rows.cuh"

/* A thread block takes a window's heads, eight of 72 dimensions or what fits in their place, one group after another: their
 * queries, keys and values to shared memory, a score a thread, a row of the softmax a thread, four outputs a thread. */
enum { BLOCK = 128, WINDOW = 4, WIDTH = 576, PITCH = WIDTH + 4, PAIRS = WINDOW * WINDOW };

/* Rows of `width` floats from `x` on, `stride` apart, to shared memory. */
INLINE void window_load(float *to, const float *x, int64_t stride, int width)
{
    for (int i = (int)threadIdx.x; i < WINDOW * width / 4; i += BLOCK) {
        int row = i / (width / 4), column = i % (width / 4) * 4;
        *(float4 *)(to + row * PITCH + column) = *(const float4 *)(x + row * stride + column);
    }
}

INLINE float window_dot(const float *q, const float *k, int n)
{
    float sum = 0.0f;
    for (int i = 0; i < n; i += 4) {
        float4 x = *(const float4 *)(q + i), y = *(const float4 *)(k + i);
        sum = fmaf(x.w, y.w, fmaf(x.z, y.z, fmaf(x.y, y.y, fmaf(x.x, y.x, sum))));
    }
    return sum;
}

/* Scores of a row to exp(s - max), and behind them 1 / their sum. */
INLINE void window_softmax(float *s, float *rest)
{
    float top = fmaxf(fmaxf(s[0], s[1]), fmaxf(s[2], s[3]));
    for (int j = 0; j < WINDOW; j++)
        s[j] = f32_exp(s[j] - top);
    *rest = 1.0f / ((s[0] + s[1]) + (s[2] + s[3]));
}

/* Four outputs: the values below one another, weighed. */
INLINE float4 window_values(const float *s, const float *v, float rest)
{
    float4 o = make_float4(0.0f, 0.0f, 0.0f, 0.0f);
    for (int j = 0; j < WINDOW; j++) {
        float4 x = *(const float4 *)(v + j * PITCH);
        o = make_float4(fmaf(s[j], x.x, o.x), fmaf(s[j], x.y, o.y), fmaf(s[j], x.z, o.z), fmaf(s[j], x.w, o.w));
    }
    return make_float4(o.x * rest, o.y * rest, o.z * rest, o.w * rest);
}

extern "C" __global__ __launch_bounds__(BLOCK) void window_attention(window_attention_args a)
{
    __shared__ float4 rows[3 * WINDOW * PITCH / 4];
    __shared__ float score[BLOCK], rest[BLOCK / WINDOW];
    float *q = (float *)rows, *k = q + WINDOW * PITCH, *v = k + WINDOW * PITCH;
    int t = (int)threadIdx.x, dim = (int)a.head_dim, together = min_of(BLOCK / PAIRS, WIDTH / dim);
    int64_t groups = blocks_of<int64_t>(a.heads, together);
    for (int64_t item = blockIdx.x; item < a.windows * groups; item += gridDim.x) {
        int first = (int)(item % groups) * together, heads = min_of(together, (int)a.heads - first), width = heads * dim;
        int64_t token = item / groups * WINDOW, from = token * a.stride + first * dim;
        window_load(q, a.q + from, a.stride, width);
        window_load(k, a.k + from, a.stride, width);
        window_load(v, a.v + from, a.stride, width);
        __syncthreads();
        if (t < heads * PAIRS)
            score[t] = window_dot(q + t / WINDOW % WINDOW * PITCH + t / PAIRS * dim, k + t % WINDOW * PITCH + t / PAIRS * dim, dim)
                       * a.scale;
        __syncthreads();
        if (t < heads * WINDOW)
            window_softmax(score + t * WINDOW, rest + t);
        __syncthreads();
        for (int i = t; i < WINDOW * width / 4; i += BLOCK) {
            int row = i / (width / 4), column = i % (width / 4) * 4, at = column / dim * WINDOW + row;
            *(float4 *)(a.o + (token + row) * a.heads * dim + first * dim + column) =
                window_values(score + at * WINDOW, v + column, rest[at]);
        }
        __syncthreads();
    }
}
