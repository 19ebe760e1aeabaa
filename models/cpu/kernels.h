/* What the CPU kernels share: 16-bit floats, the processor's tier, and parallel regions (pool.c).
 */
#ifndef LADDERTRON_KERNELS_H
#define LADDERTRON_KERNELS_H

#include <math.h>
#include <stddef.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

#if defined(__x86_64__) && (defined(__clang__) || __GNUC__ >= 10)
#define WIDE_X86
#endif

#define INLINE static inline __attribute__((always_inline, unused))

/* Types of values, as models/cpu/kernels.py numbers them. INT8: weights alone, of bf16 tokens; those behind it: weights of
 * tokens of any type (products_packed.h). */
enum { FP32, BF16, FP16, INT8, INT4, E2M1, E4M3 };

typedef uint16_t bf16;

INLINE float widen(bf16 v) {
    uint32_t bits = (uint32_t)v << 16;
    float f;
    memcpy(&f, &bits, 4);
    return f;
}

INLINE bf16 narrow(float f) { /* round to nearest even; NaN stays NaN */
    uint32_t bits;
    memcpy(&bits, &f, 4);
    if ((bits & 0x7fffffffu) > 0x7f800000u) return (bf16)((bits >> 16) | 0x40);
    return (bf16)((bits + 0x7fffu + ((bits >> 16) & 1)) >> 16);
}

INLINE float widen_half(uint16_t v) {
    uint32_t bits = (uint32_t)(v & 0x7fff) << 13;
    float f;
    memcpy(&f, &bits, 4);
    f *= 0x1p112f; /* the exponents' bias, and subnormals */
    memcpy(&bits, &f, 4);
    bits |= ((v & 0x7c00) == 0x7c00 ? 0x7f800000u : 0) | (uint32_t)(v & 0x8000) << 16;
    memcpy(&f, &bits, 4);
    return f;
}

INLINE uint16_t narrow_half(float f) { /* as narrow, overflow to infinity */
    uint32_t bits, small;
    memcpy(&bits, &f, 4);
    const uint32_t sign = bits >> 16 & 0x8000, size = bits & 0x7fffffffu;
    float shifted;
    memcpy(&shifted, &size, 4);
    shifted += 0.5f; /* its last place is that of fp16's subnormals */
    memcpy(&small, &shifted, 4);
    const uint32_t normal = (size - (112u << 23) + 0xfffu + (size >> 13 & 1)) >> 13;
    const uint32_t large = size > 0x7f800000u ? 0x7e00 : 0x7c00;
    return (uint16_t)(sign | (size < 0x38800000u ? small - 0x3f000000u : size < 0x477ff000u ? normal : large));
}

INLINE float read_one(int type, const void *p, int64_t i) {
    return type == FP32 ? ((const float *)p)[i] : (type == BF16 ? widen : widen_half)(((const uint16_t *)p)[i]);
}

INLINE void write_one(int type, void *p, int64_t i, float v) {
    if (type == FP32)
        ((float *)p)[i] = v;
    else
        ((uint16_t *)p)[i] = (type == BF16 ? narrow : narrow_half)(v);
}

INLINE float rounded(int type, float v) { return type == FP32 ? v : type == BF16 ? widen(narrow(v)) : widen_half(narrow_half(v)); }

INLINE size_t size_of(int type) { return type == FP32 ? 4 : 2; }

/* Asks for the cache lines of weights that a product reads AHEAD bytes further on. A core's own prefetcher stays too near:
 * with it alone a decode's products reach two thirds of what a bare read loop does. */
enum { AHEAD = 2048, CACHE_LINE = 64 };
INLINE void fetch_ahead(const void *weights, int64_t bytes) {
    for (int64_t i = 0; i < bytes; i += CACHE_LINE) __builtin_prefetch((const char *)weights + AHEAD + i);
}

/* Runs body(args, thread, threads) on each of `threads` threads and returns when all have. */
void kernels_parallel(void (*run)(void *args, int thread, int threads), void *args, int threads);

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
    int stage; /* 0: all; where rows are tokens of one sequence, which see one another, 1: store alone, then 2: attend alone */
    int64_t *next; /* tile of rows to take, the longest contexts first */
    int *failed;
    const float *sinks; /* [heads]: a score more in each softmax, of no value; or NULL */
};

/* What attention has of a layer, and what of a step. */
struct attention_layer {
    void *keys, *values;
    const void *q_norm, *k_norm;
    const float *sinks;
    int64_t window;
    float eps;
    int32_t type;
};
struct attention_step {
    const float *cos, *sin;
    const int64_t *table, *length;
    int64_t rows, kv_heads, dim, rotary, block_size, table_stride;
    float scale;
    int32_t threads;
};

/* A matrix product, see products.c. */
struct product {
    const void *weight; /* packed */
    const void *bias;   /* [outputs], gated: [2 * outputs], gate then up; or NULL */
    const void *norm;   /* [inputs] or NULL */
    const void *scale; /* fp32 of int8 weights, packed as they are [leaves, at least 1][blocks][32]; of packed ones; or NULL */
    const int8_t *zero; /* zero points of INT4, packed as scales; or NULL */
    int64_t inputs, outputs, group; /* group: inputs that share a scale of packed weights */
    float eps;
    int32_t type, form, scale_type; /* of tokens, of weights, and of packed weights' scales */
    int32_t gated, threads;
    int32_t leaves;               /* of the tree of sums, see products.c; 0: one sum */
    float factor;                 /* with leaves: what each is multiplied by */
    float alpha, limit;           /* gated with a limit: (up + 1) * gate * sigmoid(alpha * gate), gate at most limit, up within it */
};

/* Levels of a tree of 16 leaves: added from left to right, it keeps of each one node that waits for its sibling. */
enum { TREE = 5 };

/* The tokens of a call. Token t is the row rows[t] of x, without `rows` the row t, and the row t of y. */
struct tokens {
    const void *x;
    const int32_t *rows;
    int64_t x_stride; /* values from one row to the next */
    void *y;
    int64_t y_stride, count;
};

INLINE int64_t row_of(const struct tokens *t, int64_t token) { return t->rows ? t->rows[token] : token; }

/* The tokens [from, to) of t; `item`: bytes of a value of x, `size`: of y. */
INLINE struct tokens tokens_between(const struct tokens *t, int64_t from, int64_t to, size_t item, size_t size) {
    struct tokens some = *t;
    some.count = to - from;
    some.y = (char *)t->y + (size_t)(from * t->y_stride) * size;
    if (t->rows)
        some.rows += from;
    else
        some.x = (const char *)t->x + (size_t)(from * t->x_stride) * item;
    return some;
}

/* A product's inner loops for one type of weights. */
struct product_loops {
    size_t item;  /* bytes of a value of prepared tokens */
    int by_table; /* int8 as products_dot.c's tables want it */
    int gathers;  /* `block` reads `rows`; else tokens are prepared one after another */
    void (*prepare)(const struct product *p, const struct tokens *t); /* norms and widens x, of p's type, into y */
    void (*block)(const struct product *p, const struct tokens *t, int64_t block); /* of prepared x, or of x where p's type has `item` bytes */
};

/* Values from one row of prepared tokens to the next. Rows a multiple of 4096 bytes apart share one set of a first cache
 * of 8 ways: tiles of more tokens than that would evict what they are about to read, and take 1.4 times as long. */
enum { WAYS = 8, WAY = 4096 };
INLINE int64_t stride_of(int64_t inputs, size_t item) {
    return inputs * (int64_t)item % WAY ? inputs : inputs + CACHE_LINE / (int64_t)item;
}

int kernels_product(const struct product *p, const void *x, void *y, int64_t tokens);
int kernels_attend(const struct attention_layer *l, const struct attention_step *s, void *out, const void *qkv, int64_t width, int stage);

void kernels_prepare(const struct product_loops *loops, const struct product *p, const struct tokens *given, void *prepared, int64_t stride,
                     int64_t from, int64_t to);

/* One block of outputs of a step's experts, see experts.c. */
struct slots {
    const void *out; /* [assignments][stride] */
    int64_t stride;
    const int32_t *place; /* [rows, slots]: a slot's assignment, or -1 */
    const float *weight;  /* [rows, slots] */
    void *y;              /* [rows][width] */
    int64_t width, rows, slots, columns; /* columns: of the block, 32 at most */
};

/* A strip's part in one chunk of a context, see latent.c. */
struct latent_chunk {
    const void *const *q;           /* [rows]: [rank + rotary], not yet rotated */
    const float *const *cos, *const *sin; /* [rows]: [rotary / 2] */
    const void *const *at;          /* [count + 1]: the positions' [rank + rotary]; the last once more */
    const int32_t *seen;            /* [rows, to a whole cache line]: how many of the positions; 0 behind the last row */
    int64_t rows, count, rank, rotary;
    float scale;
    float *sum, *best, *total; /* [rows][rank], not yet divided; [rows], to a whole cache line */
    float *space;              /* [rows, to a whole cache line][rank + rotary + 2 * count] and [12][rank + rotary] */
};
enum { LATENT_WIDEST = 2048 }; /* rank + rotary */
#define LATENT_NONE (-1e30f)   /* the best score where nothing is seen; finite: less itself it is no NaN */

/* What runs in a tier. */
struct loops {
    int floats; /* fp32 values of a vector: half the rows of a panel of packed weights */
    void (*rms_norm)(int type, void *out, const void *x, const void *weight, int64_t rows, int64_t cols, float eps);
    void (*silu_and_mul)(int type, void *out, const void *gate_up, int64_t rows, int64_t n);
    void (*join_lanes)(int type, void *out, const void *x, int64_t x_lane, const void *own, const void *total, const void *past, int64_t lanes,
                       int64_t n);
    void (*sum_lanes)(int type, void *out, const void *x, int64_t lanes, int64_t n);
    void (*attention)(const struct attention *a, int64_t row, int64_t rows, int64_t kv, float *space);
    void (*add_slots)(int type, const struct slots *s);
    void (*latents)(int type, const struct latent_chunk *c);
    const struct product_loops *products[4], *packed[3]; /* by type of weights, NULL: none; by type of tokens */
};

/* As topology/hardware/cpu_tier.py numbers them. */
enum tier { GENERIC, AVX2, AVX512, AVX512_BF16, AMX };

/* The tier in force, kernels_set_tier's; before that, generic. No other instruction of the processor may run. */
extern int kernels_tier;
extern const struct loops *kernels_loops;

#ifdef WIDE_X86
extern const struct loops kernels_avx2, kernels_avx512;
extern const struct product_loops kernels_dot, kernels_dot_int8;
int kernels_use_tiles(struct loops *loops);
#endif

INLINE const struct product_loops *loops_of(int form, int type) {
    return form > INT8 ? kernels_loops->packed[type] : kernels_loops->products[form];
}

/* bf16 alone: the jobs [from, to) of a (job = row * kv_heads + head) by attend.c; 0 if it does not serve them. */
int kernels_wide_attention(const struct attention *a, int64_t from, int64_t to);

/* bf16 alone: a chunk by latent_dot.c; 0 if it does not serve it. */
int kernels_wide_latents(const struct latent_chunk *c);

#endif
