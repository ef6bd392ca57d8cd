/* Lane sums of products for a small tile of rows against a small tile of columns, each in the order of lanes.h.
 *
 * A tile keeps eight chains of additions in registers: 4 rows by 2 columns of one of the two vectors that make up the
 * 16 lanes, which take their turns over DOT_CHUNK elements that stay in the level-1 cache meanwhile, or 4 rows by 1
 * column of both at once. */
#ifndef FERMI_AVX2_DOT_H
#define FERMI_AVX2_DOT_H

#include "lanes.h"

enum { DOT_CHUNK = 512, DOT_ROWS = 4, DOT_COLUMNS = 2, DOT_AHEAD = 256 /* elements prefetched ahead */ };

typedef __m256 dot_sums[DOT_ROWS][DOT_COLUMNS];

/* Adds the elements from `begin`, which is where vector `first` begins, up to `end`: one vector, or both at once. */
static inline __attribute__((always_inline)) AVX2 void dot_pass(int rows, int columns, int vectors,
                                                                 const float *const *w, const float *const *x,
                                                                 int64_t begin, int64_t end, dot_sums *sums)
{
    dot_sums s[2];
    for (int g = 0; g < vectors; g++)
        for (int r = 0; r < rows; r++)
            for (int c = 0; c < columns; c++)
                s[g][r][c] = sums[g][r][c];
    for (int64_t i = begin; i < end; i += LANES)
        for (int g = 0; g < vectors; g++) {
            __m256 xi[DOT_COLUMNS];
            for (int c = 0; c < columns; c++)
                xi[c] = _mm256_loadu_ps(x[c] + i + 8 * g);
            for (int r = 0; r < rows; r++) {
                __m256 wi = _mm256_loadu_ps(w[r] + i + 8 * g);
                for (int c = 0; c < columns; c++)
                    s[g][r][c] = _mm256_add_ps(s[g][r][c], _mm256_mul_ps(wi, xi[c]));
                if (vectors == 2 && g == 0) /* one column: rows come from memory; past their end it does nothing */
                    _mm_prefetch((const char *)(w[r] + i + DOT_AHEAD), _MM_HINT_T0);
            }
        }
    for (int g = 0; g < vectors; g++)
        for (int r = 0; r < rows; r++)
            for (int c = 0; c < columns; c++)
                sums[g][r][c] = s[g][r][c];
}

/* out[r][c] = lane sum of w[r][i] * x[c][i]; rows and columns are constants where this is called. */
static inline __attribute__((always_inline)) AVX2 void dot_tile(int rows, int columns, const float *const *w,
                                                                 const float *const *x, int64_t n,
                                                                 float out[DOT_ROWS][DOT_COLUMNS])
{
    const int vectors = columns == 1 ? 2 : 1;
    dot_sums sums[2];
    int64_t whole = n / LANES * LANES;
    for (int g = 0; g < 2; g++)
        for (int r = 0; r < rows; r++)
            for (int c = 0; c < columns; c++)
                sums[g][r][c] = _mm256_setzero_ps();
    for (int64_t chunk = 0; chunk < whole; chunk += DOT_CHUNK) {
        int64_t end = chunk + DOT_CHUNK < whole ? chunk + DOT_CHUNK : whole;
        for (int g = 0; g < 2; g += vectors)
            dot_pass(rows, columns, vectors, w, x, chunk + 8 * g, end, sums + g);
    }
    for (int64_t i = whole; i < n; i += 8) {
        __m256 (*s)[DOT_COLUMNS] = sums[(i - whole) / 8];
        for (int r = 0; r < rows; r++)
            for (int c = 0; c < columns; c++)
                s[r][c] = _mm256_add_ps(s[r][c], _mm256_mul_ps(load_n(w[r] + i, n - i), load_n(x[c] + i, n - i)));
    }
    for (int r = 0; r < rows; r++)
        for (int c = 0; c < columns; c++) {
            __m256 lanes[2] = {sums[0][r][c], sums[1][r][c]};
            out[r][c] = lane_tree(lanes);
        }
}

#endif
