/* Lane sums of products for a small tile of rows against a small tile of columns, each in the order of lanes.h.
 *
 * The four vectors of the 16 lanes are independent, so a tile runs one of them at a time (every fourth vector of the rows)
 * and keeps all its sums of that vector in registers: 4 rows by 2 columns are 8 chains of additions and load 6 vectors for
 * 8 products. DOT_CHUNK elements of the rows stay in the L1 cache while the four vectors take their turns. */
#ifndef FERMI_SSSE3_DOT_H
#define FERMI_SSSE3_DOT_H

#include "lanes.h"

enum { DOT_CHUNK = 512, DOT_ROWS = 4, DOT_COLUMNS = 2 };

typedef __m128 dot_sums[DOT_ROWS][DOT_COLUMNS];

/* Elements begin, begin + 16, ... below end of vector g, which begin includes already. */
static inline __attribute__((always_inline)) SSSE3 void dot_pass(int rows, int columns, const float *const *w, const float *const *x,
                                                                  int64_t begin, int64_t end, dot_sums sums)
{
    dot_sums s;
    for (int r = 0; r < rows; r++)
        for (int c = 0; c < columns; c++)
            s[r][c] = sums[r][c];
    for (int64_t i = begin; i < end; i += LANES) {
        __m128 xi[DOT_COLUMNS];
        for (int c = 0; c < columns; c++)
            xi[c] = _mm_loadu_ps(x[c] + i);
        for (int r = 0; r < rows; r++) {
            __m128 wi = _mm_loadu_ps(w[r] + i);
            for (int c = 0; c < columns; c++)
                s[r][c] = _mm_add_ps(s[r][c], _mm_mul_ps(wi, xi[c]));
        }
    }
    for (int r = 0; r < rows; r++)
        for (int c = 0; c < columns; c++)
            sums[r][c] = s[r][c];
}

/* out[r][c] = lane sum of w[r][i] * x[c][i]; rows and columns are constants where this is called. */
static inline __attribute__((always_inline)) SSSE3 void dot_tile(int rows, int columns, const float *const *w, const float *const *x,
                                                                  int64_t n, float out[DOT_ROWS][DOT_COLUMNS])
{
    dot_sums sums[4];
    int64_t whole = n / LANES * LANES;
    for (int g = 0; g < 4; g++)
        for (int r = 0; r < rows; r++)
            for (int c = 0; c < columns; c++)
                sums[g][r][c] = _mm_setzero_ps();
    for (int64_t chunk = 0; chunk < whole; chunk += DOT_CHUNK) {
        int64_t end = chunk + DOT_CHUNK < whole ? chunk + DOT_CHUNK : whole;
        for (int g = 0; g < 4; g++)
            dot_pass(rows, columns, w, x, chunk + 4 * g, end, sums[g]);
    }
    for (int64_t i = whole; i < n; i += 4) {
        __m128 (*s)[DOT_COLUMNS] = sums[(i - whole) / 4];
        for (int r = 0; r < rows; r++)
            for (int c = 0; c < columns; c++)
                s[r][c] = _mm_add_ps(s[r][c], _mm_mul_ps(load_n(w[r] + i, n - i), load_n(x[c] + i, n - i)));
    }
    for (int r = 0; r < rows; r++)
        for (int c = 0; c < columns; c++) {
            __m128 lanes[4] = {sums[0][r][c], sums[1][r][c], sums[2][r][c], sums[3][r][c]};
            out[r][c] = lane_tree(lanes);
        }
}

#endif
