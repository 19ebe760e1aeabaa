/* What one rank does to its shard of the logits, row by row: peak, mass, Gumbel noise, best candidates.
 *
 * engine/sampling/logits_shard.py calls it through ctypes and describes the row layout; engine/sampling/philox.py says the same noise in torch,
 * to the last bit: only IEEE additions, multiplications and divisions, in one order, never fused
 * (-ffp-contract=off). Plain C11, no state, no threads.
 */
#define PY_SSIZE_T_CLEAN
#include <Python.h>

#include <math.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

#if defined(__x86_64__) && defined(__linux__) && defined(__GLIBC__) && defined(__GNUC__) && !defined(__clang__)
#define VECTOR __attribute__((target_clones("arch=x86-64-v4", "arch=x86-64-v3", "default")))
#else
#define VECTOR
#endif

enum { CHUNK = 256, NOISE = 1, MASS = 2, LIMIT = 4, FLOAT32 = 0, BFLOAT16 = 1 };

typedef struct {
    uint64_t logits; /* address of the row's first column */
    uint64_t seed;
    double inv_temperature;
    double reference; /* MASS: exponentials are taken of (x - reference) * inv_temperature; NaN: the row's own peak */
    uint32_t position, choice;
    int32_t dtype, flags;
    float limit; /* LIMIT: only columns that come before (limit, limit_id) in order of falling x, rising id */
    int32_t limit_id;
    double peak, mass, best; /* best: x / temperature + Gumbel */
    int64_t count;           /* LIMIT: how many columns come before it */
    int32_t peak_id, best_id, bad, unused;
} row_t;

/* ---- Philox4x32-10 (Salmon, Moraes, Dror and Shaw, SC'11) ---- */

#define M0 0xD2511F53u
#define M1 0xCD9E8D57u
#define W0 0x9E3779B9u
#define W1 0xBB67AE85u

static inline void philox_round(uint32_t c[4], uint32_t k0, uint32_t k1)
{
    uint64_t p0 = (uint64_t)M0 * c[0], p1 = (uint64_t)M1 * c[2];
    uint32_t d0 = (uint32_t)(p1 >> 32) ^ c[1] ^ k0, d2 = (uint32_t)(p0 >> 32) ^ c[3] ^ k1;
    c[0] = d0;
    c[1] = (uint32_t)p1;
    c[2] = d2;
    c[3] = (uint32_t)p0;
}

/* high[i], low[i]: the first two words of the block of counter (position, first + i, choice, 0), i < CHUNK */
VECTOR static void philox_words(uint64_t seed, uint32_t position, uint32_t choice, uint32_t first,
                                uint32_t *restrict high, uint32_t *restrict low)
{
    uint32_t k0 = (uint32_t)seed, k1 = (uint32_t)(seed >> 32);
    for (int i = 0; i < CHUNK; i++) {
        uint32_t c[4] = {position, first + (uint32_t)i, choice, 0}, a = k0, b = k1;
        for (int r = 0; r < 10; r++, a += W0, b += W1)
            philox_round(c, a, b);
        high[i] = c[0];
        low[i] = c[1];
    }
}

/* ---- the noise, one value ---- */

static inline double from_bits(uint64_t bits)
{
    double x;
    memcpy(&x, &bits, 8);
    return x;
}

static inline uint64_t to_bits(double x)
{
    uint64_t bits;
    memcpy(&bits, &x, 8);
    return bits;
}

/* Natural logarithm of a normal positive x: x = 2^k m, m in [sqrt 1/2, sqrt 2), log m = 2 atanh((m - 1) / (m + 1)). */
static double logarithm(double x)
{
    int64_t bits = (int64_t)to_bits(x), k = (bits - 0x3FE6A09E667F3BCD) >> 52;
    double m = from_bits((uint64_t)bits - ((uint64_t)k << 52)), f = m - 1.0, s = f / (2.0 + f), q = s * s;
    double p = 1.0 / 19.0;
    p = p * q + 1.0 / 17.0;
    p = p * q + 1.0 / 15.0;
    p = p * q + 1.0 / 13.0;
    p = p * q + 1.0 / 11.0;
    p = p * q + 1.0 / 9.0;
    p = p * q + 1.0 / 7.0;
    p = p * q + 1.0 / 5.0;
    p = p * q + 1.0 / 3.0;
    p = p * q + 1.0;
    return (double)k * 0.6931471805599453 + 2.0 * s * p;
}

/* 52 random bits -> the midpoint of their interval of (0, 1) -> Gumbel */
static double gumbel(uint32_t high, uint32_t low)
{
    uint64_t bits = ((uint64_t)high << 20) | (low >> 12);
    double u = (from_bits(0x3FF0000000000000u | bits) - 1.0) + 0x1p-53;
    return -logarithm(-logarithm(u));
}

static double gumbel_at(uint64_t seed, uint32_t position, uint32_t choice, uint32_t id)
{
    uint32_t c[4] = {position, id, choice, 0}, k0 = (uint32_t)seed, k1 = (uint32_t)(seed >> 32);
    for (int r = 0; r < 10; r++, k0 += W0, k1 += W1)
        philox_round(c, k0, k1);
    return gumbel(c[0], c[1]);
}

/* ---- vectorised passes over one chunk ---- */

/* CHUNK values as float; beyond `count` they are -inf */
VECTOR static void load(int dtype, const void *row, long at, long count, float *restrict x)
{
    long n = count < CHUNK ? count : CHUNK;
    if (dtype == FLOAT32) {
        memcpy(x, (const float *)row + at, (size_t)n * 4);
    } else {
        const uint16_t *restrict h = (const uint16_t *)row + at;
        uint32_t *restrict bits = (uint32_t *)x;
        for (long i = 0; i < n; i++)
            bits[i] = (uint32_t)h[i] << 16;
    }
    for (long i = n; i < CHUNK; i++)
        x[i] = -INFINITY;
}

/* The largest value; *bad is set if one is NaN or +inf. */
VECTOR static float chunk_peak(const float *restrict x, int32_t *bad)
{
    float m[32];
    int32_t wrong[32] = {0};
    for (int l = 0; l < 32; l++)
        m[l] = -INFINITY;
    for (int i = 0; i < CHUNK; i += 32)
        for (int l = 0; l < 32; l++) {
            m[l] = x[i + l] > m[l] ? x[i + l] : m[l];
            wrong[l] |= x[i + l] < INFINITY ? 0 : 1;
        }
    for (int w = 16; w; w /= 2)
        for (int l = 0; l < w; l++) {
            m[l] = m[l + w] > m[l] ? m[l + w] : m[l];
            wrong[l] |= wrong[l + w];
        }
    *bad |= wrong[0];
    return m[0];
}

/* Sum of exp((x - reference) * scale) in fp64; every x <= reference. Relative error of a term: 1e-14. */
VECTOR static double chunk_mass(const float *restrict x, double reference, double scale)
{
    double sum[16] = {0};
    for (int i = 0; i < CHUNK; i += 16)
        for (int l = 0; l < 16; l++) {
            double y = ((double)x[i + l] - reference) * scale;
            int64_t live = y > -700.0 ? -1 : 0;
            y = y > -700.0 ? y : 0.0;
            double shifted = y * 1.4426950408889634 + 6755399441055744.0, n = shifted - 6755399441055744.0;
            double r = (y - n * 0.693147180369123816490) - n * 1.90821492927058770002e-10;
            double p = 1.0 / 479001600.0;
            p = p * r + 1.0 / 39916800.0;
            p = p * r + 1.0 / 3628800.0;
            p = p * r + 1.0 / 362880.0;
            p = p * r + 1.0 / 40320.0;
            p = p * r + 1.0 / 5040.0;
            p = p * r + 1.0 / 720.0;
            p = p * r + 1.0 / 120.0;
            p = p * r + 1.0 / 24.0;
            p = p * r + 1.0 / 6.0;
            p = p * r + 0.5;
            p = p * r + 1.0;
            p = p * r + 1.0;
            union {
                double d;
                int64_t i;
            } power = {.d = shifted}, term = {.d = p};
            term.i = (term.i + (power.i << 52)) & live;
            sum[l] += term.d;
        }
    for (int w = 8; w; w /= 2)
        for (int l = 0; l < w; l++)
            sum[l] += sum[l + w];
    return sum[0];
}

/* Columns that do not come before (limit, limit_id) become -inf; returns how many do. */
VECTOR static int64_t chunk_limit(float *restrict x, long count, float limit, long limit_at)
{
    int32_t before[CHUNK], n = count < CHUNK ? (int32_t)count : CHUNK, total = 0;
    int32_t at = limit_at > CHUNK ? CHUNK : limit_at < 0 ? 0 : (int32_t)limit_at;
    for (int i = 0; i < CHUNK; i++)
        before[i] = (x[i] > limit) | ((x[i] == limit) & (i < at));
    for (int i = 0; i < CHUNK; i++) {
        x[i] = before[i] ? x[i] : -INFINITY;
        total += i < n ? before[i] : 0;
    }
    return total;
}

/* Whether any x[i] * scale + Gumbel can reach `best`, and which (hope). v = 1 - u <= -log u, so that takes v <= exp(x * scale - best); the
 * exponential is bounded from above by interpolating 2^t between whole t: that is reading a fixed-point number as a
 * float. */
VECTOR static int chunk_hopeful(const float *restrict x, const uint32_t *restrict high, float peak, double scale,
                                double best, uint8_t *restrict hope)
{
    /* relative to the peak, so that large logits at a small temperature lose no bits */
    float slope = (float)(scale * 12102203.161561485);
    float offset = (float)((best - (double)peak * scale) * 12102203.161561485);
    int32_t any[16] = {0};
    for (int i = 0; i < CHUNK; i += 16)
        for (int l = 0; l < 16; l++) {
            float t = (x[i + l] - peak) * slope - offset;
            t = t < 0.0f ? t : 0.0f;
            t = t > -1.0e9f ? t : -1.0e9f;
            union {
                int32_t i;
                float f;
            } bound = {.i = (int32_t)t + 1065353216};
            float v = (float)(int32_t)((~high[i + l]) >> 1);
            int32_t can = v <= bound.f * 2150000000.0f + 1.0f ? 1 : 0;
            any[l] |= can;
            hope[i + l] = (uint8_t)can;
        }
    for (int l = 1; l < 16; l++)
        any[0] |= any[l];
    return any[0];
}

/* ---- one row ---- */

typedef struct {
    double score;
    long column;
} best_t;

static inline void try_column(best_t *best, const row_t *row, float x, long column, uint32_t high, uint32_t low)
{
    double score = (double)x * row->inv_temperature + gumbel(high, low);
    if (score > best->score || (score == best->score && column < best->column)) {
        best->score = score;
        best->column = column;
    }
}

static void scan_row(row_t *row, long columns, long first)
{
    const void *logits = (const void *)(uintptr_t)row->logits;
    float x[CHUNK] __attribute__((aligned(64)));
    uint32_t high[CHUNK] __attribute__((aligned(64))), low[CHUNK] __attribute__((aligned(64)));
    uint8_t hope[CHUNK] __attribute__((aligned(64)));
    float peak = -INFINITY;
    long peak_at = -1;
    row->bad = 0;
    row->mass = 0.0;
    row->count = 0;
    row->best = -INFINITY;
    row->best_id = -1;
    for (long at = 0; at < columns; at += CHUNK) {
        load(row->dtype, logits, at, columns - at, x);
        if (row->flags & LIMIT)
            row->count += chunk_limit(x, columns - at, row->limit, row->limit_id - first - at);
        float top = chunk_peak(x, &row->bad);
        if (top > peak) {
            long i = 0;
            while (x[i] != top)
                i++;
            peak = top;
            peak_at = at + i;
        }
    }
    row->peak = peak;
    row->peak_id = peak_at < 0 ? -1 : (int32_t)(first + peak_at);
    if (row->bad || peak_at < 0 || !(row->flags & (NOISE | MASS)))
        return;

    double reference = isnan(row->reference) ? row->peak : row->reference;
    best_t best = {-INFINITY, -1};
    if (row->flags & NOISE) {
        best.score = row->peak * row->inv_temperature
                     + gumbel_at(row->seed, row->position, row->choice, (uint32_t)row->peak_id);
        best.column = peak_at;
    }
    for (long at = 0; at < columns; at += CHUNK) {
        long n = columns - at < CHUNK ? columns - at : CHUNK;
        load(row->dtype, logits, at, columns - at, x);
        if (row->flags & LIMIT)
            chunk_limit(x, n, row->limit, row->limit_id - first - at);
        int32_t ignored = 0;
        double top = chunk_peak(x, &ignored);
        /* What lies 60 below the reference is beyond the last bit of a sum that holds its 1. */
        if ((row->flags & MASS) && (top - reference) * row->inv_temperature > -60.0)
            row->mass += chunk_mass(x, reference, row->inv_temperature);
        if (!(row->flags & NOISE))
            continue;
        /* No Gumbel value is above 36.8. */
        if (!(top * row->inv_temperature + 37.0 >= best.score))
            continue;
        philox_words(row->seed, row->position, row->choice, (uint32_t)(first + at), high, low);
        if (!chunk_hopeful(x, high, peak, row->inv_temperature, best.score, hope))
            continue;
        for (long i = 0; i < n; i++)
            if (hope[i] && x[i] > -INFINITY)
                try_column(&best, row, x[i], at + i, high[i], low[i]);
    }
    row->best = best.score;
    row->best_id = best.column < 0 ? -1 : (int32_t)(first + best.column);
}

/* Fills the outputs of n rows of `columns` logits whose first column is vocabulary id `first`. */
void laddertron_scan(row_t *rows, long n, long columns, long first)
{
    for (long i = 0; i < n; i++)
        scan_row(rows + i, columns, first);
}

/* Gumbel noise of n (seed, position, choice, id). */
void laddertron_gumbel(const uint64_t *seed, const uint32_t *position, const uint32_t *choice, const uint32_t *id,
                       double *out, long n)
{
    for (long i = 0; i < n; i++)
        out[i] = gumbel_at(seed[i], position[i], choice[i], id[i]);
}

/* ---- the k best columns: larger x first, then smaller id ---- */

/* A number that orders as (x, -column) does. */
static inline uint64_t order_key(float x, long column)
{
    uint32_t bits;
    x += 0.0f; /* -0 and +0 are one value */
    memcpy(&bits, &x, 4);
    bits = bits & 0x80000000u ? ~bits : bits | 0x80000000u;
    return ((uint64_t)bits << 32) | (0xFFFFFFFFu - (uint32_t)column);
}

static void sink(uint64_t *heap, long n, long i)
{
    uint64_t key = heap[i];
    for (;;) {
        long child = 2 * i + 1;
        if (child >= n)
            break;
        if (child + 1 < n && heap[child + 1] < heap[child])
            child++;
        if (key <= heap[child])
            break;
        heap[i] = heap[child];
        i = child;
    }
    heap[i] = key;
}

/* out[0 .. k-1]: the columns of one row, best first; k <= columns. 0, or -1 if there is no memory. */
int laddertron_top(const void *logits, int dtype, long columns, long k, int32_t *out)
{
    uint64_t *heap = malloc((size_t)k * sizeof *heap);
    float x[CHUNK] __attribute__((aligned(64)));
    long held = 0;
    float floor_x = -INFINITY;
    if (!heap)
        return -1;
    for (long at = 0; at < columns; at += CHUNK) {
        long n = columns - at < CHUNK ? columns - at : CHUNK;
        int32_t bad = 0;
        load(dtype, logits, at, columns - at, x);
        float top = chunk_peak(x, &bad);
        if (held == k && !(top > floor_x) && !bad)
            continue;
        for (long i = 0; i < n; i++) {
            uint64_t key = order_key(x[i], at + i);
            if (held < k) {
                heap[held++] = key;
                if (held == k)
                    for (long j = k / 2 - 1; j >= 0; j--)
                        sink(heap, k, j);
            } else if (key > heap[0]) {
                heap[0] = key;
                sink(heap, k, 0);
            }
        }
        if (held == k) {
            uint32_t bits = (uint32_t)(heap[0] >> 32);
            bits = bits & 0x80000000u ? bits & 0x7FFFFFFFu : ~bits;
            memcpy(&floor_x, &bits, 4);
        }
    }
    for (long n = k; n > 0; n--) { /* the smallest leaves first */
        uint64_t smallest = heap[0];
        heap[0] = heap[n - 1];
        sink(heap, n - 1, 0);
        out[n - 1] = (int32_t)(0xFFFFFFFFu - (uint32_t)smallest);
    }
    free(heap);
    return 0;
}

static struct PyModuleDef module = {PyModuleDef_HEAD_INIT, "_noise", "C symbols for ctypes; nothing for Python.", -1,
                                    NULL, NULL, NULL, NULL, NULL};

PyMODINIT_FUNC PyInit__noise(void) { return PyModule_Create(&module); }
