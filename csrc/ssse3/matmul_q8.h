/* Quantised weight rows times quantised activation rows, shared by the six products: y as kernels.h defines it.
 *
 * A stored block holds the same four code bytes of four rows in one vector, so an activation word broadcast to all
 * lanes multiplies four rows at once and no sum ever crosses lanes: lane r of a result is row r. Half a block is
 * unpacked once and stays in registers while the tokens of a tile take their turns. Activations are broadcast
 * beforehand, once for all the groups of a call. Tiling changes no bit: y[t, r] is summed over blocks in order,
 * and between two runs of blocks it waits in memory as the float it is.
 *
 * A tile is TILE_SUMS tokens by groups. Its groups are not neighbours: each is the next one of a stream that walks
 * a part of the call's groups from end to end. Weights that come from memory are read a third faster in four
 * streams than in one.
 */
#ifndef FERMI_SSSE3_MATMUL_Q8_H
#define FERMI_SSSE3_MATMUL_Q8_H

#include "../kernels.h"
#include "../scalar/grouped.h"
#include "blocks.h"

enum {
    TILE_TOKENS = 16,
    TILE_SUMS = 16,      /* tokens times groups */
    TILE_GROUPS = 4,     /* at most; fewer where there are more than four tokens: memory is not the limit then */
    SPREAD_BLOCKS = 128, /* 20 KB: with a tile's sums and weights they stay in a 32 KB level-1 cache */
    WORDS = 8,           /* vectors of half an unpacked block; vector i belongs to activation codes 4i..4i+3 */
    NEAR = 512,          /* bytes ahead in a stream that are fetched into the level-1 cache */
    FAR_BLOCKS = 24      /* blocks ahead in a stream that are fetched into the level-2 cache */
};

/* One block of one token: each four of its codes, 8 * sum and d, in every lane. */
typedef struct {
    __m128i codes[WORDS];
    __m128i offset;
    __m128 d;
} spread_block;

/* What differs between formats: the code bytes of rows 4h..4h+3 of a stored block to vectors (qs points at the first
 * four of row 4h), and the exact dots of these rows with a block of a token. */
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
INLINE SSSE3 void spread(const matmul_q8_args *a, int64_t token, int tokens, int64_t block, int64_t count,
                         spread_block *out)
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

/* The sums of a group's eight rows. */
typedef struct {
    __m128 half[2];
} group_sums;

INLINE SSSE3 group_sums load_rows(const float *from, int64_t rows)
{
    float part[GROUP] = {0};
    if (rows < GROUP)
        from = memcpy(part, from, rows * sizeof *from);
    return (group_sums){{_mm_loadu_ps(from), _mm_loadu_ps(from + 4)}};
}

INLINE SSSE3 void store_rows(float *to, int64_t rows, group_sums y)
{
    float part[GROUP], *whole = rows < GROUP ? part : to;
    _mm_storeu_ps(whole, y.half[0]);
    _mm_storeu_ps(whole + 4, y.half[1]);
    if (rows < GROUP)
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

/* The scales of a block's eight rows. Only a subnormal half or zero takes the longer way: most matrices have none, and a branch
 * that is always foreseen costs nothing. */
INLINE SSSE3 void row_scales(const uint8_t *w, __m128 dw[2])
{
    const __m128i halves = load_bytes(w), zero = _mm_setzero_si128();
    const __m128i rows[2] = {_mm_unpacklo_epi16(zero, halves), _mm_unpackhi_epi16(zero, halves)};
    const __m128i small = _mm_cmpeq_epi16(_mm_and_si128(halves, _mm_set1_epi16(0x7c00)), zero);
    if (__builtin_expect(_mm_movemask_epi8(small), 0)) {
        dw[0] = f16_numbers(rows[0]);
        dw[1] = f16_numbers(rows[1]);
        return;
    }
    for (int h = 0; h < 2; h++) { /* the sign moves along with the shift and stays where it was */
        __m128i shifted = _mm_and_si128(_mm_srai_epi32(rows[h], 3), _mm_set1_epi32((int)0x8fffe000));
        dw[h] = _mm_castsi128_ps(_mm_add_epi32(shifted, _mm_set1_epi32(112 << 23)));
    }
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

/* y of a group, zeros before its first block. */
INLINE SSSE3 void load_sums(const matmul_q8_args *a, tile_run run, int64_t group, group_sums *y)
{
    const float *from = a->y + run.token * a->y_stride + group * GROUP;
    for (int t = 0; t < run.tokens; t++)
        if (run.block > 0)
            y[t] = load_rows(from + t * a->y_stride, a->rows - group * GROUP);
        else
            y[t] = (group_sums){{_mm_setzero_ps(), _mm_setzero_ps()}};
}

INLINE SSSE3 void store_sums(const matmul_q8_args *a, tile_run run, int64_t group, const group_sums *y)
{
    float *to = a->y + run.token * a->y_stride + group * GROUP;
    for (int t = 0; t < run.tokens; t++)
        store_rows(to + t * a->y_stride, a->rows - group * GROUP, y[t]);
}

/* A prefetch past the end of the weights does nothing. */
INLINE SSSE3 void prefetch(const uint8_t *w, int bytes, int64_t far)
{
    for (int line = 0; line < bytes; line += 64) {
        _mm_prefetch((const char *)w + NEAR + line, _MM_HINT_T0);
        _mm_prefetch((const char *)w + far + line, _MM_HINT_T1);
    }
}

INLINE SSSE3 void add_block(const matmul_q8_args *a, q8_product p, tile_run run, int64_t group, int64_t b,
                            const uint8_t *w, group_sums *y)
{
    const spread_block *x = run.x + b * run.tokens;
    __m128 scales[2];
    row_scales(w, scales);
    for (int h = 0; h < 2; h++) {
        const __m128 dw = scales[h];
        __m128i v[WORDS];
        p.unpack(w + 2 * GROUP + 16 * h, v);
        for (int t = 0; t < run.tokens; t++) {
            __m128i isum = p.dots(v, x + t);
            if (run.checked)
                keep_isums(a, run.token + t, group * GROUP + 4 * h, run.block + b, isum);
            __m128 d = _mm_mul_ps(dw, x[t].d);
            y[t].half[h] = _mm_add_ps(y[t].half[h], _mm_mul_ps(_mm_cvtepi32_ps(isum), d));
        }
    }
}

/* Adds a run of blocks of groups of rows, `stride` apart, to y. In a stream the next group's same blocks follow. */
INLINE SSSE3 void add_tile(const matmul_q8_args *a, q8_product p, tile_run run, int64_t group, int groups,
                           int64_t stride)
{
    const int64_t row_of_blocks = a->n / BLOCK * p.block_bytes;
    const int64_t ahead = run.count < FAR_BLOCKS ? run.count : FAR_BLOCKS;
    const int64_t far = ahead * p.block_bytes, far_in_next = far + row_of_blocks - run.count * p.block_bytes;
    const uint8_t *w = a->w + group * row_of_blocks + run.block * p.block_bytes;
    group_sums y[TILE_SUMS];
    for (int g = 0; g < groups; g++)
        load_sums(a, run, group + g * stride, y + g * run.tokens);
    for (int64_t b = 0; b < run.count; b++, w += p.block_bytes)
        for (int g = 0; g < groups; g++) {
            const uint8_t *wg = w + g * stride * row_of_blocks;
            prefetch(wg, p.block_bytes, b + ahead < run.count ? far : far_in_next);
            add_block(a, p, run, group + g * stride, b, wg, y + g * run.tokens);
        }
    for (int g = 0; g < groups; g++)
        store_sums(a, run, group + g * stride, y + g * run.tokens);
}

/* Up to TILE_TOKENS tokens from `token` on. Group g of a stream goes with group g of the others. */
INLINE SSSE3 void few_tokens(const matmul_q8_args *a, q8_product p, int64_t begin, int64_t end, int64_t token,
                             int tokens, int checked)
{
    const int64_t blocks = a->n / BLOCK, most = SPREAD_BLOCKS / tokens;
    const int64_t groups = tokens * TILE_GROUPS < TILE_SUMS ? TILE_GROUPS : TILE_SUMS / tokens;
    const int64_t stride = (end - begin + groups - 1) / groups;
    spread_block x[SPREAD_BLOCKS];
    for (int64_t block = 0, count; block < blocks; block += count) {
        count = blocks - block < most ? blocks - block : most;
        spread(a, token, tokens, block, count, x);
        for (int64_t g = 0; g < stride; g++)
            add_tile(a, p, (tile_run){token, block, count, tokens, checked, x}, begin + g,
                     (int)((end - begin - g + stride - 1) / stride), stride);
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
