/* CRC-32 (zlib's) by carry-less multiplication: 64 bytes a turn are folded to where they end up 512 bits further on, as
 * "Fast CRC Computation for Generic Polynomials Using PCLMULQDQ Instruction" (Intel, 2009) describes; the 64 bytes that
 * are left, and the tail, are divided bit by bit from a table. Constants are x^n mod P, bits reversed.
 */
#include "kernels.h"

#if defined(__x86_64__)
#include <immintrin.h>
#define FOLDS __attribute__((target("pclmul,sse4.1")))

static uint32_t table[256];

__attribute__((constructor)) static void fill_table(void) {
    for (uint32_t i = 0; i < 256; i++) {
        uint32_t value = i;
        for (int k = 0; k < 8; k++) value = value & 1 ? value >> 1 ^ 0xedb88320u : value >> 1;
        table[i] = value;
    }
}

static uint32_t by_table(uint32_t crc, const uint8_t *data, int64_t n) {
    for (int64_t i = 0; i < n; i++) crc = table[(crc ^ data[i]) & 0xff] ^ crc >> 8;
    return crc;
}

FOLDS static inline __m128i folded(__m128i v, __m128i by, const uint8_t *next) {
    const __m128i sum = _mm_xor_si128(_mm_clmulepi64_si128(v, by, 0x00), _mm_clmulepi64_si128(v, by, 0x11));
    return _mm_xor_si128(sum, _mm_loadu_si128((const __m128i *)next));
}

FOLDS static uint32_t by_folding(uint32_t crc, const uint8_t *data, int64_t n) {
    const __m128i by = _mm_set_epi64x(0x1c6e41596, 0x154442bd4); /* 512 bits on: x^(512 - 32), x^(512 + 32) */
    __m128i v[4];
    for (int k = 0; k < 4; k++) v[k] = _mm_loadu_si128((const __m128i *)(data + 16 * k));
    v[0] = _mm_xor_si128(v[0], _mm_cvtsi32_si128((int)crc));
    int64_t at = 64;
    for (; at + 64 <= n; at += 64)
        for (int k = 0; k < 4; k++) v[k] = folded(v[k], by, data + at + 16 * k);
    uint8_t left[64];
    for (int k = 0; k < 4; k++) _mm_storeu_si128((__m128i *)(left + 16 * k), v[k]);
    return by_table(by_table(0, left, 64), data + at, n - at);
}

int kernels_has_crc32(void) {
    __builtin_cpu_init();
    return __builtin_cpu_supports("pclmul") && __builtin_cpu_supports("sse4.1");
}

/* `crc` is that of what came before, 0 at the beginning. */
uint32_t kernels_crc32(uint32_t crc, const void *data, int64_t n) {
    return ~(n < 128 ? by_table(~crc, data, n) : by_folding(~crc, data, n));
}
#else
int kernels_has_crc32(void) { return 0; }
#endif
