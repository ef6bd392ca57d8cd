#include "../kernels.h"
#include "blocks.h"

AVX2 void avx2_dequantize_q8_0(const dequantize_args *a, int64_t begin, int64_t end)
{
    int64_t blocks = a->n / BLOCK;
    for (int64_t item = begin; item < end; item++) {
        int64_t row = a->row_ids ? a->row_ids[item] : a->first_row + item, r = row % GROUP;
        const q8_0_x8 *w = (const q8_0_x8 *)a->w + row / GROUP * blocks;
        float *y = a->y + item * a->n;
        for (int64_t b = 0; b < blocks; b++, w++, y += BLOCK) {
            float d = f16_to_f32(w->d[r]);
            store_scaled(y, gather_codes(w->qs[0][r]), d);
            store_scaled(y + 16, gather_codes(w->qs[4][r]), d);
        }
    }
}
