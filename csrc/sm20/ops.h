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

/* Matrix products, y[m, n] = x[m, k] W[n, k]^T. Every element of y is one chain acc = fmaf(x[k], w[k], acc), k rising, from
 * +0.0: no k is split, and tile shape, row count, gathered or grouped rows and where W is expanded change no bit. w of q4_0 and
 * q8_0 is (float)(code - 8) * d or (float)code * d, d the stored half: what dequantize gives.
 * Tile shapes, all of the same bits; grid (ceil(n / cols), ceil(m / rows)):
 *   gemm_<format>        64 rows x 128 cols, block 256; warps whose 16 x 64 part is all beyond m or n skip the arithmetic;
 *   gemm_<format>_small  32 rows x 64 cols, block 128: faster where large tiles are fewer than 3/4 of the multiprocessors;
 *   gemm_f32_any         64 rows x 64 cols, block 256: any k, any stride, any alignment of 4 bytes; half as fast.
 * But for gemm_f32_any: k is a multiple of 16 (f32) or 32 (q4_0, q8_0), x_stride of 4, x aligned to 16 bytes, w to 16 (f32)
 * or 4. x and w are each smaller than 4 GiB; m, n and k fit 31 bits. */
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

/* The same product for the experts that have rows: rows first[i]..first[i+1] of x (or of source) and y belong to hit i, whose
 * matrix is w + slot[i] * w_stride. The tile list says which hit and row a block starts at.
 *   grouped_gemm_<format>        64 x 128 tiles, block 256, list made with tile_rows 64
 *   grouped_gemm_<format>_small  32 x 64 tiles, block 128, tile_rows 32
 * Grid (ceil(n / cols), bound) with any bound >= the tiles there are: hits_max + rows / tile_rows is one, hits_max the smaller of
 * experts and rows. Blocks beyond the list leave at once. */
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

#endif
