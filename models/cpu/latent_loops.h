/* One chunk of a context under attention over latents (latent.c), by FMA. Included once a tier, behind plain_loops.h; FLOATS fp32
 * values are a vector. A row's query is a lane: of a strip's queries, packed [width][LATENT_LANES], and MOST positions, each read
 * once for all of them, scores come as a product's sums do, and so do outputs, of MOST rows and two vectors of columns.
 */
#include "kernels.h"

enum { LATENT_LANES = 2 * FLOATS, LATENT_MOST = FLOATS == 16 ? 12 : FLOATS == 8 ? 6 : 4 };

/* How many of what is left go together: instances are compiled for these. */
INLINE int64_t latent_step(int64_t left, int64_t most) { return left >= most ? most : left >= 8 ? 8 : left >= 4 ? 4 : left >= 2 ? 2 : 1; }

#if FLOATS == 16
#define LATENT_EACH(CASE) CASE(1) CASE(2) CASE(4) CASE(8) CASE(12)
#elif FLOATS == 8
#define LATENT_EACH(CASE) CASE(1) CASE(2) CASE(4) CASE(6)
#else
#define LATENT_EACH(CASE) CASE(1) CASE(2) CASE(4)
#endif

/* Scores [T][LATENT_LANES] of T positions x [T][width] (a constant) for V vectors (a constant) of queries. */
INLINE TARGET void latent_scores(const int V, const int T, const float *q, const float *x, int64_t width, float *scores) {
    plain sum[LATENT_MOST * 2];
#pragma GCC unroll 24
    for (int n = 0; n < T * V; n++) sum[n] = (plain){0};
    for (int64_t i = 0; i < width; i++) {
        plain query[2];
#pragma GCC unroll 2
        for (int v = 0; v < V; v++) query[v] = plain_load(FP32, q, i * LATENT_LANES + v * FLOATS);
#pragma GCC unroll 12
        for (int t = 0; t < T; t++) {
            const plain value = plain_all(x[t * width + i]);
#pragma GCC unroll 2
            for (int v = 0; v < V; v++) sum[t * V + v] = plain_add(sum[t * V + v], query[v], value);
        }
    }
#pragma GCC unroll 24
    for (int n = 0; n < T * V; n++) memcpy(scores + n / V * LATENT_LANES + n % V * FLOATS, sum + n, sizeof sum[n]);
}

#define LATENT_SCORES(T) \
    case T: rows <= FLOATS ? latent_scores(1, T, q, x, width, scores) : latent_scores(2, T, q, x, width, scores); break;
TARGET __attribute__((noinline)) static void latent_score_some(int64_t rows, int64_t count, const float *q, const float *x, int64_t width,
                                                               float *scores) {
    switch (count) { LATENT_EACH(LATENT_SCORES) }
}

/* Outputs of T rows (a constant), rank apart: the sums of weights, LATENT_LANES apart, x latents. */
INLINE TARGET void latent_sums(const int type, const int T, const float *const *weight, const struct latent_chunk *c, float *out) {
    int64_t at = 0;
    for (; at + 2 * FLOATS <= c->rank; at += 2 * FLOATS) {
        plain low[LATENT_MOST], high[LATENT_MOST];
#pragma GCC unroll 12
        for (int t = 0; t < T; t++) low[t] = high[t] = (plain){0};
        for (int64_t j = 0; j < c->count; j++) {
            const plain a = plain_load(type, c->at[j], at), b = plain_load(type, c->at[j], at + FLOATS);
#pragma GCC unroll 12
            for (int t = 0; t < T; t++) {
                const plain w = plain_all(weight[t][j * LATENT_LANES]);
                low[t] = plain_add(low[t], w, a);
                high[t] = plain_add(high[t], w, b);
            }
        }
#pragma GCC unroll 12
        for (int t = 0; t < T; t++) {
            memcpy(out + t * c->rank + at, low + t, sizeof low[t]);
            memcpy(out + t * c->rank + at + FLOATS, high + t, sizeof high[t]);
        }
    }
    for (int t = 0; t < T; t++)
        for (int64_t i = at; i < c->rank; i++) {
            float sum = 0;
            for (int64_t j = 0; j < c->count; j++) sum += weight[t][j * LATENT_LANES] * read_one(type, c->at[j], i);
            out[t * c->rank + i] = sum;
        }
}

/* The scores [count][LATENT_LANES] of a vector of rows become weights; those that see fewer positions have zeros behind them. */
TARGET __attribute__((noinline)) static void latent_weigh(const struct latent_chunk *c, const int32_t *seen, float *scores, float *best, float *total) {
    plain most = plain_all(LATENT_NONE), added = (plain){0};
    plain_bits limit;
    memcpy(&limit, seen, sizeof limit);
    for (int64_t j = 0; j < c->count; j++) {
        const plain s = plain_load(FP32, scores, j * LATENT_LANES) * c->scale;
        const plain_bits sees = (plain_bits)((uint32_t)j - (plain_bits){0} < limit);
        const plain shown = (plain)((sees & (plain_bits)s) | (~sees & (plain_bits)plain_all(LATENT_NONE)));
        most = plain_most(most, shown);
        memcpy(scores + j * LATENT_LANES, &s, sizeof s);
    }
    for (int64_t j = 0; j < c->count; j++) {
        const plain_bits sees = (plain_bits)((uint32_t)j - (plain_bits){0} < limit);
        const plain w = (plain)(sees & (plain_bits)plain_exp(plain_load(FP32, scores, j * LATENT_LANES) - most));
        added += w;
        memcpy(scores + j * LATENT_LANES, &w, sizeof w);
    }
    memcpy(best, &most, sizeof most);
    memcpy(total, &added, sizeof added);
}

/* The queries, rotated, as lanes [groups][width][LATENT_LANES]; zeros where a group has no more rows. */
INLINE TARGET void latent_queries(const int type, const struct latent_chunk *c, float *q, int64_t groups) {
    const int64_t width = c->rank + c->rotary;
    float row[LATENT_WIDEST];
    memset(q, 0, sizeof *q * (size_t)(groups * width * LATENT_LANES));
    for (int64_t r = 0; r < c->rows; r++) {
        for (int64_t i = 0; i < c->rank; i++) row[i] = read_one(type, c->q[r], i);
        rotate_head(type, row + c->rank, (const char *)c->q[r] + (size_t)c->rank * size_of(type), NULL, c->cos[r], c->sin[r], c->rotary,
                    c->rotary, 0.f);
        float *to = q + r / LATENT_LANES * width * LATENT_LANES + r % LATENT_LANES;
        for (int64_t i = 0; i < width; i++) to[i * LATENT_LANES] = row[i];
    }
}

/* Positions [from, from + count) in fp32 [count][width]; asks for those that follow. */
INLINE TARGET void latent_widen(const int type, const struct latent_chunk *c, int64_t from, int64_t count, float *x) {
    const int64_t width = c->rank + c->rotary;
    for (int64_t j = from; j < from + count; j++, x += width) {
        const char *next = c->at[j + LATENT_MOST < c->count ? j + LATENT_MOST : c->count];
        for (size_t b = 0; b < (size_t)width * size_of(type); b += CACHE_LINE) __builtin_prefetch(next + b);
        int64_t i = 0;
        for (; i + FLOATS <= width; i += FLOATS) {
            const plain v = plain_load(type, c->at[j], i);
            memcpy(x + i, &v, sizeof v);
        }
        for (; i < width; i++) x[i] = read_one(type, c->at[j], i);
    }
}

#define LATENT_SUMS(T) \
    case T: latent_sums(type, T, weight, c, c->sum + first * c->rank); break;
INLINE TARGET void latent_chunk_of(const int type, const struct latent_chunk *c) {
    const int64_t width = c->rank + c->rotary, groups = (c->rows + LATENT_LANES - 1) / LATENT_LANES, all = c->count * LATENT_LANES;
    float *const q = c->space, *const scores = q + groups * width * LATENT_LANES, *const x = scores + groups * all;
    latent_queries(type, c, q, groups);
    for (int64_t from = 0, count; from < c->count; from += count) {
        count = latent_step(c->count - from, LATENT_MOST);
        latent_widen(type, c, from, count, x);
        for (int64_t g = 0; g < groups; g++)
            latent_score_some(c->rows - g * LATENT_LANES, count, q + g * width * LATENT_LANES, x, width, scores + g * all + from * LATENT_LANES);
    }
    for (int64_t r = 0; r < c->rows; r += FLOATS)
        latent_weigh(c, c->seen + r, scores + r / LATENT_LANES * all + r % LATENT_LANES, c->best + r, c->total + r);
    for (int64_t first = 0, rows; first < c->rows; first += rows) {
        const float *weight[LATENT_MOST];
        rows = latent_step(c->rows - first, LATENT_MOST);
        for (int64_t t = 0; t < rows; t++) weight[t] = scores + (first + t) / LATENT_LANES * all + (first + t) % LATENT_LANES;
        switch (rows) { LATENT_EACH(LATENT_SUMS) }
    }
}

TARGET static void latent_chunk(int type, const struct latent_chunk *c) {
    if (type == FP32)
        latent_chunk_of(FP32, c);
    else if (type == BF16)
        latent_chunk_of(BF16, c);
    else
        latent_chunk_of(FP16, c);
}
