#include "../kernels.h"
#include "../scalar/kv.h"
#include "target.h"

#include <immintrin.h>

static AVX2 void avx2_put_halves(const float *x, uint8_t *row, int64_t head_dim)
{
    int64_t i = 0;
    for (; i + 8 <= head_dim; i += 8)
        _mm_storeu_si128((__m128i *)(row + 2 * i), _mm256_cvtps_ph(_mm256_loadu_ps(x + i), _MM_FROUND_TO_NEAREST_INT));
    for (; i < head_dim; i++) {
        uint16_t half = f32_to_f16(x[i]);
        memcpy(row + 2 * i, &half, sizeof half);
    }
}

static void put(int64_t format, const float *x, uint8_t *row, int64_t head_dim)
{
    if (format == KV_F32)
        memcpy(row, x, (size_t)head_dim * sizeof *x);
    else if (format == KV_Q8_0)
        kv_put_codes(avx2_quantize_q8_0, x, row, head_dim);
    else
        avx2_put_halves(x, row, head_dim);
}

void avx2_kv_append(const kv_append_args *a, int64_t begin, int64_t end)
{
    kv_append_rows(a, begin, end, put);
}
