#include "fermi.cuh"

#define BLOCK 256
#define LANES 8

/* Row of the matrix that thread t's output row is: 8 threads in a row have 8 rows, whose words of a group stand side by
 * side. */
INLINE bool dequantize_row(const dequantize_rows_args &a, int64_t *item, int64_t *row)
{
    *item = (int64_t)blockIdx.x * LANES + threadIdx.x % LANES;
    if (*item >= a.items)
        return false;
    *row = a.row_ids ? a.row_ids[*item] : a.first_row + *item;
    return true;
}

/* The scale of a row's block, and its word of 4 codes or 8 nibbles. */
INLINE float block_scale(const uint8_t *block, int lane)
{
    return half_to_float(*(const uint16_t *)(block + 2 * lane));
}

INLINE unsigned block_word(const uint8_t *block, int lane, int word)
{
    return *(const unsigned *)(block + 16 + 32 * word + 4 * lane);
}

INLINE float nibble(unsigned word, int bit, float d)
{
    return (float)((int)(word >> bit & 15) - 8) * d;
}

INLINE float code(unsigned word, int bit, float d)
{
    return (float)(int8_t)(word >> bit) * d;
}

extern "C" __global__ __launch_bounds__(BLOCK) void dequantize_q4_0(dequantize_rows_args a)
{
    int64_t item, row;
    if (!dequantize_row(a, &item, &row))
        return;
    int lane = (int)(row % LANES);
    const uint8_t *group = a.w + row / LANES * (a.n / 32 * 144);
    for (int i = (int)threadIdx.x / LANES; i < a.n / 8; i += BLOCK / LANES) {
        const uint8_t *block = group + i / 4 * 144;
        unsigned word = block_word(block, lane, i % 4);
        float d = block_scale(block, lane);
        float4 *y = (float4 *)(a.y + item * a.n + i / 4 * 32 + i % 4 * 4);
        y[0] = make_float4(nibble(word, 0, d), nibble(word, 8, d), nibble(word, 16, d), nibble(word, 24, d));
        y[4] = make_float4(nibble(word, 4, d), nibble(word, 12, d), nibble(word, 20, d), nibble(word, 28, d));
    }
}

extern "C" __global__ __launch_bounds__(BLOCK) void dequantize_q8_0(dequantize_rows_args a)
{
    int64_t item, row;
    if (!dequantize_row(a, &item, &row))
        return;
    int lane = (int)(row % LANES);
    const uint8_t *group = a.w + row / LANES * (a.n / 32 * 272);
    for (int i = (int)threadIdx.x / LANES; i < a.n / 4; i += BLOCK / LANES) {
        const uint8_t *block = group + i / 8 * 272;
        unsigned word = block_word(block, lane, i % 8);
        float d = block_scale(block, lane);
        *(float4 *)(a.y + item * a.n + i * 4) =
            make_float4(code(word, 0, d), code(word, 8, d), code(word, 16, d), code(word, 24, d));
    }
}

/* A warp a row. */
extern "C" __global__ __launch_bounds__(BLOCK) void dequantize_f16(dequantize_rows_args a)
{
    int64_t item = (int64_t)blockIdx.x * LANES + threadIdx.x / 32;
    if (item >= a.items)
        return;
    int64_t row = a.row_ids ? a.row_ids[item] : a.first_row + item;
    const uint16_t *w = (const uint16_t *)a.w + row * a.n;
    for (int64_t i = threadIdx.x % 32; i < a.n; i += 32)
        a.y[item * a.n + i] = half_to_float(w[i]);
}
