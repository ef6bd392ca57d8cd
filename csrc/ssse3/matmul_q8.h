/* Quantised weight rows times quantised activation rows, shared by the six products: y as kernels.h defines it.
 *
 * A stored block holds the same four code bytes of four rows in one vector, so an activation word broadcast to all
 * lanes multiplies four rows at once and no sum ever crosses lanes: lane r of a result is row r. Activations are
 * broadcast beforehand, once for all the groups of a call. A tile is one group of rows by up to TILE_TOKENS tokens: half
 * a block is unpacked once and stays in registers while the tokens take their turns. Tiling changes no bit: y[t, r] is
 * summed over blocks in order, and between two runs of blocks it waits in memory as the float it is. */
#ifndef FERMI_SSSE3_MATMUL_Q8_H
#define FERMI_SSSE3_MATMUL_Q8_H

#include "../kernels.h"
#include "../scalar/grouped.h"
#include "blocks.h"

enum {
    TILE_TOKENS = 16,
    SPREAD_BLOCKS = 128, /* 20 KB: with a tile's sums and weights they stay in a 32 KB level-1 cache */
    WORDS = 8            /* vectors of half an unpacked block; vector i belongs to activation codes 4i..4i+3 */
};

/* Bytes from a block of weights to the ones fetched along with it: far ones into the level-2 cache, near ones on to level 1. */
enum { FAR = 6144, NEAR = 1024 };

/* One block of one token: each four of its codes, 8 * sum and d, in every lane. */
typedef struct {
    __m128i codes[WORDS];
    __m128i offset;
    __m128 d;
} spread_block;

/* What differs between formats: the code bytes of rows 4h..4h+3 of a stored block to vectors (qs points at the first four
 * of row 4h), and the exact dots of these rows with a token's block. */
typedef void unpack_rows(const uint8_t *qs, __m128i v[WORDS]);
typedef __m128i row_dots(const __m128i v[WORDS], const spread_block *x);

INLINE SSSE3 void q4_0_unpack(const uint8_t *qs, __m128i v[WORDS])
{
    const __m128i nibble = _mm_set1_epi8(15);
    for (int i = 0; i < 4; i++) {
        __m128i both = load_bytes(qs + 32 * i);
        v[i] = _mm_and_si128(both, nibble);
        v[4 + i] = _mm_and_si128(_mm_srli_epi16(both, 4), nibble);
    }
}

/* A 16-bit lane adds up 8 pairs of nibble * code, at most 8 * 2 * 15 * 127 = 30480. */
INLINE SSSE3 __m128i q4_0_dots(const __m128i v[WORDS], const spread_block *x)
{
    __m128i sum[WORDS];
    for (int i = 0; i < WORDS; i++)
        sum[i] = _mm_maddubs_epi16(v[i], x->codes[i]);
    for (int width = WORDS / 2; width > 0; width /= 2)
        for (int i = 0; i < width; i++)
            sum[i] = _mm_add_epi16(sum[i], sum[i + width]);
    return _mm_sub_epi32(_mm_madd_epi16(sum[0], _mm_set1_epi16(1)), x->offset);
}

INLINE SSSE3 void q8_0_unpack(const uint8_t *qs, __m128i v[WORDS])
{
    for (int i = 0; i < WORDS; i++)
        v[i] = load_bytes(qs + 32 * i);
}

/* |w| * (code with the sign of w). |-128| is 128 as an unsigned byte, and a pair is at most 2 * 128 * 127 = 32512; two
 * pairs would not fit 16 bits, so each vector of pairs goes to 32 bits at once. */
INLINE SSSE3 __m128i q8_0_dots(const __m128i v[WORDS], const spread_block *x)
{
    __m128i sum = _mm_setzero_si128();
    for (int i = 0; i < WORDS; i++) {
        __m128i pairs = _mm_maddubs_epi16(_mm_abs_epi8(v[i]), _mm_sign_epi8(x->codes[i], v[i]));
        sum = _mm_add_epi32(sum, _mm_madd_epi16(pairs, _mm_set1_epi16(1)));
    }
    return sum;
}

INLINE SSSE3 void spread_codes(const int8_t *codes, __m128i out[WORDS])
{
    __m128i first = load_bytes(codes), second = load_bytes(codes + 16);
    out[0] = _mm_shuffle_epi32(first, 0x00);
    out[1] = _mm_shuffle_epi32(first, 0x55);
    out[2] = _mm_shuffle_epi32(first, 0xaa);
    out[3] = _mm_shuffle_epi32(first, 0xff);
    out[4] = _mm_shuffle_epi32(second, 0x00);
    out[5] = _mm_shuffle_epi32(second, 0x55);
    out[6] = _mm_shuffle_epi32(second, 0xaa);
    out[7] = _mm_shuffle_epi32(second, 0xff);
}

/* Blocks [block, block + count) of tokens token.. to out[count][tokens]. */
INLINE SSSE3 void spread(const matmul_q8_args *a, int64_t token, int tokens, int64_t block, int64_t count, spread_block *out)
{
    for (int t = 0; t < tokens; t++) {
        int64_t from = (a->source ? a->source[token + t] : token + t) * (a->n / BLOCK) + block;
        for (int64_t b = 0; b < count; b++) {
            spread_block *x = out + b * tokens + t;
            spread_codes(a->codes + (from + b) * BLOCK, x->codes);
            x->offset = _mm_set1_epi32(8 * a->sums[from + b]);
            x->d = _mm_set1_ps(a->d[from + b]);
        }
    }
}

INLINE SSSE3 void load_rows(const float *from, int64_t rows, __m128 *low, __m128 *high)
{
    float part[GROUP] = {0};
    memcpy(part, from, (rows < GROUP ? rows : GROUP) * sizeof *from);
    *low = _mm_loadu_ps(part);
    *high = _mm_loadu_ps(part + 4);
}

INLINE SSSE3 void store_rows(float *to, int64_t rows, __m128 low, __m128 high)
{
    float part[GROUP];
    if (rows >= GROUP) {
        _mm_storeu_ps(to, low);
        _mm_storeu_ps(to + 4, high);
        return;
    }
    _mm_storeu_ps(part, low);
    _mm_storeu_ps(part + 4, high);
    memcpy(to, part, rows * sizeof *to);
}

INLINE SSSE3 void keep_isums(const matmul_q8_args *a, int64_t token, int64_t row, int64_t block, __m128i isum)
{
    int32_t lanes[4];
    memcpy(lanes, &isum, sizeof lanes);
    for (int r = 0; r < 4 && row + r < a->rows; r++)
        a->isums[(token * a->rows + row + r) * (a->n / BLOCK) + block] = lanes[r];
}

/* Four finite halves, each in the upper 16 bits of its lane, the lower ones zero. */
INLINE SSSE3 __m128 f16_numbers(__m128i halves)
{
    return _mm_or_ps(f16_magnitudes(halves), _mm_and_ps(_mm_castsi128_ps(halves), _mm_set1_ps(-0.0f)));
}

/* A format. */
typedef struct {
    unpack_rows *unpack;
    row_dots *dots;
    int block_bytes;
} q8_product;

/* Part of a product: blocks [block, block + count) of `tokens` tokens from `token` on. */
typedef struct {
    int64_t token, block, count;
    int tokens, checked; /* checked: isums are written, too */
    const spread_block *x;
} tile_run;

/* A prefetch past the end of the weights does nothing. */
INLINE SSSE3 void prefetch(const uint8_t *w, int bytes, int64_t far, int64_t near)
{
    for (int line = 0; line < bytes; line += 64) {
        _mm_prefetch((const char *)w + far + line, _MM_HINT_T1);
        _mm_prefetch((const char *)w + near + line, _MM_HINT_T0);
    }
}

/* Adds a run of blocks of one group of rows to y. */
INLINE SSSE3 void add_tile(const matmul_q8_args *a, q8_product p, tile_run run, int64_t group)
{
    const int64_t row = group * GROUP, row_of_blocks = a->n / BLOCK * p.block_bytes;
    const int whole = run.count * p.block_bytes == row_of_blocks; /* else the next group's same block comes next */
    const uint8_t *w = a->w + group * row_of_blocks + run.block * p.block_bytes;
    float *out = a->y + run.token * a->y_stride + row;
    const spread_block *x = run.x;
    __m128 y[2][TILE_TOKENS];
    for (int t = 0; t < run.tokens; t++) {
        y[0][t] = y[1][t] = _mm_setzero_ps();
        if (run.block > 0)
            load_rows(out + t * a->y_stride, a->rows - row, &y[0][t], &y[1][t]);
    }
    for (int64_t b = 0; b < run.count; b++, w += p.block_bytes, x += run.tokens) {
        const __m128i halves = load_bytes(w), zero = _mm_setzero_si128();
        prefetch(w, p.block_bytes, whole ? FAR : row_of_blocks, whole ? NEAR : row_of_blocks);
        for (int h = 0; h < 2; h++) {
            const __m128 dw = f16_numbers(h ? _mm_unpackhi_epi16(zero, halves) : _mm_unpacklo_epi16(zero, halves));
            __m128i v[WORDS];
            p.unpack(w + 16 + 16 * h, v);
            for (int t = 0; t < run.tokens; t++) {
                __m128i isum = p.dots(v, x + t);
                if (run.checked)
                    keep_isums(a, run.token + t, row + 4 * h, run.block + b, isum);
                y[h][t] = _mm_add_ps(y[h][t], _mm_mul_ps(_mm_cvtepi32_ps(isum), _mm_mul_ps(dw, x[t].d)));
            }
        }
    }
    for (int t = 0; t < run.tokens; t++)
        store_rows(out + t * a->y_stride, a->rows - row, y[0][t], y[1][t]);
}

/* Up to TILE_TOKENS tokens from `token` on. */
INLINE SSSE3 void few_tokens(const matmul_q8_args *a, q8_product p, int64_t begin, int64_t end, int64_t token, int tokens,
                             int checked)
{
    const int64_t blocks = a->n / BLOCK, most = SPREAD_BLOCKS / tokens;
    spread_block x[SPREAD_BLOCKS];
    for (int64_t block = 0, count; block < blocks; block += count) {
        count = blocks - block < most ? blocks - block : most;
        spread(a, token, tokens, block, count, x);
        for (int64_t group = begin; group < end; group++)
            add_tile(a, p, (tile_run){token, block, count, tokens, checked, x}, group);
    }
}

INLINE SSSE3 void gemv(const matmul_q8_args *a, q8_product p, int64_t begin, int64_t end)
{
    if (a->isums)
        few_tokens(a, p, begin, end, 0, 1, 1);
    else
        few_tokens(a, p, begin, end, 0, 1, 0);
}

INLINE SSSE3 void gemm(const matmul_q8_args *a, q8_product p, int64_t begin, int64_t end)
{
    for (int64_t t = 0; t < a->tokens; t += TILE_TOKENS) {
        int tokens = a->tokens - t < TILE_TOKENS ? (int)(a->tokens - t) : TILE_TOKENS;
        if (a->isums)
            few_tokens(a, p, begin, end, t, tokens, 1);
        else
            few_tokens(a, p, begin, end, t, tokens, 0);
    }
}

/* Hits of one row, the rule while decoding, take the tile of gemv. */
INLINE SSSE3 void grouped(const grouped_q8_args *a, q8_product p, int64_t begin, int64_t end)
{
    hit_part part;
    while (next_part(a, &begin, end, &part))
        if (part.product.tokens == 1)
            few_tokens(&part.product, p, part.begin, part.end, 0, 1, 0);
        else
            gemm(&part.product, p, part.begin, part.end);
}

static const q8_product q4_0 = {q4_0_unpack, q4_0_dots, sizeof(q4_0_x8)};
static const q8_product q8_0 = {q8_0_unpack, q8_0_dots, sizeof(q8_0_x8)};

#endif
