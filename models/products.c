/* bf16 matrix products y = x W^T for any number of tokens, with what stands before and behind them: RMS norm, bias, gate.
 *
 * A decode step reads every weight once, so its speed is that of the memory: weights lie in the order in which they are
 * read. Packed: blocks of 32 output rows, each [inputs / 2][32 rows][2 inputs] = what two vdpbf16ps take a step; the
 * rows beyond the last are zeros. Gated: a block is 16 rows of the gate and the 16 of `up` that belong to them.
 * Needs AVX-512 with BF16 (kernels_has_products). A token's result does not depend on the other tokens of the call.
 */
#include "kernels.h"

#include "wide.h"

#ifdef WIDE_X86
#include <cpuid.h>

enum { ROWS = 32, TILE = 12, FEW = 16, STRETCH = 96 };

struct product {
    const bf16 *weight; /* packed */
    const bf16 *bias;   /* [outputs], gated: [2 * outputs], gate then up; or NULL */
    const bf16 *norm;   /* [inputs] or NULL */
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

/* T tokens (a constant) of one block of rows. */
INLINE WIDE void tile(const int T, const struct product *p, const bf16 *weight, const bf16 *x, bf16 *y, int64_t block) {
    __m512 low[TILE], high[TILE];
    const int64_t inputs = p->inputs;
#pragma GCC unroll 12
    for (int t = 0; t < T; t++) low[t] = high[t] = _mm512_setzero_ps();
    dot_tile(T, low, high, weight, x, inputs, inputs);
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

/* One instance a number of tokens: the accumulators live in registers only if it is a constant. */
#define OF(T) \
    case T: tile(T, p, weight, x, y, block); break;
WIDE static void some_tokens(int64_t tokens, const struct product *p, const bf16 *x, bf16 *y, int64_t block) {
    const bf16 *weight = p->weight + block * ROWS * p->inputs;
    switch (tokens) { OF(1) OF(2) OF(3) OF(4) OF(5) OF(6) OF(7) OF(8) OF(9) OF(10) OF(11) OF(12) }
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
        for (int64_t t = from; t < to; t += TILE)
            some_tokens(to - t < TILE ? to - t : TILE, p, x + t * p->inputs, c->y + t * p->outputs, block);
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
#else
int kernels_has_products(void) { return 0; }
#endif
