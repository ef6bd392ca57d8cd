/* A product of 64 rows x 128 columns shared by 256 threads: who has which sums, and the steps.
 *
 * A thread has TM rows and TN columns, in pairs that lie side by side for 64-bit shared loads; the pairs of a
 * warp's lanes lie side by side too, LM of them high and LN wide. Low lane bits count rows and columns in turn:
 * neighbours want the same words, which newer cards then serve in one pass. 32 sums are what Fermi's 63 registers
 * hold beside the operands of two steps and a slice on its way.
 */
#ifndef FERMI_PRODUCT_TILE_CUH
#define FERMI_PRODUCT_TILE_CUH

#include "fermi.cuh"

enum { ROWS = 64, COLS = 128, THREADS = 256, DEPTH = 8, TM = 4, TN = 8, LM = 4, LN = 8 };

/* x, of which the compiler then knows nothing. Else it works out before a loop over phases what each phase needs,
 * in registers that are not there. */
INLINE int unknown(int x)
{
#ifndef FERMI_EMULATED
    asm volatile("" : "+r"(x));
#endif
    return x;
}

/* threadIdx.x, read anew for the same reason. */
INLINE unsigned thread_index()
{
#ifdef FERMI_EMULATED
    return threadIdx.x;
#else
    unsigned t;
    asm volatile("mov.u32 %0, %%tid.x;" : "=r"(t));
    return t;
#endif
}

/* The first row and column of thread t. */
INLINE int thread_row(unsigned t)
{
    return t / 64 * (LM * TM) + 2 * (t % 2 + t / 4 % 2 * 2);
}

INLINE int thread_col(unsigned t)
{
    return t / 32 % 2 * (LN * TN) + 2 * (t / 2 % 2 + t / 8 % 4 * 2);
}

/* From there to its row i and column j. */
INLINE int row_step(int i)
{
    return i / 2 * (2 * LM) + i % 2;
}

INLINE int col_step(int j)
{
    return j / 2 * (2 * LN) + j % 2;
}

/* Whether thread t's warp has any row below `rows` and any column below `cols`. */
INLINE bool warp_works(unsigned t, int rows, int cols)
{
    return (int)(t / 64) * (LM * TM) < rows && (int)(t / 32 % 2) * (LN * TN) < cols;
}

INLINE void product_clear(float (&acc)[TM][TN])
{
#pragma unroll
    for (int i = 0; i < TM; i++)
#pragma unroll
        for (int j = 0; j < TN; j++)
            acc[i][j] = 0.0f;
}

/* acc += a b over DEPTH steps; a and b point at the thread's first row and column. */
template <int LDA, int LDB> INLINE void product_steps(float (&acc)[TM][TN], const float *a, const float *b)
{
#pragma unroll
    for (int k = 0; k < DEPTH; k++) {
        float x[TM];
#pragma unroll
        for (int i = 0; i < TM; i += 2) {
            float2 pair = *(const float2 *)(a + k * LDA + row_step(i));
            x[i] = pair.x;
            x[i + 1] = pair.y;
        }
#pragma unroll
        for (int j = 0; j < TN; j += 2) {
            float2 w = *(const float2 *)(b + k * LDB + col_step(j));
#pragma unroll
            for (int i = 0; i < TM; i++)
                acc[i][j] = fmaf(x[i], w.x, acc[i][j]);
#pragma unroll
            for (int i = 0; i < TM; i++)
                acc[i][j + 1] = fmaf(x[i], w.y, acc[i][j + 1]);
        }
    }
}

INLINE float2 load2(const float *p, unsigned byte)
{
    const char *from = (const char *)p + byte;
#ifdef FERMI_EMULATED
    return *(const float2 *)from;
#else
    float2 v;
    asm volatile("ld.global.cg.v2.f32 {%0, %1}, [%2];" : "=f"(v.x), "=f"(v.y) : "l"(from));
    return v;
#endif
}

INLINE float4 load4(const float *p, unsigned byte)
{
    const char *from = (const char *)p + byte;
#ifdef FERMI_EMULATED
    return *(const float4 *)from;
#else
    float4 v;
    asm volatile("ld.global.cg.v4.f32 {%0, %1, %2, %3}, [%4];"
                 : "=f"(v.x), "=f"(v.y), "=f"(v.z), "=f"(v.w)
                 : "l"(from));
    return v;
#endif
}

#endif
