#include "fermi.cuh"

#define SLAB 32            /* value columns of a block, one a lane */
#define GROUPS 8           /* warps of a block, each with its rows of the state */
#define KEYS 128           /* rows of the state at most */
#define ROWS (KEYS / GROUPS)
#define BLOCK (SLAB * GROUPS)

/* What a thread holds back for the next token while it works on this one. */
struct token_values {
    float key, v, g, beta; /* key: its element of k (the first 128 threads) or q */
};

INLINE token_values token_fetch(const gdn_step_args &a, int64_t token, int key_head, int head, int column)
{
    int i = (int)threadIdx.x % KEYS, dk = (int)a.dk, heads = (int)a.v_heads;
    const float *row = (threadIdx.x < KEYS ? a.k : a.q) + (token * (int)a.k_heads + key_head) * dk;
    token_values values = {i < dk ? row[i] : 0.0f, a.v[token * (int)a.v_stride + head * (int)a.dv + column],
                           a.g[token * heads + head], a.beta[token * heads + head]};
    return values;
}

/* The parts of a column from all groups. */
INLINE float sum_groups(const float *part)
{
    return ((part[0] + part[SLAB]) + (part[2 * SLAB] + part[3 * SLAB]))
         + ((part[4 * SLAB] + part[5 * SLAB]) + (part[6 * SLAB] + part[7 * SLAB]));
}

/* x . s over this thread's rows in four chains; x lies in shared memory. */
INLINE float dot_rows(const float *x, const float (&s)[ROWS])
{
    float chain[4] = {};
#pragma unroll
    for (int i = 0; i < ROWS; i += 2) {
        float2 pair = *(const float2 *)(x + i);
        chain[i % 4] = fmaf(pair.x, s[i], chain[i % 4]);
        chain[i % 4 + 1] = fmaf(pair.y, s[i + 1], chain[i % 4 + 1]);
    }
    return (chain[0] + chain[2]) + (chain[1] + chain[3]);
}

/* s += x u */
INLINE void add_rows(float (&s)[ROWS], const float *x, float u)
{
#pragma unroll
    for (int i = 0; i < ROWS; i += 2) {
        float2 pair = *(const float2 *)(x + i);
        s[i] = fmaf(pair.x, u, s[i]);
        s[i + 1] = fmaf(pair.y, u, s[i + 1]);
    }
}

/* Two barriers a token: one when k and q are there and the parts of the token before; one when all parts of p are. */
extern "C" __global__ __launch_bounds__(BLOCK) void gdn_step(gdn_step_args a)
{
    __shared__ float2 keys[2][KEYS]; /* k then q of a token, of this one and the next */
    __shared__ float part_p[BLOCK], part_o[BLOCK];
    int t = (int)threadIdx.x, lane = t % SLAB, first = t / SLAB * ROWS, head = (int)blockIdx.y;
    int key_head = head / ((int)a.v_heads / (int)a.k_heads), column = (int)blockIdx.x * SLAB + lane;
    int width = (int)a.v_heads * (int)a.dv, dv = (int)a.dv, count = (int)a.tokens;
    float *state = a.state + (head * (int)a.dk + first) * dv + column, *o = a.o + head * dv + column - width;
    float s[ROWS];
#pragma unroll
    for (int i = 0; i < ROWS; i++)
        s[i] = first + i < (int)a.dk ? state[i * dv] : 0.0f;
    token_values next = token_fetch(a, 0, key_head, head, column);
#pragma unroll 1
    for (int token = 0; token < count; token++) {
        float *k = (float *)keys[token & 1], v = next.v, beta = next.beta, decay = f32_exp(next.g);
        k[t] = next.key;
        if (token + 1 < count)
            next = token_fetch(a, token + 1, key_head, head, column);
        __syncthreads();
        if (t < SLAB && token > 0)
            *o = sum_groups(part_o + lane);
        o += width;
#pragma unroll
        for (int i = 0; i < ROWS; i++)
            s[i] *= decay;
        part_p[t] = dot_rows(k + first, s);
        __syncthreads();
        add_rows(s, k + first, beta * (v - sum_groups(part_p + lane)));
        part_o[t] = dot_rows(k + KEYS + first, s);
    }
    __syncthreads();
    if (t < SLAB)
        *o = sum_groups(part_o + lane);
#pragma unroll
    for (int i = 0; i < ROWS; i++)
        if (first + i < (int)a.dk)
            state[i * dv] = s[i];
}
