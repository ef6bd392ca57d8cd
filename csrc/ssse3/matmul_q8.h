/* Quantised weight rows times quantised activation rows, shared by the four products: y as kernels.h defines it.
 *
 * A stored block holds the same four code bytes of four rows in one vector, so an activation word broadcast to all
 * lanes multiplies four rows at once and no sum ever crosses lanes: lane r of a result is row r. Activations are
 * broadcast beforehand, once for all the groups of a call. A tile is one group of rows by up to four tokens; its
 * weights are unpacked once for all its tokens. Tiling changes no bit: y[t, r] is summed over blocks in order, and
 * between two runs of blocks it waits in memory as the float it is. */
#ifndef FERMI_SSSE3_MATMUL_Q8_H
#define FERMI_SSSE3_MATMUL_Q8_H

#include "../kernels.h"
#include "blocks.h"

enum {
    TILE_TOKENS = 4,    /* four sums, two unpacked vectors, mask and a temporary: 8 of 16 registers, the rest holds y */
    SPREAD_BLOCKS = 128, /* 20 KB: with a tile's weights it stays in a 32 KB level-1 cache */
    GROUPS_PER_PASS = 16 /* 147 KB of q4_0 weights at n = 2048, met again by every tile of tokens: level-2 cache */
};

/* 32 activation codes, each four of them in every lane, with 8 * sum and d in every lane. */
typedef struct {
    __m128i codes[8];
    __m128i offset;
    __m128 d;
} spread_block;

/* The rows 4h..4h+3 of a stored block times `tokens` activation blocks `stride` apart: exact integer dots, a lane a
 * row. `w` points at the first four code bytes of row 4h. */
typedef void half_block_dots(const uint8_t *w, const spread_block *x, int64_t stride, int tokens, __m128i *isum);

/* A 16-bit lane adds up 8 pairs of nibble * code, at most 8 * 2 * 15 * 127 = 30480. */
INLINE SSSE3 void q4_0_dots(const uint8_t *w, const spread_block *x, int64_t stride, int tokens, __m128i *isum)
{
    const __m128i nibble = _mm_set1_epi8(15), ones = _mm_set1_epi16(1);
    for (int i = 0; i < 4; i++) {
        __m128i both = load_bytes(w + 32 * i);
        __m128i low = _mm_and_si128(both, nibble), high = _mm_and_si128(_mm_srli_epi16(both, 4), nibble);
        for (int t = 0; t < tokens; t++) {
            const spread_block *a = x + t * stride;
            __m128i pairs = _mm_add_epi16(_mm_maddubs_epi16(low, a->codes[i]), _mm_maddubs_epi16(high, a->codes[4 + i]));
            isum[t] = i ? _mm_add_epi16(isum[t], pairs) : pairs;
        }
    }
    for (int t = 0; t < tokens; t++)
        isum[t] = _mm_sub_epi32(_mm_madd_epi16(isum[t], ones), x[t * stride].offset);
}

/* |w| * (code with the sign of w). |-128| is 128 as an unsigned byte, and a pair is at most 2 * 128 * 127 = 32512; two
 * pairs would not fit 16 bits, so each vector of pairs goes to 32 bits at once. */
INLINE SSSE3 void q8_0_dots(const uint8_t *w, const spread_block *x, int64_t stride, int tokens, __m128i *isum)
{
    const __m128i ones = _mm_set1_epi16(1);
    for (int i = 0; i < 8; i++) {
        __m128i code = load_bytes(w + 32 * i), magnitude = _mm_abs_epi8(code);
        for (int t = 0; t < tokens; t++) {
            __m128i pairs = _mm_maddubs_epi16(magnitude, _mm_sign_epi8(x[t * stride].codes[i], code));
            __m128i sums = _mm_madd_epi16(pairs, ones);
            isum[t] = i ? _mm_add_epi32(isum[t], sums) : sums;
        }
    }
}

INLINE SSSE3 void spread(const matmul_q8_args *a, int64_t token, int64_t block, int64_t count, spread_block *out)
{
    int64_t from = token * (a->n / BLOCK) + block;
    for (int64_t b = from; b < from + count; b++, out++) {
        __m128i first = load_bytes(a->codes + b * BLOCK), second = load_bytes(a->codes + b * BLOCK + 16);
        out->codes[0] = _mm_shuffle_epi32(first, 0x00);
        out->codes[1] = _mm_shuffle_epi32(first, 0x55);
        out->codes[2] = _mm_shuffle_epi32(first, 0xaa);
        out->codes[3] = _mm_shuffle_epi32(first, 0xff);
        out->codes[4] = _mm_shuffle_epi32(second, 0x00);
        out->codes[5] = _mm_shuffle_epi32(second, 0x55);
        out->codes[6] = _mm_shuffle_epi32(second, 0xaa);
        out->codes[7] = _mm_shuffle_epi32(second, 0xff);
        out->offset = _mm_set1_epi32(8 * a->sums[b]);
        out->d = _mm_set1_ps(a->d[b]);
    }
}

INLINE SSSE3 void load_rows(const float *from, int64_t rows, __m128 y[2])
{
    float part[GROUP] = {0};
    memcpy(part, from, (rows < GROUP ? rows : GROUP) * sizeof *from);
    y[0] = _mm_loadu_ps(part);
    y[1] = _mm_loadu_ps(part + 4);
}

INLINE SSSE3 void store_rows(float *to, int64_t rows, const __m128 y[2])
{
    float part[GROUP];
    if (rows >= GROUP) {
        _mm_storeu_ps(to, y[0]);
        _mm_storeu_ps(to + 4, y[1]);
        return;
    }
    _mm_storeu_ps(part, y[0]);
    _mm_storeu_ps(part + 4, y[1]);
    memcpy(to, part, rows * sizeof *to);
}

INLINE SSSE3 void keep_isums(const matmul_q8_args *a, int64_t token, int64_t row, int64_t block, __m128i isum)
{
    int32_t lanes[4];
    memcpy(lanes, &isum, sizeof lanes);
    for (int r = 0; r < 4 && row + r < a->rows; r++)
        a->isums[(token * a->rows + row + r) * (a->n / BLOCK) + block] = lanes[r];
}

/* What a tile does is fixed where it is compiled; `checked` also writes isums. */
typedef struct {
    half_block_dots *dots;
    int block_bytes, tokens, checked;
} tile_kind;

/* Adds blocks [block, block + count) of one group of rows to y of `kind.tokens` tokens; x is [tokens, count]. */
INLINE SSSE3 void add_tile(const matmul_q8_args *a, tile_kind kind, int64_t group, int64_t token, int64_t block,
                           int64_t count, const spread_block *x)
{
    const int64_t row = group * GROUP, row_of_blocks = a->n / BLOCK * kind.block_bytes;
    const uint8_t *w = a->w + group * row_of_blocks + block * kind.block_bytes;
    float *out = a->y + token * a->y_stride + row;
    __m128 y[TILE_TOKENS][2];
    for (int t = 0; t < kind.tokens; t++) {
        y[t][0] = y[t][1] = _mm_setzero_ps();
        if (block > 0)
            load_rows(out + t * a->y_stride, a->rows - row, y[t]);
    }
    for (int64_t b = 0; b < count; b++, w += kind.block_bytes, x++) {
        const __m128i halves = load_bytes(w), zero = _mm_setzero_si128();
        for (int line = 0; line < kind.block_bytes; line += 64) /* the next group's; past the end it does nothing */
            _mm_prefetch((const char *)w + row_of_blocks + line, _MM_HINT_T0);
        for (int h = 0; h < 2; h++) {
            const __m128i d = h ? _mm_unpackhi_epi16(zero, halves) : _mm_unpacklo_epi16(zero, halves);
            const __m128 dw = f16_magnitudes(d);
            __m128i isum[TILE_TOKENS];
            kind.dots(w + 16 + 16 * h, x, count, kind.tokens, isum);
            for (int t = 0; t < kind.tokens; t++) {
                if (kind.checked)
                    keep_isums(a, token + t, row + 4 * h, block + b, isum[t]);
                /* The sign of dw goes to the integer: one operation, the same product. */
                __m128 dot = _mm_cvtepi32_ps(_mm_sign_epi32(isum[t], d));
                y[t][h] = _mm_add_ps(y[t][h], _mm_mul_ps(dot, _mm_mul_ps(dw, x[t * count].d)));
            }
        }
    }
    for (int t = 0; t < kind.tokens; t++)
        store_rows(out + t * a->y_stride, a->rows - row, y[t]);
}

INLINE SSSE3 void few_tokens(const matmul_q8_args *a, tile_kind kind, int64_t begin, int64_t end, int64_t token)
{
    const int64_t blocks = a->n / BLOCK, most = SPREAD_BLOCKS / kind.tokens;
    spread_block x[SPREAD_BLOCKS];
    for (int64_t block = 0, count; block < blocks; block += count) {
        count = blocks - block < most ? blocks - block : most;
        for (int t = 0; t < kind.tokens; t++)
            spread(a, token + t, block, count, x + t * count);
        for (int64_t group = begin; group < end; group++)
            add_tile(a, kind, group, token, block, count, x);
    }
}

INLINE SSSE3 void many_tokens(const matmul_q8_args *a, half_block_dots dots, int block_bytes, int checked, int64_t begin,
                              int64_t end)
{
    int64_t t = 0;
    for (; t + 4 <= a->tokens; t += 4)
        few_tokens(a, (tile_kind){dots, block_bytes, 4, checked}, begin, end, t);
    if (a->tokens - t == 3)
        few_tokens(a, (tile_kind){dots, block_bytes, 3, checked}, begin, end, t);
    else if (a->tokens - t == 2)
        few_tokens(a, (tile_kind){dots, block_bytes, 2, checked}, begin, end, t);
    else if (a->tokens - t == 1)
        few_tokens(a, (tile_kind){dots, block_bytes, 1, checked}, begin, end, t);
}

INLINE SSSE3 void gemv(const matmul_q8_args *a, half_block_dots dots, int block_bytes, int64_t begin, int64_t end)
{
    if (a->isums)
        few_tokens(a, (tile_kind){dots, block_bytes, 1, 1}, begin, end, 0);
    else
        few_tokens(a, (tile_kind){dots, block_bytes, 1, 0}, begin, end, 0);
}

INLINE SSSE3 void gemm(const matmul_q8_args *a, half_block_dots dots, int block_bytes, int64_t begin, int64_t end)
{
    for (int64_t stop; begin < end; begin = stop) {
        stop = begin + GROUPS_PER_PASS < end ? begin + GROUPS_PER_PASS : end;
        if (a->isums)
            many_tokens(a, dots, block_bytes, 1, begin, stop);
        else
            many_tokens(a, dots, block_bytes, 0, begin, stop);
    }
}

#endif
