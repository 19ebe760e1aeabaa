/* How fast this machine's memory can be read: the floor under a decode step, which reads every weight once. */
#include "kernels.h"
#include "wide.h"

enum { LINE = 512, GRAIN = 2048 }; /* bytes a turn of the loop; lines that a thread takes at a time */

struct reading {
    const char *data;
    int64_t lines, next;
    uint64_t sum;
};

static uint64_t read_plainly(const char *data, int64_t bytes) {
    uint64_t sum[8] = {0}, part[8];
    for (int64_t i = 0; i < bytes; i += sizeof part) {
        memcpy(part, data + i, sizeof part);
        for (int j = 0; j < 8; j++) sum[j] += part[j];
    }
    return sum[0] + sum[1] + sum[2] + sum[3] + sum[4] + sum[5] + sum[6] + sum[7];
}

#ifdef WIDE_X86
WIDE static uint64_t read_widely(const char *data, int64_t bytes) {
    __m512i sum[8];
#pragma GCC unroll 8
    for (int j = 0; j < 8; j++) sum[j] = _mm512_setzero_si512();
    for (int64_t i = 0; i < bytes; i += LINE)
#pragma GCC unroll 8
        for (int j = 0; j < 8; j++) sum[j] = _mm512_add_epi64(sum[j], _mm512_loadu_si512(data + i + 64 * j));
    uint64_t total = 0;
    for (int j = 0; j < 8; j++) total += (uint64_t)_mm512_reduce_add_epi64(sum[j]);
    return total;
}
#else
#define read_widely read_plainly
static int wide_runs_here(void) { return 0; }
#endif

static void read_body(void *p, int thread, int threads) {
    (void)thread, (void)threads;
    struct reading *r = p;
    const int wide = wide_runs_here();
    for (;;) {
        const int64_t from = __atomic_fetch_add(&r->next, GRAIN, __ATOMIC_RELAXED);
        if (from >= r->lines) break;
        const int64_t bytes = (r->lines - from < GRAIN ? r->lines - from : GRAIN) * LINE;
        const uint64_t sum = (wide ? read_widely : read_plainly)(r->data + from * LINE, bytes);
        __atomic_fetch_add(&r->sum, sum, __ATOMIC_RELAXED);
    }
}

/* Reads `bytes` (a multiple of 512) once; the sum keeps the compiler honest. */
uint64_t kernels_read(const void *data, int64_t bytes, int threads) {
    struct reading r = {data, bytes / LINE, 0, 0};
    kernels_parallel(read_body, &r, threads);
    return r.sum;
}
