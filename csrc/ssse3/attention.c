/* A vector is four dimensions of a head. Query heads of one token that read the same key head go through the cache together,
 * so that a block of keys and values comes from memory once for all of them; o holds their sums until the end. Scores are
 * tiles of four positions by two heads (dot.h); values are added with eight vectors (32 dimensions) of sums in registers. */
#include "../kernels.h"
#include "dot.h"
#include "math.h"

enum { ATTENTION_BLOCK = 64, MAX_GROUP = 8, VALUE_VECTORS = 8 };

/* Heads that run together: their running maximum m and sum l, and the scores, then weights p, of the block. */
typedef struct {
    const float *q;
    float *o;
    int64_t heads;
    float m[MAX_GROUP], l[MAX_GROUP];
    float p[MAX_GROUP][ATTENTION_BLOCK];
} group;

/* The key or value rows of positions first..first+n. */
static void block_rows(const attention_args *a, const float *const *pages, int64_t kv_head, int64_t first, int64_t n, const float **rows)
{
    int64_t page = first / a->page_tokens, offset = first % a->page_tokens;
    for (int64_t j = 0; j < n; j++) {
        rows[j] = pages[page] + (kv_head * a->page_tokens + offset) * a->head_dim;
        if (++offset == a->page_tokens) {
            offset = 0;
            page++;
        }
    }
}

static inline __attribute__((always_inline)) SSSE3 void score_tile(const attention_args *a, group *g, const float **k, int64_t j,
                                                                    int positions, int64_t head, int heads)
{
    const float *q[DOT_COLUMNS];
    float out[DOT_ROWS][DOT_COLUMNS];
    for (int h = 0; h < heads; h++)
        q[h] = g->q + (head + h) * a->head_dim;
    dot_tile(positions, heads, k + j, q, a->head_dim, out);
    for (int h = 0; h < heads; h++)
        for (int r = 0; r < positions; r++)
            g->p[head + h][j + r] = out[r][h] * a->scale;
}

static inline __attribute__((always_inline)) SSSE3 void scores(const attention_args *a, group *g, const float **k, int64_t n,
                                                                int64_t head, int heads)
{
    int64_t j = 0;
    for (; j + 4 <= n; j += 4)
        score_tile(a, g, k, j, 4, head, heads);
    for (; j < n; j++)
        score_tile(a, g, k, j, 1, head, heads);
}

/* Scores to weights: p = exp(p - max), zero from n on; returns the correction of the sums so far. */
static SSSE3 float weigh(float *p, int64_t n, int begins, float *m, float *l)
{
    __m128 v[4], top = _mm_set1_ps(-F32_INF);
    for (int64_t j = n; j < ATTENTION_BLOCK; j++)
        p[j] = -F32_INF;
    for (int j = 0; j < ATTENTION_BLOCK; j += 4)
        top = _mm_max_ps(_mm_loadu_ps(p + j), top);
    top = _mm_max_ps(top, _mm_movehl_ps(top, top));
    float max = _mm_cvtss_f32(_mm_max_ss(top, _mm_shuffle_ps(top, top, 1)));
    max = !begins && *m > max ? *m : max;
    for (int i = 0; i < 4; i++)
        v[i] = _mm_setzero_ps();
    for (int j = 0; j < ATTENTION_BLOCK; j += 4) {
        __m128 weight = v_exp(_mm_sub_ps(_mm_loadu_ps(p + j), _mm_set1_ps(max)));
        _mm_storeu_ps(p + j, weight);
        v[j / 4 % 4] = _mm_add_ps(v[j / 4 % 4], weight);
    }
    float sum = lane_tree(v), correction = begins ? 0.0f : f32_exp(*m - max);
    *l = begins ? sum : *l * correction + sum;
    *m = max;
    return correction;
}

/* o = o * correction + sum of p * v in `vectors` vectors of dimensions from d on, `left` of which exist. */
static inline __attribute__((always_inline)) SSSE3 void add_values(const float *p, const float **v, int64_t n, int begins, float correction,
                                                                    float *o, int64_t d, int vectors, int64_t left)
{
    __m128 sum[VALUE_VECTORS];
    for (int i = 0; i < vectors; i++)
        sum[i] = _mm_setzero_ps();
    for (int64_t j = 0; j < n; j++) {
        __m128 weight = _mm_set1_ps(p[j]);
        for (int i = 0; i < vectors; i++)
            sum[i] = _mm_add_ps(sum[i], _mm_mul_ps(weight, load_n(v[j] + d + 4 * i, left - 4 * i)));
    }
    for (int i = 0; i < vectors; i++) {
        if (!begins)
            sum[i] = _mm_add_ps(_mm_mul_ps(load_n(o + d + 4 * i, left - 4 * i), _mm_set1_ps(correction)), sum[i]);
        store_n(o + d + 4 * i, sum[i], left - 4 * i);
    }
}

static SSSE3 void merge_values(const attention_args *a, const float *p, const float **v, int64_t n, int begins, float correction, float *o)
{
    int64_t d = 0;
    for (; d + 4 * VALUE_VECTORS <= a->head_dim; d += 4 * VALUE_VECTORS)
        add_values(p, v, n, begins, correction, o, d, VALUE_VECTORS, 4 * VALUE_VECTORS);
    for (; d < a->head_dim; d += 4)
        add_values(p, v, n, begins, correction, o, d, 1, a->head_dim - d);
}

static SSSE3 void merge_block(const attention_args *a, group *g, int64_t kv_head, int64_t first, int64_t n)
{
    const float *k[ATTENTION_BLOCK], *v[ATTENTION_BLOCK];
    int64_t h = 0;
    block_rows(a, a->k_pages, kv_head, first, n, k);
    block_rows(a, a->v_pages, kv_head, first, n, v);
    for (; h + 2 <= g->heads; h += 2)
        scores(a, g, k, n, h, 2);
    if (h < g->heads)
        scores(a, g, k, n, h, 1);
    for (h = 0; h < g->heads; h++) {
        float correction = weigh(g->p[h], n, first == 0, &g->m[h], &g->l[h]);
        merge_values(a, g->p[h], v, n, first == 0, correction, g->o + h * a->head_dim);
    }
}

static SSSE3 void run_group(const attention_args *a, int64_t item, int64_t heads, int64_t kv_head)
{
    group g = {.q = a->q + item * a->head_dim, .o = a->o + item * a->head_dim, .heads = heads};
    int64_t seen = a->start + item / a->heads + 1;
    for (int64_t first = 0; first < seen; first += ATTENTION_BLOCK)
        merge_block(a, &g, kv_head, first, seen - first < ATTENTION_BLOCK ? seen - first : ATTENTION_BLOCK);
    for (int64_t h = 0; h < heads; h++)
        for (int64_t d = 0; d < a->head_dim; d += 4) {
            float *o = g.o + h * a->head_dim + d;
            store_n(o, _mm_div_ps(load_n(o, a->head_dim - d), _mm_set1_ps(g.l[h])), a->head_dim - d);
        }
}

SSSE3 void ssse3_attention(const attention_args *a, int64_t begin, int64_t end)
{
    int64_t shared = a->heads / a->kv_heads;
    for (int64_t item = begin; item < end;) {
        int64_t kv_head = item % a->heads / shared;
        int64_t heads = item / a->heads * a->heads + (kv_head + 1) * shared - item; /* up to the next key head */
        heads = heads < end - item ? heads : end - item;
        heads = heads < MAX_GROUP ? heads : MAX_GROUP;
        run_group(a, item, heads, kv_head);
        item += heads;
    }
}
