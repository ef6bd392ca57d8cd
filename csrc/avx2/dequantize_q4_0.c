#include "../kernels.h"
#include "blocks.h"

AVX2 void avx2_dequantize_q4_0(const dequantize_args *a, int64_t begin, int64_t end)
{
    const __m128i nibble = _mm_set1_epi8(15), eight = _mm_set1_epi8(8);
    int64_t blocks = a->n / BLOCK;
    for (int64_t item = begin; item < end; item++) {
        int64_t row = a->row_ids ? a->row_ids[item] : a->first_row + item, r = row % GROUP;
        const q4_0_x8 *w = (const q4_0_x8 *)a->w + row / GROUP * blocks;
        float *y = a->y + item * a->n;
        for (int64_t b = 0; b < blocks; b++, w++, y += BLOCK) {
            float d = f16_to_f32(w->d[r]);
            __m128i both = gather_codes(w->qs[0][r]);
            store_scaled(y, _mm_sub_epi8(_mm_and_si128(both, nibble), eight), d);
            store_scaled(y + 16, _mm_sub_epi8(_mm_and_si128(_mm_srli_epi16(both, 4), nibble), eight), d);
        }
    }
}
