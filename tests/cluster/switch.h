/* The switch between the nodes' TAP devices: delay, rate, loss and cut links, one thread a port. Part of cluster.c, which
   opens `taps` and `control`, and runs it as the nodes' init.

   What a port costs is paid on its own node's cores, by whoever computes there: a thread that is woken on the sender's
   core sends no interrupt to the other one, and its timer is set only where the next frame to leave is a new one.
   Frames are what a NIC with segmentation offload takes and gives: up to 64 KB each, checksums left to the device. */
#include <errno.h>
#include <linux/virtio_net.h>
#include <poll.h>
#include <pthread.h>
#include <sched.h>
#include <stdatomic.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/resource.h>
#include <sys/socket.h>
#include <sys/timerfd.h>
#include <sys/wait.h>
#include <time.h>
#include <unistd.h>

enum { MOST = 16, GUESTS = 8, QUEUE = 1 << 13, BURST = 64, HEAD = sizeof(struct virtio_net_hdr) };
enum { FRAME = HEAD + 14 + 65536 };
#define AHEAD_NS 500000

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
    uint32_t to, size;
    uint8_t *bytes;
} Frame;

typedef struct {
    int tap, timer, cores_given, queued;
    cpu_set_t cores;
    pthread_t thread;
    int64_t free_ns, armed;
    uint64_t order, dice;
    Frame heap[QUEUE];
} Port;

static Port ports[MOST];
static int taps[MOST];
static _Atomic int64_t delay_ns, receiver_free[MOST];
static _Atomic uint64_t frames, dropped, carried[MOST][MOST];
static _Atomic int cut[MOST][MOST], largest[MOST][MOST];
static _Atomic unsigned first_port, last_port;
static _Atomic double ns_per_byte;
static _Atomic uint32_t loss_ppm, link_age;

static int before(const Frame *a, const Frame *b) {
    return a->due < b->due || (a->due == b->due && a->order < b->order);
}

static void push(Port *p, Frame f) {
    int at = p->queued++;
    for (; at && before(&f, &p->heap[(at - 1) / 2]); at = (at - 1) / 2) p->heap[at] = p->heap[(at - 1) / 2];
    p->heap[at] = f;
}

static Frame pop(Port *p) {
    Frame first = p->heap[0], last = p->heap[--p->queued];
    int at = 0;
    for (int child; (child = 2 * at + 1) < p->queued; at = child) {
        if (child + 1 < p->queued && before(&p->heap[child + 1], &p->heap[child])) child++;
        if (!before(&p->heap[child], &last)) break;
        p->heap[at] = p->heap[child];
    }
    p->heap[at] = last;
    return first;
}

static int lost(Port *p) {
    uint64_t d = p->dice;
    d ^= d << 13, d ^= d >> 7, d ^= d << 17; /* xorshift: the same frames of a port are lost in every run */
    p->dice = d;
    return loss_ppm && d % 1000000 < loss_ppm;
}

/* A firewall: whether the frame begins a TCP connection to a port that is not open. */
static int closed_port(const uint8_t *frame, int size) {
    const uint8_t *ip = frame + HEAD + 14, *tcp = ip + (ip[0] & 15) * 4;
    if (!last_port || size < HEAD + 14 + 40 || frame[HEAD + 12] != 8 || frame[HEAD + 13] != 0) return 0;
    if (ip[9] != 6 || (tcp[13] & 0x12) != 2) return 0; /* TCP, SYN without ACK */
    unsigned port = (unsigned)tcp[2] << 8 | tcp[3];
    return port < first_port || port > last_port;
}

/* A path whose MTU nobody tells: whether a packet of the frame, as the wire has it, is too large. */
static int too_large(const uint8_t *frame, int size, int limit) {
    const struct virtio_net_hdr *head = (const void *)frame;
    return limit && (head->gso_type ? head->gso_size + 54 : size - HEAD) > limit;
}

/* When a frame that enters its receiver at `due` at the earliest has entered it: after the one before. */
static int64_t enter(int to, int64_t due, int64_t wire) {
    int64_t seen = receiver_free[to], at;
    do at = due > seen + wire ? due : seen + wire;
    while (!atomic_compare_exchange_weak(&receiver_free[to], &seen, at));
    return at;
}

/* A frame leaves its sender when the one before has, travels, and enters its receiver when the one before has: cut
   through, so that an idle link costs its serialisation once. */
static void enqueue(int from, int to, const uint8_t *bytes, int size, int64_t now) {
    Port *p = &ports[from];
    int64_t wire = (int64_t)((size - HEAD) * ns_per_byte);
    p->free_ns = (p->free_ns > now ? p->free_ns : now) + wire;
    int stopped = closed_port(bytes, size) || too_large(bytes, size, largest[from][to]);
    if (stopped || cut[from][to] || lost(p) || p->queued == QUEUE) {
        dropped++;
        return;
    }
    int64_t due = p->free_ns + delay_ns;
    if (wire) due = enter(to, due, wire);
    frames++;
    carried[from][to] += size - HEAD;
    Frame f = {due, p->order++, (uint32_t)to, (uint32_t)size, malloc(size)};
    if (f.bytes == NULL) die("memory");
    memcpy(f.bytes, bytes, size);
    push(p, f);
}

static void take(int from, int64_t now) {
    static _Thread_local uint8_t bytes[FRAME];
    for (int i = 0; i < BURST; i++) {
        ssize_t size = read(ports[from].tap, bytes, sizeof bytes);
        if (size < HEAD + 14) return;
        for (int to = 0; to < nodes; to++)
            if (to != from && ((bytes[HEAD] & 1) || bytes[HEAD + 5] == to)) enqueue(from, to, bytes, (int)size, now);
    }
}

static void deliver(Port *p) {
    while (p->queued && p->heap[0].due <= now_ns()) {
        Frame f = pop(p);
        if (write(taps[f.to], f.bytes, f.size) < 0) dropped++;
        free(f.bytes);
    }
}

/* The timer is set anew only where the port's next event is another one than it was: each setting costs the guest of a
   hypervisor an exit. */
static void arm(Port *p) {
    int64_t next = p->queued ? p->heap[0].due : 0, now = now_ns();
    if (p->free_ns > now + AHEAD_NS && (!next || p->free_ns - AHEAD_NS < next)) next = p->free_ns - AHEAD_NS;
    if (next == p->armed || (!next && p->armed < now)) return;
    struct itimerspec t = {.it_value = {next / 1000000000, next % 1000000000}};
    if (timerfd_settime(p->timer, TFD_TIMER_ABSTIME, &t, NULL) < 0) die("timer");
    p->armed = next;
}

static void *be_port(void *argument) {
    int from = (int)(intptr_t)argument;
    Port *p = &ports[from];
    uint32_t age = 0;
    struct sched_param priority = {.sched_priority = 10};
    if (p->cores_given) sched_setaffinity(0, sizeof p->cores, &p->cores);
    /* A real switch shares no core with the ranks: what it costs here is paid at once, and told by `stats`. */
    if (sched_setscheduler(0, SCHED_FIFO, &priority) < 0 && setpriority(PRIO_PROCESS, 0, -20) < 0 && from == 0)
        fprintf(stderr, "cluster: the switch has no priority: delays will be longer on a busy machine\n");
    for (;;) {
        if (age != link_age) age = link_age, p->dice = 88172645463325252u + (uint64_t)from;
        arm(p);
        /* a sender that is half a millisecond ahead of its link waits, as for a NIC */
        struct pollfd polled[2] = {{p->free_ns > now_ns() + AHEAD_NS ? -1 : p->tap, POLLIN, 0}, {p->timer, POLLIN, 0}};
        if (poll(polled, 2, -1) < 0 && errno != EINTR) die("poll");
        uint64_t count;
        if (polled[1].revents && read(p->timer, &count, 8) == 8) p->armed = 0;
        if (polled[0].revents) take(from, now_ns());
        deliver(p);
    }
    return NULL;
}

/* `link DELAY_NS BYTES_PER_S LOSS_PPM` (0: no limit), `cut A B`, `fix A B` (both ways), `firewall FIRST LAST` (0 0: none),
   `largest FROM TO BYTES` (0: no limit), `stats`:
   `ok CPU_NS FRAMES DROPPED` and the bytes carried from each node to each. */
static void command(int guest, char *text) {
    char answer[8192] = "ok";
    long long delay;
    double rate;
    unsigned loss;
    int a, b, bytes;
    if (sscanf(text, "link %lld %lf %u", &delay, &rate, &loss) == 3 && delay >= 0 && rate >= 0) {
        delay_ns = delay;
        ns_per_byte = rate > 0 ? 1e9 / rate : 0;
        loss_ppm = loss;
        link_age++;
    } else if ((sscanf(text, "cut %d %d", &a, &b) == 2 || sscanf(text, "fix %d %d", &a, &b) == 2) && a >= 0 && b >= 0 &&
               a < nodes && b < nodes) {
        cut[a][b] = cut[b][a] = text[0] == 'c';
    } else if (sscanf(text, "firewall %d %d", &a, &b) == 2) {
        first_port = (unsigned)a, last_port = (unsigned)b;
    } else if (sscanf(text, "largest %d %d %d", &a, &b, &bytes) == 3 && a >= 0 && b >= 0 && a < nodes && b < nodes) {
        largest[a][b] = bytes;
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

/* The ports' threads, and commands on this one. */
static void run_switch(void) {
    struct pollfd polled[GUESTS + 1];
    int guests[GUESTS], count = 0;
    char text[256];
    for (int i = 0; i < nodes; i++) {
        ports[i].tap = taps[i];
        if ((ports[i].timer = timerfd_create(CLOCK_MONOTONIC, TFD_CLOEXEC | TFD_NONBLOCK)) < 0) die("timer");
        if (pthread_create(&ports[i].thread, NULL, be_port, (void *)(intptr_t)i)) die("thread");
    }
    for (;;) {
        polled[0] = (struct pollfd){control, POLLIN, 0};
        for (int g = 0; g < count; g++) polled[1 + g] = (struct pollfd){guests[g], POLLIN, 0};
        if (poll(polled, 1 + (nfds_t)count, 1000) < 0 && errno != EINTR) die("poll");
        while (waitpid(-1, NULL, WNOHANG) > 0) {} /* init inherits every orphan */
        for (int g = count; g-- > 0;) {
            if (!polled[1 + g].revents) continue;
            ssize_t size = recv(guests[g], text, sizeof text - 1, MSG_DONTWAIT);
            if (size > 0) {
                text[size] = 0;
                command(guests[g], text);
            } else if (size == 0 || errno != EAGAIN) {
                close(guests[g]);
                guests[g] = guests[--count];
            }
        }
        if (polled[0].revents & POLLIN) {
            int guest = accept4(control, NULL, NULL, SOCK_CLOEXEC);
            if (guest >= 0 && count < GUESTS) guests[count++] = guest;
            else if (guest >= 0) close(guest);
        }
    }
}
