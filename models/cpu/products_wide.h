/* What becomes of a product's sums with AVX-512 BF16: bias, gate, the tree of leaves. Shared by products_dot.c and
 * products_tiles.c.
 */
#include "wide.h"

#ifdef WIDE_X86

/* Of a block. */
enum { ROWS = 32 };

INLINE WIDE __m512 silu16(__m512 v, __m512 alpha) {
    return _mm512_div_ps(v, _mm512_add_ps(_mm512_set1_ps(1.f), exp16(_mm512_sub_ps(_mm512_setzero_ps(), _mm512_mul_ps(alpha, v)))));
}

INLINE WIDE void store16(bf16 *to, __m512 v, int64_t left) {
    const __m256i out = narrow16(v);
    if (left >= 16)
        _mm256_storeu_si256((__m256i *)to, out);
    else if (left > 0)
        _mm256_mask_storeu_epi16(to, (__mmask16)((1u << left) - 1), out);
}

INLINE WIDE __m512 bias16(const bf16 *bias, int64_t left) {
    if (!bias || left <= 0) return _mm512_setzero_ps();
    return widen16(left >= 16 ? _mm256_loadu_si256((const __m256i *)bias)
                              : _mm256_maskz_loadu_epi16((__mmask16)((1u << left) - 1), bias));
}

/* What T tokens (a constant) of one block of rows are once they are summed: bias, gate, out to y, `stride` apart. */
INLINE WIDE void finish(const int T, const struct product *p, const bf16 *bias, const __m512 *low, const __m512 *high, bf16 *y,
                        int64_t stride, int64_t block) {
    const int64_t first = block * (p->gated ? 16 : ROWS), left = p->outputs - first;
    if (bias) bias += first;
    const __m512 low_bias = bias16(bias, left);
    if (p->gated) {
        const __m512 high_bias = bias16(bias ? bias + p->outputs : NULL, left);
#pragma GCC unroll 12
        for (int t = 0; t < T; t++) {
            __m512 v = rounded16(_mm512_add_ps(low[t], low_bias)), up = rounded16(_mm512_add_ps(high[t], high_bias));
            const __m512 one = _mm512_set1_ps(1.f), most = _mm512_set1_ps(p->limit);
            if (p->limit > 0) { /* NaN stays: it is the second operand */
                v = _mm512_min_ps(most, v);
                up = rounded16(_mm512_add_ps(_mm512_max_ps(_mm512_set1_ps(-p->limit), _mm512_min_ps(most, up)), one));
            }
            const __m512 gate = rounded16(silu16(v, p->limit > 0 ? _mm512_set1_ps(p->alpha) : one));
            store16(y + t * stride + first, _mm512_mul_ps(gate, up), left);
        }
    } else {
        const __m512 high_bias = bias16(bias ? bias + 16 : NULL, left - 16);
#pragma GCC unroll 12
        for (int t = 0; t < T; t++) {
            store16(y + t * stride + first, _mm512_add_ps(low[t], low_bias), left);
            store16(y + t * stride + first + 16, _mm512_add_ps(high[t], high_bias), left - 16);
        }
    }
}

/* A summed leaf of T tokens joins the nodes [TREE][2][T] that wait for it, and waits there itself. */
INLINE WIDE void join(const int T, const struct product *p, int leaf, __m512 *low, __m512 *high, __m512 *nodes, int64_t block) {
    const int64_t first = block * ROWS, left = p->outputs - first;
    const bf16 *bias = p->bias && leaf == 0 ? (const bf16 *)p->bias + first : NULL;
    const __m512 low_bias = bias16(bias, left), high_bias = bias16(bias ? bias + 16 : NULL, left - 16), factor = _mm512_set1_ps(p->factor);
#pragma GCC unroll 12
    for (int t = 0; t < T; t++) {
        low[t] = rounded16(_mm512_mul_ps(_mm512_add_ps(low[t], low_bias), factor));
        high[t] = rounded16(_mm512_mul_ps(_mm512_add_ps(high[t], high_bias), factor));
    }
    for (; leaf & 1; leaf >>= 1, nodes += 2 * T)
#pragma GCC unroll 12
        for (int t = 0; t < T; t++) {
            low[t] = rounded16(_mm512_add_ps(nodes[t], low[t]));
            high[t] = rounded16(_mm512_add_ps(nodes[T + t], high[t]));
        }
#pragma GCC unroll 12
    for (int t = 0; t < T; t++) nodes[t] = low[t], nodes[T + t] = high[t];
}
#endif
