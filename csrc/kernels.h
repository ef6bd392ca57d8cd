/* Every CPU kernel: one op, one argument struct, one function per backend. Also the source of the cffi declarations.
 *
 * A kernel is   void <backend>_<op>(const <op>_args *a, int64_t begin, int64_t end);
 * It computes the independent items [begin, end) of the op and nothing else, so the caller may cut the items among
 * threads at will. What an item is stands beside the op. A folder is a backend, a file is an op: the build declares
 * <backend>_<op> for each csrc/<backend>/<op>.c it finds under the KERNEL lines below.
 *
 * Rules that make every backend give the same bits:
 *  - an output element is summed in one fixed order, whatever the number of tokens that run together;
 *  - sums along a row of n floats ("lane sums") use 16 virtual lanes: element i goes to lane i % 16, lanes add in
 *    order of i starting from +0.0, then the tree l[j] += l[j+8], l[j] += l[j+4], l[j] += l[j+2], l[0] + l[1];
 *  - only IEEE add, sub, mul, div, sqrt and integer operations, never contracted; exp, log1p, sin, cos and both GELUs are
 *    those of math.h in the backend's folder; rsqrtps and rcpps are banned because vendors disagree on their bits;
 *  - products are rounded before they are added: acc = acc + (x * y).
 * Rows need no alignment beyond that of their element type. Sizes are in elements unless a name says bytes.
 */
#ifndef FERMI_KERNELS_H
#define FERMI_KERNELS_H

#include <stdint.h>

/* y[i] = f(x[i]); item = element. */
typedef struct {
    const float *x;
    float *y;
} map_args;

/* Activation rows to 8 bits; item = row. Per block of 32: amax = max |x|; amax < 2^-110 gives d = 0 and codes 0, else
 * d = amax / 127, id = 127 / amax, code = round half to even (x * id). sums = the sum of a block's codes. A block that
 * holds NaN or infinity gives d = NaN and codes 0: every product with it is NaN, so that nothing hides it. */
typedef struct {
    const float *x;      /* [rows, n] */
    int8_t *codes;       /* [rows, n] */
    float *d;            /* [rows, n/32] */
    int32_t *sums;       /* [rows, n/32] */
    int64_t n;           /* multiple of 32 */
} quantize_q8_0_args;

/* y[t, r] = sum over blocks b, in order from +0.0, of (float)isum * (dw[r,b] * da[t,b]); isum the exact integer dot.
 * Weights in groups of 8 rows (formats.py: interleaved). Item = group of 8 rows; rows beyond `rows` are not written.
 * gemv kernels take tokens == 1, gemm kernels any number; both give the same bits. Weight scales are finite, activation
 * codes lie in -127..127. */
typedef struct {
    const uint8_t *w;      /* [ceil(rows/8), n/32, 144 (q4_0) or 272 (q8_0)] */
    const int8_t *codes;   /* [tokens, n] */
    const float *d;        /* [tokens, n/32] */
    const int32_t *sums;   /* [tokens, n/32] */
    const int32_t *source; /* [tokens] activation row of each token, or NULL for row = token */
    float *y;              /* [tokens, y_stride] */
    int32_t *isums;        /* [tokens, rows, n/32] block dots for the checks, or NULL */
    int64_t rows, n, tokens, y_stride;
} matmul_q8_args;

/* The same product for several matrices of one shape, the experts of a layer, each with rows of its own; item =
 * (hit, group of 8 rows) = hit * ceil(rows/8) + group. Hit i is expert hit[i]: weights at w + hit[i] * stride, output rows
 * first[i]..first[i+1] of y, output row j from activation row source[j]. Items of hits from *hits on do nothing. */
typedef struct {
    const uint8_t *w;      /* expert e at w + e * stride, laid out as in matmul_q8_args */
    const int8_t *codes;   /* [*, n] */
    const float *d;        /* [*, n/32] */
    const int32_t *sums;   /* [*, n/32] */
    const int32_t *hit, *first, *hits; /* of expert_rows */
    const int32_t *source; /* as in matmul_q8_args, or NULL for row j */
    float *y;              /* [rows of all hits, rows] */
    int64_t stride, rows, n;   /* stride in bytes */
} grouped_q8_args;

/* Stored weight rows back to floats, exactly; item = output row. */
typedef struct {
    const uint8_t *w;        /* q4_0, q8_0: interleaved groups of 8 rows; f16: [rows, n] halves */
    const int32_t *row_ids;  /* which stored row each item is, or NULL for row = item + first_row */
    float *y;                /* [items, n] */
    int64_t first_row, n;
} dequantize_args;

/* y[t, r] = lane sum of x[t, i] * w[r, i]; item = weight row r. */
typedef struct {
    const float *x;   /* [tokens, n] */
    const float *w;   /* [rows, n] */
    float *y;         /* [tokens, y_stride] */
    int64_t n, tokens, y_stride;
} gemm_f32_args;

/* y = x * (1 / sqrt(mean(x^2) + eps)) * (offset + w), mean = lane sum / n; item = row. offset 1 is the (1 + w) norm. */
typedef struct {
    const float *x;   /* row i at x + i * x_stride */
    const float *w;   /* [n] */
    float *y;         /* row i at y + i * y_stride */
    int64_t n, x_stride, y_stride;
    float eps, offset;
} rms_norm_args;

/* c = x - mean(x); y = (c * (1 / sqrt(mean(c^2) + eps))) * w + b, each mean = lane sum / n; item = row. */
typedef struct {
    const float *x;       /* [rows, n] */
    const float *w, *b;   /* [n] */
    float *y;             /* [rows, n] */
    int64_t n;
    float eps;
} layer_norm_args;

/* y = (o * (1 / sqrt(mean(o^2) + eps)) * w) * silu(z); item = row. Norm and output gate of Gated DeltaNet. */
typedef struct {
    const float *o;   /* [rows, n] */
    const float *z;   /* [rows, n] */
    const float *w;   /* [n] */
    float *y;         /* [rows, n] */
    int64_t n;
    float eps;
} gated_rms_norm_args;

/* y = x * (1 / sqrt(lane sum(x^2) + eps)) * scale; item = (token, head) = token * heads + head. */
typedef struct {
    const float *x;   /* head at x + token * token_stride + head * n */
    float *y;         /* [tokens, heads, n] */
    int64_t n, heads, token_stride;
    float eps, scale;
} l2_norm_args;

/* beta = sigmoid(b); g = -(min(exp(A_log), FLT_MAX) * softplus(a + dt_bias)); item = token.
 * softplus(x) = x above 20, else log1p(exp(x)). */
typedef struct {
    const float *a, *b;             /* [tokens, heads] */
    const float *A_log, *dt_bias;   /* [heads] */
    float *g, *beta;                /* [tokens, heads] */
    int64_t heads;
} gdn_gates_args;

/* Causal depthwise convolution over tokens, then silu; item = channel. m = tail rows followed by x rows;
 * y[t] = silu(w[0] m[t] + w[1] m[t+1] + ... ), taps added in that order from w[0] m[t]; the last tap is the token
 * itself. Afterwards tail = the last taps-1 rows of m. x and y must not overlap. */
typedef struct {
    const float *x;   /* [tokens, channels] */
    const float *w;   /* [taps, channels] */
    float *tail;      /* [taps-1, channels], in and out */
    float *y;         /* [tokens, channels] */
    int64_t tokens, channels, taps;   /* taps in 1..16 */
} conv1d_silu_args;

/* Gated delta rule, tokens in order; item = value head h, which reads key head h / (v_heads / k_heads). Per token:
 *   S = exp(g) * S;  p = k^T S;  u = beta * (v - p);  S = S + k (x) u;  o = q^T S
 * p and o sum over the key axis in four chains (row i to chain i % 4, in order from +0.0), then (c0 + c2) + (c1 + c3).
 * o and state overlap no input. */
typedef struct {
    const float *q, *k;   /* [tokens, k_heads, dk], L2-normalised, q scaled */
    const float *v;       /* head at v + token * v_stride + h * dv */
    const float *g, *beta;/* [tokens, v_heads] */
    float *state;         /* [v_heads, dk, dv], in and out */
    float *o;             /* [tokens, v_heads, dv] */
    int64_t tokens, k_heads, v_heads, dk, dv, v_stride;
} gdn_recurrent_args;

/* cos and sin of (float)position * inv_freq; item = token. */
typedef struct {
    const int32_t *positions;  /* [3, tokens]: time, height, width */
    const float *inv_freq;     /* [half] */
    const int32_t *axis;       /* [half], each 0..2 */
    float *cos, *sin;          /* [tokens, half] */
    int64_t tokens, half;
} rope_tables_args;

/* Turns pairs (j, j + half) of each head in place: x[j] = x[j] cos - x[j+half] sin; x[j+half] = x[j+half] cos + x[j] sin.
 * item = (token, head). Elements from 2 * half on are left alone. */
typedef struct {
    float *x;                /* [tokens, heads, head_dim] */
    const float *cos, *sin;  /* [tokens, half] */
    int64_t heads, head_dim, half;
} rope_args;

/* Keys and values of new tokens into the pages of the cache; item = (token, key head) = token * kv_heads + head. Page p
 * holds positions p*page_tokens.. as [kv_heads, page_tokens, row], a row of head_dim elements in one of the KV_ formats:
 * KV_F32 floats; KV_F16 halves, rounded to nearest even; KV_Q8_0 (head_dim a multiple of 32) head_dim codes, then
 * head_dim/32 halves d: d and codes as quantize_q8_0 makes them, d rounded to half afterwards, a d that is NaN or beyond
 * the largest half stored as NaN. */
enum { KV_F32, KV_F16, KV_Q8_0 };

typedef struct {
    const float *k, *v;                 /* [tokens, kv_heads, head_dim] */
    void *const *k_pages, *const *v_pages;
    const int64_t *start;               /* absolute position of the first token */
    int64_t kv_heads, head_dim, page_tokens, format;
} kv_append_args;

/* Causal grouped-query attention over a paged cache; item = (token, query head) = token * heads + head.
 * Token t sits at absolute position start + t and sees positions 0..start+t. Keys and values are what the stored bytes stand
 * for: float, half, or (float)code * (float)d. Blocks of 64 absolute positions merge in index order (online softmax) into a
 * span of 1024, and spans into the whole: s = (lane sum of q * k) * scale; m' = max(m, max s), m running through all blocks;
 * p = exp(s - m'); c = exp(m - m'); l = l * c + lane sum of p; acc = acc * c + (sum over positions in order from +0.0 of p * v); in
 * the first block of a span l and acc start from the block's own. Behind a span, its last block being full or the last one seen,
 * g = exp(m before the span - m); L = L * g + l; total = total * g + acc; behind the first span they are its own. Finally
 * o = total / L. So a sum of ten thousand small weights beside a large one is rounded ten times instead of 160. Page size changes
 * no bit. o holds sums on the way: q and o must not overlap. */
enum { ATTENTION_BLOCK = 64, ATTENTION_SPAN = 1024 };

typedef struct {
    const float *q;                         /* [tokens, heads, head_dim] */
    void *const *k_pages, *const *v_pages;  /* as kv_append leaves them */
    const int64_t *start;                   /* absolute position of the first token */
    float *o;                               /* [tokens, heads, head_dim] */
    int64_t heads, kv_heads, head_dim, page_tokens, format;
    float scale;
} attention_args;

/* Attention without a cache, in which a token sees all of its window: a whole image, or a few neighbours. item = (token, head)
 * = token * heads + head. Windows of `window` tokens lie end to end. Blocks of 64 positions, counted from the beginning of a
 * window, and spans of 1024 merge as in attention. q, k, v and o must not overlap. */
typedef struct {
    const float *q, *k, *v;   /* [tokens, heads, head_dim] */
    float *o;                 /* [tokens, heads, head_dim] */
    int64_t heads, head_dim, window;
    float scale;
} full_attention_args;

/* The k experts of highest logit (equal: lower id first), in that order, and softmax over the chosen:
 * weight = exp(l - l_first) / (sum of those in order). item = token. Logits are finite. */
typedef struct {
    const float *logits;  /* [tokens, experts] */
    int32_t *ids;         /* [tokens, k] */
    float *weights;       /* [tokens, k] */
    int64_t experts, k;
} router_topk_args;

/* The work list of a layer's experts from the router's choice; one item. Rows are (token, slot) pairs ordered by expert,
 * then token, then slot. */
typedef struct {
    const int32_t *ids;   /* [tokens, k] */
    int32_t *hit;         /* [experts] ids of the experts that have rows, rising; *hits of them */
    int32_t *first;       /* [experts + 1] first row of each hit; first[*hits] = tokens * k */
    int32_t *hits;        /* [1] */
    int32_t *source;      /* [tokens * k] token of each row */
    int32_t *row_of;      /* [tokens, k] row of each (token, slot) */
    int64_t tokens, k, experts;
} expert_rows_args;

/* y = silu(gate) * up; item = row of [gate | up]. */
typedef struct {
    const float *gate_up;  /* [rows, 2n] */
    float *y;              /* [rows, n] */
    int64_t n;
} swiglu_args;

/* y = x * sigmoid(gate); item = row. Output gate of full attention. */
typedef struct {
    const float *x;     /* [rows, n] */
    const float *gate;  /* row i at gate + i * gate_stride */
    float *y;           /* [rows, n] */
    int64_t n, gate_stride;
} sigmoid_mul_args;

/* y[t] = sum over slots, in order from +0.0, of weights[t,s] * expert_out[row_of[t,s]], then, where shared is given,
 * y[t] + sigmoid(shared_gate[t]) * shared[t]; item = token. y overlaps no input. */
typedef struct {
    const float *expert_out;   /* [*, n] */
    const int32_t *row_of;     /* [tokens, k] */
    const float *weights;      /* [tokens, k] */
    const float *shared;       /* [tokens, n] or NULL */
    const float *shared_gate;  /* [tokens] */
    float *y;                  /* [tokens, n] */
    int64_t n, k;
} moe_combine_args;

/* y = a + b; item = element. Residual stream. */
typedef struct {
    const float *a, *b;
    float *y;
} add_args;

/* x = x + b in place; item = row. */
typedef struct {
    float *x;         /* [rows, n] */
    const float *b;   /* [n] */
    int64_t n;
} add_bias_args;

/* y = (x[0] + x[1] + ...) / group, in that order; item = row of y. */
typedef struct {
    const float *x;   /* [rows, group, n] */
    float *y;         /* [rows, n] */
    int64_t group, n;
} group_mean_args;

#ifndef KERNEL
#define KERNEL(op, args) \
    void scalar_##op(const args *a, int64_t begin, int64_t end); \
    void ssse3_##op(const args *a, int64_t begin, int64_t end); \
    void avx2_##op(const args *a, int64_t begin, int64_t end);
#endif

/* KERNEL(op, argument struct) */
KERNEL(exp_f32, map_args)
KERNEL(log1p_f32, map_args)
KERNEL(sin_f32, map_args)
KERNEL(cos_f32, map_args)
KERNEL(gelu_tanh, map_args)
KERNEL(gelu_erf, map_args)
KERNEL(quantize_q8_0, quantize_q8_0_args)
KERNEL(gemv_q4_0_q8_0, matmul_q8_args)
KERNEL(gemm_q4_0_q8_0, matmul_q8_args)
KERNEL(gemv_q8_0_q8_0, matmul_q8_args)
KERNEL(gemm_q8_0_q8_0, matmul_q8_args)
KERNEL(grouped_gemm_q4_0_q8_0, grouped_q8_args)
KERNEL(grouped_gemm_q8_0_q8_0, grouped_q8_args)
KERNEL(dequantize_q4_0, dequantize_args)
KERNEL(dequantize_q8_0, dequantize_args)
KERNEL(dequantize_f16, dequantize_args)
KERNEL(gemm_f32, gemm_f32_args)
KERNEL(rms_norm, rms_norm_args)
KERNEL(layer_norm, layer_norm_args)
KERNEL(gated_rms_norm, gated_rms_norm_args)
KERNEL(l2_norm, l2_norm_args)
KERNEL(gdn_gates, gdn_gates_args)
KERNEL(conv1d_silu, conv1d_silu_args)
KERNEL(gdn_recurrent, gdn_recurrent_args)
KERNEL(rope_tables, rope_tables_args)
KERNEL(rope, rope_args)
KERNEL(kv_append, kv_append_args)
KERNEL(attention, attention_args)
KERNEL(full_attention, full_attention_args)
KERNEL(router_topk, router_topk_args)
KERNEL(expert_rows, expert_rows_args)
KERNEL(swiglu, swiglu_args)
KERNEL(sigmoid_mul, sigmoid_mul_args)
KERNEL(moe_combine, moe_combine_args)
KERNEL(add, add_args)
KERNEL(add_bias, add_bias_args)
KERNEL(group_mean, group_mean_args)

/* One op of a list: items [0, n), handed out `grain` at a time. */
typedef void (*kernel_fn)(const void *args, int64_t begin, int64_t end);
typedef struct {
    kernel_fn kernel;
    const void *args;
    int64_t n, grain;
} fermi_step;

/* Runs steps in order on up to `threads` threads, each step whole before the next begins, with MXCSR set to round-to-nearest
 * and subnormals kept; the caller's MXCSR is restored. Adds the time each step took to elapsed_ns[step] unless that is NULL;
 * their sum is the time of the call but for its entry and return. Returns the number of threads that took part. */
int fermi_run_steps(const fermi_step *steps, int64_t count, int threads, int64_t *elapsed_ns);

/* The same for one op. */
int fermi_run(kernel_fn kernel, const void *args, int64_t n, int64_t grain, int threads);

/* Worker i, from 1 on, runs on CPU cpus[i] alone, now and when it is started; workers from `count` on run wherever the calling
 * thread may. The calling thread, which is thread 0, stays as it is. Returns 0 or the first error of the system. */
int fermi_pin(const int *cpus, int count);

/* Measuring helpers of csrc/roofline.c, run through fermi_run like kernels; no ops. Item = chunk of `chunk` bytes, the last
 * one shorter; each leaves the xor of the 64-bit words it read, which for the `touch` forms are the first of every 64-byte
 * line. `data` is 64-byte aligned, `bytes` and `chunk` are multiples of 256. */
typedef struct {
    const uint8_t *data;
    int64_t bytes, chunk;
    uint64_t *seen;        /* [chunks] */
} roofline_read_args;

void roofline_read_plain(const roofline_read_args *a, int64_t begin, int64_t end);
void roofline_read_ahead_2k(const roofline_read_args *a, int64_t begin, int64_t end);
void roofline_read_ahead_4k(const roofline_read_args *a, int64_t begin, int64_t end);
void roofline_read_two(const roofline_read_args *a, int64_t begin, int64_t end);
void roofline_read_four(const roofline_read_args *a, int64_t begin, int64_t end);
void roofline_read_touch(const roofline_read_args *a, int64_t begin, int64_t end);
void roofline_read_touch_ahead(const roofline_read_args *a, int64_t begin, int64_t end);
void avx2_roofline_read(const roofline_read_args *a, int64_t begin, int64_t end);
void avx2_roofline_read_ahead(const roofline_read_args *a, int64_t begin, int64_t end);

/* Integer dots in registers: each item does `rounds` rounds of 128 (ssse3) or 256 (avx2) multiply-adds and leaves the sum of
 * all products: 288 (ssse3) or 576 (avx2) a round, modulo 2^32. */
typedef struct {
    int64_t rounds;
    uint32_t *seen;        /* [items] */
} roofline_dot_args;

void ssse3_roofline_dot(const roofline_dot_args *a, int64_t begin, int64_t end);
void avx2_roofline_dot(const roofline_dot_args *a, int64_t begin, int64_t end);

/* csrc/q4_0_mse.c, run through fermi_run like a kernel, no op: weights are quantised once, on no path that speed counts on.
 * Item = block of 32. `blocks` holds the plain q4_0 bytes of x and is improved in place: d becomes the finite half that
 * minimises e(d) = the sum, in order, of w * (r * r) in double, r = x - d * code, code = floor(x / d + 1/2) in double, at
 * least -8 and at most 7; of equal errors the smaller |d|, then the negative d. d = 0 stands for all zeros and is stored as
 * -0.0 with codes 8. A block whose weights are all 0 counts as one of weights 1. */
typedef struct {
    const float *x;        /* [blocks, 32], finite, in the range of halves times 8 */
    const float *weight;   /* [n], of the elements of a row, finite, at least 0; NULL for 1 */
    uint8_t *blocks;       /* [blocks, 18] */
    int64_t n;             /* elements of a row */
} q4_0_mse_args;

void q4_0_mse(const q4_0_mse_args *a, int64_t begin, int64_t end);

/* What the CPU (and the operating system, for AVX) supports, from CPUID: bit 0 ssse3, 1 sse4.1, 2 sse4.2, 3 popcnt, 4 avx,
 * 5 avx2, 6 fma, 7 f16c, 8 avx512f, 9 avx512vnni. */
unsigned fermi_cpu_features(void);

#endif
