/* Vectors of FLOATS (8: AVX2 with FMA and F16C, 16: AVX-512 F, BW and VL) fp32 values, 16-bit floats at the edges. Included once a
 * source file, with FLOATS defined.
 */
#include <immintrin.h>

#include "kernels.h"

#if FLOATS == 16
#define TARGET __attribute__((target("avx512f,avx512bw,avx512vl,avx512dq,avx2,fma,f16c")))
#define OF(name) _mm512_##name
#define OF_INT(name) _mm512_##name##_si512
typedef __m512 vector;
typedef __m512i words;  /* as many 32-bit integers */
typedef __m256i halves; /* 16-bit ones */
#define LOAD_HALVES(p) _mm256_loadu_si256((const __m256i *)(p))
#define STORE_HALVES(p, v) _mm256_storeu_si256((__m256i *)(p), v)
#else
#define TARGET __attribute__((target("avx2,fma,f16c")))
#define OF(name) _mm256_##name
#define OF_INT(name) _mm256_##name##_si256
typedef __m256 vector;
typedef __m256i words;
typedef __m128i halves;
#define LOAD_HALVES(p) _mm_loadu_si128((const __m128i *)(p))
#define STORE_HALVES(p, v) _mm_storeu_si128((__m128i *)(p), v)
#endif

INLINE TARGET vector as_vector(words v) { return (vector)v; }
INLINE TARGET words as_words(vector v) { return (words)v; }
INLINE TARGET vector all(float v) { return OF(set1_ps)(v); }

/* sum + a * b, rounded once. Left to itself, a compiler renames the sums of AVX2's 16 registers until some of them spill,
 * which halves a product's speed. */
INLINE TARGET vector add_product(vector sum, vector a, vector b) {
#if FLOATS == 16
    return _mm512_fmadd_ps(a, b, sum);
#else
    __asm__("vfmadd231ps %2, %1, %0" : "+x"(sum) : "x"(a), "x"(b));
    return sum;
#endif
}

INLINE TARGET words load_words(const void *p) {
    words v;
    memcpy(&v, p, sizeof v);
    return v;
}

INLINE TARGET vector widened(const int type, halves v) {
    return type == FP16 ? OF(cvtph_ps)(v) : as_vector(OF(slli_epi32)(OF(cvtepu16_epi32)(v), 16));
}

INLINE TARGET halves narrowed(const int type, vector v) { /* to nearest, ties to even; NaN stays NaN */
    if (type == FP16) return OF(cvtps_ph)(v, _MM_FROUND_TO_NEAREST_INT);
    const words bits = as_words(v), odd = OF_INT(and)(OF(srli_epi32)(bits, 16), OF(set1_epi32)(1));
    words upper = OF(srli_epi32)(OF(add_epi32)(bits, OF(add_epi32)(odd, OF(set1_epi32)(0x7fff))), 16);
#if FLOATS == 16
    upper = _mm512_mask_mov_epi32(upper, _mm512_cmp_ps_mask(v, v, _CMP_UNORD_Q), _mm512_set1_epi32(0x7fc0));
    return _mm512_cvtepi32_epi16(upper);
#else
    upper = _mm256_blendv_epi8(upper, _mm256_set1_epi32(0x7fc0), as_words(_mm256_cmp_ps(v, v, _CMP_UNORD_Q)));
    return _mm256_castsi256_si128(_mm256_permute4x64_epi64(_mm256_packus_epi32(upper, upper), 0xd8));
#endif
}

INLINE TARGET vector rounded_vector(const int type, vector v) { return widened(type, narrowed(type, v)); }

/* Up to a vector of a row, zeros behind it; and back. */
INLINE TARGET vector load_some(const int type, const void *row, int64_t at, int64_t left) {
    const uint16_t *from = (const uint16_t *)row + at;
    if (left >= FLOATS) return widened(type, LOAD_HALVES(from));
    uint16_t some[FLOATS] = {0};
    for (int64_t i = 0; i < left; i++) some[i] = from[i];
    return widened(type, LOAD_HALVES(some));
}

INLINE TARGET void store_some(const int type, void *row, int64_t at, vector v, int64_t left) {
    uint16_t *to = (uint16_t *)row + at, some[FLOATS];
    if (left >= FLOATS) {
        STORE_HALVES(to, narrowed(type, v));
        return;
    }
    STORE_HALVES(some, narrowed(type, v));
    for (int64_t i = 0; i < left; i++) to[i] = some[i];
}

INLINE TARGET float sum_of(vector v) {
    float each[FLOATS], sum = 0;
    memcpy(each, &v, sizeof v);
    for (int i = 0; i < FLOATS; i++) sum += each[i];
    return sum;
}

/* e^v within 2 ulp for -87 <= v <= 88, clamped to that; NaN stays. */
INLINE TARGET vector exp_vector(vector v) {
    const vector t = OF(min_ps)(all(88.f), OF(max_ps)(all(-87.f), v));
#if FLOATS == 16
    const vector n = _mm512_roundscale_ps(_mm512_mul_ps(t, all(1.44269504f)), 0);
#else
    const vector n = _mm256_round_ps(_mm256_mul_ps(t, all(1.44269504f)), _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
#endif
    const vector r = OF(fnmadd_ps)(n, all(-2.12194440e-4f), OF(fnmadd_ps)(n, all(0.693359375f), t));
    vector p = all(1.9875691500e-4f);
    p = OF(fmadd_ps)(p, r, all(1.3981999507e-3f));
    p = OF(fmadd_ps)(p, r, all(8.3334519073e-3f));
    p = OF(fmadd_ps)(p, r, all(4.1665795894e-2f));
    p = OF(fmadd_ps)(p, r, all(1.6666665459e-1f));
    p = OF(fmadd_ps)(p, r, all(5.0000001201e-1f));
    p = OF(add_ps)(OF(fmadd_ps)(OF(mul_ps)(p, r), r, r), all(1.f));
    return OF(mul_ps)(p, as_vector(OF(slli_epi32)(OF(add_epi32)(OF(cvtps_epi32)(n), OF(set1_epi32)(127)), 23)));
}
