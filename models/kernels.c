/* CPU kernels of a decode step: norm, gating, and paged attention for sequences with one new token.
 *
 * Beside the matrix products (oneDNN's, through torch) these are what a step of few tokens spends its time on: torch
 * needs a dozen small operators for each, with a dispatch and a temporary apiece, and copies the whole context to
 * gather it. Arithmetic is fp32; a row's result does not depend on the other rows of the batch.
 */
#include "kernels.h"

#define PY_SSIZE_T_CLEAN
#include <Python.h>

/* Plain loops below are compiled once for each of these; the loader picks. */
#if defined(__x86_64__) && defined(__GLIBC__) && !defined(__clang__)
#define CLONES __attribute__((target_clones("avx512f", "avx2", "default")))
#else
#define CLONES
#endif

/* ---- the pool ---- */

static void (*gomp_parallel)(void (*)(void *), void *, unsigned, unsigned);
static int (*omp_thread)(void);

void kernels_set_pool(void *parallel, void *thread_num) {
    gomp_parallel = (void (*)(void (*)(void *), void *, unsigned, unsigned))parallel;
    omp_thread = (int (*)(void))thread_num;
}

typedef void (*body)(void *args, int thread, int threads);
struct region {
    body run;
    void *args;
    int threads;
};

static void enter(void *p) {
    struct region *r = p;
    r->run(r->args, omp_thread(), r->threads);
}

void kernels_parallel(body run, void *args, int threads) {
    if (threads <= 1 || !gomp_parallel) {
        run(args, 0, 1);
        return;
    }
    struct region r = {run, args, threads};
    gomp_parallel(enter, &r, (unsigned)threads, 0);
}

/* ---- norm and gating ---- */

/* RMS norm of one row into out (same type): statistics in fp32, rounded to the type before the weight, as torch. */
static inline __attribute__((always_inline)) void norm_row(int type, void *out, const void *x, const void *weight, int64_t n, float eps) {
    if (type) {
        const bf16 *in = x, *w = weight;
        bf16 *o = out;
        float lanes[16] = {0};
        int64_t i = 0;
        for (; i + 16 <= n; i += 16)
            for (int l = 0; l < 16; l++) {
                float v = widen(in[i + l]);
                lanes[l] += v * v;
            }
        for (; i < n; i++) lanes[0] += widen(in[i]) * widen(in[i]);
        float sum = 0;
        for (int l = 0; l < 16; l++) sum += lanes[l];
        float scale = 1.0f / sqrtf(sum / (float)n + eps);
        for (i = 0; i < n; i++) o[i] = narrow(widen(narrow(widen(in[i]) * scale)) * widen(w[i]));
    } else {
        const float *in = x, *w = weight;
        float *o = out;
        float lanes[16] = {0};
        int64_t i = 0;
        for (; i + 16 <= n; i += 16)
            for (int l = 0; l < 16; l++) lanes[l] += in[i + l] * in[i + l];
        for (; i < n; i++) lanes[0] += in[i] * in[i];
        float sum = 0;
        for (int l = 0; l < 16; l++) sum += lanes[l];
        float scale = 1.0f / sqrtf(sum / (float)n + eps);
        for (i = 0; i < n; i++) o[i] = in[i] * scale * w[i];
    }
}

CLONES void kernels_rms_norm(int type, void *out, const void *x, const void *weight, int64_t rows, int64_t cols, float eps) {
    size_t item = type ? 2 : 4;
    for (int64_t r = 0; r < rows; r++)
        norm_row(type, (char *)out + r * cols * item, (const char *)x + r * cols * item, weight, cols, eps);
}

/* e^v within 2 ulp (below -87: 0; above 88: infinity; NaN stays), in a form that compilers turn into vector code: 2^n times a polynomial
 * on [-ln2/2, ln2/2]. */
static inline float exp_fast(float v) {
    float n = rintf(v * 1.44269504f);
    float r = (v - n * 0.693359375f) + n * 2.12194440e-4f;
    float p = 1.9875691500e-4f;
    p = p * r + 1.3981999507e-3f;
    p = p * r + 8.3334519073e-3f;
    p = p * r + 4.1665795894e-2f;
    p = p * r + 1.6666665459e-1f;
    p = p * r + 5.0000001201e-1f;
    p = p * r * r + r + 1.0f;
    int32_t bits = ((int32_t)n + 127) << 23;
    float scale;
    memcpy(&scale, &bits, 4);
    return v < -87.0f ? 0.0f : v > 88.0f ? INFINITY : v != v ? v : p * scale;
}

static inline float silu(float v) { return v / (1.0f + exp_fast(-v)); }

static inline float read_one(int type, const void *p, int64_t i) {
    return type ? widen(((const bf16 *)p)[i]) : ((const float *)p)[i];
}

static inline float rounded(int type, float v) { return type ? widen(narrow(v)) : v; }

/* out [rows, n] = silu(gate) * up of [rows, 2n]; every step rounded to the type, as torch. */
CLONES void kernels_silu_and_mul(int type, void *out, const void *gate_up, int64_t rows, int64_t n) {
    for (int64_t r = 0; r < rows; r++) {
        if (type) {
            const bf16 *gate = (const bf16 *)gate_up + 2 * r * n, *up = gate + n;
            bf16 *to = (bf16 *)out + r * n;
            for (int64_t i = 0; i < n; i++) to[i] = narrow(widen(narrow(silu(widen(gate[i])))) * widen(up[i]));
        } else {
            const float *gate = (const float *)gate_up + 2 * r * n, *up = gate + n;
            float *to = (float *)out + r * n;
            for (int64_t i = 0; i < n; i++) to[i] = silu(gate[i]) * up[i];
        }
    }
}

/* ---- attention of sequences with one new token ---- */

/* One head, fp32 out: normed (norm may be NULL), its first `rotary` dimensions rotated, rounded to the type. */
static inline __attribute__((always_inline)) void rotate_head(int type, float *to, const void *from, const void *norm, const float *cos,
                                                              const float *sin, int64_t dim, int64_t rotary, float eps) {
    bf16 normed16[1024];
    float normed32[1024];
    if (norm) {
        norm_row(type, type ? (void *)normed16 : (void *)normed32, from, norm, dim, eps);
        from = type ? (const void *)normed16 : (const void *)normed32;
    }
    for (int64_t i = 0; i < dim; i++) to[i] = read_one(type, from, i);
    int64_t half = rotary / 2;
    for (int64_t i = 0; i < half; i++) {
        float a = to[i], b = to[half + i];
        to[i] = rounded(type, a * cos[i] - b * sin[i]);
        to[half + i] = rounded(type, b * cos[i] + a * sin[i]);
    }
}

static inline float dot_row(int type, const float *q, const void *key, int64_t dim) {
    float lanes[16] = {0};
    int64_t i = 0;
    if (type) {
        const bf16 *k = key;
        for (; i + 16 <= dim; i += 16)
            for (int l = 0; l < 16; l++) lanes[l] += q[i + l] * widen(k[i + l]);
        for (; i < dim; i++) lanes[0] += q[i] * widen(k[i]);
    } else {
        const float *k = key;
        for (; i + 16 <= dim; i += 16)
            for (int l = 0; l < 16; l++) lanes[l] += q[i + l] * k[i + l];
        for (; i < dim; i++) lanes[0] += q[i] * k[i];
    }
    for (int l = 8; l; l >>= 1)
        for (int j = 0; j < l; j++) lanes[j] += lanes[j + l];
    return lanes[0];
}

static inline void add_row(int type, float *sum, const void *value, float weight, int64_t dim) {
    if (type) {
        const bf16 *v = value;
        for (int64_t i = 0; i < dim; i++) sum[i] += weight * widen(v[i]);
    } else {
        const float *v = value;
        for (int64_t i = 0; i < dim; i++) sum[i] += weight * v[i];
    }
}

/* One row and one KV head: rotate, store the new key and value, attend with the head's group of queries. Online softmax
 * in blocks, so that memory does not grow with the context. */
#define SPECIALISED static inline __attribute__((always_inline))
SPECIALISED void attend_head(const struct attention *a, const int type, int64_t row, int64_t kv, float *space) {
    const size_t item = type ? 2 : 4;
    const int64_t dim = a->dim, group = a->heads / a->kv_heads, width = (a->heads + 2 * a->kv_heads) * dim;
    const char *line = (const char *)a->qkv + (size_t)(row * width) * item;
    const float *cos = a->cos + row * (a->rotary / 2), *sin = a->sin + row * (a->rotary / 2);
    const int64_t length = a->length[row], at = length - 1, *table = a->table + row * a->table_stride;
    float *q = space, *sum = q + group * dim, *best = sum + group * dim, *total = best + group, *score = total + group;
    for (int64_t g = 0; g < group; g++) {
        rotate_head(type, q + g * dim, line + (size_t)((kv * group + g) * dim) * item, a->q_norm, cos, sin, dim, a->rotary,
                    a->eps);
        best[g] = -INFINITY;
        total[g] = 0;
    }
    memset(sum, 0, sizeof(float) * (size_t)(group * dim));
    { /* the new key and value */
        const size_t slot = (size_t)(((table[at / a->block_size] * a->kv_heads + kv) * a->block_size + at % a->block_size) * dim);
        float *key = score; /* big enough: see scratch below */
        rotate_head(type, key, line + (size_t)((a->heads + kv) * dim) * item, a->k_norm, cos, sin, dim, a->rotary, a->eps);
        if (type)
            for (int64_t i = 0; i < dim; i++) ((bf16 *)a->keys)[slot + i] = narrow(key[i]);
        else
            memcpy((float *)a->keys + slot, key, sizeof(float) * (size_t)dim);
        memcpy((char *)a->values + slot * item, line + (size_t)((a->heads + a->kv_heads + kv) * dim) * item, (size_t)dim * item);
    }
    int64_t first = a->window > 0 && length > a->window ? length - a->window : 0;
    for (int64_t block = first / a->block_size; block * a->block_size < length; block++) {
        const int64_t base = block * a->block_size;
        const int64_t from = first > base ? first - base : 0;
        const int64_t to = length - base < a->block_size ? length - base : a->block_size;
        const size_t head = (size_t)((table[block] * a->kv_heads + kv) * a->block_size * dim) * item;
        const char *keys = (const char *)a->keys + head, *values = (const char *)a->values + head;
        for (int64_t g = 0; g < group; g++) {
            float peak = best[g];
            for (int64_t j = from; j < to; j++) {
                score[j] = dot_row(type, q + g * dim, keys + (size_t)(j * dim) * item, dim) * a->scale;
                if (score[j] > peak || score[j] != score[j]) peak = score[j];
            }
            if (peak > best[g] && total[g] > 0) {
                float shrink = exp_fast(best[g] - peak);
                total[g] *= shrink;
                for (int64_t i = 0; i < dim; i++) sum[g * dim + i] *= shrink;
            }
            best[g] = peak;
            for (int64_t j = from; j < to; j++) score[j] = exp_fast(score[j] - peak);
            for (int64_t j = from; j < to; j++) {
                total[g] += score[j];
                add_row(type, sum + g * dim, values + (size_t)(j * dim) * item, score[j], dim);
            }
        }
    }
    char *out = (char *)a->out + (size_t)((row * a->heads + kv * group) * dim) * item;
    for (int64_t g = 0; g < group; g++)
        for (int64_t i = 0; i < dim; i++) {
            float v = sum[g * dim + i] / total[g];
            if (type)
                ((bf16 *)out)[g * dim + i] = narrow(v);
            else
                ((float *)out)[g * dim + i] = v;
        }
}

CLONES static void attention_part(const struct attention *a, int64_t from, int64_t to, float *space) {
    for (int64_t i = from; i < to; i++) {
        if (a->type)
            attend_head(a, 1, i / a->kv_heads, i % a->kv_heads, space);
        else
            attend_head(a, 0, i / a->kv_heads, i % a->kv_heads, space);
    }
}

static void attention_body(void *p, int thread, int threads) {
    struct attention *a = p;
    const int64_t group = a->heads / a->kv_heads, jobs = a->rows * a->kv_heads;
    const int64_t first = jobs * thread / threads, last = jobs * (thread + 1) / threads;
    if (a->type && kernels_wide_attention(a, first, last)) return;
    const int64_t scratch = a->block_size > a->dim ? a->block_size : a->dim;
    float *space = malloc(sizeof(float) * (size_t)(2 * group * a->dim + 2 * group + scratch));
    if (!space) {
        *a->failed = 1;
        return;
    }
    attention_part(a, first, last, space);
    free(space);
}

/* Returns 0, 1 if memory ran out. dim <= 1024. All index arrays int64. window 0: full attention. */
int kernels_attend(int type, void *out, const void *qkv, void *keys, void *values, const float *cos, const float *sin,
                   const void *q_norm, const void *k_norm, const int64_t *table, const int64_t *length, int64_t rows,
                   int64_t heads, int64_t kv_heads, int64_t dim, int64_t rotary, int64_t block_size, int64_t table_stride,
                   int64_t window, float scale, float eps, int threads) {
    int failed = 0;
    struct attention a = {type, out,    qkv,   keys,       values,       cos,    sin,   q_norm, k_norm, table,  length,
                          rows, heads,  kv_heads, dim,     rotary,       block_size, table_stride, window, scale, eps, &failed};
    kernels_parallel(attention_body, &a, threads);
    return failed;
}

static struct PyModuleDef module = {PyModuleDef_HEAD_INIT, "_kernels", "Called through ctypes.", -1, NULL};
PyMODINIT_FUNC PyInit__kernels(void) { return PyModule_Create(&module); }
