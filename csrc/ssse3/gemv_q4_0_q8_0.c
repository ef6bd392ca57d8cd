#include "matmul_q8.h"

SSSE3 void ssse3_gemv_q4_0_q8_0(const matmul_q8_args *a, int64_t begin, int64_t end)
{
    gemv(a, q4_0, begin, end);
}
