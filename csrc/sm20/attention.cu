/* Attention as two matrix products for each block of 128 positions, with the softmax between them in shared memory.
 *
 * A thread block has 64 rows, a row being a (token, query head) pair: the heads that share a key head stand
 * together, so that one tile of keys or values serves them all. Scores are a tile of 64 rows x 128 positions, then
 * come 64 rows x 128 dimensions of the values at a time. The running sums of up to 256 dimensions have no place in
 * registers beside those of the scores; they wait in o, in device memory, between blocks of positions, and a
 * thread meets there what it left itself. What a span of SPAN positions has added joins `total` when the span is
 * over: sums of ten thousand weights lose less to rounding in a few long steps than in many short ones.
 */
#include "attention_tile.cuh"

enum { PARTS = THREADS / ROWS, PART = COLS / PARTS }; /* threads that share a row in the softmax, and their positions */
enum { SPAN = 8 * COLS };

/* A thread block's shared memory. */
struct attention_shared {
    float *score;     /* [COLS, SCORE_LD] s, then p; before them two slices of their operands */
    float *value;     /* two slices of values */
    float *top, *sum; /* [PARTS, ROWS] of a row's parts */
    float *m, *l;     /* [ROWS] running maximum, and sum of the span */
    float *before;    /* [ROWS] the maximum when the span began */
    float *all;       /* [ROWS] sum of the spans that are over */
    float *c, *g, *f; /* [ROWS] what the sums in o are multiplied by, those in total, and then all */
    unsigned *place;  /* [ROWS] where a row is in q and o, in floats */
    int *seen;        /* [ROWS] how many positions it sees; never fewer than the row before */
    int *rows;        /* [1] how many rows there are; behind them the last one is repeated */
    unsigned *cache;  /* [1] row of the cache where the key head begins */
};

/* How many positions of the block at `begin` the last row sees. */
INLINE int block_count(const attention_shared &b, int begin)
{
    return min_of(b.seen[ROWS - 1] - begin, (int)COLS);
}

/* How many all rows see, in whole pairs of slices. */
INLINE int block_whole(const attention_shared &b, int begin)
{
    return max_of(min_of(b.seen[0] - begin, (int)COLS), 0) / (2 * DEPTH) * (2 * DEPTH);
}

INLINE void store_scores(const float (&acc)[TM][TN], float *score, float scale)
{
    unsigned t = thread_index();
    float *s = score + thread_col(t) * SCORE_LD + thread_row(t);
#pragma unroll
    for (int j = 0; j < TN; j++)
#pragma unroll
        for (int i = 0; i < TM; i += 2)
            *(float2 *)(s + col_step(j) * SCORE_LD + row_step(i)) =
                make_float2(acc[i][j] * scale, acc[i + 1][j] * scale);
}

/* Scores of the block's positions; what stands behind them is never used. */
INLINE void attention_scores(const attention_args &a, const attention_shared &b, int begin)
{
    float acc[TM][TN];
    unsigned t = thread_index();
    const float *x = b.score + thread_row(t), *w = b.score + DEPTH * QUERY_LD + thread_col(t);
    float *to_query = score_operands::query_place(b.score, t), *to_key = score_operands::key_place(b.score, t);
    bool works = warp_works(t, *b.rows, COLS);
    score_operands next;
    unsigned key_row = *b.cache + begin + min_of((int)t / 2, block_count(b, begin) - 1);
    next.begin(t, b.place[t / 4], key_row * (unsigned)a.head_dim);
    next.fetch<0>(a.q, a.k_cache);
    next.stash(to_query, to_key);
    product_clear(acc);
    __syncthreads();
    for (int left = (int)a.head_dim / (2 * DEPTH);;) {
        next.fetch<DEPTH>(a.q, a.k_cache);
        if (works)
            product_steps<QUERY_LD, KEY_LD>(acc, x, w);
        next.stash(to_query + SCORE_SLICE, to_key + SCORE_SLICE);
        next.next(2 * DEPTH);
        __syncthreads();
        left--;
        if (left > 0)
            next.fetch<0>(a.q, a.k_cache);
        if (works)
            product_steps<QUERY_LD, KEY_LD>(acc, x + SCORE_SLICE, w + SCORE_SLICE);
        if (left == 0)
            break;
        next.stash(to_query, to_key);
        __syncthreads();
    }
    __syncthreads();
    store_scores(acc, b.score, a.scale);
    __syncthreads();
}

/* Whether the block at `begin` is the last one that a row of this thread block sees. */
INLINE bool ends(const attention_shared &b, int begin)
{
    return b.seen[ROWS - 1] <= begin + COLS;
}

/* Whether it closes its span. */
INLINE bool closes(const attention_shared &b, int begin)
{
    return begin % SPAN == SPAN - COLS || ends(b, begin);
}

/* A row's sum over all spans up to this one, and what to multiply their sums in total by: exp(0) = 1 where it sees
 * nothing of this one. */
INLINE void merge_span(const attention_shared &b, int row, int begin, float top, float l)
{
    float g = 0.0f, all = l;
    if (begin >= SPAN) {
        g = f32_exp(b.before[row] - top);
        all = fmaf(b.all[row], g, l);
    }
    b.all[row] = all;
    b.g[row] = g;
    b.f[row] = ends(b, begin) ? 1.0f / all : 1.0f;
}

/* A row's running maximum and sum, and what to multiply by. A row that sees nothing of this block keeps all it
 * has. */
INLINE void merge_row(const attention_shared &b, int row, int begin, bool sees, float top)
{
    const float *sum = b.sum + row;
    float total = (sum[0] + sum[ROWS]) + (sum[2 * ROWS] + sum[3 * ROWS]), c = 0.0f, l = total;
    if (begin % SPAN == 0) {
        b.before[row] = b.m[row];
    } else {
        c = sees ? f32_exp(b.m[row] - top) : 1.0f;
        l = sees ? fmaf(b.l[row], c, total) : b.l[row];
    }
    b.m[row] = top;
    b.l[row] = l;
    b.c[row] = c;
    b.f[row] = 1.0f;
    if (closes(b, begin))
        merge_span(b, row, begin, top, l);
}

/* From scores to exp(s - m') for the positions that a row sees. */
INLINE void attention_softmax(const attention_shared &b, int begin)
{
    unsigned t = thread_index();
    int row = (int)(t % ROWS), part = (int)(t / ROWS), visible = b.seen[row] - begin;
    float *s = b.score + part * PART * SCORE_LD + row, *end = s + min_of(visible - part * PART, (int)PART) * SCORE_LD;
    float top = begin > 0 ? b.m[row] : -F32_INF, sum = 0.0f;
    for (float *x = s; x < end; x += SCORE_LD)
        top = fmaxf(top, *x);
    b.top[part * ROWS + row] = top;
    __syncthreads();
    for (int i = 0; i < PARTS; i++)
        top = fmaxf(top, b.top[i * ROWS + row]);
    for (float *x = s; x < end; x += SCORE_LD) {
        float p = f32_exp(*x - top);
        *x = p;
        sum += p;
    }
    b.sum[part * ROWS + row] = sum;
    __syncthreads();
    if (part == 0)
        merge_row(b, row, begin, visible > 0, top);
}

/* acc = the sums over positions that every row sees; leaves the slice behind them in the first buffer. */
INLINE void whole_values(float (&acc)[TM][TN], const attention_args &a, const attention_shared &b, int begin, int dim)
{
    unsigned t = thread_index(), from = *b.cache + begin;
    const float *p = b.score + thread_row(t), *v = b.value + thread_col(t);
    float4 *to = (float4 *)b.value + t;
    bool works = warp_works(t, *b.rows, (int)a.head_dim - dim);
    value_operand next;
    next.begin(t, from, from + block_count(b, begin) - 1, dim, (int)a.head_dim);
    next.fetch(a);
    *to = next.v;
    product_clear(acc);
    __syncthreads();
    for (int left = block_whole(b, begin); left > 0; left -= 2 * DEPTH, p += 2 * DEPTH * SCORE_LD) {
        next.fetch(a);
        if (works)
            product_steps<SCORE_LD, VALUE_LD>(acc, p, v);
        to[VALUE_SLICE / 4] = next.v;
        __syncthreads();
        next.fetch(a);
        if (works)
            product_steps<SCORE_LD, VALUE_LD>(acc, p + DEPTH * SCORE_LD, v + VALUE_SLICE);
        *to = next.v;
        __syncthreads();
    }
}

/* acc += p v over `n` positions from `begin` on: what a row does not see is no term of its sums, not even with
 * weight 0, which an infinite value would turn into NaN. */
INLINE void ragged_steps(float (&acc)[TM][TN], const int *seen, const float *p, const float *v, int begin, int n)
{
#pragma unroll 1
    for (; n > 0; n--, begin++, p += SCORE_LD, v += VALUE_LD)
#pragma unroll
        for (int i = 0; i < TM; i++)
            if (begin < seen[row_step(i)])
#pragma unroll
                for (int j = 0; j < TN; j++)
                    acc[i][j] = fmaf(p[row_step(i)], v[col_step(j)], acc[i][j]);
}

/* acc += the sums over the positions behind those, which some rows see and some do not. */
INLINE void ragged_values(float (&acc)[TM][TN], const attention_args &a, const attention_shared &b, int begin, int dim)
{
    unsigned t = thread_index(), from = *b.cache + begin;
    int count = block_count(b, begin), row = thread_row(t);
    const float *v = b.value + thread_col(t);
    float4 *to = (float4 *)b.value + t;
    bool works = warp_works(t, *b.rows, (int)a.head_dim - dim);
    value_operand next;
    next.begin(t, from + block_whole(b, begin) + DEPTH, from + count - 1, dim, (int)a.head_dim);
#pragma unroll 1
    for (int k = block_whole(b, begin); k < count; k += DEPTH) {
        const float *slice = v + k / DEPTH % 2 * VALUE_SLICE;
        next.fetch(a);
        if (works)
            ragged_steps(acc, b.seen + row, b.score + k * SCORE_LD + row, slice, begin + k,
                         min_of(count - k, (int)DEPTH));
        to[(k / DEPTH + 1) % 2 * VALUE_SLICE / 4] = next.v;
        __syncthreads();
    }
}

/* o = (o * c + acc) * f from dimension `dim` on; where a span closes, what it has goes with total into total, or in
 * the end into o. */
INLINE void store_values(const float (&acc)[TM][TN], const attention_args &a, const attention_shared &b, int begin,
                         int dim)
{
    unsigned t = thread_index();
    int first = thread_row(t);
    bool goes_on = begin % SPAN != 0, joins = closes(b, begin) && begin >= SPAN, is_open = closes(b, begin) && !ends(b, begin);
    dim += thread_col(t);
#pragma unroll
    for (int i = 0; i < TM; i++) {
        int row = first + row_step(i);
        if (row >= *b.rows)
            continue;
        float c = b.c[row], f = b.f[row];
        unsigned place = b.place[row] + dim;
#pragma unroll
        for (int j = 0; j < TN; j += 2)
            if (dim + col_step(j) < a.head_dim) {
                float2 *o = (float2 *)(a.o + (place + col_step(j))), *total = (float2 *)(a.total + (place + col_step(j)));
                float2 sum = goes_on ? *o : make_float2(0.0f, 0.0f);
                sum = make_float2(fmaf(sum.x, c, acc[i][j]), fmaf(sum.y, c, acc[i][j + 1]));
                if (joins)
                    sum = make_float2(fmaf(total->x, b.g[row], sum.x), fmaf(total->y, b.g[row], sum.y));
                *(is_open ? total : o) = make_float2(sum.x * f, sum.y * f);
            }
    }
}

/* blockIdx.x counts tiles of rows from the last one, which sees most positions; blockIdx.y key heads. */
extern "C" __global__ __launch_bounds__(THREADS) void attention(attention_args a)
{
    __shared__ float4 score[COLS * SCORE_LD / 4], value[2 * VALUE_SLICE / 4];
    __shared__ float top[PARTS * ROWS], sum[PARTS * ROWS], m[ROWS], l[ROWS], before[ROWS], all[ROWS], c[ROWS], g[ROWS], f[ROWS];
    __shared__ unsigned place[ROWS], cache;
    __shared__ int seen[ROWS], rows;
    attention_shared b = {(float *)score, (float *)value, top, sum, m, l, before, all, c, g, f, place, seen, &rows, &cache};
    int group = (int)(a.heads / a.kv_heads), t = (int)threadIdx.x;
    int first = (int)(gridDim.x - 1 - blockIdx.x) * ROWS, exist = min_of((int)a.tokens * group - first, (int)ROWS);
    if (t < ROWS) {
        int row = first + min_of(t, exist - 1), token = row / group;
        place[t] = ((unsigned)token * (unsigned)a.heads + blockIdx.y * group + row % group) * (unsigned)a.head_dim;
        seen[t] = (int)a.start + token + 1;
    }
    if (t == 0) {
        rows = exist;
        cache = blockIdx.y * (unsigned)a.capacity;
    }
    __syncthreads();
#pragma unroll 1
    for (int begin = 0; begin < seen[ROWS - 1]; begin += COLS) {
        attention_scores(a, b, begin);
        attention_softmax(b, begin);
#pragma unroll 1
        for (int dim = 0; dim < a.head_dim; dim += COLS) {
            float acc[TM][TN];
            whole_values(acc, a, b, unknown(begin), dim);
            ragged_values(acc, a, b, unknown(begin), dim);
            store_values(acc, a, b, unknown(begin), dim);
        }
    }
}
