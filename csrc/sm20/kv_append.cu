#include "fermi.cuh"

#define BLOCK 256

/* Below it 127 / most would leave the range in which x * id is sure to be finite. */
#define TINY 0x1p-110f

/* Element i of rows in blocks of 32, as its code and its block's scale stand for it. The product of a code is rounded before
 * the addition that rounds it to an integer, half to even: no compiler contracts an fmaf. */
INLINE float from_q8_0(const float *x, unsigned i)
{
    unsigned most = 0; /* without their sign, floats are ordered as their bits are, NaN above infinity */
    for (unsigned j = i & ~31u, end = j + 32; j < end; j++)
        most = max_of(most, bits_of(x[j]) & 0x7fffffffu);
    float largest = float_of(most);
    if (most >= 0x7f800000u)
        return F32_NAN;
    if (largest < TINY)
        return 0.0f;
    unsigned scale = float_to_half(largest / 127.0f);
    float code = (fmaf(x[i], 127.0f / largest, 0.0f) + 12582912.0f) - 12582912.0f;
    return scale < 0x7c00u ? code * half_to_float((uint16_t)scale) : F32_NAN;
}

INLINE float stored(const float *x, unsigned i, int64_t format)
{
    return format == KV_F32 ? x[i] : format == KV_F16 ? half_to_float(float_to_half(x[i])) : from_q8_0(x, i);
}

extern "C" __global__ __launch_bounds__(BLOCK) void kv_append(kv_append_args a)
{
    unsigned dim = (unsigned)a.head_dim, width = (unsigned)a.kv_heads * dim, count = (unsigned)a.tokens * width;
    for (unsigned i = blockIdx.x * BLOCK + threadIdx.x; i < count; i += gridDim.x * BLOCK) {
        unsigned token = i / width, head = i % width / dim;
        int64_t to = (head * a.capacity + a.start + token) * a.head_dim + i % dim;
        a.k_cache[to] = stored(a.k, i, a.format);
        a.v_cache[to] = stored(a.v, i, a.format);
    }
}
