/* Records what a process does to the files in one folder: preloaded. DISK_LOG_ROOT is the folder; each change is one line of
 * DISK_LOG: verb, sync flag or offset, path, other path or data in hex. disk_log.py replays prefixes of it. */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <errno.h>
#include <fcntl.h>
#include <limits.h>
#include <pthread.h>
#include <stdarg.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <unistd.h>

#define NEXT(name, type) ((type)dlsym(RTLD_NEXT, name))

static pthread_mutex_t order = PTHREAD_MUTEX_INITIALIZER;

static int inside(const char *path) {
    const char *root = getenv("DISK_LOG_ROOT");
    return root && path && strncmp(path, root, strlen(root)) == 0 && !strstr(path, " (deleted)");
}

static int path_of(int file, char *path) {
    char link[64];
    snprintf(link, sizeof link, "/proc/self/fd/%d", file);
    ssize_t size = readlink(link, path, PATH_MAX - 1);
    path[size < 0 ? 0 : size] = 0;
    return inside(path);
}

static void record(const char *verb, long long number, const char *path, const char *other, const void *data, size_t size) {
    static const char digits[] = "0123456789abcdef";
    size_t most = 2 * size + 2 * PATH_MAX + 64, at;
    char *line = malloc(most);
    at = (size_t)snprintf(line, most, "%s\t%lld\t%s\t%s", verb, number, path, other);
    for (size_t i = 0; i < size; i++) {
        line[at++] = digits[((const uint8_t *)data)[i] >> 4];
        line[at++] = digits[((const uint8_t *)data)[i] & 15];
    }
    line[at++] = '\n';
    int file = (int)syscall(SYS_openat, AT_FDCWD, getenv("DISK_LOG"), O_WRONLY | O_APPEND | O_CREAT | O_CLOEXEC, 0600);
    if (file < 0 || syscall(SYS_write, file, line, at) != (long)at) abort();
    syscall(SYS_close, file);
    free(line);
}

static int opened(const char *name, int at, const char *path, int flags, mode_t mode) {
    char full[PATH_MAX];
    int made = flags & O_CREAT && faccessat(at, path, F_OK, 0) != 0;
    int file = NEXT(name, int (*)(int, const char *, int, mode_t))(at, path, flags, mode);
    if (file >= 0 && path_of(file, full)) {
        pthread_mutex_lock(&order);
        if (made) record("create", 0, full, "", NULL, 0);
        if (flags & O_TRUNC) record("truncate", 0, full, "", NULL, 0);
        pthread_mutex_unlock(&order);
    }
    return file;
}

#define OPEN(name, next, ...)                                        \
    int name(__VA_ARGS__ const char *path, int flags, ...) {         \
        va_list more;                                                \
        va_start(more, flags);                                       \
        mode_t mode = flags & O_CREAT ? va_arg(more, mode_t) : 0;    \
        va_end(more);                                                \
        return opened(next, AT, path, flags, mode);                  \
    }
#define AT AT_FDCWD
OPEN(open, "openat", )
OPEN(open64, "openat64", )
#undef AT
#define AT at
OPEN(openat, "openat", int at, )
OPEN(openat64, "openat64", int at, )

static ssize_t written(int file, const void *data, ssize_t size, off_t offset) {
    char path[PATH_MAX];
    if (size > 0 && path_of(file, path)) {
        pthread_mutex_lock(&order);
        record("write", offset, path, "", data, (size_t)size);
        if (fcntl(file, F_GETFL) & O_DSYNC) record("sync", 0, path, "", NULL, 0);
        pthread_mutex_unlock(&order);
    }
    return size;
}

ssize_t write(int file, const void *data, size_t size) {
    ssize_t done = NEXT("write", ssize_t (*)(int, const void *, size_t))(file, data, size);
    return written(file, data, done, done > 0 ? lseek(file, 0, SEEK_CUR) - done : 0);
}

ssize_t pwrite(int file, const void *data, size_t size, off_t offset) {
    return written(file, data, NEXT("pwrite", ssize_t (*)(int, const void *, size_t, off_t))(file, data, size, offset), offset);
}

ssize_t pwrite64(int file, const void *data, size_t size, off64_t offset) {
    return written(file, data, NEXT("pwrite64", ssize_t (*)(int, const void *, size_t, off64_t))(file, data, size, offset), offset);
}

static int noted(int done, const char *verb, int file, long long number) {
    char path[PATH_MAX];
    if (done == 0 && path_of(file, path)) {
        pthread_mutex_lock(&order);
        record(verb, number, path, "", NULL, 0);
        pthread_mutex_unlock(&order);
    }
    return done;
}

int fsync(int file) { return noted(NEXT("fsync", int (*)(int))(file), "sync", file, 0); }
int fdatasync(int file) { return noted(NEXT("fdatasync", int (*)(int))(file), "sync", file, 0); }
int ftruncate(int file, off_t size) { return noted(NEXT("ftruncate", int (*)(int, off_t))(file, size), "truncate", file, size); }
int ftruncate64(int file, off64_t size) {
    return noted(NEXT("ftruncate64", int (*)(int, off64_t))(file, size), "truncate", file, size);
}

static int named(int done, const char *verb, const char *path, const char *other) {
    if (done == 0 && inside(path)) {
        pthread_mutex_lock(&order);
        record(verb, 0, path, other, NULL, 0);
        pthread_mutex_unlock(&order);
    }
    return done;
}

int rename(const char *from, const char *to) { return named(NEXT("rename", int (*)(const char *, const char *))(from, to), "rename", from, to); }
int unlink(const char *path) { return named(NEXT("unlink", int (*)(const char *))(path), "unlink", path, ""); }
int rmdir(const char *path) { return named(NEXT("rmdir", int (*)(const char *))(path), "unlink", path, ""); }
int mkdir(const char *path, mode_t mode) { return named(NEXT("mkdir", int (*)(const char *, mode_t))(path, mode), "mkdir", path, ""); }
int unlinkat(int at, const char *path, int flags) {
    char folder[PATH_MAX], full[2 * PATH_MAX];
    int done = NEXT("unlinkat", int (*)(int, const char *, int))(at, path, flags);
    if (at == AT_FDCWD || *path == '/') return named(done, "unlink", path, "");
    path_of(at, folder);
    snprintf(full, sizeof full, "%s/%s", folder, path);
    return named(done, "unlink", full, "");
}
