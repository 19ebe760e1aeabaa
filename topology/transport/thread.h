/* The communication thread: large messages in chunks through both levels, and recursive doubling. It sleeps in epoll;
 * sockets, the node's other ranks (one byte on their socket) and this process (an eventfd) wake it. */
#ifndef LADDERTRON_TRANSPORT_THREAD_H
#define LADDERTRON_TRANSPORT_THREAD_H

#include "net.h"

static void lt_op_done(lt_op *op) {
    atomic_store(&op->done_ns, lt_now());
    atomic_store(&op->done, 1);
    lt_futex_wake(&op->done);
}

#define LT_LEAST(name)                                                              \
    static uint64_t lt_least_##name(lt_comm *c) {                                   \
        uint64_t least = UINT64_MAX;                                                \
        for (int l = 0; l < c->per_node; l++) {                                     \
            uint64_t v = atomic_load(&c->stages[l].name);                           \
            if (v < least) least = v;                                               \
        }                                                                           \
        return least;                                                               \
    }
LT_LEAST(published)
LT_LEAST(reduced)
LT_LEAST(finished)
LT_LEAST(consumed)

/* Sends to the rail's other ranks; `kind` CHUNK with more than two nodes: to each its piece, else everything to all. */
static int lt_rail_send(lt_comm *c, lt_op *op, int kind, uint64_t chunk, const char *data, size_t count) {
    size_t width = lt_width(op->dtype);
    for (int k = 1; k < c->nodes; k++) {
        int node = (c->node + k) % c->nodes, split = kind == LT_F_CHUNK && c->nodes > 2;
        size_t from = split ? lt_piece(c, count, node) : 0, to = split ? lt_piece(c, count, node + 1) : count;
        lt_frame head = {LT_MAGIC, (uint8_t)kind, (uint8_t)op->dtype, 0, 0, chunk, (uint32_t)op->seq,
                         (uint32_t)((to - from) * width)};
        _Atomic uint64_t *sent = kind == LT_F_CHUNK ? &c->rail_sent[node] : &c->total_sent[node];
        if (lt_send(c, node * c->per_node + c->local, &head, data + from * width, sent)) return -1;
    }
    return 0;
}

/* Reduces this rank's slice of a chunk over the node; with one node that is the result, else it goes to the rail. */
static int lt_chunk_reduce(lt_comm *c, lt_op *op) {
    const void *in[LT_MAX_RANKS];
    size_t first, slice, count, width = lt_width(op->dtype);
    lt_chunk_span(c, op, c->red, &first, &slice, &count);
    uint64_t ours[2];
    lt_what(op, ours);
    for (int l = 0; l < c->per_node; l++) {
        in[l] = lt_ring_in(c, l, c->red);
        if (memcmp(c->stages[l].what[c->red % LT_RING], ours, sizeof ours))
            return lt_fail(c, LT_MISMATCH, c->node * c->per_node + l, op->seq);
    }
    if (c->nodes == 1) {
        lt_add_up(c, in, c->per_node, slice, count, lt_ring_out(c, c->red) + slice * width, op->dtype);
        return 0;
    }
    char *mine = lt_slice(c, op, c->red);
    if (c->per_node > 1) lt_add_up(c, in, c->per_node, slice, count, mine, op->dtype);
    return lt_rail_send(c, op, LT_F_CHUNK, c->red, mine, count);
}

/* What the rail's other ranks sent of their sums, in the order of nodes, and `mine` among them. */
static int lt_rail_parts(lt_comm *c, lt_op *op, uint64_t chunk, const char *mine, size_t count, const void **in) {
    for (int n = 0; n < c->nodes; n++) {
        in[n] = n == c->node ? mine : lt_rail(c, n, chunk);
        if (n != c->node && !lt_belongs(op, &c->rail_heads[lt_rail_slot(n, chunk)], count))
            return lt_fail(c, LT_MISMATCH, n * c->per_node + c->local, op->seq);
    }
    return 0;
}

/* With more than two nodes: sums this node's piece of the slice, and sends the total to the others. */
static int lt_chunk_total(lt_comm *c, lt_op *op) {
    const void *in[LT_MAX_RANKS];
    size_t first, slice, count, width = lt_width(op->dtype);
    lt_chunk_span(c, op, c->mid, &first, &slice, &count);
    size_t from = lt_piece(c, count, c->node), to = lt_piece(c, count, c->node + 1);
    char *mine = lt_slice(c, op, c->mid) + from * width;
    if (lt_rail_parts(c, op, c->mid, mine, to - from, in)) return -1;
    lt_add_up(c, in, c->nodes, 0, to - from, mine, op->dtype);
    return lt_rail_send(c, op, LT_F_TOTAL, c->mid, mine, to - from);
}

static int lt_rails_ready(lt_comm *c, uint64_t chunk, _Atomic uint64_t *got, _Atomic uint64_t *sent) {
    for (int n = 0; n < c->nodes; n++)
        if (n != c->node && (atomic_load(&got[n]) <= chunk || (sent && atomic_load(&sent[n]) <= chunk))) return 0;
    return 1;
}

static int lt_chunk_ready(lt_comm *c) {
    if (c->nodes == 2) return c->red > c->fin && lt_rails_ready(c, c->fin, c->rail_got, c->rail_sent);
    return c->mid > c->fin && lt_rails_ready(c, c->fin, c->total_got, c->total_sent) &&
           lt_rails_ready(c, c->fin, c->rail_got, c->rail_sent);
}

/* The slice's result, into the node's ring (alone on its node: into x, where the totals of several nodes are already). */
static int lt_chunk_finish(lt_comm *c, lt_op *op) {
    const void *in[LT_MAX_RANKS];
    size_t first, slice, count, width = lt_width(op->dtype);
    lt_chunk_span(c, op, c->fin, &first, &slice, &count);
    char *mine = lt_slice(c, op, c->fin), *out = c->per_node > 1 ? lt_ring_out(c, c->fin) + slice * width : mine;
    if (c->nodes == 2) {
        if (lt_rail_parts(c, op, c->fin, mine, count, in)) return -1;
        lt_add_up(c, in, 2, 0, count, out, op->dtype);
    } else if (out != mine) {
        memcpy(out, mine, count * width);
    }
    return 0;
}

/* Takes chunks as far through the stages as they will go. 1: something moved. */
static int lt_pipeline(lt_comm *c) {
    int moved = 0, shared = c->per_node > 1;
    lt_op *op;
    lt_stage *me = lt_my_stage(c);
    for (int again = 1; again && atomic_load(&c->error) == 0;) {
        again = 0;
        size_t first, slice, count;
        if (lt_least_reduced(c) + LT_RING > c->pub && (op = lt_chunk_op(c, c->pub))) {
            size_t width = lt_width(op->dtype), all = lt_chunk_span(c, op, c->pub, &first, &slice, &count);
            if (shared) memcpy(lt_ring_in(c, c->local, c->pub), (char *)op->x + first * width, all * width);
            lt_what(op, me->what[c->pub % LT_RING]);
            atomic_store(&me->published, ++c->pub);
            again = 1;
        }
        uint64_t room = c->nodes == 1 ? lt_least_consumed(c) + LT_RING : c->fin + LT_WINDOW;
        if (lt_least_published(c) > c->red && room > c->red && (op = lt_chunk_op(c, c->red))) {
            if (lt_chunk_reduce(c, op)) return 1;
            atomic_store(&me->reduced, ++c->red);
            if (c->nodes == 1) atomic_store(&me->finished, atomic_fetch_add(&c->fin, 1) + 1);
            again = 1;
        }
        if (c->nodes > 2 && c->red > c->mid && lt_rails_ready(c, c->mid, c->rail_got, NULL) &&
            (op = lt_chunk_op(c, c->mid))) {
            if (lt_chunk_total(c, op)) return 1;
            c->mid++;
            again = 1;
        }
        if (c->nodes > 1 && lt_chunk_ready(c) && lt_least_consumed(c) + LT_RING > c->fin &&
            (op = lt_chunk_op(c, c->fin))) {
            if (lt_chunk_finish(c, op)) return 1;
            atomic_store(&me->finished, atomic_fetch_add(&c->fin, 1) + 1);
            again = 1;
        }
        if (lt_least_finished(c) > c->out && (op = lt_chunk_op(c, c->out))) {
            size_t width = lt_width(op->dtype), all = lt_chunk_span(c, op, c->out, &first, &slice, &count);
            if (shared) memcpy((char *)op->x + first * width, lt_ring_out(c, c->out), all * width);
            atomic_store(&me->consumed, ++c->out);
            if (c->out == op->first_chunk + op->chunks) lt_op_done(op);
            again = 1;
        }
        if (again) {
            moved = 1;
            if (shared) lt_wake_node(c);
        }
    }
    return moved;
}

/* Recursive doubling: log2(size) exchanges; both partners add the same two numbers, so the sums stay bitwise equal. */
static int lt_doubling(lt_comm *c, lt_op *op) {
    int moved = 0, steps = 0, slot = (int)(op->seq % LT_SLOTS);
    char *partial = c->partial + (size_t)slot * c->small;
    while (1 << steps < c->size) steps++;
    while (op->step < steps && atomic_load(&c->error) == 0) {
        int partner = c->rank ^ (1 << op->step);
        if (op->sent_step == op->step) {
            lt_frame head = {LT_MAGIC, LT_F_STEP, (uint8_t)op->dtype, 0, (uint8_t)op->step, op->seq, 0,
                             (uint32_t)op->bytes};
            if (op->step == 0) memcpy(partial, op->x, op->bytes);
            if (lt_send(c, partner, &head, partial, NULL)) return 1;
            op->sent_step++;
            moved = 1;
        }
        if (c->step_got[slot * 8 + op->step] != op->seq + 1) break;
        lt_frame *said = &c->step_heads[slot * 8 + op->step];
        if (said->bytes != (uint32_t)op->bytes || said->dtype != op->dtype) {
            lt_fail(c, LT_MISMATCH, partner, op->seq);
            return 1;
        }
        char *theirs = c->steps + ((size_t)slot * 8 + op->step) * c->small;
        const void *in[2] = {partner < c->rank ? theirs : partial, partner < c->rank ? partial : theirs};
        lt_add_up(c, in, 2, 0, op->count, partial, op->dtype);
        op->step++;
        moved = 1;
    }
    if (op->step == steps && !atomic_load(&op->done) && !atomic_load(&c->error)) {
        memcpy(op->x, partial, op->bytes);
        lt_op_done(op);
        moved = 1;
    }
    return moved;
}

/* Whether the collective queued as seq is over. Its caller may have gone on and filled the slot anew: `start` writes seq
 * before it clears `done`, so whoever sees `done` cleared by that sees the new seq, too. */
static int lt_is_over(lt_op *op, uint64_t seq) { return atomic_load(&op->done) || op->seq != seq; }

static int lt_progress(lt_comm *c) {
    if (atomic_load(&c->error)) return 0;
    pthread_mutex_lock(&c->work);
    int moved = lt_pipeline(c);
    uint64_t queued = atomic_load(&c->queued);
    for (uint64_t i = c->taken; i < queued && !atomic_load(&c->error); i++) {
        uint64_t seq = c->queue[i % LT_SLOTS];
        lt_op *op = &c->ops[seq % LT_SLOTS];
        if (op->strategy == LT_DOUBLING && !lt_is_over(op, seq)) moved |= lt_doubling(c, op);
    }
    while (c->taken < queued) {
        uint64_t seq = c->queue[c->taken % LT_SLOTS];
        if (!lt_is_over(&c->ops[seq % LT_SLOTS], seq)) break;
        c->taken++;
    }
    pthread_mutex_unlock(&c->work);
    return moved;
}

/* What the thread listens to: always the node's doorbells; the wire only while something of its own is under way or
 * another rank of the node depends on what arrives here. Otherwise the waiter receives for itself and the thread
 * sleeps through. */
static void lt_listen(lt_comm *c, int busy) {
    int wire = busy || (c->nodes > 1 && c->per_node > 1);
    pthread_mutex_lock(&c->net);
    for (int r = 0; r < c->size; r++) {
        lt_peer *p = &c->peers[r];
        if (r == c->rank) continue;
        if (atomic_load(&c->error)) {
            lt_watch(c, r, 0);
            continue;
        }
        uint32_t in = !p->eof && (p->local || (wire && !p->paused)) ? EPOLLIN : 0;
        if (p->paused && p->head.seq < c->fin + LT_WINDOW) in = EPOLLIN;
        lt_watch(c, r, in | (p->first && !p->eof ? EPOLLOUT : 0));
    }
    pthread_mutex_unlock(&c->net);
}

static int lt_receive(lt_comm *c, int rank) {
    lt_peer *p = &c->peers[rank];
    if (!p->local) return lt_pump(c, rank);
    char bells[256];
    ssize_t n = recv(p->fd, bells, sizeof bells, MSG_DONTWAIT);
    if (n == 0 || (n < 0 && errno != EAGAIN && errno != EWOULDBLOCK && errno != EINTR)) p->eof = 1;
    return 0;
}

static void *lt_thread(void *arg) {
    lt_comm *c = arg;
    lt_stage *me = lt_my_stage(c);
    struct epoll_event events[64];
    int64_t closing_ns = 0;
    for (;;) {
        while (lt_progress(c)) {}
        int busy = atomic_load(&c->queued) != c->taken, unsent = 0;
        lt_listen(c, busy);
        if (atomic_load(&c->closing)) {
            pthread_mutex_lock(&c->net);
            for (int r = 0; r < c->size; r++) unsent |= r != c->rank && c->peers[r].first && !c->peers[r].eof;
            pthread_mutex_unlock(&c->net);
            if (!closing_ns) closing_ns = lt_now();
            if (!unsent || atomic_load(&c->error) || lt_now() - closing_ns > 1000000000LL) break;
        }
        atomic_store(&me->asleep, 1);
        atomic_store(&c->asleep, 1);
        if (lt_progress(c)) { /* something came between the last look and lying down */
            atomic_store(&me->asleep, 0);
            atomic_store(&c->asleep, 0);
            continue;
        }
        int n = epoll_wait(c->epoll, events, 64, busy || atomic_load(&c->closing) ? 50 : -1);
        atomic_store(&me->asleep, 0);
        atomic_store(&c->asleep, 0);
        int arrived = 0;
        pthread_mutex_lock(&c->net);
        for (int i = 0; i < n; i++) {
            uint32_t rank = events[i].data.u32;
            if (rank == UINT32_MAX) {
                uint64_t count;
                if (read(c->bell, &count, 8) < 0) continue;
                continue;
            }
            if (events[i].events & EPOLLOUT) lt_flush(c, (int)rank);
            if (events[i].events & (EPOLLIN | EPOLLHUP | EPOLLERR)) arrived |= lt_receive(c, (int)rank);
            if (events[i].events & (EPOLLHUP | EPOLLERR)) { /* epoll would report it for ever */
                epoll_ctl(c->epoll, EPOLL_CTL_DEL, c->peers[rank].fd, NULL);
                c->peers[rank].hung_up = 1;
            }
        }
        for (int r = 0; r < c->size; r++) /* what had come before the end is still to be read */
            if (r != c->rank && c->peers[r].hung_up && !c->peers[r].eof) arrived |= lt_receive(c, r);
        pthread_mutex_unlock(&c->net);
        if (arrived && atomic_load(&c->main_polls)) lt_ring(c->main_bell);
    }
    return NULL;
}

#endif
