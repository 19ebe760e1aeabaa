/* Norm, gating, and attention token by token, as plain loops: what compilers turn into vector code.
 *
 * Included once a tier, with TARGET the attribute of its instructions (empty: the compiler's default). Arithmetic is fp32;
 * a row's result does not depend on the other rows of the batch.
 */
#include "kernels.h"

typedef float plain __attribute__((vector_size(4 * FLOATS)));
typedef uint32_t plain_bits __attribute__((vector_size(4 * FLOATS)));

/* What an RMS norm multiplies a row by. */
INLINE float norm_scale(const int type, const void *x, int64_t n, float eps) {
    float part[16] = {0};
    int64_t i = 0;
    for (; i + 16 <= n; i += 16)
        for (int l = 0; l < 16; l++) {
            const float v = read_one(type, x, i + l);
            part[l] += v * v;
        }
    for (; i < n; i++) part[0] += read_one(type, x, i) * read_one(type, x, i);
    float sum = 0;
    for (int l = 0; l < 16; l++) sum += part[l];
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
    return add_product(sum, a, b);
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
    uint16_t halves __attribute__((vector_size(2 * FLOATS)));
    memcpy(&halves, (const uint16_t *)row + at, sizeof halves);
    const plain_bits bits = __builtin_convertvector(halves, plain_bits);
    if (type == BF16) return (plain)(bits << 16);
    v = (plain)((bits & 0x7fff) << 13) * 0x1p112f;
    return (plain)((plain_bits)v | (((plain_bits)((bits & 0x7c00) == 0x7c00)) & 0x7f800000) | (bits & 0x8000) << 16);
#endif
}

/* EVERY(f, w): f(k, w) of every float k. */
#if FLOATS == 16
#define EVERY(f, w) f(0, w), f(1, w), f(2, w), f(3, w), f(4, w), f(5, w), f(6, w), f(7, w), \
                    f(8, w), f(9, w), f(10, w), f(11, w), f(12, w), f(13, w), f(14, w), f(15, w)
#elif FLOATS == 8
#define EVERY(f, w) f(0, w), f(1, w), f(2, w), f(3, w), f(4, w), f(5, w), f(6, w), f(7, w)
#else
#define EVERY(f, w) f(0, w), f(1, w), f(2, w), f(3, w)
#endif
#define OWN(k, w) ((k) & (w) ? FLOATS + (k) : (k))
#define OTHER(k, w) ((k) & (w) ? FLOATS + ((k) ^ (w)) : (k) ^ (w))
#define ACROSS(k, w) ((k) ^ (w))
/* Floats w apart, added: a's where the place has no bit w, else b's. */
#define FOLD(a, b, w) (__builtin_shuffle(a, b, (plain_bits){EVERY(OWN, w)}) + __builtin_shuffle(a, b, (plain_bits){EVERY(OTHER, w)}))
#define FOLD_ALL(sum, w) \
    for (int j = 0; j < (w); j++) sum[j] = FOLD(sum[j], sum[j + (w)], w)

/* Products of q and FLOATS keys [count][dim], the first's again where there are fewer. */
INLINE TARGET plain dot_keys(const int type, const float *q, const void *keys, int64_t count, int64_t dim) {
    plain sum[FLOATS];
    int64_t i = 0;
#pragma GCC unroll 16
    for (int j = 0; j < FLOATS; j++) sum[j] = (plain){0};
    for (; i + FLOATS <= dim; i += FLOATS) {
        const plain part = plain_load(FP32, q, i);
#pragma GCC unroll 16
        for (int j = 0; j < FLOATS; j++) sum[j] = plain_add(sum[j], part, plain_load(type, keys, (j < count ? j : 0) * dim + i));
    }
    for (; i < dim; i++)
        for (int j = 0; j < FLOATS; j++) sum[j][0] += q[i] * read_one(type, keys, (j < count ? j : 0) * dim + i);
#if FLOATS > 8
    FOLD_ALL(sum, 8);
#endif
#if FLOATS > 4
    FOLD_ALL(sum, 4);
#endif
    FOLD_ALL(sum, 2);
    FOLD_ALL(sum, 1);
    return sum[0];
}

/* The greater at each place; NaN if b has it there. */
INLINE TARGET plain plain_most(plain a, plain b) {
    const plain_bits take = (plain_bits)(b > a) | (plain_bits)(b != b);
    return (plain)((take & (plain_bits)b) | (~take & (plain_bits)a));
}

#define MOST_ACROSS(v, w) v = plain_most(v, __builtin_shuffle(v, (plain_bits){EVERY(ACROSS, w)}))
INLINE TARGET float most_of(plain v) {
#if FLOATS > 8
    MOST_ACROSS(v, 8);
#endif
#if FLOATS > 4
    MOST_ACROSS(v, 4);
#endif
    MOST_ACROSS(v, 2);
    MOST_ACROSS(v, 1);
    return v[0];
}

INLINE TARGET plain plain_exp(plain v) {
#ifdef OF
    return exp_vector(v);
#else
    for (int l = 0; l < FLOATS; l++) v[l] = exp_fast(v[l]);
    return v;
#endif
}

/* One query on its way through a context: the best score, the sum of weights by place, that of weighted values. */
struct walk {
    float *q, *sum; /* [dim] */
    plain total;
    float best, *weight; /* of a block's positions, to a whole vector */
    int64_t from, to;    /* of a block's positions, those that it sees */
    int64_t first, length;
};

/* Of G queries (a constant) that see the same positions: K vectors (a constant) of the sums, from `at` on, += weights x values
 * [][dim]. The arrays' sizes are constant, too: else they would not live in registers. */
INLINE TARGET void add_some(const int type, const int G, const int K, struct walk *const *w, const void *values, int64_t dim, int64_t at) {
    plain part[4 * 4];
    const int64_t from = w[0]->from, to = w[0]->to;
    const float *weight[4];
#pragma GCC unroll 4
    for (int g = 0; g < G; g++) weight[g] = w[g]->weight - from;
#pragma GCC unroll 16
    for (int n = 0; n < G * K; n++) part[n] = plain_load(FP32, w[n / K]->sum, at + n % K * FLOATS);
    for (int64_t j = from; j < to; j++) {
        plain value[4];
#pragma GCC unroll 4
        for (int k = 0; k < K; k++) value[k] = plain_load(type, values, j * dim + at + k * FLOATS);
#pragma GCC unroll 16
        for (int n = 0; n < G * K; n++) part[n] = plain_add(part[n], plain_all(weight[n / K][j]), value[n % K]);
    }
#pragma GCC unroll 16
    for (int n = 0; n < G * K; n++) memcpy(w[n / K]->sum + at + n % K * FLOATS, part + n, sizeof part[n]);
}

INLINE TARGET void add_values(const int type, const int G, struct walk *const *w, const void *values, int64_t dim) {
    enum { K = FLOATS == 16 ? 4 : 2 };
    int64_t i = 0;
    for (; i + K * FLOATS <= dim; i += K * FLOATS) add_some(type, G, K, w, values, dim, i);
    for (; i + FLOATS <= dim; i += FLOATS) add_some(type, G, 1, w, values, dim, i);
    for (int g = 0; g < G; g++)
        for (int64_t at = i; at < dim; at++)
            for (int64_t j = w[g]->from; j < w[g]->to; j++) w[g]->sum[at] += w[g]->weight[j - w[g]->from] * read_one(type, values, j * dim + at);
}

/* The scores of a block's positions become weights. */
INLINE TARGET void weigh(const int type, struct walk *w, const void *keys, int64_t dim, float scale) {
    plain most = plain_all(w->best);
    const int64_t count = w->to - w->from;
    for (int64_t j = 0; j < count; j += FLOATS) {
        plain s = dot_keys(type, w->q, (const char *)keys + (size_t)((w->from + j) * dim) * size_of(type), count - j, dim) * scale;
        for (int l = 0; l < FLOATS && count - j < FLOATS; l++) s[l] = l < count - j ? s[l] : -INFINITY;
        most = plain_most(most, s);
        memcpy(w->weight + j, &s, sizeof s);
    }
    const float peak = most_of(most);
    if (peak != w->best) {
        const float shrink = exp_fast(w->best - peak);
        w->total *= shrink;
        for (int64_t i = 0; i < dim; i++) w->sum[i] *= shrink;
        w->best = peak;
    }
    for (int64_t j = 0; j < count; j += FLOATS) {
        plain weight;
        memcpy(&weight, w->weight + j, sizeof weight);
        weight = plain_exp(weight - peak);
        memcpy(w->weight + j, &weight, sizeof weight);
        w->total += weight;
    }
}

/* The new key and value of a row, rotated. */
INLINE TARGET void store_new(const struct attention *a, const int type, int64_t row, int64_t kv, float *key) {
    const size_t item = size_of(type);
    const int64_t dim = a->dim, at = a->length[row] - 1, *table = a->table + row * a->table_stride;
    const char *own = (const char *)a->qkv + (size_t)((row * (a->heads + 2 * a->kv_heads) + a->heads + kv) * dim) * item;
    const int64_t slot = ((table[at / a->block_size] * a->kv_heads + kv) * a->block_size + at % a->block_size) * dim;
    rotate_head(type, key, own, a->k_norm, a->cos + row * (a->rotary / 2), a->sin + row * (a->rotary / 2), dim, a->rotary, a->eps);
    for (int64_t i = 0; i < dim; i++) write_one(type, a->keys, slot + i, key[i]);
    memcpy((char *)a->values + (size_t)slot * item, own + (size_t)(a->kv_heads * dim) * item, (size_t)dim * item);
}

/* Rows of one block table, and one KV head: each row's group of queries, rotated, goes through its context block by block,
 * so that memory does not grow with it, and all of them together, so that a block is fetched once. Softmax online. */
INLINE TARGET void attend_rows(const struct attention *a, const int type, int64_t row, int64_t rows, int64_t kv, float *space) {
    const size_t item = size_of(type);
    const int64_t dim = a->dim, group = a->heads / a->kv_heads, count = rows * group, *table = a->table + row * a->table_stride;
    const int64_t room = 2 * dim + (a->block_size + FLOATS - 1) / FLOATS * FLOATS;
    struct walk walks[count], *seeing[count];
    int64_t first = INT64_MAX, length = 0;
    for (int64_t n = 0; n < count; n++) {
        const int64_t r = row + n / group, head = kv * group + n % group;
        struct walk *w = walks + n;
        *w = (struct walk){.q = space + n * room, .best = -INFINITY, .length = a->length[r]};
        w->sum = w->q + dim, w->weight = w->sum + dim;
        w->first = a->window > 0 && w->length > a->window ? w->length - a->window : 0;
        first = w->first < first ? w->first : first;
        length = w->length > length ? w->length : length;
        rotate_head(type, w->q, (const char *)a->qkv + (size_t)((r * (a->heads + 2 * a->kv_heads) + head) * dim) * item, a->q_norm,
                    a->cos + r * (a->rotary / 2), a->sin + r * (a->rotary / 2), dim, a->rotary, a->eps);
        memset(w->sum, 0, sizeof(float) * (size_t)dim);
    }
    for (int64_t block = first / a->block_size; block * a->block_size < length; block++) {
        const int64_t base = block * a->block_size, end = base + a->block_size;
        const size_t offset = (size_t)((table[block] * a->kv_heads + kv) * a->block_size * dim) * item;
        const char *keys = (const char *)a->keys + offset, *values = (const char *)a->values + offset;
        int64_t here = 0;
        for (struct walk *w = walks; w < walks + count; w++) {
            w->from = w->first > base ? w->first - base : 0, w->to = (w->length < end ? w->length : end) - base;
            if (w->from >= w->to) continue;
            weigh(type, w, keys, dim, a->scale);
            seeing[here++] = w;
        }
        for (int64_t n = 0; n < here;) {
            int64_t same = 1;
            while (n + same < here && seeing[n + same]->from == seeing[n]->from && seeing[n + same]->to == seeing[n]->to) same++;
            for (; same >= 4; n += 4, same -= 4) add_values(type, 4, seeing + n, values, dim);
            for (; same; n++, same--) add_values(type, 1, seeing + n, values, dim);
        }
    }
    for (int64_t n = 0; n < count; n++) {
        float total[FLOATS];
        memcpy(total, &walks[n].total, sizeof total);
        for (int l = FLOATS / 2; l; l >>= 1)
            for (int j = 0; j < l; j++) total[j] += total[j + l];
        if (a->sinks) total[0] += expf(a->sinks[kv * group + n % group] - walks[n].best);
        for (int64_t i = 0; i < dim; i++)
            write_one(type, a->out, ((row + n / group) * a->heads + kv * group + n % group) * dim + i, walks[n].sum[i] / total[0]);
    }
}

/* Rows from `row` on that share the block table of the first. */
INLINE int64_t alike(const struct attention *a, int64_t row, int64_t rows) {
    const int64_t *table = a->table + row * a->table_stride;
    int64_t n = 1;
    while (n < rows && !memcmp(table, table + n * a->table_stride,
                               sizeof *table * (size_t)((a->length[row + n] + a->block_size - 1) / a->block_size)))
        n++;
    return n;
}

INLINE TARGET void attention_of(const struct attention *a, const int type, int64_t row, int64_t rows, int64_t kv, float *space) {
    for (int64_t n; rows; row += n, rows -= n) {
        n = a->stage == 1 ? rows : alike(a, row, rows);
        for (int64_t r = row; r < row + n && a->stage != 2; r++) store_new(a, type, r, kv, space);
        if (a->stage != 1) attend_rows(a, type, row, n, kv, space);
    }
}

TARGET static void attention(const struct attention *a, int64_t row, int64_t rows, int64_t kv, float *space) {
    if (a->type == FP32)
        attention_of(a, FP32, row, rows, kv, space);
    else if (a->type == BF16)
        attention_of(a, BF16, row, rows, kv, space);
    else
        attention_of(a, FP16, row, rows, kv, space);
}
