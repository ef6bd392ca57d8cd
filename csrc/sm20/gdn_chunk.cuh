/* What the kernels of the chunked delta rule share: where rows and scratch are, a thread's part of a product. */
#ifndef FERMI_GDN_CHUNK_CUH
#define FERMI_GDN_CHUNK_CUH

#include "fermi.cuh"

#define CHUNK 64
#define SLICE 8        /* columns or rows of an operand that shared memory holds at a time, in two buffers */
#define SIDE 128       /* rows of a slice: 64 of k and 64 of q, or the columns of k */
#define LD (SIDE + 4)  /* 4 more than a multiple of 8: the 32 writes of a warp that transposes meet 32 banks */
#define BUFFER (SLICE * LD)

/* threadIdx.x as a number that compilers do not know yet: what is made of it is not kept in registers across loops. */
INLINE int fresh_thread()
{
    int t = (int)threadIdx.x;
    asm volatile("" : "+r"(t));
    return t;
}

/* A warp's lanes stand 4 high and 8 wide; a lane has pairs of rows, and four columns in pairs 16 apart. The lowest lane
 * bit counts rows and the next columns: each 64-bit load then has neighbours that want the same words, which newer
 * cards serve in one pass. */
INLINE int lane_row(int t)
{
    return 2 * ((t & 1) | ((t >> 1) & 2));
}

INLINE int lane_col(int t)
{
    return 2 * (((t >> 1) & 1) | ((t >> 2) & 6));
}

/* Column j of a lane's four, from its first on. */
INLINE int column_of(int j)
{
    return j / 2 * 16 + j % 2;
}

INLINE void add_row(float (&acc)[4], float x, float2 left, float2 right)
{
    acc[0] = fmaf(x, left.x, acc[0]);
    acc[1] = fmaf(x, left.y, acc[1]);
    acc[2] = fmaf(x, right.x, acc[2]);
    acc[3] = fmaf(x, right.y, acc[3]);
}

/* acc += x y over DEPTH columns, its pairs of rows at x, x + second, x + third and x + second + third. */
template <int LDY, int DEPTH>
INLINE void add_columns(float (&acc)[8][4], const float *x, int second, int third, const float *y)
{
#pragma unroll
    for (int k = 0; k < DEPTH; k++) {
        float2 left = *(const float2 *)(y + k * LDY), right = *(const float2 *)(y + k * LDY + 16);
#pragma unroll
        for (int p = 0; p < 4; p++) {
            float2 pair = *(const float2 *)(x + k * LD + (p & 1) * second + (p >> 1) * third);
            add_row(acc[2 * p], pair.x, left, right);
            add_row(acc[2 * p + 1], pair.y, left, right);
        }
    }
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

INLINE void stash_transposed(float *s, float4 v)
{
    s[0] = v.x;
    s[LD] = v.y;
    s[2 * LD] = v.z;
    s[3 * LD] = v.w;
}

/* Scratch of a chunk and value head: T and A by columns, then exp(c_i), exp(c_63 - c_i) and beta of each row. */
#define ATTEND (CHUNK * CHUNK)
#define GATES (2 * CHUNK * CHUNK)
#define DECAY 0
#define REST CHUNK
#define BETA (2 * CHUNK)

INLINE float *scratch_of(const gdn_chunk_args &a, int chunk, int head)
{
    return a.scratch + (int64_t)((chunk - (int)a.first_chunk) * (int)a.v_heads + head) * GDN_CHUNK_SCRATCH;
}

#endif
