#include "../kernels.h"
#include "blocks.h"

AVX2 void avx2_dequantize_f16(const dequantize_args *a, int64_t begin, int64_t end)
{
    for (int64_t item = begin; item < end; item++) {
        int64_t row = a->row_ids ? a->row_ids[item] : a->first_row + item, i = 0;
        const uint8_t *w = a->w + row * a->n * 2;
        float *y = a->y + item * a->n;
        for (; i + 8 <= a->n; i += 8)
            _mm256_storeu_ps(y + i, f16_values(w + 2 * i));
        for (; i < a->n; i++) {
            uint16_t half;
            memcpy(&half, w + 2 * i, sizeof half);
            y[i] = f16_to_f32(half);
        }
    }
}
