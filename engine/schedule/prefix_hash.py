"""The identity of a prompt's full blocks: a chain of digests, each over its parent and the block's ids.

Two sequences share KV only where everything before it is the same too, and only under the same salt. Pure; called by
the scheduler when it admits a sequence and when a block has filled up.
"""

from __future__ import annotations

from array import array
from hashlib import blake2b

# 32 bytes resist a tenant who looks for collisions, which is what keeps one from reading another's cache.
_SIZE = 32


class DigestChain:
    """Digests of a growing sequence's full blocks; `upto` computes what is still missing and no more."""

    __slots__ = ("block_size", "digests", "root")

    def __init__(self, salt: str, block_size: int) -> None:
        self.root = blake2b(salt.encode(), digest_size=_SIZE).digest()
        self.block_size = block_size
        self.digests: list[bytes] = []

    def upto(self, count: int, tokens: list[int]) -> list[bytes]:
        """The chain, at least `count` blocks long; `tokens` are the sequence's ids, `count` full blocks or more."""
        digests, size = self.digests, self.block_size
        for i in range(len(digests), count):
            ids = array("I", tokens[i * size : (i + 1) * size]).tobytes()
            digests.append(blake2b((digests[-1] if digests else self.root) + ids, digest_size=_SIZE).digest())
        return digests

    def fork(self, count: int) -> DigestChain:
        """A chain of its own that starts with this one's first `count` digests."""
        other = DigestChain.__new__(DigestChain)
        other.root, other.block_size, other.digests = self.root, self.block_size, self.digests[:count]
        return other
