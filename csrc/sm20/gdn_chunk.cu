#include "gdn_chunk.cuh"

#define BLOCK 512
#define SLAB 16               /* value columns of a block */
#define PITCH (SLAB + 4)      /* of rows of a slab in shared memory: the 8 rows of a warp's lanes meet all banks alike */
#define WARP_ROWS 32
#define SLICE 4096            /* floats of a slice: 64 columns of W, or 32 keys */
#define PARTS 8               /* of W's columns, by eights; of the keys there are half as many */
#define STEPS 8               /* of a slice that a warp takes */
#define TILE (CHUNK * SLAB)   /* floats of a part of W S; of a part of the product with the keys there are twice as many */

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

/* acc += x y over 8 steps; a step is LD floats of x and a row of a slab at y. */
template <int LD> INLINE void add_steps(float (&acc)[4][4], const float *x, const float *y)
{
#pragma unroll
    for (int k = 0; k < STEPS; k++) {
        float2 left = *(const float2 *)(y + k * PITCH), right = *(const float2 *)(y + k * PITCH + col_of(2));
        float2 first = *(const float2 *)(x + k * LD), second = *(const float2 *)(x + k * LD + row_of(2));
        add_row(acc[0], first.x, left, right);
        add_row(acc[1], first.y, left, right);
        add_row(acc[2], second.x, left, right);
        add_row(acc[3], second.y, left, right);
    }
}

/* A thread's sums to where the same thread of another part finds them: a row of four after a row of all lanes. */
INLINE void put_sums(const float (&acc)[4][4], float *to)
{
#pragma unroll
    for (int i = 0; i < 4; i++)
        *(float4 *)(to + i * 4 * 32) = make_float4(acc[i][0], acc[i][1], acc[i][2], acc[i][3]);
}

INLINE void take_sums(float (&acc)[4][4], const float *from)
{
#pragma unroll
    for (int i = 0; i < 4; i++) {
        float4 more = read_quad(from + i * 4 * 32);
        acc[i][0] += more.x;
        acc[i][1] += more.y;
        acc[i][2] += more.z;
        acc[i][3] += more.w;
    }
}

/* The rows at `tile` = by those rows + acc; also to rows of SIDE floats at `copy`, if there is one. */
INLINE void move_rows(const float (&acc)[4][4], float *tile, float by, float *copy)
{
#pragma unroll
    for (int i = 0; i < 4; i++)
#pragma unroll
        for (int j = 0; j < 4; j += 2) {
            float2 *at = (float2 *)(tile + row_of(i) * PITCH + col_of(j));
            float2 next = make_float2(fmaf(by, at->x, acc[i][j]), fmaf(by, at->y, acc[i][j + 1]));
            *at = next;
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

/* The slab's rows of a state: to and from shared memory, with so many columns in device memory. */
INLINE void load_state(float *state, const float *from, int columns, int dk)
{
    for (int i = (int)threadIdx.x; i < dk * (SLAB / 4); i += BLOCK)
        write_quad(state + i / (SLAB / 4) * PITCH + i % (SLAB / 4) * 4,
                   read_quad(from + i / (SLAB / 4) * columns + i % (SLAB / 4) * 4));
}

INLINE void copy_state(float *to, int columns, const float *state, int dk)
{
#pragma unroll 1
    for (int i = fresh_thread(); i < dk * (SLAB / 4); i += BLOCK)
        write_quad(to + i / (SLAB / 4) * columns + i % (SLAB / 4) * 4,
                   read_quad(state + i / (SLAB / 4) * PITCH + i % (SLAB / 4) * 4));
}

/* Where thread t's pair of sums lies in a part of W S as put_sums leaves it: floats 2 t, 2 t + 1. */
INLINE int pair_row(int t)
{
    return t / 256 * WARP_ROWS + lane_row(t / 2 % 32) + row_of(t / 64 % 4);
}

INLINE int pair_col(int t)
{
    return lane_col(t / 2 % 32) + col_of(t % 2 * 2);
}

/* Where a thread's places are: worked out once, and two in an int, for registers are few. All are even. */
struct pass_places {
    unsigned columns, keys, shared, scratch;

    __device__ __forceinline__ pass_places()
    {
        int t = (int)threadIdx.x, warp = t / 32, row = warp % 4 * WARP_ROWS + lane_row(t);
        columns = pack(warp / 2 * STEPS * CHUNK + warp % 2 * WARP_ROWS + lane_row(t), warp / 2 * STEPS * PITCH + lane_col(t));
        keys = pack(warp / 4 * STEPS * SIDE + row, warp / 4 * STEPS * PITCH + lane_col(t));
        shared = pack(pair_row(t) * PITCH + pair_col(t), row * PITCH + lane_col(t));
        scratch = pack(pair_row(t) * SIDE + pair_col(t), row * SIDE + lane_col(t));
    }

    static __device__ __forceinline__ unsigned pack(int low, int high)
    {
        return (unsigned)low / 2 | (unsigned)high / 2 << 16;
    }
};

INLINE int low_of(unsigned places)
{
    return (int)(places & 0xffff) * 2;
}

INLINE int high_of(unsigned places)
{
    return (int)(places >> 16) * 2;
}

/* W S over the 64 columns of a slice from `column` on. */
INLINE void add_columns(float (&acc)[4][4], const pass_places &at, const float *slice, const float *state, int column, int dk)
{
    if (column + (int)(fresh_thread() / 64) * STEPS < dk)
        add_steps<CHUNK>(acc, slice + low_of(at.columns), state + column * PITCH + high_of(at.columns));
}

/* Whether a warp has rows of the product with the keys. */
INLINE bool has_rows(int dk)
{
    return (int)(fresh_thread() / 32 % 4) * WARP_ROWS < dk;
}

/* V = U - (((P_0 + P_4) + (P_1 + P_5)) + ((P_2 + P_6) + (P_3 + P_7))), through four tiles at `spare`; also to `copy`. */
INLINE void take_products(float (&acc)[4][4], float *spare, float *v, float2 u, float *copy)
{
    int t = (int)fresh_thread();
    float *mine = spare + t % 256 / 32 * (TILE / 2) + t % 32 * 4;
    if (t >= BLOCK / 2)
        put_sums(acc, mine);
    __syncthreads();
    if (t < BLOCK / 2) {
        take_sums(acc, mine);
        put_sums(acc, mine);
    }
    __syncthreads();
    float2 p[PARTS / 2];
#pragma unroll
    for (int i = 0; i < PARTS / 2; i++)
        p[i] = *(const float2 *)(spare + i * TILE + 2 * t);
    float2 next = make_float2(u.x - ((p[0].x + p[1].x) + (p[2].x + p[3].x)), u.y - ((p[0].y + p[1].y) + (p[2].y + p[3].y)));
    *(float2 *)v = next;
    *(float2 *)copy = next;
    __syncthreads();
}

/* The state = (by state + Q_3) + ((Q_0 + Q_1) + Q_2), through two tiles at `spare`; also to `copy`, if there is one. */
INLINE void take_keys(float (&acc)[4][4], float *spare, float *state, float by, int dk, float *copy)
{
    int t = (int)fresh_thread(), part = has_rows(dk) ? t / 128 : -1;
    float *beside = spare + t % 128 / 32 * (TILE / 2) + t % 32 * 4;
    if (part == 3)
        move_rows(acc, state, by, 0);
    if (part == 1)
        put_sums(acc, beside);
    if (part == 2)
        put_sums(acc, beside + 2 * TILE);
    __syncthreads();
    if (part == 0) {
        take_sums(acc, beside);
        take_sums(acc, beside + 2 * TILE);
        move_rows(acc, state, 1.0f, copy);
    }
    __syncthreads();
}

/* Chunk after chunk, a block a slab of columns of a head's values; its state stays in shared memory. A chunk is four slices,
 * two of W and two of k, of which a warp takes 8 steps each; the second of W may have no columns. Slices are read into
 * registers two ahead, by turns into two places, and go on into shared memory behind the one before them. No launch bounds,
 * which let newer cards give a thread so many registers that a multiprocessor has room for one block. */
extern "C" __global__ void gdn_chunk_pass(gdn_chunk_args a)
{
    __shared__ float4 slices[2 * SLICE / 4], state4[SIDE * PITCH / 4], values4[CHUNK * PITCH / 4];
    float *s = (float *)slices, *state = (float *)state4, *v = (float *)values4, acc[4][4];
    int head = (int)blockIdx.y, column = (int)blockIdx.x * SLAB, dk = (int)a.dk, dv = (int)a.dv;
    int chunk = (int)a.first_chunk, following = (int)a.v_heads * GDN_CHUNK_SCRATCH, keys = KEYS + dk * CHUNK;
    const pass_places at;
    pass_slice one, other;
    float *own = scratch_of(a, chunk, head), *slab = a.state + (int64_t)head * dk * dv + column;
    load_state(state, slab, dv, dk);
    one.fetch(own + KEYS);
    one.stash(s);
    one.fetch(own + KEYS + SLICE);
    other.fetch(own + keys);
    __syncthreads();
    copy_state(own + STATE + column, SIDE, state, dk);
#pragma unroll 1
    for (int left = (int)a.chunks;; left--) {
        bool whole = exists(a, chunk * CHUNK + CHUNK - 1), more = left > 1;
        const float2 *from = (const float2 *)(own + VALUES + column + low_of(at.scratch));
        float2 u = make_float2(from->x, from->y);
        float decay = own[GATES + DECAY + CHUNK - 1];
        clear(acc);
        add_columns(acc, at, s, state, 0, dk);
        one.stash(s + SLICE);
        one.fetch(own + keys + SLICE);
        __syncthreads();
        add_columns(acc, at, s + SLICE, state, CHUNK, dk);
        other.stash(s);
        if (more)
            other.fetch(own + following + KEYS);
        __syncthreads();
        take_products(acc, s + SLICE, v + low_of(at.shared), u, own + VALUES + column + low_of(at.scratch));
        if (!whole)
            copy_state(slab, dv, state, dk);
        if (!whole && !a.final_state)
            return;
        clear(acc);
        if (has_rows(dk))
            add_steps<SIDE>(acc, s + low_of(at.keys), v + high_of(at.keys));
        one.stash(s + SLICE);
        if (more)
            one.fetch(own + following + KEYS + SLICE);
        __syncthreads();
        if (has_rows(dk))
            add_steps<SIDE>(acc, s + SLICE + low_of(at.keys), v + CHUNK / 2 * PITCH + high_of(at.keys));
        other.stash(s);
        if (more)
            other.fetch(own + following + keys);
        __syncthreads();
        own += following;
        take_keys(acc, s + SLICE, state + high_of(at.shared), decay, dk,
                  more ? own + STATE + column + high_of(at.scratch) : 0);
        if (!more)
            break;
        chunk++;
    }
    if (exists(a, chunk * CHUNK + CHUNK - 1))
        copy_state(slab, dv, state, dk);
    if (a.final_state)
        copy_state(a.final_state + (int64_t)head * dk * dv + column, dv, state, dk);
}
