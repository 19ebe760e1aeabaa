"""Divides a group's ranks among nodes: equally many on each, on as few nodes as possible. Pure."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import combinations

from ..hardware.fabric import Fabric, Node, counted
from .world import World

Suits = Callable[[int], str | None]
"""Returns the reason why a tensor_parallel_size does not suit the model, or None if it does."""


MAX_MIXED_REPLICAS = 16
"""With more groups on unlike hosts, mixes of two part sizes are not tried: the search would take minutes."""


class Problem:
    """A layout problem on a fabric: capacities, the search, and the error messages."""

    def __init__(
        self,
        fabric: Fabric,
        world: World,
        slots: Mapping[str, int],
        ranks_per_node: int | None,
        suits: Suits | None,
    ) -> None:
        """world: `layout` and `refusal` are asked about its groups in several sizes."""
        self.fabric, self.world, self.slots, self.suits = fabric, world, slots, suits
        self.ranks_per_node = ranks_per_node
        self.gpus = any(n.devices for n in fabric.nodes)
        self.elastic = not self.gpus and not slots and ranks_per_node is None
        self.capacity = [self._capacity(n) for n in fabric.nodes]
        kinds = [n.traits() for n in fabric.nodes]
        self.kind = [kinds.index(kind) for kind in kinds]
        self.order = sorted(range(len(kinds)), key=lambda i: (-fabric.nodes[i].nvlinks, self.kind[i], i))

    def _capacity(self, node: Node) -> int:
        room = len(node.devices) if self.gpus else len(node.cores)
        if not self.gpus and node.hostname in self.slots:
            room = self.slots[node.hostname]  # who names slots on a CPU host may oversubscribe it
        room = min(room, self.slots.get(node.hostname, 0 if self.slots else room))
        return room if self.ranks_per_node is None else min(room, self.ranks_per_node)

    @property
    def total(self) -> int:
        return sum(self.capacity)

    def layout(self, size: int) -> tuple[tuple[int, ...], ...] | None:
        """Each group's nodes, as indices into the fabric, or None. A group's ranks are divided evenly over them."""
        if self.suits is not None and self.suits(size) is not None:
            return None
        if not self.elastic:
            return self._search(size, self.capacity) if self.total % size == 0 else None
        for per_numa in range(1, max(self.capacity) + 1):
            capacity = [
                min(per_numa * len(n.numa), room) for n, room in zip(self.fabric.nodes, self.capacity, strict=True)
            ]
            layout = self._search(size, capacity)
            if layout is not None:
                return layout
        return None

    def _search(self, size: int, capacity: Sequence[int]) -> tuple[tuple[int, ...], ...] | None:
        if size * self.world.groups > sum(capacity):
            return None
        shares = [n for n in range(min(size, max(capacity)), 0, -1) if size % n == 0]
        for by_group, by_preference in self._attempts(shares, len(set(capacity)) > 1):
            layout = self._deal(size, list(capacity), by_group, by_preference)
            if layout is not None:
                return layout
        return None

    def _attempts(self, shares: Sequence[int], mixed: bool) -> Iterator[tuple[Sequence[Sequence[int]], bool]]:
        """Yields attempts in order: each group in the largest parts that fit; all in parts of one size; on unlike
        hosts, some in parts of one size and the rest of a smaller one."""
        count = self.world.groups
        yield [shares] * count, True
        for share in shares:
            yield [[share]] * count, True
            yield [[share]] * count, False
        if mixed and count <= MAX_MIXED_REPLICAS:
            for large, small in combinations(shares, 2):
                for first in range(count - 1, 0, -1):
                    yield [[large]] * first + [[small]] * (count - first), False

    def _deal(
        self, size: int, free: list[int], by_group: Sequence[Sequence[int]], by_preference: bool
    ) -> tuple[tuple[int, ...], ...] | None:
        """Assigns distinct nodes to each group, with the largest of its shares that fits. by_preference: nodes of one
        kind, in order; else the emptiest first, which finds a solution with one share for all if there is one."""
        groups = []
        for shares in by_group:
            chosen: list[int] = []
            for share in shares:
                span = size // share
                room = [i for i in self.order if free[i] >= share]
                if len(room) < span:
                    continue
                if by_preference:
                    kinds = dict.fromkeys(self.kind[i] for i in room)
                    alike = ([i for i in room if self.kind[i] == kind] for kind in kinds)
                    chosen = next((nodes for nodes in alike if len(nodes) >= span), room)[:span]
                else:
                    emptiest = sorted(room, key=lambda i: -(free[i] // share))[:span]
                    chosen = sorted(emptiest, key=self.order.index)
                for i in chosen:
                    free[i] -= share
                break
            if not chosen:
                return None
            groups.append(tuple(chosen))
        return tuple(groups)

    def refusal(self, size: int) -> str:
        what = f"tensor_parallel_size={size}"
        reason = self.suits(size) if self.suits is not None else None
        have = f"{counted(self.total, 'rank')} ({self._arithmetic()})"
        if reason is not None:
            text = f"{what}: {reason}"
        elif (world := replace(self.world, tp=size)).size > self.total:
            text = f"{world.keys} needs {counted(world.size, 'rank')}, the fabric has {have}"
        elif self.total % size and not self.elastic:
            text = f"{what} does not divide {have}"
        else:
            several = f" {world.groups} times" if world.groups > 1 else ""
            text = f"{what} does not fit{several} on {have} with equally many ranks on each node of a group"
        return f"{text}: {self._fix(size)}"

    def _fix(self, size: int) -> str:
        can = [n for n in range(1, self.total + 1) if self.layout(n) is not None]
        near = sorted(sorted(can, key=lambda n: (abs(n - size), n))[:8])
        fixes = [f"use {'' if near == can else 'for example '}{_either(near)}"] if near else []
        most = next((n for n in range(self.world.replicas - 1, 0, -1) if self._with(n).layout(size) is not None), 0)
        fixes += [f"replicas={most}"] if most else []
        fewer = self._fewer_hosts(size)
        fixes += [f"only the hosts {fewer} (launch.hosts)"] if fewer else []
        return ", or ".join(fixes) if fixes else "no layout of this model fits these hosts: add hosts"

    def _with(self, replicas: int) -> Problem:
        return Problem(self.fabric, replace(self.world, replicas=replicas), self.slots, self.ranks_per_node, self.suits)

    def _fewer_hosts(self, size: int) -> str:
        """Suggests the largest number of first hosts on which the wanted layout fits unchanged."""
        names = [self.fabric.nodes[i].hostname for i in self.order if self.capacity[i]]
        for count in range(len(names) - 1, 0, -1):
            slots = {n: s for n, s in self.slots.items() if n in names[:count]}
            some = Problem(self.fabric.only(names[:count]), self.world, slots, self.ranks_per_node, self.suits)
            if some.layout(size) is not None:
                return ", ".join(names[:count]) if count <= 4 else f"{names[0]} … {names[count - 1]} ({count} of them)"
        return ""

    def _arithmetic(self) -> str:
        counts = sorted(Counter(c for c in self.capacity if c).items(), reverse=True)
        if not counts:
            return "no host has room"
        return " + ".join(f"{counted(count, 'node')} x {room}" for room, count in counts)


def _either(numbers: Sequence[int]) -> str:
    texts = [str(n) for n in numbers]
    return texts[0] if len(texts) == 1 else f"{', '.join(texts[:-1])} or {texts[-1]}"
