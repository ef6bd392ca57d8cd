/* A grouped product is a run of plain products, one per hit. */
#ifndef FERMI_SCALAR_GROUPED_H
#define FERMI_SCALAR_GROUPED_H

#include "../kernels.h"
#include "blocks.h"

/* Groups [begin, end) of one hit's product. */
typedef struct {
    matmul_q8_args product;
    int64_t begin, end;
} hit_part;

/* Moves *begin over the next items of [*begin, end) that belong to one hit and describes them; 0 if there are none. */
INLINE int next_part(const grouped_q8_args *a, int64_t *begin, int64_t end, hit_part *part)
{
    const int64_t groups = (a->rows + GROUP - 1) / GROUP;
    if (*begin >= end || *begin >= *a->hits * groups)
        return 0;
    const int64_t hit = *begin / groups, row = a->first[hit], skipped = a->source ? 0 : row, blocks = a->n / BLOCK;
    const int64_t past = end < (hit + 1) * groups ? end : (hit + 1) * groups;
    part->product = (matmul_q8_args){
        .w = a->w + a->hit[hit] * a->stride,
        .codes = a->codes + skipped * a->n,
        .d = a->d + skipped * blocks,
        .sums = a->sums + skipped * blocks,
        .source = a->source ? a->source + row : NULL,
        .y = a->y + row * a->rows,
        .rows = a->rows,
        .n = a->n,
        .tokens = a->first[hit + 1] - row,
        .y_stride = a->rows,
    };
    part->begin = *begin - hit * groups;
    part->end = past - hit * groups;
    *begin = past;
    return 1;
}

#endif
