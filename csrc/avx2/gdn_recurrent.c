/* Columns of the state do not meet, so thirty-two of them (four vectors) go through a run of tokens before the next sixteen, on a
 * copy without gaps: rows a power of two apart fall into few sets of the L1 cache. A pass over the rows serves two tokens, the
 * update of one and the prediction of the next. The chains over the key axis are walked one after the other (rows c, c + 4,
 * ...), so that the sums of one chain at a time take up registers.
 *
 * Panels read memory in strides, which no hardware prefetcher follows at full speed; therefore the next head is fetched in the
 * order it lies in while this one is computed, and the first head of a call before it begins. */
#include "../kernels.h"
#include "lanes.h"
#include "math.h"

enum { CHAINS = 4, VECTORS = 4, COLUMNS = 8 * VECTORS, PANEL_ROWS = 256, RUN = 32, AHEAD = 2, LINE = 16 /* floats */ };

typedef __m256 chain_sums[CHAINS][VECTORS];

/* Some columns of a head: where they live, and where they stay during a run of tokens. */
typedef struct {
    float *state, *work;
    int64_t state_stride, work_stride, rows;
    const float *ahead; /* what to fetch meanwhile: as many floats as the columns have */
} panel;

/* The operands of one token at one head, and how far the next token's are. */
typedef struct {
    const float *q, *k, *v, *beta;
    float *o;
    int64_t key_stride, v_stride, o_stride, heads;
} token;

INLINE AVX2 void clear(__m256 *sum, int vectors)
{
    for (int i = 0; i < vectors; i++)
        sum[i] = _mm256_setzero_ps();
}

INLINE AVX2 __m256 join(const chain_sums s, int i)
{
    return _mm256_add_ps(_mm256_add_ps(s[0][i], s[2][i]), _mm256_add_ps(s[1][i], s[3][i]));
}

/* Two passes of a run fetch, each a half of what lies ahead. */
INLINE AVX2 void fetch(const float **ahead, int vectors)
{
    if (vectors == VECTORS)
        _mm_prefetch((const char *)*ahead, _MM_HINT_T1);
    *ahead += COLUMNS / 2;
}

/* The decayed state of a run's first token, and its prediction. */
INLINE AVX2 void begin_run(const panel *s, int vectors, int64_t left, const float *k, float decay, chain_sums predicted)
{
    __m256 d = _mm256_set1_ps(decay);
    const float *ahead = s->ahead;
    for (int c = 0; c < CHAINS; c++) {
        __m256 p[VECTORS];
        clear(p, vectors);
        for (int64_t r = c; r < s->rows; r += CHAINS) {
            __m256 kr = _mm256_set1_ps(k[r]);
            fetch(&ahead, vectors);
            for (int i = 0; i < vectors; i++) {
                __m256 x = _mm256_mul_ps(load_n(s->state + r * s->state_stride + 8 * i, left - 8 * i), d);
                store_n(s->work + r * s->work_stride + 8 * i, x, left - 8 * i);
                p[i] = _mm256_add_ps(p[i], _mm256_mul_ps(kr, x));
            }
        }
        for (int i = 0; i < vectors; i++)
            predicted[c][i] = p[i];
    }
}

/* The update and output of a token, then the decay and prediction of the next, whose key is next_k. */
INLINE AVX2 void update_and_predict(const panel *s, int vectors, int64_t left, const token *t, const __m256 *u, float decay,
                               chain_sums out, chain_sums predicted)
{
    __m256 d = _mm256_set1_ps(decay);
    const float *next_k = t->k + t->key_stride;
    for (int c = 0; c < CHAINS; c++) {
        __m256 p[VECTORS], o[VECTORS];
        clear(p, vectors);
        clear(o, vectors);
        for (int64_t r = c; r < s->rows; r += CHAINS) {
            __m256 kr = _mm256_set1_ps(t->k[r]), qr = _mm256_set1_ps(t->q[r]), next_kr = _mm256_set1_ps(next_k[r]);
            float *row = s->work + r * s->work_stride;
            for (int i = 0; i < vectors; i++) {
                __m256 x = _mm256_add_ps(load_n(row + 8 * i, left - 8 * i), _mm256_mul_ps(kr, u[i]));
                o[i] = _mm256_add_ps(o[i], _mm256_mul_ps(qr, x));
                x = _mm256_mul_ps(x, d);
                store_n(row + 8 * i, x, left - 8 * i);
                p[i] = _mm256_add_ps(p[i], _mm256_mul_ps(next_kr, x));
            }
        }
        for (int i = 0; i < vectors; i++) {
            predicted[c][i] = p[i];
            out[c][i] = o[i];
        }
    }
}

/* The update and output of a run's last token, back into the state. */
INLINE AVX2 void end_run(const panel *s, int vectors, int64_t left, const token *t, const __m256 *u, chain_sums out)
{
    const float *ahead = s->ahead + s->rows * (COLUMNS / 2);
    for (int c = 0; c < CHAINS; c++) {
        __m256 o[VECTORS];
        clear(o, vectors);
        for (int64_t r = c; r < s->rows; r += CHAINS) {
            __m256 kr = _mm256_set1_ps(t->k[r]), qr = _mm256_set1_ps(t->q[r]);
            fetch(&ahead, vectors);
            for (int i = 0; i < vectors; i++) {
                __m256 x = load_n(s->work + r * s->work_stride + 8 * i, left - 8 * i);
                x = _mm256_add_ps(x, _mm256_mul_ps(kr, u[i]));
                store_n(s->state + r * s->state_stride + 8 * i, x, left - 8 * i);
                o[i] = _mm256_add_ps(o[i], _mm256_mul_ps(qr, x));
            }
        }
        for (int i = 0; i < vectors; i++)
            out[c][i] = o[i];
    }
}

/* The operands of a token to come: tokens lie far apart, and many of them in the same sets of the caches. */
INLINE AVX2 void fetch_token(const token *t, int64_t rows)
{
    for (int64_t r = 0; r < rows; r += LINE) {
        _mm_prefetch((const char *)(t->q + AHEAD * t->key_stride + r), _MM_HINT_T0);
        _mm_prefetch((const char *)(t->k + AHEAD * t->key_stride + r), _MM_HINT_T0);
    }
    _mm_prefetch((const char *)(t->v + AHEAD * t->v_stride), _MM_HINT_T0);
}

/* A run of tokens in `vectors` vectors of columns, of which `left` exist. */
INLINE AVX2 void run_tokens(const panel *s, int vectors, int64_t left, token t, const float *decay, int64_t tokens)
{
    chain_sums predicted, out;
    __m256 u[VECTORS];
    begin_run(s, vectors, left, t.k, decay[0], predicted);
    for (int64_t n = 1; n <= tokens; n++) {
        if (n + AHEAD <= tokens)
            fetch_token(&t, s->rows);
        for (int i = 0; i < vectors; i++) {
            __m256 error = _mm256_sub_ps(load_n(t.v + 8 * i, left - 8 * i), join(predicted, i));
            u[i] = _mm256_mul_ps(_mm256_set1_ps(*t.beta), error);
        }
        if (n < tokens)
            update_and_predict(s, vectors, left, &t, u, decay[n], out, predicted);
        else
            end_run(s, vectors, left, &t, u, out);
        for (int i = 0; i < vectors; i++)
            store_n(t.o + 8 * i, join(out, i), left - 8 * i);
        t.q += t.key_stride;
        t.k += t.key_stride;
        t.v += t.v_stride;
        t.o += t.o_stride;
        t.beta += t.heads;
    }
}

static AVX2 void avx2_run_panel(const panel *s, token t, const float *decay, int64_t tokens)
{
    float work[PANEL_ROWS * COLUMNS] __attribute__((aligned(64)));
    panel copied = *s;
    if (s->rows <= PANEL_ROWS) {
        copied.work = work;
        copied.work_stride = COLUMNS;
    }
    run_tokens(&copied, VECTORS, COLUMNS, t, decay, tokens);
}

static AVX2 void avx2_run_end(const panel *s, int64_t left, token t, const float *decay, int64_t tokens)
{
    run_tokens(s, 1, left, t, decay, tokens);
}

/* Token t of head h, columns from 0 on. */
static token token_at(const gdn_recurrent_args *a, int64_t h, int64_t t)
{
    int64_t key = (t * a->k_heads + h / (a->v_heads / a->k_heads)) * a->dk, head = t * a->v_heads + h;
    return (token){a->q + key,      a->k + key,  a->v + t * a->v_stride + h * a->dv, a->beta + head, a->o + head * a->dv,
                   a->k_heads * a->dk, a->v_stride, a->v_heads * a->dv, a->v_heads};
}

/* Tokens t..t+tokens of head h; `ahead` is another head's state. */
static AVX2 void avx2_head_run(const gdn_recurrent_args *a, int64_t h, int64_t t, int64_t tokens, const float *ahead)
{
    token first = token_at(a, h, t);
    float decay[RUN];
    float *state = a->state + h * a->dk * a->dv;
    for (int64_t i = 0; i < tokens; i++)
        decay[i] = f32_exp(a->g[(t + i) * a->v_heads + h]);
    for (int64_t j = 0; j < a->dv;) {
        int64_t left = a->dv - j, columns = left >= COLUMNS ? COLUMNS : 8;
        panel s = {state + j, state + j, a->dv, a->dv, a->dk, ahead + j * a->dk};
        if (columns == COLUMNS)
            avx2_run_panel(&s, first, decay, tokens);
        else
            avx2_run_end(&s, left, first, decay, tokens);
        first.v += columns;
        first.o += columns;
        j += columns;
    }
}

AVX2 void avx2_gdn_recurrent(const gdn_recurrent_args *a, int64_t begin, int64_t end)
{
    int64_t size = a->dk * a->dv;
    for (int64_t i = 0; begin < end && i < size; i += LINE)
        _mm_prefetch((const char *)(a->state + begin * size + i), _MM_HINT_T1);
    for (int64_t h = begin; h < end; h++)
        for (int64_t t = 0; t < a->tokens; t += RUN) {
            int64_t tokens = a->tokens - t < RUN ? a->tokens - t : RUN, next = h + 1 < end ? h + 1 : h;
            avx2_head_run(a, h, t, tokens, a->state + next * size);
        }
}
