/* How fast this machine's memory can be read: the floor under a decode step, which reads every weight once. */
#include "kernels.h"

enum { LINE = 512, GRAIN = 2048 }; /* bytes a turn of the loop; lines that a thread takes at a time */

struct reading {
    const char *data;
    int64_t lines, next;
    uint64_t sum;
};

/* The sum of what is read: one loop a tier, since a vector wider than the target's becomes slower than a plain one. */
#define READER(name, target, words) \
    target static uint64_t name(const char *data, int64_t bytes) { \
        typedef uint64_t vector __attribute__((vector_size(8 * (words)))); \
        vector sum[8] = {0}; \
        uint64_t total = 0; \
        for (int64_t i = 0; i < bytes; i += (int64_t)sizeof sum) \
            _Pragma("GCC unroll 8") for (int j = 0; j < 8; j++) { \
                vector part; \
                memcpy(&part, data + i + j * (int64_t)sizeof part, sizeof part); \
                sum[j] += part; \
            } \
        for (int j = 0; j < 8; j++) \
            for (int k = 0; k < (words); k++) total += sum[j][k]; \
        return total; \
    }

READER(read_generic, , 2)
#ifdef WIDE_X86
READER(read_avx2, __attribute__((target("avx2"))), 4)
READER(read_avx512, __attribute__((target("avx512f"))), 8)
#endif

static uint64_t read_some(const char *data, int64_t bytes) {
#ifdef WIDE_X86
    if (kernels_tier >= AVX2) return (kernels_tier >= AVX512 ? read_avx512 : read_avx2)(data, bytes);
#endif
    return read_generic(data, bytes);
}

static void read_body(void *p, int thread, int threads) {
    (void)thread, (void)threads;
    struct reading *r = p;
    for (;;) {
        const int64_t from = __atomic_fetch_add(&r->next, GRAIN, __ATOMIC_RELAXED);
        if (from >= r->lines) break;
        const int64_t bytes = (r->lines - from < GRAIN ? r->lines - from : GRAIN) * LINE;
        const uint64_t sum = read_some(r->data + from * LINE, bytes);
        __atomic_fetch_add(&r->sum, sum, __ATOMIC_RELAXED);
    }
}

/* Reads `bytes` (a multiple of 512) once; the sum keeps the compiler honest. */
uint64_t kernels_read(const void *data, int64_t bytes, int threads) {
    struct reading r = {data, bytes / LINE, 0, 0};
    kernels_parallel(read_body, &r, threads);
    return r.sum;
}
