/* The products' inner loops for AVX-512 with BF16: bf16 weights, and int8 ones where there is VBMI too. An 8-bit integer is
 * exact in bf16, so int8 is widened in registers, by table: 64 bytes a line [4][low: 4 rows x 2 inputs, high: the same of
 * the rows 16 further on], sign and magnitude.
 */
#include "products_wide.h"

#ifdef WIDE_X86

enum { TILE = 12, TILE_INT8 = 8 };

/* The lower bytes of the bf16 values of 0 .. 127, then the upper ones. */
static uint8_t bytes_of_bf16[256];

__attribute__((constructor)) static void fill_bytes_of_bf16(void) {
    for (int i = 0; i < 128; i++) {
        const bf16 value = narrow((float)i);
        bytes_of_bf16[i] = (uint8_t)value;
        bytes_of_bf16[128 + i] = (uint8_t)(value >> 8);
    }
}

/* The rows of x that T tokens are. */
INLINE WIDE void find_rows(const int T, const bf16 **row, const struct tokens *t) {
#pragma GCC unroll 12
    for (int k = 0; k < T; k++) row[k] = (const bf16 *)t->x + row_of(t, k) * t->x_stride;
}

/* T tokens of one block of rows. */
INLINE WIDE void tile(const int T, const struct product *p, const struct tokens *t, int64_t block) {
    const bf16 *row[TILE];
    find_rows(T, row, t);
    __m512 low[TILE], high[TILE], nodes[TREE * 2 * TILE];
    const int64_t inputs = p->inputs, leaves = p->leaves ? p->leaves : 1, count = inputs / leaves;
    const bf16 *weight = (const bf16 *)p->weight + block * ROWS * inputs;
    int leaf = 0;
    do {
#pragma GCC unroll 12
        for (int k = 0; k < T; k++) low[k] = high[k] = _mm512_setzero_ps();
        dot_rows(T, low, high, weight + leaf * count * ROWS, row, leaf * count, (leaf + 1) * count);
        if (p->leaves) join(T, p, leaf, low, high, nodes, block);
    } while (++leaf < leaves);
    finish(T, p, p->leaves ? NULL : p->bias, low, high, t->y, t->y_stride, block);
}

/* The inputs [from, to) of T tokens and of int8 weights of one block of rows, with their scales. */
INLINE WIDE_INT8 void sum_int8(const int T, __m512 *low, __m512 *high, const uint8_t *weight, const float *scale, const bf16 *const *x,
                               int64_t from, int64_t to) {
    /* The two bytes of the bf16 of 0 .. 127: the first permutation's index takes the magnitude and leaves the sign. */
    const __m512i low_a = _mm512_loadu_si512(bytes_of_bf16), low_b = _mm512_loadu_si512(bytes_of_bf16 + 64);
    const __m512i high_a = _mm512_loadu_si512(bytes_of_bf16 + 128), high_b = _mm512_loadu_si512(bytes_of_bf16 + 192);
    const __m512i sign = _mm512_set1_epi8((char)0x80);
#pragma GCC unroll 8
    for (int t = 0; t < T; t++) low[t] = high[t] = _mm512_setzero_ps();
    for (int64_t i = from; i < to; i += 2, weight += 2 * ROWS) {
        const __m512i codes = _mm512_loadu_si512(weight);
        fetch_ahead(weight, 64);
        const __m512i lower = _mm512_permutex2var_epi8(low_a, codes, low_b);
        const __m512i upper = _mm512_ternarylogic_epi32(_mm512_permutex2var_epi8(high_a, codes, high_b), codes, sign, 0xf8);
        const __m512bh a = (__m512bh)_mm512_unpacklo_epi8(lower, upper), b = (__m512bh)_mm512_unpackhi_epi8(lower, upper);
        dot_pair(T, low, high, a, b, x, i);
    }
    const __m512 low_scale = _mm512_loadu_ps(scale), high_scale = _mm512_loadu_ps(scale + 16);
#pragma GCC unroll 8
    for (int t = 0; t < T; t++) low[t] = _mm512_mul_ps(low[t], low_scale), high[t] = _mm512_mul_ps(high[t], high_scale);
}

/* As tile, of int8 weights. */
INLINE WIDE_INT8 void tile_int8(const int T, const struct product *p, const struct tokens *t, int64_t block) {
    const bf16 *row[TILE];
    find_rows(T, row, t);
    __m512 low[TILE_INT8], high[TILE_INT8], nodes[TREE * 2 * TILE_INT8];
    const int64_t inputs = p->inputs, leaves = p->leaves ? p->leaves : 1, count = inputs / leaves, blocks = (p->outputs + ROWS - 1) / ROWS;
    const uint8_t *weight = (const uint8_t *)p->weight + block * ROWS * inputs;
    int leaf = 0;
    do {
        sum_int8(T, low, high, weight + leaf * count * ROWS, (const float *)p->scale + (leaf * blocks + block) * ROWS, row, leaf * count,
                 (leaf + 1) * count);
        if (p->leaves) join(T, p, leaf, low, high, nodes, block);
    } while (++leaf < leaves);
    finish(T, p, p->leaves ? NULL : p->bias, low, high, t->y, t->y_stride, block);
}

/* One instance a number of tokens: the accumulators live in registers only if it is a constant. */
#define OF(T) \
    case T: tile(T, p, &some, block); break;
WIDE static void block_bf16(const struct product *p, const struct tokens *t, int64_t block) {
    for (int64_t from = 0; from < t->count; from += TILE) {
        const struct tokens some = tokens_between(t, from, t->count - from < TILE ? t->count : from + TILE, 2, 2);
        switch (some.count) { OF(1) OF(2) OF(3) OF(4) OF(5) OF(6) OF(7) OF(8) OF(9) OF(10) OF(11) OF(12) }
    }
}

#define OF_INT8(T) \
    case T: tile_int8(T, p, &some, block); break;
WIDE_INT8 static void block_int8(const struct product *p, const struct tokens *t, int64_t block) {
    for (int64_t from = 0; from < t->count; from += TILE_INT8) {
        const struct tokens some = tokens_between(t, from, t->count - from < TILE_INT8 ? t->count : from + TILE_INT8, 2, 2);
        switch (some.count) { OF_INT8(1) OF_INT8(2) OF_INT8(3) OF_INT8(4) OF_INT8(5) OF_INT8(6) OF_INT8(7) OF_INT8(8) }
    }
}

WIDE static void prepare(const struct product *p, const struct tokens *t) {
    for (int64_t k = 0; k < t->count; k++) {
        const bf16 *x = (const bf16 *)t->x + row_of(t, k) * t->x_stride;
        bf16 *y = (bf16 *)t->y + k * t->y_stride;
        if (p->norm)
            wide_norm(y, x, p->norm, p->inputs, p->eps);
        else
            memcpy(y, x, sizeof *y * (size_t)p->inputs);
    }
}

const struct product_loops kernels_dot = {.item = 2, .gathers = 1, .prepare = prepare, .block = block_bf16};
const struct product_loops kernels_dot_int8 = {.item = 2, .by_table = 1, .gathers = 1, .prepare = prepare, .block = block_int8};
#endif
