/* The choice of positions under sparse attention: for each token the `topk` positions of its sequence up to itself with the highest sums
 * over heads of weight x relu(query . key), in fp32; of equal sums the lower position comes first.
 *
 * A job is a token's part in CHUNK positions, so that a single token is as many jobs as it has chunks. Then each token's choice is
 * one: the lowest chosen sum is found digit by digit, and the positions are written in ascending order. A token's choice depends
 * neither on the other tokens nor on the number of threads. Memory: tokens are computed in waves of at most `space` bytes.
 */
#include "kernels.h"

enum { CHUNK = 1024, LANES = 32, INDEX_WIDEST = 1024, DIGIT = 11, BINS = 1 << DIGIT };

struct index {
    int32_t *chosen;       /* [tokens, topk], ascending, then -1 */
    int64_t *digest;       /* [tokens] */
    const void *q;         /* [tokens, heads, dim], rotated */
    const float *weight;   /* [tokens, heads] */
    const void *keys;      /* [blocks, block_size, dim], those of the step stored */
    const int64_t *table;  /* [sequences, table_stride] */
    const int64_t *start;  /* [sequences + 1]: each one's first token */
    const int64_t *length; /* [sequences], the new tokens included */
    int64_t sequences, heads, dim, topk, block_size, table_stride, space;
    int32_t type, threads;
};

static int64_t lanes_of(const struct index *x) { return (x->heads + LANES - 1) / LANES * LANES; }

#define TARGET
#define FLOATS 4
#define NAME(x) plain_##x
#include "index_loops.h"
#ifdef WIDE_X86
#define TARGET __attribute__((target("avx2,fma")))
#define FLOATS 8
#define NAME(x) avx2_##x
#include "index_loops.h"
#define TARGET __attribute__((target("avx512f,avx512bw,avx512vl,avx2,fma")))
#define FLOATS 16
#define NAME(x) avx512_##x
#include "index_loops.h"
#endif

struct wave {
    const struct index *x;
    void (*scores)(const struct index *x, const float *q, const float *weight, const void *const *at, int64_t count, float *out);
    const int64_t *sequence, *seen; /* [tokens]: whose, and how many positions it sees */
    int64_t from, to, most, next;   /* tokens of this wave; positions of the longest sequence */
    float *q, *weight, *score;      /* [tokens of a wave]: [dim][lanes], [lanes], [most] */
    int32_t *bins;                  /* [threads][BINS] */
};

/* Queries with heads as lanes; zeros behind the last one. */
static void pack_body(void *args, int thread, int threads) {
    struct wave *w = args;
    const struct index *x = w->x;
    const int64_t lanes = lanes_of(x), count = w->to - w->from;
    for (int64_t t = count * thread / threads; t < count * (thread + 1) / threads; t++) {
        float *q = w->q + t * x->dim * lanes, *weight = w->weight + t * lanes;
        memset(q, 0, sizeof(float) * (size_t)(x->dim * lanes));
        memset(weight, 0, sizeof(float) * (size_t)lanes);
        for (int64_t h = 0; h < x->heads; h++) {
            weight[h] = x->weight[(w->from + t) * x->heads + h];
            for (int64_t i = 0; i < x->dim; i++) q[i * lanes + h] = read_one(x->type, x->q, ((w->from + t) * x->heads + h) * x->dim + i);
        }
    }
}

static void score_body(void *args, int thread, int threads) {
    (void)thread, (void)threads;
    struct wave *w = args;
    const struct index *x = w->x;
    const int64_t chunks = (w->most + CHUNK - 1) / CHUNK, lanes = lanes_of(x), bytes = x->dim * (int64_t)size_of(x->type);
    const void *at[CHUNK];
    for (int64_t job; (job = __atomic_fetch_add(&w->next, 1, __ATOMIC_RELAXED)) < chunks * (w->to - w->from);) {
        const int64_t t = job / chunks, base = job % chunks * CHUNK, left = w->seen[w->from + t] - base;
        const int64_t *table = x->table + w->sequence[w->from + t] * x->table_stride;
        if (left <= 0 || w->seen[w->from + t] <= x->topk) continue;
        const int64_t count = left < CHUNK ? left : CHUNK;
        for (int64_t j = 0; j < count; j++)
            at[j] = (const char *)x->keys + (table[(base + j) / x->block_size] * x->block_size + (base + j) % x->block_size) * bytes;
        w->scores(x, w->q + t * x->dim * lanes, w->weight + t * lanes, at, count, w->score + t * w->most + base);
    }
}

/* Ordered as the floats are; -0 and 0 are one. */
static uint32_t ordered(float v) {
    uint32_t bits;
    v += 0.0f;
    memcpy(&bits, &v, 4);
    return bits & 0x80000000u ? ~bits : bits | 0x80000000u;
}

/* The lowest sum that is chosen, of `count` > topk; *ties: how many of those equal to it are chosen. */
static uint32_t lowest(const float *score, int64_t count, int64_t topk, int32_t *bins, int64_t *ties) {
    uint32_t prefix = 0, mask = 0;
    int64_t left = topk;
    for (int shift = 32 - DIGIT; mask != 0xffffffffu; shift = shift > DIGIT ? shift - DIGIT : 0) {
        const uint32_t digits = ~mask >> shift;
        memset(bins, 0, sizeof *bins * BINS);
        for (int64_t i = 0; i < count; i++) {
            const uint32_t key = ordered(score[i]);
            if ((key & mask) == prefix) bins[key >> shift & digits]++;
        }
        uint32_t digit = digits;
        for (; left > bins[digit]; digit--) left -= bins[digit];
        prefix |= digit << shift, mask |= digits << shift;
    }
    *ties = left;
    return prefix;
}

static void choose_body(void *args, int thread, int threads) {
    const struct wave *w = args;
    const struct index *x = w->x;
    const int64_t count = w->to - w->from;
    const uint64_t odd = 0x1E3779B97F4A7C15u; /* see models/latent.py */
    for (int64_t t = count * thread / threads; t < count * (thread + 1) / threads; t++) {
        const int64_t token = w->from + t, seen = w->seen[token];
        const float *score = w->score + t * w->most;
        int32_t *chosen = x->chosen + token * x->topk;
        int64_t ties = 0, to = 0;
        uint64_t digest = 0;
        const uint32_t least = seen > x->topk ? lowest(score, seen, x->topk, w->bins + thread * BINS, &ties) : 0;
        for (int64_t i = 0; i < seen; i++) {
            const uint32_t key = seen > x->topk ? ordered(score[i]) : 1;
            if (key < least || (key == least && ties-- <= 0)) continue;
            const uint64_t mixed = (uint64_t)(i + 1) * odd;
            digest += (mixed ^ (uint64_t)((int64_t)mixed >> 29)) * odd;
            chosen[to++] = (int32_t)i;
        }
        while (to < x->topk) chosen[to++] = -1;
        x->digest[token] = (int64_t)digest;
    }
}

/* Returns 0, 1 if memory ran out. */
int kernels_index(const struct index *x) {
    struct wave w = {.x = x, .scores = plain_scores};
#ifdef WIDE_X86
    if (kernels_tier >= AVX2) w.scores = kernels_tier >= AVX512 ? avx512_scores : avx2_scores;
#endif
    const int64_t tokens = x->start[x->sequences], lanes = lanes_of(x);
    for (int64_t s = 0; s < x->sequences; s++) w.most = x->length[s] > w.most ? x->length[s] : w.most;
    const int64_t floats = (x->dim + 1) * lanes + w.most, fit = x->space / (floats * (int64_t)sizeof(float)), most = fit > 1 ? fit : 1;
    const int64_t together = tokens < most ? tokens : most;
    int64_t *const owner = malloc(sizeof(int64_t) * (size_t)(2 * tokens + 1)), *const seen = owner + tokens;
    float *const room = malloc(sizeof(float) * (size_t)(together * floats + 1));
    int32_t *const bins = malloc(sizeof(int32_t) * BINS * (size_t)x->threads);
    const int failed = !owner || !room || !bins;
    if (!failed) {
        for (int64_t s = 0; s < x->sequences; s++)
            for (int64_t t = x->start[s]; t < x->start[s + 1]; t++) owner[t] = s, seen[t] = x->length[s] - (x->start[s + 1] - t) + 1;
        w.sequence = owner, w.seen = seen, w.bins = bins, w.q = room, w.weight = room + together * x->dim * lanes;
        w.score = w.weight + together * lanes;
        for (w.from = 0; w.from < tokens; w.from = w.to) {
            w.to = w.from + together < tokens ? w.from + together : tokens, w.next = 0;
            kernels_parallel(pack_body, &w, x->threads);
            kernels_parallel(score_body, &w, x->threads);
            kernels_parallel(choose_body, &w, x->threads);
        }
    }
    free(owner);
    free(room);
    free(bins);
    return failed;
}
