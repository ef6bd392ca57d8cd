/* A vector is four channels of a token. Tokens outside, channels inside: all rows are read in the order they lie in. */
#include "../kernels.h"
#include "lanes.h"
#include "math.h"

enum { MAX_TAPS = 16 };

/* Row i of the tail followed by the new rows. */
static const float *input_row(const conv1d_silu_args *a, int64_t i)
{
    int64_t kept = a->taps - 1;
    return i < kept ? a->tail + i * a->channels : a->x + (i - kept) * a->channels;
}

SSSE3 void ssse3_conv1d_silu(const conv1d_silu_args *a, int64_t begin, int64_t end)
{
    for (int64_t t = 0; t < a->tokens; t++) {
        const float *rows[MAX_TAPS];
        for (int64_t tap = 0; tap < a->taps; tap++)
            rows[tap] = input_row(a, t + tap);
        for (int64_t c = begin; c < end; c += 4) {
            __m128 sum = _mm_mul_ps(load_n(a->w + c, end - c), load_n(rows[0] + c, end - c));
            for (int64_t tap = 1; tap < a->taps; tap++) {
                __m128 weight = load_n(a->w + tap * a->channels + c, end - c);
                sum = _mm_add_ps(sum, _mm_mul_ps(weight, load_n(rows[tap] + c, end - c)));
            }
            store_n(a->y + t * a->channels + c, v_silu(sum), end - c);
        }
    }
    for (int64_t i = 0; i < a->taps - 1; i++) { /* upwards: with few tokens the tail moves within itself */
        const float *row = input_row(a, a->tokens + i);
        for (int64_t c = begin; c < end; c += 4)
            store_n(a->tail + i * a->channels + c, load_n(row + c, end - c), end - c);
    }
}
