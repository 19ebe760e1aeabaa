/* Scores of positions under sparse attention (index.c). Included once a tier: TARGET are its instructions, FLOATS the fp32 values of a
 * vector, NAME(x) the names. Heads are lanes; MOST positions by two vectors of heads are summed in registers, each in one order.
 */
typedef float NAME(vec) __attribute__((vector_size(4 * FLOATS)));
typedef uint32_t NAME(bits) __attribute__((vector_size(4 * FLOATS)));

TARGET static void NAME(scores)(const struct index *x, const float *q, const float *weight, const void *const *at, int64_t count, float *out) {
    enum { MOST = FLOATS == 16 ? 8 : 4 };
    const int64_t dim = x->dim, lanes = lanes_of(x);
    float keys[MOST][INDEX_WIDEST];
    for (int64_t from = 0; from < count; from += MOST) {
        float total[MOST] = {0};
        for (int t = 0; t < MOST; t++) { /* the last one again, where there are fewer */
            const void *key = at[from + t < count ? from + t : count - 1];
            if (x->type == FP32)
                memcpy(keys[t], key, sizeof(float) * (size_t)dim);
            else if (x->type == BF16)
                for (int64_t i = 0; i < dim; i++) keys[t][i] = widen(((const bf16 *)key)[i]);
            else
                for (int64_t i = 0; i < dim; i++) keys[t][i] = widen_half(((const uint16_t *)key)[i]);
        }
        for (int64_t lane = 0; lane < lanes; lane += 2 * FLOATS) {
            NAME(vec) low[MOST], high[MOST], a, b;
#pragma GCC unroll 8
            for (int t = 0; t < MOST; t++) low[t] = high[t] = (NAME(vec)){0};
            for (int64_t i = 0; i < dim; i++) {
                memcpy(&a, q + i * lanes + lane, sizeof a);
                memcpy(&b, q + i * lanes + lane + FLOATS, sizeof b);
#pragma GCC unroll 8
                for (int t = 0; t < MOST; t++) low[t] += a * keys[t][i], high[t] += b * keys[t][i];
            }
            memcpy(&a, weight + lane, sizeof a);
            memcpy(&b, weight + lane + FLOATS, sizeof b);
#pragma GCC unroll 8
            for (int t = 0; t < MOST; t++) {
                const NAME(bits) under = (NAME(bits))(low[t] < 0), over = (NAME(bits))(high[t] < 0); /* NaN stays */
                const NAME(vec) both = (NAME(vec))((NAME(bits))low[t] & ~under) * a + (NAME(vec))((NAME(bits))high[t] & ~over) * b;
                for (int l = 0; l < FLOATS; l++) total[t] += both[l];
            }
        }
        memcpy(out + from, total, sizeof(float) * (size_t)(count - from < MOST ? count - from : MOST));
    }
}
#undef TARGET
#undef FLOATS
#undef NAME
