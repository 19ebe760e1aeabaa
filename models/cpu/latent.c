/* Attention over paged latents: one latent and one rotated key a token, which are the keys of all heads, and whose latents are the
 * values.
 *
 * Rows (a token's head) of one sequence that follow one another are a strip: up to STRIP of them read a position once. A context
 * is cut at multiples of CHUNK positions. A job is a strip's part in one chunk: scores, weights, and their sum over the chunk's
 * latents, by the loops of the tier (latent_loops.h; bf16 with AVX-512 BF16: latent_dot.c). Then each row's chunks are added up in
 * ascending order. So a row's bits depend neither on the other rows nor on the number of threads, and a single sequence is as many
 * jobs as it has chunks.
 *
 * Memory: jobs are computed in waves, whose sums take at most `space` bytes; a row whose chunks span two waves takes along what it has.
 */
#include "kernels.h"

enum { CHUNK = 256, STRIP = 64, WIDENED = 12 }; /* WIDENED: positions at once */

struct latents {
    void *out;     /* [tokens, heads, rank] */
    const void *x; /* [tokens, heads + 1, rank + rotary]: queries, then the token's own latent and key; not yet rotated or normed */
    void *cache;   /* [blocks, block_size, rank + rotary] */
    const void *norm;       /* [rank], the latent's */
    const float *cos, *sin; /* [tokens, rotary / 2] */
    const int64_t *table;   /* [sequences, table_stride] */
    const int64_t *start;   /* [sequences + 1]: each one's first token */
    const int64_t *length;  /* [sequences], the new tokens included */
    int64_t sequences, heads, rank, rotary, block_size, table_stride, space;
    float scale, eps;
    int32_t type, threads;
    const int32_t *chosen; /* [tokens, topk]: the positions that a token sees, ascending; or NULL: all up to itself */
    const int64_t *seen;   /* [tokens]: how many these are */
    int64_t topk;
};

/* Rows [row, row + rows), row = token * heads + head, and which number their first job has. */
struct strip {
    int64_t sequence, row, rows, job;
};

struct wave {
    const struct latents *l;
    const struct strip *strips;
    int64_t count, from, to; /* strips; jobs of this wave */
    int64_t most;            /* rows of a strip */
    int64_t next;
    char *space; /* [threads][each] */
    size_t each;
    float *slots, *begun, *carried; /* [jobs][most * (rank + 2)]: sums, best scores, totals; of the strip that the wave before began,
                                       and of the one that this begins, [most][rank + 2] */
};

static char *slot_of(const struct latents *l, int64_t sequence, int64_t position) {
    const int64_t *table = l->table + sequence * l->table_stride, width = l->rank + l->rotary;
    const int64_t slot = table[position / l->block_size] * l->block_size + position % l->block_size;
    return (char *)l->cache + (size_t)(slot * width) * size_of(l->type);
}

/* A token's position. */
static int64_t position_of(const struct latents *l, int64_t sequence, int64_t token) {
    return l->length[sequence] - (l->start[sequence + 1] - token);
}

/* The new tokens' latents, normed, and keys, rotated, into the cache, before any job reads them. */
static void store(const struct latents *l) {
    const int64_t width = l->rank + l->rotary, half = l->rotary / 2;
    const size_t item = size_of(l->type);
    for (int64_t s = 0; s < l->sequences; s++)
        for (int64_t t = l->start[s]; t < l->start[s + 1]; t++) {
            const char *own = (const char *)l->x + (size_t)((t * (l->heads + 1) + l->heads) * width) * item, *key = own + (size_t)l->rank * item;
            char *to = slot_of(l, s, position_of(l, s, t)), *turned = to + (size_t)l->rank * item;
            kernels_loops->rms_norm(l->type, to, own, l->norm, 1, l->rank, l->eps);
            for (int64_t i = 0; i < half; i++) {
                const float a = read_one(l->type, key, i), b = read_one(l->type, key, half + i);
                const float c = l->cos[t * half + i], d = l->sin[t * half + i];
                write_one(l->type, turned, i, a * c - b * d);
                write_one(l->type, turned, half + i, b * c + a * d);
            }
        }
}

/* How many positions a strip's last row sees; of chosen ones, those of its token. */
static int64_t end_of(const struct latents *l, const struct strip *strip) {
    if (l->chosen) return l->seen[strip->row / l->heads];
    return position_of(l, strip->sequence, (strip->row + strip->rows - 1) / l->heads) + 1;
}

static int64_t chunks_of(const struct latents *l, const struct strip *strip) { return (end_of(l, strip) + CHUNK - 1) / CHUNK; }

/* Cuts the rows into strips; returns the number of jobs. Without `strips` it counts them. */
static int64_t cut(const struct latents *l, struct strip *strips, int64_t *count) {
    int64_t jobs = 0;
    *count = 0;
    for (int64_t s = 0; s < l->sequences; s++)
        for (int64_t row = l->start[s] * l->heads, end = l->start[s + 1] * l->heads, rows; row < end; row += rows, ++*count) {
            const int64_t left = l->chosen ? l->heads - row % l->heads : end - row; /* tokens that choose share no positions */
            rows = left < STRIP ? left : STRIP;
            const struct strip strip = {s, row, rows, jobs};
            if (strips) strips[*count] = strip;
            jobs += chunks_of(l, &strip);
        }
    return jobs;
}

/* The strip of a job. */
static const struct strip *strip_of(const struct wave *w, int64_t job) {
    int64_t low = 0, high = w->count;
    while (high - low > 1) {
        const int64_t middle = (low + high) / 2;
        if (w->strips[middle].job <= job)
            low = middle;
        else
            high = middle;
    }
    return w->strips + low;
}

static void compute_body(void *args, int thread, int threads) {
    (void)threads;
    struct wave *w = args;
    const struct latents *l = w->l;
    const int64_t width = l->rank + l->rotary, half = l->rotary / 2, bytes = width * (int64_t)size_of(l->type);
    const void *at[CHUNK + 1], *q[STRIP];
    const float *cos[STRIP], *sin[STRIP];
    int32_t seen[STRIP];
    float *const best = (float *)(w->space + (size_t)thread * w->each);
    struct latent_chunk c = {.q = q, .cos = cos, .sin = sin, .at = at, .seen = seen, .rank = l->rank, .rotary = l->rotary, .scale = l->scale,
                             .best = best, .total = best + STRIP, .space = best + 2 * STRIP};
    for (int64_t job; (job = w->from + __atomic_fetch_add(&w->next, 1, __ATOMIC_RELAXED)) < w->to;) {
        const struct strip *strip = strip_of(w, job);
        const int64_t base = (job - strip->job) * CHUNK, left = end_of(l, strip) - base;
        c.rows = strip->rows, c.count = left < CHUNK ? left : CHUNK;
        c.sum = w->slots + (job - w->from) * w->most * (l->rank + 2);
        const int32_t *chosen = l->chosen ? l->chosen + strip->row / l->heads * l->topk + base : NULL;
        for (int64_t j = 0; chosen && j < c.count; j++) at[j] = slot_of(l, strip->sequence, chosen[j]);
        for (int64_t j = 0; !chosen && j < c.count;) {
            const char *slot = slot_of(l, strip->sequence, base + j);
            for (int64_t left = l->block_size - (base + j) % l->block_size; left && j < c.count; left--, slot += bytes) at[j++] = slot;
        }
        at[c.count] = at[c.count - 1];
        memset(seen, 0, sizeof seen);
        for (int64_t r = 0; r < strip->rows; r++) {
            const int64_t token = (strip->row + r) / l->heads, head = (strip->row + r) % l->heads;
            const int64_t sees = (chosen ? l->seen[token] : position_of(l, strip->sequence, token) + 1) - base;
            q[r] = (const char *)l->x + (token * (l->heads + 1) + head) * bytes;
            cos[r] = l->cos + token * half, sin[r] = l->sin + token * half;
            seen[r] = (int32_t)(sees < 0 ? 0 : sees < c.count ? sees : c.count);
        }
        if (l->type != BF16 || !kernels_wide_latents(&c)) kernels_loops->latents(l->type, &c);
        memcpy(c.sum + w->most * l->rank, c.best, sizeof(float) * (size_t)strip->rows);
        memcpy(c.sum + w->most * (l->rank + 1), c.total, sizeof(float) * (size_t)strip->rows);
    }
}

/* The wave's chunks of a row of a strip, behind what the wave before had of it: out, or carried to the next. */
static void join_row(const struct wave *w, const struct strip *strip, int64_t r, float *sum) {
    const struct latents *l = w->l;
    const int64_t rank = l->rank, end = strip->job + chunks_of(l, strip);
    const size_t bytes = sizeof *sum * (size_t)(rank + 2);
    float *const best = sum + rank, *const total = best + 1; /* as they are carried */
    if (strip->job < w->from)
        memcpy(sum, w->begun + r * (rank + 2), bytes);
    else
        memset(sum, 0, bytes), *best = LATENT_NONE;
    for (int64_t job = strip->job > w->from ? strip->job : w->from; job < end && job < w->to; job++) {
        const float *slot = w->slots + (job - w->from) * w->most * (rank + 2), *const more = slot + r * rank;
        const float own = slot[w->most * rank + r], peak = own <= *best ? *best : own;
        const float keep = expf(*best - peak), take = expf(own - peak);
        const float *next = more + (job + 1 < end && job + 1 < w->to ? w->most * (rank + 2) : 0); /* too far for a core's own prefetcher */
        for (int64_t i = 0; i < rank; i += CACHE_LINE / 4) __builtin_prefetch(next + i);
        for (int64_t i = 0; i < rank; i++) sum[i] = sum[i] * keep + more[i] * take;
        *total = *total * keep + slot[w->most * (rank + 1) + r] * take;
        *best = peak;
    }
    if (end > w->to)
        memcpy(w->carried + r * (rank + 2), sum, bytes);
    else
        for (int64_t i = 0; i < rank; i++) write_one(l->type, l->out, (strip->row + r) * rank + i, sum[i] / *total);
}

static void join_body(void *args, int thread, int threads) {
    const struct wave *w = args;
    const struct strip *first = strip_of(w, w->from), *last = strip_of(w, w->to - 1), *strip = first;
    const int64_t rows = last->row + last->rows - first->row, to = first->row + rows * (thread + 1) / threads;
    for (int64_t row = first->row + rows * thread / threads; row < to; row++) {
        while (strip->row + strip->rows <= row) strip++;
        join_row(w, strip, row - strip->row, (float *)(w->space + (size_t)thread * w->each));
    }
}

/* Stores the new latents and keys and attends. Returns 0, 1 if memory ran out. */
int kernels_latents(const struct latents *l) {
    struct wave w = {.l = l};
    const int64_t jobs = cut(l, NULL, &w.count), width = l->rank + l->rotary;
    struct strip *strips = malloc(sizeof *strips * (size_t)(w.count + 1));
    if (!strips) return 1;
    store(l);
    cut(l, strips, &w.count);
    w.strips = strips;
    for (int64_t s = 0; s < w.count; s++) w.most = strips[s].rows > w.most ? strips[s].rows : w.most;
    const int64_t slot = w.most * (l->rank + 2), fit = l->space / (slot * (int64_t)sizeof(float)), most = fit > 1 ? fit : 1;
    const int64_t together = jobs < most ? jobs : most;
    w.each = (sizeof(float) * (size_t)(STRIP * (2 + width + 2 * CHUNK) + WIDENED * width) + CACHE_LINE - 1) / CACHE_LINE * CACHE_LINE;
    const size_t bytes = w.each * (size_t)l->threads + sizeof(float) * (size_t)((together + 2) * slot);
    w.space = aligned_alloc(CACHE_LINE, (bytes + CACHE_LINE - 1) / CACHE_LINE * CACHE_LINE);
    if (w.space) {
        w.slots = (float *)(w.space + w.each * (size_t)l->threads), w.begun = w.slots + together * slot, w.carried = w.begun + slot;
        for (w.from = 0; w.from < jobs; w.from = w.to) {
            float *const begun = w.carried;
            w.carried = w.begun, w.begun = begun;
            w.to = w.from + together < jobs ? w.from + together : jobs, w.next = 0;
            kernels_parallel(compute_body, &w, l->threads);
            kernels_parallel(join_body, &w, l->threads);
        }
    }
    free(strips);
    free(w.space);
    return !w.space;
}
