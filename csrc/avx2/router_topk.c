/* A vector is eight experts: once k are chosen, one comparison passes over eight that cannot enter. */
#include "../kernels.h"
#include "../scalar/topk.h"
#include "lanes.h"
#include "math.h"

INLINE AVX2 void choose(const float *logits, int64_t experts, int32_t *ids, int64_t k)
{
    int64_t count = 0, e = 0;
    for (; e < experts && count < k; e++)
        count = topk_offer(logits, (int32_t)e, ids, count, k);
    for (; e < experts; e += 8) {
        int64_t left = experts - e;
        __m256 enters = _mm256_cmp_ps(load_n(logits + e, left), _mm256_set1_ps(logits[ids[k - 1]]), _CMP_GT_OQ);
        unsigned which = (unsigned)_mm256_movemask_ps(enters) & (left < 8 ? (1u << left) - 1 : 255u);
        for (; which; which &= which - 1)
            topk_offer(logits, (int32_t)e + __builtin_ctz(which), ids, k, k);
    }
}

/* weights[slot] = exp(l - l_first), then divided by their sum. */
INLINE AVX2 void weigh(const float *logits, const int32_t *ids, float *weights, int64_t k)
{
    float sum = 0.0f;
    for (int64_t slot = 0; slot < k; slot++)
        weights[slot] = logits[ids[slot]] - logits[ids[0]];
    for (int64_t slot = 0; slot < k; slot += 8)
        store_n(weights + slot, v_exp(load_n(weights + slot, k - slot)), k - slot);
    for (int64_t slot = 0; slot < k; slot++)
        sum += weights[slot];
    for (int64_t slot = 0; slot < k; slot += 8)
        store_n(weights + slot, _mm256_div_ps(load_n(weights + slot, k - slot), _mm256_set1_ps(sum)), k - slot);
}

AVX2 void avx2_router_topk(const router_topk_args *a, int64_t begin, int64_t end)
{
    for (int64_t t = begin; t < end; t++) {
        const float *logits = a->logits + t * a->experts;
        choose(logits, a->experts, a->ids + t * a->k, a->k);
        weigh(logits, a->ids + t * a->k, a->weights + t * a->k, a->k);
    }
}
