/* What one group's transport is made of: the node's shared segment, the sockets, the collectives in flight.
 *
 * Ranks are group ranks, node after node: node = rank / per_node. At most LT_DEPTH collectives are in flight on a rank.
 * A rank that starts collective s + DEPTH has finished s, so everyone has started s and finished s - DEPTH: buffers
 * for 2 * DEPTH collectives are never overwritten while somebody still reads them, without any acknowledgement. */
#ifndef LADDERTRON_TRANSPORT_H
#define LADDERTRON_TRANSPORT_H

#include <pthread.h>
#include <stdatomic.h>
#include <stdint.h>

#define LT_API __attribute__((visibility("default")))

#define LT_DEPTH 8
#define LT_SLOTS (2 * LT_DEPTH)
#define LT_RING 4    /* chunks of a large message in the node's shared memory at once */
#define LT_WINDOW 8  /* chunks on their way between nodes: the bytes that a long or busy link holds */
#define LT_MAX_RANKS 256
#define LT_HISTORY 256
#define LT_LAYERS 16 /* names that accounts stand under; 0: none */
#define LT_SLICE_NS 50000000LL /* a sleeper looks up this often to see whether a peer is gone */
#define LT_MAGIC 0x4c545452u
#define LT_NO_DTYPE 0xff

enum lt_kind { LT_REDUCE = 0, LT_GATHER = 1 };
enum lt_strategy { LT_EXCHANGE = 0, LT_TWO_LEVEL = 1, LT_PIPELINE = 2, LT_DOUBLING = 3, LT_STRATEGIES = 4 };
enum lt_frame_kind { LT_F_WHOLE = 1, LT_F_NODE = 2, LT_F_CHUNK = 3, LT_F_STEP = 4, LT_F_VERDICT = 5,
                     LT_F_TOTAL = 6 };
enum lt_error { LT_TIMEOUT = 1, LT_PEER_LOST = 2, LT_MISMATCH = 3, LT_PROTOCOL = 4, LT_CLOSED = 5, LT_TOO_LARGE = 6,
                LT_SYSTEM = 7, LT_BUSY = 8 };

typedef struct { /* 24 bytes, little-endian as both ends are */
    uint32_t magic;
    uint8_t kind, dtype, op, step;
    uint64_t seq;
    uint32_t index, bytes;
} lt_frame;

/* ---- the node's shared segment ---- */

typedef struct { /* what a rank has published in one slot */
    _Atomic uint64_t published; /* collective + 1 */
    uint32_t bytes, tag;
    char pad[48];
} lt_head;

typedef struct { /* what a node's sum is of, beside it: the node may be in another collective */
    uint32_t bytes, tag;
} lt_part;

typedef struct { /* one slot, for the whole node */
    _Atomic uint32_t arrived; /* counts on over the slot's lives: a multiple of per_node is everybody */
    _Atomic uint32_t parts;   /* likewise, of nodes: node sums that are here */
    _Atomic uint32_t done;    /* futex: low bits of collective + 1 */
    _Atomic uint32_t sleepers;
    _Atomic int64_t done_ns;
    char pad[40];
} lt_sync;

typedef struct { /* why this node's first rank to fail did so: its neighbours name the same culprit, not each other */
    _Atomic int code, peer;
    _Atomic uint64_t seq;
} lt_verdict;

typedef struct { /* how many chunks of large messages a rank has taken through each stage */
    _Atomic uint64_t published, reduced, finished, consumed;
    _Atomic uint32_t asleep; /* its communication thread sleeps and wants a byte to wake */
    char pad[28];
    uint64_t what[LT_RING][2]; /* of the chunks published: lt_what */
} lt_stage;

/* ---- one process ---- */

typedef struct lt_out { /* what a socket would not take at once */
    struct lt_out *next;
    size_t at, bytes;
    _Atomic uint64_t *sent; /* counted up when all of it has gone */
    const char *data;
    lt_frame head;
    size_t head_left;
    char copy[];
} lt_out;

typedef struct {
    int fd, local;
    uint32_t mask; /* what epoll watches */
    int eof, paused, hung_up;
    lt_out *first, *last;
    lt_frame head;
    size_t head_got, body_got;
    char *into;
    uint64_t whole; /* whole vectors received: collective + 1 */
    int64_t heard_ns;               /* when the kernel had what was read last; 0: it does not say */
    int64_t arrived_ns[LT_SLOTS];   /* and the last byte of a slot's whole vector */
    char *rx;       /* [SLOTS][small] */
} lt_peer;

typedef struct {
    uint64_t seq;
    void *x, *out;
    size_t count, bytes;
    int kind, strategy, dtype, layer, finished;
    int64_t start_ns;
    uint64_t first_chunk, chunks; /* PIPELINE */
    int step;                     /* DOUBLING */
    int sent_step;
    _Atomic uint32_t done; /* futex of this process */
    _Atomic int64_t done_ns;
} lt_op;

typedef struct {
    uint64_t seq, bytes;
    int64_t start_ns, flight_ns, waited_ns;
    int32_t kind, strategy, layer, spare;
} lt_record;

typedef struct {
    uint64_t count, bytes;
    int64_t flight_ns, waited_ns;
} lt_total;

typedef struct lt_comm {
    int rank, size, per_node, nodes, node, local, tree; /* tree: sums are lt_tree's */
    size_t small, chunk, segment_bytes;
    int64_t spin_ns;
    _Atomic int64_t timeout_ns;
    char *segment;
    lt_verdict *verdict;
    lt_head *heads;  /* [per_node][SLOTS] */
    lt_sync *syncs;  /* [SLOTS] */
    lt_stage *stages; /* [per_node] */
    char *own;       /* [per_node][SLOTS][small] */
    char *sums;      /* [nodes][SLOTS][small] */
    lt_part *parts;  /* [nodes][SLOTS] */
    char *ring_in;   /* [per_node][RING][chunk] */
    char *ring_out;  /* [RING][chunk] */

    lt_peer *peers;
    pthread_mutex_t net; /* guards the peers' send queues and receive states */
    int epoll, bell, main_bell;
    _Atomic uint32_t main_polls;
    pthread_mutex_t work; /* held by the thread while it touches a collective's tensors */
    pthread_t thread;
    int thread_runs;
    _Atomic uint32_t asleep, closing, users;

    uint64_t next_seq;
    lt_op ops[LT_SLOTS];
    _Atomic uint64_t queued; /* collectives handed to the thread so far; queue[i % SLOTS] */
    uint64_t queue[LT_SLOTS];
    uint64_t taken;          /* of them, how many the thread has finished */

    uint64_t chunks_started;  /* chunk cursors: this one is the starter's, the others the thread's */
    uint64_t pub, red, mid, out;
    _Atomic uint64_t fin;
    size_t slice_bytes, piece_bytes; /* the most that a rank sums of a chunk on its node, and then for all nodes */
    char *send_ring;  /* [WINDOW][slice_bytes]: this rank's slice of the node's sum, then of the total */
    char *rail_rings; /* [nodes][WINDOW][piece_bytes]: what the other nodes sent of their sums */
    lt_frame *rail_heads; /* [nodes][WINDOW]: and what they said it was */
    _Atomic uint64_t *rail_got, *rail_sent, *total_got, *total_sent; /* [nodes]: chunks */

    char *steps;        /* DOUBLING: [SLOTS][8][small] received */
    lt_frame *step_heads; /* [SLOTS][8]: and what was said of it */
    char *partial;      /* [SLOTS][2][small]: the sum so far and what is being sent */
    _Atomic uint64_t *step_got; /* [SLOTS][8]: collective + 1 */

    _Atomic int error, error_peer;
    _Atomic uint64_t error_seq;
    int error_errno;
    lt_total totals[2][LT_STRATEGIES][LT_LAYERS];
    lt_record history[LT_HISTORY];
    uint64_t recorded;
} lt_comm;

#endif
