"""Allocates, shares, copies and frees the slots and KV blocks of sequences. Finds the tokens whose keys and values
exist already (prefix cache, the prompt of another choice). The policy is in scheduler.py. A freed block may be
allocated again at once, because plans run strictly in order.
"""

from __future__ import annotations

import heapq
from bisect import insort
from collections import OrderedDict
from collections.abc import Iterable
from collections.abc import Sequence as Seq
from dataclasses import dataclass

from .limits import SchedulerLimits
from .sequence import RequestGroup, Sequence

_NEEDED_TURNOVERS = 8
"""A needed block outlives others until the pool has been allocated this many times: its job may have ended."""


class BlockPool:
    """KV blocks, numbered from 0. A block is in use (references > 0), cached (unreferenced, but a cache hit may use its
    content again) or free. Deterministic: the same calls give the same block numbers."""

    def __init__(self, num_blocks: int) -> None:
        self.num_blocks = num_blocks
        self._references = [0] * num_blocks
        # Last in, first out: recently used blocks are used again, and the rest of the memory is not touched.
        self.free_blocks = list(range(num_blocks - 1, -1, -1))
        # Each with the blocks taken before it was cached, oldest first: blocks that are not needed, and needed ones.
        self.cached_blocks: tuple[OrderedDict[int, int], OrderedDict[int, int]] = OrderedDict(), OrderedDict()
        self._needed = [False] * num_blocks
        self._taken = 0
        self.digest_of_block: list[bytes | None] = [None] * num_blocks
        self._proven = [False] * num_blocks
        self.block_of_digest: dict[bytes, int] = {}

    @property
    def available(self) -> int:
        """Blocks that `take` can allocate: free ones, and cached ones, which it evicts."""
        return len(self.free_blocks) + self.cached

    @property
    def cached(self) -> int:
        """Unreferenced blocks in the prefix cache."""
        return sum(map(len, self.cached_blocks))

    def references(self, block: int) -> int:
        return self._references[block]

    def take(self, count: int) -> list[int]:
        """Allocates `count` blocks. Raises RuntimeError if fewer are available, which the caller must check."""
        if count > self.available:
            raise RuntimeError(f"{count} KV blocks wanted, {self.available} available: ask before taking")
        blocks = []
        for _ in range(count):
            block = self.free_blocks.pop() if self.free_blocks else self._evict()
            self._references[block] = 1
            self._needed[block] = False
            blocks.append(block)
        self._taken += count
        return blocks

    def _evict(self) -> int:
        """Evicts the block that was cached first; needed ones after the others, for a time."""
        blocks, needed = self.cached_blocks
        protected = _NEEDED_TURNOVERS * self.num_blocks
        if not blocks or (needed and next(iter(needed.values())) + protected < next(iter(blocks.values()))):
            blocks = needed
        block, _ = blocks.popitem(last=False)
        self._drop_digest(block)
        return block

    def mark(self, blocks: Seq[int], needed: int) -> None:
        """Marks blocks in use: the first `needed` of them will be needed again, the others will not."""
        for place, block in enumerate(blocks):
            self._needed[block] = place < needed

    def share(self, blocks: Iterable[int]) -> None:
        """Adds one reference to each block: to one in use, or to one found by `match`."""
        for block in blocks:
            if self._references[block] == 0:
                del self.cached_blocks[self._needed[block]][block]
            self._references[block] += 1

    def give_back(self, blocks: Seq[int]) -> None:
        """Removes one reference from each block. An unreferenced block is cached if it has a digest; the last block of
        a sequence is evicted first, because a block is useless without those before it."""
        for block in reversed(blocks):
            left = self._references[block] - 1
            if left < 0:
                raise RuntimeError(f"KV block {block} given back more often than taken")
            self._references[block] = left
            if left == 0:
                if self.digest_of_block[block] is None:
                    self.free_blocks.append(block)
                else:
                    self.cached_blocks[self._needed[block]][block] = self._taken

    def register(self, block: int, digest: bytes) -> None:
        """Enters a block in use in the prefix cache under `digest`. If another block has this digest, that one
        stays."""
        if self.digest_of_block[block] is None and digest not in self.block_of_digest:
            self.digest_of_block[block] = digest
            self._proven[block] = False
            self.block_of_digest[digest] = block

    def prove(self, digests: Iterable[bytes]) -> None:
        """Marks blocks as verified finite: a token was sampled from their content."""
        for digest in digests:
            block = self.block_of_digest.get(digest)
            if block is not None:
                self._proven[block] = True

    def doubtful(self, digests: Iterable[bytes]) -> set[bytes]:
        """The digests whose blocks are not marked by `prove`."""
        blocks = ((digest, self.block_of_digest.get(digest)) for digest in digests)
        return {digest for digest, block in blocks if block is None or not self._proven[block]}

    def forget(self, digests: Iterable[bytes]) -> None:
        """Evicts these digests from the prefix cache."""
        for digest in sorted(digests):  # the free list must not depend on the order of a set
            block = self.block_of_digest.get(digest)
            if block is not None:
                self._drop_digest(block)
                if self._references[block] == 0:
                    del self.cached_blocks[self._needed[block]][block]
                    self.free_blocks.append(block)

    def match(self, digests: Seq[bytes]) -> list[int]:
        """The cached blocks of the longest prefix of `digests`; adds no references."""
        blocks = []
        for digest in digests:
            block = self.block_of_digest.get(digest)
            if block is None:
                break
            blocks.append(block)
        return blocks

    def _drop_digest(self, block: int) -> None:
        digest = self.digest_of_block[block]
        assert digest is not None
        del self.block_of_digest[digest]
        self.digest_of_block[block] = None


@dataclass(frozen=True, slots=True)
class Reuse:
    """Positions [0, start) need not be computed: `shared` full blocks, then a copy of block `copied`, if any."""

    shared: tuple[int, ...] = ()
    start: int = 0
    copied: int | None = None
    cached: bool = False
    """Whether the blocks are from the prefix cache, not from another choice of the request."""


LEAST_PREFIX = 4
"""Blocks; a sequence does not wait for a shorter prefix, which is often that of a template."""
MOST_DEFERRALS = 8


class PendingBlocks:
    """Blocks that running sequences will fill with known tokens, by digest, and the waiting sequences deferred until
    these are planned. A sequence that fills them leaves them to the next one if it ends or is preempted before."""

    def __init__(self) -> None:
        self.owners: dict[bytes, Sequence] = {}
        self.deferred: dict[bytes, list[Sequence]] = {}
        self.ready: list[Sequence] = []
        """Sequences whose blocks are planned or lost their owner."""

    def __len__(self) -> int:
        return len(self.owners)

    def claim(self, sequence: Sequence, digests: Seq[bytes]) -> None:
        for digest in digests:
            self.owners.setdefault(digest, sequence)

    def planned(self, digests: Seq[bytes]) -> None:
        """Removes blocks that a plan fills."""
        for digest in digests:
            if self.owners.pop(digest, None) is not None:
                self.ready += self.deferred.pop(digest, ())

    def disclaim(self, sequence: Sequence, digests: Seq[bytes]) -> None:
        """Removes blocks that this sequence will not fill."""
        self.planned([digest for digest in digests if self.owners.get(digest) is sequence])

    def defer(self, sequence: Sequence, rank: int, digests: Seq[bytes], planned: int) -> bool:
        """Defers the sequence until the longest pending prefix of `digests`, of which `planned` blocks are planned, is
        planned. False if it must not wait: for a short prefix, for sequences of a worse rank, which may stall, or too
        often."""
        count = planned
        for digest in digests[planned:]:
            owner = self.owners.get(digest)
            if owner is None or owner.rank > rank:
                break
            count += 1
        if count < max(LEAST_PREFIX, planned + 1) or sequence.deferrals == MOST_DEFERRALS:
            return False
        sequence.deferrals += 1
        self.deferred.setdefault(digests[count - 1], []).append(sequence)
        return True


class Residency:
    """The slots and blocks of all sequences. `running` is sorted by `Sequence.order`; its last one is preempted
    first."""

    def __init__(self, limits: SchedulerLimits) -> None:
        self.block_size, self.caching = limits.block_size, limits.enable_prefix_caching
        self.pool, self.pending = BlockPool(limits.num_blocks), PendingBlocks()
        self.running: list[Sequence] = []
        self.slots = list(range(limits.max_num_seqs))
        self.released: list[int] = []
        """Slots that the next plan empties."""
        self.holders: dict[int, RequestGroup] = {}
        """Groups that hold their prompt for further choices, by number."""

    def blocks_for(self, positions: int) -> int:
        return -(-positions // self.block_size)

    def reuse(self, sequence: Sequence) -> Reuse:
        """The longest reusable prefix of the sequence; at least one known token is left to compute."""
        if not sequence.prompt_scored:
            return Reuse()
        size, group = self.block_size, sequence.group
        shared: list[int] = []
        if self.caching and sequence.chain is not None:
            full = (len(sequence.tokens) - 1) // size
            shared = self.pool.match(sequence.chain.upto(full, sequence.tokens)[:full])
        last = group.prompt_len - 1
        if group.prompt_blocks and last > len(shared) * size:
            # The last prompt position is computed again, for the choice's first token, so its block is written.
            full = last // size
            return Reuse(tuple(group.prompt_blocks[:full]), last, group.prompt_blocks[full] if last % size else None)
        return Reuse(tuple(shared), len(shared) * size, None, True)

    def defer(self, sequence: Sequence, rank: int) -> bool:
        """Whether the sequence, which would be admitted with `rank`, waits for blocks that others are about to fill."""
        if not self.pending or sequence.chain is None or not (reuse := self.reuse(sequence)).cached:
            return False
        full = (len(sequence.tokens) - 1) // self.block_size
        return self.pending.defer(sequence, rank, sequence.chain.digests[:full], len(reuse.shared))

    def need(self, sequence: Sequence, reuse: Reuse) -> int:
        """Blocks that admission takes from `pool.available`: enough for all known tokens, so that a prompt never
        stalls."""
        fresh = self.blocks_for(len(sequence.tokens)) - len(reuse.shared)
        return fresh + sum(self.pool.references(block) == 0 for block in reuse.shared)

    def enter(self, sequence: Sequence, rank: int, reuse: Reuse) -> None:
        """Allocates a slot and blocks for all known tokens. The caller must check that there are enough."""
        self.pool.share(reuse.shared)
        fresh = self.blocks_for(len(sequence.tokens)) - len(reuse.shared)
        sequence.blocks = [*reuse.shared, *self.pool.take(fresh)]
        sequence.room = len(sequence.blocks) * self.block_size
        if (shared := sequence.group.request.shared) is not None:
            self.pool.mark(sequence.blocks, shared // self.block_size)
        sequence.registered = len(reuse.shared)
        self.pending.claim(sequence, sequence.digests()[sequence.registered :])
        sequence.computed = reuse.start
        sequence.proven = False
        sequence.slot = heapq.heappop(self.slots)
        sequence.rank = rank
        sequence.state = "running"
        insort(self.running, sequence, key=Sequence.order)

    def grow(self, sequence: Sequence) -> int:
        """Allocates one more block for the sequence, and returns it."""
        self.register(sequence)
        (block,) = self.pool.take(1)
        sequence.blocks.append(block)
        sequence.room += self.block_size
        return block

    def vacate(self, sequence: Sequence) -> None:
        """Frees slot and blocks. The caller sets the new state and removes the sequence from `running`. Blocks from
        which no token was sampled are not cached: the ranks zero non-finite values in them without a report."""
        self.register(sequence)
        self.pending.disclaim(sequence, sequence.digests()[sequence.registered :])
        self.pool.give_back(sequence.blocks)
        if not (sequence.proven or sequence.inflight):
            self.pool.forget(self.pool.doubtful(sequence.digests()))
        sequence.blocks = []
        sequence.room = sequence.registered = 0
        heapq.heappush(self.slots, sequence.slot)
        self.released.append(sequence.slot)
        sequence.slot = -1

    def register(self, sequence: Sequence) -> None:
        """Enters full blocks whose tokens are known and planned in the prefix cache. Called only between plans, for
        blocks that earlier plans fill, so that a hit reads complete blocks."""
        chain = sequence.chain
        if chain is None:
            return
        full = min(sequence.computed // self.block_size, chain.full(len(sequence.tokens)))
        if full > sequence.registered:
            digests = chain.upto(full, sequence.tokens)
            for i in range(sequence.registered, full):
                self.pool.register(sequence.blocks[i], digests[i])
            self.pending.planned(digests[sequence.registered : full])
            sequence.registered = full

    def hold(self, sequence: Sequence) -> None:
        """Holds this sequence's computed prompt for the group until every choice has used it."""
        group = sequence.group
        group.prompt_blocks = sequence.blocks[: self.blocks_for(group.prompt_len)]
        self.pool.share(group.prompt_blocks)
        self.holders[group.number] = group

    def unhold(self, group: RequestGroup) -> None:
        if self.holders.pop(group.number, None) is not None:
            self.pool.give_back(group.prompt_blocks)
            group.prompt_blocks = []
