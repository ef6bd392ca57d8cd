/* Tokens of one window share a pass over its keys and values of a head (attention_rows.h), as if these were a cache of one
 * page. */
#include "attention_rows.h"

/* Rows of one head and window: tokens token..token+rows. */
static AVX2 void avx2_window_rows(const full_attention_args *a, query *queries, int64_t rows, int64_t token, int64_t head)
{
    int64_t row = a->heads * a->head_dim, first = token / a->window * a->window;
    void *k = (void *)(a->k + first * row), *v = (void *)(a->v + first * row);
    kv_source source = {&k, &v, INT64_MAX, 4 * head * a->head_dim, 4 * row, a->head_dim, KV_F32, a->scale};
    for (int64_t r = 0; r < rows; r++) {
        int64_t at = ((token + r) * a->heads + head) * a->head_dim;
        queries[r].q = a->q + at;
        queries[r].o = a->o + at;
        queries[r].seen = a->window;
    }
    avx2_run_rows(&source, queries, rows);
}

/* The items of [begin, end) of one head. */
static AVX2 void avx2_head_rows(const full_attention_args *a, int64_t begin, int64_t end, int64_t head)
{
    query queries[MAX_ROWS];
    int64_t token = (begin - head + a->heads - 1) / a->heads, last = (end - head + a->heads - 1) / a->heads;
    while (token < last) {
        int64_t rows = (token / a->window + 1) * a->window - token;
        rows = rows < last - token ? rows : last - token;
        rows = rows < MAX_ROWS ? rows : MAX_ROWS;
        avx2_window_rows(a, queries, rows, token, head);
        token += rows;
    }
}

AVX2 void avx2_full_attention(const full_attention_args *a, int64_t begin, int64_t end)
{
    if (a->head_dim > MAX_HEAD_DIM) { /* no model has such heads, and sums no room */
        scalar_full_attention(a, begin, end);
        return;
    }
    for (int64_t head = 0; head < a->heads; head++)
        avx2_head_rows(a, begin, end, head);
}
