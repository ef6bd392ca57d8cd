/* Products with a lower triangle of 64 rows, 64 rows x 128 columns at a time (product_tile.cuh), in two stages of 32
 * steps. What stands above the diagonal is no term of a sum, not even as zero, which NaN would turn into NaN. */
#ifndef FERMI_GDN_TRIANGLE_CUH
#define FERMI_GDN_TRIANGLE_CUH

#include "gdn_chunk.cuh"
#include "product_tile.cuh"

enum { STRIP = LM * TM }; /* rows of a warp: two slices of steps cross the diagonal in them */

/* Stage `stage` of a triangle, which lies by columns, as it lies. */
INLINE void load_triangle(float *s, const float *triangle, int stage)
{
    unsigned t = thread_index();
    const float *from = triangle + stage * STAGE * ROWS + 4 * t;
    float4 first = read_quad(from), second = read_quad(from + 4 * THREADS);
    write_quad(s + 4 * t, first);
    write_quad(s + 4 * (t + THREADS), second);
}

/* acc += DEPTH steps from step `begin` on that cross the diagonal of the rows from `row` on. */
INLINE void diagonal_steps(float (&acc)[TM][TN], const float *x, const float *y, int begin, int row)
{
#pragma unroll 1
    for (int k = 0; k < DEPTH; k++, x += ROWS, y += COLS)
#pragma unroll
        for (int i = 0; i < TM; i++)
            if (begin + k <= row + row_step(i))
#pragma unroll
                for (int j = 0; j < TN; j++)
                    acc[i][j] = fmaf(x[row_step(i)], y[col_step(j)], acc[i][j]);
}

/* acc += stage `stage` of the triangle at x times the rows at y. */
INLINE void add_triangle(float (&acc)[TM][TN], const float *x, const float *y, int stage)
{
    unsigned t = thread_index();
    int row = thread_row(t), strip = (int)(t / 64) * STRIP;
    x += row;
    y += thread_col(t);
#pragma unroll 1
    for (int k = 0; k < STAGE; k += DEPTH) {
        int begin = stage * STAGE + k;
        if (begin + DEPTH <= strip)
            product_steps<ROWS, COLS>(acc, x + k * ROWS, y + k * COLS);
        else if (begin < strip + STRIP)
            diagonal_steps(acc, x + k * ROWS, y + k * COLS, begin, row);
    }
}

#endif
