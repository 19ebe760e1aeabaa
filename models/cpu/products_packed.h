/* The products' inner loops for quantised weights that stay as a checkpoint stores them: 4-bit codes, or fp8, with a scale for
 * each row and group of inputs. Codes are widened in registers, a group's sums are multiplied by its scale. Included once a
 * tier, behind products_plain.h; FLOATS fp32 values are a vector.
 *
 * Packed, in a panel: 4-bit codes [inputs / 8][rows] in words of 8 inputs, the first in the lowest bits; fp8 [inputs][rows].
 * Scales and zero points [blocks][panels][groups][rows of a panel]. INT4 is two's complement; fp8's scales are times 256.
 */
#include "kernels.h"

typedef int32_t plain_ints __attribute__((vector_size(4 * FLOATS)));

enum { WORD = 8, PACKED_MOST = FLOATS == 4 ? 4 : 6, PACKED_FEW = FLOATS == 4 ? 1 : 2 }; /* inputs a word; tokens a tile, and those with
                                                                                           * which it takes all panels */

INLINE int64_t code_bytes(const int form, int64_t codes) { return form == E4M3 ? codes : codes / 2; }

/* The weights of half a panel, of input k of the 8 from `line` on, `widened_unit` times too large. */
INLINE TARGET plain widened_codes(const int form, const char *line, const int k, const int half) {
    plain_bits words;
    if (form == E4M3) {
        const uint8_t *codes = (const uint8_t *)line + k * PLAIN_PANEL + half * FLOATS;
#ifdef OF
        /* As fp16, whose exponents are 8 larger: a value is 1/256 of the code's. */
#if FLOATS == 16
        const __m256i wide = _mm256_cvtepi8_epi16(_mm_loadu_si128((const __m128i *)codes));
        return _mm512_cvtph_ps(_mm256_and_si256(_mm256_slli_epi16(wide, 7), _mm256_set1_epi16((short)0xbfff)));
#else
        const __m128i wide = _mm_cvtepi8_epi16(_mm_loadl_epi64((const __m128i *)codes));
        return _mm256_cvtph_ps(_mm_and_si128(_mm_slli_epi16(wide, 7), _mm_set1_epi16((short)0xbfff)));
#endif
#else
        plain v;
        for (int l = 0; l < FLOATS; l++) v[l] = widen_half((uint16_t)((codes[l] & 0x80) << 8 | (codes[l] & 0x7f) << 7));
        return v;
#endif
    }
    memcpy(&words, line + half * sizeof words, sizeof words);
#if defined(OF) && FLOATS == 16
    const __m512 table = form == INT4 ? _mm512_setr_ps(0, 1, 2, 3, 4, 5, 6, 7, -8, -7, -6, -5, -4, -3, -2, -1)
                                      : _mm512_setr_ps(0, .5f, 1, 1.5f, 2, 3, 4, 6, -0.f, -.5f, -1, -1.5f, -2, -3, -4, -6);
    return _mm512_permutexvar_ps(_mm512_srli_epi32((__m512i)words, 4 * k), table);
#elif defined(OF)
    /* The code, or twice E2M1's value as a byte, in the upper bits of an integer. */
    if (form == INT4) return __builtin_convertvector((plain_ints)(words << (28 - 4 * k) & 0xf0000000u), plain);
    const __m256i table = _mm256_broadcastsi128_si256(_mm_setr_epi8(0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12));
    words = (plain_bits)_mm256_shuffle_epi8(table, (__m256i)(words >> k % 2 * 4 & 0x0f0f0f0fu));
    return __builtin_convertvector((plain_ints)(words << (24 - k / 2 * 8) & 0xff000000u), plain);
#else
    if (form == INT4) return __builtin_convertvector((plain_ints)(words << (28 - 4 * k)) >> 28, plain);
    static const float table[8] = {0, .5f, 1, 1.5f, 2, 3, 4, 6};
    plain v;
    for (int l = 0; l < FLOATS; l++) v[l] = table[words[l] >> (4 * k) & 7];
    return (plain)((plain_bits)v | (words << (28 - 4 * k) & 0x80000000u));
#endif
}

#if defined(OF) && FLOATS == 8
INLINE float widened_unit(const int form) { return form == INT4 ? 0x1p28f : form == E2M1 ? 0x1p25f : 1.f; }
#else
INLINE float widened_unit(const int form) { return 1.f; }
#endif

/* Of one group of `count` inputs from `from` on: total [B][T][2] += scale * (sum - zero * the sum of x), for T tokens (a constant)
 * and B panels. */
INLINE TARGET void packed_group(const int form, const int T, const int B, const struct product *p, const float *const *x, int64_t block, int panel,
                                int64_t from, int64_t count, plain *total) {
    const int64_t groups = p->inputs / p->group, bytes = code_bytes(form, WORD * PLAIN_PANEL), stride = code_bytes(form, p->inputs * PLAIN_PANEL);
    const char *weight = (const char *)p->weight + (block * PLAIN_PANELS + panel) * stride + from / WORD * bytes;
    const int64_t edge = stride - AHEAD - from / WORD * bytes; /* from there on, what is fetched ahead is behind all panels */
    plain sum[PACKED_MOST][2];
#pragma GCC unroll 16
    for (int n = 0; n < B * T; n++) sum[n][0] = sum[n][1] = (plain){0};
    for (int64_t i = 0; i < count; i += WORD, weight += bytes) {
        const char *ahead = weight + (i / WORD * bytes >= edge ? (B - 1) * stride : 0);
#pragma GCC unroll 4
        for (int b = 0; b < B; b++) fetch_ahead(ahead + b * stride, bytes);
#pragma GCC unroll 8
        for (int n = 0; n < WORD; n++) {
            const int k = n % 4 * 2 + n / 4; /* even inputs, then odd ones: E2M1's table is applied to both halves of bytes */
#pragma GCC unroll 4
            for (int b = 0; b < B; b++) {
                const plain low = widened_codes(form, weight + b * stride, k, 0), high = widened_codes(form, weight + b * stride, k, 1);
#pragma GCC unroll 6
                for (int t = 0; t < T; t++) {
                    const plain v = plain_all(x[t][from + i + k]);
                    sum[b * T + t][0] = plain_add(sum[b * T + t][0], low, v);
                    sum[b * T + t][1] = plain_add(sum[b * T + t][1], high, v);
                }
            }
        }
    }
    float inputs[PACKED_MOST];
    for (int t = 0; t < T && p->zero; t++) {
        float part[WORD] = {0};
        for (int64_t i = from; i < from + count; i += WORD)
            for (int l = 0; l < WORD; l++) part[l] += x[t][i + l];
        inputs[t] = ((part[0] + part[1]) + (part[2] + part[3])) + ((part[4] + part[5]) + (part[6] + part[7]));
    }
    for (int b = 0; b < B; b++)
        for (int half = 0; half < 2; half++) {
            const int64_t at = ((block * PLAIN_PANELS + panel + b) * groups + from / p->group) * PLAIN_PANEL + half * FLOATS;
            const plain scale = plain_load(p->scale_type, p->scale, at);
            for (int t = 0; t < T; t++) {
                const int n = b * T + t;
                sum[n][half] *= 1 / widened_unit(form);
                if (p->zero) {
                    plain zero;
                    for (int l = 0; l < FLOATS; l++) zero[l] = p->zero[at + l];
                    sum[n][half] = plain_add(sum[n][half], zero, plain_all(-inputs[t]));
                }
                total[2 * n + half] = plain_add(total[2 * n + half], sum[n][half], scale);
            }
        }
}

/* The inputs [from, to) of up to PACKED_MOST tokens and B panels. */
#define PACKED_CASE(T) \
    case T: \
        for (int64_t g = from; g < to; g += p->group) \
            packed_group(form, T, T <= PACKED_FEW ? PLAIN_PANELS : 1, p, x, block, panel, g, p->group, total); \
        break;
INLINE TARGET void packed_sum(const int form, const struct product *p, const struct tokens *t, int64_t block, int panel, int64_t from, int64_t to,
                              plain *total) {
    const float *x[PACKED_MOST];
    for (int64_t k = 0; k < t->count; k++) x[k] = (const float *)t->x + row_of(t, k) * t->x_stride;
    switch (t->count) {
        PACKED_CASE(1) PACKED_CASE(2) PACKED_CASE(3) PACKED_CASE(4)
#if FLOATS > 4
        PACKED_CASE(5) PACKED_CASE(6)
#endif
    }
}

/* Functions of their own: constants of what surrounds them would take registers that their sums need. */
#define PACKED_SUM(name, form) \
    TARGET __attribute__((noinline)) static void packed_##name(const struct product *p, const struct tokens *t, int64_t block, int panel, \
                                                               int64_t from, int64_t to, plain *total) { \
        packed_sum(form, p, t, block, panel, from, to, total); \
    }
PACKED_SUM(int4, INT4)
PACKED_SUM(e2m1, E2M1)
PACKED_SUM(e4m3, E4M3)

INLINE TARGET void packed_block(const int type, const struct product *p, const struct tokens *all, int64_t block) {
    const int64_t leaves = p->leaves ? p->leaves : 1, each = p->inputs / leaves;
    float sums[PACKED_MOST * PLAIN_PANELS][2 * FLOATS], nodes[PACKED_MOST * PLAIN_PANELS][TREE][2 * FLOATS];
    plain total[PACKED_MOST * PLAIN_PANELS * 2];
    for (int64_t from = 0; from < all->count; from += PACKED_MOST) {
        const struct tokens t = tokens_between(all, from, all->count - from < PACKED_MOST ? all->count : from + PACKED_MOST, 4, size_of(type));
        const int together = t.count <= PACKED_FEW ? PLAIN_PANELS : 1;
        for (int panel = 0; panel < PLAIN_PANELS; panel += together) {
            const int64_t count = together * t.count;
            for (int64_t leaf = 0; leaf < leaves; leaf++) {
                memset(total, 0, sizeof *total * 2 * (size_t)count);
                (p->form == INT4 ? packed_int4 : p->form == E2M1 ? packed_e2m1 : packed_e4m3)(p, &t, block, panel, leaf * each, (leaf + 1) * each, total);
                memcpy(sums, total, sizeof *total * 2 * (size_t)count);
                for (int64_t n = 0; n < count && p->leaves; n++)
                    plain_join(type, p, (int)leaf, sums[n], nodes[n], block, panel + (int)(n / t.count));
            }
            for (int64_t n = 0; n < count; n++)
                plain_finish(type, p, p->leaves ? NULL : p->bias, sums[n], sums[n] + FLOATS,
                             (char *)t.y + (size_t)(n % t.count * t.y_stride) * size_of(type), block, panel + (int)(n / t.count));
        }
    }
}

#define PACKED(name, type) \
    TARGET static void packed_prepare_##name(const struct product *p, const struct tokens *t) { plain_prepare(type, p, t); } \
    TARGET static void packed_block_##name(const struct product *p, const struct tokens *t, int64_t block) { packed_block(type, p, t, block); } \
    static const struct product_loops packed_##name##_loops = { \
        .item = 4, .gathers = 1, .prepare = packed_prepare_##name, .block = packed_block_##name};
PACKED(fp32, FP32)
PACKED(bf16, BF16)
PACKED(fp16, FP16)
