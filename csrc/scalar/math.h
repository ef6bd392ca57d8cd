/* exp, log1p, sin, cos, both GELUs and what is made of them, from IEEE add, mul, div and integer operations alone, so that every CPU and
 * every backend gives the same bits. csrc/ssse3/math.h repeats these operations lane by lane: change both or neither.
 *
 * Largest error found, in units of the last place of the exact result (at least 2^-149); tests/test_math.py holds the limits:
 *   exp 0.8904 (0.7504 where the result is subnormal), log1p 0.50002, sin and cos 0.50192, gelu_tanh 0.5042 and gelu_erf 0.5172,
 *   for every finite argument (of the last two every third float of 2^-14 <= |x| < 16);
 *   made of them, every third float of |x| <= 87: sigmoid 2.5, softplus 1.5, silu 2.9.
 * Looked at: every seventh of the 2^32 floats, and all of 2^-26 <= |x| <= 104 for exp, 2^-27 <= |x| < 2^8 for log1p and
 * 2^-13 <= x <= 2^24 for sin and cos. Below -88.73 exp(-x) is infinite, so sigmoid is 0 and silu -0 there.
 * exp is evaluated in float, the others in double and rounded once.
 */
#ifndef FERMI_SCALAR_MATH_H
#define FERMI_SCALAR_MATH_H

#include <stdint.h>
#include <string.h>

#define F32_INF __builtin_inff()

static inline uint32_t bits_of(float x)
{
    uint32_t b;
    memcpy(&b, &x, sizeof b);
    return b;
}

static inline float float_of(uint32_t b)
{
    float x;
    memcpy(&x, &b, sizeof x);
    return x;
}

static inline uint64_t bits_of_double(double x)
{
    uint64_t b;
    memcpy(&b, &x, sizeof b);
    return b;
}

static inline double double_of(uint64_t b)
{
    double x;
    memcpy(&x, &b, sizeof x);
    return x;
}

/* Adding and subtracting 1.5 * 2^(mantissa bits) rounds to an integer, which the low bits of the sum then hold. */
#define EXP_ROUND 12582912.0f
#define TRIG_ROUND 6755399441055744.0

/* exp: x = n ln2 + r with |r| <= ln2 / 2, exp(r) = 1 + r + r^2 P(r). */
#define EXP_MAX 89.0f    /* exp is infinite from 88.73 on */
#define EXP_MIN -104.0f  /* exp rounds to 0 below -103.98 */
#define LOG2_E 0x1.715476p+0f
#define LN2_HI 0.693359375f /* 9 bits: n * LN2_HI is exact */
#define LN2_LO -0x1.bd0106p-13f
/* Minimax for exp(r), relative error 3.2e-9 with these rounded coefficients. */
#define EXP_P0 0x1.fffffcp-2f
#define EXP_P1 0x1.555492p-3f
#define EXP_P2 0x1.5558bcp-5f
#define EXP_P3 0x1.1239c6p-7f
#define EXP_P4 0x1.6a4154p-10f

static inline float f32_exp(float x)
{
    x = EXP_MAX < x ? EXP_MAX : x; /* in this order NaN stays */
    x = EXP_MIN > x ? EXP_MIN : x;
    float t = x * LOG2_E + EXP_ROUND;
    int32_t n = (int32_t)(bits_of(t) - bits_of(EXP_ROUND));
    float nf = t - EXP_ROUND;
    float hi = x - nf * LN2_HI; /* exact */
    float lo = nf * LN2_LO;
    float r = hi - lo;
    float rest = (hi - r) - lo; /* what r lost to rounding */
    float p = EXP_P0 + r * (EXP_P1 + r * (EXP_P2 + r * (EXP_P3 + r * EXP_P4)));
    float y = 1.0f + (r + ((r * r) * p + rest));
    int32_t half = n >> 1; /* in two steps: 2^n alone may be subnormal or infinite while y * 2^n is not */
    return (y * float_of((uint32_t)(half + 127) << 23)) * float_of((uint32_t)(n - half + 127) << 23);
}

/* log1p: 1 + x = 2^k (1 + f) with 1 + f in [sqrt(1/2), sqrt(2)), log(1 + f) = 2 atanh(s), s = f / (2 + f). */
#define SQRT_HALF_TOP 0x3fe6a09eu /* upper half of the double sqrt(1/2) */
#define LN2 0x1.62e42fefa39efp-1

static inline float f32_log1p(float x)
{
    double u = 1.0 + (double)x;
    uint64_t b = bits_of_double(u);
    int32_t k = (int32_t)((uint32_t)(b >> 32) - SQRT_HALF_TOP) >> 20;
    double f = k ? double_of(b - ((uint64_t)(int64_t)k << 52)) - 1.0 : (double)x; /* k = 0: u has lost the end of x */
    double s = f / (2.0 + f);
    double z = s * s;
    double p = s * (2.0 + z * (2.0 / 3 + z * (2.0 / 5 + z * (2.0 / 7 + z * (2.0 / 9 + z * (2.0 / 11 + z * (2.0 / 13)))))));
    float y = (float)((double)k * LN2 + p);
    y = float_of(bits_of(y) | (bits_of(x) & 0x80000000u)); /* only for -0: the result has the sign of x anyway */
    y = x < F32_INF ? y : x;
    y = x == -1.0f ? -F32_INF : y;
    return x < -1.0f ? __builtin_nanf("") : y;
}

/* sin, cos: x = n pi/2 + r with |r| <= pi/4; the quadrant is n mod 4. */
#define TRIG_SMALL 16777216.0f /* up to here n has 24 bits, so n * HALF_PI_HI is exact */
#define TWO_OVER_PI 0x1.45f306dc9c883p-1
#define HALF_PI_HI 0x1.921fb54p+0 /* 29 bits */
#define HALF_PI_LO 0x1.10b4611a62633p-30
#define HALF_PI_2_64 0x1.921fb54442d18p-64

/* Any finite |x| >= 2^24: the bits of 2/pi that matter for x (those above make whole turns) times the 24 bits of x. */
static inline double trig_reduce_large(float x, uint64_t *quadrant)
{
    static const uint32_t two_over_pi[8] = {0, 0xa2f9836eu, 0x4e441529u, 0xfc2757d1u, 0xf534ddc0u, 0xdb629599u, 0x3c439041u, 0xfe5163abu};
    uint32_t b = bits_of(x);
    uint32_t exponent = (b >> 23) & 0xff; /* |x| = m * 2^(exponent - 150) */
    uint64_t m = (b & 0x7fffffu) | 0x800000u;
    uint32_t first = exponent - 150 + 30, word = first >> 5, shift = first & 31;
    uint64_t w[3];
    for (int i = 0; i < 3; i++)
        w[i] = ((((uint64_t)two_over_pi[word + i] << 32) | two_over_pi[word + i + 1]) << shift) >> 32;
    uint64_t turns = ((w[0] * m) << 32) + w[1] * m + ((w[2] * m) >> 32); /* quarter turns * 2^62, mod 4 */
    uint64_t n = (turns + (1ull << 61)) >> 62;
    double r = (double)(int64_t)(turns << 2) * HALF_PI_2_64;
    *quadrant = b >> 31 ? 0 - n : n;
    return b >> 31 ? -r : r;
}

/* sin(r + quadrant * pi/2). Taylor in double: the first terms left out are below 7e-12 (sin) and 2e-10 (cos). */
static inline double trig_poly(double r, uint64_t quadrant)
{
    double z = r * r;
    double s = r * (1.0 + z * (-1.0 / 6 + z * (1.0 / 120 + z * (-1.0 / 5040 + z * (1.0 / 362880 + z * (-1.0 / 39916800))))));
    double c = 1.0 + z * (-1.0 / 2 + z * (1.0 / 24 + z * (-1.0 / 720 + z * (1.0 / 40320 + z * (-1.0 / 3628800)))));
    double y = quadrant & 1 ? c : s;
    return double_of(bits_of_double(y) ^ (quadrant & 2) << 62);
}

static inline float trig(float x, uint64_t quarter_turns)
{
    float magnitude = float_of(bits_of(x) & 0x7fffffffu);
    if (!(magnitude < F32_INF))
        return __builtin_nanf("");
    uint64_t n;
    double r;
    if (magnitude <= TRIG_SMALL) {
        double t = (double)x * TWO_OVER_PI + TRIG_ROUND;
        double nd = t - TRIG_ROUND;
        n = bits_of_double(t);
        r = ((double)x - nd * HALF_PI_HI) - nd * HALF_PI_LO;
    } else {
        r = trig_reduce_large(x, &n);
    }
    return (float)trig_poly(r, n + quarter_turns);
}

static inline float f32_sin(float x)
{
    return trig(x, 0);
}

static inline float f32_cos(float x)
{
    return trig(x, 1);
}

/* exp of a double in -200..200, to 2e-10: v = n ln2 + r with |r| <= ln2 / 2, Taylor; NaN stays. */
#define LOG2_E_64 0x1.71547652b82fep+0
#define LN2_HI_64 0x1.62e42fee00000p-1 /* 32 bits: n * LN2_HI_64 is exact */
#define LN2_LO_64 0x1.a39ef35793c76p-33

static inline double f64_exp(double v)
{
    double t = v * LOG2_E_64 + TRIG_ROUND;
    double n = t - TRIG_ROUND;
    double r = (v - n * LN2_HI_64) - n * LN2_LO_64;
    double p = 1.0 + r * (1.0 + r * (1.0 / 2 + r * (1.0 / 6 + r * (1.0 / 24 + r * (1.0 / 120 + r * (1.0 / 720 + r * (1.0 / 5040 + r * (1.0 / 40320))))))));
    return p * double_of((bits_of_double(t) + 1023) << 52);
}

/* x/2 (1 + tanh(sqrt(2/pi) (x + 0.044715 x^3))) = x / (1 + exp(-v)), v twice the argument of tanh. From GELU_FAR on the
 * quotient underflows even for the largest x; -infinity gives NaN, as infinity times 0 does. */
#define GELU_C1 0x1.9884533d43651p+0  /* 2 sqrt(2/pi) */
#define GELU_C3 0x1.2444f2a4d8b4bp-4  /* the same times 0.044715 */
#define GELU_FAR 200.0
#define GELU_NEAR -60.0

static inline float f32_gelu_tanh(float x)
{
    double d = (double)x;
    double v = -(d * (GELU_C1 + GELU_C3 * (d * d)));
    double w = GELU_FAR < v ? GELU_FAR : v; /* in this order NaN stays */
    w = GELU_NEAR > w ? GELU_NEAR : w;
    double e = v > GELU_FAR ? (double)F32_INF : f64_exp(w);
    return (float)(d / (1.0 + e));
}

/* x/2 erfc(-x / sqrt 2). With a = |x|: erfc(a / sqrt 2) / 2 = exp(-a^2 / 2) P(t) / (a + 3), t = (a - 3) / (a + 3); P meets it to
 * 1.2e-9 for a <= 15 (interpolated at Chebyshev's points), where the product begins to underflow. */
#define GELU_END 15.0
#define GELU_P0 0x1.754a751f53b8fp-1
#define GELU_P1 -0x1.04c72995b3b40p-1
#define GELU_P2 0x1.d71381f68a21cp-3
#define GELU_P3 -0x1.832d3218a4899p-5
#define GELU_P4 -0x1.56d40a79ed451p-7
#define GELU_P5 0x1.c8c7db1a994f6p-8
#define GELU_P6 0x1.0c7a08db4e001p-10
#define GELU_P7 -0x1.0f2e8bd171a21p-10
#define GELU_P8 -0x1.0098a87a2bee1p-12
#define GELU_P9 0x1.1799c0bd0e1cdp-13
#define GELU_P10 0x1.d17fe3198ec87p-15

static inline float f32_gelu_erf(float x)
{
    double d = (double)x;
    double a = double_of(bits_of_double(d) & 0x7fffffffffffffffull);
    double q = 1.0 / (a + 3.0);
    double t = 1.0 - 6.0 * q;
    double p = GELU_P7 + t * (GELU_P8 + t * (GELU_P9 + t * GELU_P10));
    p = GELU_P0 + t * (GELU_P1 + t * (GELU_P2 + t * (GELU_P3 + t * (GELU_P4 + t * (GELU_P5 + t * (GELU_P6 + t * p))))));
    double v = -0.5 * (a * a);
    double w = -GELU_FAR > v ? -GELU_FAR : v;
    double e = a > GELU_END ? 0.0 : f64_exp(w);
    double g = (p * q) * e;
    return (float)(d * (d < 0.0 ? g : 1.0 - g));
}

static inline float f32_sigmoid(float x)
{
    return 1.0f / (1.0f + f32_exp(-x));
}

static inline float f32_silu(float x)
{
    return x * f32_sigmoid(x);
}

static inline float f32_softplus(float x)
{
    return x > 20.0f ? x : f32_log1p(f32_exp(x));
}

#endif
