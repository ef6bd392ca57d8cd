#include "../kernels.h"
#include "blocks.h"

void scalar_dequantize_q8_0(const dequantize_args *a, int64_t begin, int64_t end)
{
    int64_t blocks = a->n / BLOCK;
    for (int64_t item = begin; item < end; item++) {
        int64_t row = a->row_ids ? a->row_ids[item] : a->first_row + item, r = row % GROUP;
        const q8_0_x8 *w = (const q8_0_x8 *)a->w + row / GROUP * blocks;
        for (int64_t b = 0; b < blocks; b++, w++) {
            float *y = a->y + item * a->n + b * BLOCK, d = f16_to_f32(w->d[r]);
            for (int j = 0; j < BLOCK; j++)
                y[j] = (float)w->qs[j / 4][r][j % 4] * d;
        }
    }
}
