/* What models of lanes need beside products: [lanes, n] values, n of each lane; every step rounded to the type, as torch
 * (models/ops.py: join_lanes, sum_lanes). Included once a tier, behind plain_loops.h. */

INLINE void join_rows(const int type, const int adds_own, const int adds_others, void *out, const void *x, const void *own, const void *total,
                      const void *past, int64_t n) {
    for (int64_t i = 0; i < n; i++) {
        float v = read_one(type, x, i);
        if (adds_own) v = rounded(type, v + read_one(type, own, i));
        if (adds_others) v = v + rounded(type, read_one(type, total, i) - read_one(type, past, i));
        write_one(type, out, i, v);
    }
}

INLINE void join_typed(const int type, void *out, const void *x, int64_t x_lane, const void *own, const void *total, const void *past,
                       int64_t lanes, int64_t n) {
    const int64_t size = (int64_t)size_of(type);
    for (int64_t l = 0; l < lanes; l++) {
        const int64_t at = l * n * size;
        char *to = (char *)out + at;
        const char *from = (const char *)x + l * x_lane * size;
        if (own && total)
            join_rows(type, 1, 1, to, from, (const char *)own + at, total, (const char *)past + at, n);
        else if (own)
            join_rows(type, 1, 0, to, from, (const char *)own + at, NULL, NULL, n);
        else
            join_rows(type, 0, 1, to, from, NULL, total, (const char *)past + at, n);
    }
}

/* out [lanes, n] = x + own + (total - past); own [lanes, n] or NULL; total [n] and past [lanes, n] or NULL. x_lane: values
 * from one lane of x to the next. */
TARGET static void join_lanes(int type, void *out, const void *x, int64_t x_lane, const void *own, const void *total, const void *past,
                              int64_t lanes, int64_t n) {
    if (type == FP32)
        join_typed(FP32, out, x, x_lane, own, total, past, lanes, n);
    else if (type == BF16)
        join_typed(BF16, out, x, x_lane, own, total, past, lanes, n);
    else
        join_typed(FP16, out, x, x_lane, own, total, past, lanes, n);
}

INLINE void sum_typed(const int type, void *out, const void *x, int64_t lanes, int64_t n) {
    enum { STRIP = 256 };
    for (int64_t from = 0; from < n; from += STRIP) {
        const int64_t count = n - from < STRIP ? n - from : STRIP;
        float sums[STRIP];
        for (int64_t i = 0; i < count; i++) sums[i] = read_one(type, x, from + i);
        for (int64_t l = 1; l < lanes; l++)
            for (int64_t i = 0; i < count; i++) sums[i] += read_one(type, x, l * n + from + i);
        for (int64_t i = 0; i < count; i++) write_one(type, out, from + i, sums[i]);
    }
}

/* out [n] = the lanes of x [lanes, n], added in fp32 in their order. */
TARGET static void sum_lanes(int type, void *out, const void *x, int64_t lanes, int64_t n) {
    if (type == FP32)
        sum_typed(FP32, out, x, lanes, n);
    else if (type == BF16)
        sum_typed(BF16, out, x, lanes, n);
    else
        sum_typed(FP16, out, x, lanes, n);
}
