/* Stored blocks of the quantised formats (formats.py: interleaved). Eight rows of a matrix lie side by side: per block
 * of 32 elements their eight f16 scales, then the code bytes of the rows in turn, four bytes of each at a time. */
#ifndef FERMI_SCALAR_BLOCKS_H
#define FERMI_SCALAR_BLOCKS_H

#include <stdint.h>
#include <string.h>

#define INLINE static inline __attribute__((always_inline))

enum { BLOCK = 32, GROUP = 8 }; /* elements of a block; rows stored together */

/* Packed, because weights may start at any byte of a file. Values are (nibble - 8) * d; low nibbles hold elements
 * 0..15 of the block, high nibbles 16..31. */
typedef struct __attribute__((packed)) {
    uint16_t d[GROUP];
    uint8_t qs[4][GROUP][4];
} q4_0_x8;

/* Values are code * d. */
typedef struct __attribute__((packed)) {
    uint16_t d[GROUP];
    int8_t qs[8][GROUP][4];
} q8_0_x8;

_Static_assert(sizeof(q4_0_x8) == 144 && sizeof(q8_0_x8) == 272, "the stored layout has no padding");

/* A half as a float: exact, subnormals and infinities included. */
INLINE float f16_to_f32(uint16_t half)
{
    uint32_t exponent = half >> 10 & 31, mantissa = half & 0x3ff, bits;
    if (exponent == 0) { /* mantissa * 2^-24; both factors and the product are normal floats or zero */
        float magnitude = (float)mantissa * 0x1p-24f;
        memcpy(&bits, &magnitude, sizeof bits);
    } else {
        bits = (exponent == 31 ? 255 : exponent + 112) << 23 | mantissa << 13;
    }
    bits |= (uint32_t)(half & 0x8000) << 16;
    float value;
    memcpy(&value, &bits, sizeof value);
    return value;
}

#endif
