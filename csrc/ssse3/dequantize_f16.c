#include "../kernels.h"
#include "blocks.h"

INLINE SSSE3 void eight_values(const uint8_t *halves, float *y)
{
    const __m128i zero = _mm_setzero_si128(), h = load_bytes(halves);
    _mm_storeu_ps(y, f16_values(_mm_unpacklo_epi16(zero, h)));
    _mm_storeu_ps(y + 4, f16_values(_mm_unpackhi_epi16(zero, h)));
}

SSSE3 void ssse3_dequantize_f16(const dequantize_args *a, int64_t begin, int64_t end)
{
    for (int64_t item = begin; item < end; item++) {
        int64_t row = a->row_ids ? a->row_ids[item] : a->first_row + item, i = 0;
        const uint8_t *w = a->w + row * a->n * 2;
        float *y = a->y + item * a->n;
        for (; i + 8 <= a->n; i += 8)
            eight_values(w + 2 * i, y + i);
        for (; i < a->n; i++) {
            uint16_t half;
            memcpy(&half, w + 2 * i, sizeof half);
            y[i] = f16_to_f32(half);
        }
    }
}
