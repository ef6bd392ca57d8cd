/* The 16 virtual lanes of csrc/scalar/lanes.h as two vectors, v[0] = lanes 0..7 and v[1] = lanes 8..15, and loads and
 * stores of row ends.
 *
 * A row end is filled up with zeros. That changes no bit of a sum: a lane starts from +0.0 and so is never -0.0, and
 * adding +0.0 to anything else returns it. */
#ifndef FERMI_AVX2_LANES_H
#define FERMI_AVX2_LANES_H

#include "target.h"

#include <immintrin.h>
#include <stdint.h>

enum { LANES = 16 };

/* All ones in the first n of eight lanes; n may be anything. */
static inline AVX2 __m256i first_n(int64_t n)
{
    const __m256i lane = _mm256_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7);
    return _mm256_cmpgt_epi32(_mm256_set1_epi32(n < 0 ? 0 : n > 8 ? 8 : (int)n), lane);
}

/* The first n of eight floats, zeros for the rest; n may be anything. */
static inline AVX2 __m256 load_n(const float *p, int64_t n)
{
    return n >= 8 ? _mm256_loadu_ps(p) : _mm256_maskload_ps(p, first_n(n));
}

/* The first n of eight floats; n may be anything. */
static inline AVX2 void store_n(float *p, __m256 v, int64_t n)
{
    if (n >= 8)
        _mm256_storeu_ps(p, v);
    else
        _mm256_maskstore_ps(p, first_n(n), v);
}

static inline AVX2 float lane_tree(const __m256 v[2])
{
    __m256 eight = _mm256_add_ps(v[0], v[1]);
    __m128 four = _mm_add_ps(_mm256_castps256_ps128(eight), _mm256_extractf128_ps(eight, 1));
    __m128 two = _mm_add_ps(four, _mm_movehl_ps(four, four));
    return _mm_cvtss_f32(_mm_add_ss(two, _mm_shuffle_ps(two, two, 1)));
}

/* Lane sum of x^2. */
static inline AVX2 float lane_square_sum(const float *x, int64_t n)
{
    __m256 v[2] = {_mm256_setzero_ps(), _mm256_setzero_ps()};
    int64_t whole = n / LANES * LANES;
    for (int64_t i = 0; i < whole; i += LANES)
        for (int g = 0; g < 2; g++) {
            __m256 e = _mm256_loadu_ps(x + i + 8 * g);
            v[g] = _mm256_add_ps(v[g], _mm256_mul_ps(e, e));
        }
    for (int g = 0; g < 2 && whole + 8 * g < n; g++) {
        __m256 e = load_n(x + whole + 8 * g, n - whole - 8 * g);
        v[g] = _mm256_add_ps(v[g], _mm256_mul_ps(e, e));
    }
    return lane_tree(v);
}

#endif
