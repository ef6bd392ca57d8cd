/* The bodies of the GEMM entry points: which tile a block has, where its rows come from, where they go. Where they go is
 * worked out anew after each part, from registers read anew, because the loop over k has none to spare. */
#ifndef FERMI_GEMM_ENTRY_CUH
#define FERMI_GEMM_ENTRY_CUH

#include "gemm_tile.cuh"

typedef gemm_shape<4, 8, 4, 2> gemm_large; /* 64 x 128, 256 threads */
typedef gemm_shape<4, 4, 2, 2> gemm_small; /* 32 x 64, 128 threads */

/* Whether a part of k columns that leaves so many pairs of slices is not the first. */
INLINE bool gemm_added(int left, int64_t k)
{
    return left + GEMM_PART_PAIRS < (int)k / (2 * GEMM_SLICE);
}

/* blockIdx.x counts tiles of columns, blockIdx.y tiles of rows. `shared` has S::FLOATS floats, aligned to 16 bytes. */
template <class S, template <int, int, int> class W> INLINE void gemm_dense(const gemm_args &g, float *shared)
{
    int row = (int)blockIdx.y * S::ROWS, col = (int)blockIdx.x * S::COLS;
    float acc[S::TM][S::TN];
    float_source<S::ROWS, S::THREADS, S::LD> x;
    W<S::COLS, S::THREADS, S::LD> w;
    x.begin(g.x, g.source, (unsigned)g.x_stride, row, (int)g.m);
    w.begin(g.w, 0u, (unsigned)g.k, col, (int)g.n);
    int left = (int)g.k / (2 * GEMM_SLICE);
    bool works = S::warp_row(threadIdx.x) < (int)g.m - row;
    while (left > 0) {
        gemm_sums<S>(acc, shared, x, w, left, works);
        int to_row = reread_block_y() * S::ROWS, to_col = reread_block_x() * S::COLS;
        gemm_store<S>(acc, g.y + to_row * g.y_stride + to_col, g.y_stride, (int)g.m - to_row, (int)g.n - to_col,
                      gemm_added(left, g.k));
    }
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
    int left = (int)g.k / (2 * GEMM_SLICE);
    bool works = S::warp_row(threadIdx.x) < end - row;
    while (left > 0) {
        gemm_sums<S>(acc, shared, x, w, left, works);
        int entry = reread_block_y(), to_col = reread_block_x() * S::COLS;
        int to_row = g.tiles[2 + 2 * entry], to_end = g.first[g.tiles[1 + 2 * entry] + 1];
        gemm_store<S>(acc, g.y + to_row * g.y_stride + to_col, g.y_stride, to_end - to_row, (int)g.n - to_col,
                      gemm_added(left, g.k));
    }
}

#endif
