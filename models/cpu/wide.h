/* AVX-512 BF16 helpers of products_dot.c, attend.c and attend_prompts.c: 16 floats at a time, bf16 at the edges. */
#ifndef LADDERTRON_WIDE_H
#define LADDERTRON_WIDE_H

#include "kernels.h"

#ifdef WIDE_X86
#include <immintrin.h>
#define WIDE __attribute__((target("avx512f,avx512bw,avx512vl,avx512bf16")))
#define WIDE_INT8 __attribute__((target("avx512f,avx512bw,avx512vl,avx512bf16,avx512vbmi")))

INLINE WIDE __m512 widen16(__m256i v) { return _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(v), 16)); }

INLINE WIDE __m256i narrow16(__m512 v) { return (__m256i)_mm512_cvtneps_pbh(v); }

INLINE WIDE __m512 rounded16(__m512 v) { return widen16(narrow16(v)); }

/* e^v within 2 ulp for |v| <= 100, clamped to that; NaN stays. */
INLINE WIDE __m512 exp16(__m512 v) {
    __m512 t = _mm512_min_ps(_mm512_set1_ps(100.f), _mm512_max_ps(_mm512_set1_ps(-100.f), v));
    __m512 n = _mm512_roundscale_ps(_mm512_mul_ps(t, _mm512_set1_ps(1.44269504f)), 0);
    __m512 r = _mm512_fnmadd_ps(n, _mm512_set1_ps(-2.12194440e-4f), _mm512_fnmadd_ps(n, _mm512_set1_ps(0.693359375f), t));
    __m512 p = _mm512_set1_ps(1.9875691500e-4f);
    p = _mm512_fmadd_ps(p, r, _mm512_set1_ps(1.3981999507e-3f));
    p = _mm512_fmadd_ps(p, r, _mm512_set1_ps(8.3334519073e-3f));
    p = _mm512_fmadd_ps(p, r, _mm512_set1_ps(4.1665795894e-2f));
    p = _mm512_fmadd_ps(p, r, _mm512_set1_ps(1.6666665459e-1f));
    p = _mm512_fmadd_ps(p, r, _mm512_set1_ps(5.0000001201e-1f));
    p = _mm512_add_ps(_mm512_fmadd_ps(_mm512_mul_ps(p, r), r, r), _mm512_set1_ps(1.f));
    return _mm512_scalef_ps(p, n);
}

/* The sums of 16 vectors, as one. Overwrites them. */
INLINE WIDE __m512 sums16(__m512 *v) {
    for (int i = 0; i < 8; i++) v[i] = _mm512_add_ps(_mm512_unpacklo_ps(v[2 * i], v[2 * i + 1]), _mm512_unpackhi_ps(v[2 * i], v[2 * i + 1]));
    for (int i = 0; i < 4; i++) {
        const __m512d a = _mm512_castps_pd(v[2 * i]), b = _mm512_castps_pd(v[2 * i + 1]);
        v[i] = _mm512_add_ps(_mm512_castpd_ps(_mm512_unpacklo_pd(a, b)), _mm512_castpd_ps(_mm512_unpackhi_pd(a, b)));
    }
    for (int i = 0; i < 2; i++)
        v[i] = _mm512_add_ps(_mm512_shuffle_f32x4(v[2 * i], v[2 * i + 1], 0x88), _mm512_shuffle_f32x4(v[2 * i], v[2 * i + 1], 0xdd));
    return _mm512_add_ps(_mm512_shuffle_f32x4(v[0], v[1], 0x88), _mm512_shuffle_f32x4(v[0], v[1], 0xdd));
}

/* Adds the products of the inputs i and i + 1 of T tokens with the same two of 32 rows. */
INLINE WIDE void dot_pair(const int T, __m512 *low, __m512 *high, __m512bh a, __m512bh b, const bf16 *const *x, int64_t i) {
#pragma GCC unroll 12
    for (int t = 0; t < T; t++) {
        int32_t pair;
        memcpy(&pair, x[t] + i, 4);
        const __m512bh v = (__m512bh)_mm512_set1_epi32(pair);
        low[t] = _mm512_dpbf16_ps(low[t], a, v);
        high[t] = _mm512_dpbf16_ps(high[t], b, v);
    }
}

/* low, high [T] (a constant) += the inputs [from, to) of the rows x times 32 packed rows [to - from][32][2]. */
INLINE WIDE void dot_rows(const int T, __m512 *low, __m512 *high, const bf16 *packed, const bf16 *const *x, int64_t from, int64_t to) {
    for (int64_t i = from; i < to; i += 2, packed += 64) {
        const __m512bh a = (__m512bh)_mm512_loadu_si512(packed), b = (__m512bh)_mm512_loadu_si512(packed + 32);
        fetch_ahead(packed, 128);
        dot_pair(T, low, high, a, b, x, i);
    }
}

/* The same of x [T][inputs], `stride` apart. */
INLINE WIDE void dot_tile(const int T, __m512 *low, __m512 *high, const bf16 *packed, const bf16 *x, int64_t stride, int64_t inputs) {
    const bf16 *row[12];
#pragma GCC unroll 12
    for (int t = 0; t < T; t++) row[t] = x + t * stride;
    dot_rows(T, low, high, packed, row, 0, inputs);
}

/* Up to 16 values of a row, zeros behind them; and back. */
INLINE WIDE __m512 load_some(const bf16 *from, int64_t left) {
    return widen16(left >= 16 ? _mm256_loadu_si256((const __m256i *)from)
                              : _mm256_maskz_loadu_epi16((__mmask16)((1u << left) - 1), from));
}

INLINE WIDE void store_some(bf16 *to, __m512 v, int64_t left) {
    if (left >= 16)
        _mm256_storeu_si256((__m256i *)to, narrow16(v));
    else
        _mm256_mask_storeu_epi16(to, (__mmask16)((1u << left) - 1), narrow16(v));
}

/* RMS norm of a row: statistics in fp32, rounded before the weight, as kernels_rms_norm. */
INLINE WIDE void wide_norm(bf16 *out, const bf16 *x, const bf16 *weight, int64_t n, float eps) {
    __m512 sum[4];
    for (int k = 0; k < 4; k++) sum[k] = _mm512_setzero_ps();
    int64_t i = 0;
    for (; i + 64 <= n; i += 64)
        for (int k = 0; k < 4; k++) {
            const __m512 v = widen16(_mm256_loadu_si256((const __m256i *)(x + i + 16 * k)));
            sum[k] = _mm512_fmadd_ps(v, v, sum[k]);
        }
    for (; i < n; i += 16) {
        const __m512 v = load_some(x + i, n - i);
        sum[0] = _mm512_fmadd_ps(v, v, sum[0]);
    }
    const float all = _mm512_reduce_add_ps(_mm512_add_ps(_mm512_add_ps(sum[0], sum[1]), _mm512_add_ps(sum[2], sum[3])));
    const __m512 scale = _mm512_set1_ps(1.0f / sqrtf(all / (float)n + eps));
    for (i = 0; i < n; i += 16)
        store_some(out + i, _mm512_mul_ps(rounded16(_mm512_mul_ps(load_some(x + i, n - i), scale)), load_some(weight + i, n - i)), n - i);
}

/* One head: normed (norm may be NULL), its first `rotary` dimensions rotated. dim <= 256. As rotate_head of kernels.c. */
INLINE WIDE void wide_head(bf16 *to, const bf16 *from, const bf16 *norm, const float *cos, const float *sin, int64_t dim, int64_t rotary,
                           float eps) {
    bf16 normed[256];
    if (norm) {
        wide_norm(normed, from, norm, dim, eps);
        from = normed;
    }
    const int64_t half = rotary / 2;
    for (int64_t i = 0; i < half; i += 16) {
        const int64_t left = half - i;
        const __mmask16 held = left >= 16 ? 0xffff : (__mmask16)((1u << left) - 1);
        const __m512 a = load_some(from + i, left), b = load_some(from + half + i, left);
        const __m512 c = _mm512_maskz_loadu_ps(held, cos + i), s = _mm512_maskz_loadu_ps(held, sin + i);
        store_some(to + i, _mm512_sub_ps(_mm512_mul_ps(a, c), _mm512_mul_ps(b, s)), left);
        store_some(to + half + i, _mm512_add_ps(_mm512_mul_ps(b, c), _mm512_mul_ps(a, s)), left);
    }
    memcpy(to + 2 * half, from + 2 * half, sizeof(bf16) * (size_t)(dim - 2 * half));
}
#endif
#endif
