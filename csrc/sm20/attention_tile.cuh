/* A product of 64 rows x 128 columns shared by 256 threads: who has which sums, the steps, and what brings the
 * operands.
 *
 * A thread has TM rows and TN columns, in pairs that lie side by side for 64-bit shared loads; the pairs of a
 * warp's lanes lie side by side too, LM of them high and LN wide. Low lane bits count rows and columns in turn:
 * neighbours want the same words, which newer cards then serve in one pass. 32 sums are what Fermi's 63 registers
 * hold beside the operands of two steps and a slice on its way. Operands come in slices of 8 steps, double-
 * buffered: while one is multiplied, the next is loaded to registers, and goes into the other buffer afterwards;
 * one barrier a slice. Loads pass by the first-level cache, which would read lines of 128 bytes for slices of 32.
 * Offsets are 32 bits: a tensor is smaller than 4 GiB.
 */
#ifndef FERMI_ATTENTION_TILE_CUH
#define FERMI_ATTENTION_TILE_CUH

#include "fermi.cuh"

enum { ROWS = 64, COLS = 128, THREADS = 256, DEPTH = 8, TM = 4, TN = 8, LM = 4, LN = 8 };
/* Pitches without bank conflicts, and floats of a buffer. */
enum { QUERY_LD = ROWS + 4, KEY_LD = COLS + 4, VALUE_LD = COLS, SCORE_LD = ROWS + 2 };
enum { SCORE_SLICE = DEPTH * (QUERY_LD + KEY_LD), VALUE_SLICE = DEPTH * VALUE_LD };

/* x, of which the compiler then knows nothing. Else it works out before a loop over phases what each phase needs,
 * in registers that are not there. */
INLINE int unknown(int x)
{
#ifndef FERMI_EMULATED
    asm volatile("" : "+r"(x));
#endif
    return x;
}

/* threadIdx.x, read anew for the same reason. */
INLINE unsigned thread_index()
{
#ifdef FERMI_EMULATED
    return threadIdx.x;
#else
    unsigned t;
    asm volatile("mov.u32 %0, %%tid.x;" : "=r"(t));
    return t;
#endif
}

/* The first row and column of thread t. */
INLINE int thread_row(unsigned t)
{
    return t / 64 * (LM * TM) + 2 * (t % 2 + t / 4 % 2 * 2);
}

INLINE int thread_col(unsigned t)
{
    return t / 32 % 2 * (LN * TN) + 2 * (t / 2 % 2 + t / 8 % 4 * 2);
}

/* From there to its row i and column j. */
INLINE int row_step(int i)
{
    return i / 2 * (2 * LM) + i % 2;
}

INLINE int col_step(int j)
{
    return j / 2 * (2 * LN) + j % 2;
}

/* Whether thread t's warp has any row below `rows` and any column below `cols`. */
INLINE bool warp_works(unsigned t, int rows, int cols)
{
    return (int)(t / 64) * (LM * TM) < rows && (int)(t / 32 % 2) * (LN * TN) < cols;
}

INLINE void product_clear(float (&acc)[TM][TN])
{
#pragma unroll
    for (int i = 0; i < TM; i++)
#pragma unroll
        for (int j = 0; j < TN; j++)
            acc[i][j] = 0.0f;
}

/* acc += a b over DEPTH steps; a and b point at the thread's first row and column. */
template <int LDA, int LDB> INLINE void product_steps(float (&acc)[TM][TN], const float *a, const float *b)
{
#pragma unroll
    for (int k = 0; k < DEPTH; k++) {
        float x[TM];
#pragma unroll
        for (int i = 0; i < TM; i += 2) {
            float2 pair = *(const float2 *)(a + k * LDA + row_step(i));
            x[i] = pair.x;
            x[i + 1] = pair.y;
        }
#pragma unroll
        for (int j = 0; j < TN; j += 2) {
            float2 w = *(const float2 *)(b + k * LDB + col_step(j));
#pragma unroll
            for (int i = 0; i < TM; i++)
                acc[i][j] = fmaf(x[i], w.x, acc[i][j]);
#pragma unroll
            for (int i = 0; i < TM; i++)
                acc[i][j + 1] = fmaf(x[i], w.y, acc[i][j + 1]);
        }
    }
}

INLINE float2 load2(const float *p, unsigned byte)
{
    const char *from = (const char *)p + byte;
#ifdef FERMI_EMULATED
    return *(const float2 *)from;
#else
    float2 v;
    asm volatile("ld.global.cg.v2.f32 {%0, %1}, [%2];" : "=f"(v.x), "=f"(v.y) : "l"(from));
    return v;
#endif
}

INLINE float4 load4(const float *p, unsigned byte)
{
    const char *from = (const char *)p + byte;
#ifdef FERMI_EMULATED
    return *(const float4 *)from;
#else
    float4 v;
    asm volatile("ld.global.cg.v4.f32 {%0, %1, %2, %3}, [%4];"
                 : "=f"(v.x), "=f"(v.y), "=f"(v.z), "=f"(v.w)
                 : "l"(from));
    return v;
#endif
}

/* Thread t's part in reading queries and keys, 8 dimensions at a time, transposed on the way: two dimensions of a
 * query, four of a key. Rows are held to the last there is: what is read twice is not used. */
struct score_operands {
    unsigned query, key; /* bytes from the begin of the tensor */
    float2 q;
    float4 k;

    /* query_row: where the thread's query is, in floats; its key is row `key_row` of the cache. */
    __device__ __forceinline__ void begin(unsigned t, unsigned query_row, unsigned key_row, unsigned head_dim)
    {
        query = (query_row + t % 4 * 2) * 4;
        key = (key_row * head_dim + t % 2 * 4) * 4;
    }

    template <int DIM> __device__ __forceinline__ void fetch(const attention_args &a)
    {
        q = load2(a.q, query + DIM * 4);
        k = load4(a.k_cache, key + DIM * 4);
    }

    __device__ __forceinline__ void next(int dims)
    {
        query = (unsigned)unknown((int)query + dims * 4);
        key = (unsigned)unknown((int)key + dims * 4);
    }

    static __device__ __forceinline__ float *query_place(float *slice, unsigned t)
    {
        return slice + t % 4 * (2 * QUERY_LD) + t / 4;
    }

    static __device__ __forceinline__ float *key_place(float *slice, unsigned t)
    {
        return slice + DEPTH * QUERY_LD + t % 2 * (4 * KEY_LD) + t / 2;
    }

    __device__ __forceinline__ void stash(float *to_query, float *to_key) const
    {
        to_query[0] = q.x;
        to_query[QUERY_LD] = q.y;
        to_key[0] = k.x;
        to_key[KEY_LD] = k.y;
        to_key[2 * KEY_LD] = k.z;
        to_key[3 * KEY_LD] = k.w;
    }
};

/* Thread t's part in reading values, 8 positions at a time: four dimensions of one position a warp, held to the
 * last dimension and position there is. */
struct value_operand {
    unsigned at, last; /* bytes from the begin of the tensor */
    float4 v;

    /* From row `row` of the cache on; the last one is `last_row`. */
    __device__ __forceinline__ void begin(unsigned t, unsigned row, unsigned last_row, int dim, int head_dim)
    {
        unsigned mine = (unsigned)min_of(dim + (int)(t % 32) * 4, head_dim - 4);
        at = (min_of(row + t / 32, last_row) * (unsigned)head_dim + mine) * 4;
        last = (last_row * (unsigned)head_dim + mine) * 4;
    }

    /* And on to the next slice. */
    __device__ __forceinline__ void fetch(const attention_args &a)
    {
        v = load4(a.v_cache, at);
        at = min_of(at + DEPTH * 4 * (unsigned)a.head_dim, last);
    }
};

#endif
