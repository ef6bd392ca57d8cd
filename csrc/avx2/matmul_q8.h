/* Quantised weight rows times quantised activation rows, shared by the six products: y as kernels.h defines it.
 *
 * A stored block holds the same four code bytes of its eight rows in one vector, so an activation word broadcast
 * to all lanes multiplies eight rows at once and no sum ever crosses lanes: lane r of a result is row r. A block
 * is unpacked once and stays in registers while the tokens of a tile take their turns. Activations are copied
 * beforehand, once for all the groups of a call, into the order in which a tile meets them. Tiling changes no bit:
 * y[t, r] is summed over blocks in order, and between two runs of blocks it waits in memory as the float it is.
 *
 * A tile is TILE_SUMS tokens by groups. Its groups are not neighbours: each is the next one of a stream that walks
 * a part of the call's groups from end to end. Weights that come from memory are read a third faster in four
 * streams than in one.
 */
#ifndef FERMI_AVX2_MATMUL_Q8_H
#define FERMI_AVX2_MATMUL_Q8_H

#include "../kernels.h"
#include "../scalar/grouped.h"
#include "blocks.h"
#include "lanes.h"

enum {
    TILE_TOKENS = 16,
    TILE_SUMS = 16,      /* tokens times groups */
    TILE_GROUPS = 4,     /* at most; fewer where there are more than four tokens: memory is not the limit then */
    PACKED_BLOCKS = 512, /* 20 KB: with a tile's sums and weights they stay in a 32 KB level-1 cache */
    WORDS = 8,           /* vectors of an unpacked block; vector i belongs to activation codes 4i..4i+3 */
    NEAR = 512,          /* bytes ahead in a stream that are fetched into the level-1 cache */
    FAR_BLOCKS = 24      /* blocks ahead in a stream that are fetched into the level-2 cache */
};

/* One block of one token. */
typedef struct {
    int8_t codes[BLOCK];
    float d;
    int32_t offset; /* 8 * sum */
} packed_block;

INLINE AVX2 __m256i broadcast_word(const int8_t *codes)
{
    int32_t word;
    memcpy(&word, codes, sizeof word);
    return _mm256_set1_epi32(word);
}

/* What differs between formats: a stored block's code bytes to vectors, and the exact dots of its rows with a block of
 * a token. */
typedef void unpack_block(const uint8_t *qs, __m256i v[WORDS]);
typedef __m256i block_dots(const __m256i v[WORDS], const packed_block *x);

INLINE AVX2 void q4_0_unpack(const uint8_t *qs, __m256i v[WORDS])
{
    const __m256i nibble = _mm256_set1_epi8(15);
    for (int i = 0; i < 4; i++) {
        __m256i both = load_bytes(qs + 32 * i);
        v[i] = _mm256_and_si256(both, nibble);
        v[4 + i] = _mm256_and_si256(_mm256_srli_epi16(both, 4), nibble);
    }
}

/* A 16-bit lane adds up 8 pairs of nibble * code, at most 8 * 2 * 15 * 127 = 30480. */
INLINE AVX2 __m256i q4_0_dots(const __m256i v[WORDS], const packed_block *x)
{
    __m256i sum[WORDS];
    for (int i = 0; i < WORDS; i++)
        sum[i] = _mm256_maddubs_epi16(v[i], broadcast_word(x->codes + 4 * i));
    for (int width = WORDS / 2; width > 0; width /= 2)
        for (int i = 0; i < width; i++)
            sum[i] = _mm256_add_epi16(sum[i], sum[i + width]);
    return _mm256_sub_epi32(_mm256_madd_epi16(sum[0], _mm256_set1_epi16(1)), _mm256_set1_epi32(x->offset));
}

INLINE AVX2 void q8_0_unpack(const uint8_t *qs, __m256i v[WORDS])
{
    for (int i = 0; i < WORDS; i++)
        v[i] = load_bytes(qs + 32 * i);
}

/* |w| * (code with the sign of w). |-128| is 128 as an unsigned byte, and a pair is at most 2 * 128 * 127 = 32512; two
 * pairs would not fit 16 bits, so each vector of pairs goes to 32 bits at once. */
INLINE AVX2 __m256i q8_0_dots(const __m256i v[WORDS], const packed_block *x)
{
    __m256i sum = _mm256_setzero_si256();
    for (int i = 0; i < WORDS; i++) {
        __m256i code = _mm256_sign_epi8(broadcast_word(x->codes + 4 * i), v[i]);
        __m256i pairs = _mm256_maddubs_epi16(_mm256_abs_epi8(v[i]), code);
        sum = _mm256_add_epi32(sum, _mm256_madd_epi16(pairs, _mm256_set1_epi16(1)));
    }
    return sum;
}

/* Blocks [block, block + count) of tokens token.. to out[count][tokens]. */
INLINE AVX2 void pack(const matmul_q8_args *a, int64_t token, int tokens, int64_t block, int64_t count,
                      packed_block *out)
{
    for (int t = 0; t < tokens; t++) {
        int64_t from = (a->source ? a->source[token + t] : token + t) * (a->n / BLOCK) + block;
        for (int64_t b = 0; b < count; b++) {
            packed_block *x = out + b * tokens + t;
            memcpy(x->codes, a->codes + (from + b) * BLOCK, BLOCK);
            x->d = a->d[from + b];
            x->offset = 8 * a->sums[from + b];
        }
    }
}

INLINE AVX2 void keep_isums(const matmul_q8_args *a, int64_t token, int64_t row, int64_t block, __m256i isum)
{
    int32_t lanes[GROUP];
    memcpy(lanes, &isum, sizeof lanes);
    for (int r = 0; r < GROUP && row + r < a->rows; r++)
        a->isums[(token * a->rows + row + r) * (a->n / BLOCK) + block] = lanes[r];
}

/* A format. */
typedef struct {
    unpack_block *unpack;
    block_dots *dots;
    int block_bytes;
} q8_product;

/* Part of a product: blocks [block, block + count) of `tokens` tokens from `token` on. */
typedef struct {
    int64_t token, block, count;
    int tokens, checked; /* checked: isums are written, too */
    const packed_block *x;
} tile_run;

/* y of a group, zeros before its first block. */
INLINE AVX2 void load_sums(const matmul_q8_args *a, tile_run run, int64_t group, __m256 *y)
{
    const float *from = a->y + run.token * a->y_stride + group * GROUP;
    for (int t = 0; t < run.tokens; t++)
        if (run.block > 0)
            y[t] = load_n(from + t * a->y_stride, a->rows - group * GROUP);
        else
            y[t] = _mm256_setzero_ps();
}

INLINE AVX2 void store_sums(const matmul_q8_args *a, tile_run run, int64_t group, const __m256 *y)
{
    float *to = a->y + run.token * a->y_stride + group * GROUP;
    for (int t = 0; t < run.tokens; t++)
        store_n(to + t * a->y_stride, y[t], a->rows - group * GROUP);
}

/* A prefetch past the end of the weights does nothing. */
INLINE AVX2 void prefetch(const uint8_t *w, int bytes, int64_t far)
{
    for (int line = 0; line < bytes; line += 64) {
        _mm_prefetch((const char *)w + NEAR + line, _MM_HINT_T0);
        _mm_prefetch((const char *)w + far + line, _MM_HINT_T1);
    }
}

INLINE AVX2 void add_block(const matmul_q8_args *a, q8_product p, tile_run run, int64_t group, int64_t b,
                           const uint8_t *w, __m256 *y)
{
    const __m256 dw = f16_numbers(w);
    const packed_block *x = run.x + b * run.tokens;
    __m256i v[WORDS];
    p.unpack(w + 2 * GROUP, v);
    for (int t = 0; t < run.tokens; t++) {
        __m256i isum = p.dots(v, x + t);
        if (run.checked)
            keep_isums(a, run.token + t, group * GROUP, run.block + b, isum);
        __m256 d = _mm256_mul_ps(dw, _mm256_set1_ps(x[t].d));
        y[t] = _mm256_add_ps(y[t], _mm256_mul_ps(_mm256_cvtepi32_ps(isum), d));
    }
}

/* Adds a run of blocks of groups of rows, `stride` apart, to y. In a stream the next group's same blocks follow. */
INLINE AVX2 void add_tile(const matmul_q8_args *a, q8_product p, tile_run run, int64_t group, int groups,
                          int64_t stride)
{
    const int64_t row_of_blocks = a->n / BLOCK * p.block_bytes;
    const int64_t ahead = run.count < FAR_BLOCKS ? run.count : FAR_BLOCKS;
    const int64_t far = ahead * p.block_bytes, far_in_next = far + row_of_blocks - run.count * p.block_bytes;
    const uint8_t *w = a->w + group * row_of_blocks + run.block * p.block_bytes;
    __m256 y[TILE_SUMS];
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
INLINE AVX2 void few_tokens(const matmul_q8_args *a, q8_product p, int64_t begin, int64_t end, int64_t token,
                            int tokens, int checked)
{
    const int64_t blocks = a->n / BLOCK, most = PACKED_BLOCKS / tokens;
    const int64_t groups = tokens * TILE_GROUPS < TILE_SUMS ? TILE_GROUPS : TILE_SUMS / tokens;
    const int64_t stride = (end - begin + groups - 1) / groups;
    packed_block x[PACKED_BLOCKS];
    for (int64_t block = 0, count; block < blocks; block += count) {
        count = blocks - block < most ? blocks - block : most;
        pack(a, token, tokens, block, count, x);
        for (int64_t g = 0; g < stride; g++)
            add_tile(a, p, (tile_run){token, block, count, tokens, checked, x}, begin + g,
                     (int)((end - begin - g + stride - 1) / stride), stride);
    }
}

INLINE AVX2 void gemv(const matmul_q8_args *a, q8_product p, int64_t begin, int64_t end)
{
    if (a->isums)
        few_tokens(a, p, begin, end, 0, 1, 1);
    else
        few_tokens(a, p, begin, end, 0, 1, 0);
}

INLINE AVX2 void gemm(const matmul_q8_args *a, q8_product p, int64_t begin, int64_t end)
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
INLINE AVX2 void grouped(const grouped_q8_args *a, q8_product p, int64_t begin, int64_t end)
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
