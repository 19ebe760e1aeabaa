"""World: how many ranks a job has, their order, and which of them form a group. All arithmetic of ranks; pure."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import groupby

from .layout import GroupLayout


@dataclass(frozen=True, slots=True)
class World:
    """The ranks of a job: replica after replica, in each of them stage after stage, in each of those one
    tensor-parallel group of `tp`. `nodes`: the host of each rank, () until they are known. A launch of one replica is a
    world with `replicas` 1. Raises ValueError."""

    tp: int = 1
    stages: int = 1
    replicas: int = 1
    nodes: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        if min(self.tp, self.stages, self.replicas) < 1:
            raise ValueError(f"{self.keys}: each must be 1 or more")
        if self.nodes and len(self.nodes) != self.size:
            raise ValueError(f"{self.keys} is {self.size} ranks, and hosts are known of {len(self.nodes)}")

    @property
    def size(self) -> int:
        return self.replica_size * self.replicas

    @property
    def replica_size(self) -> int:
        """Ranks of one replica: its stages' groups together."""
        return self.tp * self.stages

    @property
    def groups(self) -> int:
        return self.stages * self.replicas

    @property
    def product(self) -> str:
        """`8 x 2 x 3 = 48`: tp, stages if there are several, replicas."""
        return f"{self.tp}{f' x {self.stages}' if self.stages > 1 else ''} x {self.replicas} = {self.size}"

    @property
    def keys(self) -> str:
        """The sizes by the names of their keys, without those that are 1."""
        text = f"tensor_parallel_size={self.tp}"
        text += f" x pipeline_parallel_size={self.stages}" if self.stages != 1 else ""
        return text + (f" x replicas={self.replicas}" if self.replicas != 1 else "")

    def rank(self, replica: int, stage: int, tp_rank: int) -> int:
        return (replica * self.stages + stage) * self.tp + tp_rank

    def group_of(self, rank: int) -> int:
        return rank // self.tp

    def in_group(self, rank: int) -> int:
        """The rank within its tensor-parallel group."""
        return rank % self.tp

    def replica_and_stage(self, group: int) -> tuple[int, int]:
        return divmod(group, self.stages)

    def stage_of(self, rank: int) -> int:
        return self.replica_and_stage(self.group_of(rank))[1]

    def replica_of(self, rank: int) -> tuple[int, int]:
        """The rank's replica, and its rank within it."""
        return divmod(rank, self.replica_size)

    def ranks_of(self, group: int) -> range:
        return range(group * self.tp, (group + 1) * self.tp)

    def groups_of(self, replica: int) -> range:
        """The groups of a replica, by stage."""
        return range(replica * self.stages, (replica + 1) * self.stages)

    def passing(self, rank: int) -> tuple[int | None, int | None, int | None]:
        """The ranks with which this one exchanges in a pipeline: in the next stage, in the one before, and between the
        last and the first. None where there is none."""
        group, last = self.group_of(rank), self.stages - 1
        replica, stage = self.replica_and_stage(group)
        after = rank + self.tp if stage < last else None
        ends = {0: last, last: 0} if last else {}
        ring = self.rank(replica, ends[stage], self.in_group(rank)) if stage in ends else None
        return after, rank - self.tp if stage else None, ring

    def one_replica(self) -> World:
        """Each replica as a job of its own."""
        return World(self.tp, self.stages)

    def on(self, nodes: Sequence[str]) -> World:
        """This world on hosts: as many replicas as there are ranks for; `nodes`: the host of each rank."""
        return replace(self, replicas=max(1, len(nodes) // self.replica_size), nodes=tuple(nodes))

    def layout(self, group: int) -> GroupLayout:
        """A group by its nodes. Raises ValueError where its ranks are spread unequally over them, or a node's are not
        contiguous."""
        ranks = self.ranks_of(group)
        by_node = [(name, tuple(run)) for name, run in groupby(ranks, self.nodes.__getitem__)]
        names = [name for name, _ in by_node]
        if len(set(names)) != len(names) or len({len(run) for _, run in by_node}) != 1:
            seen = ", ".join(f"{name}: {list(run)}" for name, run in by_node)
            raise ValueError(
                f"ranks {ranks[0]} to {ranks[-1]} lie on {seen}: every node of a group needs equally many, "
                "next to one another; with mpirun use --map-by ppr:N:node, with mpiexec -ppn N"
            )
        return GroupLayout(tuple(run for _, run in by_node))

    @property
    def spans_nodes(self) -> bool:
        """Whether a group has ranks on several nodes."""
        return any(len({self.nodes[rank] for rank in self.ranks_of(group)}) > 1 for group in range(self.groups))
