#include "gdn_triangle.cuh"

/* Rows of a chunk: those of v, or of k. */
struct chunk_rows {
    const float *carried, *fresh;
    int carried_stride, stride, width;

    __device__ __forceinline__ chunk_rows(const gdn_chunk_args &a, int head, bool keys)
    {
        int key_head = key_head_of(a, head);
        width = (int)(keys ? a.dk : a.dv);
        carried = keys ? a.open_k + key_head * width : a.open_v + head * width;
        fresh = keys ? a.k + key_head * width : a.v + head * width;
        carried_stride = (int)(keys ? a.k_heads : a.v_heads) * width;
        stride = keys ? carried_stride : (int)a.v_stride;
    }
};

/* 32 rows of beta v, or of beta exp(c) k, whose rows decayed to the chunk's end go to `decayed`. Columns are held to the
 * last four there are. */
INLINE void load_rows(float *s, const gdn_chunk_args &a, const chunk_rows &rows, const float *gates, int chunk, int stage,
                      float *decayed)
{
    unsigned t = thread_index();
    int at = min_of((int)(t % 32) * 4, rows.width - 4), first = stage * STAGE + (int)(t / 32);
    float4 next[STAGE / 8];
#pragma unroll
    for (int i = 0; i < STAGE / 8; i++)
        next[i] = read_quad(row_at(a, chunk * CHUNK + first + 8 * i, rows.carried, rows.carried_stride, rows.fresh,
                                   rows.stride) + at);
#pragma unroll
    for (int i = 0; i < STAGE / 8; i++) {
        int row = first + 8 * i;
        float by = gates[BETA + row];
        if (decayed) {
            by *= gates[DECAY + row];
            write_quad(decayed + row * SIDE + t % 32 * 4, times(next[i], gates[REST + row]));
        }
        write_quad(s + (t / 32 + 8 * i) * COLS + t % 32 * 4, times(next[i], by));
    }
}

INLINE void store_values(const float (&acc)[TM][TN], float *values, int width)
{
    unsigned t = thread_index();
    int row = thread_row(t), col = thread_col(t);
#pragma unroll
    for (int i = 0; i < TM; i++)
#pragma unroll
        for (int j = 0; j < TN; j += 2)
            if (col + col_step(j) < width)
                *(float2 *)(values + (row + row_step(i)) * SIDE + col + col_step(j)) =
                    make_float2(acc[i][j], acc[i][j + 1]);
}

INLINE void store_keys(const float (&acc)[TM][TN], float *keys, int width)
{
    unsigned t = thread_index();
    int row = thread_row(t), col = thread_col(t);
#pragma unroll
    for (int j = 0; j < TN; j++)
#pragma unroll
        for (int i = 0; i < TM; i += 2)
            if (col + col_step(j) < width)
                *(float2 *)(keys + (col + col_step(j)) * CHUNK + row + row_step(i)) =
                    make_float2(acc[i][j], acc[i + 1][j]);
}

/* blockIdx.z: 0 for U = T (beta v), 1 for W = T (beta exp(c) k). Without launch bounds: see gdn_chunk_pass. */
extern "C" __global__ void gdn_chunk_solve(gdn_chunk_args a)
{
    __shared__ float4 triangle[STAGE * ROWS / 4], rows[STAGE * COLS / 4];
    int chunk = (int)a.first_chunk + (int)blockIdx.x, head = (int)blockIdx.y;
    bool keys = blockIdx.z == 1;
    float *own = scratch_of(a, chunk, head), acc[TM][TN];
    chunk_rows source(a, head, keys);
    product_clear(acc);
#pragma unroll 1
    for (int stage = 0; stage < CHUNK / STAGE; stage++) {
        load_triangle((float *)triangle, own + STATE, stage);
        load_rows((float *)rows, a, source, own + GATES, chunk, stage, keys ? own + KEYS + source.width * CHUNK : 0);
        __syncthreads();
        if (warp_works(thread_index(), ROWS, source.width))
            add_triangle(acc, (const float *)triangle, (const float *)rows, stage);
        __syncthreads();
    }
    if (keys)
        store_keys(acc, own + KEYS, (int)a.dk);
    else
        store_values(acc, own + VALUES, (int)a.dv);
}
