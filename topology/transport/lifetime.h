/* A transport from `lt_open` to `lt_free`: its memory, shared and own, its thread, its end. Part of transport.c. */
#ifndef LADDERTRON_TRANSPORT_LIFETIME_H
#define LADDERTRON_TRANSPORT_LIFETIME_H

#include <stddef.h>
#include <sys/eventfd.h>
#include <sys/mman.h>

#include "thread.h"

static size_t lt_align(size_t n) { return (n + 4095) & ~(size_t)4095; }

static size_t lt_layout(lt_comm *c, char *base) {
    size_t n = (size_t)c->per_node, at = 0;
#define PLACE(field, bytes) (c->field = (void *)(base + at), at = lt_align(at + (bytes)))
    PLACE(verdict, sizeof(lt_verdict));
    PLACE(heads, n * LT_SLOTS * sizeof(lt_head));
    PLACE(syncs, LT_SLOTS * sizeof(lt_sync));
    PLACE(stages, n * sizeof(lt_stage));
    PLACE(own, n * LT_SLOTS * c->small);
    PLACE(sums, (size_t)c->nodes * LT_SLOTS * c->small);
    PLACE(parts, (size_t)c->nodes * LT_SLOTS * sizeof(lt_part));
    PLACE(ring_in, n * LT_RING * c->chunk);
    PLACE(ring_out, (size_t)LT_RING * c->chunk);
#undef PLACE
    return at;
}

LT_API uint64_t lt_segment_bytes(int size, int per_node, uint64_t small, uint64_t chunk) {
    lt_comm c = {.per_node = per_node, .nodes = size / per_node, .small = small, .chunk = chunk};
    return lt_layout(&c, NULL);
}

static void *lt_lazy(size_t bytes) { /* zeroed, and costs memory only where touched */
    void *p = mmap(NULL, lt_align(bytes), PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    return p == MAP_FAILED ? NULL : p;
}

static void lt_hang_up(lt_comm *c) {
    for (int r = 0; c->peers && r < c->size; r++) {
        if (c->peers[r].fd >= 0) close(c->peers[r].fd);
        c->peers[r].fd = -1;
    }
    int *own[3] = {&c->epoll, &c->bell, &c->main_bell};
    for (int i = 0; i < 3; i++) {
        if (*own[i] >= 0) close(*own[i]);
        *own[i] = -1;
    }
}

/* Only after lt_close (or where lt_open failed), when nobody holds c any more. */
LT_API void lt_free(lt_comm *c) {
    lt_hang_up(c);
    for (int r = 0; c->peers && r < c->size; r++) {
        lt_peer *p = &c->peers[r];
        if (p->rx) munmap(p->rx, lt_align(LT_SLOTS * (c->small + sizeof(lt_frame))));
        for (lt_out *o = p->first, *next; o; o = next) next = o->next, free(o);
    }
    if (c->segment) munmap(c->segment, c->segment_bytes);
    if (c->send_ring) munmap(c->send_ring, lt_align(LT_WINDOW * c->slice_bytes));
    if (c->rail_rings) munmap(c->rail_rings, lt_align((size_t)c->nodes * LT_WINDOW * c->piece_bytes));
    if (c->steps) munmap(c->steps, lt_align(LT_SLOTS * 8 * c->small));
    if (c->partial) munmap(c->partial, lt_align(LT_SLOTS * c->small));
    pthread_mutex_destroy(&c->net);
    pthread_mutex_destroy(&c->work);
    free((void *)c->rail_got);
    free((void *)c->rail_sent);
    free((void *)c->total_got);
    free((void *)c->total_sent);
    free(c->rail_heads);
    free((void *)c->step_got);
    free(c->step_heads);
    free(c->peers);
    free(c);
}

struct lt_sched { uint32_t size, policy; uint64_t flags; int32_t nice; uint32_t priority; uint64_t runtime, deadline, period; };

static void *lt_thread_main(void *arg) {
    /* A short slice lets the thread run as soon as it is woken, ahead of a computing thread on the same core. */
    struct lt_sched attr = {.size = sizeof attr, .runtime = 100000};
    syscall(SYS_sched_setattr, 0, &attr, 0);
    return lt_thread(arg);
}

/* fds[r]: the socket to rank r, -1 for the own; they and the mapping of `segment_fd` belong to the transport from now
 * on, also where it returns NULL (errno says why). cpu: the thread's core, or -1. tree: sums are a tree (reduce.h), for
 * which `size` must be a power of two. */
LT_API lt_comm *lt_open(int rank, int size, int per_node, const int *fds, int segment_fd, uint64_t small,
                        uint64_t chunk, int64_t spin_ns, int64_t timeout_ns, int cpu, int tree) {
    lt_comm *c = calloc(1, sizeof *c);
    if (!c) return NULL;
    *c = (lt_comm){.rank = rank, .size = size, .per_node = per_node, .nodes = size / per_node,
                   .node = rank / per_node, .local = rank % per_node, .tree = tree, .small = small, .chunk = chunk,
                   .spin_ns = spin_ns, .timeout_ns = timeout_ns, .epoll = -1, .bell = -1, .main_bell = -1};
    pthread_mutex_init(&c->net, NULL);
    pthread_mutex_init(&c->work, NULL);
    int ok = (c->peers = calloc((size_t)size, sizeof *c->peers)) != NULL;
    for (int r = 0; ok && r < size; r++) c->peers[r] = (lt_peer){.fd = fds[r], .local = r / per_node == c->node};
    c->segment_bytes = lt_layout(c, NULL);
    char *base = mmap(NULL, c->segment_bytes, PROT_READ | PROT_WRITE, MAP_SHARED, segment_fd, 0);
    ok = ok && base != MAP_FAILED;
    if (base != MAP_FAILED) lt_layout(c, c->segment = base);
    c->epoll = epoll_create1(EPOLL_CLOEXEC);
    c->bell = eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK);
    c->main_bell = eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK);
    ok = ok && c->epoll >= 0 && c->bell >= 0 && c->main_bell >= 0;
    if (c->nodes > 1) {
        /* an uneven share has one element more than an even one */
        c->slice_bytes = (chunk / (size_t)per_node + 127) & ~(size_t)63;
        c->piece_bytes = c->nodes > 2 ? (c->slice_bytes / (size_t)c->nodes + 127) & ~(size_t)63 : c->slice_bytes;
        ok = ok && (c->send_ring = lt_lazy(LT_WINDOW * c->slice_bytes)) &&
             (c->rail_rings = lt_lazy((size_t)c->nodes * LT_WINDOW * c->piece_bytes)) &&
             (c->rail_heads = calloc((size_t)c->nodes * LT_WINDOW, sizeof(lt_frame))) &&
             (c->steps = lt_lazy(LT_SLOTS * 8 * small)) && (c->partial = lt_lazy(LT_SLOTS * small));
    }
    ok = ok && (c->rail_got = calloc((size_t)c->nodes, 8)) && (c->rail_sent = calloc((size_t)c->nodes, 8)) &&
         (c->total_got = calloc((size_t)c->nodes, 8)) && (c->total_sent = calloc((size_t)c->nodes, 8)) &&
         (c->step_got = calloc(LT_SLOTS * 8, 8)) && (c->step_heads = calloc(LT_SLOTS * 8, sizeof(lt_frame)));
    struct epoll_event e = {.events = EPOLLIN, .data.u32 = UINT32_MAX};
    ok = ok && epoll_ctl(c->epoll, EPOLL_CTL_ADD, c->bell, &e) == 0;
    for (int r = 0; ok && r < size; r++) {
        lt_peer *p = &c->peers[r];
        if (r == rank) continue;
        if (!p->local) ok = (p->rx = lt_lazy(LT_SLOTS * (small + sizeof(lt_frame)))) != NULL;
        if (!p->local) lt_ask_for_times(p->fd);
        e = (struct epoll_event){.events = 0, .data.u32 = (uint32_t)r};
        ok = ok && epoll_ctl(c->epoll, EPOLL_CTL_ADD, p->fd, &e) == 0;
    }
    if (ok && size > 1) {
        pthread_attr_t attr;
        pthread_attr_init(&attr);
        if (cpu >= 0) {
            cpu_set_t set;
            CPU_ZERO(&set);
            CPU_SET(cpu, &set);
            pthread_attr_setaffinity_np(&attr, sizeof set, &set);
        }
        int code = pthread_create(&c->thread, &attr, lt_thread_main, c);
        pthread_attr_destroy(&attr);
        c->thread_runs = code == 0;
        if (code) errno = code, ok = 0;
    }
    if (ok) return c;
    int saved = errno;
    lt_free(c);
    errno = saved;
    return NULL;
}

/* Ends everything under way; a `wait` of another thread returns with an error, and so does all that comes after. Always
 * returns, within two seconds. Memory stays until lt_free. */
LT_API void lt_close(lt_comm *c) {
    if (atomic_exchange(&c->closing, 1)) return;
    if (c->thread_runs) {
        lt_ring(c->bell);
        pthread_join(c->thread, NULL);
    }
    lt_ring(c->main_bell);
    while (atomic_load(&c->users)) {
        struct timespec t = {0, 1000000};
        nanosleep(&t, NULL);
    }
    lt_tell_verdict(c);
    lt_hang_up(c);
}

#endif
