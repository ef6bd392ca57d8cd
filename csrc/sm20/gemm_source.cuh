/* Where the tiles of a matrix product come from: rows of floats, or stored q4_0 and q8_0 groups that become floats on
 * the way.
 *
 * A source is one thread's part in reading ROWS rows of a matrix, 8 columns (a slice) at a time, into shared memory.
 * Thread t takes columns 4 (t % 2) .. +3 of row t / 2, then of row t / 2 + THREADS / 2 and so on. fetch<0> and fetch<1>
 * read the two slices of a pair into registers, stash writes what was fetched, transposed: column c of row r to s[c *
 * LD + r]; next goes on to the next pair. `left` counts the pairs from the present one to the end; a row of blocks of
 * 32 has an even number of pairs, so that an odd `left` is the second half of a block. LD is 4 more than a multiple of
 * 8: the 32 writes of a warp then meet 32 banks. Row numbers are held to the last row: what stands beyond it is read
 * twice and never used. Byte offsets are 32 bits, which spares registers: a matrix is smaller than 4 GiB.
 */
#ifndef FERMI_GEMM_SOURCE_CUH
#define FERMI_GEMM_SOURCE_CUH

#include "fermi.cuh"

#define GEMM_SLICE 8
#define GEMM_PART 512 /* columns in one chain of additions */
#define METHOD __device__ __forceinline__

template <int ROWS_, int THREADS_, int LD_> struct gemm_source {
    enum {
        ROWS = ROWS_, THREADS = THREADS_, LD = LD_, STEP = THREADS_ / 2,
        PASSES = (2 * ROWS_ + THREADS_ - 1) / THREADS_
    };
    unsigned at[PASSES];

    static METHOD bool takes(int pass)
    {
        return 2 * ROWS % THREADS == 0 || (int)threadIdx.x + pass * THREADS < 2 * ROWS;
    }

    static METHOD int row(int pass)
    {
        return ((int)threadIdx.x >> 1) + pass * STEP;
    }

    static METHOD unsigned part()
    {
        return threadIdx.x & 1;
    }

    static METHOD float *place(float *s)
    {
        return s + part() * (4 * LD) + (threadIdx.x >> 1);
    }
};

/* Past the first-level cache: the four slices of a 128-byte line come too far apart for Fermi's 16 KiB to keep it, and
 * a miss there reads the whole line, here 32 bytes. The words of q4_0, read twice, are better off with that cache to
 * themselves. */
INLINE float4 load_once(const char *p)
{
#ifdef FERMI_EMULATED
    return *(const float4 *)p;
#else
    float4 v;
    asm volatile("ld.global.cg.v4.f32 {%0, %1, %2, %3}, [%4];" : "=f"(v.x), "=f"(v.y), "=f"(v.z), "=f"(v.w) : "l"(p));
    return v;
#endif
}

template <int ROWS, int THREADS, int LD> struct float_source : gemm_source<ROWS, THREADS, LD> {
    typedef gemm_source<ROWS, THREADS, LD> base;
    const float *x;
    float4 v[base::PASSES];

    /* Row i of the tile is row source[first + i] of x, or first + i without a source. */
    METHOD void begin(const float *matrix, const int32_t *source, unsigned stride, int first, int rows)
    {
        x = matrix;
#pragma unroll
        for (int i = 0; i < base::PASSES; i++) {
            int row = min_of(first + base::row(i), rows - 1);
            this->at[i] = ((unsigned)(source ? source[row] : row) * stride + 4 * base::part()) * 4;
            v[i] = make_float4(0.0f, 0.0f, 0.0f, 0.0f);
        }
    }

    /* Rows of k floats each, behind one another. */
    METHOD void begin(const void *matrix, unsigned offset, unsigned k, int first, int rows)
    {
        begin((const float *)matrix, (const int32_t *)0, k, first, rows);
        x = (const float *)((const char *)matrix + offset);
    }

    template <int HALF> METHOD void fetch(int)
    {
#pragma unroll
        for (int i = 0; i < base::PASSES; i++)
            if (base::takes(i))
                v[i] = load_once((const char *)x + (this->at[i] + HALF * GEMM_SLICE * 4));
    }

    METHOD void stash(float *s, int) const
    {
        s = base::place(s);
#pragma unroll
        for (int i = 0; i < base::PASSES; i++)
            if (base::takes(i)) {
                s[i * base::STEP] = v[i].x;
                s[i * base::STEP + LD] = v[i].y;
                s[i * base::STEP + 2 * LD] = v[i].z;
                s[i * base::STEP + 3 * LD] = v[i].w;
            }
    }

    METHOD void next(int)
    {
#pragma unroll
        for (int i = 0; i < base::PASSES; i++)
            this->at[i] += 2 * GEMM_SLICE * 4;
    }
};

/* (float)(code - zero) without a conversion: the code's bits go into the mantissa of a power of two, whose sum with
 * zero is then taken off, both exact. The code stands at bit 0 (2^23) or bit 8 (2^15) of `bits`. */
template <int ZERO> INLINE float code_low(unsigned bits)
{
    return float_of(bits | 0x4b000000u) - (8388608.0f + ZERO);
}

template <int ZERO> INLINE float code_high(unsigned bits)
{
    return float_of(bits | 0x47000000u) - (32768.0f + ZERO);
}

/* Stored codes: a thread reads one word, four codes of its row, a slice, and the row's scale once a block. */
template <int ROWS, int THREADS, int LD, int BLOCK_BYTES> struct code_source : gemm_source<ROWS, THREADS, LD> {
    typedef gemm_source<ROWS, THREADS, LD> base;
    const uint8_t *w;
    unsigned back; /* from the first code word of a block to its scale */
    unsigned code[base::PASSES];
    float d[base::PASSES];

    static METHOD unsigned lane()
    {
        return (threadIdx.x >> 1) & 7;
    }

    METHOD void begin(const void *matrix, unsigned offset, unsigned k, int first, int rows)
    {
        w = (const uint8_t *)matrix;
        back = 16 + 32 * base::part() + 2 * lane();
#pragma unroll
        for (int i = 0; i < base::PASSES; i++) {
            unsigned group = (unsigned)min_of(first + base::row(i), rows - 1) >> 3;
            this->at[i] = offset + group * (k / 32 * BLOCK_BYTES) + 16 + 32 * base::part() + 4 * lane();
            code[i] = 0;
            d[i] = 0.0f;
        }
    }

    template <int HALF> METHOD void fetch(int left)
    {
#pragma unroll
        for (int i = 0; i < base::PASSES; i++)
            if (base::takes(i)) {
                code[i] = *(const unsigned *)(w + (this->at[i] + HALF * 64));
                if (HALF == 0 && left % 2 == 0)
                    d[i] = half_to_float(*(const uint16_t *)(w + (this->at[i] - back)));
            }
    }
};

/* Columns 0..15 of a block are the low nibbles of its code bytes, columns 16..31 the high nibbles of the same bytes. */
template <int ROWS, int THREADS, int LD> struct q4_0_source : code_source<ROWS, THREADS, LD, 144> {
    typedef gemm_source<ROWS, THREADS, LD> base;

    METHOD void stash(float *s, int left) const
    {
        s = base::place(s);
#pragma unroll
        for (int i = 0; i < base::PASSES; i++)
            if (base::takes(i)) {
                unsigned low = this->code[i] >> 4 * (left & 1), high = low >> 16;
                s[i * base::STEP] = code_low<8>(low & 0xf) * this->d[i];
                s[i * base::STEP + LD] = code_high<8>(low & 0xf00) * this->d[i];
                s[i * base::STEP + 2 * LD] = code_low<8>(high & 0xf) * this->d[i];
                s[i * base::STEP + 3 * LD] = code_high<8>(high & 0xf00) * this->d[i];
            }
    }

    METHOD void next(int left)
    {
#pragma unroll
        for (int i = 0; i < base::PASSES; i++)
            this->at[i] += left % 2 ? 144 : 0;
    }
};

template <int ROWS, int THREADS, int LD> struct q8_0_source : code_source<ROWS, THREADS, LD, 272> {
    typedef gemm_source<ROWS, THREADS, LD> base;

    METHOD void stash(float *s, int) const
    {
        s = base::place(s);
#pragma unroll
        for (int i = 0; i < base::PASSES; i++)
            if (base::takes(i)) {
                unsigned low = this->code[i] ^ 0x80808080u, high = low >> 16; /* codes from -128..127 to 0..255 */
                s[i * base::STEP] = code_low<128>(low & 0xff) * this->d[i];
                s[i * base::STEP + LD] = code_high<128>(low & 0xff00) * this->d[i];
                s[i * base::STEP + 2 * LD] = code_low<128>(high & 0xff) * this->d[i];
                s[i * base::STEP + 3 * LD] = code_high<128>(high & 0xff00) * this->d[i];
            }
    }

    METHOD void next(int left)
    {
#pragma unroll
        for (int i = 0; i < base::PASSES; i++)
            this->at[i] += left % 2 ? 144 : 128;
    }
};

#endif
