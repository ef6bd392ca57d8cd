/* A vector is four experts: once k are chosen, one comparison passes over four that cannot enter. The weights are few and
 * computed one by one. */
#include "../kernels.h"
#include "../scalar/math.h"
#include "../scalar/topk.h"
#include "target.h"

#include <tmmintrin.h>

static SSSE3 void choose(const float *logits, int64_t experts, int32_t *ids, int64_t k)
{
    int64_t count = 0;
    for (int64_t e = 0; e < experts; e += 4) {
        int64_t end = e + 4 < experts ? e + 4 : experts;
        if (count == k && end == e + 4) {
            __m128 enters = _mm_cmpgt_ps(_mm_loadu_ps(logits + e), _mm_set1_ps(logits[ids[k - 1]]));
            if (!_mm_movemask_ps(enters))
                continue;
        }
        for (int64_t i = e; i < end; i++)
            count = topk_offer(logits, (int32_t)i, ids, count, k);
    }
}

SSSE3 void ssse3_router_topk(const router_topk_args *a, int64_t begin, int64_t end)
{
    for (int64_t t = begin; t < end; t++) {
        const float *logits = a->logits + t * a->experts;
        int32_t *ids = a->ids + t * a->k;
        float *weights = a->weights + t * a->k, sum = 0.0f;
        choose(logits, a->experts, ids, a->k);
        for (int64_t slot = 0; slot < a->k; slot++) {
            weights[slot] = f32_exp(logits[ids[slot]] - logits[ids[0]]);
            sum += weights[slot];
        }
        for (int64_t slot = 0; slot < a->k; slot++)
            weights[slot] /= sum;
    }
}
