/* Collectives of one tensor-parallel group on CPUs: shared memory inside a node, sockets between nodes, and one
 * communication thread that sleeps unless a message is too large or too far for the callers themselves.
 *
 * Small messages need nobody in the background: `start` publishes (shared memory, or a send that does not block), the
 * kernel carries, `wait` takes and sums in rank order. Called through ctypes by transport.py, which makes and
 * authenticates the sockets. One thread starts and waits; close may come from any. */
#define _GNU_SOURCE
#define PY_SSIZE_T_CLEAN
#include <Python.h>
#include <poll.h>
#include <sched.h>
#include <stddef.h>
#include <sys/eventfd.h>
#include <sys/mman.h>

#include "thread.h"

#define LT_API __attribute__((visibility("default")))

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

LT_API int lt_abi(void) { return LT_ABI; }

LT_API void lt_set_timeout(lt_comm *c, int64_t ns) { atomic_store(&c->timeout_ns, ns); }

LT_API void lt_error_of(lt_comm *c, int64_t *out) { /* code, peer, collective, errno */
    out[0] = atomic_load(&c->error);
    out[1] = atomic_load(&c->error_peer);
    out[2] = (int64_t)atomic_load(&c->error_seq);
    out[3] = c->error_errno;
}

/* ---- waiting ---- */

static void lt_pause(void) {
#if defined(__x86_64__)
    __builtin_ia32_pause();
#endif
}

/* Who has not delivered its part of a collective: for the error's text. */
static int lt_missing(lt_comm *c, lt_op *op) {
    int slot = (int)(op->seq % LT_SLOTS);
    for (int r = 0; r < c->size; r++) {
        lt_peer *p = &c->peers[r];
        if (r == c->rank) continue;
        if (op->strategy == LT_PIPELINE) {
            uint64_t all = op->first_chunk + op->chunks;
            if (p->local && atomic_load(&c->stages[r % c->per_node].reduced) < all) return r;
            if (!p->local && r % c->per_node == c->local && atomic_load(&c->rail_got[r / c->per_node]) < all) return r;
        } else if (op->strategy == LT_DOUBLING) {
            if (r == (c->rank ^ (1 << op->step))) return r;
        } else if (p->local) {
            if (atomic_load(&c->heads[(r % c->per_node) * LT_SLOTS + slot].published) <= op->seq) return r;
        } else if (op->strategy == LT_EXCHANGE && __atomic_load_n(&p->whole, __ATOMIC_ACQUIRE) <= op->seq) {
            return r;
        }
    }
    for (int r = 0; r < c->size; r++) /* TWO_LEVEL: a sum of another node; any rank of it stands for the node */
        if (r / c->per_node != c->node) return r;
    return -1;
}

typedef struct { int64_t until, next_look; int lost; lt_op *op; } lt_patience;

/* Called by a waiter that still lacks something: error, closing, time out, or a peer gone (seen twice in a row, so that
 * what it sent before it went has had time to be handed on). 0: wait on. */
static int lt_look(lt_comm *c, lt_patience *p) {
    if (atomic_load(&c->error)) return -atomic_load(&c->error);
    if (atomic_load(&c->closing)) return lt_fail(c, LT_CLOSED, -1, p->op->seq);
    int64_t now = lt_now();
    if (now >= p->next_look) {
        p->next_look = now + LT_SLICE_NS / 2;
        int code = atomic_load(&c->verdict->code);
        if (code) return lt_fail(c, code, atomic_load(&c->verdict->peer), atomic_load(&c->verdict->seq));
        int lost = lt_lost_peer(c);
        if (lost >= 0 && lost == p->lost) return lt_fail(c, LT_PEER_LOST, lost, p->op->seq);
        p->lost = lost;
    }
    if (now >= p->until) return lt_fail(c, LT_TIMEOUT, lt_missing(c, p->op), p->op->seq);
    return 0;
}

static int64_t lt_nap(lt_patience *p) {
    int64_t left = p->until - lt_now();
    return left < 0 ? 0 : left < LT_SLICE_NS ? left : LT_SLICE_NS;
}

static int lt_await_word(lt_comm *c, _Atomic uint32_t *word, uint32_t want, _Atomic uint32_t *sleepers, lt_patience *p) {
    if (atomic_load(word) == want) return 0;
    if (c->spin_ns > 0) {
        int64_t until = lt_now() + c->spin_ns;
        do {
            for (int i = 0; i < 64; i++) {
                if (atomic_load(word) == want) return 0;
                lt_pause();
            }
        } while (lt_now() < until);
    }
    int code = 0;
    uint32_t seen;
    if (sleepers) atomic_fetch_add(sleepers, 1);
    while ((seen = atomic_load(word)) != want && (code = lt_look(c, p)) == 0) lt_futex_wait(word, seen, lt_nap(p));
    if (sleepers) atomic_fetch_sub(sleepers, 1);
    return atomic_load(word) == want ? 0 : code;
}

/* Receives until every other node's ranks have sent collective `seq`. */
static int lt_poll_wires(lt_comm *c, uint64_t seq, lt_patience *patience) {
    struct pollfd wires[LT_MAX_RANKS + 1];
    for (;;) {
        int missing = 0, arrived = 0;
        for (int r = 0; r < c->size; r++) {
            lt_peer *p = &c->peers[r];
            if (p->local || __atomic_load_n(&p->whole, __ATOMIC_ACQUIRE) > seq) continue;
            pthread_mutex_lock(&c->net);
            arrived |= lt_pump(c, r);
            pthread_mutex_unlock(&c->net);
            if (__atomic_load_n(&p->whole, __ATOMIC_ACQUIRE) > seq) continue;
            /* a paused or ended wire would only make poll spin */
            wires[missing++] = (struct pollfd){.fd = p->paused || p->eof ? -1 : p->fd, .events = POLLIN};
        }
        if (arrived && atomic_load(&c->queued) != c->taken) lt_wake_thread(c);
        if (!missing) return 0;
        int code = lt_look(c, patience);
        if (code) return code;
        wires[missing] = (struct pollfd){.fd = c->main_bell, .events = POLLIN};
        int64_t ns = lt_nap(patience);
        struct timespec t = {ns / 1000000000LL, ns % 1000000000LL};
        ppoll(wires, (nfds_t)missing + 1, &t, NULL);
        uint64_t count;
        if (wires[missing].revents && read(c->main_bell, &count, 8) < 0) continue;
    }
}

static int lt_await_wires(lt_comm *c, uint64_t seq, lt_patience *patience) {
    atomic_store(&c->main_polls, 1); /* before the first look: what the thread receives from now on rings the bell */
    int code = lt_poll_wires(c, seq, patience);
    atomic_store(&c->main_polls, 0);
    return code;
}

/* ---- the collectives ---- */

static lt_frame lt_head_of(lt_op *op, int kind) {
    return (lt_frame){LT_MAGIC, (uint8_t)kind, (uint8_t)op->dtype, (uint8_t)op->kind, 0, op->seq, 0,
                      (uint32_t)op->bytes};
}

static int lt_is_here(lt_comm *c, lt_op *op) {
    int slot = (int)(op->seq % LT_SLOTS);
    if (op->strategy >= LT_PIPELINE) return (int)atomic_load(&op->done);
    if (c->per_node > 1 || op->strategy == LT_TWO_LEVEL)
        if (atomic_load(&c->syncs[slot].done) != (uint32_t)(op->seq + 1)) return 0;
    if (op->strategy == LT_EXCHANGE)
        for (int r = 0; r < c->size; r++)
            if (!c->peers[r].local && __atomic_load_n(&c->peers[r].whole, __ATOMIC_ACQUIRE) <= op->seq) return 0;
    return 1;
}

/* The first of this node's ranks, by its place there, that published something else in the slot; -1: none did. */
static int lt_odd_one(lt_comm *c, int slot, size_t bytes, uint32_t tag) {
    for (int l = 0; l < c->per_node; l++) {
        lt_head *h = &c->heads[l * LT_SLOTS + slot];
        if (h->bytes != (uint32_t)bytes || h->tag != tag) return l;
    }
    return -1;
}

static int lt_check(lt_comm *c, lt_op *op) { /* all ranks mean the same collective */
    int slot = (int)(op->seq % LT_SLOTS);
    uint32_t tag = lt_tag(op->kind, op->strategy, op->dtype);
    int odd = c->per_node > 1 ? lt_odd_one(c, slot, op->bytes, tag) : -1;
    if (odd >= 0) return lt_fail(c, LT_MISMATCH, c->node * c->per_node + odd, op->seq);
    for (int n = 0; op->strategy == LT_TWO_LEVEL && n < c->nodes; n++) {
        lt_part *part = &c->parts[n * LT_SLOTS + slot];
        if (part->bytes != (uint32_t)op->bytes || part->tag != tag)
            return lt_fail(c, LT_MISMATCH, n * c->per_node + c->local, op->seq);
    }
    for (int r = 0; op->strategy == LT_EXCHANGE && r < c->size; r++) {
        if (c->peers[r].local) continue;
        lt_frame h;
        memcpy(&h, c->peers[r].rx + (size_t)LT_SLOTS * c->small + (size_t)slot * sizeof h, sizeof h);
        if (h.seq != op->seq || h.bytes != (uint32_t)op->bytes || h.dtype != op->dtype || h.op != op->kind)
            return lt_fail(c, LT_MISMATCH, r, op->seq);
    }
    return 0;
}

/* When the last part of an exchange was there: the node's at `inside`, the others' as the kernel says; 0 if it does not. */
static int64_t lt_last_arrival(lt_comm *c, int slot, int64_t inside) {
    for (int r = 0; r < c->size; r++) {
        if (c->peers[r].local) continue;
        int64_t at = c->peers[r].arrived_ns[slot];
        if (at == 0) return 0;
        if (at > inside) inside = at;
    }
    return inside;
}

static void lt_account(lt_comm *c, lt_op *op, int64_t arrival, int64_t entered) {
    int64_t now = lt_now();
    if (arrival == 0 || arrival > entered) arrival = entered;
    int64_t flight = (arrival > op->start_ns ? arrival - op->start_ns : 0) + (now - entered);
    lt_total *t = &c->totals[op->kind][op->strategy][op->layer];
    t->count++;
    t->bytes += op->bytes;
    t->flight_ns += flight;
    t->waited_ns += now - entered;
    c->history[c->recorded++ % LT_HISTORY] =
        (lt_record){op->seq, op->bytes, op->start_ns, flight, now - entered, op->kind, op->strategy, op->layer, 0};
}

static int lt_finish(lt_comm *c, lt_op *op) {
    int64_t entered = lt_now(), arrival = 0;
    int slot = (int)(op->seq % LT_SLOTS), code = 0;
    lt_sync *s = &c->syncs[slot];
    lt_patience patience = {entered + atomic_load(&c->timeout_ns), entered + LT_SLICE_NS / 2, -1, op};
    if (atomic_load(&c->error)) return -atomic_load(&c->error);
    if (atomic_load(&c->closing)) return lt_fail(c, LT_CLOSED, -1, op->seq);
    if (op->strategy >= LT_PIPELINE) {
        if ((code = lt_await_word(c, &op->done, 1, NULL, &patience))) {
            pthread_mutex_lock(&c->work); /* x goes back to the caller: the thread must have let go of it, */
            pthread_mutex_unlock(&c->work);
            pthread_mutex_lock(&c->net); /* and so must whoever sends from it or receives into it */
            pthread_mutex_unlock(&c->net);
            return code;
        }
        arrival = atomic_load(&op->done_ns);
    } else {
        uint32_t want = (uint32_t)(op->seq + 1);
        if (c->per_node > 1 || op->strategy == LT_TWO_LEVEL) {
            if ((code = lt_await_word(c, &s->done, want, &s->sleepers, &patience))) return code;
            arrival = atomic_load(&s->done_ns);
        }
        if (op->strategy == LT_EXCHANGE && c->nodes > 1) {
            if ((code = lt_await_wires(c, op->seq, &patience))) return code;
            arrival = lt_last_arrival(c, slot, arrival);
        }
        if ((code = lt_check(c, op))) return code;
        const void *in[LT_MAX_RANKS];
        int k = 0;
        if (op->strategy == LT_TWO_LEVEL)
            for (; k < c->nodes; k++) in[k] = lt_node_sum(c, k, slot);
        else
            for (; k < c->size; k++)
                in[k] = k == c->rank && c->per_node == 1 ? op->x
                        : c->peers[k].local              ? lt_own(c, k % c->per_node, slot)
                                                         : c->peers[k].rx + (size_t)slot * c->small;
        if (op->kind == LT_REDUCE) lt_add_up(c, in, k, 0, op->count, op->x, op->dtype);
        else
            for (int r = 0; r < k; r++) memcpy((char *)op->out + (size_t)r * op->bytes, in[r], op->bytes);
    }
    op->finished = 1;
    lt_account(c, op, arrival, entered);
    return 0;
}

static int64_t lt_begin(lt_comm *c, int kind, int strategy, void *x, void *out, uint64_t count, size_t bytes, int dtype,
                        int layer) {
    if (atomic_load(&c->error)) return -atomic_load(&c->error);
    if (atomic_load(&c->closing)) return lt_fail(c, LT_CLOSED, -1, c->next_seq);
    if (strategy == LT_TWO_LEVEL && (c->nodes == 1 || c->per_node == 1)) strategy = LT_EXCHANGE; /* the same sum */
    if (strategy == LT_DOUBLING && (c->per_node > 1 || c->size & (c->size - 1))) strategy = LT_EXCHANGE; /* likewise */
    if (strategy != LT_PIPELINE && bytes > c->small) return -LT_TOO_LARGE; /* nothing begun: nothing broken */
    uint64_t seq = c->next_seq;
    if (seq >= LT_DEPTH) {
        lt_op *oldest = &c->ops[(seq - LT_DEPTH) % LT_SLOTS];
        if (!oldest->finished) { /* never sleep here: the caller holds the GIL, and waits for it first */
            int code = lt_is_here(c, oldest) ? lt_finish(c, oldest) : -LT_BUSY;
            if (code) return code;
        }
    }
    c->next_seq++;
    int slot = (int)(seq % LT_SLOTS);
    lt_op *op = &c->ops[slot];
    op->seq = seq, op->x = x, op->out = out, op->count = count, op->bytes = bytes;
    op->kind = kind, op->strategy = strategy, op->dtype = dtype, op->layer = layer, op->finished = 0;
    op->step = op->sent_step = 0;
    atomic_store(&op->done, 0);
    op->start_ns = lt_now();
    if (c->size == 1) {
        if (kind == LT_GATHER) memcpy(out, x, bytes);
        op->finished = 1;
        lt_account(c, op, 0, op->start_ns);
        return (int64_t)seq;
    }
    if (strategy >= LT_PIPELINE) {
        if (strategy == LT_PIPELINE) {
            size_t each = c->chunk / lt_width(dtype);
            op->first_chunk = c->chunks_started;
            op->chunks = (count + each - 1) / each;
            c->chunks_started += op->chunks;
        }
        c->queue[atomic_load(&c->queued) % LT_SLOTS] = seq;
        atomic_fetch_add(&c->queued, 1);
        lt_wake_thread(c);
        return (int64_t)seq;
    }
    int shared = c->per_node > 1;
    if (shared) {
        lt_head *h = &c->heads[c->local * LT_SLOTS + slot];
        memcpy(lt_own(c, c->local, slot), x, bytes);
        h->bytes = (uint32_t)bytes;
        h->tag = lt_tag(kind, strategy, dtype);
        atomic_store(&h->published, seq + 1);
    }
    if (strategy == LT_EXCHANGE && c->nodes > 1) {
        lt_frame head = lt_head_of(op, LT_F_WHOLE);
        for (int k = c->per_node; k < c->size; k++) { /* the next node first: not everybody's first send to one */
            int r = (c->node * c->per_node + k + c->local) % c->size;
            if (c->peers[r].local) r = (r + c->per_node) % c->size;
            int code = lt_send(c, r, &head, x, NULL);
            if (code) return code;
        }
    }
    if (!shared) return (int64_t)seq;
    lt_sync *s = &c->syncs[slot];
    if ((atomic_fetch_add(&s->arrived, 1) + 1) % (uint32_t)c->per_node) return (int64_t)seq;
    /* The last of the node to arrive acts for all of it: nobody has to be woken for that. */
    if (strategy == LT_TWO_LEVEL) {
        const void *in[LT_MAX_RANKS];
        for (int l = 0; l < c->per_node; l++) in[l] = lt_own(c, l, slot);
        char *sum = lt_node_sum(c, c->node, slot);
        lt_frame head = lt_head_of(op, LT_F_NODE);
        uint32_t tag = lt_tag(kind, strategy, dtype);
        if (lt_odd_one(c, slot, bytes, tag) >= 0)
            head.dtype = LT_NO_DTYPE; /* no sum of anything: all shall see it */
        else
            lt_add_up(c, in, c->per_node, 0, count, sum, dtype);
        c->parts[c->node * LT_SLOTS + slot] = (lt_part){(uint32_t)bytes, lt_tag(kind, strategy, head.dtype)};
        for (int k = 1; k < c->nodes; k++) {
            int code = lt_send(c, (c->node + k) % c->nodes * c->per_node + c->local, &head, sum, NULL);
            if (code) return code;
        }
        lt_part_arrived(c, slot, seq);
    } else {
        atomic_store(&s->done_ns, lt_now());
        atomic_store(&s->done, (uint32_t)(seq + 1));
        if (atomic_load(&s->sleepers)) lt_futex_wake(&s->done);
    }
    return (int64_t)seq;
}

#define LT_USE(c, call)                \
    ({                                 \
        atomic_fetch_add(&(c)->users, 1); \
        __typeof__(call) result_ = (call); \
        atomic_fetch_sub(&(c)->users, 1); \
        result_;                       \
    })

/* Sum of x over the group, in place; accounted under `layer`, less than LT_LAYERS. Returns the collective's number, or
 * minus an error; -LT_BUSY: nothing begun, wait for the oldest of those in flight first. */
LT_API int64_t lt_all_reduce(lt_comm *c, void *x, uint64_t count, int dtype, int strategy, int layer) {
    layer &= LT_LAYERS - 1;
    return LT_USE(c, lt_begin(c, LT_REDUCE, strategy, x, NULL, count, count * lt_width(dtype), dtype, layer));
}

/* `bytes` bytes of every rank, in rank order, into out [size, bytes]. */
LT_API int64_t lt_gather(lt_comm *c, void *in, void *out, uint64_t bytes) {
    return LT_USE(c, lt_begin(c, LT_GATHER, LT_EXCHANGE, in, out, bytes, bytes, 0, 0));
}

static int lt_wait_(lt_comm *c, uint64_t seq) {
    lt_op *op = &c->ops[seq % LT_SLOTS];
    return op->seq != seq || op->finished ? 0 : lt_finish(c, op);
}

LT_API int lt_wait(lt_comm *c, uint64_t seq) { return LT_USE(c, lt_wait_(c, seq)); }

static int lt_try_(lt_comm *c, uint64_t seq) {
    lt_op *op = &c->ops[seq % LT_SLOTS];
    if (op->seq != seq || op->finished) return 1;
    if (!lt_is_here(c, op)) return 0;
    int code = lt_finish(c, op);
    return code ? code : 1;
}

/* 1: the result was there and has been taken; 0: `lt_wait` would sleep. Never sleeps, so it may hold the GIL. */
LT_API int lt_try(lt_comm *c, uint64_t seq) { return LT_USE(c, lt_try_(c, seq)); }

LT_API const lt_total *lt_totals(lt_comm *c) { return &c->totals[0][0][0]; }
LT_API const lt_record *lt_history(lt_comm *c, uint64_t *recorded) {
    *recorded = c->recorded;
    return c->history;
}

static struct PyModuleDef lt_module = {PyModuleDef_HEAD_INIT, "_transport", "C functions for ctypes; see transport.py",
                                       -1, NULL, NULL, NULL, NULL, NULL};

PyMODINIT_FUNC PyInit__transport(void) { return PyModule_Create(&lt_module); }
