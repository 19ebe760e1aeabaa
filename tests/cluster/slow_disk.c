/* A disk that is slow or broken, for one process: preloaded, it stands before fsync and fdatasync. Files in the folder
 * LADDERTRON_DISK ask for it: `slow` holds each call up for 0.7 s, `broken` lets it fail with EIO. */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <errno.h>
#include <stdio.h>
#include <stdlib.h>
#include <time.h>
#include <unistd.h>

static int lt_asked(const char *fault) {
    const char *folder = getenv("LADDERTRON_DISK");
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
