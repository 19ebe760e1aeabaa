/* What the CPU kernels share: bf16, and parallel regions on the pool that torch already has (a second pool would fight
 * the first one for the cores; models/cpu_ops.py hands its entry points over).
 */
#ifndef LADDERTRON_KERNELS_H
#define LADDERTRON_KERNELS_H

#include <math.h>
#include <stddef.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

typedef uint16_t bf16;

static inline float widen(bf16 v) {
    uint32_t bits = (uint32_t)v << 16;
    float f;
    memcpy(&f, &bits, 4);
    return f;
}

static inline bf16 narrow(float f) { /* round to nearest even; NaN stays NaN */
    uint32_t bits;
    memcpy(&bits, &f, 4);
    if ((bits & 0x7fffffffu) > 0x7f800000u) return (bf16)((bits >> 16) | 0x40);
    return (bf16)((bits + 0x7fffu + ((bits >> 16) & 1)) >> 16);
}

/* Runs body(args, thread, threads) on each of `threads` threads and returns when all have. */
void kernels_parallel(void (*run)(void *args, int thread, int threads), void *args, int threads);

void kernels_rms_norm(int type, void *out, const void *x, const void *weight, int64_t rows, int64_t cols, float eps);

/* Whether products.c's loops run here, and are the right ones. */
int kernels_has_products(void);

/* Attention of sequences with one new token. dim <= 1024; all index arrays int64; window 0: full attention. */
struct attention {
    int type;
    void *out;             /* [rows, heads * dim] */
    const void *qkv;       /* [rows, (heads + 2 * kv_heads) * dim], not yet rotated */
    void *keys, *values;   /* [blocks, kv_heads, block_size, dim] */
    const float *cos, *sin; /* [rows, rotary / 2] */
    const void *q_norm, *k_norm;
    const int64_t *table;  /* [rows, table_stride] */
    const int64_t *length; /* [rows], the new token included */
    int64_t rows, heads, kv_heads, dim, rotary, block_size, table_stride, window;
    float scale, eps;
    int *failed;
};

/* bf16 alone: the jobs [from, to) of a (job = row * kv_heads + head) by attend.c; 0 if it does not serve them. */
int kernels_wide_attention(const struct attention *a, int64_t from, int64_t to);

#endif
