/* What the kernels of the chunked delta rule share: where rows and scratch are. */
#ifndef FERMI_GDN_CHUNK_CUH
#define FERMI_GDN_CHUNK_CUH

#include "fermi.cuh"

#define CHUNK 64
#define SIDE 128 /* most keys and values of a head; the pitch of what scratch holds by rows */
#define STAGE 32 /* steps of a product whose operands shared memory holds at a time */

/* threadIdx.x as a number that compilers do not know yet: what is made of it is not kept in registers across loops. */
INLINE int fresh_thread()
{
    int t = (int)threadIdx.x;
    asm volatile("" : "+r"(t));
    return t;
}

/* Rows count from the last chunk boundary: `open` carried ones, then the tokens of this call. What stands for rows
 * beyond them is the last one again, with beta = 0 and no decay: it adds nothing to the state, and no other row asks
 * for it. */
INLINE int last_token(const gdn_chunk_args &a, int token)
{
    return min_of(token, (int)a.tokens - 1);
}

INLINE const float *row_at(const gdn_chunk_args &a, int row, const float *carried, int carried_stride,
                           const float *fresh, int stride)
{
    int token = row - (int)a.open;
    return token < 0 ? carried + (int64_t)row * carried_stride : fresh + (int64_t)last_token(a, token) * stride;
}

INLINE const float *key_row(const gdn_chunk_args &a, int row, int key_head)
{
    int at = key_head * (int)a.dk, stride = (int)a.k_heads * (int)a.dk;
    return row_at(a, row, a.open_k + at, stride, a.k + at, stride);
}

INLINE const float *value_row(const gdn_chunk_args &a, int row, int head)
{
    int at = head * (int)a.dv;
    return row_at(a, row, a.open_v + at, (int)a.v_heads * (int)a.dv, a.v + at, (int)a.v_stride);
}

/* Nothing asks for the outputs of carried rows: any row stands for them. */
INLINE const float *query_row(const gdn_chunk_args &a, int row, int key_head)
{
    int token = last_token(a, max_of(row - (int)a.open, 0));
    return a.q + ((int64_t)token * (int)a.k_heads + key_head) * (int)a.dk;
}

INLINE bool exists(const gdn_chunk_args &a, int row)
{
    return row < (int)a.open + (int)a.tokens;
}

INLINE int key_head_of(const gdn_chunk_args &a, int head)
{
    return head / ((int)a.v_heads / (int)a.k_heads);
}

/* Four floats, each by name: clang keeps a float4 that is only passed on in local memory. */
INLINE float4 read_quad(const float *p)
{
    float4 v = *(const float4 *)p;
    return make_float4(v.x, v.y, v.z, v.w);
}

INLINE void write_quad(float *p, float4 v)
{
    *(float4 *)p = make_float4(v.x, v.y, v.z, v.w);
}

/* Four floats of a row into a column each, `ld` apart. */
INLINE void stash_transposed(float *s, int ld, float4 v)
{
    s[0] = v.x;
    s[ld] = v.y;
    s[2 * ld] = v.z;
    s[3 * ld] = v.w;
}

INLINE float4 times(float4 v, float by)
{
    return make_float4(v.x * by, v.y * by, v.z * by, v.w * by);
}

/* Scratch of a chunk and value head: A by columns; exp(c_i), exp(c_63 - c_i) and beta of each row; W by columns and behind
 * it k decayed to the chunk's end, by rows; U by rows, in whose place V comes; the state that the chunk begins with, in
 * whose place T stands by columns before. */
#define ATTEND 0
#define GATES (CHUNK * CHUNK)
#define DECAY 0
#define REST CHUNK
#define BETA (2 * CHUNK)
#define KEYS (GATES + 3 * CHUNK)
#define VALUES (KEYS + 2 * SIDE * CHUNK)
#define STATE (VALUES + CHUNK * SIDE)

INLINE float *scratch_of(const gdn_chunk_args &a, int chunk, int head)
{
    return a.scratch + (int64_t)((chunk - (int)a.first_chunk) * (int)a.v_heads + head) * GDN_CHUNK_SCRATCH;
}

#endif
