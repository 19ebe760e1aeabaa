/* The experts' products of a step: y[row] = the sum over its slots of weight x down(silu(gate) x up) of the expert that it chose.
 *
 * Rows are sorted by expert once. A run is up to STRETCH rows of one expert; a job is a run's part in one block of packed rows, as
 * products.c has them, by the same inner loops. Jobs of all runs are one list, cut by cost, whose rest idle threads take: a popular
 * expert is many jobs, and a single row's experts are as many as they have blocks. Experts without rows are not read.
 *
 * First gate and up of all runs, which gather their rows of x; then down, into one row an assignment (a row's slot that
 * is held here). The thread that computes the last run's part of a block of outputs adds up that block: for each row the slots in
 * ascending order, in fp32, rounded once. So a row's bits depend neither on the other rows nor on the number of threads.
 *
 * Memory: a step is cut into chunks of rows whose assignments take at most `space` bytes, whichever experts they chose.
 */
#include "kernels.h"

enum { ROWS = 32, STRETCH = 128, FEW = 16 };

/* An expert's packed weights. */
struct expert {
    const void *up, *down; /* gate and up [2 * inner, width], gated; down [width, inner] */
    const void *up_scale, *down_scale; /* as struct product has them */
    const int8_t *up_zero, *down_zero;
    const void *up_bias, *down_bias; /* [2 * inner] and [width], or NULL */
};

struct experts {
    const struct expert *each;
    int64_t count, width, inner, space; /* space: bytes that a chunk may take */
    int64_t up_group, down_group;
    int32_t type, form, scale_type, threads;
    float alpha, limit; /* see struct product */
};

/* Rows of one expert: assignments [from, to). */
struct run {
    const struct expert *expert;
    int64_t from, to;
};

struct step {
    const struct experts *e;
    const struct product_loops *loops;
    const char *x;
    const int32_t *chosen;
    const float *weight;
    char *y;
    int64_t rows, slots, assigned, runs, blocks; /* blocks: of the phase, jobs a run */
    int32_t *sorted, *place; /* [assigned]: their rows; [rows, slots]: their assignments, -1 where there is none */
    struct run *run;
    int64_t (*next)[CACHE_LINE / 8], *end; /* [threads]: the next job of a part, and where it ends */
    int64_t *start;                        /* [count + 1]: where an expert's assignments begin */
    int32_t *left;                         /* [blocks]: runs whose part of a block of outputs is to come */
    struct tokens given, tokens;           /* the caller's, and those that the loops read */
    char *act, *wide, *out;                /* [assigned, ...]: silu(gate) * up, the same prepared, and down's outputs */
    int64_t act_stride, wide_stride, out_stride;
};

static int64_t blocks_of(int64_t outputs, int64_t each) { return (outputs + each - 1) / each; }

/* Sorts the step's assignments by expert, and cuts them into runs. */
static void sort_rows(struct step *s) {
    const int64_t count = s->e->count;
    int64_t *const start = s->start;
    memset(start, 0, sizeof *start * (size_t)(count + 1));
    for (int64_t i = 0; i < s->rows * s->slots; i++)
        if (s->chosen[i] >= 0) start[s->chosen[i] + 1]++;
    s->runs = 0;
    for (int64_t i = 0; i < count; i++) {
        start[i + 1] += start[i];
        for (int64_t from = start[i]; from < start[i + 1]; from += STRETCH)
            s->run[s->runs++] = (struct run){s->e->each + i, from, from + STRETCH < start[i + 1] ? from + STRETCH : start[i + 1]};
    }
    for (int64_t i = 0; i < s->rows * s->slots; i++) {
        const int64_t at = s->chosen[i] < 0 ? -1 : start[s->chosen[i]]++;
        s->place[i] = (int32_t)at;
        if (at >= 0) s->sorted[at] = (int32_t)(i / s->slots);
    }
}

/* Cuts the list of a phase's jobs, `blocks` a run, into a part a thread. */
static void share_jobs(struct step *s, int64_t blocks) {
    enum { READING = 8 }; /* rows whose computing takes as long as reading their weights */
    const int64_t parts = s->e->threads, total = blocks * (s->runs * READING + s->assigned);
    int64_t done = 0, part = 0;
    s->blocks = blocks;
    s->next[0][0] = 0;
    for (int64_t r = 0; r < s->runs; r++) {
        const int64_t cost = READING + s->run[r].to - s->run[r].from;
        for (; part + 1 < parts && done + blocks * cost >= total * (part + 1) / parts; part++)
            s->next[part + 1][0] = s->end[part] = r * blocks + (total * (part + 1) / parts - done + cost - 1) / cost;
        done += blocks * cost;
    }
    s->end[part] = s->runs * blocks;
}

/* The next job of the thread's own part, then of others'; 0 if there is none. */
static int take(struct step *s, int thread, int64_t *turn, int64_t *job) {
    const int64_t parts = s->e->threads;
    for (; *turn < parts; ++*turn) {
        const int64_t part = (thread + *turn) % parts;
        *job = __atomic_fetch_add(s->next[part], 1, __ATOMIC_RELAXED);
        if (*job < s->end[part]) return 1;
    }
    return 0;
}

static void prepare_body(void *args, int thread, int threads) {
    struct step *s = args;
    const struct product p = {.inputs = s->e->width, .type = s->e->type};
    const int64_t count = s->given.count;
    kernels_prepare(s->loops, &p, &s->given, (void *)s->tokens.x, s->tokens.x_stride, count * thread / threads, count * (thread + 1) / threads);
}

static void up_body(void *args, int thread, int threads) {
    (void)threads;
    struct step *s = args;
    const size_t item = s->loops->item, size = size_of(s->e->type);
    for (int64_t turn = 0, job; take(s, thread, &turn, &job);) {
        const int64_t block = job % s->blocks;
        const struct run *run = s->run + job / s->blocks;
        const struct product p = {.weight = run->expert->up, .scale = run->expert->up_scale, .zero = run->expert->up_zero,
                                  .inputs = s->e->width, .outputs = s->e->inner, .group = s->e->up_group, .type = s->e->type,
                                  .form = s->e->form, .scale_type = s->e->scale_type, .gated = 1, .bias = run->expert->up_bias,
                                  .alpha = s->e->alpha, .limit = s->e->limit};
        const struct tokens some = tokens_between(&s->tokens, run->from, run->to, item, size);
        s->loops->block(&p, &some, block);
        if (s->wide) { /* these outputs, as down reads them */
            const int64_t at = block * (ROWS / 2), left = p.outputs - at;
            const struct product part = {.inputs = left < ROWS / 2 ? left : ROWS / 2, .type = s->e->type};
            const struct tokens outputs = {.x = (char *)some.y + (size_t)at * size, .x_stride = s->act_stride,
                                           .y = s->wide + (size_t)(run->from * s->wide_stride + at) * item, .y_stride = s->wide_stride,
                                           .count = some.count};
            s->loops->prepare(&part, &outputs);
        }
    }
}

static void down_body(void *args, int thread, int threads) {
    (void)threads;
    struct step *s = args;
    const size_t item = s->loops->item, size = size_of(s->e->type);
    const struct tokens acts = {.x = s->wide ? s->wide : s->act, .x_stride = s->wide ? s->wide_stride : s->act_stride, .y = s->out,
                                .y_stride = s->out_stride};
    for (int64_t turn = 0, job; take(s, thread, &turn, &job);) {
        const int64_t block = job % s->blocks;
        const struct run *run = s->run + job / s->blocks;
        const struct product p = {.weight = run->expert->down, .scale = run->expert->down_scale, .zero = run->expert->down_zero,
                                  .inputs = s->e->inner, .outputs = s->e->width, .group = s->e->down_group, .type = s->e->type,
                                  .form = s->e->form, .scale_type = s->e->scale_type, .bias = run->expert->down_bias};
        const struct tokens some = tokens_between(&acts, run->from, run->to, item, size);
        s->loops->block(&p, &some, block);
        if (__atomic_sub_fetch(s->left + block, 1, __ATOMIC_ACQ_REL) == 0) {
            const int64_t at = block * ROWS, left = s->e->width - at;
            const struct slots slots = {s->out + (size_t)at * size, s->out_stride, s->place, s->weight, s->y + (size_t)at * size, s->e->width,
                                        s->rows, s->slots, left < ROWS ? left : ROWS};
            kernels_loops->add_slots(s->e->type, &slots);
        }
    }
}

/* Bytes of a chunk's arrays, laid out from `at` on: each begins a cache line. */
static size_t lay_out(struct step *s, char *at) {
    const struct experts *e = s->e;
    const size_t item = s->loops->item, size = size_of(e->type), assigned = (size_t)s->assigned;
    const int64_t stride = stride_of(e->width, item), runs = s->assigned / STRETCH + (s->assigned < e->count ? s->assigned : e->count) + 1;
    const int widens = item != size, prepares = !s->loops->gathers || widens || (stride != e->width && s->rows > WAYS);
    char *const begin = at;
    void *taken;
#define TAKE(field, bytes) taken = at, field = taken, at += ((size_t)(bytes) + CACHE_LINE - 1) / CACHE_LINE * CACHE_LINE
    s->act_stride = widens ? e->inner : stride_of(e->inner, item), s->wide_stride = stride_of(e->inner, item);
    s->out_stride = blocks_of(e->width, ROWS) * ROWS;
    TAKE(s->act, assigned * (size_t)s->act_stride * size);
    TAKE(s->wide, widens ? assigned * (size_t)s->wide_stride * item : 0);
    if (!widens) s->wide = NULL;
    TAKE(s->out, assigned * (size_t)s->out_stride * size);
    TAKE(s->sorted, assigned * sizeof *s->sorted);
    TAKE(s->place, (size_t)(s->rows * s->slots) * sizeof *s->place);
    TAKE(s->run, (size_t)runs * sizeof *s->run);
    TAKE(s->start, (size_t)(e->count + 1) * sizeof *s->start);
    TAKE(s->next, (size_t)e->threads * sizeof *s->next);
    TAKE(s->end, (size_t)e->threads * sizeof *s->end);
    TAKE(s->left, (size_t)blocks_of(e->width, ROWS) * sizeof *s->left);
    s->given = (struct tokens){.x = s->x, .x_stride = e->width, .count = s->rows};
    s->tokens = (struct tokens){.x = s->x, .rows = s->sorted, .x_stride = e->width, .y = s->act, .y_stride = s->act_stride};
    if (prepares) {
        if (!s->loops->gathers) s->given.rows = s->sorted, s->given.count = s->assigned, s->tokens.rows = NULL;
        TAKE(s->tokens.x, (size_t)(s->given.count * stride) * item);
        s->tokens.x_stride = stride;
    }
#undef TAKE
    return (size_t)(at - begin);
}

/* Returns 0, 1 if memory ran out. */
static int compute(struct step *s) {
    const int64_t threads = s->e->threads, width = s->e->width, blocks = blocks_of(width, ROWS);
    if (s->assigned == 0) {
        memset(s->y, 0, (size_t)(s->rows * width) * size_of(s->e->type));
        return 0;
    }
    const size_t bytes = lay_out(s, NULL);
    char *const room = aligned_alloc(CACHE_LINE, bytes);
    if (!room) return 1;
    lay_out(s, room);
    sort_rows(s);
    if (s->tokens.x != s->x) kernels_parallel(prepare_body, s, s->given.count > FEW ? (int)threads : 1);
    share_jobs(s, blocks_of(s->e->inner, ROWS / 2));
    kernels_parallel(up_body, s, (int)threads);
    share_jobs(s, blocks);
    for (int64_t block = 0; block < blocks; block++) s->left[block] = (int32_t)s->runs;
    kernels_parallel(down_body, s, (int)threads);
    free(room);
    return 0;
}

/* Bytes that an assignment takes, at most. */
static int64_t bytes_each(const struct experts *e, size_t item) {
    return (int64_t)size_of(e->type) * (e->inner + e->width + 2 * CACHE_LINE) + (int64_t)item * (e->inner + e->width + 2 * CACHE_LINE);
}

/* y [rows, width] of x [rows, width], chosen [rows, slots] (-1: not held here) and weight [rows, slots]. Returns 0, 1 if memory ran
 * out, 2 if a chosen expert is none. */
int kernels_experts(const struct experts *e, const void *x, const int32_t *chosen, const float *weight, void *y, int64_t rows, int64_t slots) {
    const struct product_loops *loops = loops_of(e->form, e->type);
    const int64_t most = e->space / bytes_each(e, loops->item);
    for (int64_t i = 0; i < rows * slots; i++)
        if (chosen[i] < -1 || chosen[i] >= e->count) return 2;
    for (int64_t from = 0, to; from < rows; from = to) {
        const size_t begin = (size_t)(from * e->width) * size_of(e->type);
        struct step s = {.e = e, .loops = loops, .x = (const char *)x + begin, .y = (char *)y + begin,
                         .chosen = chosen + from * slots, .weight = weight + from * slots, .slots = slots};
        for (to = from; to < rows; to++) {
            int64_t more = 0;
            for (int64_t slot = 0; slot < slots; slot++) more += chosen[to * slots + slot] >= 0;
            if (to > from && s.assigned + more > most) break;
            s.assigned += more;
        }
        s.rows = to - from;
        if (compute(&s)) return 1;
    }
    return 0;
}
