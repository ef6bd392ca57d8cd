#include "grouped.h"
#include "matmul_q8.h"

void scalar_grouped_gemm_q8_0_q8_0(const grouped_q8_args *a, int64_t begin, int64_t end)
{
    hit_part part;
    while (next_part(a, &begin, end, &part))
        matmul_q8(&part.product, part.begin, part.end, sizeof(q8_0_x8), q8_0_dots);
}
