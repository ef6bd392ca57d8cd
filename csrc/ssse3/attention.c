/* Query rows that read the same key head, heads of some tokens, share a pass over its cache (attention_rows.h). */
#include "attention_rows.h"

/* The items of [begin, end) that read one key head. */
static SSSE3 void run_head(const attention_args *a, int64_t begin, int64_t end, int64_t kv_head)
{
    int64_t shared = a->heads / a->kv_heads, rows = 0;
    kv_source source = kv_source_of(a, kv_head);
    query queries[MAX_ROWS];
    for (int64_t token = begin / a->heads; token * a->heads < end; token++)
        for (int64_t h = 0, item = token * a->heads + kv_head * shared; h < shared; h++, item++) {
            if (item < begin || item >= end)
                continue;
            queries[rows].q = a->q + item * a->head_dim;
            queries[rows].o = a->o + item * a->head_dim;
            queries[rows].seen = *a->start + token + 1;
            if (++rows == MAX_ROWS) {
                run_rows(&source, queries, rows);
                rows = 0;
            }
        }
    run_rows(&source, queries, rows);
}

SSSE3 void ssse3_attention(const attention_args *a, int64_t begin, int64_t end)
{
    if (a->head_dim > MAX_HEAD_DIM) { /* no model has such heads, and neither keys nor sums room */
        scalar_attention(a, begin, end);
        return;
    }
    for (int64_t kv_head = 0; kv_head < a->kv_heads; kv_head++)
        run_head(a, begin, end, kv_head);
}
