#include "fermi.cuh"

#define BLOCK 256
#define TOKENS 32 /* of one thread */

/* Row i of the tail followed by x. */
INLINE float conv_input(const conv1d_silu_args &a, int64_t i, int64_t channel)
{
    int64_t before = a.taps - 1;
    return i < before ? a.tail[i * a.channels + channel] : a.x[(i - before) * a.channels + channel];
}

INLINE void conv_any(const conv1d_silu_args &a, int64_t channel, int64_t first, int64_t end)
{
    for (int64_t t = first; t < end; t++) {
        float y = 0.0f;
        for (int64_t j = 0; j < a.taps; j++)
            y = fmaf(a.w[j * a.channels + channel], conv_input(a, t + j, channel), y);
        a.y[t * a.channels + channel] = f32_silu(y);
    }
}

/* The same sums with weights and the last inputs in registers. */
INLINE void conv_four(const conv1d_silu_args &a, int64_t channel, int64_t first, int64_t end)
{
    const float *w = a.w + channel;
    float w0 = w[0], w1 = w[a.channels], w2 = w[2 * a.channels], w3 = w[3 * a.channels];
    float m0 = conv_input(a, first, channel), m1 = conv_input(a, first + 1, channel);
    float m2 = conv_input(a, first + 2, channel);
    for (int64_t t = first; t < end; t++) {
        float m3 = a.x[t * a.channels + channel];
        a.y[t * a.channels + channel] = f32_silu(fmaf(w3, m3, fmaf(w2, m2, fmaf(w1, m1, fmaf(w0, m0, 0.0f)))));
        m0 = m1;
        m1 = m2;
        m2 = m3;
    }
}

extern "C" __global__ __launch_bounds__(BLOCK) void conv1d_silu(conv1d_silu_args a)
{
    int64_t channel = (int64_t)blockIdx.x * BLOCK + threadIdx.x;
    if (channel >= a.channels)
        return;
    for (int64_t first = (int64_t)blockIdx.y * TOKENS; first < a.tokens; first += (int64_t)gridDim.y * TOKENS) {
        int64_t end = min_of<int64_t>(first + TOKENS, a.tokens);
        if (a.taps == 4)
            conv_four(a, channel, first, end);
        else
            conv_any(a, channel, first, end);
    }
}

/* In place: row i of the new tail is row tokens + i of the old one followed by x, which no earlier step has written. */
extern "C" __global__ __launch_bounds__(BLOCK) void conv1d_silu_tail(conv1d_silu_args a)
{
    int64_t channel = (int64_t)blockIdx.x * BLOCK + threadIdx.x;
    if (channel >= a.channels)
        return;
    for (int64_t i = 0; i < a.taps - 1; i++)
        a.tail[i * a.channels + channel] = conv_input(a, a.tokens + i, channel);
}
