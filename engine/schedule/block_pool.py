"""Which KV blocks are whose: reference counts, the free list, and the cache of full blocks that nobody holds.

Knows block numbers and digests, no tokens and no tensors. A block is *held* (references > 0), *cached* (nobody holds
it, but its content is known by digest and may be taken up again) or *free*. Only the scheduler calls it.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable, Sequence


class BlockPool:
    """`num_blocks` blocks, numbered from 0. Deterministic: the same calls give the same block numbers."""

    def __init__(self, num_blocks: int) -> None:
        if num_blocks < 1:
            raise ValueError(f"num_blocks={num_blocks} holds no sequence: give the cache at least one block")
        self.num_blocks = num_blocks
        self._references = [0] * num_blocks
        # Last in, first out: what was touched lately is touched again, the rest of the memory stays cold.
        self._free = list(range(num_blocks - 1, -1, -1))
        self._cached: OrderedDict[int, None] = OrderedDict()
        self._digest: list[bytes | None] = [None] * num_blocks
        self._proven = [False] * num_blocks
        self._by_digest: dict[bytes, int] = {}

    @property
    def available(self) -> int:
        """Blocks that `take` can give: free ones, and cached ones at the price of what they remember."""
        return len(self._free) + len(self._cached)

    @property
    def cached(self) -> int:
        """Blocks that nobody holds and whose content is still known."""
        return len(self._cached)

    def references(self, block: int) -> int:
        return self._references[block]

    def take(self, count: int) -> list[int]:
        """`count` blocks for one holder. Raises RuntimeError if fewer are available: the caller looks first."""
        if count > self.available:
            raise RuntimeError(f"{count} KV blocks wanted, {self.available} available: ask before taking")
        blocks = []
        for _ in range(count):
            if self._free:
                block = self._free.pop()
            else:
                block, _ = self._cached.popitem(last=False)
                self._drop_digest(block)
            self._references[block] = 1
            blocks.append(block)
        return blocks

    def share(self, blocks: Iterable[int]) -> None:
        """One holder more for each: of a block that is held, or of one found by `match`."""
        for block in blocks:
            if self._references[block] == 0:
                del self._cached[block]
            self._references[block] += 1

    def give_back(self, blocks: Sequence[int]) -> None:
        """One holder less for each. Those that nobody holds any more go to the cache if their content is known, the
        last of the sequence to be evicted first: a block is of no use without those before it."""
        for block in reversed(blocks):
            left = self._references[block] - 1
            if left < 0:
                raise RuntimeError(f"KV block {block} given back more often than taken")
            self._references[block] = left
            if left == 0:
                if self._digest[block] is None:
                    self._free.append(block)
                else:
                    self._cached[block] = None

    def register(self, block: int, digest: bytes) -> None:
        """A held block's content is `digest` from now on. Where another block already is, that one stays the one."""
        if self._digest[block] is None and digest not in self._by_digest:
            self._digest[block] = digest
            self._proven[block] = False
            self._by_digest[digest] = block

    def prove(self, digests: Iterable[bytes]) -> None:
        """Somebody has drawn from what these hold, and it was a number: so are they."""
        for digest in digests:
            block = self._by_digest.get(digest)
            if block is not None:
                self._proven[block] = True

    def doubtful(self, digests: Iterable[bytes]) -> set[bytes]:
        """Those that are not proven; what is not known by content never is."""
        known = ((digest, self._by_digest.get(digest)) for digest in digests)
        return {digest for digest, block in known if block is None or not self._proven[block]}

    def forget(self, digests: Iterable[bytes]) -> None:
        """What is known by these digests is not to be taken up again."""
        for digest in sorted(digests):  # the free list must not depend on how a set is ordered
            block = self._by_digest.get(digest)
            if block is not None:
                self._drop_digest(block)
                if self._references[block] == 0:
                    del self._cached[block]
                    self._free.append(block)

    def match(self, digests: Sequence[bytes]) -> list[int]:
        """The blocks of the longest known beginning of `digests`; holds nothing."""
        blocks = []
        for digest in digests:
            block = self._by_digest.get(digest)
            if block is None:
                break
            blocks.append(block)
        return blocks

    def unheld(self, blocks: Iterable[int]) -> int:
        """How many of them `share` would take from `available`."""
        return sum(self._references[block] == 0 for block in blocks)

    def _drop_digest(self, block: int) -> None:
        digest = self._digest[block]
        assert digest is not None
        del self._by_digest[digest]
        self._digest[block] = None
