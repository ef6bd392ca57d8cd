/* The k best experts without scratch memory: the list of the chosen is kept sorted in the output itself. */
#ifndef FERMI_SCALAR_TOPK_H
#define FERMI_SCALAR_TOPK_H

#include <stdint.h>

/* Offers an expert to ids[0..count), sorted by falling logit; returns the new count. Experts come by rising id and only a
 * higher logit passes another, so that equal ones stay in order of id. */
static inline int64_t topk_offer(const float *logits, int32_t expert, int32_t *ids, int64_t count, int64_t k)
{
    if (count == k && !(logits[expert] > logits[ids[k - 1]]))
        return count;
    int64_t at = count < k ? count : k - 1;
    for (; at > 0 && logits[expert] > logits[ids[at - 1]]; at--)
        ids[at] = ids[at - 1];
    ids[at] = expert;
    return count < k ? count + 1 : k;
}

#endif
