#include "gemm_entry.cuh"

extern "C" __global__ __launch_bounds__(gemm_large::THREADS) void gemm_f32(gemm_args a)
{
    __shared__ float4 shared[gemm_large::FLOATS / 4];
    gemm_dense<gemm_large, float_source>(a, (float *)shared);
}

extern "C" __global__ __launch_bounds__(gemm_small::THREADS) void gemm_f32_small(gemm_args a)
{
    __shared__ float4 shared[gemm_small::FLOATS / 4];
    gemm_dense<gemm_small, float_source>(a, (float *)shared);
}

typedef gemm_shape<4, 4, 4, 2> any_shape; /* 64 x 64, 256 threads */

/* Slice of 8 columns from k on, float by float; `depth` of them exist. */
INLINE void any_fill(float *s, const float *p, int depth, int64_t stride, const int32_t *source, int first, int rows)
{
    int t = (int)threadIdx.x, k = t % GEMM_SLICE;
    for (int i = t / GEMM_SLICE; i < any_shape::ROWS && k < depth; i += any_shape::THREADS / GEMM_SLICE) {
        int row = min_of(first + i, rows - 1);
        s[k * any_shape::LD + i] = p[(source ? source[row] : row) * stride + k];
    }
}

/* Partial slices are short, not padded: no term is added that the sum does not have. */
extern "C" __global__ __launch_bounds__(any_shape::THREADS) void gemm_f32_any(gemm_args a)
{
    typedef any_shape S;
    __shared__ float4 shared[S::BUFFER / 4];
    float *s = (float *)shared, *x = s + S::row(threadIdx.x, 0), *w = s + GEMM_SLICE * S::LD + S::col(threadIdx.x, 0);
    int row = (int)blockIdx.y * S::ROWS, col = (int)blockIdx.x * S::COLS, k = 0;
    float acc[S::TM][S::TN];
    for (bool added = false; k < a.k; added = true) {
        int end = min_of((int)a.k, k + (blocks_of((int)a.k, 16) * 16 - k - 1) % GEMM_PART + 1);
        for (gemm_clear<S>(acc); k < end; k += GEMM_SLICE) {
            int depth = min_of(GEMM_SLICE, end - k);
            __syncthreads();
            any_fill(s, a.x + k, depth, a.x_stride, a.source, row, (int)a.m);
            any_fill(s + GEMM_SLICE * S::LD, (const float *)a.w + k, depth, a.k, (const int32_t *)0, col, (int)a.n);
            __syncthreads();
            if (depth == GEMM_SLICE)
                gemm_steps<S, GEMM_SLICE>(acc, x, w);
            else
                for (int i = 0; i < depth; i++)
                    gemm_steps<S, 1>(acc, x + i * S::LD, w + i * S::LD);
        }
        gemm_store<S>(acc, a.y + row * a.y_stride + col, a.y_stride, (int)a.m - row, (int)a.n - col, added);
    }
}
