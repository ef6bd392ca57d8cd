#include "fermi.cuh"

enum { BLOCK = 256, MAX_EXPERTS = 1024, MAX_CHOSEN = 32 };

/* An integer that is larger where x is: -0.0 is +0.0, NaN is largest. */
INLINE int order_of(float x)
{
    int bits = (int)bits_of(x + 0.0f);
    return x != x ? 0x7fffffff : bits < 0 ? bits ^ 0x7fffffff : bits;
}

/* How many experts come before expert e. */
INLINE int rank_of(const int *order, int experts, int e)
{
    int mine = order[e], rank = 0;
    for (int i = 0; i < e; i++)
        rank += order[i] >= mine;
    for (int i = e + 1; i < experts; i++)
        rank += order[i] > mine;
    return rank;
}

/* A thread block a token: every expert's rank is counted, no order of threads matters. */
extern "C" __global__ __launch_bounds__(BLOCK) void router_topk(router_topk_args a)
{
    __shared__ int order[MAX_EXPERTS];
    __shared__ float best[MAX_CHOSEN], power[MAX_CHOSEN];
    int experts = (int)a.experts, k = (int)a.k, thread = (int)threadIdx.x;
    for (int64_t t = blockIdx.x; t < a.tokens; t += gridDim.x) {
        const float *logits = a.logits + t * experts;
        for (int e = thread; e < experts; e += BLOCK)
            order[e] = order_of(logits[e]);
        __syncthreads();
        for (int e = thread; e < experts; e += BLOCK) {
            int rank = rank_of(order, experts, e);
            if (rank < k) {
                a.ids[t * k + rank] = e;
                best[rank] = logits[e];
            }
        }
        __syncthreads();
        if (thread < k)
            power[thread] = f32_exp(best[thread] - best[0]);
        __syncthreads();
        float sum = 0.0f;
        for (int slot = 0; slot < k; slot++)
            sum += power[slot];
        if (thread < k)
            a.weights[t * k + thread] = power[thread] / sum;
    }
}
