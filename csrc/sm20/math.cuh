/* exp, log1p, tanh, sin, cos and what is made of them, from IEEE fma, add, mul, div and integer operations alone: no
 * approximate instruction of the card, no library. The emulator and the device run the same operations.
 *
 * Largest error found over every 127th float, in units of the last place of the exact result (at least 2^-149);
 * tests/test_emulator.py holds the limits:
 *   exp 0.97 (0.75 where the result is subnormal), log1p 0.5001, tanh 1.42, sin and cos 0.502, for every finite argument;
 *   rsqrt 1.5; made of them, |x| <= 87: sigmoid 2.3, softplus 1.5, silu 2.8.
 * And as the rows of the stage table hold them: gelu_tanh 0.505, gelu_erf 0.518.
 * exp and tanh are evaluated in float, the others in double (half rate on the cards this is for) and rounded once.
 */
#ifndef FERMI_MATH_CUH
#define FERMI_MATH_CUH

#define F32_INF float_of(0x7f800000u)
#define F32_NAN float_of(0x7fffffffu)

/* 1 / sqrt(x), both correctly rounded. */
INLINE float f32_rsqrt(float x)
{
    return 1.0f / sqrtf(x);
}

/* Adding and subtracting 1.5 * 2^(mantissa bits) rounds to an integer, which the low bits of the sum then hold. */
#define EXP_ROUND 12582912.0f
#define TRIG_ROUND 6755399441055744.0

#define EXP_MAX 89.0f   /* exp is infinite from 88.73 on */
#define EXP_MIN -104.0f /* exp rounds to 0 below -103.98 */

/* x = n ln2 + r with |r| <= ln2 / 2; exp(r) = 1 + (r + r^2 P(r)), P minimax to 3.1e-9 of exp. */
INLINE float f32_exp(float x)
{
    x = EXP_MAX < x ? EXP_MAX : x; /* in this order NaN stays */
    x = EXP_MIN > x ? EXP_MIN : x;
    float t = fmaf(x, 1.44269502f, EXP_ROUND); /* log2(e) */
    int n = (int)(bits_of(t) - bits_of(EXP_ROUND));
    float nf = t - EXP_ROUND;
    float r = fmaf(nf, -0.693147182f, x); /* exact where |x| > 1/2: ln2 in float */
    r = fmaf(nf, 1.90465421e-09f, r);     /* ln2 in float - ln2 */
    float p = fmaf(r, 0.00138143206f, 0.00836885069f);
    p = fmaf(r, p, 0.0416684002f);
    p = fmaf(r, p, 0.166665196f);
    p = fmaf(r, p, 0.49999994f);
    float y = 1.0f + fmaf(r * r, p, r);
    int half = n >> 1; /* in two steps: 2^n alone may be subnormal or infinite while y * 2^n is not */
    return (y * float_of((unsigned)(half + 127) << 23)) * float_of((unsigned)(n - half + 127) << 23);
}

/* 1 + x = 2^k (1 + f) with 1 + f in [sqrt(1/2), sqrt(2)), log(1 + f) = 2 atanh(s), s = f / (2 + f). */
INLINE float f32_log1p(float x)
{
    double u = 1.0 + (double)x;
    uint64_t b = bits_of_double(u);
    int k = (int)((unsigned)(b >> 32) - 0x3fe6a09eu) >> 20; /* upper half of the double sqrt(1/2) */
    double f = k ? double_of(b - ((uint64_t)(int64_t)k << 52)) - 1.0 : (double)x; /* k = 0: u has lost the end of x */
    double s = f / (2.0 + f);
    double z = s * s;
    double p = s * (2.0 + z * (2.0 / 3 + z * (2.0 / 5 + z * (2.0 / 7 + z * (2.0 / 9 + z * (2.0 / 11 + z * (2.0 / 13)))))));
    float y = (float)((double)k * 0.69314718055994529 + p);
    y = float_of(bits_of(y) | (bits_of(x) & 0x80000000u)); /* only for -0: the result has the sign of x anyway */
    y = x < F32_INF ? y : x;
    y = x == -1.0f ? -F32_INF : y;
    return x < -1.0f ? F32_NAN : y;
}

/* Below 0.55 x + x^3 P(x^2), P minimax to 1.1e-9 of tanh; beyond 1 - 2 / (exp(2 |x|) + 1). */
INLINE float f32_tanh(float x)
{
    float m = fabsf(x);
    float z = x * x;
    float p = fmaf(z, -0.00627423963f, 0.021071678f);
    p = fmaf(z, p, -0.0538523085f);
    p = fmaf(z, p, 0.13332586f);
    p = fmaf(z, p, -0.333333164f);
    float near_zero = fmaf(x * z, p, x);
    float far = 1.0f - 2.0f / (f32_exp(2.0f * m) + 1.0f);
    float y = m < 0.55f ? near_zero : far; /* NaN is not below 0.55 and stays NaN */
    return float_of(bits_of(y) | (bits_of(x) & 0x80000000u));
}

/* Bits of 2/pi from 2^-1 down, behind a zero word. */
__constant__ static const uint32_t two_over_pi[8] = {0,           0xa2f9836eu, 0x4e441529u, 0xfc2757d1u,
                                                     0xf534ddc0u, 0xdb629599u, 0x3c439041u, 0xfe5163abu};

/* x = n pi/2 + r with |r| <= pi/4 for |x| >= 2^24: the bits of 2/pi that matter for x times the 24 bits of x. */
INLINE double trig_reduce_large(float x, uint64_t *quadrant)
{
    uint32_t b = bits_of(x);
    uint64_t m = (b & 0x7fffffu) | 0x800000u; /* |x| = m * 2^(exponent - 150) */
    uint32_t first = ((b >> 23) & 0xff) - 150 + 30, word = first >> 5, shift = first & 31;
    uint64_t w[3];
#pragma unroll
    for (int i = 0; i < 3; i++)
        w[i] = ((((uint64_t)two_over_pi[word + i] << 32) | two_over_pi[word + i + 1]) << shift) >> 32;
    uint64_t turns = ((w[0] * m) << 32) + w[1] * m + ((w[2] * m) >> 32); /* quarter turns * 2^62, mod 4 */
    uint64_t n = (turns + (1ull << 61)) >> 62;
    double r = (double)(int64_t)(turns << 2) * 8.5153039502163861e-20; /* pi/2 * 2^-64 */
    *quadrant = b >> 31 ? 0 - n : n;
    return b >> 31 ? -r : r;
}

/* sin(x + quarter_turns * pi/2). Taylor in double: the first terms left out are below 7e-12 (sin) and 2e-10 (cos). */
INLINE float trig(float x, uint64_t quarter_turns)
{
    if (!(fabsf(x) < F32_INF))
        return F32_NAN;
    uint64_t n;
    double r;
    if (fabsf(x) <= 16777216.0f) { /* n has 24 bits and the first part of pi/2 29: their product is exact */
        double t = (double)x * 0.63661977236758138 + TRIG_ROUND;
        double nd = t - TRIG_ROUND;
        n = bits_of_double(t);
        r = ((double)x - nd * 1.570796325802803) - nd * 9.9209357968054043e-10;
    } else {
        r = trig_reduce_large(x, &n);
    }
    n += quarter_turns;
    double z = r * r;
    double s = r * (1.0 + z * (-1.0 / 6 + z * (1.0 / 120 + z * (-1.0 / 5040 + z * (1.0 / 362880 + z * (-1.0 / 39916800))))));
    double c = 1.0 + z * (-1.0 / 2 + z * (1.0 / 24 + z * (-1.0 / 720 + z * (1.0 / 40320 + z * (-1.0 / 3628800)))));
    double y = n & 1 ? c : s;
    return (float)double_of(bits_of_double(y) ^ ((n & 2) << 62));
}

INLINE float f32_sin(float x)
{
    return trig(x, 0);
}

INLINE float f32_cos(float x)
{
    return trig(x, 1);
}

INLINE float f32_sigmoid(float x)
{
    return 1.0f / (1.0f + f32_exp(-x));
}

INLINE float f32_silu(float x)
{
    return x * f32_sigmoid(x);
}

INLINE float f32_softplus(float x)
{
    return x > 20.0f ? x : f32_log1p(f32_exp(x));
}

/* exp of a double in -200..200, to 2e-10: v = n ln2 + r with |r| <= ln2 / 2, Taylor; NaN stays. */
INLINE double f64_exp(double v)
{
    double t = v * 1.4426950408889634 + TRIG_ROUND; /* log2(e) */
    double n = t - TRIG_ROUND;
    double r = (v - n * 0.69314718036912382) - n * 1.9082149292705877e-10; /* ln2 in 32 bits, and the rest of it */
    double p = 1.0 / 120 + r * (1.0 / 720 + r * (1.0 / 5040 + r * (1.0 / 40320)));
    p = 1.0 + r * (1.0 + r * (1.0 / 2 + r * (1.0 / 6 + r * (1.0 / 24 + r * p))));
    return p * double_of((bits_of_double(t) + 1023) << 52);
}

/* x/2 (1 + tanh(sqrt(2/pi) (x + 0.044715 x^3))) = x / (1 + exp(-v)), v twice the argument of tanh. From 200 on the quotient
 * underflows even for the largest x; -infinity gives NaN, as infinity times 0 does. */
INLINE float f32_gelu_tanh(float x)
{
    double d = (double)x;
    double v = -(d * (1.5957691216057308 + 0.071354816272600254 * (d * d)));
    double w = 200.0 < v ? 200.0 : v; /* in this order NaN stays */
    w = -60.0 > w ? -60.0 : w;
    double e = v > 200.0 ? (double)F32_INF : f64_exp(w);
    return (float)(d / (1.0 + e));
}

/* x/2 erfc(-x / sqrt 2). With a = |x|: erfc(a / sqrt 2) / 2 = exp(-a^2 / 2) P(t) / (a + 3), t = (a - 3) / (a + 3); P meets it
 * to 1.2e-9 for a <= 15 (interpolated at Chebyshev's points), where the product begins to underflow. */
INLINE float f32_gelu_erf(float x)
{
    double d = (double)x;
    double a = d < 0.0 ? -d : d;
    double q = 1.0 / (a + 3.0);
    double t = 1.0 - 6.0 * q;
    double p = -0.0010344765508861836 + t * (-0.0002447093207917761 + t * (0.00013332395420363602 + t * 5.5491871716794676e-05));
    p = -0.01046228896653126 + t * (0.006969920150912792 + t * (0.0010241573243785498 + t * p));
    p = 0.7290836907139794 + t * (-0.5093319888345391 + t * (0.2300176766741665 + t * (-0.04726276192117602 + t * p)));
    double v = -0.5 * (a * a);
    double w = -200.0 > v ? -200.0 : v;
    double e = a > 15.0 ? 0.0 : f64_exp(w);
    double g = (p * q) * e;
    return (float)(d * (d < 0.0 ? g : 1.0 - g));
}

/* IEEE half <-> float, to nearest even; any NaN gives one NaN (0x7fffffff, 0x7fff). */
#ifdef FERMI_HALF_ASM
INLINE float half_to_float(uint16_t h)
{
    float x;
    asm("cvt.f32.f16 %0, %1;" : "=f"(x) : "h"(h));
    return x;
}

INLINE uint16_t float_to_half(float x)
{
    uint16_t h;
    asm("cvt.rn.f16.f32 %0, %1;" : "=h"(h) : "f"(x));
    return h;
}
#else
INLINE float half_to_float(uint16_t h)
{
    uint32_t sign = (uint32_t)(h & 0x8000u) << 16, exponent = (h >> 10) & 31, mantissa = h & 0x3ffu;
    if (exponent == 31)
        return mantissa ? F32_NAN : float_of(sign | 0x7f800000u);
    if (exponent == 0) {
        float x = (float)mantissa * 5.96046448e-08f;
        return sign ? -x : x;
    }
    return float_of(sign | (exponent + 112) << 23 | mantissa << 13);
}

INLINE uint16_t float_to_half(float x)
{
    uint32_t b = bits_of(x), sign = (b >> 16) & 0x8000u, magnitude = b & 0x7fffffffu;
    if (magnitude > 0x7f800000u)
        return 0x7fff;
    if (magnitude < 0x38800000u) { /* below 2^-14: the sum's last place is 2^-24, so adding rounds */
        float rounded = float_of(magnitude) + 0.5f;
        return (uint16_t)(sign | (bits_of(rounded) - 0x3f000000u));
    }
    uint32_t rounded = magnitude + 0xfffu + ((magnitude >> 13) & 1); /* a carry moves on into the exponent */
    uint32_t half = (rounded >> 13) - (112u << 10);
    return (uint16_t)(sign | (half < 0x7c00u ? half : 0x7c00u));
}
#endif

#endif
