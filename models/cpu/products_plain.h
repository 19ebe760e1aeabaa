/* The products' inner loops for what has no faster ones of our own: fp32, and in the tier `generic` every type. Included
 * once a tier, behind plain_loops.h; FLOATS fp32 values are a vector.
 */
#include "kernels.h"

enum { PLAIN_ROWS = 32, PLAIN_PANEL = 2 * FLOATS, PLAIN_PANELS = PLAIN_ROWS / PLAIN_PANEL, PLAIN_MOST = FLOATS == 16 ? 12 : FLOATS == 8 ? 6 : 4 };

/* Input i's weights of half a panel. */
INLINE TARGET plain plain_weights(const int type, const char *panel, int64_t i, int half) {
    plain v;
    plain_bits pair;
    if (type == FP32)
        memcpy(&v, panel + 4 * (i * PLAIN_PANEL + half * FLOATS), sizeof v);
    else if (type == BF16) {
        memcpy(&pair, panel + 4 * (i / 2 * PLAIN_PANEL + half * FLOATS), sizeof pair);
        pair = i % 2 ? pair & 0xffff0000u : pair << 16;
        memcpy(&v, &pair, sizeof v);
    } else
        for (int l = 0; l < FLOATS; l++) v[l] = widen_half(((const uint16_t *)panel)[i * PLAIN_PANEL + half * FLOATS + l]);
    return v;
}

/* A leaf's sums [2][FLOATS] of one token of a panel join the nodes [TREE] that wait for them, and wait there themselves. */
INLINE TARGET void plain_join(const int type, const struct product *p, int leaf, float sums[2 * FLOATS], float nodes[][2 * FLOATS], int64_t block,
                              int panel) {
    const int64_t first = block * PLAIN_ROWS + panel * PLAIN_PANEL;
    for (int l = 0; l < 2 * FLOATS; l++)
        sums[l] = rounded(type, (sums[l] + (p->bias && leaf == 0 && first + l < p->outputs ? read_one(type, p->bias, first + l) : 0.f)) * p->factor);
    for (; leaf & 1; leaf >>= 1, nodes++) {
        __asm__ volatile("" ::"r"(sums) : "memory"); /* rounded before it is added: no FMA over both */
        for (int l = 0; l < 2 * FLOATS; l++) sums[l] = rounded(type, nodes[0][l] + sums[l]);
    }
    memcpy(nodes[0], sums, sizeof nodes[0]);
}

/* What one token of a panel is once it is summed: bias, gate, out. */
INLINE TARGET void plain_finish(const int type, const struct product *p, const void *bias, const float *low, const float *high, char *y,
                                int64_t block, int panel) {
    const int64_t first = p->gated ? (block * PLAIN_PANELS + panel) * FLOATS : block * PLAIN_ROWS + panel * PLAIN_PANEL;
    const int64_t left = p->outputs - first, behind = p->gated ? left : left - FLOATS, beyond = p->gated ? p->outputs : FLOATS;
    float out[2][FLOATS];
    for (int l = 0; l < FLOATS; l++) {
        out[0][l] = low[l] + (bias && l < left ? read_one(type, bias, first + l) : 0.f);
        out[1][l] = high[l] + (bias && l < behind ? read_one(type, bias, first + beyond + l) : 0.f);
    }
    if (p->gated)
        for (int l = 0; l < FLOATS; l++) {
            float gate = rounded(type, out[0][l]), up = rounded(type, out[1][l]), alpha = 1.f;
            if (p->limit > 0) {
                gate = gate > p->limit ? p->limit : gate, alpha = p->alpha;
                up = (up > p->limit ? p->limit : up < -p->limit ? -p->limit : up) + 1.f;
            }
            out[0][l] = rounded(type, gate / (1.0f + exp_fast(-alpha * gate))) * rounded(type, up);
        }
    for (int l = 0; l < FLOATS && l < left; l++) write_one(type, y, first + l, out[0][l]);
    for (int l = 0; l < FLOATS && l < behind && !p->gated; l++) write_one(type, y, first + FLOATS + l, out[1][l]);
}

/* T tokens (a constant) of one panel. The arrays' sizes are constant, too: else they would not live in registers. */
INLINE TARGET void plain_tile(const int type, const int T, const struct product *p, const struct tokens *tokens, int64_t block, int panel) {
    const int64_t inputs = p->inputs, leaves = p->leaves ? p->leaves : 1, each = inputs / leaves;
    const char *weight = (const char *)p->weight + (size_t)((block * PLAIN_ROWS + panel * PLAIN_PANEL) * inputs) * size_of(type);
    float sums[PLAIN_MOST][2 * FLOATS], nodes[PLAIN_MOST][TREE][2 * FLOATS];
    const float *x[PLAIN_MOST];
#pragma GCC unroll 12
    for (int t = 0; t < T; t++) x[t] = (const float *)tokens->x + row_of(tokens, t) * tokens->x_stride;
    for (int leaf = 0; leaf < leaves; leaf++) {
        plain sum[PLAIN_MOST][2];
#pragma GCC unroll 12
        for (int t = 0; t < T; t++) sum[t][0] = sum[t][1] = (plain){0};
        for (int64_t pair = leaf * each; pair < (leaf + 1) * each; pair += 2)
#pragma GCC unroll 2
            for (int64_t i = pair; i < pair + 2; i++) {
                const plain low = plain_weights(type, weight, i, 0), high = plain_weights(type, weight, i, 1);
#pragma GCC unroll 12
                for (int t = 0; t < T; t++) {
                    sum[t][0] = plain_add(sum[t][0], low, plain_all(x[t][i]));
                    sum[t][1] = plain_add(sum[t][1], high, plain_all(x[t][i]));
                }
            }
#pragma GCC unroll 12
        for (int t = 0; t < T; t++) {
            memcpy(sums[t], sum[t], sizeof sums[t]);
            if (p->leaves) plain_join(type, p, leaf, sums[t], nodes[t], block, panel);
        }
    }
    for (int t = 0; t < T; t++)
        plain_finish(type, p, p->leaves ? NULL : p->bias, sums[t], sums[t] + FLOATS,
                     (char *)tokens->y + (size_t)(t * tokens->y_stride) * size_of(type), block, panel);
}

/* One instance a number of tokens: the sums live in registers only if it is a constant. */
#define PLAIN_CASE(T) \
    case T: plain_tile(type, T, p, &some, block, panel); break;
INLINE TARGET void plain_block(const int type, const struct product *p, const struct tokens *t, int64_t block) {
    for (int panel = 0; panel < PLAIN_PANELS; panel++)
        for (int64_t from = 0; from < t->count; from += PLAIN_MOST) {
            const struct tokens some = tokens_between(t, from, t->count - from < PLAIN_MOST ? t->count : from + PLAIN_MOST, 4, size_of(type));
            switch (some.count) {
                PLAIN_CASE(1) PLAIN_CASE(2) PLAIN_CASE(3) PLAIN_CASE(4)
#if FLOATS > 4
                PLAIN_CASE(5) PLAIN_CASE(6)
#endif
#if FLOATS > 8
                PLAIN_CASE(7) PLAIN_CASE(8) PLAIN_CASE(9) PLAIN_CASE(10) PLAIN_CASE(11) PLAIN_CASE(12)
#endif
            }
        }
}

/* fp32 values of tokens, normed first if there is a norm. */
INLINE TARGET void plain_prepare(const int type, const struct product *p, const struct tokens *t) {
    const int64_t n = p->inputs;
    float *to = t->y;
    for (int64_t k = 0; k < t->count; k++, to += t->y_stride) {
        const char *x = (const char *)t->x + (size_t)(row_of(t, k) * t->x_stride) * size_of(type);
        const float scale = p->norm ? norm_scale(type, x, n, p->eps) : 1.f;
        for (int64_t i = 0; i < n; i++) {
            const float v = read_one(type, x, i);
            to[i] = p->norm ? rounded(type, rounded(type, v * scale) * read_one(type, p->norm, i)) : v;
        }
    }
}

#define PLAIN(name, type) \
    TARGET static void plain_prepare_##name(const struct product *p, const struct tokens *t) { plain_prepare(type, p, t); } \
    TARGET static void plain_block_##name(const struct product *p, const struct tokens *t, int64_t block) { plain_block(type, p, t, block); } \
    static const struct product_loops plain_##name##_loops = {.item = 4, .gathers = 1, .prepare = plain_prepare_##name, .block = plain_block_##name};
