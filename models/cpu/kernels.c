/* CPU kernels of a decode step: norm, gating, and paged attention for sequences with one new token.
 *
 * Beside the matrix products these are what a step of few tokens spends its time on: torch needs a dozen small operators
 * for each, with a dispatch and a temporary apiece, and copies the whole context to gather it. The loops are
 * plain_loops.h's, in the instance of the tier in force.
 */
#include "kernels.h"

#define PY_SSIZE_T_CLEAN
#include <Python.h>

#define TARGET
#define FLOATS 4
#include "plain_loops.h"
#include "experts_sum.h"
#include "latent_loops.h"
#include "lane_loops.h"
#include "products_plain.h"
#include "products_packed.h"

/* ---- the tier ---- */

PLAIN(fp32, FP32)
PLAIN(bf16, BF16)
PLAIN(fp16, FP16)
static const struct loops generic = {
    .floats = FLOATS,
    .rms_norm = rms_norm,
    .silu_and_mul = silu_and_mul,
    .join_lanes = join_lanes,
    .sum_lanes = sum_lanes,
    .attention = attention,
    .add_slots = add_slots,
    .latents = latent_chunk,
    .packed = {[FP32] = &packed_fp32_loops, [BF16] = &packed_bf16_loops, [FP16] = &packed_fp16_loops},
    .products = {[FP32] = &plain_fp32_loops, [BF16] = &plain_bf16_loops, [FP16] = &plain_fp16_loops},
};

int kernels_tier = GENERIC;
const struct loops *kernels_loops = &generic;

/* What the processor has, or less. Called before anything else. 0: with AMX, where the system does not allow its tiles, so that
 * AVX-512 BF16 computes. */
int kernels_set_tier(int tier) {
    int allowed = 1;
    kernels_loops = &generic;
    kernels_tier = GENERIC;
#ifdef WIDE_X86
    static struct loops dot;
    kernels_tier = tier;
    if (tier >= AVX512_BF16) {
        __builtin_cpu_init();
        dot = kernels_avx512;
        dot.products[BF16] = &kernels_dot;
        if (__builtin_cpu_supports("avx512vbmi")) dot.products[INT8] = &kernels_dot_int8;
        if (tier >= AMX) allowed = kernels_use_tiles(&dot);
        kernels_loops = &dot;
    } else if (tier >= AVX2)
        kernels_loops = tier >= AVX512 ? &kernels_avx512 : &kernels_avx2;
#else
    (void)tier;
#endif
    return allowed;
}

/* ---- norm, gating, attention of sequences with one new token ---- */

/* Of tokens of one sequence, that go through its context together. */
enum { QUERIES = 16 };

void kernels_rms_norm(int type, void *out, const void *x, const void *weight, int64_t rows, int64_t cols, float eps) {
    kernels_loops->rms_norm(type, out, x, weight, rows, cols, eps);
}

void kernels_silu_and_mul(int type, void *out, const void *gate_up, int64_t rows, int64_t n) {
    kernels_loops->silu_and_mul(type, out, gate_up, rows, n);
}

void kernels_join_lanes(int type, void *out, const void *x, int64_t x_lane, const void *own, const void *total, const void *past, int64_t lanes,
                        int64_t n) {
    kernels_loops->join_lanes(type, out, x, x_lane, own, total, past, lanes, n);
}

void kernels_sum_lanes(int type, void *out, const void *x, int64_t lanes, int64_t n) { kernels_loops->sum_lanes(type, out, x, lanes, n); }

/* out [tokens, heads + 2 kv_heads, dim] of qkv [lanes, tokens, (heads + 2 kv_heads) / lanes, dim]: all queries, all keys, all
 * values; bytes: of a head. */
void kernels_by_head(char *out, const char *qkv, int64_t lanes, int64_t tokens, int64_t heads, int64_t kv_heads, int64_t bytes) {
    const int64_t each[3] = {heads / lanes, kv_heads / lanes, kv_heads / lanes}, first[3] = {0, heads, heads + kv_heads};
    for (int64_t l = 0; l < lanes; l++)
        for (int64_t t = 0; t < tokens; t++)
            for (int part = 0; part < 3; part++) {
                const int64_t to = t * (heads + 2 * kv_heads) + first[part] + l * each[part];
                memcpy(out + to * bytes, qkv, (size_t)(each[part] * bytes));
                qkv += each[part] * bytes;
            }
}

static void attention_body(void *p, int thread, int threads) {
    struct attention *a = p;
    const int64_t group = a->heads / a->kv_heads, all = a->rows * a->kv_heads;
    if (a->type == BF16 && kernels_wide_attention(a, all * thread / threads, all * (thread + 1) / threads)) return;
    const int64_t rows = a->stage && group < QUERIES ? QUERIES / group : 1, tiles = (a->rows + rows - 1) / rows;
    float *space = malloc(sizeof(float) * (size_t)(rows * group * (2 * a->dim + a->block_size + 16)));
    if (!space) {
        *a->failed = 1;
        return;
    }
    for (int64_t job; (job = tiles * a->kv_heads - 1 - __atomic_fetch_add(a->next, 1, __ATOMIC_RELAXED)) >= 0;) {
        const int64_t row = job / a->kv_heads * rows;
        kernels_loops->attention(a, row, row + rows < a->rows ? rows : a->rows - row, job % a->kv_heads, space);
    }
    free(space);
}

/* out [rows, heads * dim] of qkv [rows, width]. Returns 0, 1 if memory ran out. stage: see struct attention. */
int kernels_attend(const struct attention_layer *l, const struct attention_step *s, void *out, const void *qkv, int64_t width, int stage) {
    int failed = 0;
    int64_t next = 0;
    struct attention a = {.type = l->type, .out = out, .qkv = qkv, .keys = l->keys, .values = l->values, .cos = s->cos, .sin = s->sin,
                          .q_norm = l->q_norm, .k_norm = l->k_norm, .table = s->table, .length = s->length, .rows = s->rows,
                          .heads = width / s->dim - 2 * s->kv_heads, .kv_heads = s->kv_heads, .dim = s->dim, .rotary = s->rotary,
                          .block_size = s->block_size, .table_stride = s->table_stride, .window = l->window, .scale = s->scale,
                          .eps = l->eps, .stage = stage, .next = &next, .failed = &failed, .sinks = l->sinks};
    kernels_parallel(attention_body, &a, s->threads);
    return failed;
}

/* A sub-block of few tokens in one call: total = x + added, where there is `added`; y = last(attention(first(total))), without
 * `layer` last(first(total)), without `last` first(total). x, added, total [tokens, first's inputs]. Returns 0, 1 if memory ran
 * out. */
int kernels_sub_block(const struct product *first, const struct product *last, const struct attention_layer *layer,
                      const struct attention_step *step, const void *x, const void *added, void *total, void *y, int64_t tokens) {
    if (added) kernels_loops->join_lanes(first->type, total, x, 0, added, NULL, NULL, 1, tokens * first->inputs);
    x = added ? total : x;
    if (!last) return kernels_product(first, x, y, tokens);
    const size_t size = size_of(first->type), line = CACHE_LINE - 1;
    const size_t made = (size * (size_t)(tokens * first->outputs) + line) & ~line, seen = layer ? size * (size_t)(tokens * last->inputs) : 0;
    char *between = aligned_alloc(CACHE_LINE, made + ((seen + line) & ~line));
    int failed = !between || kernels_product(first, x, between, tokens);
    if (layer) failed = failed || kernels_attend(layer, step, between + made, between, first->outputs, 0);
    failed = failed || kernels_product(last, layer ? between + made : between, y, tokens);
    free(between);
    return failed;
}

static struct PyModuleDef module = {.m_base = PyModuleDef_HEAD_INIT, .m_name = "_kernels", .m_doc = "Called through ctypes.", .m_size = -1};
PyMODINIT_FUNC PyInit__kernels(void) { return PyModule_Create(&module); }
