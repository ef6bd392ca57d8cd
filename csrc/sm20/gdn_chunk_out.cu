#include "gdn_triangle.cuh"

#define LDQ (ROWS + 4) /* 4 more than a multiple of 8: the 32 writes of a warp that transposes meet 32 banks */

/* 32 columns of q, transposed. */
INLINE void load_queries(float *s, const gdn_chunk_args &a, int chunk, int key_head, int column)
{
    unsigned t = thread_index();
    int row = (int)(t / 2 % ROWS), part = (int)(t % 2 * 4 + t / 128 * 8);
    const float *from = query_row(a, chunk * CHUNK + row, key_head) + column + part;
    float4 first = read_quad(from), second = read_quad(from + 16);
    stash_transposed(s + part * LDQ + row, LDQ, first);
    stash_transposed(s + (part + 16) * LDQ + row, LDQ, second);
}

/* 32 rows of the state or of V. */
INLINE void load_rows(float *s, const float *from)
{
    unsigned t = thread_index();
    float4 next[STAGE / 8];
#pragma unroll
    for (int i = 0; i < STAGE / 8; i++)
        next[i] = read_quad(from + 4 * (t + i * THREADS));
#pragma unroll
    for (int i = 0; i < STAGE / 8; i++)
        write_quad(s + 4 * (t + i * THREADS), next[i]);
}

INLINE void decay_rows(float (&acc)[TM][TN], const float *decay)
{
    int row = thread_row(thread_index());
#pragma unroll
    for (int i = 0; i < TM; i++) {
        float by = decay[row + row_step(i)];
#pragma unroll
        for (int j = 0; j < TN; j++)
            acc[i][j] *= by;
    }
}

INLINE void store_outputs(const float (&acc)[TM][TN], const gdn_chunk_args &a, int chunk, int head)
{
    unsigned t = thread_index();
    int col = thread_col(t);
#pragma unroll
    for (int i = 0; i < TM; i++) {
        int token = chunk * CHUNK + thread_row(t) + row_step(i) - (int)a.open;
        if (token < 0 || token >= (int)a.tokens)
            continue;
        float *o = a.o + ((int64_t)token * (int)a.v_heads + head) * (int)a.dv + col;
#pragma unroll
        for (int j = 0; j < TN; j += 2)
            if (col + col_step(j) < (int)a.dv)
                *(float2 *)(o + col_step(j)) = make_float2(acc[i][j], acc[i][j + 1]);
    }
}

/* Rows of the chunk that is open now, of this value head, and of its key head if it is that one's first. A warp has a row and
 * the eighth after it at a time, all loads before the stores, which may be anywhere as far as compilers know. */
INLINE void carry_rows(const gdn_chunk_args &a, int head, int key_head)
{
    int rows = (int)(a.open + a.tokens), first = rows / CHUNK * CHUNK - (int)a.open, count = rows % CHUNK;
    int k_row = (int)(a.k_heads * a.dk), v_row = (int)(a.v_heads * a.dv), column = (int)(thread_index() % 32) * 4;
    bool has_v = column < (int)a.dv, has_k = column < (int)a.dk && head == key_head * (int)(a.v_heads / a.k_heads);
    const float *v = a.v + (int64_t)first * a.v_stride + head * (int)a.dv + column;
    const float *k = a.k + (int64_t)first * k_row + key_head * (int)a.dk + column;
    float *open_v = a.open_v + head * (int)a.dv + column, *open_k = a.open_k + key_head * (int)a.dk + column;
    /* those carried before are at their place */
#pragma unroll 1
    for (int i = max_of(-first, 0) + (int)(thread_index() / 32); i < count; i += 2 * THREADS / 32) {
        int next = i + THREADS / 32 < count ? i + THREADS / 32 : i;
        float4 none = make_float4(0.0f, 0.0f, 0.0f, 0.0f);
        float4 v0 = has_v ? read_quad(v + i * a.v_stride) : none, v1 = has_v ? read_quad(v + next * a.v_stride) : none;
        float4 k0 = has_k ? read_quad(k + i * k_row) : none, k1 = has_k ? read_quad(k + next * k_row) : none;
        if (has_v) {
            write_quad(open_v + i * v_row, v0);
            write_quad(open_v + next * v_row, v1);
        }
        if (has_k) {
            write_quad(open_k + i * k_row, k0);
            write_quad(open_k + next * k_row, k1);
        }
    }
    int row = (int)thread_index();
    if (row < count && row >= -first) {
        int to = row * (int)a.v_heads + head;
        int64_t from = (int64_t)(first + row) * a.v_heads + head;
        a.open_g[to] = a.g[from];
        a.open_beta[to] = a.beta[from];
    }
}

/* o = exp(c) (q S) + A V; behind the last chunk, what the next call carries. Without launch bounds: see gdn_chunk_pass. */
extern "C" __global__ void gdn_chunk_out(gdn_chunk_args a)
{
    __shared__ float4 left[STAGE * LDQ / 4], right[STAGE * COLS / 4];
    float *x = (float *)left, *y = (float *)right, acc[TM][TN];
    int chunk = (int)a.first_chunk + (int)blockIdx.x, head = (int)blockIdx.y, key_head = key_head_of(a, head);
    const float *own = scratch_of(a, chunk, head);
    unsigned t = thread_index();
    bool works = warp_works(t, ROWS, (int)a.dv);
    product_clear(acc);
#pragma unroll 1
    for (int k = 0; k < (int)a.dk; k += STAGE) {
        load_queries(x, a, chunk, key_head, k);
        load_rows(y, own + STATE + k * SIDE);
        __syncthreads();
        if (works) {
#pragma unroll 1
            for (int i = 0; i < STAGE; i += DEPTH)
                product_steps<LDQ, COLS>(acc, x + i * LDQ + thread_row(t), y + i * COLS + thread_col(t));
        }
        __syncthreads();
    }
    decay_rows(acc, own + GATES + DECAY);
#pragma unroll 1
    for (int stage = 0; stage < CHUNK / STAGE; stage++) {
        load_triangle(x, own + ATTEND, stage);
        load_rows(y, own + VALUES + stage * STAGE * SIDE);
        __syncthreads();
        if (works)
            add_triangle(acc, x, y, stage);
        __syncthreads();
    }
    store_outputs(acc, a, chunk, head);
    if (!exists(a, chunk * CHUNK + CHUNK - 1))
        carry_rows(a, head, key_head);
}
