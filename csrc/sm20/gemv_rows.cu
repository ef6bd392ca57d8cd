#include "gemm_source.cuh" /* code_low, code_high */

enum { BLOCK = 128, CHUNK = 1024 }; /* rows of the matrix a thread block has, columns of x that stand in shared memory */

/* acc + four terms, in order; bits 0, 8, 16, 24 of `codes` are where the codes are, below MASK. */
template <int ZERO, unsigned MASK> INLINE float add_four(float acc, unsigned codes, float d, float4 x)
{
    unsigned high = codes >> 16;
    acc = fmaf(x.x, code_low<ZERO>(codes & MASK) * d, acc);
    acc = fmaf(x.y, code_high<ZERO>(codes & MASK << 8) * d, acc);
    acc = fmaf(x.z, code_low<ZERO>(high & MASK) * d, acc);
    return fmaf(x.w, code_high<ZERO>(high & MASK << 8) * d, acc);
}

/* A block of 8 rows x 32 columns; `lane` is the row. Columns 16..31 of q4_0 are the high nibbles of the bytes of 0..15. */
struct q4_0_block {
    enum { BYTES = 144 };

    static METHOD float add(float acc, const uint8_t *block, unsigned lane, const float4 *x)
    {
        const unsigned *codes = (const unsigned *)(block + 16) + lane;
        float d = half_to_float(*(const uint16_t *)(block + 2 * lane));
        unsigned word[4];
#pragma unroll
        for (int i = 0; i < 4; i++)
            word[i] = codes[8 * i];
#pragma unroll
        for (int i = 0; i < 8; i++)
            acc = add_four<8, 0xfu>(acc, word[i % 4] >> i / 4 * 4, d, x[i]);
        return acc;
    }
};

struct q8_0_block {
    enum { BYTES = 272 };

    static METHOD float add(float acc, const uint8_t *block, unsigned lane, const float4 *x)
    {
        const unsigned *codes = (const unsigned *)(block + 16) + lane;
        float d = half_to_float(*(const uint16_t *)(block + 2 * lane));
        unsigned word[8];
#pragma unroll
        for (int i = 0; i < 8; i++)
            word[i] = codes[8 * i] ^ 0x80808080u; /* from -128..127 to 0..255 */
#pragma unroll
        for (int i = 0; i < 8; i++)
            acc = add_four<128, 0xffu>(acc, word[i], d, x[i]);
        return acc;
    }
};

/* A thread a row of the matrix; blockIdx.y is the row of x. */
template <class W> INLINE void gemv_rows(const gemm_args &g, float4 *x)
{
    unsigned t = threadIdx.x, row = blockIdx.x * BLOCK + t, group = min_of(row, (unsigned)g.n - 1) / 8;
    const float4 *from = (const float4 *)(g.x + (g.source ? g.source[blockIdx.y] : (int)blockIdx.y) * g.x_stride);
    const uint8_t *block = (const uint8_t *)g.w + (int64_t)group * (g.k / 32) * W::BYTES;
    float acc = 0.0f, sum = -0.0f; /* to which anything is added without a change */
    for (int left = (int)g.k; left > 0; left -= CHUNK, from += CHUNK / 4) {
        int count = min_of(left, (int)CHUNK);
        __syncthreads();
        for (int i = (int)t; i < count / 4; i += BLOCK)
            x[i] = from[i];
        __syncthreads();
        for (int i = 0; i < count / 4; i += 8, block += W::BYTES) {
            acc = W::add(acc, block, row % 8, x + i);
            if ((left - 4 * i) % GEMM_PART == 32) {
                sum += acc;
                acc = 0.0f;
            }
        }
    }
    if (row < g.n)
        g.y[blockIdx.y * g.y_stride + row] = sum;
}

extern "C" __global__ __launch_bounds__(BLOCK) void gemv_rows_q4_0(gemm_args a)
{
    __shared__ float4 x[CHUNK / 4];
    gemv_rows<q4_0_block>(a, x);
}

extern "C" __global__ __launch_bounds__(BLOCK) void gemv_rows_q8_0(gemm_args a)
{
    __shared__ float4 x[CHUNK / 4];
    gemv_rows<q8_0_block>(a, x);
}
