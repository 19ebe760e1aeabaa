/* One chunk of a context under attention over latents (latent.c), bf16, by the dot products of AVX-512 BF16: what latent_loops.h
 * does, with pairs of values where that has one, and with weights rounded to bf16.
 */
#include "wide.h"

#ifdef WIDE_X86

enum { LANES = 32, MOST = 12 };

/* How many of what is left go together: instances are compiled for these. */
#define EACH(CASE) CASE(1) CASE(2) CASE(4) CASE(8) CASE(12)
INLINE int64_t step(int64_t left) { return left >= MOST && left != 16 ? MOST : left >= 8 ? 8 : left >= 4 ? 4 : left >= 2 ? 2 : 1; }

/* Scores [T][LANES] of T positions (a constant) for V vectors (a constant) of queries, packed [width / 2][LANES][2]. Asks for the
 * lines of the `next` ones. */
INLINE WIDE void scores(const int V, const int T, const bf16 *q, const bf16 *const *at, const bf16 *const *next, int64_t width, float *to) {
    __m512 sum[2 * MOST];
#pragma GCC unroll 24
    for (int n = 0; n < V * T; n++) sum[n] = _mm512_setzero_ps();
    for (int64_t i = 0; i < width; i += 2, q += 2 * LANES) {
        if (i % 32 == 0)
#pragma GCC unroll 12
            for (int t = 0; t < T; t++) _mm_prefetch(next[t] + i, _MM_HINT_T0);
        __m512bh query[2];
#pragma GCC unroll 2
        for (int v = 0; v < V; v++) query[v] = (__m512bh)_mm512_loadu_si512(q + 32 * v);
#pragma GCC unroll 12
        for (int t = 0; t < T; t++) {
            int32_t pair;
            memcpy(&pair, at[t] + i, 4);
            const __m512bh value = (__m512bh)_mm512_set1_epi32(pair);
#pragma GCC unroll 2
            for (int v = 0; v < V; v++) sum[t * V + v] = _mm512_dpbf16_ps(sum[t * V + v], query[v], value);
        }
    }
#pragma GCC unroll 24
    for (int n = 0; n < V * T; n++) _mm512_storeu_ps(to + n / V * LANES + n % V * 16, sum[n]);
}

/* The scores [count][LANES] of 16 rows become weights [(count + 1) / 2][LANES][2]; zeros behind what a row sees. */
INLINE WIDE void weigh(const struct latent_chunk *c, const int32_t *seen, float *score, int32_t *weight, float *best, float *total) {
    const __m512 scale = _mm512_set1_ps(c->scale);
    const __m512i limit = _mm512_loadu_si512(seen);
    __m512 most = _mm512_set1_ps(LATENT_NONE), added = _mm512_setzero_ps();
    for (int64_t j = 0; j < c->count; j++) {
        const __m512 s = _mm512_mul_ps(_mm512_loadu_ps(score + j * LANES), scale);
        most = _mm512_mask_max_ps(most, _mm512_cmpgt_epi32_mask(limit, _mm512_set1_epi32((int)j)), most, s);
        _mm512_storeu_ps(score + j * LANES, s);
    }
    for (int64_t j = 0; j < c->count; j += 2) {
        __m512i word[2];
        for (int k = 0; k < 2; k++) {
            const __mmask16 sees = _mm512_cmpgt_epi32_mask(limit, _mm512_set1_epi32((int)j + k));
            const __m512 w = _mm512_maskz_mov_ps(sees, exp16(_mm512_sub_ps(_mm512_loadu_ps(score + (j + k) * LANES), most)));
            added = _mm512_add_ps(added, w);
            word[k] = _mm512_cvtepu16_epi32(narrow16(w));
        }
        _mm512_storeu_si512(weight + j / 2 * LANES, _mm512_or_si512(word[0], _mm512_slli_epi32(word[1], 16)));
    }
    _mm512_storeu_ps(best, most);
    _mm512_storeu_ps(total, added);
}

/* T rows' sums (a constant) of 32 columns from `at` on: weights, LANES apart, x latents. */
INLINE WIDE void sums(const int T, const struct latent_chunk *c, const int32_t *const *weight, float *sum, int64_t at) {
    const __m512i order = _mm512_set_epi16(47, 15, 46, 14, 45, 13, 44, 12, 43, 11, 42, 10, 41, 9, 40, 8, 39, 7, 38, 6, 37, 5, 36, 4, 35,
                                           3, 34, 2, 33, 1, 32, 0);
    const __m512i behind = _mm512_add_epi16(order, _mm512_set1_epi16(16));
    __m512 low[MOST], high[MOST];
#pragma GCC unroll 12
    for (int t = 0; t < T; t++) low[t] = high[t] = _mm512_setzero_ps();
    for (int64_t j = 0; j < c->count; j += 2) {
        const __m512i one = _mm512_loadu_si512((const bf16 *)c->at[j] + at), two = _mm512_loadu_si512((const bf16 *)c->at[j + 1] + at);
        const __m512bh a = (__m512bh)_mm512_permutex2var_epi16(one, order, two), b = (__m512bh)_mm512_permutex2var_epi16(one, behind, two);
#pragma GCC unroll 12
        for (int t = 0; t < T; t++) {
            const __m512bh w = (__m512bh)_mm512_set1_epi32(weight[t][j / 2 * LANES]);
            low[t] = _mm512_dpbf16_ps(low[t], a, w);
            high[t] = _mm512_dpbf16_ps(high[t], b, w);
        }
    }
#pragma GCC unroll 12
    for (int t = 0; t < T; t++) _mm512_storeu_ps(sum + t * c->rank + at, low[t]), _mm512_storeu_ps(sum + t * c->rank + at + 16, high[t]);
}

/* The queries, rotated, as lanes [groups][width / 2][LANES][2]; zeros where a group has no more rows. */
INLINE WIDE void pack(const struct latent_chunk *c, int32_t *q, int64_t groups) {
    const int64_t pairs = (c->rank + c->rotary) / 2;
    bf16 row[LATENT_WIDEST];
    memset(q, 0, sizeof *q * (size_t)(groups * pairs * LANES));
    for (int64_t r = 0; r < c->rows; r++) {
        memcpy(row, c->q[r], sizeof(bf16) * (size_t)c->rank);
        wide_head(row + c->rank, (const bf16 *)c->q[r] + c->rank, NULL, c->cos[r], c->sin[r], c->rotary, c->rotary, 0.f);
        int32_t *to = q + r / LANES * pairs * LANES + r % LANES;
        for (int64_t i = 0; i < pairs; i++) memcpy(to + i * LANES, row + 2 * i, 4);
    }
}

#define SCORES(T) \
    case T: narrow ? scores(1, T, group, at, next, width, to) : scores(2, T, group, at, next, width, to); break;
WIDE static void score_chunk(const struct latent_chunk *c, const bf16 *q, float *score, int64_t groups) {
    const int64_t width = c->rank + c->rotary;
    for (int64_t from = 0, count; from < c->count; from += count) {
        const bf16 *at[MOST], *next[MOST];
        count = step(c->count - from);
        for (int64_t t = 0; t < count; t++)
            at[t] = c->at[from + t], next[t] = c->at[from + t + MOST < c->count ? from + t + MOST : c->count];
        for (int64_t g = 0; g < groups; g++) {
            const bf16 *group = q + g * width * LANES;
            float *to = score + (g * (c->count + 1) + from) * LANES;
            const int narrow = c->rows - g * LANES <= 16;
            switch (count) { EACH(SCORES) }
        }
    }
}

#define SUMS(T) \
    case T: for (int64_t i = 0; i < c->rank; i += 32) sums(T, c, weight, c->sum + first * c->rank, i); break;
WIDE static void sum_chunk(const struct latent_chunk *c, const int32_t *weights) {
    const int64_t pairs = (c->count + 1) / 2;
    for (int64_t first = 0, rows; first < c->rows; first += rows) {
        const int32_t *weight[MOST];
        rows = step(c->rows - first);
        for (int64_t t = 0; t < rows; t++) weight[t] = weights + (first + t) / LANES * pairs * LANES + (first + t) % LANES;
        switch (rows) { EACH(SUMS) }
    }
}

WIDE static void chunk(const struct latent_chunk *c) {
    const int64_t width = c->rank + c->rotary, groups = (c->rows + LANES - 1) / LANES, pairs = (c->count + 1) / 2;
    int32_t *const q = (int32_t *)c->space, *const weight = q + groups * (width / 2) * LANES;
    float *const score = (float *)(weight + groups * pairs * LANES);
    pack(c, q, groups);
    score_chunk(c, (const bf16 *)q, score, groups);
    for (int64_t r = 0; r < c->rows; r += 16) {
        const int64_t group = r / LANES, lane = r % LANES;
        weigh(c, c->seen + r, score + group * (c->count + 1) * LANES + lane, weight + group * pairs * LANES + lane, c->best + r, c->total + r);
    }
    sum_chunk(c, weight);
}

int kernels_wide_latents(const struct latent_chunk *c) {
    if (kernels_tier < AVX512_BF16 || c->rank % 32 || c->rotary % 2) return 0;
    chunk(c);
    return 1;
}
#else
int kernels_wide_latents(const struct latent_chunk *c) {
    (void)c;
    return 0;
}
#endif
