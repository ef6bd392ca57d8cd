#include "../kernels.h"
#include "blocks.h"

/* Below it 127 / amax would leave the range in which x * id is sure to be finite and d to be normal. */
#define TINY 0x1p-110f

#define INFINITE 0x7f800000u /* bits of infinity */

/* Adding 1.5 * 2^23 leaves no fraction bits: the add itself rounds half to even. |x| < 2^22. */
static int32_t round_half_even(float x)
{
    return (int32_t)((x + 12582912.0f) - 12582912.0f);
}

static void quantize_block(const float *x, int8_t *codes, float *d, int32_t *sum)
{
    uint32_t most = 0; /* without their sign, floats are ordered as their bits are, NaN above infinity */
    for (int i = 0; i < BLOCK; i++) {
        uint32_t bits;
        memcpy(&bits, x + i, sizeof bits);
        bits &= 0x7fffffff;
        most = bits > most ? bits : most;
    }
    float amax;
    memcpy(&amax, &most, sizeof amax);
    *sum = 0;
    if (most >= INFINITE || amax < TINY) {
        *d = most >= INFINITE ? __builtin_nanf("") : 0.0f;
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
