/* Matrix products y = x W^T of bf16 tokens for any number of tokens, with what stands before and behind them: RMS norm, bias, gate.
 *
 * A decode step reads every weight once, so its speed is that of the memory: weights lie in the order in which they are
 * read. Packed: blocks of 32 output rows, each [inputs / 2][32 rows][2 inputs] = what two vdpbf16ps take a step; the
 * rows beyond the last are zeros. Gated: a block is 16 rows of the gate and the 16 of `up` that belong to them.
 * Int8 weights (one scale a row) halve what is read. An 8-bit integer is exact in bf16, so they are widened in registers,
 * by table: 64 bytes a line [4][low: 4 rows x 2 inputs, high: the same of the rows 16 further on], sign and magnitude.
 * Needs AVX-512 with BF16 (kernels_has_products), for int8 VBMI too (kernels_has_int8). A token's result does not depend on the other tokens of the call.
 */
#include "kernels.h"

#include "wide.h"

#ifdef WIDE_X86
#include <cpuid.h>

enum { ROWS = 32, TILE = 12, TILE_INT8 = 8, FEW = 16, STRETCH = 96 };

struct product {
    const void *weight; /* packed: bf16, or int8 where there is a scale */
    const bf16 *bias;   /* [outputs], gated: [2 * outputs], gate then up; or NULL */
    const bf16 *norm;   /* [inputs] or NULL */
    const float *scale; /* of int8 weights, packed as they are [blocks][32]; or NULL */
    int64_t inputs, outputs;
    float eps;
    int32_t gated, threads;
};

struct call {
    const struct product *p;
    const bf16 *x;
    bf16 *y;
    bf16 *normed; /* [tokens, inputs] if the norm is made beforehand */
    int64_t tokens, blocks, stretches, next;
    int failed;
};

/* Whether the products below run here. With AMX oneDNN's tiles are faster for prompts: left to it. */
int kernels_has_products(void) {
    if (!wide_runs_here()) return 0;
    unsigned a, b, c, d = 0;
    return !(__get_cpuid_count(7, 0, &a, &b, &c, &d) && (d >> 22 & 1));
}

/* Whether int8 weights do. */
int kernels_has_int8(void) {
    __builtin_cpu_init();
    return wide_runs_here() && __builtin_cpu_supports("avx512vbmi");
}

/* The lower bytes of the bf16 values of 0 .. 127, then the upper ones. */
static uint8_t bytes_of_bf16[256];

__attribute__((constructor)) static void fill_bytes_of_bf16(void) {
    for (int i = 0; i < 128; i++) {
        const bf16 value = narrow((float)i);
        bytes_of_bf16[i] = (uint8_t)value;
        bytes_of_bf16[128 + i] = (uint8_t)(value >> 8);
    }
}

INLINE WIDE __m512 silu16(__m512 v) {
    return _mm512_div_ps(v, _mm512_add_ps(_mm512_set1_ps(1.f), exp16(_mm512_sub_ps(_mm512_setzero_ps(), v))));
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

/* What T tokens (a constant) of one block of rows are once they are summed: bias, gate, out. */
INLINE WIDE void finish(const int T, const struct product *p, const __m512 *low, const __m512 *high, bf16 *y, int64_t block) {
    const int64_t first = block * (p->gated ? 16 : ROWS), left = p->outputs - first;
    const bf16 *bias = p->bias ? p->bias + first : NULL;
    const __m512 low_bias = bias16(bias, left);
    if (p->gated) {
        const __m512 high_bias = bias16(bias ? bias + p->outputs : NULL, left);
#pragma GCC unroll 12
        for (int t = 0; t < T; t++) {
            const __m512 gate = rounded16(silu16(rounded16(_mm512_add_ps(low[t], low_bias))));
            store16(y + t * p->outputs + first, _mm512_mul_ps(gate, rounded16(_mm512_add_ps(high[t], high_bias))), left);
        }
    } else {
        const __m512 high_bias = bias16(bias ? bias + 16 : NULL, left - 16);
#pragma GCC unroll 12
        for (int t = 0; t < T; t++) {
            store16(y + t * p->outputs + first, _mm512_add_ps(low[t], low_bias), left);
            store16(y + t * p->outputs + first + 16, _mm512_add_ps(high[t], high_bias), left - 16);
        }
    }
}

/* T tokens of one block of rows. */
INLINE WIDE void tile(const int T, const struct product *p, const bf16 *x, bf16 *y, int64_t block) {
    __m512 low[TILE], high[TILE];
    const int64_t inputs = p->inputs;
#pragma GCC unroll 12
    for (int t = 0; t < T; t++) low[t] = high[t] = _mm512_setzero_ps();
    dot_tile(T, low, high, (const bf16 *)p->weight + block * ROWS * inputs, x, inputs, inputs);
    finish(T, p, low, high, y, block);
}

/* The same of int8 weights. */
INLINE WIDE_INT8 void tile_int8(const int T, const struct product *p, const bf16 *x, bf16 *y, int64_t block) {
    __m512 low[TILE_INT8], high[TILE_INT8];
    const int64_t inputs = p->inputs;
    const uint8_t *weight = (const uint8_t *)p->weight + block * ROWS * inputs;
    /* The two bytes of the bf16 of 0 .. 127: the first permutation's index takes the magnitude and leaves the sign. */
    const __m512i low_a = _mm512_loadu_si512(bytes_of_bf16), low_b = _mm512_loadu_si512(bytes_of_bf16 + 64);
    const __m512i high_a = _mm512_loadu_si512(bytes_of_bf16 + 128), high_b = _mm512_loadu_si512(bytes_of_bf16 + 192);
    const __m512i sign = _mm512_set1_epi8((char)0x80);
#pragma GCC unroll 8
    for (int t = 0; t < T; t++) low[t] = high[t] = _mm512_setzero_ps();
    for (int64_t i = 0; i < inputs; i += 2, weight += 2 * ROWS) {
        const __m512i codes = _mm512_loadu_si512(weight);
        const __m512i lower = _mm512_permutex2var_epi8(low_a, codes, low_b);
        const __m512i upper = _mm512_ternarylogic_epi32(_mm512_permutex2var_epi8(high_a, codes, high_b), codes, sign, 0xf8);
        const __m512bh a = (__m512bh)_mm512_unpacklo_epi8(lower, upper), b = (__m512bh)_mm512_unpackhi_epi8(lower, upper);
#pragma GCC unroll 8
        for (int t = 0; t < T; t++) {
            int32_t pair;
            memcpy(&pair, x + t * inputs + i, 4);
            const __m512bh v = (__m512bh)_mm512_set1_epi32(pair);
            low[t] = _mm512_dpbf16_ps(low[t], a, v);
            high[t] = _mm512_dpbf16_ps(high[t], b, v);
        }
    }
    const __m512 low_scale = _mm512_loadu_ps(p->scale + block * ROWS), high_scale = _mm512_loadu_ps(p->scale + block * ROWS + 16);
#pragma GCC unroll 8
    for (int t = 0; t < T; t++) low[t] = _mm512_mul_ps(low[t], low_scale), high[t] = _mm512_mul_ps(high[t], high_scale);
    finish(T, p, low, high, y, block);
}

/* One instance a number of tokens: the accumulators live in registers only if it is a constant. */
#define OF(T) \
    case T: tile(T, p, x, y, block); break;
WIDE static void some_tokens(int64_t tokens, const struct product *p, const bf16 *x, bf16 *y, int64_t block) {
    switch (tokens) { OF(1) OF(2) OF(3) OF(4) OF(5) OF(6) OF(7) OF(8) OF(9) OF(10) OF(11) OF(12) }
}

#define OF_INT8(T) \
    case T: tile_int8(T, p, x, y, block); break;
WIDE_INT8 static void some_tokens_int8(int64_t tokens, const struct product *p, const bf16 *x, bf16 *y, int64_t block) {
    switch (tokens) { OF_INT8(1) OF_INT8(2) OF_INT8(3) OF_INT8(4) OF_INT8(5) OF_INT8(6) OF_INT8(7) OF_INT8(8) }
}

WIDE static void norm_rows(bf16 *out, const bf16 *x, const struct product *p, int64_t rows) {
    for (int64_t i = 0; i < rows * p->inputs; i += p->inputs) wide_norm(out + i, x + i, p->norm, p->inputs, p->eps);
}

static void product_body(void *args, int thread, int threads) {
    (void)thread, (void)threads;
    struct call *c = args;
    const struct product *p = c->p;
    const bf16 *x = c->normed ? c->normed : c->x;
    bf16 *own = NULL;
    if (p->norm && !c->normed) { /* few tokens: every thread norms them all, which costs less than to wait for another */
        own = malloc(sizeof(bf16) * (size_t)(c->tokens * p->inputs));
        if (!own) {
            c->failed = 1;
            return;
        }
        norm_rows(own, c->x, p, c->tokens);
        x = own;
    }
    for (;;) {
        const int64_t job = __atomic_fetch_add(&c->next, 1, __ATOMIC_RELAXED);
        if (job >= c->blocks * c->stretches) break;
        const int64_t block = job % c->blocks, from = job / c->blocks * STRETCH;
        const int64_t to = from + STRETCH < c->tokens ? from + STRETCH : c->tokens;
        const int64_t most = p->scale ? TILE_INT8 : TILE;
        for (int64_t t = from; t < to; t += most)
            (p->scale ? some_tokens_int8 : some_tokens)(to - t < most ? to - t : most, p, x + t * p->inputs, c->y + t * p->outputs, block);
    }
    free(own);
}

static void norm_body(void *args, int thread, int threads) {
    struct call *c = args;
    const struct product *p = c->p;
    const int64_t from = c->tokens * thread / threads, to = c->tokens * (thread + 1) / threads;
    norm_rows(c->normed + from * p->inputs, c->x + from * p->inputs, p, to - from);
}

/* y [tokens, outputs] of x [tokens, inputs]. Returns 0, 1 if memory ran out. */
int kernels_product(const struct product *p, const bf16 *x, bf16 *y, int64_t tokens) {
    const int64_t each = p->gated ? 16 : ROWS;
    struct call c = {p, x, y, NULL, tokens, (p->outputs + each - 1) / each, (tokens + STRETCH - 1) / STRETCH, 0, 0};
    if (p->norm && tokens > FEW) {
        c.normed = malloc(sizeof(bf16) * (size_t)(tokens * p->inputs));
        if (!c.normed) return 1;
        kernels_parallel(norm_body, &c, p->threads);
    }
    kernels_parallel(product_body, &c, p->threads);
    free(c.normed);
    return c.failed;
}

/* Row-major weight [rows, inputs] -> packed, as the head of this file says. `rows` counts gate and up together. */
void kernels_pack(bf16 *packed, const bf16 *weight, int64_t rows, int64_t inputs, int gated) {
    const int64_t outputs = gated ? rows / 2 : rows, each = gated ? 16 : ROWS, blocks = (outputs + each - 1) / each;
    for (int64_t block = 0; block < blocks; block++)
        for (int64_t r = 0; r < ROWS; r++) {
            const int64_t at = block * each + (gated ? r % 16 : r);
            const bf16 *row = weight + (at + (gated && r >= 16 ? outputs : 0)) * inputs;
            bf16 *to = packed + block * ROWS * inputs + 2 * r;
            for (int64_t i = 0; i < inputs; i += 2, to += 2 * ROWS) {
                uint32_t pair = 0;
                if (at < outputs) memcpy(&pair, row + i, 4);
                memcpy(to, &pair, 4);
            }
        }
}

/* Infinity for a row with an infinite value or a NaN. */
WIDE static float largest_of(const bf16 *row, int64_t n) {
    int largest = 0;
    for (int64_t i = 0; i < n; i++) largest = (row[i] & 0x7fff) > largest ? row[i] & 0x7fff : largest;
    return largest < 0x7f80 ? widen((bf16)largest) : INFINITY;
}

/* Sign and magnitude of row * unit, rounded. */
WIDE static void codes_of(uint8_t *to, const bf16 *row, int64_t n, float unit) {
    for (int64_t i = 0; i < n; i++) {
        const int magnitude = (int)(widen(row[i] & 0x7fff) * unit + 0.5f);
        to[i] = (uint8_t)((magnitude > 127 ? 127 : magnitude) | (row[i] >> 15 << 7));
    }
}

/* Row-major bf16 weight [rows, inputs] -> int8, packed as the head of this file says, and its scales [blocks * 32]: each
 * row's largest value becomes 127. A row that is not finite yields NaN. */
void kernels_pack_int8(uint8_t *packed, float *scale, const bf16 *weight, int64_t rows, int64_t inputs, int gated) {
    const int64_t outputs = gated ? rows / 2 : rows, each = gated ? 16 : ROWS, blocks = (outputs + each - 1) / each;
    for (int64_t block = 0; block < blocks; block++)
        for (int64_t r = 0; r < ROWS; r++) {
            const int64_t at = block * each + (gated ? r % 16 : r);
            const bf16 *row = weight + (at + (gated && r >= 16 ? outputs : 0)) * inputs;
            uint8_t *to = packed + block * ROWS * inputs + r % 16 / 4 * 16 + r / 16 * 8 + r % 4 * 2;
            const int known = at < outputs;
            const float most = known ? largest_of(row, inputs) : 0.f;
            scale[block * ROWS + r] = most < INFINITY ? most / 127.f : NAN;
            const float unit = known && most > 0.f && most < INFINITY ? 127.f / most : 0.f;
            uint8_t some[1024];
            for (int64_t from = 0; from < inputs; from += (int64_t)sizeof some) {
                const int64_t count = inputs - from < (int64_t)sizeof some ? inputs - from : (int64_t)sizeof some;
                if (unit > 0.f)
                    codes_of(some, row + from, count, unit);
                else
                    memset(some, 0, sizeof some);
                for (int64_t i = 0; i < count; i += 2, to += 2 * ROWS) memcpy(to, some + i, 2);
            }
        }
}
#else
int kernels_has_int8(void) { return 0; }
int kernels_has_products(void) { return 0; }
#endif
