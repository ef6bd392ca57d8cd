#include "../kernels.h"
#include "math.h"

enum { CHAINS = 4, COLUMNS = 16 };

/* One token in up to sixteen columns of a head's state, whose rows are dv apart. */
static void step(float *state, int64_t dk, int64_t dv, const float *q, const float *k, const float *v, float decay, float beta, float *o,
                 int64_t columns)
{
    float p[CHAINS][COLUMNS] = {0}, out[CHAINS][COLUMNS] = {0}, u[COLUMNS];
    for (int64_t i = 0; i < dk; i++)
        for (int64_t j = 0; j < columns; j++) {
            state[i * dv + j] *= decay;
            p[i % CHAINS][j] += k[i] * state[i * dv + j];
        }
    for (int64_t j = 0; j < columns; j++)
        u[j] = beta * (v[j] - ((p[0][j] + p[2][j]) + (p[1][j] + p[3][j])));
    for (int64_t i = 0; i < dk; i++)
        for (int64_t j = 0; j < columns; j++) {
            state[i * dv + j] += k[i] * u[j];
            out[i % CHAINS][j] += q[i] * state[i * dv + j];
        }
    for (int64_t j = 0; j < columns; j++)
        o[j] = (out[0][j] + out[2][j]) + (out[1][j] + out[3][j]);
}

void scalar_gdn_recurrent(const gdn_recurrent_args *a, int64_t begin, int64_t end)
{
    for (int64_t h = begin; h < end; h++)
        for (int64_t t = 0; t < a->tokens; t++) {
            int64_t key = (t * a->k_heads + h / (a->v_heads / a->k_heads)) * a->dk, head = t * a->v_heads + h;
            float decay = f32_exp(a->g[head]);
            for (int64_t j = 0; j < a->dv; j += COLUMNS)
                step(a->state + h * a->dk * a->dv + j, a->dk, a->dv, a->q + key, a->k + key, a->v + t * a->v_stride + h * a->dv + j,
                     decay, a->beta[head], a->o + head * a->dv + j, a->dv - j < COLUMNS ? a->dv - j : COLUMNS);
        }
}
