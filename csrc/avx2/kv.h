/* Rows of the key/value cache in vectors; ../scalar/kv.h has the layout and the meaning of every byte. */
#ifndef FERMI_AVX2_KV_H
#define FERMI_AVX2_KV_H

#include "../scalar/kv.h"
#include "blocks.h"

/* 32 codes of one scale as floats. */
INLINE AVX2 void store_codes(const uint8_t *codes, const uint8_t *scale, float *out)
{
    uint16_t half;
    memcpy(&half, scale, sizeof half);
    float d = f16_to_f32(half);
    store_scaled(out, _mm_loadu_si128((const __m128i *)codes), d);
    store_scaled(out + 16, _mm_loadu_si128((const __m128i *)(codes + 16)), d);
}

/* Elements first..first+n of a row as floats; first is a multiple of 32. */
INLINE AVX2 void load_values(int64_t format, const uint8_t *row, int64_t head_dim, int64_t first, int64_t n, float *out)
{
    int64_t i = 0;
    if (format == KV_F32)
        for (; i + 8 <= n; i += 8)
            _mm256_storeu_si256((__m256i *)(out + i), load_bytes(row + 4 * (first + i)));
    else if (format == KV_F16)
        for (; i + 8 <= n; i += 8)
            _mm256_storeu_ps(out + i, f16_numbers(row + 2 * (first + i)));
    else
        for (; i < n; i += BLOCK)
            store_codes(row + first + i, row + head_dim + 2 * ((first + i) / BLOCK), out + i);
    if (i < n)
        kv_values(format, row, head_dim, first + i, n - i, out + i);
}

#endif
