/* The scale of a q4_0 block that minimises its squared error, over all halves; kernels.h says what that is to the bit.
 *
 * For one sign of d the codes are constant between breakpoints |x_i| / (k - 1/2), so the error is a parabola on each
 * interval, kept up by running sums as d falls; the best half of an interval is a neighbour of its vertex or of its end.
 * Parabolas bound the error from below but for rounding, so that few halves are tried. Two cuts keep intervals few: above
 * |x|max / 3.5 all codes lie in -3..3, and d / 2 does as well; far below |x|max / 8 the largest element alone costs more than
 * the best known. */
#include "kernels.h"

#include <math.h>
#include <string.h>

#define BLOCK 32
#define BYTES 18
#define MOST (8 * BLOCK)           /* breakpoints of one sign */
#define BUCKETS 128
#define SLACK 1e-12                /* of the sum of w x^2: far above what rounding does to a parabola's value and
                                      a breakpoint's place, where both codes cost the same */
#define LARGEST_HALF 0x7bff
#define SMALLEST_NORMAL_HALF 0x1p-14
#define INLINE static inline __attribute__((always_inline))

typedef struct {
    double x[BLOCK], w[BLOCK];
} block;

typedef struct {
    double error;
    uint16_t half;                 /* of |d| */
    int negative;
} choice;

typedef struct {
    double at, xq, qq;             /* a code grows by one in size when d falls below this, and the sums by so much */
} breakpoint;

typedef struct {
    double bound, d;
} interval;

INLINE double half_value(uint16_t half)
{
    int exponent = half >> 10, mantissa = half & 0x3ff;
    double value = exponent ? (double)(mantissa | 0x400) : (double)mantissa;
    uint64_t bits = (uint64_t)(1023 + (exponent ? exponent : 1) - 25) << 52;
    double power;
    memcpy(&power, &bits, sizeof power);
    return value * power;
}

/* The largest finite half of at most d, for d >= 0. */
INLINE uint16_t half_below(double d)
{
    if (d >= half_value(LARGEST_HALF))
        return LARGEST_HALF;
    if (d < SMALLEST_NORMAL_HALF)
        return (uint16_t)(d * 0x1p24);
    uint64_t bits;
    memcpy(&bits, &d, sizeof bits);
    return (uint16_t)((((bits >> 52) - 1023 + 15) << 10) | ((bits >> 42) & 0x3ff));
}

INLINE int code_of(double x, double d)
{
    double t = x / d + 0.5;
    int toward_zero = t < -8 ? -8 : t >= 8 ? 7 : (int)t;
    return toward_zero - (toward_zero > t && t >= -8);
}

INLINE double error_at(const block *b, double d)
{
    double sum = 0;
    for (int i = 0; i < BLOCK; i++) {
        double rest = d == 0 ? b->x[i] : b->x[i] - d * code_of(b->x[i], d);
        sum += b->w[i] * (rest * rest);
    }
    return sum;
}

/* Smaller error first, then smaller size, then the negative one. */
static void consider(const block *b, uint16_t half, int negative, choice *best)
{
    double d = half_value(half), error = error_at(b, negative ? -d : d);
    if (error > best->error)
        return;
    if (error < best->error || half < best->half || (half == best->half && negative && !best->negative))
        *best = (choice){error, half, negative};
}

static void consider_near(const block *b, double d, int negative, choice *best)
{
    uint16_t half = half_below(d);
    consider(b, half, negative, best);
    if (half < LARGEST_HALF)
        consider(b, half + 1, negative, best);
}

/* `in` in falling order into `out`: spread over buckets first, which leaves little to do for an insertion sort; a sort that
 * compares from the start mispredicts half of its branches. */
static void sort(const breakpoint *in, int count, double low, double high, breakpoint *out)
{
    double scale = high < INFINITY ? BUCKETS / (high - low) : 0;
    int begin[BUCKETS + 1] = {0}, bucket[MOST];
    for (int i = 0; i < count; i++) {
        int place = scale > 0 ? (int)((high - in[i].at) * scale) : 0;
        bucket[i] = place < BUCKETS ? place : BUCKETS - 1;
        begin[bucket[i] + 1]++;
    }
    for (int i = 0; i < BUCKETS; i++)
        begin[i + 1] += begin[i];
    for (int i = 0; i < count; i++)
        out[begin[bucket[i]]++] = in[i];
    for (int i = 1; i < count; i++) {
        breakpoint moved = out[i];
        int place = i;
        for (; place > 0 && out[place - 1].at < moved.at; place--)
            out[place] = out[place - 1];
        out[place] = moved;
    }
}

/* Breakpoints strictly between low and high, falling; xq and qq become the sums of w |x| |code| and w code^2 of the codes that
 * hold just below high. */
static int breakpoints_between(const block *b, int negative, double low, double high, breakpoint *out, double *xq, double *qq)
{
    static const double inverse[] = {0, 2, 2 / 3., 2 / 5., 2 / 7., 2 / 9., 2 / 11., 2 / 13., 2 / 15.}; /* 1 / (k - 1/2) */
    breakpoint found[MOST];
    int count = 0;
    for (int i = 0; i < BLOCK; i++) {
        double size = fabs(b->x[i]), weight = b->w[i];
        int most = (b->x[i] < 0) == negative ? 7 : 8;
        if (weight <= 0)
            continue;
        for (int k = 1; k <= most; k++) {
            double at = size * inverse[k];
            if (at <= low)
                break;
            if (at < high) {
                found[count++] = (breakpoint){at, weight * size, weight * (2 * k - 1)};
            } else {
                *xq += weight * size;
                *qq += weight * (2 * k - 1);
            }
        }
    }
    sort(found, count, low, high, out);
    return count;
}

INLINE interval bound_of(double xx, double xq, double qq, double low, double high)
{
    double d = qq > 0 ? xq / qq : high;
    d = d < low ? low : d > high ? high : d;
    return (interval){xx - 2 * d * xq + d * d * qq, d};
}

/* Tries what may beat `best` among d of one sign with low <= |d| <= high (INFINITY: no upper end). */
static void search(const block *b, int negative, double xx, double low, double high, choice *best)
{
    breakpoint points[MOST];
    interval intervals[MOST + 1];
    double xq = 0, qq = 0;
    int count = breakpoints_between(b, negative, low, high, points, &xq, &qq), found = 0, first = 0;
    for (int i = 0; i <= count; i++) {
        double upper = i ? points[i - 1].at : high, lower = i < count ? points[i].at : low;
        if (i) {
            xq += points[i - 1].xq;
            qq += points[i - 1].qq;
        }
        if (qq > 0 && lower < upper) {
            intervals[found] = bound_of(xx, xq, qq, lower, upper);
            first = intervals[found].bound < intervals[first].bound ? found : first;
            found++;
        }
    }
    if (found)
        consider_near(b, intervals[first].d, negative, best);
    for (int i = 0; i < found; i++)
        if (i != first && intervals[i].bound <= best->error + SLACK * xx)
            consider_near(b, intervals[i].d, negative, best);
}

static void put(const block *b, const choice *best, uint8_t *out)
{
    double d = half_value(best->half);
    uint16_t half = best->half | (best->negative || !best->half ? 0x8000 : 0);
    memcpy(out, &half, sizeof half);
    for (int i = 0; i < 16; i++) {
        int code[2] = {0, 0};
        for (int k = 0; k < 2 && best->half; k++)
            code[k] = code_of(b->x[i + 16 * k], best->negative ? -d : d);
        out[2 + i] = (uint8_t)((code[0] + 8) | (code[1] + 8) << 4);
    }
}

void q4_0_mse(const q4_0_mse_args *a, int64_t begin, int64_t end)
{
    for (int64_t item = begin; item < end; item++) {
        block b;
        int largest = 0;
        double weights = 0, xx = 0;
        uint8_t *out = a->blocks + item * BYTES;
        for (int i = 0; i < BLOCK; i++) {
            b.w[i] = a->weight ? a->weight[(item * BLOCK + i) % a->n] : 1;
            weights += b.w[i];
        }
        for (int i = 0; i < BLOCK; i++) {
            b.x[i] = a->x[item * BLOCK + i];
            b.w[i] = weights > 0 ? b.w[i] : 1;
            xx += b.w[i] * (b.x[i] * b.x[i]);
            largest = fabs(b.x[i]) > fabs(b.x[largest]) ? i : largest;
        }
        choice best = {xx, 0, 1};  /* d = 0 */
        uint16_t plain;
        memcpy(&plain, out, sizeof plain);
        consider(&b, plain & 0x7fff, plain >> 15, &best);
        double peak = fabs(b.x[largest]), high = peak / 3.5;
        if (high / 2 < SMALLEST_NORMAL_HALF)
            high = INFINITY;       /* where halves of halves may be missing */
        for (int negative = 0; negative < 2; negative++) {
            double reach = (b.x[largest] < 0) == negative ? 7 : 8, low = 0;
            if (b.w[largest] > 0)
                low = (peak - sqrt(best.error / b.w[largest]) * (1 + SLACK)) / reach;
            if (low < high)
                search(&b, negative, xx, low > 0 ? low : 0, high, &best);
        }
        put(&b, &best, out);
    }
}
