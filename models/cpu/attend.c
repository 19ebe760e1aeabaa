/* Attention of sequences with one new token, bf16, for AVX-512 with BF16: what plain_loops.h does, 16
 * positions at a time, 64 between two looks at the best score. Scores and weights are fp32; a row's result does not
 * depend on the other rows.
 */
#include "wide.h"

#ifdef WIDE_X86

enum { WIDEST = 256, TOGETHER = 4, STRETCH = 64 };

/* Scores of up to 16 positions for one query; -inf beyond `count`. */
INLINE WIDE __m512 scores(const bf16 *q, const bf16 *keys, int64_t count, int64_t dim, float scale) {
    __m512 sum[16];
#pragma GCC unroll 16
    for (int j = 0; j < 16; j++) sum[j] = _mm512_setzero_ps();
    for (int64_t i = 0; i < dim; i += 32) {
        const __m512bh part = (__m512bh)_mm512_loadu_si512(q + i);
#pragma GCC unroll 16
        for (int j = 0; j < 16; j++)
            sum[j] = _mm512_dpbf16_ps(sum[j], (__m512bh)_mm512_loadu_si512(keys + (j < count ? j : 0) * dim + i), part);
    }
    const __mmask16 held = (__mmask16)((1u << count) - 1);
    return _mm512_mask_mul_ps(_mm512_set1_ps(-INFINITY), held, sums16(sum), _mm512_set1_ps(scale));
}

/* sum [G][dim] += weight [G], STRETCH + 16 apart, x values [count][dim] */
INLINE WIDE void add_values(const int G, float *sum, const float *weight, const bf16 *values, int64_t count, int64_t dim) {
    for (int64_t i = 0; i < dim; i += 32) {
        __m512 low[TOGETHER], high[TOGETHER];
#pragma GCC unroll 4
        for (int g = 0; g < G; g++) low[g] = _mm512_loadu_ps(sum + g * dim + i), high[g] = _mm512_loadu_ps(sum + g * dim + i + 16);
        for (int64_t j = 0; j < count; j++) {
            const __m512 a = widen16(_mm256_loadu_si256((const __m256i *)(values + j * dim + i)));
            const __m512 b = widen16(_mm256_loadu_si256((const __m256i *)(values + j * dim + i + 16)));
#pragma GCC unroll 4
            for (int g = 0; g < G; g++) {
                const __m512 w = _mm512_set1_ps(weight[g * (STRETCH + 16) + j]);
                low[g] = _mm512_fmadd_ps(w, a, low[g]);
                high[g] = _mm512_fmadd_ps(w, b, high[g]);
            }
        }
#pragma GCC unroll 4
        for (int g = 0; g < G; g++) _mm512_storeu_ps(sum + g * dim + i, low[g]), _mm512_storeu_ps(sum + g * dim + i + 16, high[g]);
    }
}

/* Up to 16 positions from `at` on that lie together in one block: how many, and where they begin. */
INLINE int64_t piece(const struct attention *a, const int64_t *table, int64_t kv, int64_t at, int64_t end, int64_t *offset) {
    const int64_t block = at / a->block_size, inside = at % a->block_size, left = a->block_size - inside;
    const int64_t count = left < end - at ? left : end - at;
    *offset = ((table[block] * a->kv_heads + kv) * a->block_size + inside) * a->dim;
    return count < 16 ? count : 16;
}

/* Scores [count] become weights, best and total follow, sum [dim] shrinks to match. */
INLINE WIDE void soften(float *score, int64_t count, float *best, float *total, float *sum, int64_t dim) {
    __m512 s[STRETCH / 16], most = _mm512_set1_ps(*best), added = _mm512_setzero_ps();
    for (int i = 0; i < STRETCH / 16; i++) {
        const int64_t left = count - 16 * i;
        const __mmask16 held = left >= 16 ? 0xffff : left > 0 ? (__mmask16)((1u << left) - 1) : 0;
        s[i] = _mm512_mask_loadu_ps(_mm512_set1_ps(-INFINITY), held, score + 16 * i);
        most = _mm512_max_ps(most, s[i]);
    }
    const float peak = _mm512_reduce_max_ps(most);
    for (int i = 0; i < STRETCH / 16; i++) {
        const int64_t left = count - 16 * i;
        const __mmask16 held = left >= 16 ? 0xffff : left > 0 ? (__mmask16)((1u << left) - 1) : 0;
        const __m512 w = _mm512_maskz_mov_ps(held, exp16(_mm512_sub_ps(s[i], _mm512_set1_ps(peak))));
        added = _mm512_add_ps(added, w);
        _mm512_storeu_ps(score + 16 * i, w);
    }
    if (peak > *best && *total != 0) {
        const float shrink = expf(*best - peak);
        *total *= shrink;
        for (int64_t i = 0; i < dim; i++) sum[i] *= shrink;
    }
    *best = peak;
    *total += _mm512_reduce_add_ps(added);
}

/* Up to TOGETHER queries of one KV head over its whole context. q [G][dim], sum [G][dim]: zeros at first. A head's
 * positions are scattered over the blocks, where no prefetcher of the core's finds them: each piece asks for the one a
 * stretch further on. */
INLINE WIDE void context(const int G, const struct attention *a, const bf16 *q, float *sum, bf16 *out, const int64_t *table,
                         int64_t kv, int64_t length, const float *sinks) {
    float best[TOGETHER], total[TOGETHER], weight[TOGETHER * (STRETCH + 16)];
    int64_t offset[STRETCH], ahead;
    for (int g = 0; g < G; g++) best[g] = -INFINITY, total[g] = 0;
    const int64_t dim = a->dim, start = a->window > 0 && length > a->window ? length - a->window : 0;
    const bf16 *keys = a->keys, *values = a->values;
    for (int64_t at = start, end; at < length; at = end) {
        end = length - at < STRETCH ? length : at + STRETCH;
        for (int64_t p = at, pieces = 0, count; p < end; p += count, pieces++) {
            count = piece(a, table, kv, p, end, &offset[pieces]);
            if (p + STRETCH < length) {
                const int64_t size = piece(a, table, kv, p + STRETCH, length, &ahead) * dim;
                for (int64_t i = 0; i < size; i += 32) {
                    _mm_prefetch(keys + ahead + i, _MM_HINT_T1);
                    _mm_prefetch(values + ahead + i, _MM_HINT_T1);
                }
            }
#pragma GCC unroll 4
            for (int g = 0; g < G; g++)
                _mm512_storeu_ps(weight + g * (STRETCH + 16) + (p - at), scores(q + g * dim, keys + offset[pieces], count, dim, a->scale));
        }
#pragma GCC unroll 4
        for (int g = 0; g < G; g++) soften(weight + g * (STRETCH + 16), end - at, &best[g], &total[g], sum + g * dim, dim);
        for (int64_t p = at, pieces = 0, count; p < end; p += count, pieces++) {
            count = piece(a, table, kv, p, end, &offset[pieces]);
            add_values(G, sum, weight + (p - at), values + offset[pieces], count, dim);
        }
    }
    for (int g = 0; g < G; g++) {
        if (sinks) total[g] += expf(sinks[g] - best[g]);
        for (int64_t i = 0; i < dim; i++) out[g * dim + i] = narrow(sum[g * dim + i] / total[g]);
    }
}

#define OF(G) \
    case G: context(G, a, q, sum, to, table, kv, length, a->sinks ? a->sinks + kv * group + first : NULL); break;
WIDE static void attend_job(const struct attention *a, int64_t row, int64_t kv) {
    const int64_t dim = a->dim, group = a->heads / a->kv_heads, width = (a->heads + 2 * a->kv_heads) * dim;
    const bf16 *line = (const bf16 *)a->qkv + row * width, *own_key = line + (a->heads + kv) * dim;
    const float *cos = a->cos + row * (a->rotary / 2), *sin = a->sin + row * (a->rotary / 2);
    const int64_t length = a->length[row], at = length - 1, *table = a->table + row * a->table_stride;
    const int64_t slot = ((table[at / a->block_size] * a->kv_heads + kv) * a->block_size + at % a->block_size) * dim;
    bf16 *out = (bf16 *)a->out + (row * a->heads + kv * group) * dim, q[TOGETHER * WIDEST];
    float sum[TOGETHER * WIDEST];
    if (a->stage != 2) {
        wide_head((bf16 *)a->keys + slot, own_key, a->k_norm, cos, sin, dim, a->rotary, a->eps);
        memcpy((bf16 *)a->values + slot, own_key + a->kv_heads * dim, sizeof(bf16) * (size_t)dim);
    }
    if (a->stage == 1) return;
    for (int64_t first = 0; first < group; first += TOGETHER) {
        const int64_t count = group - first < TOGETHER ? group - first : TOGETHER;
        for (int64_t g = 0; g < count; g++)
            wide_head(q + g * dim, line + (kv * group + first + g) * dim, a->q_norm, cos, sin, dim, a->rotary, a->eps);
        memset(sum, 0, sizeof(float) * (size_t)(count * dim));
        bf16 *to = out + first * dim;
        switch (count) { OF(1) OF(2) OF(3) OF(4) }
    }
}

int kernels_wide_attention(const struct attention *a, int64_t from, int64_t to) {
    if (a->dim % 32 || a->dim > WIDEST || kernels_tier < AVX512_BF16) return 0;
    for (int64_t job = from; job < to; job++) attend_job(a, job / a->kv_heads, job % a->kv_heads);
    return 1;
}
#else
int kernels_wide_attention(const struct attention *a, int64_t from, int64_t to) {
    (void)a, (void)from, (void)to;
    return 0;
}
#endif
