/* Quantised weight rows times quantised activation rows; y as kernels.h defines it. */
#ifndef FERMI_SSSE3_MATMUL_Q8_H
#define FERMI_SSSE3_MATMUL_Q8_H

#include "../kernels.h"
#include "blocks.h"

#ifndef PREPARED
#define PREPARED 128
#endif
#ifndef TOKENS
#define TOKENS 4
#endif
#ifndef GROUPS
#define GROUPS 16
#endif
#ifndef PF
#define PF 2048
#endif

typedef struct {
    __m128i code[8];
    __m128i offset;
    __m128 d;
} spread_block;

INLINE SSSE3 __m128i load(const void *p) { return _mm_loadu_si128((const __m128i *)p); }

INLINE SSSE3 void spread(const matmul_q8_args *a, int64_t token, int64_t block, int64_t count, spread_block *out)
{
    int64_t at = token * (a->n / BLOCK) + block;
    for (int64_t b = 0; b < count; b++, at++, out++) {
        __m128i low = load(a->codes + at * BLOCK), high = load(a->codes + at * BLOCK + 16);
        out->code[0] = _mm_shuffle_epi32(low, 0x00);
        out->code[1] = _mm_shuffle_epi32(low, 0x55);
        out->code[2] = _mm_shuffle_epi32(low, 0xaa);
        out->code[3] = _mm_shuffle_epi32(low, 0xff);
        out->code[4] = _mm_shuffle_epi32(high, 0x00);
        out->code[5] = _mm_shuffle_epi32(high, 0x55);
        out->code[6] = _mm_shuffle_epi32(high, 0xaa);
        out->code[7] = _mm_shuffle_epi32(high, 0xff);
        out->offset = _mm_set1_epi32(8 * a->sums[at]);
        out->d = _mm_set1_ps(a->d[at]);
    }
}

INLINE SSSE3 void q4_0_half(const uint8_t *w, const spread_block *x, int64_t stride, int tokens, __m128i *isum)
{
    const __m128i mask = _mm_set1_epi8(15), ones = _mm_set1_epi16(1);
    for (int i = 0; i < 4; i++) {
        __m128i both = load(w + 32 * i);
        __m128i low = _mm_and_si128(both, mask), high = _mm_and_si128(_mm_srli_epi16(both, 4), mask);
        for (int t = 0; t < tokens; t++) {
            __m128i p = _mm_add_epi16(_mm_maddubs_epi16(low, x[t * stride].code[i]), _mm_maddubs_epi16(high, x[t * stride].code[4 + i]));
            isum[t] = i ? _mm_add_epi16(isum[t], p) : p;
        }
    }
    for (int t = 0; t < tokens; t++)
        isum[t] = _mm_sub_epi32(_mm_madd_epi16(isum[t], ones), x[t * stride].offset);
}

INLINE SSSE3 void q8_0_half(const uint8_t *w, const spread_block *x, int64_t stride, int tokens, __m128i *isum)
{
    const __m128i ones = _mm_set1_epi16(1);
    for (int i = 0; i < 8; i++) {
        __m128i code = load(w + 32 * i), magnitude = _mm_abs_epi8(code);
        for (int t = 0; t < tokens; t++) {
            __m128i p = _mm_madd_epi16(_mm_maddubs_epi16(magnitude, _mm_sign_epi8(x[t * stride].code[i], code)), ones);
            isum[t] = i ? _mm_add_epi32(isum[t], p) : p;
        }
    }
}

typedef void half_dots(const uint8_t *w, const spread_block *x, int64_t stride, int tokens, __m128i *isum);

INLINE SSSE3 void tile(const matmul_q8_args *a, int64_t group, int64_t token, int tokens, int64_t block, int64_t count, const spread_block *x, int bb, half_dots dots, int debug)
{
    int64_t blocks = a->n / BLOCK;
    const uint8_t *w = a->w + (group * blocks + block) * bb;
    int64_t rows = a->rows - group * GROUP;
    __m128 y[TOKENS][2];
    for (int t = 0; t < tokens; t++) {
        float *out = a->y + (token + t) * a->y_stride + group * GROUP;
        y[t][0] = y[t][1] = _mm_setzero_ps();
        if (block) {
            float part[GROUP] = {0};
            memcpy(part, out, (rows < GROUP ? rows : GROUP) * sizeof(float));
            y[t][0] = _mm_loadu_ps(part); y[t][1] = _mm_loadu_ps(part + 4);
        }
    }
    for (int64_t b = 0; b < count; b++, w += bb, x++) {
        __m128i halves = load(w), zero = _mm_setzero_si128();
        if (PF) for (int k = 0; k < bb; k += 64) _mm_prefetch((const char *)w + PF + k, _MM_HINT_T0);
        for (int h = 0; h < 2; h++) {
            __m128i isum[TOKENS], d = h ? _mm_unpackhi_epi16(zero, halves) : _mm_unpacklo_epi16(zero, halves);
            dots(w + 16 + 16 * h, x, count, tokens, isum);
            __m128 dw = f16_magnitude(d);
            for (int t = 0; t < tokens; t++) {
                if (debug) { int32_t is[4]; memcpy(is, &isum[t], 16);
                    for (int r = 0; r < 4 && h * 4 + r < rows; r++) a->isums[((token + t) * a->rows + group * 8 + h * 4 + r) * blocks + block + b] = is[r]; }
                y[t][h] = _mm_add_ps(y[t][h], _mm_mul_ps(_mm_cvtepi32_ps(_mm_sign_epi32(isum[t], d)), _mm_mul_ps(dw, x[t * count].d)));
            }
        }
    }
    for (int t = 0; t < tokens; t++) {
        float *out = a->y + (token + t) * a->y_stride + group * GROUP;
        if (rows >= GROUP) { _mm_storeu_ps(out, y[t][0]); _mm_storeu_ps(out + 4, y[t][1]); }
        else { float part[GROUP]; _mm_storeu_ps(part, y[t][0]); _mm_storeu_ps(part + 4, y[t][1]); memcpy(out, part, rows * sizeof(float)); }
    }
}

INLINE SSSE3 void some_tokens(const matmul_q8_args *a, int64_t begin, int64_t end, int64_t token, int tokens, int bb, half_dots dots, int debug)
{
    spread_block x[PREPARED];
    int64_t blocks = a->n / BLOCK;
    for (int64_t block = 0, count; block < blocks; block += count) {
        count = blocks - block < PREPARED / tokens ? blocks - block : PREPARED / tokens;
        for (int t = 0; t < tokens; t++)
            spread(a, token + t, block, count, x + t * count);
        for (int64_t g = begin; g < end; g++)
            tile(a, g, token, tokens, block, count, x, bb, dots, debug);
    }
}

INLINE SSSE3 void gemv(const matmul_q8_args *a, int64_t begin, int64_t end, int bb, half_dots dots)
{
    if (a->isums) some_tokens(a, begin, end, 0, 1, bb, dots, 1); else some_tokens(a, begin, end, 0, 1, bb, dots, 0);
}

INLINE SSSE3 void gemm_(const matmul_q8_args *a, int64_t begin, int64_t end, int bb, half_dots dots, int debug)
{
    for (; begin < end; begin += GROUPS) {
        int64_t stop = begin + GROUPS < end ? begin + GROUPS : end, t = 0;
        for (; t + TOKENS <= a->tokens; t += TOKENS)
            some_tokens(a, begin, stop, t, TOKENS, bb, dots, debug);
        for (; t < a->tokens; t++)
            some_tokens(a, begin, stop, t, 1, bb, dots, debug);
    }
}
INLINE SSSE3 void gemm(const matmul_q8_args *a, int64_t begin, int64_t end, int bb, half_dots dots)
{
    if (a->isums) gemm_(a, begin, end, bb, dots, 1); else gemm_(a, begin, end, bb, dots, 0);
}

#endif
