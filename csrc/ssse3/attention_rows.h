/* Attention of query rows over the positions they see (kernels.h: attention, full_attention). A vector is four dimensions of a
 * head. Query rows that read the same keys go through them together, so that a block of keys and values comes from memory, and
 * becomes floats, once for all of them; o holds the sums of the open span. Scores are tiles of four positions by two rows
 * (dot.h); values are added with eight vectors (32 dimensions) of sums in registers. What is used again and again lies side by
 * side in the L1 cache meanwhile: sixteen keys, then a slab of 32 dimensions of the block's values, whose rows in a page would
 * compete for a few of its sets. */
#ifndef FERMI_SSSE3_ATTENTION_ROWS_H
#define FERMI_SSSE3_ATTENTION_ROWS_H

#include "../kernels.h"
#include "dot.h"
#include "kv.h"
#include "math.h"

enum { MAX_ROWS = 64, KEY_TILE = 16, VALUE_VECTORS = 8, SLAB = 4 * VALUE_VECTORS, MAX_HEAD_DIM = 1024 };

/* A query row: sums of p * v of the open span and of those before it; how many positions it sees; its running maximum m and
 * what that was before the span; sums of the weights, l of the span, `all` of those before it; what the block does to the span's
 * sums; and the scores, then weights p, of the block. */
typedef struct {
    const float *q;
    float *o, *total;
    int64_t seen;
    float m, before, l, all, correction;
    float p[ATTENTION_BLOCK];
} query;

/* The block of positions first..first+n. */
typedef struct {
    int64_t first, n;
    const uint8_t *k[ATTENTION_BLOCK], *v[ATTENTION_BLOCK];
} block;

static inline __attribute__((always_inline)) SSSE3 void score_tile(const kv_source *a, const float *const *k, int positions,
                                                                    query *queries, int rows, int64_t j)
{
    const float *q[DOT_COLUMNS];
    float out[DOT_ROWS][DOT_COLUMNS];
    for (int c = 0; c < rows; c++)
        q[c] = queries[c].q;
    dot_tile(positions, rows, k, q, a->head_dim, out);
    for (int c = 0; c < rows; c++)
        for (int r = 0; r < positions; r++)
            queries[c].p[j + r] = out[r][c] * a->scale;
}

/* Scores of positions j..j+n of the block, whose keys are k, for two rows or one. */
static inline __attribute__((always_inline)) SSSE3 void score_rows(const kv_source *a, const float *const *k, int64_t n,
                                                                    query *queries, int rows, int64_t j)
{
    int64_t i = 0;
    for (; i + DOT_ROWS <= n; i += DOT_ROWS)
        score_tile(a, k + i, DOT_ROWS, queries, rows, j + i);
    for (; i < n; i++)
        score_tile(a, k + i, 1, queries, rows, j + i);
}

static SSSE3 void scores(const kv_source *a, query *queries, int64_t rows, const block *b)
{
    const float *k[KEY_TILE];
    float tile[KEY_TILE * MAX_HEAD_DIM];
    for (int64_t j = 0; j < b->n; j += KEY_TILE) {
        int64_t n = b->n - j < KEY_TILE ? b->n - j : KEY_TILE, r = 0;
        for (int64_t i = 0; i < n; i++) {
            k[i] = a->format == KV_F32 ? (const float *)b->k[j + i] : tile + i * a->head_dim;
            if (a->format != KV_F32)
                load_values(a->format, b->k[j + i], a->head_dim, 0, a->head_dim, tile + i * a->head_dim);
        }
        for (; r + 2 <= rows; r += 2)
            score_rows(a, k, n, queries + r, 2, j);
        if (r < rows)
            score_rows(a, k, n, queries + r, 1, j);
    }
}

/* Scores of the n positions from `first` on to weights: p = exp(p - max), zero behind them; moves m and l on. */
static SSSE3 void weigh(query *row, int64_t first, int64_t n)
{
    int begins = first % ATTENTION_SPAN == 0;
    __m128 v[4], top = _mm_set1_ps(-F32_INF);
    float *p = row->p;
    for (int64_t j = n; j < ATTENTION_BLOCK; j++)
        p[j] = -F32_INF;
    for (int j = 0; j < ATTENTION_BLOCK; j += 4)
        top = _mm_max_ps(_mm_loadu_ps(p + j), top);
    top = _mm_max_ps(top, _mm_movehl_ps(top, top));
    float max = _mm_cvtss_f32(_mm_max_ss(top, _mm_shuffle_ps(top, top, 1)));
    max = first > 0 && row->m > max ? row->m : max;
    for (int i = 0; i < 4; i++)
        v[i] = _mm_setzero_ps();
    for (int j = 0; j < ATTENTION_BLOCK; j += 4) {
        __m128 weight = v_exp(_mm_sub_ps(_mm_loadu_ps(p + j), _mm_set1_ps(max)));
        _mm_storeu_ps(p + j, weight);
        v[j / 4 % 4] = _mm_add_ps(v[j / 4 % 4], weight);
    }
    float sum = lane_tree(v);
    row->correction = begins ? 0.0f : f32_exp(row->m - max);
    row->l = begins ? sum : row->l * row->correction + sum;
    row->m = max;
}

/* o = o * correction + sum of p * v in the dimensions of a slab, `width` of which exist. */
static inline __attribute__((always_inline)) SSSE3 void add_values(const query *row, int64_t n, int begins, const float *slab, int64_t first,
                                                                    int64_t width)
{
    __m128 sum[VALUE_VECTORS];
    for (int i = 0; i < VALUE_VECTORS; i++)
        sum[i] = _mm_setzero_ps();
    for (int64_t j = 0; j < n; j++) {
        __m128 weight = _mm_set1_ps(row->p[j]);
        for (int i = 0; i < VALUE_VECTORS; i++)
            sum[i] = _mm_add_ps(sum[i], _mm_mul_ps(weight, _mm_loadu_ps(slab + j * SLAB + 4 * i)));
    }
    for (int i = 0; i < VALUE_VECTORS; i++) {
        float *o = row->o + first + 4 * i;
        if (!begins)
            sum[i] = _mm_add_ps(_mm_mul_ps(load_n(o, width - 4 * i), _mm_set1_ps(row->correction)), sum[i]);
        store_n(o, sum[i], width - 4 * i);
    }
}

static int64_t seen_of_block(const query *row, const block *b)
{
    return row->seen - b->first < b->n ? row->seen - b->first : b->n;
}

static SSSE3 void merge_values(const kv_source *a, query *queries, int64_t rows, const block *b)
{
    float slab[ATTENTION_BLOCK * SLAB];
    int begins = b->first % ATTENTION_SPAN == 0;
    for (int64_t first = 0; first < a->head_dim; first += SLAB) {
        int64_t width = a->head_dim - first < SLAB ? a->head_dim - first : SLAB;
        for (int64_t j = 0; j < b->n; j++) {
            if (width < SLAB)
                memset(slab + j * SLAB, 0, SLAB * sizeof *slab);
            load_values(a->format, b->v[j], a->head_dim, first, width, slab + j * SLAB);
        }
        for (int64_t r = 0; r < rows; r++) {
            if (width == SLAB)
                add_values(queries + r, seen_of_block(queries + r, b), begins, slab, first, SLAB);
            else
                add_values(queries + r, seen_of_block(queries + r, b), begins, slab, first, width);
        }
    }
}

/* What the span from `first` on has added joins the sums of those before it. */
static SSSE3 void close_span(query *row, int64_t first, int64_t head_dim)
{
    float *o = row->o, *total = row->total, g = first > 0 ? f32_exp(row->before - row->m) : 0.0f;
    __m128 merge = _mm_set1_ps(g);
    if (first == 0)
        memcpy(total, o, (size_t)head_dim * sizeof *o);
    else
        for (int64_t d = 0; d < head_dim; d += 4)
            store_n(total + d, mul_add(load_n(o + d, head_dim - d), load_n(total + d, head_dim - d), merge), head_dim - d);
    row->all = first > 0 ? row->all * g + row->l : row->l;
    row->before = row->m;
}

/* Rows are those of consecutive tokens, so that the first ones may have seen all they see before the last block. */
static SSSE3 void merge_block(const kv_source *a, query *queries, int64_t rows, const block *b)
{
    while (rows && queries->seen <= b->first) {
        queries++;
        rows--;
    }
    for (int64_t r = 0; r < rows && b->first > 0 && b->first % ATTENTION_SPAN == 0; r++)
        close_span(queries + r, b->first - ATTENTION_SPAN, a->head_dim);
    scores(a, queries, rows, b);
    for (int64_t r = 0; r < rows; r++)
        weigh(queries + r, b->first, seen_of_block(queries + r, b));
    merge_values(a, queries, rows, b);
}

/* o = the sums of all spans / the sum of their weights. */
static SSSE3 void finish_row(query *row, int64_t head_dim)
{
    int64_t last = (row->seen - 1) / ATTENTION_SPAN * ATTENTION_SPAN;
    if (last > 0)
        close_span(row, last, head_dim);
    const float *sum = last > 0 ? row->total : row->o;
    __m128 l = _mm_set1_ps(last > 0 ? row->all : row->l);
    for (int64_t d = 0; d < head_dim; d += 4)
        store_n(row->o + d, _mm_div_ps(load_n(sum + d, head_dim - d), l), head_dim - d);
}

static SSSE3 void run_rows(const kv_source *a, query *queries, int64_t rows)
{
    int64_t seen = rows ? queries[rows - 1].seen : 0;
    float totals[seen > ATTENTION_SPAN ? rows * a->head_dim : 1];
    for (int64_t r = 0; r < rows; r++)
        queries[r].total = totals + (seen > ATTENTION_SPAN ? r * a->head_dim : 0);
    for (block b = {0}; b.first < seen; b.first += ATTENTION_BLOCK) {
        b.n = seen - b.first < ATTENTION_BLOCK ? seen - b.first : ATTENTION_BLOCK;
        kv_rows(a, a->k_pages, b.first, b.n, b.k);
        kv_rows(a, a->v_pages, b.first, b.n, b.v);
        merge_block(a, queries, rows, &b);
    }
    for (int64_t r = 0; r < rows; r++)
        finish_row(queries + r, a->head_dim);
}

#endif
