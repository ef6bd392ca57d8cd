#include "rows.cuh"

enum { BLOCK = 256, WARPS = 8, GROUP = 8, QUADS = 8 };

/* Warps that share a group of 8 rows: what gives matrices of every shape enough of them. */
INLINE int token_split(int64_t n, int64_t k)
{
    int split = n >= 16384 ? 1 : n >= 4096 ? 2 : n >= 2048 ? 4 : 8;
    while (split > 1 && k < 128 * split)
        split /= 2;
    return split;
}

/* f(x) into shared memory. `sums` has BLOCK + 32 floats. */
INLINE void token_input(const token_gemv_args &a, float *x, float *sums)
{
    int t = (int)threadIdx.x, k = (int)a.k;
    float square = 0.0f, scale = 1.0f;
    for (int i = t; i < k; i += BLOCK) {
        float v = a.x[i];
        x[i] = v;
        square = fmaf(v, v, square);
    }
    if (a.norm) {
        sums[t] = square;
        __syncthreads();
        if (t < 32) {
            float sum = 0.0f;
            for (int j = 0; j < BLOCK / 32; j++)
                sum += sums[t + 32 * j];
            sums[BLOCK + t] = sum;
        }
        __syncthreads();
        float sum = 0.0f;
        for (int j = 0; j < 32; j++)
            sum += sums[BLOCK + j];
        scale = f32_rsqrt(sum / (float)k + a.eps);
        for (int i = t; i < k; i += BLOCK)
            x[i] = x[i] * scale * (1.0f + a.norm[i]);
    }
    __syncthreads();
}

/* The low byte as a signed number. */
INLINE float byte_to_float(unsigned bits)
{
#ifdef FERMI_EMULATED
    return (float)(int8_t)bits;
#else
    float value;
    asm("cvt.rn.f32.s8 %0, %1;" : "=f"(value) : "r"(bits));
    return value;
#endif
}

/* Which bits of a word are codes, at its lower end and 8 above: variables, for an instruction takes one constant only. */
struct code_masks {
    unsigned low, high;
};

/* The signed bytes of a word. The lower two by their bits in the mantissa of a power of two, the upper two by conversion:
 * either way alone would keep one kind of unit busy for longer, on old cards and on new ones. */
struct q8_0_codes {
    float value[4];

    __device__ __forceinline__ q8_0_codes(unsigned word, const code_masks &m)
    {
        value[0] = float_of((word & m.low) ^ 0x4b000080u) - (8388608.0f + 128.0f); /* from -128..127 to 0..255 */
        value[1] = float_of((word & m.high) ^ 0x47008000u) - (32768.0f + 128.0f);
        value[2] = byte_to_float(word >> 16);
        value[3] = byte_to_float(word >> 24);
    }
};

struct q4_0_codes {
    float value[4]; /* nibbles at bits 0, 8, 16 and 24, less 8 */

    __device__ __forceinline__ q4_0_codes(unsigned word, const code_masks &m)
    {
#pragma unroll
        for (int i = 0; i < 2; i++, word >>= 16) {
            value[2 * i] = float_of((word & m.low) | 0x4b000000u) - (8388608.0f + 8.0f);
            value[2 * i + 1] = float_of((word & m.high) | 0x47000000u) - (32768.0f + 8.0f);
        }
    }
};

/* acc + x . c over a quad, in order. */
INLINE float add_quad(float acc, float4 x, const float (&c)[4])
{
    return fmaf(x.w, c[3], fmaf(x.z, c[2], fmaf(x.y, c[1], fmaf(x.x, c[0], acc))));
}

/* A lane of a warp reads 16 bytes of a block at a time: a word of four rows. LANES of a block, STEP blocks of a warp. */
struct q8_0_reader {
    enum { BYTES = 272, LANES = 16, STEP = 2, MASK = 0xff };

    static __device__ __forceinline__ float part(unsigned word, const code_masks &m, float4 x, float4)
    {
        return add_quad(0.0f, x, q8_0_codes(word, m).value);
    }
};

struct q4_0_reader {
    enum { BYTES = 144, LANES = 8, STEP = 4, MASK = 0xf };

    static __device__ __forceinline__ float part(unsigned word, const code_masks &m, float4 x, float4 behind)
    {
        return add_quad(add_quad(0.0f, x, q4_0_codes(word, m).value), behind, q4_0_codes(word >> 4, m).value);
    }
};

/* Bytes of a matrix, a batch of them in a row: only volatile loads does ptxas not move to where they are needed, which
 * saves registers and makes each wait for the one before. */
INLINE uint4 read_words(const uint8_t *p)
{
    uint4 v;
#ifdef FERMI_EMULATED
    v = *(const uint4 *)p;
#else
    asm volatile("ld.volatile.global.v4.u32 {%0, %1, %2, %3}, [%4];" : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w) : "l"(p));
#endif
    return v;
}

INLINE uint2 read_scales(const uint8_t *p)
{
    uint2 v;
#ifdef FERMI_EMULATED
    v = *(const uint2 *)p;
#else
    asm volatile("ld.volatile.global.v2.u32 {%0, %1}, [%2];" : "=r"(v.x), "=r"(v.y) : "l"(p));
#endif
    return v;
}

/* acc += this lane's parts of COUNT groups that start at `group`; the warp takes steps s, s + split, ..: four loads at a
 * time, so that memory has something to do meanwhile. What is read beyond the last block is not used. */
template <class R, int COUNT>
INLINE void add_groups(float (&acc)[COUNT][4], const uint8_t *const (&group)[COUNT], const float *x, int k, int s, int split)
{
    enum { BATCH = 4 / COUNT };
    int lane = (int)threadIdx.x % 32, blocks = k / 32, stride = split * R::STEP;
    int never = blocks >> 31;
    asm volatile("" : "+r"(never)); /* 0, but no compiler knows */
    int end = blocks + never; /* asked for again behind the loads, which therefore stay together */
    const code_masks m = {(unsigned)(R::MASK + never), (unsigned)((R::MASK << 8) + never)};
#pragma unroll 1
    for (int block = s * R::STEP + lane / R::LANES; block < blocks; block += BATCH * stride) {
        uint4 words[BATCH][COUNT];
        uint2 scales[BATCH][COUNT];
#pragma unroll
        for (int b = 0; b < BATCH; b++)
#pragma unroll
            for (int i = 0; i < COUNT; i++) {
                const uint8_t *from = group[i] + min_of(block + b * stride, blocks - 1) * R::BYTES + lane % 2 * 8;
                words[b][i] = read_words(from + 16 + lane % R::LANES / 2 * 32 + lane % 2 * 8);
                scales[b][i] = read_scales(from);
            }
#pragma unroll
        for (int b = 0; b < BATCH; b++)
            if (block + b * stride < end) {
                const float4 *quads = (const float4 *)x + (block + b * stride) * QUADS + lane % R::LANES / 2;
                float4 low = quads[0], high = R::LANES == 8 ? quads[4] : low;
#pragma unroll
                for (int i = 0; i < COUNT; i++) {
                    uint4 four = words[b][i];
                    uint2 two = scales[b][i];
                    acc[i][0] = fmaf(half_to_float((uint16_t)two.x), R::part(four.x, m, low, high), acc[i][0]);
                    acc[i][1] = fmaf(half_to_float((uint16_t)(two.x >> 16)), R::part(four.y, m, low, high), acc[i][1]);
                    acc[i][2] = fmaf(half_to_float((uint16_t)two.y), R::part(four.z, m, low, high), acc[i][2]);
                    acc[i][3] = fmaf(half_to_float((uint16_t)(two.y >> 16)), R::part(four.w, m, low, high), acc[i][3]);
                }
            }
    }
}

/* Every warp's sums of its groups' rows into total[COUNT][WARPS][GROUP], behind COUNT * 1024 floats of parts. */
template <int COUNT> INLINE float *sum_lanes(const float (&acc)[COUNT][4], float *parts)
{
    int t = (int)threadIdx.x, lane = t % 32;
    float *total = parts + COUNT * BLOCK * 4;
    __syncthreads(); /* parts and total are still read, by whoever came first */
#pragma unroll
    for (int i = 0; i < COUNT; i++)
        *(float4 *)(parts + 4 * (i * BLOCK + t)) = make_float4(acc[i][0], acc[i][1], acc[i][2], acc[i][3]);
    __syncthreads();
    if (lane < COUNT * GROUP) {
        int row = lane % GROUP;
        const float *from = parts + 4 * (lane / GROUP * BLOCK + t - lane + row / 4) + row % 4;
        float sum = 0.0f;
#pragma unroll
        for (int i = 0; i < 16; i++)
            sum += from[8 * i];
        total[(lane / GROUP * WARPS + t / 32) * GROUP + row] = sum;
    }
    __syncthreads();
    return total;
}

/* Row `row` of the block's rows from the sums of the `split` warps that share it. */
INLINE float sum_warps(const float *total, int row, int split)
{
    const float *from = total + row / GROUP * split * GROUP + row % GROUP;
    float sum = from[0];
    for (int s = 1; s < split; s++)
        sum += from[s * GROUP];
    return sum;
}

INLINE void put(const token_gemv_args &a, float *y, float value)
{
    *y = a.add ? *y + value : value;
}

/* The rows of quantised matrix w that belong to the block `unit` of those it has. */
template <class R>
INLINE void block_rows(const token_gemv_args &a, const void *w, float *y, int64_t n, int unit, const float *x, float *parts)
{
    int t = (int)threadIdx.x, split = token_split(n, a.k), warp = t / 32, groups = (int)blocks_of<int64_t>(n, GROUP);
    int first = unit * (WARPS / split), mine = min_of(first + warp / split, groups - 1);
    const uint8_t *group[1] = {(const uint8_t *)w + (int64_t)mine * (a.k / 32) * R::BYTES};
    float acc[1][4] = {};
    add_groups<R, 1>(acc, group, x, (int)a.k, warp % split, split);
    const float *total = sum_lanes(acc, parts);
    int row = first * GROUP + t;
    if (t < WARPS / split * GROUP && row < n)
        put(a, y + row, sum_warps(total, t, split));
}

/* Row `unit * WARPS + t` of a matrix of floats times x, for threads t below WARPS; a warp sums a row. */
INLINE float float_sum(const token_gemv_args &a, const void *w, int64_t n, int unit, const float *x, float *parts)
{
    int t = (int)threadIdx.x, lane = t % 32, k = (int)a.k;
    const float *from = (const float *)w + min_of<int64_t>(unit * WARPS + t / 32, n - 1) * k;
    float sum = 0.0f;
    if (k % 4 == 0) {
#pragma unroll 1
        for (int i = 4 * lane; i < k; i += 512) {
            float4 v[4];
#pragma unroll
            for (int b = 0; b < 4; b++) {
                v[b] = make_float4(0.0f, 0.0f, 0.0f, 0.0f);
                if (i + 128 * b < k) {
                    float4 four = *(const float4 *)(from + i + 128 * b);
                    v[b] = make_float4(four.x, four.y, four.z, four.w);
                }
            }
#pragma unroll
            for (int b = 0; b < 4; b++)
                if (i + 128 * b < k) {
                    const float c[4] = {v[b].x, v[b].y, v[b].z, v[b].w};
                    sum = add_quad(sum, *(const float4 *)(x + i + 128 * b), c);
                }
        }
    } else {
        for (int i = lane; i < k; i += 32)
            sum = fmaf(x[i], from[i], sum);
    }
    __syncthreads();
    parts[t] = sum;
    __syncthreads();
    if (t < WARPS) {
        sum = parts[32 * t];
        for (int i = 1; i < 32; i++)
            sum += parts[32 * t + i];
    }
    return sum;
}

INLINE void float_rows(const token_gemv_args &a, const void *w, float *y, int64_t n, int unit, const float *x, float *parts)
{
    int row = unit * WARPS + (int)threadIdx.x;
    float sum = float_sum(a, w, n, unit, x, parts);
    if (threadIdx.x < WARPS && row < n)
        put(a, y + row, sum);
}

/* Blocks that a matrix takes. */
INLINE int blocks_for(int64_t n, int64_t k, int64_t format)
{
    int64_t groups = blocks_of<int64_t>(n, GROUP);
    return (int)(format == TOKEN_F32 ? groups : blocks_of<int64_t>(groups * token_split(n, k), WARPS));
}

INLINE float *behind(const token_gemv_args &a, float *x)
{
    return x + blocks_of<int64_t>(a.k, 4) * 4;
}

extern "C" __global__ __launch_bounds__(BLOCK) void token_gemv(token_gemv_args a)
{
    DYNAMIC_SHARED(float, x);
    float *parts = behind(a, x);
    token_input(a, x, parts);
    const void *w = a.w0;
    float *y = a.y0;
    int64_t n = a.n0, format = a.format0;
    int unit = (int)blockIdx.x, blocks = blocks_for(n, a.k, format);
    if (unit >= blocks) {
        unit -= blocks;
        w = a.w1, y = a.y1, n = a.n1, format = a.format1;
        blocks = blocks_for(n, a.k, format);
        if (unit >= blocks) {
            unit -= blocks;
            w = a.w2, y = a.y2, n = a.n2, format = a.format2;
            blocks = blocks_for(n, a.k, format);
            if (unit >= blocks) {
                unit -= blocks;
                w = a.w3, y = a.y3, n = a.n3, format = a.format3;
            }
        }
    }
    if (format == TOKEN_Q8_0)
        block_rows<q8_0_reader>(a, w, y, n, unit, x, parts);
    else if (format == TOKEN_Q4_0)
        block_rows<q4_0_reader>(a, w, y, n, unit, x, parts);
    else
        float_rows(a, w, y, n, unit, x, parts);
}

/* As block_rows, of two matrices at once. */
template <class R> INLINE void block_swiglu(const token_gemv_args &a, const float *x, float *parts)
{
    int t = (int)threadIdx.x, split = token_split(a.n0, a.k), warp = t / 32;
    int first = (int)blockIdx.x * (WARPS / split), groups = (int)blocks_of<int64_t>(a.n0, GROUP);
    int64_t at = (int64_t)min_of(first + warp / split, groups - 1) * (a.k / 32) * R::BYTES;
    const uint8_t *group[2] = {(const uint8_t *)a.w0 + at, (const uint8_t *)a.w1 + at};
    float acc[2][4] = {};
    add_groups<R, 2>(acc, group, x, (int)a.k, warp % split, split);
    const float *total = sum_lanes(acc, parts);
    int row = first * GROUP + t;
    if (t < WARPS / split * GROUP && row < a.n0)
        put(a, a.y0 + row, f32_silu(sum_warps(total, t, split)) * sum_warps(total + WARPS * GROUP, t, split));
}

INLINE void float_swiglu(const token_gemv_args &a, const float *x, float *parts)
{
    int row = (int)(blockIdx.x * WARPS + threadIdx.x);
    float gate = float_sum(a, a.w0, a.n0, (int)blockIdx.x, x, parts);
    float up = float_sum(a, a.w1, a.n0, (int)blockIdx.x, x, parts);
    if (threadIdx.x < WARPS && row < a.n0)
        put(a, a.y0 + row, f32_silu(gate) * up);
}

extern "C" __global__ __launch_bounds__(BLOCK) void token_gemv_swiglu(token_gemv_args a)
{
    DYNAMIC_SHARED(float, x);
    float *parts = behind(a, x);
    token_input(a, x, parts);
    if (a.format0 == TOKEN_Q8_0)
        block_swiglu<q8_0_reader>(a, x, parts);
    else if (a.format0 == TOKEN_Q4_0)
        block_swiglu<q4_0_reader>(a, x, parts);
    else
        float_swiglu(a, x, parts);
}

/* A group a warp, then the one a whole grid further on. */
template <class R> INLINE void wide_rows(const token_gemv_args &a, const float *x, float *parts)
{
    int t = (int)threadIdx.x, groups = (int)blocks_of<int64_t>(a.n0, GROUP);
    for (int first = (int)blockIdx.x * WARPS; first < groups; first += (int)gridDim.x * WARPS) {
        const uint8_t *group[1] = {(const uint8_t *)a.w0 + min_of(first + t / 32, groups - 1) * (a.k / 32) * R::BYTES};
        float acc[1][4] = {};
        add_groups<R, 1>(acc, group, x, (int)a.k, 0, 1);
        const float *total = sum_lanes(acc, parts);
        int row = first * GROUP + t;
        if (t < WARPS * GROUP && row < a.n0)
            put(a, a.y0 + row, total[t]);
    }
}

extern "C" __global__ __launch_bounds__(BLOCK) void token_gemv_wide(token_gemv_args a)
{
    DYNAMIC_SHARED(float, x);
    float *parts = behind(a, x);
    token_input(a, x, parts);
    if (a.format0 == TOKEN_Q8_0)
        wide_rows<q8_0_reader>(a, x, parts);
    else
        wide_rows<q4_0_reader>(a, x, parts);
}
