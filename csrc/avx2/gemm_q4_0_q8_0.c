#include "matmul_q8.h"

AVX2 void avx2_gemm_q4_0_q8_0(const matmul_q8_args *a, int64_t begin, int64_t end)
{
    gemm(a, q4_0, begin, end);
}
