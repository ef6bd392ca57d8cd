/* Rows of the key/value cache (kernels.h: kv_append): where they lie, floats to their bytes and back. Shared by every backend. */
#ifndef FERMI_SCALAR_KV_H
#define FERMI_SCALAR_KV_H

#include "../kernels.h"
#include "blocks.h"

enum { KV_SLAB = 1024 }; /* elements of a row that are quantised at a time */

INLINE int64_t kv_row_bytes(int64_t format, int64_t head_dim)
{
    return format == KV_F32 ? 4 * head_dim : format == KV_F16 ? 2 * head_dim : head_dim + head_dim / BLOCK * 2;
}

/* A float as the nearest half, ties to even; from 65520 on that is infinity. A NaN stays one and keeps its upper bits. */
INLINE uint16_t f32_to_f16(float value)
{
    uint32_t bits;
    memcpy(&bits, &value, sizeof bits);
    uint32_t sign = bits >> 16 & 0x8000, magnitude = bits & 0x7fffffff;
    if (magnitude > 0x7f800000)
        return (uint16_t)(sign | 0x7e00 | (magnitude >> 13 & 0x3ff));
    if (magnitude >= 0x47800000) /* 2^16 */
        return (uint16_t)(sign | 0x7c00);
    if (magnitude >= 0x38800000) /* 2^-14: normal; a carry out of the mantissa is the next exponent */
        return (uint16_t)(sign | (magnitude - (112u << 23) + 0xfff + (magnitude >> 13 & 1)) >> 13);
    uint32_t shift = 126 - (magnitude >> 23), mantissa = (magnitude & 0x7fffff) | 0x800000; /* in units of 2^-24, shifted */
    if (shift > 24)
        return (uint16_t)sign;
    return (uint16_t)(sign | (mantissa + (1u << (shift - 1)) - 1 + (mantissa >> shift & 1)) >> shift);
}

/* The scale of a block of codes as it is stored. */
INLINE uint16_t kv_scale(float d)
{
    uint16_t half = f32_to_f16(d);
    return half < 0x7c00 ? half : 0x7e00;
}

/* The bytes of a row of codes, by a backend's quantize_q8_0. */
INLINE void kv_put_codes(void (*quantize)(const quantize_q8_0_args *, int64_t, int64_t), const float *x, uint8_t *row, int64_t head_dim)
{
    float d[KV_SLAB / BLOCK];
    int32_t sums[KV_SLAB / BLOCK];
    for (int64_t i = 0; i < head_dim; i += KV_SLAB) {
        int64_t n = head_dim - i < KV_SLAB ? head_dim - i : KV_SLAB;
        quantize_q8_0_args part = {.x = x + i, .codes = (int8_t *)row + i, .d = d, .sums = sums, .n = n};
        quantize(&part, 0, 1);
        for (int64_t b = 0; b < n / BLOCK; b++) {
            uint16_t half = kv_scale(d[b]);
            memcpy(row + head_dim + 2 * (i / BLOCK + b), &half, sizeof half);
        }
    }
}

/* Where the keys and values of one head lie that some queries read: position p in page p / page_tokens, there `offset` bytes
 * from the beginning on, `step` bytes apart. */
typedef struct {
    void *const *k_pages, *const *v_pages;
    int64_t page_tokens, offset, step, head_dim, format;
    float scale;
} kv_source;

/* Key head `kv_head` of a paged cache. */
INLINE kv_source kv_source_of(const attention_args *a, int64_t kv_head)
{
    int64_t bytes = kv_row_bytes(a->format, a->head_dim);
    return (kv_source){a->k_pages, a->v_pages, a->page_tokens, kv_head * a->page_tokens * bytes, bytes, a->head_dim, a->format, a->scale};
}

/* The rows of positions first..first+n. */
INLINE void kv_rows(const kv_source *a, void *const *pages, int64_t first, int64_t n, const uint8_t **rows)
{
    int64_t page = first / a->page_tokens, at = first % a->page_tokens;
    for (int64_t j = 0; j < n; j++) {
        rows[j] = (const uint8_t *)pages[page] + a->offset + at * a->step;
        if (++at == a->page_tokens) {
            at = 0;
            page++;
        }
    }
}

/* Where pages hold this head of this position. */
INLINE uint8_t *kv_row(void *const *pages, int64_t page_tokens, int64_t row_bytes, int64_t kv_head, int64_t position)
{
    return (uint8_t *)pages[position / page_tokens] + (kv_head * page_tokens + position % page_tokens) * row_bytes;
}

/* The whole of kv_append, by a backend's way to write one row. */
INLINE void kv_append_rows(const kv_append_args *a, int64_t begin, int64_t end,
                           void (*put)(int64_t format, const float *x, uint8_t *row, int64_t head_dim))
{
    int64_t bytes = kv_row_bytes(a->format, a->head_dim);
    for (int64_t item = begin; item < end; item++) {
        int64_t position = *a->start + item / a->kv_heads, head = item % a->kv_heads;
        put(a->format, a->k + item * a->head_dim, kv_row(a->k_pages, a->page_tokens, bytes, head, position), a->head_dim);
        put(a->format, a->v + item * a->head_dim, kv_row(a->v_pages, a->page_tokens, bytes, head, position), a->head_dim);
    }
}

/* Elements first..first+n of a row as floats. */
INLINE void kv_values(int64_t format, const uint8_t *row, int64_t head_dim, int64_t first, int64_t n, float *out)
{
    if (format == KV_F32)
        memcpy(out, row + 4 * first, (size_t)n * sizeof *out);
    for (int64_t i = 0; format != KV_F32 && i < n; i++) {
        uint16_t half;
        memcpy(&half, row + (format == KV_F16 ? 2 * (first + i) : head_dim + 2 * ((first + i) / BLOCK)), sizeof half);
        out[i] = format == KV_F16 ? f16_to_f32(half) : (float)(int8_t)row[first + i] * f16_to_f32(half);
    }
}

#endif
