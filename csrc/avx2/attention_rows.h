/* Attention of query rows over the positions they see (kernels.h: attention, full_attention). A vector is eight dimensions of a
 * head. Query rows that read the same keys go through them together, so that a block of keys and values comes from memory, and
 * becomes floats, once for all of them; o holds the sums of the open span. Scores are tiles of four positions by two rows, values
 * tiles of four rows by two vectors: eight sums in registers either way. What is not stored as floats is turned into them
 * sixteen keys, then 32 dimensions of the block's values at a time, which stay in the L1 cache. Scores fetch the block's values
 * meanwhile, and values the keys of the next block. */
#ifndef FERMI_AVX2_ATTENTION_ROWS_H
#define FERMI_AVX2_ATTENTION_ROWS_H

#include "../kernels.h"
#include "kv.h"
#include "lanes.h"
#include "math.h"

enum { MAX_ROWS = 64, KEY_TILE = 16, MAX_HEAD_DIM = 1024,
       POSITIONS = 4, PAIR = 2, VALUE_ROWS = 4, SLAB = 32, HALF = 16 };

/* A query row: scores, then weights p, of the block; sums of p * v of the open span and of those before it; how many positions
 * it sees; its running maximum m and what that was before the span; sums of the weights, l of the span, `all` of those before
 * it; and what the block does to the span's sums. */
typedef struct {
    float p[ATTENTION_BLOCK] __attribute__((aligned(32)));
    const float *q;
    float *o, *total;
    int64_t seen;
    float m, before, l, all, correction;
} query;

/* The block of positions first..first+n. */
typedef struct {
    int64_t first, n;
    const uint8_t *k[ATTENTION_BLOCK], *v[ATTENTION_BLOCK];
} block;

/* Stored rows to fetch meanwhile, a share of their bytes at each of `calls` calls: one line at a time between the arithmetic,
 * because a burst would keep the arithmetic's own loads waiting. */
typedef struct {
    const uint8_t *const *rows;
    int64_t row_bytes, bytes, share, done;
} stream;

static stream stream_of(const uint8_t *const *rows, int64_t n, int64_t row_bytes, int64_t calls)
{
    return (stream){rows, row_bytes, n * row_bytes, calls ? n * row_bytes / calls + 1 : 0, 0};
}

/* Where the next share begins; what follows a page is fetched in vain. */
INLINE const char *next_share(stream *s)
{
    int64_t at = s->done < s->bytes ? s->done : 0;
    s->done += s->share;
    return s->bytes ? (const char *)s->rows[at / s->row_bytes] + at % s->row_bytes : (const char *)s;
}

static void block_at(const kv_source *a, int64_t first, int64_t seen, block *b)
{
    b->first = first;
    b->n = seen - first < ATTENTION_BLOCK ? seen - first : ATTENTION_BLOCK;
    kv_rows(a, a->k_pages, first, b->n, b->k);
    kv_rows(a, a->v_pages, first, b->n, b->v);
}

/* lane_tree of four pairs of vectors at once. */
INLINE AVX2 __m128 four_trees(__m256 v[2][POSITIONS])
{
    __m128 l[POSITIONS];
    for (int r = 0; r < POSITIONS; r++) {
        __m256 eight = _mm256_add_ps(v[0][r], v[1][r]);
        l[r] = _mm_add_ps(_mm256_castps256_ps128(eight), _mm256_extractf128_ps(eight, 1));
    }
    _MM_TRANSPOSE4_PS(l[0], l[1], l[2], l[3]);
    return _mm_add_ps(_mm_add_ps(l[0], l[2]), _mm_add_ps(l[1], l[3]));
}

/* Scores of positions j..j+3 for one row or two. The two vectors of the 16 lanes take turns, for the registers' sake. */
INLINE AVX2 void score_tile(const kv_source *a, const float *const *k, query *queries, int rows, int64_t j, stream *values)
{
    const char *ahead = next_share(values);
    int64_t step = values->share * LANES / (2 * a->head_dim) + 1;
    __m256 sums[PAIR][2][POSITIONS];
    for (int g = 0; g < 2; g++) {
        __m256 s[PAIR][POSITIONS];
        for (int c = 0; c < rows; c++)
            for (int r = 0; r < POSITIONS; r++)
                s[c][r] = _mm256_setzero_ps();
        int64_t d = 8 * g;
        for (; d + 8 <= a->head_dim; d += LANES, ahead += step) {
            _mm_prefetch(ahead, _MM_HINT_T1);
            for (int r = 0; r < POSITIONS; r++) {
                __m256 key = _mm256_loadu_ps(k[r] + d);
                for (int c = 0; c < rows; c++)
                    s[c][r] = mul_add(s[c][r], key, _mm256_loadu_ps(queries[c].q + d));
            }
        }
        if (d < a->head_dim)
            for (int r = 0; r < POSITIONS; r++)
                for (int c = 0; c < rows; c++)
                    s[c][r] = mul_add(s[c][r], load_n(k[r] + d, a->head_dim - d), load_n(queries[c].q + d, a->head_dim - d));
        for (int c = 0; c < rows; c++)
            for (int r = 0; r < POSITIONS; r++)
                sums[c][g][r] = s[c][r];
    }
    for (int c = 0; c < rows; c++)
        _mm_storeu_ps(queries[c].p + j, _mm_mul_ps(four_trees(sums[c]), _mm_set1_ps(a->scale)));
}

/* Keys j..j+KEY_TILE of the block as floats, the last one repeated to a multiple of four; returns how many. */
INLINE AVX2 int64_t key_tile(const kv_source *a, const block *b, int64_t j, float *tile, const float **k)
{
    int64_t n = b->n - j < KEY_TILE ? b->n - j : KEY_TILE, i = 0;
    for (; i < n; i++) {
        k[i] = a->format == KV_F32 ? (const float *)b->k[j + i] : tile + i * a->head_dim;
        if (a->format != KV_F32)
            load_values(a->format, b->k[j + i], a->head_dim, 0, a->head_dim, tile + i * a->head_dim);
    }
    for (; i % POSITIONS; i++)
        k[i] = k[n - 1];
    return i;
}

/* Scores of all rows; those of positions that a row does not see are overwritten later. */
static AVX2 void avx2_scores(const kv_source *a, query *queries, int64_t rows, const block *b)
{
    const float *k[KEY_TILE];
    float tile[KEY_TILE * MAX_HEAD_DIM];
    int64_t calls = (b->n + POSITIONS - 1) / POSITIONS * ((rows + PAIR - 1) / PAIR);
    stream values = stream_of(b->v, b->n, kv_row_bytes(a->format, a->head_dim), calls);
    for (int64_t j = 0; j < b->n; j += KEY_TILE) {
        int64_t n = key_tile(a, b, j, tile, k);
        for (int64_t r = 0; r < rows; r += PAIR)
            for (int64_t i = 0; i < n; i += POSITIONS) {
                if (r + PAIR <= rows)
                    score_tile(a, k + i, queries + r, PAIR, j + i, &values);
                else
                    score_tile(a, k + i, queries + r, 1, j + i, &values);
            }
    }
}

/* Scores of the n positions from `first` on to weights: p = exp(p - max), zero behind them; moves m and l on. */
static AVX2 void avx2_weigh(query *row, int64_t first, int64_t n)
{
    int begins = first % ATTENTION_SPAN == 0;
    __m256 v[2] = {_mm256_setzero_ps(), _mm256_setzero_ps()}, eight = _mm256_set1_ps(-F32_INF);
    float *p = row->p;
    for (int64_t j = n; j < ATTENTION_BLOCK; j++)
        p[j] = -F32_INF;
    for (int j = 0; j < ATTENTION_BLOCK; j += 8)
        eight = _mm256_max_ps(_mm256_load_ps(p + j), eight); /* a NaN is passed over */
    __m128 top = _mm_max_ps(_mm256_castps256_ps128(eight), _mm256_extractf128_ps(eight, 1));
    top = _mm_max_ps(top, _mm_movehl_ps(top, top));
    float max = _mm_cvtss_f32(_mm_max_ss(top, _mm_shuffle_ps(top, top, 1)));
    max = first > 0 && row->m > max ? row->m : max;
    for (int j = 0; j < ATTENTION_BLOCK; j += 8) {
        __m256 weight = v_exp(_mm256_sub_ps(_mm256_load_ps(p + j), _mm256_set1_ps(max)));
        _mm256_store_ps(p + j, weight);
        v[j / 8 % 2] = _mm256_add_ps(v[j / 8 % 2], weight);
    }
    float sum = lane_tree(v);
    row->correction = begins ? 0.0f : f32_exp(row->m - max);
    row->l = begins ? sum : row->l * row->correction + sum;
    row->m = max;
}

static int64_t seen_of_block(const query *row, const block *b)
{
    return row->seen - b->first < b->n ? row->seen - b->first : b->n;
}

/* o = o * correction + sum of p * v for one, two or four rows, in 16 dimensions from `at` on of the values v, which are
 * dimensions first.. of the head; `width` of them exist. */
INLINE AVX2 void add_values(query *queries, int rows, int64_t n, int begins, const float *const *v, int64_t at, int64_t first,
                            int64_t width, stream *keys)
{
    const char *ahead = next_share(keys);
    int64_t step = keys->share / n + 1;
    __m256 sum[VALUE_ROWS][2];
    for (int r = 0; r < rows; r++)
        sum[r][0] = sum[r][1] = _mm256_setzero_ps();
    for (int64_t j = 0; j < n; j++, ahead += step) {
        __m256 low = _mm256_loadu_ps(v[j] + at), high = _mm256_loadu_ps(v[j] + at + 8);
        _mm_prefetch(ahead, _MM_HINT_T1);
        for (int r = 0; r < rows; r++) {
            __m256 p = _mm256_set1_ps(queries[r].p[j]);
            sum[r][0] = mul_add(sum[r][0], p, low);
            sum[r][1] = mul_add(sum[r][1], p, high);
        }
    }
    for (int r = 0; r < rows; r++)
        for (int i = 0; i < 2; i++) {
            float *o = queries[r].o + first + 8 * i;
            int64_t left = width - 8 * i;
            if (!begins)
                sum[r][i] = _mm256_add_ps(_mm256_mul_ps(load_n(o, left), _mm256_set1_ps(queries[r].correction)), sum[r][i]);
            store_n(o, sum[r][i], left);
        }
}

/* The same for all rows, those that see equally many positions together. */
INLINE AVX2 void add_to_rows(query *queries, int64_t rows, const block *b, const float *const *v, int64_t at, int64_t first,
                             int64_t width, stream *keys)
{
    int begins = b->first % ATTENTION_SPAN == 0;
    for (int64_t r = 0, together; r < rows; r += together) {
        int64_t n = seen_of_block(queries + r, b);
        for (together = VALUE_ROWS; r + together > rows || seen_of_block(queries + r + together - 1, b) != n;)
            together /= 2;
        if (together == VALUE_ROWS)
            add_values(queries + r, VALUE_ROWS, n, begins, v, at, first, width, keys);
        else if (together == 2)
            add_values(queries + r, 2, n, begins, v, at, first, width, keys);
        else
            add_values(queries + r, 1, n, begins, v, at, first, width, keys);
    }
}

/* Dimensions first..first+width of the block's values as floats: v[j], `at` floats on, in the page itself where they are
 * floats there, else in a slab, with zeros beyond the head; returns `at`. */
INLINE AVX2 int64_t value_slab(const kv_source *a, const block *b, int64_t first, int64_t width, float *slab, const float **v)
{
    int in_page = a->format == KV_F32 && width == SLAB;
    for (int64_t j = 0; j < b->n; j++) {
        v[j] = in_page ? (const float *)b->v[j] : slab + j * SLAB;
        if (in_page)
            continue;
        if (width < SLAB)
            memset(slab + j * SLAB, 0, SLAB * sizeof *slab);
        load_values(a->format, b->v[j], a->head_dim, first, width, slab + j * SLAB);
    }
    return in_page ? first : 0;
}

static AVX2 void avx2_merge_values(const kv_source *a, query *queries, int64_t rows, const block *b, const block *next)
{
    const float *v[ATTENTION_BLOCK];
    float slab[ATTENTION_BLOCK * SLAB] __attribute__((aligned(64)));
    int64_t calls = (a->head_dim + HALF - 1) / HALF * ((rows + VALUE_ROWS - 1) / VALUE_ROWS);
    stream keys = stream_of(next->k, next->n, kv_row_bytes(a->format, a->head_dim), calls);
    for (int64_t first = 0; first < a->head_dim; first += SLAB) {
        int64_t width = a->head_dim - first < SLAB ? a->head_dim - first : SLAB, at = value_slab(a, b, first, width, slab, v);
        for (int64_t i = 0; i < width; i += HALF) {
            if (width - i >= HALF)
                add_to_rows(queries, rows, b, v, at + i, first + i, HALF, &keys);
            else
                add_to_rows(queries, rows, b, v, at + i, first + i, width - i, &keys);
        }
    }
}

/* What the span from `first` on has added joins the sums of those before it. */
static AVX2 void avx2_close_span(query *row, int64_t first, int64_t head_dim)
{
    float *o = row->o, *total = row->total, g = first > 0 ? f32_exp(row->before - row->m) : 0.0f;
    __m256 merge = _mm256_set1_ps(g);
    if (first == 0)
        memcpy(total, o, (size_t)head_dim * sizeof *o);
    else
        for (int64_t d = 0; d < head_dim; d += 8)
            store_n(total + d, mul_add(load_n(o + d, head_dim - d), load_n(total + d, head_dim - d), merge), head_dim - d);
    row->all = first > 0 ? row->all * g + row->l : row->l;
    row->before = row->m;
}

/* Rows are those of consecutive tokens, so that the first ones may have seen all they see before the last block. */
static AVX2 void avx2_merge_block(const kv_source *a, query *queries, int64_t rows, const block *b, const block *next)
{
    while (rows && queries->seen <= b->first) {
        queries++;
        rows--;
    }
    for (int64_t r = 0; r < rows && b->first > 0 && b->first % ATTENTION_SPAN == 0; r++)
        avx2_close_span(queries + r, b->first - ATTENTION_SPAN, a->head_dim);
    avx2_scores(a, queries, rows, b);
    for (int64_t r = 0; r < rows; r++)
        avx2_weigh(queries + r, b->first, seen_of_block(queries + r, b));
    avx2_merge_values(a, queries, rows, b, next);
}

/* o = the sums of all spans / the sum of their weights. */
static AVX2 void avx2_finish_row(query *row, int64_t head_dim)
{
    int64_t last = (row->seen - 1) / ATTENTION_SPAN * ATTENTION_SPAN;
    if (last > 0)
        avx2_close_span(row, last, head_dim);
    const float *sum = last > 0 ? row->total : row->o;
    __m256 l = _mm256_set1_ps(last > 0 ? row->all : row->l);
    for (int64_t d = 0; d < head_dim; d += 8)
        store_n(row->o + d, _mm256_div_ps(load_n(sum + d, head_dim - d), l), head_dim - d);
}

static AVX2 void avx2_run_rows(const kv_source *a, query *queries, int64_t rows)
{
    block blocks[2];
    int64_t seen = rows ? queries[rows - 1].seen : 0;
    float totals[seen > ATTENTION_SPAN ? rows * a->head_dim : 1];
    for (int64_t r = 0; r < rows; r++)
        queries[r].total = totals + (seen > ATTENTION_SPAN ? r * a->head_dim : 0);
    if (rows)
        block_at(a, 0, seen, &blocks[0]);
    for (int64_t first = 0, turn = 0; first < seen; first += ATTENTION_BLOCK, turn = !turn) {
        block *next = &blocks[!turn];
        next->n = 0;
        if (first + ATTENTION_BLOCK < seen)
            block_at(a, first + ATTENTION_BLOCK, seen, next);
        avx2_merge_block(a, queries, rows, &blocks[turn], next);
    }
    for (int64_t r = 0; r < rows; r++)
        avx2_finish_row(queries + r, a->head_dim);
}

#endif
