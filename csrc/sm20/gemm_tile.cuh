/* One block's tile of y = x W^T for every kernel of the family: how threads share it, the loop over k, the store.
 *
 * Every element of y is a sum of chains acc = fmaf(x[k], w[k], acc) over parts of 512 columns (ops.h), in whatever tile
 * it falls: tile shapes, row counts and the format's being expanded before or on the way change no bit. The error of a
 * chain grows with its length: one over 4096 columns errs four times as much as PyTorch's products on a CPU. The sum of
 * the parts stands in y, since registers have no room for it.
 *
 * A warp's 32 lanes stand LM high and LN wide; a thread has TM rows and TN columns, in pairs that lie side by side for
 * 64-bit shared loads: pair p of a lane stands at 2 (p L + lane). Low lane bits count rows and columns in turn, so that
 * neighbours want the same words, which newer cards then serve in one pass. There are two buffers of one slice of 8
 * columns: while one is multiplied, the next slice is on its way to registers, and goes into the other buffer
 * afterwards; one barrier a slice. 32 sums a thread leave Fermi's 63 registers room for that slice, the operands of two
 * steps and the addresses; 36 do not.
 */
#ifndef FERMI_GEMM_TILE_CUH
#define FERMI_GEMM_TILE_CUH

#include "gemm_source.cuh"

#define GEMM_PART_PAIRS (GEMM_PART / (2 * GEMM_SLICE))

template <int TM_, int TN_, int WM_, int WN_> struct gemm_shape {
    enum {
        TM = TM_, TN = TN_, LM = 4, LN = 8, WM = WM_, WN = WN_,
        THREADS = 32 * WM_ * WN_, ROWS = TM_ * LM * WM_, COLS = TN_ * LN * WN_,
        LD = (ROWS > COLS ? ROWS : COLS) + 4, BUFFER = 2 * GEMM_SLICE * LD, FLOATS = 2 * BUFFER
    };

    /* First row and column of the warp of thread t. */
    static METHOD int warp_row(unsigned t)
    {
        return (int)(t >> 5) / WN * (LM * TM);
    }

    static METHOD int warp_col(unsigned t)
    {
        return (int)(t >> 5) % WN * (LN * TN);
    }

    /* Row or column of the tile that value i of thread t belongs to. */
    static METHOD int row(unsigned t, int i)
    {
        int lane = (int)((t & 1) | ((t >> 1) & 2));
        return warp_row(t) + 2 * ((i >> 1) * LM + lane) + (i & 1);
    }

    static METHOD int col(unsigned t, int j)
    {
        int lane = (int)(((t >> 1) & 1) | ((t >> 2) & 6));
        return warp_col(t) + 2 * ((j >> 1) * LN + lane) + (j & 1);
    }
};

/* acc += the product of DEPTH columns. */
template <class S, int DEPTH> INLINE void gemm_steps(float (&acc)[S::TM][S::TN], const float *a, const float *b)
{
#pragma unroll
    for (int k = 0; k < DEPTH; k++) {
        float x[S::TM];
#pragma unroll
        for (int i = 0; i < S::TM; i += 2) {
            float2 pair = *(const float2 *)(a + k * S::LD + S::LM * i);
            x[i] = pair.x;
            x[i + 1] = pair.y;
        }
#pragma unroll
        for (int j = 0; j < S::TN; j += 2) {
            float2 w = *(const float2 *)(b + k * S::LD + S::LN * j);
#pragma unroll
            for (int i = 0; i < S::TM; i++)
                acc[i][j] = fmaf(x[i], w.x, acc[i][j]);
#pragma unroll
            for (int i = 0; i < S::TM; i++)
                acc[i][j + 1] = fmaf(x[i], w.y, acc[i][j + 1]);
        }
    }
}

template <int HALF, class X, class W> INLINE void gemm_fetch(X &x, W &w, int left)
{
    x.template fetch<HALF>(left);
    w.template fetch<HALF>(left);
}

template <class S, class X, class W> INLINE void gemm_stash(float *s, const X &x, const W &w, int left)
{
    w.stash(s + GEMM_SLICE * S::LD, left);
    x.stash(s, left);
}

template <class S> INLINE void gemm_clear(float (&acc)[S::TM][S::TN])
{
#pragma unroll
    for (int i = 0; i < S::TM; i++)
#pragma unroll
        for (int j = 0; j < S::TN; j++)
            acc[i][j] = 0.0f;
}

/* The sums of a tile over its next part: `left` pairs of slices are left before, and a multiple of a part's afterwards.
 * Warps that do not work, because all their rows are beyond the last, only help to read. */
template <class S, class X, class W>
INLINE void gemm_sums(float (&acc)[S::TM][S::TN], float *s, X &x, W &w, int &left, bool works)
{
    const float *a = s + S::row(threadIdx.x, 0), *b = s + GEMM_SLICE * S::LD + S::col(threadIdx.x, 0);
    gemm_clear<S>(acc);
    gemm_fetch<0>(x, w, left);
    gemm_stash<S>(s, x, w, left);
    __syncthreads();
    for (;;) {
        gemm_fetch<1>(x, w, left);
        if (works)
            gemm_steps<S, GEMM_SLICE>(acc, a, b);
        gemm_stash<S>(s + S::BUFFER, x, w, left);
        x.next(left);
        w.next(left);
        __syncthreads();
        left--;
        if (left % GEMM_PART_PAIRS)
            gemm_fetch<0>(x, w, left);
        if (works)
            gemm_steps<S, GEMM_SLICE>(acc, a + S::BUFFER, b + S::BUFFER);
        if (left % GEMM_PART_PAIRS == 0)
            return;
        gemm_stash<S>(s, x, w, left);
        __syncthreads();
    }
}

/* Row i of a thread's sums to y, which points at the tile's first element; added to what is there from earlier parts, which is
 * read four columns at a time. */
template <class S>
INLINE void gemm_store_row(const float (&acc)[S::TN], unsigned t, float *y, bool added)
{
#pragma unroll
    for (int j = 0; j < S::TN; j += 4) {
        float *to = y + S::col(t, j), sums[4];
#pragma unroll
        for (int n = 0; n < 4; n++)
            sums[n] = added ? to[S::col(0, n)] + acc[j + n] : acc[j + n];
#pragma unroll
        for (int n = 0; n < 4; n++)
            to[S::col(0, n)] = sums[n];
    }
}

/* The same for a tile of which only [rows, cols] is there. */
template <class S>
INLINE void gemm_store(const float (&acc)[S::TM][S::TN], float *y, int64_t stride, int rows, int cols, bool added)
{
    unsigned t = (unsigned)reread_thread();
#pragma unroll
    for (int i = 0; i < S::TM; i++)
        if (S::row(t, i) < rows) {
            float *to = y + S::row(t, i) * stride;
            if (cols >= S::COLS)
                gemm_store_row<S>(acc[i], t, to, added);
            else
#pragma unroll
                for (int j = 0; j < S::TN; j++)
                    if (S::col(t, j) < cols)
                        to[S::col(t, j)] = added ? to[S::col(t, j)] + acc[i][j] : acc[i][j];
        }
}

#endif
