/* A disk that is slow or broken and a clock that is ahead, for processes that preload it. It replaces fsync, fdatasync
 * and clock_gettime. Files in the folder LADDERTRON_FAULTS ask for it: with `slow` each sync takes 0.7 s more, with
 * `broken` it fails with EIO, with `clock` CLOCK_REALTIME is two hours ahead. */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <errno.h>
#include <stdio.h>
#include <stdlib.h>
#include <time.h>
#include <unistd.h>

static int lt_asked(const char *fault) {
    const char *folder = getenv("LADDERTRON_FAULTS");
    char path[4096];
    if (!folder || snprintf(path, sizeof path, "%s/%s", folder, fault) >= (int)sizeof path) return 0;
    int saved = errno, found = access(path, F_OK) == 0;
    errno = saved;
    return found;
}

static int lt_sync(const char *name, int descriptor) {
    if (lt_asked("slow")) nanosleep(&(struct timespec){0, 700000000}, NULL);
    if (lt_asked("broken")) {
        errno = EIO;
        return -1;
    }
    return ((int (*)(int))dlsym(RTLD_NEXT, name))(descriptor);
}

int fsync(int descriptor) { return lt_sync("fsync", descriptor); }
int fdatasync(int descriptor) { return lt_sync("fdatasync", descriptor); }

int clock_gettime(clockid_t clock, struct timespec *out) {
    static int (*next)(clockid_t, struct timespec *);
    if (!next) next = (int (*)(clockid_t, struct timespec *))dlsym(RTLD_NEXT, "clock_gettime");
    int found = next(clock, out);
    if (clock == CLOCK_REALTIME && !found && lt_asked("clock")) out->tv_sec += 7200;
    return found;
}
