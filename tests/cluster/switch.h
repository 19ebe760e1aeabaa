/* The switch between the nodes' TAP devices: delay, rate, loss and cut links, on one thread. Part of cluster.c, which
   opens `taps` and `control`, and runs it as the nodes' init. */
#include <errno.h>
#include <poll.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/resource.h>
#include <sys/socket.h>
#include <sys/wait.h>
#include <time.h>
#include <unistd.h>

enum { MOST = 16, GUESTS = 8, FRAME = 16384, QUEUE = 1 << 16, BURST = 64 };

static int nodes, control;

static void die(const char *what) {
    fprintf(stderr, "cluster: %s: %s\n", what, strerror(errno));
    exit(1);
}

static int64_t now_ns(void) {
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return t.tv_sec * 1000000000LL + t.tv_nsec;
}

typedef struct {
    int64_t due;
    uint64_t order;
    uint16_t to, size;
    uint8_t *bytes;
} Frame;

static Frame heap[QUEUE];
static int queued;
static uint64_t order, frames, dropped, carried[MOST][MOST];
static int taps[MOST], cut[MOST][MOST];
static int64_t delay_ns, sender_free[MOST], receiver_free[MOST];
static double ns_per_byte;
static uint32_t loss_ppm;
static uint64_t dice = 1;

static int before(const Frame *a, const Frame *b) {
    return a->due < b->due || (a->due == b->due && a->order < b->order);
}

static void push(Frame f) {
    int at = queued++;
    for (; at && before(&f, &heap[(at - 1) / 2]); at = (at - 1) / 2) heap[at] = heap[(at - 1) / 2];
    heap[at] = f;
}

static Frame pop(void) {
    Frame first = heap[0], last = heap[--queued];
    int at = 0;
    for (int child; (child = 2 * at + 1) < queued; at = child) {
        if (child + 1 < queued && before(&heap[child + 1], &heap[child])) child++;
        if (!before(&heap[child], &last)) break;
        heap[at] = heap[child];
    }
    heap[at] = last;
    return first;
}

static int lost(void) {
    dice ^= dice << 13, dice ^= dice >> 7, dice ^= dice << 17; /* xorshift: the same frames are lost in every run */
    return loss_ppm && dice % 1000000 < loss_ppm;
}

/* A frame leaves its sender when the one before has, travels, and enters its receiver when the one before has: cut
   through, so that an idle link costs its serialisation once. */
static void enqueue(int from, int to, const uint8_t *bytes, int size, int64_t now) {
    int64_t wire = (int64_t)(size * ns_per_byte);
    sender_free[from] = (sender_free[from] > now ? sender_free[from] : now) + wire;
    if (cut[from][to] || lost() || queued == QUEUE) {
        dropped++;
        return;
    }
    int64_t due = sender_free[from] + delay_ns;
    if (due < receiver_free[to] + wire) due = receiver_free[to] + wire;
    if (wire) receiver_free[to] = due;
    frames++;
    carried[from][to] += size;
    Frame f = {due, order++, (uint16_t)to, (uint16_t)size, malloc(size)};
    if (f.bytes == NULL) die("memory");
    memcpy(f.bytes, bytes, size);
    push(f);
}

static void take_from(int port, int64_t now) {
    uint8_t bytes[FRAME];
    for (int i = 0; i < BURST; i++) {
        ssize_t size = read(taps[port], bytes, sizeof bytes);
        if (size < 14) return;
        for (int to = 0; to < nodes; to++)
            if (to != port && ((bytes[0] & 1) || bytes[5] == to)) enqueue(port, to, bytes, (int)size, now);
    }
}

static void deliver(int64_t now) {
    while (queued && heap[0].due <= now) {
        Frame f = pop();
        if (write(taps[f.to], f.bytes, f.size) < 0) dropped++;
        free(f.bytes);
    }
}

/* `link DELAY_NS BYTES_PER_S LOSS_PPM` (0: no limit), `cut A B`, `mend A B` (both ways), `stats`:
   `ok CPU_NS FRAMES DROPPED` and the bytes carried from each node to each. */
static void command(int guest, char *text) {
    char answer[8192] = "ok";
    long long delay;
    double rate;
    unsigned loss;
    int a, b;
    if (sscanf(text, "link %lld %lf %u", &delay, &rate, &loss) == 3 && delay >= 0 && rate >= 0) {
        delay_ns = delay, ns_per_byte = rate > 0 ? 1e9 / rate : 0, loss_ppm = loss, dice = 88172645463325252u;
    } else if ((sscanf(text, "cut %d %d", &a, &b) == 2 || sscanf(text, "mend %d %d", &a, &b) == 2) && a >= 0 && b >= 0 &&
               a < nodes && b < nodes) {
        cut[a][b] = cut[b][a] = text[0] == 'c';
    } else if (strcmp(text, "stats") == 0) {
        struct rusage u;
        getrusage(RUSAGE_SELF, &u);
        int at = sprintf(answer, "ok %lld %llu %llu",
                         (u.ru_utime.tv_sec + u.ru_stime.tv_sec) * 1000000000LL +
                             (u.ru_utime.tv_usec + u.ru_stime.tv_usec) * 1000LL,
                         (unsigned long long)frames, (unsigned long long)dropped);
        for (int i = 0; i < nodes * nodes; i++)
            at += sprintf(answer + at, " %llu", (unsigned long long)carried[i / nodes][i % nodes]);
    } else {
        strcpy(answer, "error: no such command");
    }
    (void)!send(guest, answer, strlen(answer), MSG_NOSIGNAL | MSG_DONTWAIT);
}

static int64_t next_event(int64_t now) {
    int64_t next = queued ? heap[0].due : now + 1000000000LL;
    for (int i = 0; i < nodes; i++)
        if (sender_free[i] > now + 500000 && sender_free[i] - 500000 < next) next = sender_free[i] - 500000;
    return next > now ? next - now : 0;
}

static void run_switch(void) {
    struct pollfd polled[MOST + GUESTS + 1];
    int guests[GUESTS], count = 0;
    char text[256];
    for (;;) {
        int64_t now = now_ns();
        for (int i = 0; i < nodes; i++) /* a sender that is half a millisecond ahead of its link waits, as for a NIC */
            polled[i] = (struct pollfd){sender_free[i] > now + 500000 ? -1 : taps[i], POLLIN, 0};
        polled[nodes] = (struct pollfd){control, POLLIN, 0};
        for (int g = 0; g < count; g++) polled[nodes + 1 + g] = (struct pollfd){guests[g], POLLIN, 0};
        int64_t wait = next_event(now);
        struct timespec t = {wait / 1000000000, wait % 1000000000};
        if (ppoll(polled, nodes + 1 + count, &t, NULL) < 0 && errno != EINTR) die("ppoll");
        while (waitpid(-1, NULL, WNOHANG) > 0) {} /* init inherits every orphan */
        now = now_ns();
        for (int i = 0; i < nodes; i++)
            if (polled[i].revents & POLLIN) take_from(i, now);
        deliver(now_ns());
        for (int g = count; g-- > 0;) {
            if (!polled[nodes + 1 + g].revents) continue;
            ssize_t size = recv(guests[g], text, sizeof text - 1, MSG_DONTWAIT);
            if (size > 0) {
                text[size] = 0;
                command(guests[g], text);
            } else if (size == 0 || errno != EAGAIN) {
                close(guests[g]);
                guests[g] = guests[--count];
            }
        }
        if (polled[nodes].revents & POLLIN) {
            int guest = accept4(control, NULL, NULL, SOCK_CLOEXEC);
            if (guest >= 0 && count < GUESTS) guests[count++] = guest;
            else if (guest >= 0) close(guest);
        }
    }
}
