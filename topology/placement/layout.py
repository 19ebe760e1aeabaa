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


def observed_layout(nodes: tuple[str, ...], first_rank: int, size: int) -> GroupLayout:
    """The layout of the group of ranks [first_rank, first_rank + size), given the node that each rank of the job runs
    on. Raises ValueError where the group's ranks are spread unequally over its nodes, or a node's are not
    contiguous."""
    by_node: list[tuple[str, list[int]]] = []
    for rank in range(first_rank, first_rank + size):
        if not by_node or by_node[-1][0] != nodes[rank]:
            by_node.append((nodes[rank], []))
        by_node[-1][1].append(rank)
    names = [name for name, _ in by_node]
    if len(set(names)) != len(names) or len({len(ranks) for _, ranks in by_node}) != 1:
        seen = ", ".join(f"{name}: {ranks}" for name, ranks in by_node)
        raise ValueError(
            f"ranks {first_rank} to {first_rank + size - 1} lie on {seen}: every node of a group needs equally many, "
            "next to one another; with mpirun use --map-by ppr:N:node, with mpiexec -ppn N"
        )
    return GroupLayout(tuple(tuple(ranks) for _, ranks in by_node))
