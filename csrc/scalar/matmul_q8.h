/* Quantised weight rows times quantised activation rows, shared by the four products: y as kernels.h defines it. */
#ifndef FERMI_SCALAR_MATMUL_Q8_H
#define FERMI_SCALAR_MATMUL_Q8_H

#include "../kernels.h"
#include "blocks.h"

/* The exact integer dots of the eight rows of one stored block with 32 activation codes that add up to `sum`. */
typedef void block_dots(const uint8_t *block, const int8_t *codes, int32_t sum, int32_t isum[GROUP]);

INLINE void q4_0_dots(const uint8_t *block, const int8_t *codes, int32_t sum, int32_t isum[GROUP])
{
    const q4_0_x8 *w = (const q4_0_x8 *)block;
    for (int r = 0; r < GROUP; r++)
        isum[r] = -8 * sum;
    for (int i = 0; i < 4; i++)
        for (int r = 0; r < GROUP; r++)
            for (int j = 0; j < 4; j++)
                isum[r] += (w->qs[i][r][j] & 15) * codes[4 * i + j] + (w->qs[i][r][j] >> 4) * codes[16 + 4 * i + j];
}

INLINE void q8_0_dots(const uint8_t *block, const int8_t *codes, int32_t sum, int32_t isum[GROUP])
{
    const q8_0_x8 *w = (const q8_0_x8 *)block;
    (void)sum;
    for (int r = 0; r < GROUP; r++)
        isum[r] = 0;
    for (int i = 0; i < 8; i++)
        for (int r = 0; r < GROUP; r++)
            for (int j = 0; j < 4; j++)
                isum[r] += w->qs[i][r][j] * codes[4 * i + j];
}

/* One group of rows for one token. A block starts with its scales, whatever its format. */
INLINE void group_times_token(const matmul_q8_args *a, int64_t group, int64_t token, int64_t block_bytes, block_dots dots)
{
    int64_t blocks = a->n / BLOCK, first_row = group * GROUP, source = a->source ? a->source[token] : token;
    int rows = a->rows - first_row < GROUP ? (int)(a->rows - first_row) : GROUP;
    float y[GROUP] = {0};
    for (int64_t b = 0; b < blocks; b++) {
        const uint8_t *block = a->w + (group * blocks + b) * block_bytes;
        int32_t isum[GROUP];
        uint16_t d[GROUP];
        memcpy(d, block, sizeof d);
        dots(block, a->codes + source * a->n + b * BLOCK, a->sums[source * blocks + b], isum);
        for (int r = 0; r < GROUP; r++)
            y[r] += (float)isum[r] * (f16_to_f32(d[r]) * a->d[source * blocks + b]);
        for (int r = 0; a->isums && r < rows; r++)
            a->isums[(token * a->rows + first_row + r) * blocks + b] = isum[r];
    }
    for (int r = 0; r < rows; r++)
        a->y[token * a->y_stride + first_row + r] = y[r];
}

INLINE void matmul_q8(const matmul_q8_args *a, int64_t begin, int64_t end, int64_t block_bytes, block_dots dots)
{
    for (int64_t group = begin; group < end; group++)
        for (int64_t token = 0; token < a->tokens; token++)
            group_times_token(a, group, token, block_bytes, dots);
}

#endif
