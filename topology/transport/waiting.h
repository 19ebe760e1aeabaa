/* How a caller waits for what others send: it spins, sleeps on a word or polls the sockets, and finds out who is to blame
 * where nothing comes. Part of transport.c. */
#ifndef LADDERTRON_TRANSPORT_WAITING_H
#define LADDERTRON_TRANSPORT_WAITING_H

#include <poll.h>

#include "thread.h"

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

#endif
