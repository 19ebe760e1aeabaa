/* The products' inner loops by FMA: 16-bit and int8 weights are widened in registers, tokens once a call. Included once for
 * each FLOATS, behind vectors.h.
 */

/* Rows of a block, its panels, tokens a tile, and those with which a tile takes all panels at once. Registers: a panel's
 * two vectors for each token, the weights and a token's value. */
enum { ROWS = 32, PANEL = 2 * FLOATS, PANELS = ROWS / PANEL, MOST = FLOATS == 16 ? 12 : 6, NARROW = 3 };

/* fp32 values of tokens, normed first if there is a norm: statistics in fp32, rounded before the weight. */
INLINE TARGET void prepare_rows(const int type, const struct product *p, const struct tokens *t) {
    const int64_t n = p->inputs;
    float *to = t->y;
    for (int64_t k = 0; k < t->count; k++, to += t->y_stride) {
        const uint16_t *row = (const uint16_t *)t->x + row_of(t, k) * t->x_stride;
        vector scale = all(1.f);
        if (p->norm) {
            vector sum[4] = {all(0.f), all(0.f), all(0.f), all(0.f)};
            for (int64_t i = 0; i < n; i += 4 * FLOATS)
                for (int k = 0; k < 4 && i + k * FLOATS < n; k++) {
                    const vector v = load_some(type, row, i + k * FLOATS, n - i - k * FLOATS);
                    sum[k] = OF(fmadd_ps)(v, v, sum[k]);
                }
            const float squares = sum_of(OF(add_ps)(OF(add_ps)(sum[0], sum[1]), OF(add_ps)(sum[2], sum[3])));
            scale = all(1.0f / sqrtf(squares / (float)n + p->eps));
        }
        for (int64_t i = 0; i < n; i += FLOATS) {
            vector v = load_some(type, row, i, n - i);
            if (p->norm)
                v = rounded_vector(type, OF(mul_ps)(rounded_vector(type, OF(mul_ps)(v, scale)), load_some(type, p->norm, i, n - i)));
            if (n - i >= FLOATS)
                OF(storeu_ps)(to + i, v);
            else
                memcpy(to + i, &v, sizeof(float) * (size_t)(n - i));
        }
    }
}

/* Input i's weights of half a panel. */
INLINE TARGET vector weights_of(const int form, const char *panel, int64_t i, int half) {
    if (form == FP16) return OF(cvtph_ps)(LOAD_HALVES(panel + 2 * (i * PANEL + half * FLOATS)));
    if (form == BF16) {
        const words pair = load_words(panel + 4 * (i / 2 * PANEL + half * FLOATS));
        return as_vector(i % 2 ? OF_INT(and)(pair, OF(set1_epi32)((int)0xffff0000)) : OF(slli_epi32)(pair, 16));
    }
    const char *codes = panel + i * PANEL + half * FLOATS;
#if FLOATS == 16
    return _mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(_mm_loadu_si128((const __m128i *)codes)));
#else
    return _mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(_mm_loadl_epi64((const __m128i *)codes)));
#endif
}

/* What tokens of a panel are once they are summed [tokens][PANEL]: scale, bias, gate, out. */
INLINE TARGET void finish(const int type, const struct product *p, const float *scale, const void *bias, const float *sums, int64_t tokens,
                          uint16_t *y, int64_t stride, int64_t block, int panel) {
    const int64_t first = p->gated ? (block * PANELS + panel) * FLOATS : block * ROWS + panel * PANEL, left = p->outputs - first;
    const int64_t beyond = p->gated ? p->outputs : FLOATS; /* from `low` to `high`, in the bias */
    const int64_t behind = p->gated ? left : left - FLOATS;
    if (scale) scale += block * ROWS + panel * PANEL;
    const vector low_scale = scale ? OF(loadu_ps)(scale) : all(1.f), high_scale = scale ? OF(loadu_ps)(scale + FLOATS) : all(1.f);
    const vector low_bias = bias && left > 0 ? load_some(type, bias, first, left) : all(0.f);
    const vector high_bias = bias && behind > 0 ? load_some(type, bias, first + beyond, behind) : all(0.f);
    for (int64_t t = 0; t < tokens; t++, sums += PANEL, y += stride) {
        const vector low = OF(add_ps)(OF(mul_ps)(OF(loadu_ps)(sums), low_scale), low_bias);
        const vector high = OF(add_ps)(OF(mul_ps)(OF(loadu_ps)(sums + FLOATS), high_scale), high_bias);
        if (p->gated) {
            vector v = rounded_vector(type, low), up = rounded_vector(type, high), one = all(1.f), alpha = one;
            if (p->limit > 0) { /* NaN stays: it is the second operand */
                v = OF(min_ps)(all(p->limit), v), alpha = all(p->alpha);
                up = rounded_vector(type, OF(add_ps)(OF(max_ps)(all(-p->limit), OF(min_ps)(all(p->limit), up)), one));
            }
            const vector gate = OF(div_ps)(v, OF(add_ps)(one, exp_vector(OF(sub_ps)(all(0.f), OF(mul_ps)(alpha, v)))));
            if (left > 0) store_some(type, y, first, OF(mul_ps)(rounded_vector(type, gate), up), left);
        } else {
            if (left > 0) store_some(type, y, first, low, left);
            if (behind > 0) store_some(type, y, first + FLOATS, high, behind);
        }
    }
}

/* A leaf's sums [tokens][PANEL] of a panel join the nodes that wait for them, `level` apart, and wait there themselves. */
INLINE TARGET void join(const int type, const struct product *p, int leaf, float *sums, int64_t tokens, float *nodes, int64_t level,
                        int64_t block, int panel) {
    const int64_t first = block * ROWS + panel * PANEL, blocks = (p->outputs + ROWS - 1) / ROWS;
    const float *scale = p->scale ? (const float *)p->scale + leaf * blocks * ROWS + first : NULL;
    for (int half = 0; half < PANEL; half += FLOATS) {
        const int64_t left = p->outputs - first - half;
        const vector bias = p->bias && leaf == 0 && left > 0 ? load_some(type, p->bias, first + half, left) : all(0.f);
        const vector unit = scale ? OF(loadu_ps)(scale + half) : all(1.f);
        for (int64_t i = half; i < tokens * PANEL; i += PANEL) {
            float *node = nodes + i;
            const vector sum = OF(add_ps)(OF(mul_ps)(OF(loadu_ps)(sums + i), unit), bias);
            vector v = rounded_vector(type, OF(mul_ps)(sum, all(p->factor)));
            for (int n = leaf; n & 1; n >>= 1, node += level) v = rounded_vector(type, OF(add_ps)(OF(loadu_ps)(node), v));
            OF(storeu_ps)(node, v);
            OF(storeu_ps)(sums + i, v);
        }
    }
}

/* Sums [B][T][PANEL] of `count` inputs from `from` on of T tokens (a constant) and B panels from `weight` on. The arrays' sizes are
 * constant, too: else they would not live in registers. */
INLINE TARGET void tile_of(const int form, const int T, const int B, const char *weight, int64_t inputs, const struct tokens *tokens,
                           int64_t from, int64_t count, float *sums) {
    const int64_t row = PANEL * (form == INT8 ? 1 : 2), edge = inputs - AHEAD / row; /* from there on, what is fetched ahead is behind all panels */
    vector low[MOST], high[MOST];
    const float *x[MOST];
#pragma GCC unroll 12
    for (int t = 0; t < T; t++) x[t] = (const float *)tokens->x + row_of(tokens, t) * tokens->x_stride + from;
#pragma GCC unroll 12
    for (int n = 0; n < B * T; n++) low[n] = high[n] = all(0.f);
    for (int64_t pair = 0; pair < count; pair += 2)
#pragma GCC unroll 2
        for (int64_t i = 0; i < 2; i++)
#pragma GCC unroll 2
            for (int b = 0; b < B; b++) {
                __asm__ volatile("" ::: "memory"); /* each input's weights are loaded anew: twice as many would not fit the registers */
                const char *line = weight + (b * inputs + pair) * row;
                if (i == 0) fetch_ahead(line + (B > 1 && from + pair >= edge ? (B - 1) * inputs * row : 0), 2 * row);
                const vector low_weight = weights_of(form, line, i, 0), high_weight = weights_of(form, line, i, 1);
#pragma GCC unroll 12
                for (int t = 0; t < T; t++) {
                    const vector v = all(x[t][pair + i]);
                    low[b * T + t] = add_product(low[b * T + t], low_weight, v);
                    high[b * T + t] = add_product(high[b * T + t], high_weight, v);
                }
            }
#pragma GCC unroll 12
    for (int n = 0; n < B * T; n++) {
        OF(storeu_ps)(sums + n * PANEL, low[n]);
        OF(storeu_ps)(sums + n * PANEL + FLOATS, high[n]);
    }
}

/* One instance a number of tokens: the sums live in registers only if it is a constant. */
#define CASE(T) \
    case T: tile_of(form, T, T <= NARROW ? PANELS : 1, weight, inputs, t, from, count, sums); break;
INLINE TARGET void tile(const int form, const struct tokens *t, const char *weight, int64_t inputs, int64_t from, int64_t count, float *sums) {
    switch (t->count) {
        CASE(1) CASE(2) CASE(3) CASE(4) CASE(5) CASE(6)
#if FLOATS == 16
        CASE(7) CASE(8) CASE(9) CASE(10) CASE(11) CASE(12)
#endif
    }
}

typedef void (*tile_function)(const struct tokens *t, const char *weight, int64_t inputs, int64_t from, int64_t count, float *sums);

/* All tokens of a stretch meet a panel before the next: it stays in the first cache. */
INLINE TARGET void block_of(const int form, tile_function sum, const struct product *p, const struct tokens *t, int64_t block) {
    const int together = t->count <= NARROW ? PANELS : 1, type = form == FP16 ? FP16 : BF16, leaves = p->leaves ? p->leaves : 1;
    const int64_t line = PANEL * (form == INT8 ? 1 : 2), each = p->inputs / leaves;
    float sums[MOST * PANEL], nodes[TREE * MOST * PANEL];
    for (int panel = 0; panel < PANELS; panel += together) {
        const char *weight = (const char *)p->weight + (block * PANELS + panel) * p->inputs * line;
        int64_t tiles = (t->count + MOST - 1) / MOST;
        for (int64_t at = 0, count; at < t->count; at += count, tiles--) {
            count = (t->count - at + tiles - 1) / tiles;
            const struct tokens some = tokens_between(t, at, at + count, 4, 2);
            for (int leaf = 0; leaf < leaves; leaf++) {
                sum(&some, weight + leaf * each * line, p->inputs, leaf * each, each, sums);
                for (int b = 0; b < together && p->leaves; b++)
                    join(type, p, leaf, sums + b * count * PANEL, count, nodes + b * count * PANEL, MOST * PANEL, block, panel + b);
            }
            for (int b = 0; b < together; b++)
                finish(type, p, p->leaves ? NULL : p->scale, p->leaves ? NULL : p->bias, sums + b * count * PANEL, count,
                       some.y, some.y_stride, block, panel + b);
        }
    }
}

/* `tile` is a function of its own: constants of what surrounds it would take registers that its sums need. */
#define INSTANCE(name, form, type) \
    TARGET __attribute__((noinline)) static void tile_##name(const struct tokens *t, const char *weight, int64_t inputs, int64_t from, \
                                                             int64_t count, float *sums) { \
        tile(form, t, weight, inputs, from, count, sums); \
    } \
    TARGET static void prepare_##name(const struct product *p, const struct tokens *t) { prepare_rows(type, p, t); } \
    TARGET static void block_##name(const struct product *p, const struct tokens *t, int64_t block) { block_of(form, tile_##name, p, t, block); } \
    static const struct product_loops name##_loops = {.item = 4, .gathers = 1, .prepare = prepare_##name, .block = block_##name};
INSTANCE(bf16, BF16, BF16)
INSTANCE(fp16, FP16, FP16)
INSTANCE(int8, INT8, BF16)
