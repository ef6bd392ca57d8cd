#include "matmul_q8.h"

SSSE3 void ssse3_grouped_gemm_q8_0_q8_0(const grouped_q8_args *a, int64_t begin, int64_t end)
{
    grouped(a, q8_0, begin, end);
}
