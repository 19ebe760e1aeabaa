/* Norm, gating, and attention of sequences with one new token, as plain loops: what compilers turn into vector code.
 *
 * Included once a tier, with TARGET the attribute of its instructions (empty: the compiler's default). Arithmetic is fp32;
 * a row's result does not depend on the other rows of the batch.
 */
#include "kernels.h"

typedef float plain __attribute__((vector_size(4 * LANES)));
typedef uint32_t plain_bits __attribute__((vector_size(4 * LANES)));

/* What an RMS norm multiplies a row by. */
INLINE float norm_scale(const int type, const void *x, int64_t n, float eps) {
    float lane[16] = {0};
    int64_t i = 0;
    for (; i + 16 <= n; i += 16)
        for (int l = 0; l < 16; l++) {
            const float v = read_one(type, x, i + l);
            lane[l] += v * v;
        }
    for (; i < n; i++) lane[0] += read_one(type, x, i) * read_one(type, x, i);
    float sum = 0;
    for (int l = 0; l < 16; l++) sum += lane[l];
    return 1.0f / sqrtf(sum / (float)n + eps);
}

/* RMS norm of one row into out (same type): statistics in fp32, rounded to the type before the weight, as torch. */
INLINE void norm_row(const int type, void *out, const void *x, const void *weight, int64_t n, float eps) {
    const float scale = norm_scale(type, x, n, eps);
    for (int64_t i = 0; i < n; i++) write_one(type, out, i, rounded(type, read_one(type, x, i) * scale) * read_one(type, weight, i));
}

INLINE void norm_rows(const int type, void *out, const void *x, const void *weight, int64_t rows, int64_t cols, float eps) {
    const int64_t step = cols * (int64_t)size_of(type);
    for (int64_t r = 0; r < rows; r++) norm_row(type, (char *)out + r * step, (const char *)x + r * step, weight, cols, eps);
}

TARGET static void rms_norm(int type, void *out, const void *x, const void *weight, int64_t rows, int64_t cols, float eps) {
    if (type == FP32)
        norm_rows(FP32, out, x, weight, rows, cols, eps);
    else if (type == BF16)
        norm_rows(BF16, out, x, weight, rows, cols, eps);
    else
        norm_rows(FP16, out, x, weight, rows, cols, eps);
}

/* e^v within 2 ulp (below -87: 0; above 88: infinity; NaN stays), in a form that compilers turn into vector code: 2^n times a polynomial
 * on [-ln2/2, ln2/2]. */
INLINE float exp_fast(float v) {
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

INLINE void gate_rows(const int type, void *out, const void *gate_up, int64_t rows, int64_t n) {
    for (int64_t r = 0; r < rows; r++) {
        const char *gate = (const char *)gate_up + 2 * r * n * (int64_t)size_of(type), *up = gate + n * (int64_t)size_of(type);
        for (int64_t i = 0; i < n; i++) {
            const float v = read_one(type, gate, i);
            write_one(type, (char *)out + r * n * (int64_t)size_of(type), i,
                      rounded(type, v / (1.0f + exp_fast(-v))) * read_one(type, up, i));
        }
    }
}

/* out [rows, n] = silu(gate) * up of [rows, 2n]; every step rounded to the type, as torch. */
TARGET static void silu_and_mul(int type, void *out, const void *gate_up, int64_t rows, int64_t n) {
    if (type == FP32)
        gate_rows(FP32, out, gate_up, rows, n);
    else if (type == BF16)
        gate_rows(BF16, out, gate_up, rows, n);
    else
        gate_rows(FP16, out, gate_up, rows, n);
}

/* One head, fp32 out: normed (norm may be NULL), its first `rotary` dimensions rotated, rounded to the type. */
INLINE void rotate_head(const int type, float *to, const void *from, const void *norm, const float *cos, const float *sin, int64_t dim,
                        int64_t rotary, float eps) {
    float normed32[1024];
    uint16_t normed16[1024];
    if (norm) {
        void *normed = type == FP32 ? (void *)normed32 : (void *)normed16;
        norm_row(type, normed, from, norm, dim, eps);
        from = normed;
    }
    for (int64_t i = 0; i < dim; i++) to[i] = read_one(type, from, i);
    int64_t half = rotary / 2;
    for (int64_t i = 0; i < half; i++) {
        float a = to[i], b = to[half + i];
        to[i] = rounded(type, a * cos[i] - b * sin[i]);
        to[half + i] = rounded(type, b * cos[i] + a * sin[i]);
    }
}

INLINE TARGET plain plain_all(float v) { return v - (plain){0}; }

/* sum + a * b, rounded once where the tier can, always or never. */
INLINE TARGET plain plain_add(plain sum, plain a, plain b) {
#ifdef OF
    return OF(fmadd_ps)(a, b, sum);
#else
    return sum + a * b;
#endif
}

/* A vector of a row. */
INLINE TARGET plain plain_load(const int type, const void *row, int64_t at) {
    plain v;
    if (type == FP32) {
        memcpy(&v, (const float *)row + at, sizeof v);
        return v;
    }
#ifdef OF
    return widened(type, LOAD_HALVES((const uint16_t *)row + at));
#else /* widen and widen_half */
    uint16_t halves __attribute__((vector_size(2 * LANES)));
    memcpy(&halves, (const uint16_t *)row + at, sizeof halves);
    const plain_bits bits = __builtin_convertvector(halves, plain_bits);
    if (type == BF16) return (plain)(bits << 16);
    v = (plain)((bits & 0x7fff) << 13) * 0x1p112f;
    return (plain)((plain_bits)v | (((plain_bits)((bits & 0x7c00) == 0x7c00)) & 0x7f800000) | (bits & 0x8000) << 16);
#endif
}

INLINE TARGET float dot_row(const int type, const float *q, const void *key, int64_t dim) {
    plain even = {0}, odd = {0};
    int64_t i = 0;
    for (; i + 2 * LANES <= dim; i += 2 * LANES) {
        even = plain_add(even, plain_load(FP32, q, i), plain_load(type, key, i));
        odd = plain_add(odd, plain_load(FP32, q, i + LANES), plain_load(type, key, i + LANES));
    }
    float lane[LANES];
    even += odd;
    memcpy(lane, &even, sizeof lane);
    for (; i < dim; i++) lane[0] += q[i] * read_one(type, key, i);
    for (int l = LANES / 2; l; l >>= 1)
        for (int j = 0; j < l; j++) lane[j] += lane[j + l];
    return lane[0];
}

/* K vectors (a constant) of sum, from `at` on, += weight [count] x values [count][dim]. */
INLINE TARGET void add_some(const int type, const int K, float *sum, const float *weight, const void *values, int64_t count, int64_t dim,
                            int64_t at) {
    plain part[K];
#pragma GCC unroll 4
    for (int k = 0; k < K; k++) part[k] = plain_load(FP32, sum, at + k * LANES);
    for (int64_t j = 0; j < count; j++)
#pragma GCC unroll 4
        for (int k = 0; k < K; k++) part[k] = plain_add(part[k], plain_all(weight[j]), plain_load(type, values, j * dim + at + k * LANES));
    memcpy(sum + at, part, sizeof part);
}

INLINE TARGET void add_values(const int type, float *sum, const float *weight, const void *values, int64_t count, int64_t dim) {
    int64_t i = 0;
    for (; i + 4 * LANES <= dim; i += 4 * LANES) add_some(type, 4, sum, weight, values, count, dim, i);
    for (; i + LANES <= dim; i += LANES) add_some(type, 1, sum, weight, values, count, dim, i);
    for (; i < dim; i++)
        for (int64_t j = 0; j < count; j++) sum[i] += weight[j] * read_one(type, values, j * dim + i);
}

/* One row and one KV head: rotate, store the new key and value, attend with the head's group of queries. Online softmax
 * in blocks, so that memory does not grow with the context. */
INLINE TARGET void attend_head(const struct attention *a, const int type, int64_t row, int64_t kv, float *space) {
    const size_t item = size_of(type);
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
    if (a->stage != 2) { /* the new key and value */
        const size_t slot = (size_t)(((table[at / a->block_size] * a->kv_heads + kv) * a->block_size + at % a->block_size) * dim);
        float *key = score; /* big enough: see attention_body's scratch */
        rotate_head(type, key, line + (size_t)((a->heads + kv) * dim) * item, a->k_norm, cos, sin, dim, a->rotary, a->eps);
        for (int64_t i = 0; i < dim; i++) write_one(type, a->keys, (int64_t)slot + i, key[i]);
        memcpy((char *)a->values + slot * item, line + (size_t)((a->heads + a->kv_heads + kv) * dim) * item, (size_t)dim * item);
    }
    if (a->stage == 1) return;
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
            for (int64_t j = from; j < to; j++) total[g] += score[j];
            add_values(type, sum + g * dim, score + from, values + (size_t)(from * dim) * item, to - from, dim);
        }
    }
    for (int64_t g = 0; g < group; g++)
        for (int64_t i = 0; i < dim; i++)
            write_one(type, a->out, (row * a->heads + kv * group + g) * dim + i, sum[g * dim + i] / total[g]);
}

TARGET static void attention(const struct attention *a, int64_t from, int64_t to, float *space) {
    for (int64_t i = from; i < to; i++) {
        if (a->type == FP32)
            attend_head(a, FP32, i / a->kv_heads, i % a->kv_heads, space);
        else if (a->type == BF16)
            attend_head(a, BF16, i / a->kv_heads, i % a->kv_heads, space);
        else
            attend_head(a, FP16, i / a->kv_heads, i % a->kv_heads, space);
    }
}
