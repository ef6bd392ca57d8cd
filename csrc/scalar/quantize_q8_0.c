#include "../kernels.h"
#include "blocks.h"

#include <math.h>

/* Below it 127 / amax would leave the range in which x * id is sure to be finite and d to be normal. */
#define TINY 0x1p-110f

/* Adding 1.5 * 2^23 leaves no fraction bits: the add itself rounds half to even. |x| < 2^22. */
static int32_t round_half_even(float x)
{
    return (int32_t)((x + 12582912.0f) - 12582912.0f);
}

static void quantize_block(const float *x, int8_t *codes, float *d, int32_t *sum)
{
    float amax = 0.0f;
    for (int i = 0; i < BLOCK; i++)
        amax = fabsf(x[i]) > amax ? fabsf(x[i]) : amax;
    *d = 0.0f;
    *sum = 0;
    if (amax < TINY) {
        memset(codes, 0, BLOCK);
        return;
    }
    *d = amax / 127.0f;
    float id = 127.0f / amax;
    for (int i = 0; i < BLOCK; i++) {
        codes[i] = (int8_t)round_half_even(x[i] * id);
        *sum += codes[i];
    }
}

void scalar_quantize_q8_0(const quantize_q8_0_args *a, int64_t begin, int64_t end)
{
    int64_t blocks = a->n / BLOCK;
    for (int64_t b = begin * blocks; b < end * blocks; b++)
        quantize_block(a->x + b * BLOCK, a->codes + b * BLOCK, a->d + b, a->sums + b);
}
