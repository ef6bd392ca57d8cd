/* What brings the operands of attention's two products (product_tile.cuh).
 *
 * Operands come in slices of 8 steps, double-buffered: while one is multiplied, the next is loaded to registers, and
 * goes into the other buffer afterwards; one barrier a slice. Loads pass by the first-level cache, which would read
 * lines of 128 bytes for slices of 32. Offsets are 32 bits: a tensor is smaller than 4 GiB.
 */
#ifndef FERMI_ATTENTION_TILE_CUH
#define FERMI_ATTENTION_TILE_CUH

#include "product_tile.cuh"

/* Pitches without bank conflicts, and floats of a buffer. */
enum { QUERY_LD = ROWS + 4, KEY_LD = COLS + 4, VALUE_LD = COLS, SCORE_LD = ROWS + 2 };
enum { SCORE_SLICE = DEPTH * (QUERY_LD + KEY_LD), VALUE_SLICE = DEPTH * VALUE_LD };

/* Thread t's part in reading queries and keys, 8 dimensions at a time, transposed on the way: two dimensions of a
 * query, four of a key. Rows are held to the last there is: what is read twice is not used. */
struct score_operands {
    unsigned query, key; /* bytes from the begin of the tensor */
    float2 q;
    float4 k;

    /* Where the thread's query and key begin, in floats. */
    __device__ __forceinline__ void begin(unsigned t, unsigned query_at, unsigned key_at)
    {
        query = (query_at + t % 4 * 2) * 4;
        key = (key_at + t % 2 * 4) * 4;
    }

    template <int DIM> __device__ __forceinline__ void fetch(const float *queries, const float *keys)
    {
        q = load2(queries, query + DIM * 4);
        k = load4(keys, key + DIM * 4);
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
