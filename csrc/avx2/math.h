/* The functions of csrc/scalar/math.h on eight floats at a time, the same operations in each lane: change both or neither.
 * What is double there is two vectors of four doubles here, lanes 0..3 and lanes 4..7. */
#ifndef FERMI_AVX2_MATH_H
#define FERMI_AVX2_MATH_H

#include "../scalar/math.h"
#include "target.h"

#include <immintrin.h>

#define INLINE static inline __attribute__((always_inline)) /* the same as in blocks.h */

/* c + x * y, rounded twice. */
INLINE AVX2 __m256 mul_add(__m256 c, __m256 x, __m256 y)
{
    return _mm256_add_ps(c, _mm256_mul_ps(x, y));
}

INLINE AVX2 __m256d mul_add_const_pd(double c, __m256d x, __m256d y)
{
    return _mm256_add_pd(_mm256_set1_pd(c), _mm256_mul_pd(x, y));
}

INLINE AVX2 __m256 power_of_two(__m256i n)
{
    return _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_add_epi32(n, _mm256_set1_epi32(127)), 23));
}

INLINE AVX2 __m256 v_exp(__m256 x)
{
    x = _mm256_min_ps(_mm256_set1_ps(EXP_MAX), x); /* minps and maxps return the second operand when one is NaN */
    x = _mm256_max_ps(_mm256_set1_ps(EXP_MIN), x);
    __m256 t = _mm256_add_ps(_mm256_mul_ps(x, _mm256_set1_ps(LOG2_E)), _mm256_set1_ps(EXP_ROUND));
    __m256i n = _mm256_sub_epi32(_mm256_castps_si256(t), _mm256_castps_si256(_mm256_set1_ps(EXP_ROUND)));
    __m256 nf = _mm256_sub_ps(t, _mm256_set1_ps(EXP_ROUND));
    __m256 hi = _mm256_sub_ps(x, _mm256_mul_ps(nf, _mm256_set1_ps(LN2_HI)));
    __m256 lo = _mm256_mul_ps(nf, _mm256_set1_ps(LN2_LO));
    __m256 r = _mm256_sub_ps(hi, lo);
    __m256 rest = _mm256_sub_ps(_mm256_sub_ps(hi, r), lo);
    __m256 p = mul_add(_mm256_set1_ps(EXP_P3), r, _mm256_set1_ps(EXP_P4));
    p = mul_add(_mm256_set1_ps(EXP_P2), r, p);
    p = mul_add(_mm256_set1_ps(EXP_P1), r, p);
    p = mul_add(_mm256_set1_ps(EXP_P0), r, p);
    __m256 y = _mm256_add_ps(_mm256_mul_ps(_mm256_mul_ps(r, r), p), rest);
    y = _mm256_add_ps(_mm256_set1_ps(1.0f), _mm256_add_ps(r, y));
    __m256i half = _mm256_srai_epi32(n, 1);
    return _mm256_mul_ps(_mm256_mul_ps(y, power_of_two(half)), power_of_two(_mm256_sub_epi32(n, half)));
}

/* log1p of four lanes but for the sign of zero and the special cases. */
INLINE AVX2 __m256d log1p_pd(__m256d x)
{
    __m256d u = _mm256_add_pd(_mm256_set1_pd(1.0), x);
    __m256i b = _mm256_castpd_si256(u);
    __m256i top = _mm256_shuffle_epi32(b, _MM_SHUFFLE(3, 3, 1, 1));
    __m256i k = _mm256_srai_epi32(_mm256_sub_epi32(top, _mm256_set1_epi32(SQRT_HALF_TOP)), 20); /* k0 k0 k1 k1 ... */
    __m256i shift = _mm256_slli_epi64(_mm256_slli_epi32(_mm256_srli_epi64(k, 32), 20), 32);
    __m256d f = _mm256_sub_pd(_mm256_castsi256_pd(_mm256_sub_epi64(b, shift)), _mm256_set1_pd(1.0));
    f = _mm256_blendv_pd(f, x, _mm256_castsi256_pd(_mm256_cmpeq_epi32(k, _mm256_setzero_si256())));
    __m256d s = _mm256_div_pd(f, _mm256_add_pd(_mm256_set1_pd(2.0), f));
    __m256d z = _mm256_mul_pd(s, s);
    __m256d p = mul_add_const_pd(2.0 / 11, z, _mm256_set1_pd(2.0 / 13));
    p = mul_add_const_pd(2.0 / 9, z, p);
    p = mul_add_const_pd(2.0 / 7, z, p);
    p = mul_add_const_pd(2.0 / 5, z, p);
    p = mul_add_const_pd(2.0 / 3, z, p);
    p = _mm256_mul_pd(s, mul_add_const_pd(2.0, z, p));
    __m256i low = _mm256_permute4x64_epi64(_mm256_shuffle_epi32(k, _MM_SHUFFLE(2, 0, 2, 0)), _MM_SHUFFLE(2, 0, 2, 0));
    __m256d kd = _mm256_cvtepi32_pd(_mm256_castsi256_si128(low));
    return _mm256_add_pd(_mm256_mul_pd(kd, _mm256_set1_pd(LN2)), p);
}

INLINE AVX2 __m256 v_log1p(__m256 x)
{
    __m128 low = _mm256_cvtpd_ps(log1p_pd(_mm256_cvtps_pd(_mm256_castps256_ps128(x))));
    __m128 high = _mm256_cvtpd_ps(log1p_pd(_mm256_cvtps_pd(_mm256_extractf128_ps(x, 1))));
    __m256 y = _mm256_or_ps(_mm256_set_m128(high, low), _mm256_and_ps(x, _mm256_set1_ps(-0.0f)));
    y = _mm256_blendv_ps(x, y, _mm256_cmp_ps(x, _mm256_set1_ps(F32_INF), _CMP_LT_OQ));
    y = _mm256_blendv_ps(y, _mm256_set1_ps(-F32_INF), _mm256_cmp_ps(x, _mm256_set1_ps(-1.0f), _CMP_EQ_OQ));
    return _mm256_or_ps(y, _mm256_cmp_ps(x, _mm256_set1_ps(-1.0f), _CMP_LT_OQ)); /* all bits set is a NaN */
}

INLINE AVX2 __m256d trig_poly_pd(__m256d r, __m256i quadrant)
{
    __m256d z = _mm256_mul_pd(r, r);
    __m256d s = mul_add_const_pd(1.0 / 362880, z, _mm256_set1_pd(-1.0 / 39916800));
    s = mul_add_const_pd(-1.0 / 5040, z, s);
    s = mul_add_const_pd(1.0 / 120, z, s);
    s = mul_add_const_pd(-1.0 / 6, z, s);
    s = _mm256_mul_pd(r, mul_add_const_pd(1.0, z, s));
    __m256d c = mul_add_const_pd(1.0 / 40320, z, _mm256_set1_pd(-1.0 / 3628800));
    c = mul_add_const_pd(-1.0 / 720, z, c);
    c = mul_add_const_pd(1.0 / 24, z, c);
    c = mul_add_const_pd(-1.0 / 2, z, c);
    c = mul_add_const_pd(1.0, z, c);
    __m256i odd = _mm256_slli_epi64(quadrant, 63); /* blendv looks at the top bit */
    __m256i sign = _mm256_slli_epi64(_mm256_srli_epi64(quadrant, 1), 63);
    return _mm256_xor_pd(_mm256_blendv_pd(s, c, _mm256_castsi256_pd(odd)), _mm256_castsi256_pd(sign));
}

INLINE AVX2 __m256d trig_small_pd(__m256d x, __m256i quarter_turns)
{
    __m256d t = _mm256_add_pd(_mm256_mul_pd(x, _mm256_set1_pd(TWO_OVER_PI)), _mm256_set1_pd(TRIG_ROUND));
    __m256d nd = _mm256_sub_pd(t, _mm256_set1_pd(TRIG_ROUND));
    __m256d r = _mm256_sub_pd(x, _mm256_mul_pd(nd, _mm256_set1_pd(HALF_PI_HI)));
    r = _mm256_sub_pd(r, _mm256_mul_pd(nd, _mm256_set1_pd(HALF_PI_LO)));
    return trig_poly_pd(r, _mm256_add_epi64(_mm256_castpd_si256(t), quarter_turns));
}

INLINE AVX2 __m256 v_trig(__m256 x, int quarter_turns)
{
    __m256i q = _mm256_set1_epi64x(quarter_turns);
    __m128 low = _mm256_cvtpd_ps(trig_small_pd(_mm256_cvtps_pd(_mm256_castps256_ps128(x)), q));
    __m128 high = _mm256_cvtpd_ps(trig_small_pd(_mm256_cvtps_pd(_mm256_extractf128_ps(x, 1)), q));
    __m256 y = _mm256_set_m128(high, low);
    __m256 magnitude = _mm256_andnot_ps(_mm256_set1_ps(-0.0f), x);
    if (__builtin_expect(_mm256_movemask_ps(_mm256_cmp_ps(magnitude, _mm256_set1_ps(TRIG_SMALL), _CMP_NLE_UQ)), 0)) {
        float in[8], out[8]; /* huge, infinite or NaN somewhere: no position gets there */
        _mm256_storeu_ps(in, x);
        for (int i = 0; i < 8; i++)
            out[i] = trig(in[i], (uint64_t)quarter_turns);
        y = _mm256_loadu_ps(out);
    }
    return y;
}

INLINE AVX2 __m256 v_sin(__m256 x)
{
    return v_trig(x, 0);
}

INLINE AVX2 __m256 v_cos(__m256 x)
{
    return v_trig(x, 1);
}

INLINE AVX2 __m256d v_exp_pd(__m256d v)
{
    __m256d t = _mm256_add_pd(_mm256_mul_pd(v, _mm256_set1_pd(LOG2_E_64)), _mm256_set1_pd(TRIG_ROUND));
    __m256d n = _mm256_sub_pd(t, _mm256_set1_pd(TRIG_ROUND));
    __m256d r = _mm256_sub_pd(v, _mm256_mul_pd(n, _mm256_set1_pd(LN2_HI_64)));
    r = _mm256_sub_pd(r, _mm256_mul_pd(n, _mm256_set1_pd(LN2_LO_64)));
    __m256d p = mul_add_const_pd(1.0 / 5040, r, _mm256_set1_pd(1.0 / 40320));
    p = mul_add_const_pd(1.0 / 720, r, p);
    p = mul_add_const_pd(1.0 / 120, r, p);
    p = mul_add_const_pd(1.0 / 24, r, p);
    p = mul_add_const_pd(1.0 / 6, r, p);
    p = mul_add_const_pd(1.0 / 2, r, p);
    p = mul_add_const_pd(1.0, r, p);
    p = mul_add_const_pd(1.0, r, p);
    __m256i power = _mm256_slli_epi64(_mm256_add_epi64(_mm256_castpd_si256(t), _mm256_set1_epi64x(1023)), 52);
    return _mm256_mul_pd(p, _mm256_castsi256_pd(power));
}

INLINE AVX2 __m256d gelu_tanh_pd(__m256d d)
{
    __m256d c = mul_add_const_pd(GELU_C1, _mm256_set1_pd(GELU_C3), _mm256_mul_pd(d, d));
    __m256d v = _mm256_xor_pd(_mm256_mul_pd(d, c), _mm256_set1_pd(-0.0));
    __m256d w = _mm256_min_pd(_mm256_set1_pd(GELU_FAR), v); /* minpd and maxpd return the second operand when one is NaN */
    w = _mm256_max_pd(_mm256_set1_pd(GELU_NEAR), w);
    __m256d far = _mm256_cmp_pd(v, _mm256_set1_pd(GELU_FAR), _CMP_GT_OQ);
    __m256d e = _mm256_blendv_pd(v_exp_pd(w), _mm256_set1_pd((double)F32_INF), far);
    return _mm256_div_pd(d, _mm256_add_pd(_mm256_set1_pd(1.0), e));
}

INLINE AVX2 __m256d gelu_erf_pd(__m256d d)
{
    __m256d one = _mm256_set1_pd(1.0), a = _mm256_andnot_pd(_mm256_set1_pd(-0.0), d);
    __m256d q = _mm256_div_pd(one, _mm256_add_pd(a, _mm256_set1_pd(3.0)));
    __m256d t = _mm256_sub_pd(one, _mm256_mul_pd(_mm256_set1_pd(6.0), q));
    __m256d p = mul_add_const_pd(GELU_P9, t, _mm256_set1_pd(GELU_P10));
    p = mul_add_const_pd(GELU_P8, t, p);
    p = mul_add_const_pd(GELU_P7, t, p);
    p = mul_add_const_pd(GELU_P6, t, p);
    p = mul_add_const_pd(GELU_P5, t, p);
    p = mul_add_const_pd(GELU_P4, t, p);
    p = mul_add_const_pd(GELU_P3, t, p);
    p = mul_add_const_pd(GELU_P2, t, p);
    p = mul_add_const_pd(GELU_P1, t, p);
    p = mul_add_const_pd(GELU_P0, t, p);
    __m256d v = _mm256_mul_pd(_mm256_set1_pd(-0.5), _mm256_mul_pd(a, a));
    __m256d e = v_exp_pd(_mm256_max_pd(_mm256_set1_pd(-GELU_FAR), v));
    e = _mm256_andnot_pd(_mm256_cmp_pd(a, _mm256_set1_pd(GELU_END), _CMP_GT_OQ), e);
    __m256d g = _mm256_mul_pd(_mm256_mul_pd(p, q), e);
    __m256d below = _mm256_cmp_pd(d, _mm256_setzero_pd(), _CMP_LT_OQ);
    return _mm256_mul_pd(d, _mm256_blendv_pd(_mm256_sub_pd(one, g), g, below));
}

INLINE AVX2 __m256 v_gelu_tanh(__m256 x)
{
    __m128 low = _mm256_cvtpd_ps(gelu_tanh_pd(_mm256_cvtps_pd(_mm256_castps256_ps128(x))));
    __m128 high = _mm256_cvtpd_ps(gelu_tanh_pd(_mm256_cvtps_pd(_mm256_extractf128_ps(x, 1))));
    return _mm256_set_m128(high, low);
}

INLINE AVX2 __m256 v_gelu_erf(__m256 x)
{
    __m128 low = _mm256_cvtpd_ps(gelu_erf_pd(_mm256_cvtps_pd(_mm256_castps256_ps128(x))));
    __m128 high = _mm256_cvtpd_ps(gelu_erf_pd(_mm256_cvtps_pd(_mm256_extractf128_ps(x, 1))));
    return _mm256_set_m128(high, low);
}

INLINE AVX2 __m256 v_sigmoid(__m256 x)
{
    __m256 one = _mm256_set1_ps(1.0f);
    return _mm256_div_ps(one, _mm256_add_ps(one, v_exp(_mm256_xor_ps(x, _mm256_set1_ps(-0.0f)))));
}

INLINE AVX2 __m256 v_silu(__m256 x)
{
    return _mm256_mul_ps(x, v_sigmoid(x));
}

INLINE AVX2 __m256 v_softplus(__m256 x)
{
    return _mm256_blendv_ps(v_log1p(v_exp(x)), x, _mm256_cmp_ps(x, _mm256_set1_ps(20.0f), _CMP_GT_OQ));
}

#endif
