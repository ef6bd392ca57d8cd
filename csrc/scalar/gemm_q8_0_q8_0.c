#include "matmul_q8.h"

void scalar_gemm_q8_0_q8_0(const matmul_q8_args *a, int64_t begin, int64_t end)
{
    matmul_q8(a, begin, end, sizeof(q8_0_x8), q8_0_dots);
}
