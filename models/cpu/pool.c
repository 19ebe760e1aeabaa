/* The kernels' threads. A region has as many parts as threads: the caller computes the first, and then each that no worker
 * has begun. So a worker that has no processor just now holds up no region but one that it is in the middle of, and a caller
 * that has to wait gives up its own processor. libgomp waits for every thread of every region by looking, for milliseconds:
 * with one other busy process on the host's processors a decode step took thirty times as long.
 */
#include "kernels.h"

#include <limits.h>
#include <linux/futex.h>
#include <pthread.h>
#include <signal.h>
#include <stdatomic.h>
#include <stdint.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>

/* How long a worker looks for the next region, which Python sets off within a layer's time, and the caller for a worker's
 * end; then they sleep. */
static int64_t worker_ns = 300000, caller_ns = 100000;
enum { LOOKS = 32, MOST = 1024 };

static struct {
    pthread_mutex_t turn;
    void (*run)(void *args, int thread, int threads);
    void *args;
    _Atomic uint64_t open;   /* the region's number << 32, its next part << 16, its parts */
    _Atomic uint32_t number; /* futex of workers */
    _Atomic uint32_t left;   /* parts that are not done; futex of the caller */
    _Atomic int sleepers, caller_sleeps;
    int workers;
} pool = {.turn = PTHREAD_MUTEX_INITIALIZER};

static int64_t now(void) {
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return t.tv_sec * 1000000000LL + t.tv_nsec;
}

static void look_again(void) {
    for (int i = 0; i < LOOKS; i++) {
#ifdef __x86_64__
        __builtin_ia32_pause();
#elif defined(__aarch64__)
        __asm__ volatile("isb");
#endif
    }
}

static void sleep_on(_Atomic uint32_t *word, uint32_t seen) { syscall(SYS_futex, word, FUTEX_WAIT_PRIVATE, seen, NULL, NULL, 0); }

static void wake(_Atomic uint32_t *word) { syscall(SYS_futex, word, FUTEX_WAKE_PRIVATE, INT_MAX, NULL, NULL, 0); }

static int is_open(void) {
    uint64_t seen = atomic_load(&pool.open);
    return (seen >> 16 & 0xffff) < (seen & 0xffff);
}

/* Computes the open region's next part; 0: it has none. What a claim saw cannot change before its part is done. */
static int compute_next(void) {
    uint64_t seen = atomic_load(&pool.open);
    do
        if ((seen >> 16 & 0xffff) >= (seen & 0xffff)) return 0;
    while (!atomic_compare_exchange_weak(&pool.open, &seen, seen + (1 << 16)));
    pool.run(pool.args, (int)(seen >> 16 & 0xffff), (int)(seen & 0xffff));
    if (atomic_fetch_sub(&pool.left, 1) == 1 && atomic_load(&pool.caller_sleeps)) wake(&pool.left);
    return 1;
}

static void *work(void *unused) {
    for (;;) {
        int64_t until = 0;
        while (compute_next()) {}
        while (!is_open()) {
            look_again();
            if (!until) until = now() + worker_ns;
            if (now() < until) continue;
            uint32_t seen = atomic_load(&pool.number);
            atomic_fetch_add(&pool.sleepers, 1);
            if (!is_open()) sleep_on(&pool.number, seen);
            atomic_fetch_sub(&pool.sleepers, 1);
        }
    }
    return unused;
}

/* Only the thread that forked is in the child. */
static void begin_anew(void) {
    pthread_mutex_init(&pool.turn, NULL);
    atomic_store(&pool.open, 0);
    atomic_store(&pool.sleepers, 0);
    pool.workers = 0;
}

/* Where the system gives no more threads, the caller computes their parts. */
static void start_workers(int wanted) {
    static int registered;
    sigset_t every, before;
    pthread_attr_t detached;
    if (!registered) registered = pthread_atfork(NULL, NULL, begin_anew) == 0;
    sigfillset(&every);
    pthread_sigmask(SIG_SETMASK, &every, &before); /* signals are the interpreter's */
    pthread_attr_init(&detached);
    pthread_attr_setdetachstate(&detached, PTHREAD_CREATE_DETACHED);
    for (pthread_t thread; pool.workers < wanted && pthread_create(&thread, &detached, work, NULL) == 0; pool.workers++) {}
    pthread_attr_destroy(&detached);
    pthread_sigmask(SIG_SETMASK, &before, NULL);
}

/* For more threads than processors, or than a CPU quota pays for: who looks takes the time of who computes. */
void kernels_sleep_at_once(void) { worker_ns = caller_ns = 0; }

void kernels_parallel(void (*run)(void *args, int thread, int threads), void *args, int threads) {
    threads = threads < MOST ? threads : MOST;
    if (threads <= 1 || pthread_mutex_trylock(&pool.turn)) { /* another of the caller's threads has the workers */
        for (int part = 0; part < threads; part++) run(args, part, threads);
        return;
    }
    if (pool.workers < threads - 1) start_workers(threads - 1);
    pool.run = run;
    pool.args = args;
    atomic_store(&pool.left, (uint32_t)threads);
    uint64_t number = atomic_load(&pool.number) + 1;
    atomic_store(&pool.open, number << 32 | (uint64_t)threads);
    atomic_store(&pool.number, (uint32_t)number);
    if (atomic_load(&pool.sleepers)) wake(&pool.number);
    while (compute_next()) {}
    int64_t until = now() + caller_ns;
    for (uint32_t left; (left = atomic_load(&pool.left));) {
        if (now() < until) {
            look_again();
            continue;
        }
        atomic_store(&pool.caller_sleeps, 1);
        if (atomic_load(&pool.left) == left) sleep_on(&pool.left, left);
        atomic_store(&pool.caller_sleeps, 0);
    }
    pthread_mutex_unlock(&pool.turn);
}
