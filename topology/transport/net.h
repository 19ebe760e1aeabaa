/* Frames over the sockets between ranks: sends that never block, receives that go on where they stopped. */
#ifndef LADDERTRON_TRANSPORT_NET_H
#define LADDERTRON_TRANSPORT_NET_H

#include <errno.h>
#include <stdlib.h>
#include <string.h>
#include <sys/epoll.h>
#include <sys/socket.h>
#include <sys/uio.h>
#include <time.h>
#include <unistd.h>
#include <limits.h>
#include <linux/errqueue.h>
#include <linux/futex.h>
#include <linux/net_tstamp.h>
#include <sys/syscall.h>

#include "chunks.h"

static int64_t lt_now(void) {
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return (int64_t)t.tv_sec * 1000000000LL + t.tv_nsec;
}

static void lt_futex_wait(_Atomic uint32_t *word, uint32_t seen, int64_t ns) {
    struct timespec t = {ns / 1000000000LL, ns % 1000000000LL};
    syscall(SYS_futex, word, FUTEX_WAIT, seen, &t, NULL, 0);
}

static void lt_futex_wake(_Atomic uint32_t *word) { syscall(SYS_futex, word, FUTEX_WAKE, INT_MAX, NULL, NULL, 0); }

static int lt_fail(lt_comm *c, int code, int peer, uint64_t seq) {
    int none = 0;
    if (atomic_load(&c->error) == 0) {
        atomic_store(&c->error_peer, peer);
        atomic_store(&c->error_seq, seq);
        c->error_errno = errno;
        atomic_compare_exchange_strong(&c->error, &none, code);
        none = 0;
        if ((code == LT_PEER_LOST || code == LT_TIMEOUT) && atomic_load(&c->verdict->code) == 0) {
            atomic_store(&c->verdict->peer, peer);
            atomic_store(&c->verdict->seq, seq);
            atomic_compare_exchange_strong(&c->verdict->code, &none, code);
        }
    }
    return -atomic_load(&c->error);
}

static void lt_ask_for_times(int fd) {
    int what = SOF_TIMESTAMPING_RX_SOFTWARE | SOF_TIMESTAMPING_SOFTWARE;
    if (setsockopt(fd, SOL_SOCKET, SO_TIMESTAMPING, &what, sizeof what) < 0) return; /* then nobody says when */
    /* Nor of what comes before the kernel begins to stamp, soon after the machine's first socket asked. */
}

/* As recv; *heard_ns becomes the time, on CLOCK_MONOTONIC, at which the kernel had the last of these bytes, or 0. */
static ssize_t lt_recv(int fd, void *into, size_t bytes, int64_t *heard_ns) {
    union {
        struct cmsghdr head;
        char bytes[CMSG_SPACE(sizeof(struct scm_timestamping)) + 64];
    } space;
    struct iovec v = {into, bytes};
    struct msghdr m = {.msg_iov = &v, .msg_iovlen = 1, .msg_control = &space, .msg_controllen = sizeof space};
    ssize_t n = recvmsg(fd, &m, MSG_DONTWAIT);
    if (n <= 0) return n;
    *heard_ns = 0;
    for (struct cmsghdr *h = CMSG_FIRSTHDR(&m); h; h = CMSG_NXTHDR(&m, h)) {
        if (h->cmsg_level != SOL_SOCKET || h->cmsg_type != SO_TIMESTAMPING) continue;
        struct scm_timestamping times;
        struct timespec now;
        memcpy(&times, CMSG_DATA(h), sizeof times);
        if (!times.ts[0].tv_sec) continue;
        int64_t here = lt_now();
        clock_gettime(CLOCK_REALTIME, &now); /* the kernel stamps by the clock that others set: only its age is taken */
        int64_t age = (int64_t)(now.tv_sec - times.ts[0].tv_sec) * 1000000000LL + now.tv_nsec - times.ts[0].tv_nsec;
        *heard_ns = here - (age > 0 ? age : 0);
    }
    return n;
}

static void lt_ring(int fd) {
    uint64_t one = 1;
    if (write(fd, &one, 8) < 0) return; /* a full counter wakes just as well */
}

/* Wakes this process's communication thread if it sleeps. */
static void lt_wake_thread(lt_comm *c) {
    if (atomic_exchange(&c->asleep, 0)) lt_ring(c->bell);
}

static lt_stage *lt_my_stage(lt_comm *c) { return &c->stages[c->local]; }

/* Wakes the communication threads of the node's other ranks, those that sleep. */
static void lt_wake_node(lt_comm *c) {
    for (int l = 0; l < c->per_node; l++) {
        if (l == c->local || !atomic_exchange(&c->stages[l].asleep, 0)) continue;
        char byte = 0;
        if (send(c->peers[c->node * c->per_node + l].fd, &byte, 1, MSG_DONTWAIT | MSG_NOSIGNAL) < 0) continue;
    }
}

static char *lt_own(lt_comm *c, int local, int slot) { return c->own + ((size_t)local * LT_SLOTS + slot) * c->small; }
static char *lt_node_sum(lt_comm *c, int node, int slot) {
    return c->sums + ((size_t)node * LT_SLOTS + slot) * c->small;
}
static char *lt_ring_in(lt_comm *c, int local, uint64_t chunk) {
    return c->ring_in + ((size_t)local * LT_RING + chunk % LT_RING) * c->chunk;
}
static char *lt_ring_out(lt_comm *c, uint64_t chunk) { return c->ring_out + (chunk % LT_RING) * c->chunk; }

static void lt_watch(lt_comm *c, int rank, uint32_t mask) {
    lt_peer *p = &c->peers[rank];
    if (p->mask == mask || p->hung_up) return;
    struct epoll_event e = {.events = mask, .data.u32 = (uint32_t)rank};
    epoll_ctl(c->epoll, EPOLL_CTL_MOD, p->fd, &e);
    p->mask = mask;
}

/* ---- sending; the caller holds c->net ---- */

static void lt_flush(lt_comm *c, int rank) {
    lt_peer *p = &c->peers[rank];
    while (p->first && atomic_load(&c->error) == 0) { /* after an error, what it refers to may be gone */
        lt_out *o = p->first;
        struct iovec v[2] = {{(char *)&o->head + sizeof o->head - o->head_left, o->head_left},
                             {(char *)o->data + o->at, o->bytes - o->at}};
        struct msghdr m = {.msg_iov = v, .msg_iovlen = 2};
        ssize_t n = sendmsg(p->fd, &m, MSG_DONTWAIT | MSG_NOSIGNAL);
        if (n < 0) {
            if (errno == EINTR) continue;
            if (errno == EAGAIN || errno == EWOULDBLOCK) break;
            p->eof = 1;
            lt_fail(c, LT_PEER_LOST, rank, o->head.seq);
            break;
        }
        size_t head = (size_t)n < o->head_left ? (size_t)n : o->head_left;
        o->head_left -= head;
        o->at += (size_t)n - head;
        if (o->head_left || o->at < o->bytes) continue;
        p->first = o->next;
        if (!p->first) p->last = NULL;
        if (o->sent) atomic_fetch_add(o->sent, 1);
        free(o);
    }
    uint32_t in = p->mask & EPOLLIN;
    lt_watch(c, rank, p->first && !p->eof ? in | EPOLLOUT : in);
}

/* Sends one frame. What the socket does not take now is kept: as a copy, or, where `sent` is given, by reference
 * until `sent` has been counted up. */
static int lt_send(lt_comm *c, int rank, const lt_frame *head, const void *data, _Atomic uint64_t *sent) {
    lt_peer *p = &c->peers[rank];
    size_t bytes = head->bytes, gone = 0;
    pthread_mutex_lock(&c->net);
    if (!p->first && !p->eof) {
        struct iovec v[2] = {{(void *)head, sizeof *head}, {(void *)data, bytes}};
        struct msghdr m = {.msg_iov = v, .msg_iovlen = 2};
        ssize_t n;
        do n = sendmsg(p->fd, &m, MSG_DONTWAIT | MSG_NOSIGNAL);
        while (n < 0 && errno == EINTR);
        if (n >= 0) gone = (size_t)n;
        else if (errno != EAGAIN && errno != EWOULDBLOCK) p->eof = 1;
    }
    if (p->eof) {
        pthread_mutex_unlock(&c->net);
        return lt_fail(c, LT_PEER_LOST, rank, head->seq);
    }
    if (gone == sizeof *head + bytes) {
        if (sent) atomic_fetch_add(sent, 1);
    } else {
        size_t head_gone = gone < sizeof *head ? gone : sizeof *head, at = gone - head_gone;
        lt_out *o = malloc(sizeof *o + (sent ? 0 : bytes - at));
        if (!o) {
            pthread_mutex_unlock(&c->net);
            return lt_fail(c, LT_SYSTEM, rank, head->seq);
        }
        *o = (lt_out){.at = at, .bytes = bytes, .sent = sent, .data = data, .head = *head,
                      .head_left = sizeof *head - head_gone};
        if (!sent) {
            memcpy(o->copy, (const char *)data + at, bytes - at);
            o->data = o->copy;
            o->at = 0;
            o->bytes = bytes - at;
        }
        if (p->last) p->last->next = o;
        else p->first = o;
        p->last = o;
        lt_watch(c, rank, p->mask | EPOLLOUT);
    }
    pthread_mutex_unlock(&c->net);
    return 0;
}

/* ---- receiving; the caller holds c->net ---- */

static uint32_t lt_tag(int kind, int strategy, int dtype) { return (uint32_t)(kind << 16 | strategy << 8 | dtype); }

static void lt_part_arrived(lt_comm *c, int slot, uint64_t seq) {
    lt_sync *s = &c->syncs[slot];
    if ((atomic_fetch_add(&s->parts, 1) + 1) % (uint32_t)c->nodes) return;
    atomic_store(&s->done_ns, lt_now());
    atomic_store(&s->done, (uint32_t)(seq + 1));
    if (atomic_load(&s->sleepers)) lt_futex_wake(&s->done);
}

/* Where the body of the frame at hand goes; NULL: not now (paused) or never (an error is set). */
static char *lt_route(lt_comm *c, int rank) {
    lt_peer *p = &c->peers[rank];
    lt_frame *h = &p->head;
    int node = rank / c->per_node, slot = (int)(h->seq % LT_SLOTS);
    if (h->magic == LT_MAGIC && h->kind == LT_F_VERDICT && h->index < (uint32_t)c->size) {
        lt_fail(c, h->op == LT_TIMEOUT ? LT_TIMEOUT : LT_PEER_LOST, (int)h->index, h->seq);
        return NULL;
    }
    if (h->magic != LT_MAGIC) goto bad;
    if (h->kind == LT_F_CHUNK || h->kind == LT_F_TOTAL) {
        if (rank % c->per_node != c->local || node == c->node || h->bytes > c->piece_bytes) goto bad;
        if (h->kind == LT_F_TOTAL) {
            char *into = lt_total_place(c, node, h);
            if (!into) lt_fail(c, LT_MISMATCH, rank, h->seq);
            return into;
        }
        p->paused = h->seq >= c->fin + LT_WINDOW;
        return p->paused ? NULL : lt_rail(c, node, h->seq);
    }
    if (h->bytes > c->small) goto bad;
    switch (h->kind) {
    case LT_F_WHOLE: return p->rx + (size_t)slot * c->small;
    case LT_F_NODE:
        if (node == c->node) goto bad;
        return lt_node_sum(c, node, slot);
    case LT_F_STEP:
        if (h->step >= 8) goto bad;
        return c->steps + ((size_t)slot * 8 + h->step) * c->small;
    default: break;
    }
bad:
    lt_fail(c, LT_PROTOCOL, rank, h->seq);
    return NULL;
}

static void lt_arrived(lt_comm *c, int rank) {
    lt_peer *p = &c->peers[rank];
    int slot = (int)(p->head.seq % LT_SLOTS);
    switch (p->head.kind) {
    case LT_F_WHOLE:
        p->arrived_ns[slot] = p->heard_ns;
        memcpy(p->rx + (size_t)LT_SLOTS * c->small + (size_t)slot * sizeof(lt_frame), &p->head, sizeof(lt_frame));
        __atomic_store_n(&p->whole, p->head.seq + 1, __ATOMIC_RELEASE);
        break;
    case LT_F_NODE:
        c->parts[rank / c->per_node * LT_SLOTS + slot] =
            (lt_part){p->head.bytes, lt_tag(p->head.op, LT_TWO_LEVEL, p->head.dtype)};
        lt_part_arrived(c, slot, p->head.seq);
        break;
    case LT_F_CHUNK:
        c->rail_heads[lt_rail_slot(rank / c->per_node, p->head.seq)] = p->head;
        c->rail_got[rank / c->per_node]++;
        break;
    case LT_F_TOTAL: c->total_got[rank / c->per_node]++; break;
    case LT_F_STEP:
        c->step_heads[slot * 8 + p->head.step] = p->head;
        c->step_got[slot * 8 + p->head.step] = p->head.seq + 1;
        break;
    default: break;
    }
}

/* Takes whatever has come from one rank. 1: something arrived whole, 0: nothing (yet). */
static int lt_pump(lt_comm *c, int rank) {
    lt_peer *p = &c->peers[rank];
    int arrived = 0;
    while (!p->eof && atomic_load(&c->error) == 0) {
        ssize_t n;
        if (p->head_got < sizeof p->head) {
            n = lt_recv(p->fd, (char *)&p->head + p->head_got, sizeof p->head - p->head_got, &p->heard_ns);
        } else {
            if (!p->into && !(p->into = lt_route(c, rank))) return arrived;
            p->paused = 0;
            size_t left = p->head.bytes - p->body_got;
            n = left ? lt_recv(p->fd, p->into + p->body_got, left, &p->heard_ns) : 0;
            if (n >= 0 && (n > 0 || !left)) {
                p->body_got += (size_t)n;
                if (p->body_got < p->head.bytes) continue;
                lt_arrived(c, rank);
                arrived = 1;
                p->head_got = p->body_got = 0;
                p->into = NULL;
                continue;
            }
        }
        if (n > 0) {
            p->head_got += (size_t)n;
            continue;
        }
        if (n < 0 && errno == EINTR) continue;
        if (n < 0 && (errno == EAGAIN || errno == EWOULDBLOCK)) break;
        p->eof = 1;
    }
    return arrived;
}

/* On closing after a failure: tells the other nodes' ranks whose fault it was, where the wire takes it at once. */
static void lt_tell_verdict(lt_comm *c) {
    int code = atomic_load(&c->error), peer = atomic_load(&c->error_peer);
    if ((code != LT_PEER_LOST && code != LT_TIMEOUT) || peer < 0) return;
    lt_frame head = {LT_MAGIC, LT_F_VERDICT, 0, (uint8_t)code, 0, atomic_load(&c->error_seq), (uint32_t)peer, 0};
    for (int r = 0; r < c->size; r++) {
        lt_peer *p = &c->peers[r];
        if (p->local || p->eof || p->first) continue;
        if (send(p->fd, &head, sizeof head, MSG_DONTWAIT | MSG_NOSIGNAL) < 0) p->eof = 1;
    }
}

/* The first peer whose connection has ended, or -1. Doorbell bytes waiting to be read are a sign of life. */
static int lt_lost_peer(lt_comm *c) {
    for (int r = 0; r < c->size; r++) {
        if (r == c->rank) continue;
        if (c->peers[r].eof) return r;
        char byte;
        ssize_t n = recv(c->peers[r].fd, &byte, 1, MSG_PEEK | MSG_DONTWAIT);
        if (n == 0 || (n < 0 && errno != EAGAIN && errno != EWOULDBLOCK && errno != EINTR)) return r;
    }
    return -1;
}

#endif
