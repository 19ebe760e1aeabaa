/* A rank's pulse: a thread without Python that shows the job's owner, on a connection of its own, that this process
 * computes, while the interpreter is too late for its heartbeats. A thread of the process computes if it runs, or is
 * runnable and waits for a processor: the kernel counts both (/proc/self/task/TID/schedstat). A process that is stopped
 * sends nothing, and neither does one whose threads all wait, as in a deadlock over the interpreter's lock: that one is
 * ended here. So is one that has received nothing from its owner for too long, if the interpreter cannot end it. */
#define _GNU_SOURCE
#include <errno.h>
#include <fcntl.h>
#include <poll.h>
#include <pthread.h>
#include <signal.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/eventfd.h>
#include <sys/socket.h>
#include <time.h>
#include <unistd.h>

enum { LATE_MS = 1500, TICK_MS = 1000, WORDS_MS = 1000, THREADS = 2 };

typedef struct {
    int socket, stop;
    int threads[THREADS]; /* those that must run for a heartbeat to be sent */
    double silence_s, stuck_s, slow_s;
    void (*dump)(int, void *, void *); /* writes every thread's stack to a descriptor */
    int status;
    pthread_mutex_t lock;
    char *frames; /* count sealed frames of size bytes; the first `used` are sent */
    size_t size, count, used;
    int spoilt;   /* a part of a frame was sent: no other may follow */
    double noted; /* the last sign of life of the interpreter */
    double heard; /* the last byte from the owner, on either connection */
    pthread_t thread;
} lt_pulse;

static double lt_now(void) {
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return (double)t.tv_sec + 1e-9 * (double)t.tv_nsec;
}

/* Seconds for which a thread ran or waited for a processor; 0 if the kernel does not count them. */
static double lt_ran(int thread) {
    char path[64], text[96];
    unsigned long long ran = 0, waited = 0;
    snprintf(path, sizeof path, "/proc/self/task/%d/schedstat", thread);
    int file = open(path, O_RDONLY | O_CLOEXEC);
    if (file < 0) return 0;
    ssize_t length = read(file, text, sizeof text - 1);
    close(file);
    if (length <= 0) return 0;
    text[length] = 0;
    return sscanf(text, "%llu %llu", &ran, &waited) == 2 ? 1e-9 * (double)(ran + waited) : 0;
}

static void *lt_exit(void *status) {
    poll(NULL, 0, WORDS_MS);
    _exit((int)(intptr_t)status);
}

/* Ends the process, with its reason and stacks where they can be written: an error output that is not read blocks, and must
 * not keep the process. */
static void lt_end(const lt_pulse *pulse, const char *reason, double seconds) {
    char line[160];
    pthread_t thread;
    int length = snprintf(line, sizeof line, "laddertron: this rank ends itself: %s for %.0f s\n", reason, seconds);
    if (pthread_create(&thread, NULL, lt_exit, (void *)(intptr_t)pulse->status) == 0 &&
        write(2, line, (size_t)length) == length && pulse->dump)
        pulse->dump(2, NULL, NULL);
    _exit(pulse->status);
}

static void lt_send(lt_pulse *pulse) {
    pthread_mutex_lock(&pulse->lock);
    if (pulse->used < pulse->count && !pulse->spoilt) {
        const char *frame = pulse->frames + pulse->used * pulse->size;
        ssize_t sent = send(pulse->socket, frame, pulse->size, MSG_DONTWAIT | MSG_NOSIGNAL);
        if (sent > 0) pulse->used++;
        pulse->spoilt = sent > 0 && sent < (ssize_t)pulse->size;
    }
    pthread_mutex_unlock(&pulse->lock);
}

/* Reads what the owner sent; 0 once the connection has ended. */
static int lt_hear(lt_pulse *pulse, double now) {
    char bytes[4096];
    ssize_t length = recv(pulse->socket, bytes, sizeof bytes, MSG_DONTWAIT);
    if (length <= 0) return length < 0 && (errno == EAGAIN || errno == EINTR);
    pthread_mutex_lock(&pulse->lock);
    pulse->heard = now;
    pthread_mutex_unlock(&pulse->lock);
    return 1;
}

static void *lt_run(void *argument) {
    lt_pulse *pulse = argument;
    double last = lt_now(), computed = last, ran[THREADS] = {0};
    struct pollfd ready[] = {{.fd = pulse->stop, .events = POLLIN}, {.fd = pulse->socket, .events = POLLIN}};
    for (;;) {
        double due = last + 1e-3 * TICK_MS - lt_now();
        int count = poll(ready, 2, due > 0 ? (int)(1e3 * due) + 1 : 0);
        if (count < 0 && errno != EINTR) return NULL;
        if (count > 0 && ready[0].revents) return NULL;
        double now = lt_now(), passed = now - last;
        if (count > 0 && ready[1].revents && !lt_hear(pulse, now)) ready[1].fd = -1;
        if (passed < 1e-3 * TICK_MS) continue;
        for (int at = 0; at < THREADS; at++) {
            double sum = lt_ran(pulse->threads[at]);
            if (sum - ran[at] > 0.1 * passed) computed = now;
            ran[at] = sum;
        }
        last = now;
        pthread_mutex_lock(&pulse->lock);
        if (passed > 3e-3 * TICK_MS) pulse->noted = now; /* this thread did not run either: it cannot tell */
        double late = now - pulse->noted, silent = now - pulse->heard;
        pthread_mutex_unlock(&pulse->lock);
        if (late < 1e-3 * LATE_MS) computed = now;
        if (silent > pulse->silence_s) lt_end(pulse, "nothing was heard from its owner", silent);
        if (now - computed > pulse->stuck_s) lt_end(pulse, "the interpreter is locked, and no thread of it runs", late);
        if (late > pulse->slow_s) lt_end(pulse, "the interpreter is locked", late);
        if (late >= 1e-3 * LATE_MS && now - computed < 1e-3 * (TICK_MS + LATE_MS)) lt_send(pulse);
    }
}

/* The interpreter runs: returns the number of frames used. */
size_t lt_pulse_note(lt_pulse *pulse) {
    pthread_mutex_lock(&pulse->lock);
    pulse->noted = lt_now();
    size_t used = pulse->used;
    pthread_mutex_unlock(&pulse->lock);
    return used;
}

/* The owner was heard by the interpreter. */
void lt_pulse_heard(lt_pulse *pulse) {
    pthread_mutex_lock(&pulse->lock);
    pulse->heard = lt_now();
    pthread_mutex_unlock(&pulse->lock);
}

/* Appends `count` further frames of the same size; returns 0, or -1 without memory. */
int lt_pulse_feed(lt_pulse *pulse, const char *frames, size_t count) {
    int status = -1;
    pthread_mutex_lock(&pulse->lock);
    size_t left = pulse->count - pulse->used;
    char *all = malloc((left + count) * pulse->size);
    if (all) {
        if (left) memcpy(all, pulse->frames + pulse->used * pulse->size, left * pulse->size);
        memcpy(all + left * pulse->size, frames, count * pulse->size);
        free(pulse->frames);
        pulse->frames = all;
        pulse->used = 0;
        pulse->count = left + count;
        status = 0;
    }
    pthread_mutex_unlock(&pulse->lock);
    return status;
}

/* Starts the thread; NULL if it cannot be started. It owns `socket` from then on. */
lt_pulse *lt_pulse_start(int socket, int main_thread, int other_thread, size_t size, double silence_s, double stuck_s,
                         double slow_s, void *dump, int status) {
    lt_pulse *pulse = calloc(1, sizeof *pulse);
    if (!pulse) return NULL;
    *pulse = (lt_pulse){.socket = socket, .threads = {main_thread, other_thread}, .size = size, .silence_s = silence_s,
                        .stuck_s = stuck_s, .slow_s = slow_s, .status = status, .noted = lt_now(), .heard = lt_now()};
    pulse->dump = (void (*)(int, void *, void *))dump;
    pthread_mutex_init(&pulse->lock, NULL);
    pulse->stop = eventfd(0, EFD_CLOEXEC);
    sigset_t all, before;
    sigfillset(&all); /* signals are for the threads of Python */
    pthread_sigmask(SIG_SETMASK, &all, &before);
    int failed = pulse->stop < 0 || pthread_create(&pulse->thread, NULL, lt_run, pulse);
    pthread_sigmask(SIG_SETMASK, &before, NULL);
    if (!failed) return pulse;
    if (pulse->stop >= 0) close(pulse->stop);
    free(pulse);
    return NULL;
}

/* Ends the thread and closes its socket. */
void lt_pulse_stop(lt_pulse *pulse) {
    if (eventfd_write(pulse->stop, 1) == 0) pthread_join(pulse->thread, NULL);
    close(pulse->stop);
    close(pulse->socket);
    free(pulse->frames);
    free(pulse);
}
