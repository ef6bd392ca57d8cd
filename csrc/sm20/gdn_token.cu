#include "rows.cuh"

#define BLOCK 512
#define KEYS 128               /* rows of a state at most, and its columns */
#define GROUPS 8               /* of rows: gdn_step's warps */
#define ROWS (KEYS / GROUPS)   /* of a thread, in two columns */
#define PAIRS (KEYS / 2)       /* threads that a group has */
#define LARGEST 3.402823466e38f

struct token_shared {
    float *head;  /* [3 KEYS] q, k and v of a head behind the convolution */
    float *sums;  /* [GROUPS, KEYS] parts of a column, squares of a row */
    float *gates; /* [2] decay and beta */
};

/* threadIdx.x as a number that compilers do not know yet: what is made of it is not kept in registers for later. */
INLINE int fresh_thread()
{
    int t = (int)threadIdx.x;
    asm volatile("" : "+r"(t));
    return t;
}

/* Convolution and silu of one channel; its tail moves on. */
INLINE float convolve(const gdn_token_args &a, int channel)
{
    int taps = (int)a.taps;
    int64_t channels = 2 * a.k_heads * a.dk + a.v_heads * a.dv;
    const float *w = a.w + channel;
    float *tail = a.tail + channel, y = 0.0f, x = a.qkv[channel];
    for (int j = 0; j + 1 < taps; j++) {
        float m = tail[j * channels];
        y = fmaf(w[j * channels], m, y);
        if (j > 0)
            tail[(j - 1) * channels] = m;
    }
    if (taps > 1)
        tail[(taps - 2) * channels] = x;
    return f32_silu(fmaf(w[(taps - 1) * channels], x, y));
}

/* Square sums of rows of n (at most 128) floats in rows.cuh's order, all rows at once: 32 threads each. */
INLINE float squares(const float *x, int n, float *sums)
{
    int t = fresh_thread(), lane = t % 32;
    float acc = 0.0f;
    if (4 * lane < n)
        acc = add_squares(0.0f, make_float4(x[4 * lane], x[4 * lane + 1], x[4 * lane + 2], x[4 * lane + 3]));
    __syncthreads();
    sums[t] = acc;
    __syncthreads();
    for (int s = 16; s > 0; s /= 2) {
        if (lane < s)
            sums[t] += sums[t + s];
        __syncthreads();
    }
    return sums[t - lane];
}

/* gdn_step's sums: a thread's rows in four chains, a column's groups as a tree. */
INLINE void add_rows(const float *x, const float2 (&s)[ROWS], float *part)
{
    float2 even = make_float2(0.0f, 0.0f), odd = even; /* c0 + c2 and c1 + c3 */
#pragma unroll
    for (int chain = 0; chain < 4; chain++) {
        float2 c = make_float2(0.0f, 0.0f), &sum = chain % 2 ? odd : even;
#pragma unroll
        for (int i = chain; i < ROWS; i += 4)
            c = make_float2(fmaf(x[i], s[i].x, c.x), fmaf(x[i], s[i].y, c.y));
        sum = chain < 2 ? c : make_float2(sum.x + c.x, sum.y + c.y);
    }
    *(float2 *)part = make_float2(even.x + odd.x, even.y + odd.y);
}

INLINE float sum_groups(const float *part)
{
    return ((part[0] + part[KEYS]) + (part[2 * KEYS] + part[3 * KEYS]))
         + ((part[4 * KEYS] + part[5 * KEYS]) + (part[6 * KEYS] + part[7 * KEYS]));
}

/* o of a head into b.head + 2 KEYS, in place of v; its state moves on. q and k stand in b.head. */
INLINE void step(const gdn_token_args &a, const token_shared &b, int head, float2 (&s)[ROWS])
{
    int t = fresh_thread(), first = t / PAIRS * ROWS, column = t % PAIRS * 2, dk = (int)a.dk, dv = (int)a.dv;
    float *part = b.sums + t / PAIRS * KEYS + column, *v = b.head + 2 * KEYS, decay = b.gates[0];
#pragma unroll
    for (int i = 0; i < ROWS; i++)
        s[i] = make_float2(s[i].x * decay, s[i].y * decay);
    add_rows(b.head + KEYS + first, s, part);
    __syncthreads();
    if (t < dv)
        v[t] = b.gates[1] * (v[t] - sum_groups(b.sums + t));
    __syncthreads();
    float2 u = make_float2(v[column], v[column + 1]);
    float *state = a.state + ((int64_t)head * dk + first) * dv + column;
#pragma unroll
    for (int i = 0; i < ROWS; i++) {
        float by = b.head[KEYS + first + i];
        s[i] = make_float2(fmaf(by, u.x, s[i].x), fmaf(by, u.y, s[i].y));
        if (first + i < dk && column < dv)
            *(float2 *)(state + i * dv) = s[i];
    }
    add_rows(b.head + first, s, part);
    __syncthreads();
    if (t < dv)
        v[t] = sum_groups(b.sums + t);
    __syncthreads();
}

/* Threads beyond n give zeros, so that sums over all of a thread's rows are right for every head size. */
INLINE void normalise(float *x, int n, float eps, float scale, float *sums)
{
    int t = fresh_thread(), row = t / 32;
    float by = f32_rsqrt(squares(x + row % 2 * KEYS, n, sums) + eps), own = row == 0 ? scale : 1.0f;
    __syncthreads();
    if (row < 2) {
#pragma unroll
        for (int i = 0; i < 4; i++) {
            float *at = x + row * KEYS + 4 * (t % 32) + i;
            *at = 4 * (t % 32) < n ? *at * by * own : 0.0f;
        }
    }
}

/* While the convolution and the gates are worked out, for which registers that held the state would be short. */
INLINE void prefetch_state(const gdn_token_args &a, int head)
{
#ifndef FERMI_EMULATED
    const char *state = (const char *)(a.state + (int64_t)head * a.dk * a.dv);
    for (int at = (int)threadIdx.x * 128; at < (int)(a.dk * a.dv) * 4; at += BLOCK * 128)
        asm volatile("prefetch.global.L2 [%0];" : : "l"(state + at));
#else
    (void)a, (void)head;
#endif
}

INLINE void load_state(const gdn_token_args &a, int head, float2 (&s)[ROWS])
{
    int t = fresh_thread(), first = t / PAIRS * ROWS, column = t % PAIRS * 2, dk = (int)a.dk, dv = (int)a.dv;
    const float *state = a.state + ((int64_t)head * dk + first) * dv + column;
#pragma unroll
    for (int i = 0; i < ROWS; i++) {
        s[i] = make_float2(0.0f, 0.0f);
        if (first + i < dk && column < dv) {
            float2 pair = *(const float2 *)(state + i * dv);
            s[i] = make_float2(pair.x, pair.y);
        }
    }
}

/* Decay and beta of a head. */
INLINE void gate(const gdn_token_args &a, int head, float *gates)
{
    float rate = f32_exp(a.A_log[head]);
    rate = LARGEST < rate ? LARGEST : rate;
    gates[0] = f32_exp(-(rate * f32_softplus(a.a[head] + a.dt_bias[head])));
    gates[1] = f32_sigmoid(a.b[head]);
}

extern "C" __global__ __launch_bounds__(BLOCK) void gdn_token(gdn_token_args a)
{
    __shared__ float head_values[3 * KEYS], sums[GROUPS * KEYS], gates[2];
    token_shared b = {head_values, sums, gates};
    int t = fresh_thread(), key_head = (int)blockIdx.x, group = (int)(a.v_heads / a.k_heads);
    int dk = (int)a.dk, dv = (int)a.dv, part = t / KEYS, i = t % KEYS, keys = (int)a.k_heads * dk;
    float2 s[ROWS];
#pragma unroll 1
    for (int head = key_head * group; head < (key_head + 1) * group; head++) {
        bool begins = head == key_head * group;
        prefetch_state(a, head);
        if (t == BLOCK - 1)
            gate(a, head, gates);
        if (part == 2 || (part < 2 && begins)) {
            int channel = part < 2 ? part * keys + key_head * dk + i : 2 * keys + head * dv + i;
            b.head[t] = i < (part < 2 ? dk : dv) ? convolve(a, channel) : 0.0f;
        }
        __syncthreads();
        if (begins)
            normalise(b.head, dk, a.l2_eps, a.q_scale, sums);
        __syncthreads();
        load_state(a, head, s);
        step(a, b, head, s);
        const float *o = b.head + 2 * KEYS;
        float scale = f32_rsqrt(squares(o, dv, sums) / (float)dv + a.norm_eps);
        if (t < dv) {
            int at = head * dv + t;
            a.y[at] = o[t] * scale * a.norm[t] * f32_silu(a.z[at]);
        }
        __syncthreads();
    }
}
