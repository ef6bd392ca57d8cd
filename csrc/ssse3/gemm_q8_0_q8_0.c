#include "matmul_q8.h"

SSSE3 void ssse3_gemm_q8_0_q8_0(const matmul_q8_args *a, int64_t begin, int64_t end)
{
    gemm(a, q8_0, begin, end);
}
