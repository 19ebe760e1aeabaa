/* Another clock and another disk for one process and its children: preloaded. The file LADDERTRON_WORLD holds two 64-bit
 * integers, read at each call: seconds that the wall clock is off, and whether fsync finds the disk full. */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <errno.h>
#include <fcntl.h>
#include <stdint.h>
#include <stdlib.h>
#include <sys/mman.h>
#include <sys/time.h>
#include <time.h>
#include <unistd.h>

static const volatile int64_t *world(void) {
    static const volatile int64_t *found;
    if (!found) {
        int file = open(getenv("LADDERTRON_WORLD"), O_RDONLY | O_CLOEXEC);
        void *at = file < 0 ? MAP_FAILED : mmap(NULL, 16, PROT_READ, MAP_SHARED, file, 0);
        if (at == MAP_FAILED) abort();
        close(file);
        found = at;
    }
    return found;
}

int clock_gettime(clockid_t which, struct timespec *now) {
    static int (*next)(clockid_t, struct timespec *);
    if (!next) next = (int (*)(clockid_t, struct timespec *))dlsym(RTLD_NEXT, "clock_gettime");
    int done = next(which, now);
    if (done == 0 && which == CLOCK_REALTIME) now->tv_sec += world()[0];
    return done;
}

static int full(void) {
    if (!world()[1]) return 0;
    errno = ENOSPC;
    return 1;
}

int fsync(int file) {
    return full() ? -1 : ((int (*)(int))dlsym(RTLD_NEXT, "fsync"))(file);
}

int fdatasync(int file) {
    return full() ? -1 : ((int (*)(int))dlsym(RTLD_NEXT, "fdatasync"))(file);
}
