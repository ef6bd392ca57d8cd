#include "../kernels.h"
#include "math.h"

/* Row i of the tail followed by the new rows. */
static const float *input_row(const conv1d_silu_args *a, int64_t i)
{
    int64_t kept = a->taps - 1;
    return i < kept ? a->tail + i * a->channels : a->x + (i - kept) * a->channels;
}

void scalar_conv1d_silu(const conv1d_silu_args *a, int64_t begin, int64_t end)
{
    for (int64_t t = 0; t < a->tokens; t++)
        for (int64_t c = begin; c < end; c++) {
            float sum = a->w[c] * input_row(a, t)[c];
            for (int64_t tap = 1; tap < a->taps; tap++)
                sum += a->w[tap * a->channels + c] * input_row(a, t + tap)[c];
            a->y[t * a->channels + c] = f32_silu(sum);
        }
    for (int64_t i = 0; i < a->taps - 1; i++) /* upwards: with few tokens the tail moves within itself */
        for (int64_t c = begin; c < end; c++)
            a->tail[i * a->channels + c] = input_row(a, a->tokens + i)[c];
}
