/* Attention of prompts (sequences with any number of new tokens) over paged keys and values, bf16, for AVX-512 with BF16.
 *
 * A job is a stretch of one sequence's new tokens and one KV head. It walks the context 64 positions at a time: packs
 * their keys and values as products.c packs weights, and both of attention's products are then that file's loop, 12 rows
 * (tokens times the head's queries) by 32. Scores and sums are fp32, weights are rounded to bf16. Stretches of context
 * begin at multiples of 64, so a token's result depends neither on its neighbours nor on how the prompt was chunked.
 */
#include "wide.h"

#ifdef WIDE_X86

enum { WIDEST = 256, KEYS = 64, TILE = 12, ROWS = 120 };

struct prompts {
    bf16 *out;        /* [tokens, heads * dim] */
    const bf16 *qkv;  /* [tokens, (heads + 2 * kv_heads) * dim], not yet rotated */
    bf16 *keys, *values;    /* [blocks, kv_heads, block_size, dim] */
    const float *cos, *sin; /* [tokens, rotary / 2] */
    const bf16 *q_norm, *k_norm;
    const int64_t *table;  /* [sequences, table_stride] */
    const int64_t *start;  /* [sequences + 1]: each one's first token */
    const int64_t *length; /* [sequences], the new tokens included */
    int64_t sequences, heads, kv_heads, dim, rotary, block_size, table_stride, window;
    float scale, eps;
    int64_t next;
    int failed;
    const float *sinks; /* [heads] or NULL, see struct attention */
};

/* What a thread works in. */
struct space {
    bf16 *q;            /* [most, dim] */
    float *sum;         /* [most, dim] */
    float *best, *total; /* [most] */
    bf16 *keys;         /* [KEYS / 32][dim / 2][32][2] */
    bf16 *values;       /* [dim / 32][KEYS / 2][32][2] */
};

static int64_t tokens_a_job(const struct prompts *p) {
    const int64_t group = p->heads / p->kv_heads;
    return group < ROWS ? ROWS / group : 1;
}

INLINE WIDE void head_of(const struct prompts *p, bf16 *to, const bf16 *from, const bf16 *norm, int64_t token) {
    wide_head(to, from, norm, p->cos + token * (p->rotary / 2), p->sin + token * (p->rotary / 2), p->dim, p->rotary, p->eps);
}

/* New keys and values into the cache, before any job reads them. */
WIDE static void store_body(void *args, int thread, int threads) {
    struct prompts *p = args;
    const int64_t all = p->start[p->sequences], dim = p->dim, width = (p->heads + 2 * p->kv_heads) * dim;
    const int64_t from = all * thread / threads, to = all * (thread + 1) / threads;
    for (int64_t s = 0; s < p->sequences; s++)
        for (int64_t t = p->start[s] > from ? p->start[s] : from; t < p->start[s + 1] && t < to; t++) {
            const int64_t at = p->length[s] - (p->start[s + 1] - t), block = p->table[s * p->table_stride + at / p->block_size];
            const bf16 *line = p->qkv + t * width + p->heads * dim;
            for (int64_t kv = 0; kv < p->kv_heads; kv++) {
                const int64_t slot = ((block * p->kv_heads + kv) * p->block_size + at % p->block_size) * dim;
                head_of(p, p->keys + slot, line + kv * dim, p->k_norm, t);
                memcpy(p->values + slot, line + (p->kv_heads + kv) * dim, sizeof(bf16) * (size_t)dim);
            }
        }
}

/* 16 rows of 16 words, turned. */
INLINE WIDE void transpose16(__m512i *r) {
    __m512i t[16];
    for (int i = 0; i < 16; i += 2) t[i] = _mm512_unpacklo_epi32(r[i], r[i + 1]), t[i + 1] = _mm512_unpackhi_epi32(r[i], r[i + 1]);
    for (int i = 0; i < 16; i += 4) {
        r[i] = _mm512_unpacklo_epi64(t[i], t[i + 2]), r[i + 1] = _mm512_unpackhi_epi64(t[i], t[i + 2]);
        r[i + 2] = _mm512_unpacklo_epi64(t[i + 1], t[i + 3]), r[i + 3] = _mm512_unpackhi_epi64(t[i + 1], t[i + 3]);
    }
    for (int k = 0; k < 4; k++) {
        const __m512i a = _mm512_shuffle_i32x4(r[k], r[4 + k], 0x88), b = _mm512_shuffle_i32x4(r[8 + k], r[12 + k], 0x88);
        const __m512i c = _mm512_shuffle_i32x4(r[k], r[4 + k], 0xdd), d = _mm512_shuffle_i32x4(r[8 + k], r[12 + k], 0xdd);
        t[k] = _mm512_shuffle_i32x4(a, b, 0x88), t[8 + k] = _mm512_shuffle_i32x4(a, b, 0xdd);
        t[4 + k] = _mm512_shuffle_i32x4(c, d, 0x88), t[12 + k] = _mm512_shuffle_i32x4(c, d, 0xdd);
    }
    for (int i = 0; i < 16; i++) r[i] = t[i];
}

/* `count` positions from `at` on, the rest of KEYS as zeros: what lies there may be another sequence's, even NaN. */
WIDE static void pack(const struct prompts *p, const struct space *space, const int64_t *table, int64_t kv, int64_t at, int64_t count) {
    const int64_t dim = p->dim;
    int64_t slot[KEYS];
    for (int64_t j = 0; j < count; j++)
        slot[j] = ((table[(at + j) / p->block_size] * p->kv_heads + kv) * p->block_size + (at + j) % p->block_size) * dim;
    const __m512i zero = _mm512_setzero_si512();
    for (int64_t first = 0; first < KEYS; first += 16)
        for (int64_t i = 0; i < dim; i += 32) {
            __m512i rows[16];
            for (int64_t j = 0; j < 16; j++) rows[j] = first + j < count ? _mm512_loadu_si512(p->keys + slot[first + j] + i) : zero;
            transpose16(rows);
            bf16 *to = space->keys + first / 32 * 32 * dim + i * 32 + first % 32 * 2;
            for (int64_t j = 0; j < 16; j++) _mm512_storeu_si512(to + j * 64, rows[j]);
        }
    const __m512i order = _mm512_set_epi16(47, 15, 46, 14, 45, 13, 44, 12, 43, 11, 42, 10, 41, 9, 40, 8, 39, 7, 38, 6, 37, 5, 36, 4, 35,
                                           3, 34, 2, 33, 1, 32, 0);
    const __m512i behind = _mm512_add_epi16(order, _mm512_set1_epi16(16));
    for (int64_t j = 0; j < KEYS; j += 2)
        for (int64_t i = 0; i < dim; i += 32) {
            const __m512i a = j < count ? _mm512_loadu_si512(p->values + slot[j] + i) : zero;
            const __m512i b = j + 1 < count ? _mm512_loadu_si512(p->values + slot[j + 1] + i) : zero;
            bf16 *to = space->values + i * KEYS + j * 32;
            _mm512_storeu_si512(to, _mm512_permutex2var_epi16(a, order, b));
            _mm512_storeu_si512(to + 32, _mm512_permutex2var_epi16(a, behind, b));
        }
}

/* One row's scores [KEYS] -> weights in bf16, with its best and total brought up to date and its sum shrunk to match.
 * It sees the positions [low, high) of these. */
INLINE WIDE void soften(const float *score, bf16 *weight, float *best, float *total, float *sum, int64_t dim, float scale, int64_t low,
                        int64_t high) {
    __m512 s[KEYS / 16], most = _mm512_set1_ps(*best), added = _mm512_setzero_ps();
    __mmask16 seen[KEYS / 16];
    for (int i = 0; i < KEYS / 16; i++) {
        const __m512i at = _mm512_add_epi32(_mm512_set1_epi32(16 * i), _mm512_set_epi32(15, 14, 13, 12, 11, 10, 9, 8, 7, 6, 5, 4, 3, 2, 1, 0));
        seen[i] = _mm512_cmpge_epi32_mask(at, _mm512_set1_epi32((int)low)) & _mm512_cmplt_epi32_mask(at, _mm512_set1_epi32((int)high));
        s[i] = _mm512_mul_ps(_mm512_loadu_ps(score + 16 * i), _mm512_set1_ps(scale));
        most = _mm512_mask_max_ps(most, seen[i], most, s[i]);
    }
    const float peak = _mm512_reduce_max_ps(most);
    for (int i = 0; i < KEYS / 16; i++) {
        const __m512 w = _mm512_maskz_mov_ps(seen[i], exp16(_mm512_sub_ps(s[i], _mm512_set1_ps(peak))));
        added = _mm512_add_ps(added, w);
        _mm256_storeu_si256((__m256i *)(weight + 16 * i), narrow16(w));
    }
    if (peak > *best) {
        const __m512 shrink = exp16(_mm512_set1_ps(*best - peak));
        *total *= _mm512_cvtss_f32(shrink);
        for (int64_t i = 0; i < dim; i += 16) _mm512_storeu_ps(sum + i, _mm512_mul_ps(_mm512_loadu_ps(sum + i), shrink));
        *best = peak;
    }
    *total += _mm512_reduce_add_ps(added);
}

/* T (a constant) rows from `row` on, of tokens at the positions from `position` on, meet `count` packed positions from `at`
 * on. A row's result does not depend on T. */
INLINE WIDE void meet_tile(const int T, const struct prompts *p, const struct space *space, int64_t row, int64_t position, int64_t group,
                           int64_t at, int64_t count) {
    const int64_t dim = p->dim;
    float score[TILE * KEYS];
    bf16 weight[TILE * KEYS];
    __m512 low[TILE], high[TILE];
    for (int64_t k = 0; k < count; k += 32) {
#pragma GCC unroll 12
        for (int t = 0; t < T; t++) low[t] = high[t] = _mm512_setzero_ps();
        dot_tile(T, low, high, space->keys + k * dim, space->q + row * dim, dim, dim);
#pragma GCC unroll 12
        for (int t = 0; t < T; t++) {
            _mm512_storeu_ps(score + t * KEYS + k, low[t]);
            _mm512_storeu_ps(score + t * KEYS + k + 16, high[t]);
        }
    }
    memset(weight, 0, sizeof(bf16) * (size_t)(T * KEYS));
    for (int64_t t = 0; t < T; t++) {
        const int64_t own = position + (row + t) / group + 1 - at, first = p->window > 0 ? own - p->window : 0;
        if (own <= 0 || first >= count) continue;
        soften(score + t * KEYS, weight + t * KEYS, space->best + row + t, space->total + row + t, space->sum + (row + t) * dim, dim,
               p->scale, first, own < count ? own : count);
    }
    for (int64_t i = 0; i < dim; i += 32) {
        float *sum = space->sum + row * dim + i;
#pragma GCC unroll 12
        for (int t = 0; t < T; t++) low[t] = _mm512_loadu_ps(sum + t * dim), high[t] = _mm512_loadu_ps(sum + t * dim + 16);
        dot_tile(T, low, high, space->values + i * KEYS, weight, KEYS, (count + 1) & ~1);
#pragma GCC unroll 12
        for (int t = 0; t < T; t++) _mm512_storeu_ps(sum + t * dim, low[t]), _mm512_storeu_ps(sum + t * dim + 16, high[t]);
    }
}

#define OF(T) \
    case T: meet_tile(T, p, space, row, position, group, at, count); break;
WIDE static void meet(const struct prompts *p, const struct space *space, int64_t row, int64_t rows, int64_t position, int64_t group,
                      int64_t at, int64_t count) {
    switch (rows - row < TILE ? rows - row : TILE) { OF(1) OF(2) OF(3) OF(4) OF(5) OF(6) OF(7) OF(8) OF(9) OF(10) OF(11) OF(12) }
}

/* Tokens [from, to) of sequence s with KV head kv. */
WIDE static void prompt_job(const struct prompts *p, const struct space *space, int64_t s, int64_t kv, int64_t from, int64_t to) {
    const int64_t dim = p->dim, group = p->heads / p->kv_heads, width = (p->heads + 2 * p->kv_heads) * dim, rows = (to - from) * group;
    const int64_t *table = p->table + s * p->table_stride;
    for (int64_t r = 0; r < rows; r++) {
        const int64_t token = from + r / group;
        head_of(p, space->q + r * dim, p->qkv + token * width + (kv * group + r % group) * dim, p->q_norm, token);
        space->best[r] = -1e30f, space->total[r] = 0; /* finite: nothing seen yet, less nothing seen yet, is no NaN */
    }
    memset(space->sum, 0, sizeof(float) * (size_t)(rows * dim));
    const int64_t first = p->length[s] - (p->start[s + 1] - from), last = first + (to - from); /* positions */
    const int64_t oldest = p->window > 0 && first >= p->window ? first - p->window + 1 : 0;
    for (int64_t at = oldest / KEYS * KEYS; at < last; at += KEYS) {
        const int64_t count = last - at < KEYS ? last - at : KEYS;
        pack(p, space, table, kv, at, count);
        for (int64_t row = 0; row < rows; row += TILE)
            if (first + (row + TILE - 1) / group >= at) meet(p, space, row, rows, first, group, at, count);
    }
    for (int64_t r = 0; r < rows; r++) {
        bf16 *to_row = p->out + ((from + r / group) * p->heads + kv * group + r % group) * dim;
        if (p->sinks) space->total[r] += expf(p->sinks[kv * group + r % group] - space->best[r]);
        const __m512 total = _mm512_set1_ps(space->total[r]);
        for (int64_t i = 0; i < dim; i += 16)
            _mm256_storeu_si256((__m256i *)(to_row + i), narrow16(_mm512_div_ps(_mm512_loadu_ps(space->sum + r * dim + i), total)));
    }
}

static void prompts_body(void *args, int thread, int threads) {
    (void)thread, (void)threads;
    struct prompts *p = args;
    const int64_t dim = p->dim, each = tokens_a_job(p), most = each * (p->heads / p->kv_heads);
    char *room = aligned_alloc(64, (size_t)(((most + 2 * KEYS) * dim * 2 + (most * dim + 2 * most) * 4 + 63) / 64 * 64));
    if (!room) {
        p->failed = 1;
        return;
    }
    struct space space;
    space.keys = (bf16 *)room, space.values = space.keys + KEYS * dim, space.q = space.values + KEYS * dim;
    space.sum = (float *)(space.q + most * dim), space.best = space.sum + most * dim, space.total = space.best + most;
    for (;;) {
        int64_t job = __atomic_fetch_add(&p->next, 1, __ATOMIC_RELAXED), s = 0, stretches = 0;
        for (; s < p->sequences; s++, job -= stretches * p->kv_heads) {
            stretches = (p->start[s + 1] - p->start[s] + each - 1) / each;
            if (job < stretches * p->kv_heads) break;
        }
        if (s == p->sequences) break;
        /* the last stretch has the longest context: it goes first */
        const int64_t from = p->start[s] + (stretches - 1 - job / p->kv_heads) * each, to = from + each;
        prompt_job(p, &space, s, job % p->kv_heads, from, to < p->start[s + 1] ? to : p->start[s + 1]);
    }
    free(room);
}

/* Whether kernels_attend_prompts serves heads of this dimension here. */
int kernels_has_prompts(int64_t dim) { return kernels_tier >= AVX512_BF16 && dim % 32 == 0 && dim <= WIDEST; }

/* Stores the new keys and values and attends; next and failed must be 0. Returns 0, 1 if memory ran out. */
int kernels_attend_prompts(struct prompts *p, int threads) {
    kernels_parallel(store_body, p, threads);
    kernels_parallel(prompts_body, p, threads);
    return p->failed;
}
#else
int kernels_has_prompts(int64_t dim) {
    (void)dim;
    return 0;
}
#endif
