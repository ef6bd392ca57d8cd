#include "rows.cuh"

enum { BLOCK = 256, SPLIT = 64, HEADS = 4, CHAINS = 8, DIMS = 256, AT_ONCE = 256, SPAN = 16 };

/* A row of n floats normalised into `row`, by all threads; then its leading pairs turned. */
INLINE void prepare_row(const token_attention_args &a, const float *x, const float *w, float *row, float *sums)
{
    int t = (int)threadIdx.x, n = (int)a.head_dim, lanes = row_lanes(n), half = (int)a.half;
    float scale = f32_rsqrt(square_sum(sums, x, t < lanes ? n : 0, lanes) / (float)n + a.eps);
    if (t < lanes)
        for (int i = 4 * t; i < n; i += 4 * lanes)
            for (int j = i; j < i + 4; j++)
                row[j] = x[j] * scale * (1.0f + w[j]);
    __syncthreads();
    if (t < half) {
        float first = row[t], second = row[t + half], cos = a.cos[t], sin = a.sin[t];
        row[t] = fmaf(first, cos, -(second * sin));
        row[t + half] = fmaf(second, cos, first * sin);
    }
    __syncthreads();
}

extern "C" __global__ __launch_bounds__(BLOCK) void token_attention_prepare(token_attention_args a)
{
    __shared__ float row[DIMS], sums[ROW_BLOCK];
    int t = (int)threadIdx.x, n = (int)a.head_dim, head = (int)blockIdx.x, key_head = head - (int)a.heads;
    bool is_key = key_head >= 0;
    prepare_row(a, is_key ? a.key + key_head * n : a.query_gate + head * 2 * n, is_key ? a.k_norm : a.q_norm, row, sums);
    if (t >= n)
        return;
    if (is_key) {
        int64_t to = (key_head * a.capacity + *a.position) * n + t;
        a.k_cache[to] = row[t];
        a.v_cache[to] = a.value[key_head * n + t];
    } else {
        a.query[head * n + t] = row[t];
    }
}

/* Four heads' scores for the positions of a split, times scale: 8 threads share a position, four positions a warp. */
INLINE void split_scores(const token_attention_args &a, const float *query, const float *keys, int count, float *part,
                         float *score)
{
    int t = (int)threadIdx.x, n = (int)a.head_dim, chain = t % CHAINS;
#pragma unroll 1
    for (int p = t / CHAINS; p < count; p += BLOCK / CHAINS) {
        float acc[HEADS] = {};
        const float *key = keys + (int64_t)p * n;
#pragma unroll 4
        for (int d = 4 * chain; d < n; d += 4 * CHAINS) {
            float4 k = *(const float4 *)(key + d);
#pragma unroll
            for (int h = 0; h < HEADS; h++) {
                float4 q = *(const float4 *)(query + h * DIMS + d);
                acc[h] = fmaf(q.w, k.w, fmaf(q.z, k.z, fmaf(q.y, k.y, fmaf(q.x, k.x, acc[h]))));
            }
        }
#pragma unroll
        for (int h = 0; h < HEADS; h++)
            part[(h * SPLIT + p) * CHAINS + chain] = acc[h];
    }
    __syncthreads();
    const float *mine = part + t * CHAINS;
    float sum = mine[0];
    for (int i = 1; i < CHAINS; i++)
        sum += mine[i];
    score[t] = sum * a.scale;
    __syncthreads();
}

/* Of the first `count` scores of this thread's head: the largest, exp(s - m) into p[position, head], and their sum. */
INLINE void split_softmax(float *score, float *part, float *p, int count, float *m, float *l)
{
    int t = (int)threadIdx.x, at = t % SPLIT, head = t / SPLIT;
    const float *s = score + head * SPLIT;
    float top = -F32_INF, sum = 0.0f;
    for (int i = 0; i < count; i++)
        top = fmaxf(top, s[i]);
    float mine = at < count ? f32_exp(s[at] - top) : 0.0f;
    p[at * HEADS + head] = mine;
    __syncthreads();
    if (at < CHAINS) {
        for (int i = at; i < count; i += CHAINS)
            sum += p[i * HEADS + head];
        part[head * CHAINS + at] = sum;
    }
    __syncthreads();
    sum = part[head * CHAINS];
    for (int i = 1; i < CHAINS; i++)
        sum += part[head * CHAINS + i];
    *m = top;
    *l = sum;
}

extern "C" __global__ __launch_bounds__(BLOCK) void token_attention_part(token_attention_args a)
{
    __shared__ float4 query[HEADS * DIMS / 4], weights[SPLIT];
    __shared__ float part[BLOCK * CHAINS], score[BLOCK];
    int t = (int)threadIdx.x, n = (int)a.head_dim, group = (int)(a.heads / a.kv_heads), begin = (int)blockIdx.x * SPLIT;
    int count = min_of(*a.position + 1 - begin, (int)SPLIT), bundle = (int)blockIdx.z * HEADS;
    int first = (int)blockIdx.y * group + bundle, heads = min_of(group - bundle, (int)HEADS);
    if (count <= 0)
        return;
    for (int i = t; i < HEADS * DIMS; i += BLOCK)
        ((float *)query)[i] = i / DIMS < heads && i % DIMS < n ? a.query[(first + i / DIMS) * n + i % DIMS] : 0.0f;
    __syncthreads();
    int64_t from = ((int64_t)blockIdx.y * a.capacity + begin) * n;
    float m, l;
    split_scores(a, (const float *)query, a.k_cache + from, count, part, score);
    split_softmax(score, part, (float *)weights, count, &m, &l);
    int64_t to = (int64_t)blockIdx.x * a.heads + first;
    if (t % SPLIT == 0 && t / SPLIT < heads) {
        a.part_m[to + t / SPLIT] = m;
        a.part_l[to + t / SPLIT] = l;
    }
    if (t >= n)
        return;
    float acc[HEADS] = {};
    const float *v = a.v_cache + from + t;
#pragma unroll 8
    for (int p = 0; p < count; p++) {
        float value = v[(int64_t)p * n];
        float4 w = weights[p];
        acc[0] = fmaf(w.x, value, acc[0]);
        acc[1] = fmaf(w.y, value, acc[1]);
        acc[2] = fmaf(w.z, value, acc[2]);
        acc[3] = fmaf(w.w, value, acc[3]);
    }
#pragma unroll
    for (int h = 0; h < HEADS; h++)
        if (h < heads)
            a.part_o[(to + h) * n + t] = acc[h];
}

extern "C" __global__ __launch_bounds__(BLOCK) void token_attention_merge(token_attention_args a)
{
    __shared__ float tops[BLOCK], c[AT_ONCE], ls[AT_ONCE];
    int t = (int)threadIdx.x, n = (int)a.head_dim, head = (int)blockIdx.x, splits = *a.position / SPLIT + 1;
    float top = -F32_INF, l = 0.0f, o = 0.0f;
    for (int s = t; s < splits; s += BLOCK)
        top = fmaxf(top, a.part_m[(int64_t)s * a.heads + head]);
    tops[t] = top;
    __syncthreads();
    for (int i = 0; i < BLOCK; i++)
        top = fmaxf(top, tops[i]);
#pragma unroll 1
    for (int first = 0; first < splits; first += AT_ONCE) {
        int count = min_of(splits - first, (int)AT_ONCE);
        __syncthreads();
        if (t < count) {
            int64_t at = (int64_t)(first + t) * a.heads + head;
            c[t] = f32_exp(a.part_m[at] - top);
            ls[t] = a.part_l[at];
        }
        __syncthreads();
        const float *from = a.part_o + ((int64_t)first * a.heads + head) * n + (t < n ? t : 0);
#pragma unroll 1
        for (int span = 0; span < count; span += SPAN) {
            int end = min_of(span + SPAN, count);
            float span_l = 0.0f, span_o = 0.0f;
#pragma unroll 8
            for (int s = span; s < end; s++) {
                span_l = fmaf(c[s], ls[s], span_l);
                span_o = fmaf(c[s], from[(int64_t)s * a.heads * n], span_o);
            }
            l += span_l;
            o += span_o;
        }
    }
    if (t < n)
        a.y[head * n + t] = o * (1.0f / l) * f32_sigmoid(a.query_gate[head * 2 * n + n + t]);
}
