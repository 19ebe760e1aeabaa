"""GroupLayout: the ranks of one tensor-parallel group, node by node. Plain data between placement and groups."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class GroupLayout:
    """`nodes[i]` holds the global ranks of the group's i-th node in tensor-parallel order. Every node has equally many
    ranks (placement refuses anything else), so that rails exist: `rails[j]` is the j-th rank of every node."""

    nodes: tuple[tuple[int, ...], ...]

    def __post_init__(self) -> None:
        sizes = {len(node) for node in self.nodes}
        ranks = self.ranks
        if len(sizes) != 1 or 0 in sizes:
            raise ValueError(f"a group's nodes must hold equally many ranks, got {[len(n) for n in self.nodes]}")
        if len(set(ranks)) != len(ranks):
            raise ValueError(f"duplicate rank in the group {self.nodes}")

    @property
    def ranks(self) -> tuple[int, ...]:
        """Global ranks in tensor-parallel order: node after node."""
        return tuple(rank for node in self.nodes for rank in node)

    @property
    def size(self) -> int:
        return len(self.ranks)

    @property
    def per_node(self) -> int:
        return len(self.nodes[0])

    @property
    def rails(self) -> tuple[tuple[int, ...], ...]:
        return tuple(zip(*self.nodes, strict=True))
