/* Where the chunks of a large message lie: whose they are, which part of one this rank sums, what a peer sent of it.
 *
 * A chunk is reduced and scattered, then gathered: every rank of a node sums its slice of the node's chunk; the rail's
 * ranks exchange pieces of that slice, each sums its piece over all nodes and sends the total to the others. So over N
 * nodes each byte leaves a rank 2 (N - 1) / N times, the least there is, in two hops; over two nodes the whole slice is
 * exchanged, in one. LT_WINDOW chunks travel at once. */
#ifndef LADDERTRON_TRANSPORT_CHUNKS_H
#define LADDERTRON_TRANSPORT_CHUNKS_H

#include "transport.h"
#include "reduce.h"

/* The collective that a chunk belongs to; NULL: not started here, or over. */
static lt_op *lt_chunk_op(lt_comm *c, uint64_t chunk) {
    uint64_t queued = atomic_load(&c->queued);
    for (uint64_t i = c->taken; i < queued; i++) {
        uint64_t seq = c->queue[i % LT_SLOTS];
        lt_op *op = &c->ops[seq % LT_SLOTS];
        if (op->strategy != LT_PIPELINE || chunk < op->first_chunk || chunk >= op->first_chunk + op->chunks) continue;
        /* over, and its place filled anew meanwhile: `start` writes seq before all else */
        atomic_thread_fence(memory_order_acquire);
        if (op->seq == seq) return op;
    }
    return NULL;
}

/* Elements of a chunk, and of this rank's slice of it, counted from the chunk's first element. */
static size_t lt_chunk_span(lt_comm *c, lt_op *op, uint64_t chunk, size_t *first, size_t *slice, size_t *slice_count) {
    size_t each = c->chunk / lt_width(op->dtype), k = (size_t)(chunk - op->first_chunk);
    size_t count = op->count - k * each < each ? op->count - k * each : each;
    size_t n = (size_t)c->per_node, l = (size_t)c->local;
    *first = k * each;
    *slice = count * l / n;
    *slice_count = count * (l + 1) / n - *slice;
    return count;
}

/* What every strategy adds with. */
static void lt_add_up(lt_comm *c, const void *const *in, int k, size_t first, size_t count, void *out, int dtype) {
    (c->tree ? lt_tree : lt_sum)(in, k, first, count, out, dtype);
}

/* Where this rank's slice of the node's sum lies: alone on its node, in x itself. */
static char *lt_slice(lt_comm *c, lt_op *op, uint64_t chunk) {
    if (c->per_node > 1) return c->send_ring + (chunk % LT_WINDOW) * c->slice_bytes;
    return (char *)op->x + (size_t)(chunk - op->first_chunk) * c->chunk;
}

/* First element of a node's piece of a slice of `count`. */
static size_t lt_piece(lt_comm *c, size_t count, int node) { return count * (size_t)node / (size_t)c->nodes; }

static size_t lt_rail_slot(int node, uint64_t chunk) { return (size_t)node * LT_WINDOW + chunk % LT_WINDOW; }

static char *lt_rail(lt_comm *c, int node, uint64_t chunk) {
    return c->rail_rings + lt_rail_slot(node, chunk) * c->piece_bytes;
}

/* What ranks must agree on before they add up: the collective, its type and its size. */
static void lt_what(lt_op *op, uint64_t *what) { what[0] = op->seq << 8 | (uint64_t)op->dtype, what[1] = op->count; }

/* Whether a frame from another node is what this collective sends of `count` elements. */
static int lt_belongs(lt_op *op, const lt_frame *head, size_t count) {
    return head->index == (uint32_t)op->seq && head->dtype == op->dtype && head->bytes == count * lt_width(op->dtype);
}

/* Where the total of a node's piece goes: into the slice, over what was sent to that node, which it has added up by now.
 * NULL: nobody here waits for such a frame. */
static char *lt_total_place(lt_comm *c, int node, const lt_frame *head) {
    uint64_t chunk = head->seq;
    lt_op *op = c->nodes > 2 && chunk >= c->fin && chunk < c->fin + LT_WINDOW ? lt_chunk_op(c, chunk) : NULL;
    if (!op) return NULL;
    size_t first, slice, count;
    lt_chunk_span(c, op, chunk, &first, &slice, &count);
    size_t from = lt_piece(c, count, node), to = lt_piece(c, count, node + 1);
    return lt_belongs(op, head, to - from) ? lt_slice(c, op, chunk) + from * lt_width(op->dtype) : NULL;
}

#endif
