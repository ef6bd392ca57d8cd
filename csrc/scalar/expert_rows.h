/* A counting sort of (token, slot) pairs by expert, shared by every backend: each step depends on the one before it, so vectors
 * bring nothing. It needs no scratch memory: `first` counts by expert until the hits are known. */
#ifndef FERMI_SCALAR_EXPERT_ROWS_H
#define FERMI_SCALAR_EXPERT_ROWS_H

#include "../kernels.h"

/* Turns first[e] = end of expert e's rows, for every expert, into the list of hits. Hits never overtake experts, so that it
 * works in place. Entries beyond the hits hold no rows: hit -1, first = rows. */
static inline void expert_rows_hits(const expert_rows_args *a, int32_t rows)
{
    int32_t hits = 0, start = 0;
    for (int64_t e = 0; e < a->experts; e++) {
        int32_t end = a->first[e];
        if (end == start)
            continue;
        a->hit[hits] = (int32_t)e;
        a->first[hits++] = start;
        start = end;
    }
    *a->hits = hits;
    a->first[hits] = rows;
    for (int64_t i = hits; i < a->experts; i++) {
        a->hit[i] = -1;
        a->first[i + 1] = rows;
    }
}

static inline void expert_rows_sort(const expert_rows_args *a)
{
    int64_t rows = a->tokens * a->k;
    for (int64_t e = 0; e < a->experts; e++)
        a->first[e] = 0;
    for (int64_t i = 0; i < rows; i++)
        a->first[a->ids[i]]++;
    for (int64_t e = 0, start = 0; e < a->experts; e++) {
        int32_t count = a->first[e];
        a->first[e] = (int32_t)start;
        start += count;
    }
    for (int64_t t = 0; t < a->tokens; t++)
        for (int64_t slot = t * a->k; slot < (t + 1) * a->k; slot++) {
            int32_t row = a->first[a->ids[slot]]++;
            a->source[row] = (int32_t)t;
            a->row_of[slot] = row;
        }
    expert_rows_hits(a, (int32_t)rows);
}

#endif
