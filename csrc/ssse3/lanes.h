/* The 16 virtual lanes of csrc/scalar/lanes.h as four vectors, v[0] = lanes 0..3 and so on, and loads and stores of row ends.
 *
 * A row end is filled up with zeros. That changes no bit of a sum: a lane starts from +0.0 and so is never -0.0, and adding
 * +0.0 to anything else returns it. */
#ifndef FERMI_SSSE3_LANES_H
#define FERMI_SSSE3_LANES_H

#include "target.h"

#include <stdint.h>
#include <tmmintrin.h>

#define INLINE static inline __attribute__((always_inline)) /* the same as in blocks.h */

enum { LANES = 16 };

/* The first n of four floats, zeros for the rest; n may be anything. */
static inline SSSE3 __m128 load_n(const float *p, int64_t n)
{
    if (n >= 4)
        return _mm_loadu_ps(p);
    __m128 v = n > 0 ? _mm_load_ss(p) : _mm_setzero_ps();
    if (n > 1)
        v = _mm_unpacklo_ps(v, _mm_load_ss(p + 1));
    if (n > 2)
        v = _mm_movelh_ps(v, _mm_load_ss(p + 2));
    return v;
}

/* The first n of four floats; n may be anything. */
static inline SSSE3 void store_n(float *p, __m128 v, int64_t n)
{
    if (n >= 4) {
        _mm_storeu_ps(p, v);
        return;
    }
    if (n > 0)
        _mm_store_ss(p, v);
    if (n > 1)
        _mm_store_ss(p + 1, _mm_shuffle_ps(v, v, 1));
    if (n > 2)
        _mm_store_ss(p + 2, _mm_movehl_ps(v, v));
}

static inline SSSE3 float lane_tree(const __m128 v[4])
{
    __m128 four = _mm_add_ps(_mm_add_ps(v[0], v[2]), _mm_add_ps(v[1], v[3]));
    __m128 two = _mm_add_ps(four, _mm_movehl_ps(four, four));
    return _mm_cvtss_f32(_mm_add_ss(two, _mm_shuffle_ps(two, two, 1)));
}

/* Lane sum of x^2. */
static inline SSSE3 float lane_square_sum(const float *x, int64_t n)
{
    __m128 v[4] = {_mm_setzero_ps(), _mm_setzero_ps(), _mm_setzero_ps(), _mm_setzero_ps()};
    int64_t whole = n / LANES * LANES;
    for (int64_t i = 0; i < whole; i += LANES)
        for (int g = 0; g < 4; g++) {
            __m128 e = _mm_loadu_ps(x + i + 4 * g);
            v[g] = _mm_add_ps(v[g], _mm_mul_ps(e, e));
        }
    for (int g = 0; g < 4 && whole + 4 * g < n; g++) {
        __m128 e = load_n(x + whole + 4 * g, n - whole - 4 * g);
        v[g] = _mm_add_ps(v[g], _mm_mul_ps(e, e));
    }
    return lane_tree(v);
}

#endif
