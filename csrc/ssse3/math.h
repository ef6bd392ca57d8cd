/* The functions of csrc/scalar/math.h on four floats at a time, the same operations in each lane: change both or neither.
 * What is double there is two vectors of two doubles here, lanes 0 1 and lanes 2 3. */
#ifndef FERMI_SSSE3_MATH_H
#define FERMI_SSSE3_MATH_H

#include "../scalar/math.h"
#include "target.h"

#include <tmmintrin.h>

static inline SSSE3 __m128 select_ps(__m128 mask, __m128 yes, __m128 no)
{
    return _mm_or_ps(_mm_and_ps(mask, yes), _mm_andnot_ps(mask, no));
}

static inline SSSE3 __m128d select_pd(__m128d mask, __m128d yes, __m128d no)
{
    return _mm_or_pd(_mm_and_pd(mask, yes), _mm_andnot_pd(mask, no));
}

/* c + x * y, rounded twice. */
static inline SSSE3 __m128 mul_add(__m128 c, __m128 x, __m128 y)
{
    return _mm_add_ps(c, _mm_mul_ps(x, y));
}

static inline SSSE3 __m128d mul_add_const_pd(double c, __m128d x, __m128d y)
{
    return _mm_add_pd(_mm_set1_pd(c), _mm_mul_pd(x, y));
}

static inline SSSE3 __m128 power_of_two(__m128i n)
{
    return _mm_castsi128_ps(_mm_slli_epi32(_mm_add_epi32(n, _mm_set1_epi32(127)), 23));
}

static inline SSSE3 __m128 v_exp(__m128 x)
{
    x = _mm_min_ps(_mm_set1_ps(EXP_MAX), x); /* minps and maxps return the second operand when one is NaN */
    x = _mm_max_ps(_mm_set1_ps(EXP_MIN), x);
    __m128 t = _mm_add_ps(_mm_mul_ps(x, _mm_set1_ps(LOG2_E)), _mm_set1_ps(EXP_ROUND));
    __m128i n = _mm_sub_epi32(_mm_castps_si128(t), _mm_castps_si128(_mm_set1_ps(EXP_ROUND)));
    __m128 nf = _mm_sub_ps(t, _mm_set1_ps(EXP_ROUND));
    __m128 hi = _mm_sub_ps(x, _mm_mul_ps(nf, _mm_set1_ps(LN2_HI)));
    __m128 lo = _mm_mul_ps(nf, _mm_set1_ps(LN2_LO));
    __m128 r = _mm_sub_ps(hi, lo);
    __m128 rest = _mm_sub_ps(_mm_sub_ps(hi, r), lo);
    __m128 p = mul_add(_mm_set1_ps(EXP_P3), r, _mm_set1_ps(EXP_P4));
    p = mul_add(_mm_set1_ps(EXP_P2), r, p);
    p = mul_add(_mm_set1_ps(EXP_P1), r, p);
    p = mul_add(_mm_set1_ps(EXP_P0), r, p);
    __m128 y = _mm_add_ps(_mm_mul_ps(_mm_mul_ps(r, r), p), rest);
    y = _mm_add_ps(_mm_set1_ps(1.0f), _mm_add_ps(r, y));
    __m128i half = _mm_srai_epi32(n, 1);
    return _mm_mul_ps(_mm_mul_ps(y, power_of_two(half)), power_of_two(_mm_sub_epi32(n, half)));
}

/* log1p of two lanes but for the sign of zero and the special cases. */
static inline SSSE3 __m128d log1p_pd(__m128d x)
{
    __m128d u = _mm_add_pd(_mm_set1_pd(1.0), x);
    __m128i b = _mm_castpd_si128(u);
    __m128i top = _mm_shuffle_epi32(b, _MM_SHUFFLE(3, 3, 1, 1));
    __m128i k = _mm_srai_epi32(_mm_sub_epi32(top, _mm_set1_epi32(SQRT_HALF_TOP)), 20); /* k0 k0 k1 k1 */
    __m128i scaled = _mm_sub_epi64(b, _mm_slli_epi64(_mm_slli_epi32(_mm_srli_epi64(k, 32), 20), 32));
    __m128d f = _mm_sub_pd(_mm_castsi128_pd(scaled), _mm_set1_pd(1.0));
    f = select_pd(_mm_castsi128_pd(_mm_cmpeq_epi32(k, _mm_setzero_si128())), x, f);
    __m128d s = _mm_div_pd(f, _mm_add_pd(_mm_set1_pd(2.0), f));
    __m128d z = _mm_mul_pd(s, s);
    __m128d p = mul_add_const_pd(2.0 / 11, z, _mm_set1_pd(2.0 / 13));
    p = mul_add_const_pd(2.0 / 9, z, p);
    p = mul_add_const_pd(2.0 / 7, z, p);
    p = mul_add_const_pd(2.0 / 5, z, p);
    p = mul_add_const_pd(2.0 / 3, z, p);
    p = _mm_mul_pd(s, mul_add_const_pd(2.0, z, p));
    __m128d kd = _mm_cvtepi32_pd(_mm_shuffle_epi32(k, _MM_SHUFFLE(2, 0, 2, 0)));
    return _mm_add_pd(_mm_mul_pd(kd, _mm_set1_pd(LN2)), p);
}

static inline SSSE3 __m128 v_log1p(__m128 x)
{
    __m128 low = _mm_cvtpd_ps(log1p_pd(_mm_cvtps_pd(x)));
    __m128 high = _mm_cvtpd_ps(log1p_pd(_mm_cvtps_pd(_mm_movehl_ps(x, x))));
    __m128 y = _mm_or_ps(_mm_movelh_ps(low, high), _mm_and_ps(x, _mm_set1_ps(-0.0f)));
    y = select_ps(_mm_cmplt_ps(x, _mm_set1_ps(F32_INF)), y, x);
    y = select_ps(_mm_cmpeq_ps(x, _mm_set1_ps(-1.0f)), _mm_set1_ps(-F32_INF), y);
    return _mm_or_ps(y, _mm_cmplt_ps(x, _mm_set1_ps(-1.0f))); /* all bits set is a NaN */
}

static inline SSSE3 __m128d trig_poly_pd(__m128d r, __m128i quadrant)
{
    __m128d z = _mm_mul_pd(r, r);
    __m128d s = mul_add_const_pd(1.0 / 362880, z, _mm_set1_pd(-1.0 / 39916800));
    s = mul_add_const_pd(-1.0 / 5040, z, s);
    s = mul_add_const_pd(1.0 / 120, z, s);
    s = mul_add_const_pd(-1.0 / 6, z, s);
    s = _mm_mul_pd(r, mul_add_const_pd(1.0, z, s));
    __m128d c = mul_add_const_pd(1.0 / 40320, z, _mm_set1_pd(-1.0 / 3628800));
    c = mul_add_const_pd(-1.0 / 720, z, c);
    c = mul_add_const_pd(1.0 / 24, z, c);
    c = mul_add_const_pd(-1.0 / 2, z, c);
    c = mul_add_const_pd(1.0, z, c);
    __m128i low = _mm_shuffle_epi32(quadrant, _MM_SHUFFLE(2, 2, 0, 0));
    __m128d odd = _mm_castsi128_pd(_mm_srai_epi32(_mm_slli_epi32(low, 31), 31));
    __m128i sign = _mm_slli_epi64(_mm_srli_epi64(quadrant, 1), 63);
    return _mm_xor_pd(select_pd(odd, c, s), _mm_castsi128_pd(sign));
}

static inline SSSE3 __m128d trig_small_pd(__m128d x, __m128i quarter_turns)
{
    __m128d t = _mm_add_pd(_mm_mul_pd(x, _mm_set1_pd(TWO_OVER_PI)), _mm_set1_pd(TRIG_ROUND));
    __m128d nd = _mm_sub_pd(t, _mm_set1_pd(TRIG_ROUND));
    __m128d r = _mm_sub_pd(x, _mm_mul_pd(nd, _mm_set1_pd(HALF_PI_HI)));
    r = _mm_sub_pd(r, _mm_mul_pd(nd, _mm_set1_pd(HALF_PI_LO)));
    return trig_poly_pd(r, _mm_add_epi64(_mm_castpd_si128(t), quarter_turns));
}

static inline SSSE3 __m128 v_trig(__m128 x, int quarter_turns)
{
    __m128i q = _mm_set_epi32(0, quarter_turns, 0, quarter_turns);
    __m128 low = _mm_cvtpd_ps(trig_small_pd(_mm_cvtps_pd(x), q));
    __m128 high = _mm_cvtpd_ps(trig_small_pd(_mm_cvtps_pd(_mm_movehl_ps(x, x)), q));
    __m128 y = _mm_movelh_ps(low, high);
    __m128 magnitude = _mm_andnot_ps(_mm_set1_ps(-0.0f), x);
    if (__builtin_expect(_mm_movemask_ps(_mm_cmpnle_ps(magnitude, _mm_set1_ps(TRIG_SMALL))), 0)) {
        float in[4], out[4]; /* huge, infinite or NaN somewhere: no position gets there */
        _mm_storeu_ps(in, x);
        for (int i = 0; i < 4; i++)
            out[i] = trig(in[i], (uint64_t)quarter_turns);
        y = _mm_loadu_ps(out);
    }
    return y;
}

static inline SSSE3 __m128 v_sin(__m128 x)
{
    return v_trig(x, 0);
}

static inline SSSE3 __m128 v_cos(__m128 x)
{
    return v_trig(x, 1);
}

static inline SSSE3 __m128d v_exp_pd(__m128d v)
{
    __m128d t = _mm_add_pd(_mm_mul_pd(v, _mm_set1_pd(LOG2_E_64)), _mm_set1_pd(TRIG_ROUND));
    __m128d n = _mm_sub_pd(t, _mm_set1_pd(TRIG_ROUND));
    __m128d r = _mm_sub_pd(v, _mm_mul_pd(n, _mm_set1_pd(LN2_HI_64)));
    r = _mm_sub_pd(r, _mm_mul_pd(n, _mm_set1_pd(LN2_LO_64)));
    __m128d p = mul_add_const_pd(1.0 / 5040, r, _mm_set1_pd(1.0 / 40320));
    p = mul_add_const_pd(1.0 / 720, r, p);
    p = mul_add_const_pd(1.0 / 120, r, p);
    p = mul_add_const_pd(1.0 / 24, r, p);
    p = mul_add_const_pd(1.0 / 6, r, p);
    p = mul_add_const_pd(1.0 / 2, r, p);
    p = mul_add_const_pd(1.0, r, p);
    p = mul_add_const_pd(1.0, r, p);
    __m128i power = _mm_slli_epi64(_mm_add_epi64(_mm_castpd_si128(t), _mm_set_epi32(0, 1023, 0, 1023)), 52);
    return _mm_mul_pd(p, _mm_castsi128_pd(power));
}

static inline SSSE3 __m128d gelu_tanh_pd(__m128d d)
{
    __m128d c = mul_add_const_pd(GELU_C1, _mm_set1_pd(GELU_C3), _mm_mul_pd(d, d));
    __m128d v = _mm_xor_pd(_mm_mul_pd(d, c), _mm_set1_pd(-0.0));
    __m128d w = _mm_min_pd(_mm_set1_pd(GELU_FAR), v); /* minpd and maxpd return the second operand when one is NaN */
    w = _mm_max_pd(_mm_set1_pd(GELU_NEAR), w);
    __m128d far = _mm_cmpgt_pd(v, _mm_set1_pd(GELU_FAR));
    __m128d e = select_pd(far, _mm_set1_pd((double)F32_INF), v_exp_pd(w));
    return _mm_div_pd(d, _mm_add_pd(_mm_set1_pd(1.0), e));
}

static inline SSSE3 __m128d gelu_erf_pd(__m128d d)
{
    __m128d one = _mm_set1_pd(1.0), a = _mm_andnot_pd(_mm_set1_pd(-0.0), d);
    __m128d q = _mm_div_pd(one, _mm_add_pd(a, _mm_set1_pd(3.0)));
    __m128d t = _mm_sub_pd(one, _mm_mul_pd(_mm_set1_pd(6.0), q));
    __m128d p = mul_add_const_pd(GELU_P9, t, _mm_set1_pd(GELU_P10));
    p = mul_add_const_pd(GELU_P8, t, p);
    p = mul_add_const_pd(GELU_P7, t, p);
    p = mul_add_const_pd(GELU_P6, t, p);
    p = mul_add_const_pd(GELU_P5, t, p);
    p = mul_add_const_pd(GELU_P4, t, p);
    p = mul_add_const_pd(GELU_P3, t, p);
    p = mul_add_const_pd(GELU_P2, t, p);
    p = mul_add_const_pd(GELU_P1, t, p);
    p = mul_add_const_pd(GELU_P0, t, p);
    __m128d v = _mm_mul_pd(_mm_set1_pd(-0.5), _mm_mul_pd(a, a));
    __m128d e = v_exp_pd(_mm_max_pd(_mm_set1_pd(-GELU_FAR), v));
    e = _mm_andnot_pd(_mm_cmpgt_pd(a, _mm_set1_pd(GELU_END)), e);
    __m128d g = _mm_mul_pd(_mm_mul_pd(p, q), e);
    __m128d below = _mm_cmplt_pd(d, _mm_setzero_pd());
    return _mm_mul_pd(d, select_pd(below, g, _mm_sub_pd(one, g)));
}

static inline SSSE3 __m128 v_gelu_tanh(__m128 x)
{
    __m128 low = _mm_cvtpd_ps(gelu_tanh_pd(_mm_cvtps_pd(x)));
    return _mm_movelh_ps(low, _mm_cvtpd_ps(gelu_tanh_pd(_mm_cvtps_pd(_mm_movehl_ps(x, x)))));
}

static inline SSSE3 __m128 v_gelu_erf(__m128 x)
{
    __m128 low = _mm_cvtpd_ps(gelu_erf_pd(_mm_cvtps_pd(x)));
    return _mm_movelh_ps(low, _mm_cvtpd_ps(gelu_erf_pd(_mm_cvtps_pd(_mm_movehl_ps(x, x)))));
}

static inline SSSE3 __m128 v_sigmoid(__m128 x)
{
    __m128 one = _mm_set1_ps(1.0f);
    return _mm_div_ps(one, _mm_add_ps(one, v_exp(_mm_xor_ps(x, _mm_set1_ps(-0.0f)))));
}

static inline SSSE3 __m128 v_silu(__m128 x)
{
    return _mm_mul_ps(x, v_sigmoid(x));
}

static inline SSSE3 __m128 v_softplus(__m128 x)
{
    return select_ps(_mm_cmpgt_ps(x, _mm_set1_ps(20.0f)), x, v_log1p(v_exp(x)));
}

#endif
