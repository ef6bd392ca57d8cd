#include "gdn_chunk.cuh"

#define BLOCK 128
#define CARRY_BLOCK 256
#define SLAB 32 /* value columns of a block */
#define GROUP 8 /* rows, or columns, of a triangle that are left out together where they are zero */
#define TRIANGLE (2 * GROUP * CHUNK) /* floats of a slice of a triangle: 16 columns */

/* acc += triangle times y for one group of columns; the diagonal group leaves out what stands above the diagonal. */
template <bool DIAGONAL> INLINE void add_group(float (&first)[4], float (&second)[4], int row, const float *x,
                                               const float *y)
{
#pragma unroll
    for (int k = 0; k < GROUP; k++) {
        float2 pair = *(const float2 *)(x + k * CHUNK);
        float2 left = *(const float2 *)(y + k * SLAB), right = *(const float2 *)(y + k * SLAB + 16);
        if (!DIAGONAL || k <= row)
            add_row(first, pair.x, left, right);
        if (!DIAGONAL || k <= row + 1)
            add_row(second, pair.y, left, right);
    }
}

/* The same for a pair of rows that lies in group `own`, at `row` of it. */
INLINE void add_below(float (&first)[4], float (&second)[4], int group, int own, int row, const float *x,
                      const float *y)
{
    if (group < own)
        add_group<false>(first, second, row, x, y);
    else if (group == own)
        add_group<true>(first, second, row, x, y);
}

/* A thread of the pass: which rows it has of a chunk, and the two quads that it has read of the slice to come. */
struct pass_thread {
    int head, key_head, column;
    int t, warp, lane; /* lane: first of its columns in the slab */
    int row, second;   /* pairs of rows at row, row + second: groups `warp` and 7 - warp, even work on triangles */
    const float *key, *query;
    float4 next[2];

    __device__ __forceinline__ pass_thread(const gdn_chunk_args &a)
    {
        head = (int)blockIdx.y;
        key_head = head / ((int)a.v_heads / (int)a.k_heads);
        column = (int)blockIdx.x * SLAB;
        renew();
    }

    __device__ __forceinline__ void renew()
    {
        t = fresh_thread();
        warp = t / 32;
        row = warp * GROUP + lane_row(t);
        second = (7 - 2 * warp) * GROUP;
        lane = lane_col(t);
    }

    __device__ __forceinline__ int row_of(int i) const
    {
        return row + (i >> 1) * second + (i & 1);
    }

    /* k and q: row t / 2 of the chunk, columns 4 (t % 2) of the slice */
    __device__ __forceinline__ void begin_chunk(const gdn_chunk_args &a, int chunk)
    {
        key = key_row(a, chunk * CHUNK + t / 2, key_head) + t % 2 * 4;
        query = query_row(a, chunk * CHUNK + t / 2, key_head) + t % 2 * 4;
        fetch_rows();
    }

    __device__ __forceinline__ void fetch_rows()
    {
        next[0] = *(const float4 *)key;
        next[1] = *(const float4 *)query;
        key += SLICE;
        query += SLICE;
    }

    __device__ __forceinline__ void stash_rows(float *s) const
    {
        stash_transposed(s + t % 2 * 4 * LD + t / 2, next[0]);
        stash_transposed(s + t % 2 * 4 * LD + t / 2 + CHUNK, next[1]);
    }

    /* values: a row of the slab for 8 threads, 16 rows */
    __device__ __forceinline__ float4 fetch_values(const gdn_chunk_args &a, int chunk, int part) const
    {
        int at = head * (int)a.dv;
        const float *v = row_at(a, chunk * CHUNK + part * 16 + t / 8, a.open_v + at, (int)a.v_heads * (int)a.dv,
                                a.v + at, (int)a.v_stride);
        return *(const float4 *)(v + column + t % 8 * 4);
    }

    __device__ __forceinline__ void stash_values(float *v, float4 value, int part) const
    {
        *(float4 *)(v + part * 16 * SLAB + 4 * t) = value;
    }

    /* 16 columns of a triangle, as they lie */
    __device__ __forceinline__ void fetch_triangle(const float *triangle)
    {
        next[0] = *(const float4 *)(triangle + 4 * t);
        next[1] = *(const float4 *)(triangle + 4 * t + TRIANGLE / 2);
    }

    __device__ __forceinline__ void stash_triangle(float *s) const
    {
        *(float4 *)(s + 4 * t) = next[0];
        *(float4 *)(s + 4 * t + TRIANGLE / 2) = next[1];
    }

    /* rows FROM .. FROM + 3 of acc += those columns of the triangle times y */
    template <int FROM>
    __device__ __forceinline__ void add_triangle(float (&acc)[8][4], const float *s, const float *y, int slice) const
    {
#pragma unroll 1
        for (int half = 0; half < 2; half++) {
            int group = 2 * slice + half;
            const float *x = s + half * GROUP * CHUNK + row, *at = y + group * GROUP * SLAB + lane;
            add_below(acc[FROM], acc[FROM + 1], group, warp, row % GROUP, x, at);
            add_below(acc[FROM + 2], acc[FROM + 3], group, 7 - warp, row % GROUP, x + second, at);
        }
    }

    /* rows of k as they lie, a row for a warp, decayed to the chunk's end when they are stashed; anything beyond dk */
    __device__ __forceinline__ void fetch_keys(const gdn_chunk_args &a, int chunk, int slice)
    {
        int at = min_of(t % 32 * 4, (int)a.dk - 4), first = chunk * CHUNK + slice * SLICE + warp;
        next[0] = *(const float4 *)(key_row(a, first, key_head) + at);
        next[1] = *(const float4 *)(key_row(a, first + 4, key_head) + at);
    }

    __device__ __forceinline__ void stash_keys(float *s, const float *rest, int slice) const
    {
#pragma unroll
        for (int i = 0; i < 2; i++) {
            float by = rest[slice * SLICE + warp + 4 * i];
            *(float4 *)(s + (warp + 4 * i) * LD + t % 32 * 4) =
                make_float4(next[i].x * by, next[i].y * by, next[i].z * by, next[i].w * by);
        }
    }
};

INLINE void clear(float (&acc)[8][4])
{
#pragma unroll
    for (int i = 0; i < 8; i++)
#pragma unroll
        for (int j = 0; j < 4; j++)
            acc[i][j] = 0.0f;
}

/* acc += slice i - 1 of [k; q] times the state. Meanwhile slice i is read, or the first of the triangles, and a part of
 * the values. */
template <bool VALUES>
INLINE void read_state(float (&acc)[8][4], pass_thread &p, const gdn_chunk_args &a, float *s, int &now,
                       const float *state, float *v, const float *triangle, int chunk, int i)
{
    bool more = i * SLICE < (int)a.dk;
    float4 value;
    if (VALUES)
        value = p.fetch_values(a, chunk, i - 1);
    if (more)
        p.fetch_rows();
    else
        p.fetch_triangle(triangle);
    add_columns<SLAB, SLICE>(acc, s + now + p.row, p.second, CHUNK, state + (i - 1) * SLICE * SLAB + p.lane);
    now = BUFFER - now;
    if (more)
        p.stash_rows(s + now);
    else
        p.stash_triangle(s + now);
    if (VALUES)
        p.stash_values(v, value, i - 1);
    __syncthreads();
}

/* beta (v - decay k S) where v was, the sums over k S to zero; those over q S decayed. */
INLINE void take_errors(float (&acc)[8][4], const pass_thread &p, float *v, const float *gates)
{
#pragma unroll
    for (int i = 0; i < 4; i++) {
        float decay = gates[DECAY + p.row_of(i)], beta = gates[BETA + p.row_of(i)];
        float *at = v + p.row_of(i) * SLAB + p.lane;
#pragma unroll
        for (int j = 0; j < 4; j++) {
            at[column_of(j)] = beta * fmaf(-decay, acc[i][j], at[column_of(j)]);
            acc[i][j] = 0.0f;
            acc[i + 4][j] *= decay;
        }
    }
}

INLINE void put_deltas(const float (&acc)[8][4], const pass_thread &p, float *v)
{
#pragma unroll
    for (int i = 0; i < 4; i++)
#pragma unroll
        for (int j = 0; j < 4; j++)
            v[p.row_of(i) * SLAB + p.lane + column_of(j)] = acc[i][j];
}

INLINE void store_outputs(const float (&acc)[8][4], const gdn_chunk_args &a, const pass_thread &p, int chunk)
{
#pragma unroll
    for (int i = 0; i < 4; i++) {
        int token = chunk * CHUNK + p.row_of(i) - (int)a.open;
        if (token < 0 || token >= (int)a.tokens)
            continue;
        float *o = a.o + ((int64_t)token * (int)a.v_heads + p.head) * (int)a.dv + p.column + p.lane;
        *(float2 *)o = make_float2(acc[i + 4][0], acc[i + 4][1]);
        *(float2 *)(o + 16) = make_float2(acc[i + 4][2], acc[i + 4][3]);
    }
}

/* state = decay state + acc, whose pairs of rows are GROUP apart */
INLINE void move_state(float *state, float decay, const float (&acc)[8][4], const pass_thread &p)
{
    state += (p.warp * 32 + p.row % GROUP) * SLAB + p.lane;
#pragma unroll
    for (int i = 0; i < 8; i++)
#pragma unroll
        for (int j = 0; j < 4; j++) {
            float *at = state + (i / 2 * GROUP + i % 2) * SLAB + column_of(j);
            *at = fmaf(decay, *at, acc[i][j]);
        }
}

/* The slab in device memory of a state in shared memory. */
INLINE float *slab_of(float *state, const gdn_chunk_args &a, const pass_thread &p, int i)
{
    return state + ((int64_t)p.head * (int)a.dk + i / SLAB) * (int)a.dv + p.column + i % SLAB;
}

INLINE void store_state(float *to, const gdn_chunk_args &a, const pass_thread &p, const float *state)
{
#pragma unroll 1
    for (int i = p.t; i < (int)a.dk * SLAB; i += BLOCK)
        *slab_of(to, a, p, i) = state[i];
}

/* Chunk after chunk, a block a slab of columns of a head's values; its state stays in shared memory. Every slice is
 * read into registers while the one before is multiplied, and stashed behind that: one barrier a slice. */
extern "C" __global__ __launch_bounds__(BLOCK) void gdn_chunk_pass(gdn_chunk_args a)
{
    __shared__ float4 slices[2 * BUFFER / 4], state4[SIDE * SLAB / 4], values4[CHUNK * SLAB / 4];
    __shared__ float gates[3 * CHUNK];
    float *s = (float *)slices, *state = (float *)state4, *v = (float *)values4, acc[8][4];
    pass_thread p(a);
    int now = 0, chunk = (int)a.first_chunk, end = chunk + (int)a.chunks, row_slices = (int)a.dk / SLICE;
    const float *own = scratch_of(a, chunk, p.head);
    for (int i = p.t; i < (int)a.dk * SLAB; i += BLOCK)
        state[i] = *slab_of(a.state, a, p, i);
    p.begin_chunk(a, chunk);
    p.stash_rows(s);
    __syncthreads();
#pragma unroll 1
    for (;;) {
        bool whole = exists(a, chunk * CHUNK + CHUNK - 1);
        clear(acc);
        p.renew();
        /* k S and q S; gates and values to their places on the way */
        float gate = own[GATES + p.t], second_gate = p.t < CHUNK ? own[GATES + BLOCK + p.t] : 0.0f;
#pragma unroll 1
        for (int i = 1; i <= 4; i++)
            read_state<true>(acc, p, a, s, now, state, v, own, chunk, i);
        gates[p.t] = gate;
        if (p.t < CHUNK)
            gates[BLOCK + p.t] = second_gate;
#pragma unroll 1
        for (int i = 5; i <= row_slices; i++)
            read_state<false>(acc, p, a, s, now, state, v, own, chunk, i);
        __syncthreads();
        take_errors(acc, p, v, gates);
        __syncthreads();
        p.renew();
        /* what every token adds to the state */
#pragma unroll 1
        for (int i = 1; i <= 4; i++) {
            p.fetch_triangle(own + i * TRIANGLE); /* the fourth begins the other triangle */
            p.add_triangle<0>(acc, s + now, v, i - 1);
            now = BUFFER - now;
            p.stash_triangle(s + now);
            __syncthreads();
        }
        put_deltas(acc, p, v);
        __syncthreads();
        p.renew();
        /* outputs */
#pragma unroll 1
        for (int i = 1; i <= 4; i++) {
            if (i < 4)
                p.fetch_triangle(own + ATTEND + i * TRIANGLE);
            else
                p.fetch_keys(a, chunk, 0);
            p.add_triangle<4>(acc, s + now, v, i - 1);
            now = BUFFER - now;
            if (i < 4)
                p.stash_triangle(s + now);
            else
                p.stash_keys(s + now, gates + REST, 0);
            __syncthreads();
        }
        store_outputs(acc, a, p, chunk);
        if (!whole)
            store_state(a.state, a, p, state);
        if (!whole && !a.final_state)
            return;
        p.renew();
        /* the state at the chunk's end */
        bool more = chunk + 1 < end;
        clear(acc);
#pragma unroll 1
        for (int i = 1; i <= CHUNK / SLICE; i++) {
            if (i < CHUNK / SLICE)
                p.fetch_keys(a, chunk, i);
            else if (more)
                p.begin_chunk(a, chunk + 1);
            if (p.warp * 32 < (int)a.dk)
                add_columns<SLAB, SLICE>(acc, s + now + p.warp * 32 + p.row % GROUP, GROUP, 2 * GROUP,
                                         v + (i - 1) * SLICE * SLAB + p.lane);
            now = BUFFER - now;
            if (i < CHUNK / SLICE)
                p.stash_keys(s + now, gates + REST, i);
            else if (more)
                p.stash_rows(s + now);
            __syncthreads();
        }
        move_state(state, gates[DECAY + CHUNK - 1], acc, p);
        __syncthreads();
        if (!more)
            break;
        chunk++;
        own += (int)a.v_heads * GDN_CHUNK_SCRATCH;
    }
    if (exists(a, chunk * CHUNK + CHUNK - 1))
        store_state(a.state, a, p, state);
    if (a.final_state)
        store_state(a.final_state, a, p, state);
}

/* The rows of the chunk that is open now. */
extern "C" __global__ __launch_bounds__(CARRY_BLOCK) void gdn_chunk_carry(gdn_chunk_args a)
{
    int64_t to = blockIdx.x, t = threadIdx.x, rows = a.open + a.tokens, row = rows / CHUNK * CHUNK + to - a.open;
    if (row < 0)
        return; /* carried before, and at its place */
    for (int64_t i = t; i < a.k_heads * a.dk; i += CARRY_BLOCK)
        a.open_k[to * a.k_heads * a.dk + i] = a.k[row * a.k_heads * a.dk + i];
    for (int64_t i = t; i < a.v_heads * a.dv; i += CARRY_BLOCK)
        a.open_v[to * a.v_heads * a.dv + i] = a.v[row * a.v_stride + i];
    for (int64_t i = t; i < a.v_heads; i += CARRY_BLOCK) {
        a.open_g[to * a.v_heads + i] = a.g[row * a.v_heads + i];
        a.open_beta[to * a.v_heads + i] = a.beta[row * a.v_heads + i];
    }
}
