/* The sum over a row's slots. Included once a tier, behind plain_loops.h; FLOATS fp32 values are a vector. */
#include "kernels.h"

INLINE TARGET void add_slots_of(const int type, const struct slots *s) {
    enum { BLOCK = 32, VECTORS = BLOCK / FLOATS };
    for (int64_t row = 0; row < s->rows; row++) {
        plain sum[VECTORS];
        float sums[BLOCK];
        for (int v = 0; v < VECTORS; v++) sum[v] = (plain){0};
        for (int64_t slot = 0; slot < s->slots; slot++) {
            const int64_t at = s->place[row * s->slots + slot];
            if (at < 0) continue;
            const plain weight = plain_all(s->weight[row * s->slots + slot]);
            for (int v = 0; v < VECTORS; v++) sum[v] = plain_add(sum[v], weight, plain_load(type, s->out, at * s->stride + v * FLOATS));
        }
        memcpy(sums, sum, sizeof sums);
        for (int64_t i = 0; i < s->columns; i++) write_one(type, s->y, row * s->width + i, sums[i]);
    }
}

TARGET static void add_slots(int type, const struct slots *s) {
    if (type == FP32)
        add_slots_of(FP32, s);
    else if (type == BF16)
        add_slots_of(BF16, s);
    else
        add_slots_of(FP16, s);
}
