/* Columns of the state do not meet, so eight of them (two vectors) go through all tokens before the next eight; the four
 * chains over the key axis make eight sums in registers. */
#include "../kernels.h"
#include "lanes.h"
#include "math.h"

#include <string.h>

enum { COLUMNS = 8, CHAINS = 4, PANEL_ROWS = 256 };

typedef __m128 chain_sums[CHAINS][2];

static inline SSSE3 __m128 join(const chain_sums s, int half)
{
    return _mm_add_ps(_mm_add_ps(s[0][half], s[2][half]), _mm_add_ps(s[1][half], s[3][half]));
}

/* Row i of the decayed state into the prediction. The product with the decay is made again in update_row, which is cheaper
 * than to store it here. */
static inline __attribute__((always_inline)) SSSE3 void predict_row(const float *s, float k, __m128 decay, __m128 p[2], int64_t columns)
{
    for (int half = 0; half < 2; half++) {
        __m128 decayed = _mm_mul_ps(load_n(s + 4 * half, columns - 4 * half), decay);
        p[half] = _mm_add_ps(p[half], _mm_mul_ps(_mm_set1_ps(k), decayed));
    }
}

static inline __attribute__((always_inline)) SSSE3 void update_row(float *s, float k, float q, __m128 decay, const __m128 u[2],
                                                                    __m128 out[2], int64_t columns)
{
    for (int half = 0; half < 2; half++) {
        __m128 decayed = _mm_mul_ps(load_n(s + 4 * half, columns - 4 * half), decay);
        __m128 updated = _mm_add_ps(decayed, _mm_mul_ps(_mm_set1_ps(k), u[half]));
        store_n(s + 4 * half, updated, columns - 4 * half);
        out[half] = _mm_add_ps(out[half], _mm_mul_ps(_mm_set1_ps(q), updated));
    }
}

/* One token in `columns` (at most eight) columns of the state, rows `stride` apart. */
static inline __attribute__((always_inline)) SSSE3 void step(float *s, int64_t stride, int64_t dk, const float *q, const float *k,
                                                              const float *v, float decay, float beta, float *o, int64_t columns)
{
    __m128 zero = _mm_setzero_ps(), d = _mm_set1_ps(decay), u[2];
    chain_sums p = {{zero, zero}, {zero, zero}, {zero, zero}, {zero, zero}};
    chain_sums out = {{zero, zero}, {zero, zero}, {zero, zero}, {zero, zero}};
    int64_t i = 0;
    for (; i + CHAINS <= dk; i += CHAINS)
        for (int c = 0; c < CHAINS; c++)
            predict_row(s + (i + c) * stride, k[i + c], d, p[c], columns);
    for (int c = 0; c < CHAINS - 1; c++)
        if (i + c < dk)
            predict_row(s + (i + c) * stride, k[i + c], d, p[c], columns);
    for (int half = 0; half < 2; half++)
        u[half] = _mm_mul_ps(_mm_set1_ps(beta), _mm_sub_ps(load_n(v + 4 * half, columns - 4 * half), join(p, half)));
    for (i = 0; i + CHAINS <= dk; i += CHAINS)
        for (int c = 0; c < CHAINS; c++)
            update_row(s + (i + c) * stride, k[i + c], q[i + c], d, u, out[c], columns);
    for (int c = 0; c < CHAINS - 1; c++)
        if (i + c < dk)
            update_row(s + (i + c) * stride, k[i + c], q[i + c], d, u, out[c], columns);
    for (int half = 0; half < 2; half++)
        store_n(o + 4 * half, join(out, half), columns - 4 * half);
}

/* All tokens in the columns j..j+columns of head h. */
static inline __attribute__((always_inline)) SSSE3 void all_tokens(const gdn_recurrent_args *a, int64_t h, int64_t j, float *s,
                                                                    int64_t stride, int64_t columns)
{
    for (int64_t t = 0; t < a->tokens; t++) {
        int64_t key = (t * a->k_heads + h / (a->v_heads / a->k_heads)) * a->dk, head = t * a->v_heads + h;
        step(s, stride, a->dk, a->q + key, a->k + key, a->v + t * a->v_stride + h * a->dv + j, f32_exp(a->g[head]),
             a->beta[head], a->o + head * a->dv + j, columns);
    }
}

/* The same on a copy of the columns without gaps: rows a power of two apart fall into few sets of the L1 cache. */
static SSSE3 void all_tokens_in_panel(const gdn_recurrent_args *a, int64_t h, int64_t j, float *s)
{
    float panel[PANEL_ROWS * COLUMNS];
    for (int64_t i = 0; i < a->dk; i++)
        memcpy(panel + i * COLUMNS, s + i * a->dv, COLUMNS * sizeof(float));
    all_tokens(a, h, j, panel, COLUMNS, COLUMNS);
    for (int64_t i = 0; i < a->dk; i++)
        memcpy(s + i * a->dv, panel + i * COLUMNS, COLUMNS * sizeof(float));
}

SSSE3 void ssse3_gdn_recurrent(const gdn_recurrent_args *a, int64_t begin, int64_t end)
{
    int copy = a->tokens > 1 && a->dk <= PANEL_ROWS;
    for (int64_t h = begin; h < end; h++) {
        float *state = a->state + h * a->dk * a->dv;
        int64_t j = 0;
        for (; j + COLUMNS <= a->dv; j += COLUMNS) {
            if (copy)
                all_tokens_in_panel(a, h, j, state + j);
            else
                all_tokens(a, h, j, state + j, a->dv, COLUMNS);
        }
        if (j < a->dv)
            all_tokens(a, h, j, state + j, a->dv, a->dv - j);
    }
}
