/* Attention inside views: as attention.cu, but a row is a query of one head, every row sees all of its view, and the running
 * sums of up to 72 dimensions are made by two halves of the thread block, each over half of a block's 128 positions: 36 sums a
 * thread. A view's end is no multiple of anything: positions behind it weigh 0 and their values are read as 0; dimensions beyond
 * the head's are zeros in shared memory and are not stored. */
#include "attention_tile.cuh"

enum { PARTS = THREADS / ROWS, PART = COLS / PARTS }; /* threads that share a row in the softmax, and their positions */
enum { GROUP = THREADS / 2, HALF = COLS / 2 };        /* threads of a half in the sums of values, and its positions */
enum { DIMS = 72, LANE_COLS = 9, GROUP_SLICE = DEPTH * DIMS, VALUES = 2 * GROUP_SLICE }; /* of a slice of both halves */

struct full_shared {
    float *score;     /* [COLS, SCORE_LD] s, then p; before them two slices of their operands */
    float *value;     /* two slices of values of both halves; then a row of sums of every thread */
    float *top, *sum; /* [PARTS, ROWS] of a row's parts */
    float *m, *l;     /* [ROWS] running maximum and sum */
    float *c, *f;     /* [ROWS] what the sums in o are multiplied by, and then all */
    int *tile;        /* [3] first query, the view's first token and the one after its last */
};

/* How many queries a block has, and how many positions from `begin` on. */
INLINE int full_rows(const full_shared &b)
{
    return min_of(b.tile[2] - b.tile[0], (int)ROWS);
}

INLINE int full_count(const full_shared &b, int begin)
{
    return min_of(b.tile[2] - begin, (int)COLS);
}

/* Scores of the positions; those behind the view's end are never used. */
INLINE void full_scores(const full_attention_args &a, const full_shared &b, int begin)
{
    float acc[TM][TN];
    unsigned t = thread_index(), stride = (unsigned)a.stride, head = blockIdx.y * (unsigned)a.head_dim;
    const float *x = b.score + thread_row(t), *w = b.score + DEPTH * QUERY_LD + thread_col(t);
    float *to_query = score_operands::query_place(b.score, t), *to_key = score_operands::key_place(b.score, t);
    int rows = full_rows(b), count = full_count(b, begin);
    bool works = warp_works(t, rows, count);
    score_operands next;
    next.begin(t, (unsigned)(b.tile[0] + min_of((int)t / 4, rows - 1)) * stride + head,
               (unsigned)(begin + min_of((int)t / 2, count - 1)) * stride + head);
    next.fetch<0>(a.q, a.k);
    next.stash(to_query, to_key);
    product_clear(acc);
    __syncthreads();
#pragma unroll 1
    for (int left = (int)a.head_dim / DEPTH, from = 0; left > 0; left--, from ^= SCORE_SLICE) {
        if (left > 1) {
            next.next(DEPTH);
            next.fetch<0>(a.q, a.k);
        }
        if (works)
            product_steps<QUERY_LD, KEY_LD>(acc, x + from, w + from);
        if (left > 1)
            next.stash(to_query + (from ^ SCORE_SLICE), to_key + (from ^ SCORE_SLICE));
        __syncthreads();
    }
    float *s = b.score + thread_col(t) * SCORE_LD + thread_row(t);
#pragma unroll
    for (int j = 0; j < TN; j++)
#pragma unroll
        for (int i = 0; i < TM; i += 2)
            *(float2 *)(s + col_step(j) * SCORE_LD + row_step(i)) = make_float2(acc[i][j] * a.scale, acc[i + 1][j] * a.scale);
    __syncthreads();
}

/* A row's running maximum and sum, and what to multiply by. */
INLINE void full_merge(const full_shared &b, int row, bool begins, bool ends, float top)
{
    const float *sum = b.sum + row;
    float total = (sum[0] + sum[ROWS]) + (sum[2 * ROWS] + sum[3 * ROWS]);
    float c = begins ? 0.0f : f32_exp(b.m[row] - top), l = begins ? total : fmaf(b.l[row], c, total);
    b.m[row] = top;
    b.l[row] = l;
    b.c[row] = c;
    b.f[row] = ends ? 1.0f / l : 1.0f;
}

/* From scores to exp(s - m'), which is 0 behind the view's end. */
INLINE void full_softmax(const full_shared &b, int begin)
{
    unsigned t = thread_index();
    int row = (int)(t % ROWS), part = (int)(t / ROWS), count = full_count(b, begin) - part * PART;
    float *s = b.score + part * PART * SCORE_LD + row;
    float top = begin == b.tile[1] ? -F32_INF : b.m[row], sum = 0.0f;
#pragma unroll 8
    for (int i = 0; i < PART; i++)
        top = i < count ? fmaxf(top, s[i * SCORE_LD]) : top;
    b.top[part * ROWS + row] = top;
    __syncthreads();
    for (int i = 0; i < PARTS; i++)
        top = fmaxf(top, b.top[i * ROWS + row]);
#pragma unroll 4
    for (int i = 0; i < PART; i++) {
        float p = i < count ? f32_exp(s[i * SCORE_LD] - top) : 0.0f;
        s[i * SCORE_LD] = p;
        sum += p;
    }
    b.sum[part * ROWS + row] = sum;
    __syncthreads();
    if (part == 0)
        full_merge(b, row, begin == b.tile[1], begin + COLS >= b.tile[2], top);
}

/* First row and column of thread t in the sums of values; its rows go on as row_step says, its columns 16 apart, the ninth at
 * 64 of them and one each. */
INLINE int value_row(unsigned t)
{
    return t / 32 % 4 * (LM * TM) + 2 * (t % 2 + t / 4 % 2 * 2);
}

INLINE int value_lane(unsigned t)
{
    return t / 2 % 2 + t / 8 % 4 * 2;
}

/* Thread t's part in reading values, 8 positions of its half at a time: four dimensions of one, and for 64 threads one of the
 * last eight dimensions of a position. What is not there is 0. */
struct full_values {
    float4 v;
    float w;

    /* `from` points at the half's first position and the pass's first dimension; `position` counts from there. */
    __device__ __forceinline__ void fetch(const float *from, int stride, int position, int count, int dims)
    {
        int t = (int)thread_index() % GROUP, row = position + t / 16, last = position + t / 8;
        v = make_float4(0.0f, 0.0f, 0.0f, 0.0f);
        if (row < count && t % 16 * 4 < dims)
            v = load4(from, (unsigned)(row * stride + t % 16 * 4) * 4);
        w = 0.0f;
        if (t < 64 && last < count && 64 + t % 8 < dims)
            w = from[last * stride + 64 + t % 8];
    }

    __device__ __forceinline__ void stash(float *slice) const
    {
        int t = (int)thread_index() % GROUP;
        *(float4 *)(slice + t / 16 * DIMS + t % 16 * 4) = v;
        if (t < 64)
            slice[t / 8 * DIMS + 64 + t % 8] = w;
    }
};

/* acc += p v over 8 positions; p and v point at the thread's first row and column, `last` at its ninth column. */
INLINE void value_steps(float (&acc)[TM][LANE_COLS], const float *p, const float *v, const float *last)
{
#pragma unroll
    for (int k = 0; k < DEPTH; k++) {
        float2 low = *(const float2 *)(p + k * SCORE_LD), high = *(const float2 *)(p + k * SCORE_LD + row_step(2));
        float x[TM] = {low.x, low.y, high.x, high.y};
#pragma unroll
        for (int j = 0; j < LANE_COLS - 1; j += 2) {
            float2 w = *(const float2 *)(v + k * DIMS + 8 * j);
#pragma unroll
            for (int i = 0; i < TM; i++)
                acc[i][j] = fmaf(x[i], w.x, acc[i][j]);
#pragma unroll
            for (int i = 0; i < TM; i++)
                acc[i][j + 1] = fmaf(x[i], w.y, acc[i][j + 1]);
        }
        float w = last[k * DIMS];
#pragma unroll
        for (int i = 0; i < TM; i++)
            acc[i][LANE_COLS - 1] = fmaf(x[i], w, acc[i][LANE_COLS - 1]);
    }
}

/* The sums over each half's positions, of dimensions dim .. dim + 71. */
INLINE void half_sums(float (&acc)[TM][LANE_COLS], const full_attention_args &a, const full_shared &b, int begin, int dim)
{
    unsigned t = thread_index();
    int half = (int)(t / GROUP), count = full_count(b, begin) - half * HALF, dims = (int)a.head_dim - dim;
    const float *from = a.v + (int64_t)(begin + half * HALF) * a.stride + (blockIdx.y * (int)a.head_dim + dim);
    const float *p = b.score + half * HALF * SCORE_LD + value_row(t);
    float *slice = b.value + half * GROUP_SLICE;
    const float *v = slice + 2 * value_lane(t), *last = slice + 64 + value_lane(t);
    bool works = (int)(t / 32 % 4) * (LM * TM) < full_rows(b);
    full_values next;
    next.fetch(from, (int)a.stride, 0, count, dims);
    next.stash(slice);
#pragma unroll
    for (int i = 0; i < TM; i++)
#pragma unroll
        for (int j = 0; j < LANE_COLS; j++)
            acc[i][j] = 0.0f;
    __syncthreads();
    int end = min_of(full_count(b, begin), (int)HALF);
#pragma unroll 1
    for (int k = 0, buffer = 0; k < end; k += DEPTH, buffer ^= VALUES) {
        if (k + DEPTH < end)
            next.fetch(from, (int)a.stride, k + DEPTH, count, dims);
        if (works && k < count)
            value_steps(acc, p + k * SCORE_LD, v + buffer, last + buffer);
        if (k + DEPTH < end)
            next.stash(slice + (buffer ^ VALUES));
        __syncthreads();
    }
}

/* acc[0] and acc[1] become both halves' sums at two of the thread's rows: the first two in the first half, the others in the
 * other; a row at a time through the slices' place. */
INLINE void exchange(float (&acc)[TM][LANE_COLS], float *shared)
{
    unsigned t = thread_index();
    bool upper = t >= GROUP;
#pragma unroll
    for (int i = 0; i < 2; i++) {
#pragma unroll
        for (int j = 0; j < LANE_COLS; j++)
            shared[j * THREADS + t] = upper ? acc[i][j] : acc[2 + i][j];
        __syncthreads();
#pragma unroll
        for (int j = 0; j < LANE_COLS; j++)
            acc[i][j] = (upper ? acc[2 + i][j] : acc[i][j]) + shared[j * THREADS + (t ^ GROUP)];
        __syncthreads();
    }
}

/* o = (o * c + sum) * f */
INLINE void full_store_pair(float *o, float x, float y, float c, float f, bool begins)
{
    float2 old = begins ? make_float2(0.0f, 0.0f) : *(const float2 *)o;
    *(float2 *)o = begins ? make_float2(x * f, y * f) : make_float2(fmaf(old.x, c, x) * f, fmaf(old.y, c, y) * f);
}

INLINE void full_store(const float (&acc)[TM][LANE_COLS], const full_attention_args &a, const full_shared &b, int begin, int dim)
{
    unsigned t = thread_index();
    int row = value_row(t) + (t >= GROUP ? row_step(2) : 0), lane = value_lane(t), left = (int)a.head_dim - dim;
    bool begins = begin == b.tile[1];
#pragma unroll
    for (int i = 0; i < 2; i++) {
        if (row + i >= full_rows(b))
            continue;
        float c = b.c[row + i], f = b.f[row + i];
        float *o = a.o + ((int64_t)(b.tile[0] + row + i) * a.heads + blockIdx.y) * a.head_dim + dim;
#pragma unroll
        for (int j = 0; j < LANE_COLS - 1; j += 2)
            if (2 * lane + 8 * j < left)
                full_store_pair(o + 2 * lane + 8 * j, acc[i][j], acc[i][j + 1], c, f, begins);
        if (64 + lane < left)
            o[64 + lane] = (begins ? acc[i][LANE_COLS - 1] : fmaf(o[64 + lane], c, acc[i][LANE_COLS - 1])) * f;
    }
}

/* blockIdx.x counts tiles, blockIdx.y heads. */
extern "C" __global__ __launch_bounds__(THREADS) void full_attention(full_attention_args a)
{
    __shared__ float4 score[COLS * SCORE_LD / 4], value[2 * VALUES / 4];
    __shared__ float top[PARTS * ROWS], sum[PARTS * ROWS], m[ROWS], l[ROWS], c[ROWS], f[ROWS];
    __shared__ int tile[3];
    full_shared b = {(float *)score, (float *)value, top, sum, m, l, c, f, tile};
    if (threadIdx.x < 3)
        tile[threadIdx.x] = a.tiles[3 * blockIdx.x + threadIdx.x];
    __syncthreads();
#pragma unroll 1
    for (int begin = tile[1]; begin < tile[2]; begin += COLS) {
        full_scores(a, b, begin);
        full_softmax(b, begin);
#pragma unroll 1
        for (int dim = 0; dim < a.head_dim; dim += DIMS) {
            float acc[TM][LANE_COLS];
            half_sums(acc, a, b, unknown(begin), dim);
            exchange(acc, b.value);
            full_store(acc, a, b, unknown(begin), dim);
        }
    }
}
