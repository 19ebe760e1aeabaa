/* The choice of experts, as models/experts.py has it: a row's scores, its k experts, and their weights.
 *
 * Exponentials and their sum are in double and rounded once to fp32, so a row's choice depends neither on the other rows nor on
 * the tier.
 */
#include "kernels.h"

enum { SHARED_WORK = 8192 }; /* logits from which it is worth waking the other threads */

struct choice {
    const float *bias;    /* [experts], added for the choice alone; or NULL */
    const int32_t *local; /* [experts]: this rank's number of each, or -1 */
    int64_t experts, slots, groups, chosen_groups;
    float epsilon, scale;
    int32_t sigmoid, normalises, rounds, threads;
};

struct rows {
    const struct choice *c;
    const void *logits; /* [rows, experts] */
    int32_t *chosen, *numbers;
    float *weight; /* [rows, slots], all three */
    int64_t rows;
    int type; /* of the logits */
};

INLINE int above(float a, float b) { return a > b || (a != a && b == b); } /* NaN first: it must not be hidden */

/* The indices of the `slots` highest, ties by index. */
static void first(const float *scores, int64_t count, int64_t slots, int32_t *out) {
    for (int64_t i = 0, kept = 0; i < count; i++) {
        if (kept == slots && !above(scores[i], scores[out[slots - 1]])) continue;
        int64_t at = kept < slots ? kept++ : slots - 1;
        for (; at && above(scores[i], scores[out[at - 1]]); at--) out[at] = out[at - 1];
        out[at] = (int32_t)i;
    }
}

static void softmax(const float *logits, int64_t count, float *scores) {
    double each[count], total = 0;
    float most = -INFINITY;
    for (int64_t i = 0; i < count; i++) most = logits[i] > most ? logits[i] : most;
    for (int64_t i = 0; i < count; i++) total += each[i] = exp((double)logits[i] - most);
    for (int64_t i = 0; i < count; i++) scores[i] = (float)(each[i] / total);
}

/* Leaves the scores of the groups whose two best have the largest sums, and -inf elsewhere. */
static void close_groups(const struct choice *c, float *scores) {
    const int64_t size = c->experts / c->groups;
    float sums[c->groups];
    int32_t two[2], open[c->chosen_groups];
    for (int64_t g = 0; g < c->groups; g++) {
        const float *const group = scores + g * size;
        first(group, size, 2, two);
        sums[g] = group[two[0]] + group[two[1]];
    }
    first(sums, c->groups, c->chosen_groups, open);
    for (int64_t g = 0; g < c->groups; g++) {
        int kept = 0;
        for (int64_t i = 0; i < c->chosen_groups; i++) kept |= open[i] == g;
        for (int64_t i = 0; i < size && !kept; i++) scores[g * size + i] = -INFINITY;
    }
}

static void choose(const struct rows *r, int64_t row) {
    const struct choice *c = r->c;
    const int64_t count = c->experts, slots = c->slots;
    int32_t *const chosen = r->chosen + row * slots;
    float *const weight = r->weight + row * slots, logits[count], scores[count], ranked[count];
    double total = 0;
    for (int64_t i = 0; i < count; i++) logits[i] = read_one(r->type, r->logits, row * count + i);
    if (c->sigmoid)
        for (int64_t i = 0; i < count; i++) scores[i] = (float)(1 / (1 + exp(-(double)logits[i])));
    else
        softmax(logits, count, scores);
    for (int64_t i = 0; i < count; i++) ranked[i] = c->bias ? scores[i] + c->bias[i] : scores[i];
    if (c->groups > 1) close_groups(c, ranked);
    first(ranked, count, slots, chosen);
    for (int64_t i = 0; i < slots; i++) total += scores[chosen[i]];
    for (int64_t i = 0; i < slots; i++) {
        float w = scores[chosen[i]];
        if (c->normalises) w /= (float)total + c->epsilon;
        w *= c->scale;
        weight[i] = c->rounds ? rounded(r->type, w) : w;
        r->numbers[row * slots + i] = c->local[chosen[i]];
    }
}

static void body(void *args, int thread, int threads) {
    const struct rows *r = args;
    for (int64_t row = r->rows * thread / threads; row < r->rows * (thread + 1) / threads; row++) choose(r, row);
}

void kernels_choose(const struct choice *c, int type, const void *logits, int64_t rows, int32_t *chosen, int32_t *numbers, float *weight) {
    struct rows r = {c, logits, chosen, numbers, weight, rows, type};
    kernels_parallel(body, &r, rows * c->experts < SHARED_WORK ? 1 : c->threads);
}
