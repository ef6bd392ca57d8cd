/* What the machine can do at best: streaming reads in several patterns, and integer dot products that never leave the
 * registers. Measuring helpers, no ops: kernels.h says what each item leaves behind, so that a test can tell a loop that
 * ran from one that the compiler removed. */
#include "kernels.h"

#include <immintrin.h>

#define LINE 64
#define INLINE static inline __attribute__((always_inline))

INLINE __m128i load(const uint8_t *p)
{
    return _mm_load_si128((const __m128i *)p);
}

INLINE uint64_t fold(__m128i v)
{
    return (uint64_t)_mm_cvtsi128_si64(_mm_xor_si128(v, _mm_unpackhi_epi64(v, v)));
}

/* 16-byte loads in order, a line prefetched `ahead` bytes before its use unless that is 0. */
INLINE uint64_t read_lines(const uint8_t *p, int64_t bytes, int64_t ahead)
{
    __m128i s[4] = {_mm_setzero_si128(), _mm_setzero_si128(), _mm_setzero_si128(), _mm_setzero_si128()};
    for (int64_t i = 0; i < bytes; i += LINE) {
        if (ahead)
            _mm_prefetch((const char *)(p + i + ahead), _MM_HINT_T0);
        for (int k = 0; k < 4; k++)
            s[k] = _mm_xor_si128(s[k], load(p + i + 16 * k));
    }
    return fold(_mm_xor_si128(_mm_xor_si128(s[0], s[1]), _mm_xor_si128(s[2], s[3])));
}

/* The same over `streams` (at most 4) equal parts, a line of each in turn. */
INLINE uint64_t read_streams(const uint8_t *p, int64_t bytes, int streams)
{
    __m128i s[4] = {_mm_setzero_si128(), _mm_setzero_si128(), _mm_setzero_si128(), _mm_setzero_si128()};
    int64_t part = bytes / streams;
    for (int64_t i = 0; i < part; i += LINE)
        for (int k = 0; k < streams; k++)
            for (int j = 0; j < 4; j++)
                s[k] = _mm_xor_si128(s[k], load(p + k * part + i + 16 * j));
    return fold(_mm_xor_si128(_mm_xor_si128(s[0], s[1]), _mm_xor_si128(s[2], s[3])));
}

/* One word of each line: all that the memory has to deliver, with the fewest instructions. */
INLINE uint64_t read_touch(const uint8_t *p, int64_t bytes, int64_t ahead)
{
    uint64_t s[4] = {0, 0, 0, 0};
    for (int64_t i = 0; i < bytes; i += 4 * LINE)
        for (int k = 0; k < 4; k++) {
            if (ahead)
                _mm_prefetch((const char *)(p + i + k * LINE + ahead), _MM_HINT_T0);
            s[k] ^= *(const uint64_t *)(p + i + k * LINE);
        }
    return s[0] ^ s[1] ^ s[2] ^ s[3];
}

__attribute__((target("avx2"))) INLINE uint64_t avx2_read_lines(const uint8_t *p, int64_t bytes, int64_t ahead)
{
    __m256i s[2] = {_mm256_setzero_si256(), _mm256_setzero_si256()};
    for (int64_t i = 0; i < bytes; i += LINE) {
        if (ahead)
            _mm_prefetch((const char *)(p + i + ahead), _MM_HINT_T0);
        for (int k = 0; k < 2; k++)
            s[k] = _mm256_xor_si256(s[k], _mm256_load_si256((const __m256i *)(p + i + 32 * k)));
    }
    s[0] = _mm256_xor_si256(s[0], s[1]);
    return fold(_mm_xor_si128(_mm256_castsi256_si128(s[0]), _mm256_extracti128_si256(s[0], 1)));
}

#define PATTERN(name, read)                                                  \
    void name(const roofline_read_args *a, int64_t begin, int64_t end)       \
    {                                                                        \
        for (int64_t i = begin; i < end; i++) {                              \
            const uint8_t *p = a->data + i * a->chunk;                       \
            int64_t rest = a->bytes - i * a->chunk;                          \
            int64_t bytes = rest < a->chunk ? rest : a->chunk;               \
            a->seen[i] = read;                                               \
        }                                                                    \
    }

PATTERN(roofline_read_plain, read_lines(p, bytes, 0))
PATTERN(roofline_read_ahead_2k, read_lines(p, bytes, 2048))
PATTERN(roofline_read_ahead_4k, read_lines(p, bytes, 4096))
PATTERN(roofline_read_two, read_streams(p, bytes, 2))
PATTERN(roofline_read_four, read_streams(p, bytes, 4))
PATTERN(roofline_read_touch, read_touch(p, bytes, 0))
PATTERN(roofline_read_touch_ahead, read_touch(p, bytes, 4096))
__attribute__((target("avx2"))) PATTERN(avx2_roofline_read, avx2_read_lines(p, bytes, 0))
__attribute__((target("avx2"))) PATTERN(avx2_roofline_read_ahead, avx2_read_lines(p, bytes, 4096))

/* Eight products, summed in 16 bits, then widened once: the cheapest exact form of 4-bit weights times 8-bit activations.
 * Each product feeds the next round's and keeps its value (v * 1 + 0 * 1), so that no register is copied for it. In
 * assembly, because compilers spill registers here, or see that nothing changes. */
#define OPERANDS(v, x, ones, acc, sum)                                                                                  \
    "+x"(v[0]), "+x"(v[1]), "+x"(v[2]), "+x"(v[3]), "+x"(v[4]), "+x"(v[5]), "+x"(v[6]), "+x"(v[7]), "=&x"(acc), "+x"(sum) \
        : "x"(x), "x"(ones)

__attribute__((target("ssse3"))) void ssse3_roofline_dot(const roofline_dot_args *a, int64_t begin, int64_t end)
{
    for (int64_t item = begin; item < end; item++) {
        __m128i x = _mm_set1_epi8(1), ones = _mm_set1_epi16(1), sum = _mm_setzero_si128(), acc, v[8];
        for (int k = 0; k < 8; k++)
            v[k] = _mm_set1_epi16((short)(k + 1));
        for (int64_t round = 0; round < a->rounds; round++)
            __asm__ volatile(
                "pmaddubsw %10, %0\n pmaddubsw %10, %1\n pmaddubsw %10, %2\n pmaddubsw %10, %3\n"
                "pmaddubsw %10, %4\n pmaddubsw %10, %5\n pmaddubsw %10, %6\n pmaddubsw %10, %7\n"
                "movdqa %0, %8\n paddw %1, %8\n paddw %2, %8\n paddw %3, %8\n paddw %4, %8\n"
                "paddw %5, %8\n paddw %6, %8\n paddw %7, %8\n pmaddwd %11, %8\n paddd %8, %9\n"
                : OPERANDS(v, x, ones, acc, sum));
        sum = _mm_add_epi32(sum, _mm_shuffle_epi32(sum, 0x4e));
        sum = _mm_add_epi32(sum, _mm_shuffle_epi32(sum, 0xb1));
        a->seen[item] = (uint32_t)_mm_cvtsi128_si32(sum);
    }
}

__attribute__((target("avx2"))) void avx2_roofline_dot(const roofline_dot_args *a, int64_t begin, int64_t end)
{
    for (int64_t item = begin; item < end; item++) {
        __m256i x = _mm256_set1_epi8(1), ones = _mm256_set1_epi16(1), sum = _mm256_setzero_si256(), acc, v[8];
        for (int k = 0; k < 8; k++)
            v[k] = _mm256_set1_epi16((short)(k + 1));
        for (int64_t round = 0; round < a->rounds; round++)
            __asm__ volatile(
                "vpmaddubsw %10, %0, %0\n vpmaddubsw %10, %1, %1\n vpmaddubsw %10, %2, %2\n vpmaddubsw %10, %3, %3\n"
                "vpmaddubsw %10, %4, %4\n vpmaddubsw %10, %5, %5\n vpmaddubsw %10, %6, %6\n vpmaddubsw %10, %7, %7\n"
                "vpaddw %0, %1, %8\n vpaddw %2, %8, %8\n vpaddw %3, %8, %8\n vpaddw %4, %8, %8\n"
                "vpaddw %5, %8, %8\n vpaddw %6, %8, %8\n vpaddw %7, %8, %8\n vpmaddwd %11, %8, %8\n vpaddd %8, %9, %9\n"
                : OPERANDS(v, x, ones, acc, sum));
        __m128i half = _mm_add_epi32(_mm256_castsi256_si128(sum), _mm256_extracti128_si256(sum, 1));
        half = _mm_add_epi32(half, _mm_shuffle_epi32(half, 0x4e));
        half = _mm_add_epi32(half, _mm_shuffle_epi32(half, 0xb1));
        a->seen[item] = (uint32_t)_mm_cvtsi128_si32(half);
    }
}
