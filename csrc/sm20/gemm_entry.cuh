/* The bodies of the GEMM entry points: which tile a block has, where its rows come from, where they go. */
#ifndef FERMI_GEMM_ENTRY_CUH
#define FERMI_GEMM_ENTRY_CUH

#include "gemm_tile.cuh"

typedef gemm_shape<4, 8, 4, 2> gemm_large; /* 64 x 128, 256 threads */
typedef gemm_shape<4, 4, 2, 2> gemm_small; /* 32 x 64, 128 threads */

/* blockIdx.x counts tiles of columns, blockIdx.y tiles of rows. `shared` has S::FLOATS floats, aligned to 16 bytes. */
template <class S, template <int, int, int> class W> INLINE void gemm_dense(const gemm_args &g, float *shared)
{
    int row = (int)blockIdx.y * S::ROWS, col = (int)blockIdx.x * S::COLS;
    float acc[S::TM][S::TN];
    float_source<S::ROWS, S::THREADS, S::LD> x;
    W<S::COLS, S::THREADS, S::LD> w;
    x.begin(g.x, g.source, (unsigned)g.x_stride, row, (int)g.m);
    w.begin(g.w, 0u, (unsigned)g.k, col, (int)g.n);
    gemm_sums<S>(acc, shared, x, w, (int)g.k / (2 * GEMM_SLICE), (int)g.m - row);
    gemm_store<S>(acc, g.y + row * g.y_stride + col, g.y_stride, (int)g.m - row, (int)g.n - col);
}

/* blockIdx.x counts tiles of columns, blockIdx.y entries of the tile list. */
template <class S, template <int, int, int> class W> INLINE void gemm_grouped(const grouped_gemm_args &g, float *shared)
{
    if ((int)blockIdx.y >= g.tiles[0])
        return;
    int hit = g.tiles[1 + 2 * blockIdx.y], row = g.tiles[2 + 2 * blockIdx.y], end = g.first[hit + 1];
    int col = (int)blockIdx.x * S::COLS;
    float acc[S::TM][S::TN];
    float_source<S::ROWS, S::THREADS, S::LD> x;
    W<S::COLS, S::THREADS, S::LD> w;
    x.begin(g.x, g.source, (unsigned)g.x_stride, row, end);
    w.begin(g.w, (unsigned)(g.slot ? g.slot[hit] : hit) * (unsigned)g.w_stride, (unsigned)g.k, col, (int)g.n);
    gemm_sums<S>(acc, shared, x, w, (int)g.k / (2 * GEMM_SLICE), end - row);
    gemm_store<S>(acc, g.y + row * g.y_stride + col, g.y_stride, end - row, (int)g.n - col);
}

#endif
