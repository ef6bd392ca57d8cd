/* Tiles of four weight rows by two tokens (dot.h); a vector is eight elements along the rows. */
#include "../kernels.h"
#include "dot.h"

enum { TOKENS_PER_PASS = 32 }; /* 256 KB at n = 2048, met again by every four rows */

#define INLINE static inline __attribute__((always_inline))

INLINE AVX2 void tile(const gemm_f32_args *a, int64_t row, int rows, int64_t token, int tokens)
{
    const float *w[DOT_ROWS], *x[DOT_COLUMNS];
    float out[DOT_ROWS][DOT_COLUMNS];
    for (int r = 0; r < rows; r++)
        w[r] = a->w + (row + r) * a->n;
    for (int t = 0; t < tokens; t++)
        x[t] = a->x + (token + t) * a->n;
    dot_tile(rows, tokens, w, x, a->n, out);
    for (int t = 0; t < tokens; t++)
        for (int r = 0; r < rows; r++)
            a->y[(token + t) * a->y_stride + row + r] = out[r][t];
}

INLINE AVX2 void rows_times_tokens(const gemm_f32_args *a, int64_t row, int rows, int64_t t, int64_t end)
{
    for (; t + 2 <= end; t += 2)
        tile(a, row, rows, t, 2);
    if (t < end)
        tile(a, row, rows, t, 1);
}

AVX2 void avx2_gemm_f32(const gemm_f32_args *a, int64_t begin, int64_t end)
{
    for (int64_t t = 0, r; t < a->tokens; t += TOKENS_PER_PASS) {
        int64_t stop = t + TOKENS_PER_PASS < a->tokens ? t + TOKENS_PER_PASS : a->tokens;
        for (r = begin; r + 4 <= end; r += 4)
            rows_times_tokens(a, r, 4, t, stop);
        for (; r < end; r++)
            rows_times_tokens(a, r, 1, t, stop);
    }
}
