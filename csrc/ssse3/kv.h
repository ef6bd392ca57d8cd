/* Rows of the key/value cache in vectors; ../scalar/kv.h has the layout and the meaning of every byte. */
#ifndef FERMI_SSSE3_KV_H
#define FERMI_SSSE3_KV_H

#include "../scalar/kv.h"
#include "blocks.h"

/* The halves of four floats but for their signs, each in its 32-bit lane. Below 2^-14 a half counts in units of 2^-24, which
 * are the last places of numbers from 0.5 to 1: adding 0.5 rounds to them, half to even as MXCSR says during a kernel. */
INLINE SSSE3 __m128i half_magnitudes(__m128 x)
{
    const __m128i one_half = _mm_set1_epi32(0x3f000000);
    __m128i bits = _mm_and_si128(_mm_castps_si128(x), _mm_set1_epi32(0x7fffffff));
    __m128i odd = _mm_and_si128(_mm_srli_epi32(bits, 13), _mm_set1_epi32(1));
    __m128i normal = _mm_srli_epi32(_mm_add_epi32(_mm_add_epi32(bits, odd), _mm_set1_epi32(0xfff - (112 << 23))), 13);
    __m128i small = _mm_sub_epi32(_mm_castps_si128(_mm_add_ps(_mm_castsi128_ps(bits), _mm_castsi128_ps(one_half))), one_half);
    __m128i is_small = _mm_cmplt_epi32(bits, _mm_set1_epi32(0x38800000));
    __m128i is_large = _mm_cmpgt_epi32(bits, _mm_set1_epi32(0x477fffff)), is_nan = _mm_cmpgt_epi32(bits, _mm_set1_epi32(0x7f800000));
    __m128i nan = _mm_or_si128(_mm_set1_epi32(0x0200), _mm_and_si128(_mm_srli_epi32(bits, 13), _mm_set1_epi32(0x3ff)));
    __m128i large = _mm_or_si128(_mm_set1_epi32(0x7c00), _mm_and_si128(is_nan, nan));
    __m128i half = _mm_or_si128(_mm_and_si128(is_small, small), _mm_andnot_si128(is_small, normal));
    return _mm_or_si128(_mm_and_si128(is_large, large), _mm_andnot_si128(is_large, half));
}

/* Eight floats as halves. */
INLINE SSSE3 __m128i eight_halves(const float *x)
{
    __m128 low = _mm_loadu_ps(x), high = _mm_loadu_ps(x + 4);
    __m128i negative = _mm_packs_epi32(_mm_srai_epi32(_mm_castps_si128(low), 31), _mm_srai_epi32(_mm_castps_si128(high), 31));
    return _mm_or_si128(_mm_packs_epi32(half_magnitudes(low), half_magnitudes(high)), _mm_slli_epi16(negative, 15));
}

/* Eight halves as floats. Shifted right by 3 with its sign, a normal half is a float whose exponent is 112 too low. */
INLINE SSSE3 void store_halves(__m128i h, float *out)
{
    const __m128i zero = _mm_setzero_si128(), kept = _mm_set1_epi32((int)0x8fffe000), bias = _mm_set1_epi32(112 << 23);
    __m128i twice = _mm_add_epi16(h, h); /* without its sign: not normal below 0x0800 and from 0xf800 on */
    __m128i low = _mm_unpacklo_epi16(zero, h), high = _mm_unpackhi_epi16(zero, h);
    if (_mm_movemask_epi8(_mm_cmpgt_epi16(_mm_add_epi16(twice, _mm_set1_epi16(0x7800)), _mm_set1_epi16(0x6fff)))) {
        _mm_storeu_ps(out, f16_values(low));
        _mm_storeu_ps(out + 4, f16_values(high));
        return;
    }
    low = _mm_add_epi32(_mm_and_si128(_mm_srai_epi32(low, 3), kept), bias);
    high = _mm_add_epi32(_mm_and_si128(_mm_srai_epi32(high, 3), kept), bias);
    _mm_storeu_ps(out, _mm_castsi128_ps(low));
    _mm_storeu_ps(out + 4, _mm_castsi128_ps(high));
}

/* 32 codes of one scale as floats. */
INLINE SSSE3 void store_codes(const uint8_t *codes, const uint8_t *scale, float *out)
{
    uint16_t half;
    memcpy(&half, scale, sizeof half);
    float d = f16_to_f32(half);
    store_scaled(out, load_bytes(codes), d);
    store_scaled(out + 16, load_bytes(codes + 16), d);
}

/* Elements first..first+n of a row as floats; first is a multiple of 32. */
INLINE SSSE3 void load_values(int64_t format, const uint8_t *row, int64_t head_dim, int64_t first, int64_t n, float *out)
{
    int64_t i = 0;
    if (format == KV_F32)
        for (; i + 8 <= n; i += 8) {
            _mm_storeu_si128((__m128i *)(out + i), load_bytes(row + 4 * (first + i)));
            _mm_storeu_si128((__m128i *)(out + i + 4), load_bytes(row + 4 * (first + i) + 16));
        }
    else if (format == KV_F16)
        for (; i + 8 <= n; i += 8)
            store_halves(load_bytes(row + 2 * (first + i)), out + i);
    else
        for (; i < n; i += BLOCK)
            store_codes(row + first + i, row + head_dim + 2 * ((first + i) / BLOCK), out + i);
    if (i < n)
        kv_values(format, row, head_dim, first + i, n - i, out + i);
}

#endif
