/* Every sm_20 op: one file csrc/sm20/<op>.cu, one argument struct passed by value, entry points <op>_<part>. Plain C, also
 * read by cffi, which builds the argument bytes: fixed-size integers, floats and pointers only.
 *
 * A section per op: its comment says shapes, dtypes, grid and block, order of every sum and scratch, then the struct, then
 * a line ENTRY(op, entry, struct) for each entry point. Tensors are C-contiguous; activations are float32 [tokens, n];
 * weights are the pack's stored bytes. An output element is summed in one fixed order, whatever the number of tokens that
 * run together; a split of a sum is a function of the weight's shape only and its parts are added in index order.
 * Pointers are device addresses.
 */
#ifndef FERMI_OPS_H
#define FERMI_OPS_H

#include <stdint.h>

#ifndef ENTRY
#define ENTRY(op, entry, args)
#endif

/* selftest: known answers before any work. Grid (ceil(n / 256)), block 256.
 * y: each block of 256 elements of x reversed through shared memory, then times 1664525 plus 1013904223 (mod 2^32).
 * f[i]: four floats that tell a card or a driver that rounds, fuses or flushes otherwise: x / 3, sqrt(x), fmaf(x, x, -1),
 * and the float of the half whose bits are the low 15 of x, where x as a float is 1 + (x mod 2^23) * 2^-23. */
typedef struct {
    const uint32_t *x; /* [n] */
    uint32_t *y;       /* [n] */
    float *f;          /* [n, 4] */
    int64_t n;
} selftest_args;
ENTRY(selftest, selftest, selftest_args)

/* Matrix products, y[m, n] = x[m, k] W[n, k]^T. The columns fall into parts of 512, counted from the end of k rounded up to
 * a multiple of 16, so that the first may be shorter. A part is one chain acc = fmaf(x[k], w[k], acc), k rising, from
 * +0.0; an element of y is the first part, then each next one added. So the sum depends on k alone: tile shape, row
 * count, gathered or grouped rows and where W is expanded change no bit. y overlaps no input.
 * w of q4_0 and q8_0 is (float)(code - 8) * d or (float)code * d, d the stored half: what dequantize gives.
 * Tile shapes, all of the same bits; grid (ceil(n / cols), ceil(m / rows)):
 *   gemm_<format>        64 rows x 128 cols, block 256; warps whose 16 rows are all beyond m skip the arithmetic;
 *   gemm_<format>_small  32 rows x 64 cols, block 128: faster where large tiles are fewer than 3/4 of the
 *                        multiprocessors;
 *   gemm_f32_any         64 rows x 64 cols, block 256: any k, any stride, any alignment of 4 bytes; half as fast.
 * But for gemm_f32_any: k is a multiple of 16 (f32) or 32 (q4_0, q8_0), x_stride of 4, x aligned to 16 bytes, w to 16
 * (f32) or 4. x and w are each smaller than 4 GiB; m, n and k fit 31 bits. */
typedef struct {
    const float *x;        /* row i at x + i * x_stride */
    const int32_t *source; /* [m] row of x for each row of y, or NULL for row i */
    const void *w;         /* f32: [n, k]; q4_0, q8_0: stored groups [ceil(n/8), k/32, 144 or 272] */
    float *y;              /* row i at y + i * y_stride */
    int64_t x_stride, y_stride; /* in floats */
    int64_t m, n, k;
} gemm_args;
ENTRY(gemm_f32, gemm_f32, gemm_args)
ENTRY(gemm_f32, gemm_f32_small, gemm_args)
ENTRY(gemm_f32, gemm_f32_any, gemm_args)
ENTRY(gemm_q4_0, gemm_q4_0, gemm_args)
ENTRY(gemm_q4_0, gemm_q4_0_small, gemm_args)
ENTRY(gemm_q8_0, gemm_q8_0, gemm_args)
ENTRY(gemm_q8_0, gemm_q8_0_small, gemm_args)

/* The same product for the experts that have rows: rows first[i]..first[i+1] of x (or of source) and y belong to hit i,
 * whose matrix is w + slot[i] * w_stride. The tile list says which hit and row a block starts at.
 *   grouped_gemm_<format>        64 x 128 tiles, block 256, list made with tile_rows 64
 *   grouped_gemm_<format>_small  32 x 64 tiles, block 128, tile_rows 32
 * Grid (ceil(n / cols), bound) with any bound >= the tiles there are: hits_max + rows / tile_rows is one, hits_max the
 * smaller of experts and rows. Blocks beyond the list leave at once. */
typedef struct {
    const float *x;        /* row j at x + j * x_stride */
    const int32_t *source; /* [rows] as in gemm_args, or NULL */
    const uint8_t *w;      /* smaller than 4 GiB in all */
    const int32_t *slot;   /* [hits] which matrix each hit has, or NULL for matrix i */
    const int32_t *first;  /* [hits + 1] of expert_rows */
    const int32_t *tiles;  /* of grouped_tiles */
    float *y;              /* row j at y + j * y_stride */
    int64_t x_stride, y_stride; /* in floats */
    int64_t w_stride;      /* in bytes, a multiple of 4 */
    int64_t n, k;
} grouped_gemm_args;
ENTRY(grouped_gemm_q4_0, grouped_gemm_q4_0, grouped_gemm_args)
ENTRY(grouped_gemm_q4_0, grouped_gemm_q4_0_small, grouped_gemm_args)
ENTRY(grouped_gemm_q8_0, grouped_gemm_q8_0, grouped_gemm_args)
ENTRY(grouped_gemm_q8_0, grouped_gemm_q8_0_small, grouped_gemm_args)

/* The tile list: hit by hit, tile by tile. Grid 1, block 256. */
typedef struct {
    const int32_t *first; /* [hits + 1] */
    const int32_t *hits;  /* [1] */
    int32_t *tiles;       /* [1 + 2 * bound] number of tiles, then (hit, first row) of each */
    int64_t tile_rows;
} grouped_tiles_args;
ENTRY(grouped_tiles, grouped_tiles, grouped_tiles_args)

/* Stored weight rows to floats, exactly: y[j] = row row_ids[j], or first_row + j. Grid (ceil(items / 8)), block 256. */
typedef struct {
    const uint8_t *w;       /* q4_0, q8_0: stored groups; f16: [rows, n] halves */
    const int32_t *row_ids; /* [items] or NULL */
    float *y;               /* [items, n], aligned to 16 bytes */
    int64_t first_row, items, n; /* n a multiple of 32 but for f16 */
} dequantize_rows_args;
ENTRY(dequantize, dequantize_q4_0, dequantize_rows_args)
ENTRY(dequantize, dequantize_q8_0, dequantize_rows_args)
ENTRY(dequantize, dequantize_f16, dequantize_rows_args)

/* The product of gemm_args, to the bit, for few rows of x and many of the matrix: the logits of the last rows. The
 * matrix is read once a row of x, at the memory's pace. Grid (ceil(n / 128), m), block 128. Alignments as for gemm. */
ENTRY(gemv_rows, gemv_rows_q4_0, gemm_args)
ENTRY(gemv_rows, gemv_rows_q8_0, gemm_args)

/* Keys and values of new tokens into the cache: row (token t, key head h) to position start + t of head h, as what a host's
 * cache in `format` makes of it (csrc/kernels.h, kv_append), so that keys that were kept there and came back are the same.
 * KV_Q8_0 wants head_dim to be a multiple of 32. Any grid, block 256; tokens * kv_heads * head_dim < 2^31. */
#define KV_F32 0
#define KV_F16 1
#define KV_Q8_0 2

typedef struct {
    const float *k, *v;       /* [tokens, kv_heads, head_dim] */
    float *k_cache, *v_cache; /* [kv_heads, capacity, head_dim] */
    int64_t start, tokens;    /* start + tokens <= capacity */
    int64_t kv_heads, head_dim, capacity, format;
} kv_append_args;
ENTRY(kv_append, kv_append, kv_append_args)

/* Causal grouped-query attention over the cache. Token t sits at absolute position start + t and sees positions
 * 0..start + t; query head h reads key head h / (heads / kv_heads). Blocks of 128 absolute positions merge in index
 * order (online softmax):
 *   s = (chain fmaf(q[d], k[d], s), d rising from +0.0) * scale;  m' = max(m, max s);  c = exp(m - m');
 *   p = exp(s - m');  l = fmaf(l, c, (r0 + r1) + (r2 + r3)), r_i the sum of p over the block's positions 32 i ..
 *   32 i + 31 in order from +0.0;  o = fmaf(o, c, chain fmaf(p, v, acc)), positions rising from +0.0;
 * the first block of each span of 1024 absolute positions has c = 0 and o = 0. Behind a span, with g = exp(m before it -
 * m), and g = 0 behind the first: L = fmaf(L, g, l), total = fmaf(total, g, o); in the end o = total * (1 / L). Only
 * positions that a token sees are terms of its sums, and nothing beyond the last one, start + tokens - 1, is read. So a
 * row's bits depend neither on the tokens that run with it nor on where a prompt is cut. o and total hold running sums
 * and overlap neither each other nor an input.
 * Grid (ceil(tokens * heads / kv_heads / 64), kv_heads), block 256. head_dim is a multiple of 32, tensors are aligned
 * to 16 bytes and each smaller than 4 GiB. */
typedef struct {
    const float *q;                 /* [tokens, heads, head_dim] */
    const float *k_cache, *v_cache; /* [kv_heads, capacity, head_dim] */
    float *o;                       /* [tokens, heads, head_dim] */
    float *total;                   /* the same; NULL where start + tokens <= 1024 */
    int64_t start, tokens;
    int64_t heads, kv_heads, head_dim, capacity;
    float scale;
} attention_args;
ENTRY(attention, attention, attention_args)

/* The k experts of highest logit (equal, and -0.0 equals +0.0: lower id first), in that order, and softmax over the
 * chosen: weight = exp(l - l_first) / (sum of those in order from +0.0). This is softmax over all, choice,
 * renormalisation. NaN counts as highest, and makes all weights of its token NaN: ids are distinct and in range
 * whatever the logits. Any grid, block 256, a thread block per token; k <= experts <= 1024, k <= 32. */
typedef struct {
    const float *logits; /* [tokens, experts] */
    int32_t *ids;        /* [tokens, k] */
    float *weights;      /* [tokens, k] */
    int64_t tokens, experts, k;
} router_topk_args;
ENTRY(router_topk, router_topk, router_topk_args)

/* The work list of a layer's experts: (token, slot) pairs ordered by expert, then token, then slot. Three launches, in
 * this order, each of block 512: count, grid chunks; scan, grid 1; place, grid chunks; chunks = ceil(tokens * k / 512),
 * at most 65535. experts <= 512; ids lie in 0..experts - 1. */
typedef struct {
    const int32_t *ids; /* [tokens, k] */
    int32_t *counts;    /* [chunks, experts] scratch: pairs of an expert in a chunk, then the row of the first one */
    int32_t *hit;       /* [experts] ids of the experts that have rows, rising; -1 behind them */
    int32_t *first;     /* [experts + 1] first row of each hit; tokens * k behind them */
    int32_t *hits;      /* [1] */
    int32_t *source;    /* [tokens * k] token of each row */
    int32_t *row_of;    /* [tokens, k] row of each (token, slot) */
    int64_t tokens, k, experts;
} expert_rows_args;
ENTRY(expert_rows, expert_rows_count, expert_rows_args)
ENTRY(expert_rows, expert_rows_scan, expert_rows_args)
ENTRY(expert_rows, expert_rows_place, expert_rows_args)

/* y[t] = chain fmaf(weights[t, s], expert_out[row_of[t, s]], acc) over slots in order from +0.0, then, where shared is
 * given, fmaf(sigmoid(shared_gate[t]), shared[t], acc). y overlaps no input. Any grid, block 256; tokens * n < 2^31. */
typedef struct {
    const float *expert_out;  /* [*, n] */
    const int32_t *row_of;    /* [tokens, k] */
    const float *weights;     /* [tokens, k] */
    const float *shared;      /* [tokens, n] or NULL */
    const float *shared_gate; /* token t at shared_gate + t * gate_stride; not read where shared is NULL */
    float *y;                 /* [tokens, n] */
    int64_t tokens, n, k, gate_stride;
} moe_combine_args;
ENTRY(moe_combine, moe_combine, moe_combine_args)

/* Gated DeltaNet and the small ops. Formulas are those of csrc/kernels.h; exp, log1p, sin and cos those of math.cuh.
 * Every argument of a row op counts floats. Kernels that say "any grid" walk what there is in steps of the whole grid.
 *
 * rows.cuh, "row sums": the threads of a row, L = the power of two in 32..256 that leaves each one quad of floats or,
 * beyond 1024, more; thread l adds the squares of quads l, l + L, ... in order by fmaf from +0.0, then thread l adds
 * thread l + s for s = L/2 .. 1. So the order depends on n alone. */

/* y = x * (1 / sqrt(sum(x^2) / n + eps)) * (offset + w). Any grid (ceil(rows / (256 / L)) is all), block 256. */
typedef struct {
    const float *x; /* row i at x + i * x_stride */
    const float *w; /* [n] */
    float *y;       /* row i at y + i * y_stride */
    int64_t rows, n, x_stride, y_stride;
    float eps, offset;
} rms_norm_args;
ENTRY(rms_norm, rms_norm, rms_norm_args)

/* y = o * (1 / sqrt(sum(o^2) / n + eps)) * w * silu(z). Any grid, block 256. */
typedef struct {
    const float *o, *z; /* [rows, n] */
    const float *w;     /* [n] */
    float *y;           /* [rows, n] */
    int64_t rows, n;
    float eps;
} gated_rms_norm_args;
ENTRY(gated_rms_norm, gated_rms_norm, gated_rms_norm_args)

/* y = x * (1 / sqrt(sum(x^2) + eps)) * scale. Any grid, block 256. */
typedef struct {
    const float *x; /* head at x + token * token_stride + head * n */
    float *y;       /* [tokens, heads, n] */
    int64_t tokens, heads, n, token_stride;
    float eps, scale;
} l2_norm_args;
ENTRY(l2_norm, l2_norm, l2_norm_args)

/* y = silu(gate) * up, rows [gate | up]. Any grid, block 256; rows * n < 2^31. */
typedef struct {
    const float *gate_up; /* [rows, 2n] */
    float *y;             /* [rows, n] */
    int64_t rows, n;
} swiglu_args;
ENTRY(swiglu, swiglu, swiglu_args)

/* y = x * sigmoid(gate). Any grid, block 256; rows * n < 2^31. */
typedef struct {
    const float *x;    /* [rows, n] */
    const float *gate; /* row i at gate + i * gate_stride */
    float *y;          /* [rows, n] */
    int64_t rows, n, gate_stride;
} sigmoid_mul_args;
ENTRY(sigmoid_mul, sigmoid_mul, sigmoid_mul_args)

/* y = a + b; y may be a or b. Any grid, block 256; n < 2^32. */
typedef struct {
    const float *a, *b;
    float *y;
    int64_t n;
} add_args;
ENTRY(add, add, add_args)

/* Rows of floats: y[j] = row row_ids[j] of w, or first_row + j. Any grid, block 256; items * n < 2^31. */
typedef struct {
    const float *w;         /* row i at w + i * w_stride */
    const int32_t *row_ids; /* [items] or NULL */
    float *y;               /* [items, n] */
    int64_t first_row, items, n, w_stride;
} embed_args;
ENTRY(embed, embed, embed_args)

/* Causal depthwise convolution over tokens, then silu; m = tail rows followed by x rows:
 * y[t] = silu(sum of w[j] m[t + j]), j rising, by fmaf from +0.0.
 *   conv1d_silu       grid (ceil(channels / 256), any: ceil(tokens / 32) is all), block 256; reads the tail only
 *   conv1d_silu_tail  grid (ceil(channels / 256)), block 256, afterwards: tail = the last taps-1 rows of m */
typedef struct {
    const float *x; /* [tokens, channels] */
    const float *w; /* [taps, channels] */
    float *tail;    /* [taps-1, channels] */
    float *y;       /* [tokens, channels] */
    int64_t tokens, channels, taps;
} conv1d_silu_args;
ENTRY(conv1d_silu, conv1d_silu, conv1d_silu_args)
ENTRY(conv1d_silu, conv1d_silu_tail, conv1d_silu_args)

/* beta = sigmoid(b); g = -(min(exp(A_log), FLT_MAX) * softplus(a + dt_bias)). Any grid, block 256. */
typedef struct {
    const float *a, *b;           /* [tokens, heads] */
    const float *A_log, *dt_bias; /* [heads] */
    float *g, *beta;              /* [tokens, heads] */
    int64_t tokens, heads;
} gdn_gates_args;
ENTRY(gdn_gates, gdn_gates, gdn_gates_args)

/* cos and sin of (float)position * inv_freq. Any grid, block 256. */
typedef struct {
    const int32_t *positions; /* [3, tokens]: time, height, width */
    const float *inv_freq;    /* [half] */
    const int32_t *axis;      /* [half], each 0..2 */
    float *cos, *sin;         /* [tokens, half] */
    int64_t tokens, half;
} rope_tables_args;
ENTRY(rope, rope_tables, rope_tables_args)

/* Turns pairs (j, j + half) of each head in place: x[j] = fma(x[j], cos, -(x[j+half] sin)), x[j+half] = fma(x[j+half],
 * cos, x[j] sin). Any grid, block 256; tokens * heads * half < 2^31. */
typedef struct {
    float *x;               /* row token * heads + head at x + row * x_stride */
    const float *cos, *sin; /* [tokens, half] */
    int64_t tokens, heads, half, x_stride;
} rope_args;
ENTRY(rope, rope, rope_args)

/* The gated delta rule token by token, for decoding and short runs. S, p, u, o as in csrc/kernels.h, gdn_recurrent.
 * Grid (dv / 32, v_heads), block 256: a block has 32 columns of a head's state in registers, each warp 16 rows of it.
 * p and o: in a warp row i goes to chain i % 4, in order from +0.0, (c0 + c2) + (c1 + c3); the 8 warps add as a tree of
 * neighbours. dk and dv are multiples of 32 up to 128. o and state overlap no input. */
typedef struct {
    const float *q, *k;     /* [tokens, k_heads, dk], L2-normalised, q scaled */
    const float *v;         /* head at v + token * v_stride + h * dv */
    const float *g, *beta;  /* [tokens, v_heads] */
    float *state;           /* [v_heads, dk, dv], in and out */
    float *o;               /* [tokens, v_heads, dv] */
    int64_t tokens, k_heads, v_heads, dk, dv, v_stride;
} gdn_step_args;
ENTRY(gdn_step, gdn_step, gdn_step_args)

/* The gated delta rule in chunks of 64 tokens that sit at absolute positions: the cut of a prompt changes no bit of o,
 * and output i of a chunk depends on its tokens up to i alone. What is carried from call to call is the state at the
 * last chunk boundary and the `open` (at most 63) tokens since: their k, v, g, beta. A call works on rows 0 .. open +
 * tokens - 1, counted from that boundary: the carried tokens, then the new ones; chunk c has rows 64 c .. 64 c + 63,
 * the last one perhaps fewer.
 *
 * With c_i = g_0 + .. + g_i within a chunk (in double; g is held to -128, since exp gives 0 from -104 down) and
 * D_ij = exp(c_i - c_j):
 *   T = (I + strict_lower(beta_i k_i.k_j D_ij))^-1,  A = lower(q_i.k_j D_ij),
 *   U = T (beta v),  W = T (beta exp(c_i) k),
 *   V = U - (((P_0 + P_4) + (P_1 + P_5)) + ((P_2 + P_6) + (P_3 + P_7))),  o = exp(c_i) q S + A V,
 *   S = (exp(c_63) S + Q_3) + ((Q_0 + Q_1) + Q_2),
 * where P_n is the sum W S over the k with k / 8 % 8 = n, and Q_n that of (exp(c_63 - c_j) k_j) (x) V_j over the j with
 * j / 8 % 4 = n. Every sum is one chain of fmaf in rising order of its index, but for T: corners of 16 rows by forward
 * substitution, joined to 32 and 64 as -C' (B A'). That of A V begins with exp(c_i) q S; exp(c_63) S + Q_3 is one fmaf.
 * Only S goes from chunk to chunk.
 *
 * Four kernels, in this order, as often as `scratch` makes it necessary, each time over the next `chunks` of the
 * ceil((open + tokens) / 64) there are, `first_chunk` on:
 *   gdn_chunk_intra  grid (chunks, k_heads), block 256: T, A, exp(c_i), exp(c_63 - c_i) and beta into scratch
 *   gdn_chunk_solve  grid (chunks, v_heads, 2), block 256: U, W and exp(c_63 - c_j) k_j
 *   gdn_chunk_pass   grid (dv / 16, v_heads), block 512: V, the state that each chunk begins with; state = that at the
 *                    last boundary now reached; final_state, unless NULL, = that after the last of these rows
 *   gdn_chunk_out    grid (chunks, v_heads), block 256: o; rows of the chunk that is open at the end into open_*
 * dk and dv are multiples of 32 up to 128, v_heads of k_heads; v_stride a multiple of 4; q, k, v, open_k, open_v, the
 * states and scratch aligned to 16 bytes, o to 8. Nothing overlaps. */
enum { GDN_CHUNK_SCRATCH = 64 * 64 + 3 * 64 + 3 * 64 * 128 + 128 * 128 };

typedef struct {
    const float *q, *k;            /* [tokens, k_heads, dk], L2-normalised, q scaled */
    const float *v;                /* head at v + token * v_stride + h * dv */
    const float *g, *beta;         /* [tokens, v_heads] */
    float *open_k, *open_v;        /* [63, k_heads, dk], [63, v_heads, dv] */
    float *open_g, *open_beta;     /* [63, v_heads] */
    float *state, *final_state;    /* [v_heads, dk, dv] */
    float *o;                      /* [tokens, v_heads, dv] */
    float *scratch;                /* [chunks, v_heads, GDN_CHUNK_SCRATCH] */
    int64_t tokens, open, k_heads, v_heads, dk, dv, v_stride, first_chunk, chunks;
} gdn_chunk_args;
ENTRY(gdn_chunk_intra, gdn_chunk_intra, gdn_chunk_args)
ENTRY(gdn_chunk_solve, gdn_chunk_solve, gdn_chunk_args)
ENTRY(gdn_chunk, gdn_chunk_pass, gdn_chunk_args)
ENTRY(gdn_chunk_out, gdn_chunk_out, gdn_chunk_args)

/* One token through the layers: what the kernels above do for many, in few launches. Formulas, and where it says so the
 * bits, are theirs.
 *
 * Products with one row, y[n] = W[n, k] f(x), f the identity or rms_norm with offset 1 (own order: below). An element of
 * y is a sum of parts in index order. Quantised matrices (q8_0: 8 quads of columns a block of 32, q4_0: 4 pairs of quads):
 * part (s, b, w) is the chain acc = fmaf(d, chain fmaf(x, code, .) over its quad, acc), d the block's scale, over the
 * blocks whose number is b mod B of the steps (of B blocks) whose number is s mod S, rising; B = 2 (q8_0) or 4 (q4_0),
 * w the quad of the block, S = token_split(n, k). In q4_0 a part's chain has the quad's low nibbles, then the high ones.
 * Parts are added in order w fastest, then b; the S sums then in order. f32: 32 parts, lane l the chain over quads l,
 * l + 32, .. of four, or over elements where k is no multiple of 4. The square sum of the norm: 256 chains over elements
 * t, t + 256, ..; then 32 sums of 8, t + 32 j in order of j; then those in order.
 *
 *   token_gemv         up to four matrices at once; grid (sum over them of ceil(ceil(n / 8) S / 8), of f32 ceil(n / 8))
 *   token_gemv_swiglu  y0 = silu(y of w0) * (y of w1), matrices alike; grid as for one of them
 *   token_gemv_wide    w0 alone, quantised, S = 1: any grid, ceil(n / 64) is all
 * Block 256; dynamic shared memory: k floats rounded up to 4, and 1088 or, for swiglu, 2176 more. Quantised matrices: k a
 * multiple of 32, w aligned to 16; x any; f32 with k a multiple of 4: w aligned to 16. */
enum { TOKEN_F32 = 0, TOKEN_Q8_0 = 1, TOKEN_Q4_0 = 2 };

typedef struct {
    const float *x;    /* [k] */
    const float *norm; /* [k] weight of the norm, or NULL */
    const void *w0, *w1, *w2, *w3; /* stored matrices, NULL where there are fewer */
    float *y0, *y1, *y2, *y3;      /* [n] each; none overlaps x */
    int64_t n0, n1, n2, n3;        /* 0 where there are fewer */
    int64_t format0, format1, format2, format3;
    int64_t k;
    int64_t add; /* 1: y = y + W f(x) */
    float eps;
} token_gemv_args;
ENTRY(token_gemv, token_gemv, token_gemv_args)
ENTRY(token_gemv, token_gemv_swiglu, token_gemv_args)
ENTRY(token_gemv, token_gemv_wide, token_gemv_args)

/* One token through the gated delta rule between its projections: conv1d_silu, l2_norm, gdn_gates, gdn_step and
 * gated_rms_norm to the bit. Grid (k_heads), block 512: a block has the value heads of its key head, one after the
 * other. dk and dv are multiples of 32 up to 128; tail and state in place. */
typedef struct {
    const float *qkv;             /* [2 k_heads dk + v_heads dv]: q, k, v */
    const float *z, *a, *b;       /* [v_heads dv], [v_heads], [v_heads] */
    const float *w;               /* [taps, channels of qkv] */
    const float *A_log, *dt_bias; /* [v_heads] */
    const float *norm;            /* [dv] */
    float *tail;                  /* [taps - 1, channels] */
    float *state;                 /* [v_heads, dk, dv] */
    float *y;                     /* [v_heads, dv] */
    int64_t k_heads, v_heads, dk, dv, taps;
    float l2_eps, norm_eps, q_scale;
} gdn_token_args;
ENTRY(gdn_token, gdn_token, gdn_token_args)

/* One token's attention over the cache, the position read on the device. Three kernels in this order:
 *   token_attention_prepare  grid (heads + kv_heads), block 256: rms_norm with offset 1 and rope, to the bit, of queries
 *                            into `query` and of keys into the cache at `position`; values there too
 *   token_attention_part     grid (splits, kv_heads, ceil(heads / kv_heads / 4)), block 256: of 64 absolute positions each,
 *                            m = max s, l = sum exp(s - m), o = sum exp(s - m) v; s = scale * (8 chains of fmaf over
 *                            quads c, c + 8, .. of the dimensions, added in order); l: 8 sums of positions p, p + 8, ..
 *                            added in order; o one chain over positions. Splits behind the position do nothing
 *   token_attention_merge    grid (heads), block 256: with M = max m over the splits, c = exp(m - M): o and l are sums,
 *                            in order, of chains fmaf(c, ., acc) over 16 splits each, in order from +0.0;
 *                            y = o * (1 / l) * sigmoid(gate)
 * head_dim is a multiple of 32 up to 256; tensors aligned to 16 bytes; splits >= position / 64 + 1. */
typedef struct {
    const float *query_gate;      /* [heads, 2 head_dim]: a head's query, its gate */
    const float *key, *value;     /* [kv_heads, head_dim] */
    const float *q_norm, *k_norm; /* [head_dim] */
    const float *cos, *sin;       /* [half] of the position */
    const int32_t *position;      /* [1] */
    float *query;                 /* [heads, head_dim] */
    float *k_cache, *v_cache;     /* [kv_heads, capacity, head_dim] */
    float *part_o;                /* [splits, heads, head_dim] */
    float *part_m, *part_l;       /* [splits, heads] */
    float *y;                     /* [heads, head_dim] */
    int64_t heads, kv_heads, head_dim, half, capacity;
    float eps, scale;
} token_attention_args;
ENTRY(token_attention, token_attention_prepare, token_attention_args)
ENTRY(token_attention, token_attention_part, token_attention_args)
ENTRY(token_attention, token_attention_merge, token_attention_args)

/* The index of the largest of n floats; of equal ones the lowest, NaN counts as lowest, -1 where all are. Two kernels:
 *   argmax_part   grid (parts), block 256, parts <= 256   argmax_join   grid (1), block 256 */
typedef struct {
    const float *x;      /* [n], n < 2^31 */
    float *part_x;       /* [parts] */
    int32_t *part_index; /* [parts] */
    int32_t *index;      /* [1] */
    int64_t n, parts;
} argmax_args;
ENTRY(argmax, argmax_part, argmax_args)
ENTRY(argmax, argmax_join, argmax_args)

/* Vision towers. Rows of floats; biases [n]. Every kernel but the two attentions: any grid, block 256, rows * n < 2^31.
 *
 * y = ((x - mean) * (1 / sqrt(sum((x - mean)^2) / n + eps))) * w + b, the last two in one fmaf; mean = sum(x) / n. Both sums as
 * "row sums" (rows.cuh) of elements and of squares. A row is whole threads' as for rms_norm. */
typedef struct {
    const float *x;     /* [rows, n] */
    const float *w, *b; /* [n] */
    float *y;           /* [rows, n], may be x */
    int64_t rows, n;
    float eps;
} layer_norm_args;
ENTRY(layer_norm, layer_norm, layer_norm_args)

/* y = gelu(x + b), or gelu(x) without a bias; both as in math.cuh. */
typedef struct {
    const float *x; /* [rows, n] */
    const float *b; /* [n] or NULL */
    float *y;       /* [rows, n], may be x */
    int64_t rows, n;
} gelu_args;
ENTRY(gelu, gelu_tanh, gelu_args)
ENTRY(gelu, gelu_erf, gelu_args)

/* x = x + b, in place. */
typedef struct {
    float *x;       /* [rows, n] */
    const float *b; /* [n] */
    int64_t rows, n;
} add_bias_args;
ENTRY(add_bias, add_bias, add_bias_args)

/* x = x + (y + b), in place: a product with its bias onto the residual stream. */
typedef struct {
    float *x;       /* [rows, n] */
    const float *y; /* [rows, n] */
    const float *b; /* [n] */
    int64_t rows, n;
} add_bias_residual_args;
ENTRY(add_bias, add_bias_residual, add_bias_residual_args)

/* x = x + b for queries, keys and values side by side, the first two then turned as rope turns heads of 2 half. */
typedef struct {
    float *x;               /* [tokens, 3, heads, 2 half] */
    const float *b;         /* [3, heads, 2 half] */
    const float *cos, *sin; /* [tokens, half] */
    int64_t tokens, heads, half;
} add_bias_rope_args;
ENTRY(add_bias, add_bias_rope, add_bias_rope_args)

/* x = (x + b) + p, in place; p = chain fmaf(weights[t, j], table[rows[t, j]], p), taps in order from +0.0, or without weights
 * the row of the one tap there is. */
typedef struct {
    float *x;             /* [tokens, n] */
    const float *b;       /* [n] */
    const float *table;   /* [*, n] */
    const int32_t *rows;  /* [tokens, taps] */
    const float *weights; /* [tokens, taps], or NULL where taps is 1 */
    int64_t tokens, n, taps;
} add_positions_args;
ENTRY(add_positions, add_positions, add_positions_args)

/* mean = (x[g] + x[g + 1] + ..) / group, in order; y = mean, or with a bias y = (y + b) + mean. */
typedef struct {
    const float *x; /* [rows * group, n] */
    const float *b; /* [n] or NULL */
    float *y;       /* [rows, n] */
    int64_t rows, n, group;
} group_mean_args;
ENTRY(group_mean, group_mean, group_mean_args)

/* Attention in which a view's tokens see each other and no others. A tile is up to 64 queries of a view: first query, then the
 * view's first token and the one after its last. Blocks of 128 positions, counted from the view's first, merge in index order as
 * in `attention`, but for
 *   o = fmaf(o, c, a0 + a1), a_i the chain fmaf(p, v, acc) from +0.0 over the block's positions 64 i .. 64 i + 63, rising, and on
 * to a multiple of 8 with p = v = 0 behind the view's end.
 * So a token's bits depend on its view alone. o holds the running sums and overlaps no input. Grid (tiles, heads), block 256.
 * head_dim is a multiple of 8, stride of 4, tensors are aligned to 16 bytes and each smaller than 4 GiB. */
typedef struct {
    const float *q, *k, *v; /* token's head at q + token * stride + head * head_dim */
    float *o;               /* [tokens, heads, head_dim] */
    const int32_t *tiles;   /* [tiles, 3] */
    int64_t heads, head_dim, stride;
    float scale;
} full_attention_args;
ENTRY(full_attention, full_attention, full_attention_args)

/* The same for windows of 4 tokens: s = chain fmaf(q[d], k[d], s) * scale, d rising from +0.0; p = exp(s - max);
 * o = (chain fmaf(p, v, o), positions rising from +0.0) * (1 / ((p0 + p1) + (p2 + p3))). Any grid, block 128. head_dim is a
 * multiple of 4 up to 576, stride of 4, tensors are aligned to 16 bytes. */
typedef struct {
    const float *q, *k, *v; /* token's head at q + token * stride + head * head_dim */
    float *o;               /* [4 windows, heads, head_dim] */
    int64_t windows, heads, head_dim, stride;
    float scale;
} window_attention_args;
ENTRY(window_attention, window_attention, window_attention_args)

#endif
