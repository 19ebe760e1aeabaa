/* Collectives of one tensor-parallel group on CPUs: shared memory inside a node, sockets between nodes, and one
 * communication thread that sleeps unless a message is too large or too far for the callers themselves.
 *
 * Small messages need nobody in the background: `start` publishes (shared memory, or a send that does not block), the
 * kernel carries, `wait` takes and sums in rank order. Called through ctypes by transport.py, which makes and
 * authenticates the sockets. One thread starts and waits; close may come from any. */
#define _GNU_SOURCE
#define PY_SSIZE_T_CLEAN
#include <Python.h>
#include <sched.h>

#include "lifetime.h"
#include "waiting.h"

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

LT_API void lt_set_timeout(lt_comm *c, int64_t ns) { atomic_store(&c->timeout_ns, ns); }

LT_API void lt_error_of(lt_comm *c, int64_t *out) { /* code, peer, collective, errno */
    out[0] = atomic_load(&c->error);
    out[1] = atomic_load(&c->error_peer);
    out[2] = (int64_t)atomic_load(&c->error_seq);
    out[3] = c->error_errno;
}

LT_API const lt_total *lt_totals(lt_comm *c) { return &c->totals[0][0][0]; }
LT_API const lt_record *lt_history(lt_comm *c, uint64_t *recorded) {
    *recorded = c->recorded;
    return c->history;
}

static struct PyModuleDef lt_module = {PyModuleDef_HEAD_INIT, "_transport", "C functions for ctypes; see transport.py",
                                       -1, NULL, NULL, NULL, NULL, NULL};

PyMODINIT_FUNC PyInit__transport(void) { return PyModule_Create(&lt_module); }
