/* Sums of several vectors, element by element, always in the order given, accumulated in fp32: the result depends on
 * the inputs alone, never on who computes it. The output may be one of the inputs. Or as a binary tree, rounded to their
 * type at every node: then it does not depend on how ranks share the leaves either, be it by nodes, by halves or whole. */
#ifndef LADDERTRON_TRANSPORT_REDUCE_H
#define LADDERTRON_TRANSPORT_REDUCE_H

#include <stddef.h>
#include <stdint.h>
#include <string.h>

enum lt_dtype { LT_F32 = 0, LT_BF16 = 1, LT_F16 = 2 };

#define LT_BLOCK 1024 /* elements: 4 KiB of accumulators stay in the first-level cache */

#if defined(__x86_64__) && defined(__GNUC__) && !defined(__clang__)
#define LT_CLONES __attribute__((target_clones("arch=skylake-avx512", "arch=haswell", "default")))
#else
#define LT_CLONES
#endif

static inline size_t lt_width(int dtype) { return dtype == LT_F32 ? 4 : 2; }

LT_CLONES static void lt_pair_f32(float *out, const float *a, const float *b, size_t n) {
    for (size_t i = 0; i < n; i++) out[i] = a[i] + b[i];
}

LT_CLONES static void lt_add_f32(float *restrict acc, const float *restrict in, size_t n) {
    for (size_t i = 0; i < n; i++) acc[i] += in[i];
}

LT_CLONES static void lt_load_bf16(float *restrict acc, const uint16_t *restrict in, size_t n) {
    uint32_t *bits = (uint32_t *)acc;
    for (size_t i = 0; i < n; i++) bits[i] = (uint32_t)in[i] << 16;
}

LT_CLONES static void lt_add_bf16(float *restrict acc, const uint16_t *restrict in, size_t n) {
    for (size_t i = 0; i < n; i++) {
        union { uint32_t u; float f; } v = {(uint32_t)in[i] << 16};
        acc[i] += v.f;
    }
}

/* Round to nearest even; a NaN stays a (quiet) NaN. */
LT_CLONES static void lt_store_bf16(uint16_t *restrict out, const float *restrict acc, size_t n) {
    for (size_t i = 0; i < n; i++) {
        union { float f; uint32_t u; } v = {acc[i]};
        uint32_t rounded = (v.u + 0x7fffu + ((v.u >> 16) & 1u)) >> 16;
        uint32_t nan = (v.u >> 16) | 0x40u;
        out[i] = (uint16_t)((v.u & 0x7fffffffu) > 0x7f800000u ? nan : rounded);
    }
}

LT_CLONES static void lt_load_f16(float *restrict acc, const _Float16 *restrict in, size_t n) {
    for (size_t i = 0; i < n; i++) acc[i] = (float)in[i];
}

LT_CLONES static void lt_add_f16(float *restrict acc, const _Float16 *restrict in, size_t n) {
    for (size_t i = 0; i < n; i++) acc[i] += (float)in[i];
}

LT_CLONES static void lt_store_f16(_Float16 *restrict out, const float *restrict acc, size_t n) {
    for (size_t i = 0; i < n; i++) out[i] = (_Float16)acc[i];
}

/* out[i] = ((in[0][i] + in[1][i]) + in[2][i]) + ...; `first` is the element of every input to begin with. */
static void lt_sum(const void *const *in, int k, size_t first, size_t count, void *out, int dtype) {
    float acc[LT_BLOCK];
    size_t width = lt_width(dtype);
    char *to = (char *)out;
    if (dtype == LT_F32 && k == 2) {
        lt_pair_f32((float *)to, (const float *)in[0] + first, (const float *)in[1] + first, count);
        return;
    }
    for (size_t at = 0; at < count; at += LT_BLOCK) {
        size_t n = count - at < LT_BLOCK ? count - at : LT_BLOCK;
        for (int j = 0; j < k; j++) {
            const char *from = (const char *)in[j] + (first + at) * width;
            if (dtype == LT_F32) {
                if (j == 0) memcpy(acc, from, n * 4);
                else lt_add_f32(acc, (const float *)from, n);
            } else if (dtype == LT_BF16) {
                if (j == 0) lt_load_bf16(acc, (const uint16_t *)from, n);
                else lt_add_bf16(acc, (const uint16_t *)from, n);
            } else {
                if (j == 0) lt_load_f16(acc, (const _Float16 *)from, n);
                else lt_add_f16(acc, (const _Float16 *)from, n);
            }
        }
        if (dtype == LT_F32) memcpy(to + at * 4, acc, n * 4);
        else if (dtype == LT_BF16) lt_store_bf16((uint16_t *)(to + at * 2), acc, n);
        else lt_store_f16((_Float16 *)(to + at * 2), acc, n);
    }
}

/* The same as a tree: (in[0] + in[1]) + (in[2] + in[3]) …; k: a power of two. */
static void lt_tree(const void *const *in, int k, size_t first, size_t count, void *out, int dtype) {
    size_t width = lt_width(dtype);
    if (k <= 2) {
        lt_sum(in, k, first, count, out, dtype);
        return;
    }
    float low[LT_BLOCK], high[LT_BLOCK];
    const void *halves[] = {low, high};
    for (size_t at = 0; at < count; at += LT_BLOCK) {
        size_t n = count - at < LT_BLOCK ? count - at : LT_BLOCK;
        lt_tree(in, k / 2, first + at, n, low, dtype);
        lt_tree(in + k / 2, k - k / 2, first + at, n, high, dtype);
        lt_sum(halves, 2, 0, n, (char *)out + at * width, dtype);
    }
}

#endif
