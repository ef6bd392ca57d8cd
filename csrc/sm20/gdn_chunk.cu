#include "gdn_chunk.cuh"

#define BLOCK 256
#define SLAB 16               /* value columns of a block */
#define WARP_ROWS 32
#define SLICE (STAGE * CHUNK) /* floats of a slice: 32 columns of W, or 16 keys */
#define KEY_ROWS (CHUNK / 4)  /* keys of a slice */
#define STEPS 8               /* of a slice that a warp takes: a quarter of W's, or half of the keys */

/* A warp has 32 rows of all 16 columns: 8 lanes stand above one another and 4 side by side, each with two pairs of rows and
 * two of columns; low lane bits count rows and columns in turn, so that neighbours want the same words of a 64-bit load. */
INLINE int lane_row(int t)
{
    return 2 * ((t & 1) | (t >> 1 & 2) | (t >> 2 & 4));
}

INLINE int lane_col(int t)
{
    return 2 * ((t >> 1 & 1) | (t >> 2 & 2));
}

/* From a lane's first to its row i, and to its column j. */
INLINE int row_of(int i)
{
    return i / 2 * 16 + i % 2;
}

INLINE int col_of(int j)
{
    return j / 2 * 8 + j % 2;
}

/* Columns j and j + 1 of row i of what a lane has of a tile in shared memory. */
INLINE float2 *pair_of(float *tile, int i, int j)
{
    return (float2 *)(tile + row_of(i) * SLAB + col_of(j));
}

INLINE void clear(float (&acc)[4][4])
{
#pragma unroll
    for (int i = 0; i < 4; i++)
#pragma unroll
        for (int j = 0; j < 4; j++)
            acc[i][j] = 0.0f;
}

INLINE void add_row(float (&acc)[4], float x, float2 left, float2 right)
{
    acc[0] = fmaf(x, left.x, acc[0]);
    acc[1] = fmaf(x, left.y, acc[1]);
    acc[2] = fmaf(x, right.x, acc[2]);
    acc[3] = fmaf(x, right.y, acc[3]);
}

/* acc += x y over 8 steps; a step is LD floats of x and a row of the slab at y. */
template <int LD> INLINE void add_steps(float (&acc)[4][4], const float *x, const float *y)
{
#pragma unroll
    for (int k = 0; k < STEPS; k++) {
        float2 left = *(const float2 *)(y + k * SLAB), right = *(const float2 *)(y + k * SLAB + col_of(2));
        float2 first = *(const float2 *)(x + k * LD), second = *(const float2 *)(x + k * LD + row_of(2));
        add_row(acc[0], first.x, left, right);
        add_row(acc[1], first.y, left, right);
        add_row(acc[2], second.x, left, right);
        add_row(acc[3], second.y, left, right);
    }
}

INLINE void put_sums(const float (&acc)[4][4], float *tile)
{
#pragma unroll
    for (int i = 0; i < 4; i++)
#pragma unroll
        for (int j = 0; j < 4; j += 2)
            *pair_of(tile, i, j) = make_float2(acc[i][j], acc[i][j + 1]);
}

INLINE void take_sums(float (&acc)[4][4], float *tile)
{
#pragma unroll
    for (int i = 0; i < 4; i++)
#pragma unroll
        for (int j = 0; j < 4; j += 2) {
            acc[i][j] += pair_of(tile, i, j)->x;
            acc[i][j + 1] += pair_of(tile, i, j)->y;
        }
}

/* The tile = by tile + sign acc; also to rows of SIDE floats at `copy`, if there is one. */
INLINE void move_tile(const float (&acc)[4][4], float *tile, float by, float sign, float *copy)
{
#pragma unroll
    for (int i = 0; i < 4; i++)
#pragma unroll
        for (int j = 0; j < 4; j += 2) {
            float2 old = *pair_of(tile, i, j);
            float2 next = make_float2(fmaf(by, old.x, sign * acc[i][j]), fmaf(by, old.y, sign * acc[i][j + 1]));
            *pair_of(tile, i, j) = next;
            if (copy)
                *(float2 *)(copy + row_of(i) * SIDE + col_of(j)) = next;
        }
}

/* A slice on its way, two quads a thread. */
struct pass_slice {
    float4 first, second;

    __device__ __forceinline__ void fetch(const float *from)
    {
        int at = 4 * (int)threadIdx.x;
        first = read_quad(from + at);
        second = read_quad(from + at + 4 * BLOCK);
    }

    __device__ __forceinline__ void stash(float *s) const
    {
        int at = 4 * (int)threadIdx.x;
        write_quad(s + at, first);
        write_quad(s + at + 4 * BLOCK, second);
    }
};

/* `coming`, which is to be the next slice, goes into the half of s that is not in use, and the third to come, at `from` if
 * that is no negative place, is read in its stead: given before the barrier behind this, so that it has two slices' time
 * to arrive. */
INLINE void turn(pass_slice &coming, const float *own, int from, float *s, int &now)
{
    now = SLICE - now;
    coming.stash(s + now);
    if (from >= 0)
        coming.fetch(own + from);
}

/* Floats 4 i .. 4 i + 3 of a slab in shared memory in a state with so many columns in device memory. */
INLINE float *quad_of(float *state, int i, int columns)
{
    return state + i / (SLAB / 4) * columns + i % (SLAB / 4) * 4;
}

INLINE void copy_state(float *to, int columns, const float *state, int dk)
{
#pragma unroll 1
    for (int i = fresh_thread(); i < dk * (SLAB / 4); i += BLOCK)
        write_quad(quad_of(to, i, columns), read_quad(state + 4 * i));
}

/* This thread's quad of a chunk's U, in the slab's columns. */
INLINE float4 fetch_values(const float *own, int column)
{
    int t = fresh_thread();
    return read_quad(own + VALUES + t / (SLAB / 4) * SIDE + column + t % (SLAB / 4) * 4);
}

/* Chunk after chunk, a block a slab of columns of a head's values; its state stays in shared memory. dk / 32 slices of W,
 * of which a pair of warps takes a quarter of the columns each, then four of k, of which four warps take half of the keys
 * each. Slices are read into registers while those before them are multiplied, by turns into two places (copied from one to
 * the other, they would have to be there): one barrier a slice. */
extern "C" __global__ __launch_bounds__(BLOCK) void gdn_chunk_pass(gdn_chunk_args a)
{
    __shared__ float4 slices[2 * SLICE / 4], state4[SIDE * SLAB / 4], values4[CHUNK * SLAB / 4];
    float *s = (float *)slices, *state = (float *)state4, *v = (float *)values4, acc[4][4];
    int head = (int)blockIdx.y, column = (int)blockIdx.x * SLAB, dk = (int)a.dk, dv = (int)a.dv;
    int now = 0, chunk = (int)a.first_chunk, following = (int)a.v_heads * GDN_CHUNK_SCRATCH;
    pass_slice one, other;
    float *own = scratch_of(a, chunk, head), *slab = a.state + (int64_t)head * dk * dv + column;
    for (int i = (int)threadIdx.x; i < dk * (SLAB / 4); i += BLOCK)
        write_quad(state + 4 * i, read_quad(quad_of(slab, i, dv)));
    float4 u = fetch_values(own, column);
    one.fetch(own + KEYS);
    one.stash(s);
    one.fetch(own + KEYS + SLICE);
    other.fetch(own + KEYS + 2 * SLICE);
    __syncthreads();
    copy_state(own + STATE + column, SIDE, state, dk);
#pragma unroll 1
    for (int left = (int)a.chunks;; left--) {
        bool whole = exists(a, chunk * CHUNK + CHUNK - 1), more = left > 1;
        int t = fresh_thread(), warp = t / 32, quarter = warp / 2, row = warp % 2 * WARP_ROWS + lane_row(t);
        int next = KEYS + 3 * SLICE, k = STAGE, x = quarter * STEPS * CHUNK + row;
        const float *y = state + quarter * STEPS * SLAB + lane_col(t);
        /* W S; U to its place */
        clear(acc);
        write_quad(v + 4 * t, u);
#pragma unroll 1
        for (; k < dk; k += 2 * STAGE, next += 2 * SLICE, y += 2 * STAGE * SLAB) {
            add_steps<CHUNK>(acc, s + now + x, y);
            turn(one, own, next, s, now);
            __syncthreads();
            add_steps<CHUNK>(acc, s + now + x, y + STAGE * SLAB);
            turn(other, own, next + SLICE, s, now);
            __syncthreads();
        }
        if (k == dk) { /* an odd number of them */
            add_steps<CHUNK>(acc, s + now + x, y);
            turn(one, own, next, s, now);
            pass_slice swap = one;
            one = other;
            other = swap;
            next += SLICE;
            __syncthreads();
        }
        /* V = ((U - third quarters) - first) - (zeroth + second); the half of s that is not in use holds the second */
        float *mine = v + row * SLAB + lane_col(t), *spare = s + SLICE - now + row * SLAB + lane_col(t);
        if (quarter == 3)
            move_tile(acc, mine, 1.0f, -1.0f, 0);
        if (quarter == 2)
            put_sums(acc, spare);
        __syncthreads();
        if (quarter == 1)
            move_tile(acc, mine, 1.0f, -1.0f, 0);
        if (quarter == 0)
            take_sums(acc, spare);
        __syncthreads();
        if (quarter == 0)
            move_tile(acc, mine, 1.0f, -1.0f, own + VALUES + row * SIDE + column + lane_col(t));
        __syncthreads();
        if (!whole)
            copy_state(slab, dv, state, dk);
        if (!whole && !a.final_state)
            return;
        /* the state at the chunk's end; the last three slices on the way are the next chunk's */
        clear(acc);
        t = fresh_thread();
        warp = t / 32;
        row = warp % 4 * WARP_ROWS + lane_row(t);
        bool works = warp % 4 * WARP_ROWS < dk;
        x = warp / 4 * STEPS * SIDE + row;
        y = v + warp / 4 * STEPS * SLAB + lane_col(t);
        int after = more ? following + KEYS : -1;
        if (more)
            u = fetch_values(own + following, column);
#pragma unroll 1
        for (int i = 0;; i++, y += 2 * KEY_ROWS * SLAB) {
            if (works)
                add_steps<SIDE>(acc, s + now + x, y);
            turn(one, own, next, s, now);
            __syncthreads();
            if (works)
                add_steps<SIDE>(acc, s + now + x, y + KEY_ROWS * SLAB);
            turn(other, own, after, s, now);
            if (i > 0)
                break;
            next = more ? after + SLICE : -1;
            after = more ? after + 2 * SLICE : -1;
            __syncthreads();
        }
        /* decay times it plus the keys' second halves, plus the first */
        mine = state + row * SLAB + lane_col(t);
        if (works && warp >= 4)
            move_tile(acc, mine, own[GATES + DECAY + CHUNK - 1], 1.0f, 0);
        __syncthreads();
        own += following;
        if (works && warp < 4)
            move_tile(acc, mine, 1.0f, 1.0f, more ? own + STATE + row * SIDE + column + lane_col(t) : 0);
        __syncthreads();
        if (!more)
            break;
        chunk++;
    }
    if (exists(a, chunk * CHUNK + CHUNK - 1))
        copy_state(slab, dv, state, dk);
    if (a.final_state)
        copy_state(a.final_state + (int64_t)head * dk * dv + column, dv, state, dk);
}
