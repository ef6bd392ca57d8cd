#include "../kernels.h"
#include "math.h"
#include "topk.h"

void scalar_router_topk(const router_topk_args *a, int64_t begin, int64_t end)
{
    for (int64_t t = begin; t < end; t++) {
        const float *logits = a->logits + t * a->experts;
        int32_t *ids = a->ids + t * a->k;
        float *weights = a->weights + t * a->k, sum = 0.0f;
        int64_t count = 0;
        for (int64_t e = 0; e < a->experts; e++)
            count = topk_offer(logits, (int32_t)e, ids, count, a->k);
        for (int64_t slot = 0; slot < a->k; slot++) {
            weights[slot] = f32_exp(logits[ids[slot]] - logits[ids[0]]);
            sum += weights[slot];
        }
        for (int64_t slot = 0; slot < a->k; slot++)
            weights[slot] /= sum;
    }
}
