/* Sums along a row over 16 virtual lanes: element i goes to lane i % 16, then a fixed tree. The same order fits one lane at
 * a time and vectors of 4, 8 or 16 lanes. */
#ifndef FERMI_SCALAR_LANES_H
#define FERMI_SCALAR_LANES_H

#include <stdint.h>

enum { LANES = 16 };

static inline float lane_tree(float lane[LANES])
{
    for (int width = LANES / 2; width > 0; width /= 2)
        for (int j = 0; j < width; j++)
            lane[j] += lane[j + width];
    return lane[0];
}

static inline float lane_dot(const float *x, const float *y, int64_t n)
{
    float lane[LANES] = {0};
    int64_t i = 0;
    for (; i + LANES <= n; i += LANES)
        for (int j = 0; j < LANES; j++)
            lane[j] += x[i + j] * y[i + j];
    for (int j = 0; i + j < n; j++)
        lane[j] += x[i + j] * y[i + j];
    return lane_tree(lane);
}

static inline float lane_sum(const float *x, int64_t n)
{
    float lane[LANES] = {0};
    for (int64_t i = 0; i < n; i++)
        lane[i % LANES] += x[i];
    return lane_tree(lane);
}

#endif
