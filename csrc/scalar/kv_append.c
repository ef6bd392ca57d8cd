#include "kv.h"

static void put(int64_t format, const float *x, uint8_t *row, int64_t head_dim)
{
    if (format == KV_F32)
        memcpy(row, x, (size_t)head_dim * sizeof *x);
    else if (format == KV_Q8_0)
        kv_put_codes(scalar_quantize_q8_0, x, row, head_dim);
    else
        for (int64_t i = 0; i < head_dim; i++) {
            uint16_t half = f32_to_f16(x[i]);
            memcpy(row + 2 * i, &half, sizeof half);
        }
}

void scalar_kv_append(const kv_append_args *a, int64_t begin, int64_t end)
{
    kv_append_rows(a, begin, end, put);
}
