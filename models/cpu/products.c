/* Matrix products y = x W^T for any number of tokens, with what stands before and behind them: RMS norm,
 * bias, gate.
 *
 * A decode step reads every weight once, so its speed is that of the memory: weights keep their type and lie in the order
 * in which they are read. Packed: blocks of 32 output rows, each of one panel or two of 2 x floats rows (one vector, `low`,
 * and another, `high`): bf16 [inputs / 2][rows][2 inputs], the others [inputs][rows]; the rows beyond the last are
 * zeros. Gated: `low` are rows of the gate and `high` those of `up` that belong to them. Int8 weights (one scale a row)
 * halve what is read; tokens stay bf16. Quantised weights of checkpoints: products_packed.h.
 * The inner loops are products_tiles.c's (AMX), products_dot.c's (AVX-512 BF16), products_vectors.h's (AVX2, AVX-512) and products_plain.h's. A token's result does not
 * depend on the other tokens of the call: every sum goes along the inputs in one order.
 *
 * With `leaves` (1, 2, 4, 8 or 16 that divide the inputs into even shares; no norm, no gate) each share is summed by itself,
 * the bias joins the first, and the sums are added two by two in a binary tree, rounded to the tokens' type at every
 * node, leaves included. So ranks that hold 16, 8, 4 … of a layer's 16 shares yield nodes of one tree, whose upper levels
 * the all-reduce adds likewise (topology/transport/reduce.h).
 */
#include "kernels.h"

enum { ROWS = 32, FEW = 16, STRETCH = 128 };

struct call {
    const struct product *p;
    const struct product_loops *loops;
    struct tokens given, tokens; /* the caller's, and those that `block` reads */
    int prepares;                /* a thread prepares all of them for itself */
    int64_t blocks, jobs;
    int64_t parts, (*next)[8]; /* jobs that lie together, and the next one of each part; a part's is a cache line */
    int failed;
};

/* Whether the products below run on tokens and weights of this type (INT8: bf16 tokens). */
int kernels_has_products(int type) { return kernels_loops->products[type] != NULL; }

/* Rows of a vector: what kernels_pack goes by. */
int kernels_vector_floats(void) { return kernels_loops->floats; }

/* The tokens [from, to) as `block` reads them, to their rows of `prepared`. */
void kernels_prepare(const struct product_loops *loops, const struct product *p, const struct tokens *given, void *prepared, int64_t stride,
                     int64_t from, int64_t to) {
    struct tokens all = *given;
    all.y = prepared, all.y_stride = stride;
    const struct tokens some = tokens_between(&all, from, to, size_of(p->type), loops->item);
    loops->prepare(p, &some);
}

static void product_body(void *args, int thread, int threads) {
    (void)threads;
    struct call *c = args;
    const struct product *p = c->p;
    const struct product_loops *loops = c->loops;
    struct tokens tokens = c->tokens;
    void *own = NULL;
    if (c->prepares) {
        own = malloc(loops->item * (size_t)(tokens.count * tokens.x_stride));
        if (!own) {
            c->failed = 1;
            return;
        }
        kernels_prepare(loops, p, &c->given, own, tokens.x_stride, 0, tokens.count);
        tokens.x = own;
    }
    for (int64_t turn = 0; turn < c->parts; turn++) { /* the thread's own part, then what is left of others' */
        const int64_t part = (thread + turn) % c->parts, end = c->jobs * (part + 1) / c->parts;
        for (int64_t job; (job = __atomic_fetch_add(c->next[part], 1, __ATOMIC_RELAXED)) < end;) {
            const int64_t block = job % c->blocks, from = job / c->blocks * STRETCH;
            const int64_t to = from + STRETCH < tokens.count ? from + STRETCH : tokens.count;
            const struct tokens some = tokens_between(&tokens, from, to, loops->item, size_of(p->type));
            loops->block(p, &some, block);
        }
    }
    free(own);
}

static void prepare_body(void *args, int thread, int threads) {
    struct call *c = args;
    const int64_t count = c->tokens.count;
    kernels_prepare(c->loops, c->p, &c->given, (void *)c->tokens.x, c->tokens.x_stride, count * thread / threads, count * (thread + 1) / threads);
}

/* Whether the tokens must be prepared by all threads together before the product. `next`: of p->threads parts. */
static int begin(struct call *c, const struct product *p, struct tokens given, int64_t (*next)[8]) {
    const int64_t each = p->gated ? ROWS / 2 : ROWS, stretches = (given.count + STRETCH - 1) / STRETCH;
    const struct product_loops *loops = loops_of(p->form, p->type);
    *c = (struct call){.p = p, .loops = loops, .given = given, .tokens = given, .next = next};
    c->blocks = (p->outputs + each - 1) / each, c->jobs = c->blocks * stretches;
    c->parts = given.count <= STRETCH ? p->threads : 1; /* more tokens: all threads at the same weights */
    for (int64_t part = 0; part < c->parts; part++) next[part][0] = c->jobs * part / c->parts;
    const int64_t stride = stride_of(p->inputs, loops->item);
    if (!p->norm && loops->item == size_of(p->type) && (stride == p->inputs || given.count <= WAYS)) return 0;
    c->tokens.x_stride = stride;
    c->prepares = given.count <= FEW; /* quicker than to wait for other threads */
    return !c->prepares;
}

/* y [tokens, outputs] of x [tokens, inputs]. Returns 0, 1 if memory ran out. */
int kernels_product(const struct product *p, const void *x, void *y, int64_t tokens) {
    struct call c;
    int64_t next[p->threads][8];
    void *prepared = NULL;
    if (begin(&c, p, (struct tokens){.x = x, .x_stride = p->inputs, .y = y, .y_stride = p->outputs, .count = tokens}, next)) {
        c.tokens.x = prepared = malloc(c.loops->item * (size_t)(tokens * c.tokens.x_stride));
        if (!prepared) return 1;
        kernels_parallel(prepare_body, &c, p->threads);
    }
    kernels_parallel(product_body, &c, p->threads);
    free(prepared);
    return c.failed;
}

struct lane_calls {
    struct call *calls;
    int64_t lanes;
};

static void prepare_lanes_body(void *args, int thread, int threads) {
    const struct lane_calls *all = args;
    for (int64_t l = 0; l < all->lanes; l++) prepare_body(&all->calls[l], thread, threads);
}

static void lanes_body(void *args, int thread, int threads) {
    const struct lane_calls *all = args;
    for (int64_t l = 0; l < all->lanes; l++) product_body(&all->calls[l], thread, threads);
}

/* y [lanes, tokens, outputs]: of each lane's x, whose rows are x_row values apart and lanes x_lane, by a product of its own. All
 * products have one shape and type. Returns 0, 1 if memory ran out. */
int kernels_lane_products(const struct product *p, int64_t lanes, const char *x, int64_t x_lane, int64_t x_row, char *y, int64_t tokens) {
    const int64_t size = (int64_t)size_of(p->type), wide = tokens * p->outputs * size;
    struct call *calls = malloc((size_t)lanes * sizeof *calls);
    int64_t (*next)[8] = malloc((size_t)(lanes * p->threads) * sizeof *next);
    void *prepared = NULL;
    int failed = !calls || !next, together = 0;
    for (int64_t l = 0; l < lanes && !failed; l++) {
        const struct tokens given = {.x = x + l * x_lane * size, .x_stride = x_row, .y = y + l * wide, .y_stride = p->outputs, .count = tokens};
        together = begin(&calls[l], &p[l], given, next + l * p->threads);
    }
    if (together && !failed) {
        const size_t each = calls->loops->item * (size_t)(tokens * calls->tokens.x_stride);
        prepared = malloc(each * (size_t)lanes);
        failed = !prepared;
        for (int64_t l = 0; l < lanes; l++) calls[l].tokens.x = (char *)prepared + (size_t)l * each;
    }
    if (!failed) {
        struct lane_calls all = {calls, lanes};
        if (together) kernels_parallel(prepare_lanes_body, &all, p->threads);
        kernels_parallel(lanes_body, &all, p->threads);
        for (int64_t l = 0; l < lanes; l++) failed |= calls[l].failed;
    }
    free(prepared);
    free(next);
    free(calls);
    return failed;
}

/* A row of the packed weights: which one of the given it is (-1: none), and where in its block it stands. */
struct place {
    int64_t from, panel, within;
};

static struct place place_of(int64_t block, int64_t r, int64_t outputs, int gated) {
    const int64_t width = kernels_loops->floats, panel = r / (2 * width), within = r % (2 * width);
    const int64_t at = gated ? block * (ROWS / 2) + panel * width + within % width : block * ROWS + r;
    return (struct place){at >= outputs ? -1 : gated && within >= width ? at + outputs : at, panel, within};
}

/* Row-major weight [rows, bytes] -> packed, as the head of this file says: `unit` bytes of a row stay together. `rows` counts gate
 * and up together. */
void kernels_pack(int unit, char *packed, const char *weight, int64_t rows, int64_t bytes, int gated) {
    const int64_t outputs = gated ? rows / 2 : rows, each = gated ? ROWS / 2 : ROWS, blocks = (outputs + each - 1) / each;
    const int64_t width = 2 * kernels_loops->floats;
    for (int64_t block = 0; block < blocks; block++)
        for (int64_t r = 0; r < ROWS; r++) {
            const struct place place = place_of(block, r, outputs, gated);
            const char *row = weight + (place.from < 0 ? 0 : place.from) * bytes;
            char *to = packed + (block * ROWS + place.panel * width) * bytes + unit * place.within;
            for (int64_t i = 0; i < bytes; i += unit, to += width * unit)
                if (place.from < 0)
                    memset(to, 0, (size_t)unit);
                else if (unit == 4)
                    memcpy(to, row + i, 4);
                else if (unit == 2)
                    memcpy(to, row + i, 2);
                else
                    *to = row[i];
        }
}

/* Infinity for a row with an infinite value or a NaN. */
static float largest_of(const bf16 *row, int64_t n) {
    int largest = 0;
    for (int64_t i = 0; i < n; i++) largest = (row[i] & 0x7fff) > largest ? row[i] & 0x7fff : largest;
    return largest < 0x7f80 ? widen((bf16)largest) : INFINITY;
}

/* Sign and magnitude of row * unit, rounded. */
static void codes_of(uint8_t *to, const bf16 *row, int64_t n, float unit) {
    for (int64_t i = 0; i < n; i++) {
        const int magnitude = (int)(widen(row[i] & 0x7fff) * unit + 0.5f);
        to[i] = (uint8_t)((magnitude > 127 ? 127 : magnitude) | (row[i] >> 15 << 7));
    }
}

/* Row-major bf16 weight [rows, inputs] -> int8, packed as the head of this file says or as products_dot.c's tables want it,
 * and its scales [leaves][blocks * 32]: the largest value of a row's leaf becomes 127. What is not finite yields NaN. */
void kernels_pack_int8(uint8_t *packed, float *scale, const bf16 *weight, int64_t rows, int64_t inputs, int gated, int leaves) {
    const int64_t leaf = inputs / leaves;
    const int64_t outputs = gated ? rows / 2 : rows, each = gated ? ROWS / 2 : ROWS, blocks = (outputs + each - 1) / each;
    const int64_t width = 2 * kernels_loops->floats;
    const int by_table = kernels_loops->products[INT8]->by_table;
    for (int64_t block = 0; block < blocks; block++)
        for (int64_t r = 0; r < ROWS; r++) {
            const struct place place = place_of(block, r, outputs, gated);
            const int known = place.from >= 0;
            const bf16 *row = weight + (known ? place.from : 0) * inputs;
            uint8_t *to = packed + block * ROWS * inputs;
            to += by_table ? r % 16 / 4 * 16 + r / 16 * 8 + r % 4 * 2 : place.panel * width * inputs + place.within;
            float unit = 0.f;
            uint8_t some[1024];
            for (int64_t from = 0, count; from < inputs; from += count) {
                if (from % leaf == 0) {
                    const float most = known ? largest_of(row + from, leaf) : 0.f;
                    scale[(from / leaf * blocks + block) * ROWS + r] = most < INFINITY ? most / 127.f : NAN;
                    unit = known && most > 0.f && most < INFINITY ? 127.f / most : 0.f;
                }
                const int64_t left = leaf - from % leaf;
                count = left < (int64_t)sizeof some ? left : (int64_t)sizeof some;
                if (unit > 0.f)
                    codes_of(some, row + from, count, unit);
                else
                    memset(some, 0, sizeof some);
                if (by_table)
                    for (int64_t i = 0; i < count; i += 2, to += 2 * ROWS) memcpy(to, some + i, 2);
                else
                    for (int64_t i = 0; i < count; i++, to += width)
                        *to = some[i] & 0x80 ? (uint8_t)-(some[i] & 0x7f) : some[i];
            }
        }
}
