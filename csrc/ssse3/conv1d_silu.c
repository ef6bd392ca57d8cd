/* A vector is four channels of a token. Tokens outside, channels inside: all rows are read in the order they lie in. */
#include "../kernels.h"
#include "lanes.h"
#include "math.h"

enum { MAX_TAPS = 16, COMMON_TAPS = 4 };

/* Row i of the tail followed by the new rows. */
static const float *input_row(const conv1d_silu_args *a, int64_t i)
{
    int64_t kept = a->taps - 1;
    return i < kept ? a->tail + i * a->channels : a->x + (i - kept) * a->channels;
}

/* Channels c..c+left of a token whose taps lie on `rows`. */
INLINE SSSE3 void convolve(const float *w, int64_t channels, const float *const *rows, float *y, int64_t c, int64_t taps, int64_t left)
{
    __m128 sum = _mm_mul_ps(load_n(w + c, left), load_n(rows[0] + c, left));
    for (int64_t tap = 1; tap < taps; tap++)
        sum = mul_add(sum, load_n(w + tap * channels + c, left), load_n(rows[tap] + c, left));
    store_n(y + c, v_silu(sum), left);
}

INLINE SSSE3 void convolve_row(const conv1d_silu_args *a, const float *const *rows, float *y, int64_t taps, int64_t begin, int64_t end)
{
    const float *w = a->w;
    int64_t channels = a->channels, c = begin;
    for (; c + 4 <= end; c += 4)
        convolve(w, channels, rows, y, c, taps, 4);
    if (c < end)
        convolve(w, channels, rows, y, c, taps, end - c);
}

SSSE3 void ssse3_conv1d_silu(const conv1d_silu_args *a, int64_t begin, int64_t end)
{
    for (int64_t t = 0; t < a->tokens; t++) {
        const float *rows[MAX_TAPS];
        for (int64_t tap = 0; tap < a->taps; tap++)
            rows[tap] = input_row(a, t + tap);
        if (a->taps == COMMON_TAPS)
            convolve_row(a, rows, a->y + t * a->channels, COMMON_TAPS, begin, end);
        else
            convolve_row(a, rows, a->y + t * a->channels, a->taps, begin, end);
    }
    for (int64_t i = 0; i < a->taps - 1; i++) /* upwards: with few tokens the tail moves within itself */
        memmove(a->tail + i * a->channels + begin, input_row(a, a->tokens + i) + begin, (size_t)(end - begin) * sizeof(float));
}
