#include "../kernels.h"
#include "blocks.h"

void scalar_dequantize_f16(const dequantize_args *a, int64_t begin, int64_t end)
{
    for (int64_t item = begin; item < end; item++) {
        int64_t row = a->row_ids ? a->row_ids[item] : a->first_row + item;
        for (int64_t i = 0; i < a->n; i++) {
            uint16_t half;
            memcpy(&half, a->w + (row * a->n + i) * 2, sizeof half);
            a->y[item * a->n + i] = f16_to_f32(half);
        }
    }
}
