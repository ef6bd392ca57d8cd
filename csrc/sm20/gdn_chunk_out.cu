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

/* Rows of the chunk that is open now, of this value head, and of its key head if it is that one's first. */
INLINE void carry_rows(const gdn_chunk_args &a, int head, int key_head)
{
    int rows = (int)(a.open + a.tokens), first = rows / CHUNK * CHUNK - (int)a.open, count = rows % CHUNK;
    int dk = (int)a.dk, dv = (int)a.dv, k_heads = (int)a.k_heads, v_heads = (int)a.v_heads;
    bool begins = head == key_head * (v_heads / k_heads);
    /* those carried before are at their place */
#pragma unroll 1
    for (int i = max_of(-first, 0); i < count; i++) {
        int64_t token = first + i;
        for (int t = (int)thread_index(); t < max_of(dk, dv); t += THREADS) {
            if (t < dv)
                a.open_v[(i * v_heads + head) * dv + t] = a.v[token * a.v_stride + head * dv + t];
            if (t < dk && begins)
                a.open_k[(i * k_heads + key_head) * dk + t] = a.k[(token * k_heads + key_head) * dk + t];
        }
        if (thread_index() == 0) {
            a.open_g[i * v_heads + head] = a.g[token * v_heads + head];
            a.open_beta[i * v_heads + head] = a.beta[token * v_heads + head];
        }
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
