"""World against the ranks listed one by one: replica after replica, stage after stage, group after group."""

from __future__ import annotations

from itertools import product

import pytest
from laddertron.topology.placement.world import World


@pytest.mark.parametrize(("tp", "stages", "replicas"), list(product((1, 2, 3), repeat=3)))
def test_every_rank_has_the_place_that_counting_gives_it(tp: int, stages: int, replicas: int) -> None:
    world = World(tp, stages, replicas)
    places = list(product(range(replicas), range(stages), range(tp)))
    assert (world.size, world.groups, world.replica_size) == (len(places), stages * replicas, tp * stages)
    members: dict[tuple[int, int], list[int]] = {}
    for rank, (replica, stage, tp_rank) in enumerate(places):
        members.setdefault((replica, stage), []).append(rank)
        assert world.rank(replica, stage, tp_rank) == rank
        assert world.replica_and_stage(world.group_of(rank)) == (replica, stage)
        assert (world.stage_of(rank), world.in_group(rank)) == (stage, tp_rank)
        assert world.replica_of(rank) == (replica, [p for p in places if p[0] == replica].index(places[rank]))
        neighbours = [(replica, stage + 1, tp_rank), (replica, stage - 1, tp_rank)]
        ends = {0: stages - 1, stages - 1: 0} if stages > 1 else {}
        neighbours.append((replica, ends.get(stage, stages), tp_rank))
        assert world.passing(rank) == tuple(places.index(p) if p in places else None for p in neighbours)
    assert [list(world.ranks_of(group)) for group in range(world.groups)] == list(members.values())
    assert [list(world.groups_of(r)) for r in range(replicas)] == [
        [g for g, (replica, _) in enumerate(members) if replica == r] for r in range(replicas)
    ]


def test_a_group_s_layout_is_what_its_ranks_see() -> None:
    """A world grows to the ranks that answer; a group whose nodes differ in their numbers of ranks is refused."""
    world = World(4).on(("a", "a", "b", "b", "c", "c", "c", "c"))
    assert (world.replicas, world.spans_nodes) == (2, True)
    assert [world.layout(group).nodes for group in (0, 1)] == [((0, 1), (2, 3)), ((4, 5, 6, 7),)]
    assert not World(2).on("aabb").spans_nodes
    for nodes in ("aaab", "abab", "abba"):
        with pytest.raises(ValueError, match=r"ranks 4 to 7 lie on a: .*b: .*ppr:N:node"):
            World(4).on("xxxx" + nodes).layout(1)


def test_impossible_worlds_are_refused() -> None:
    for sizes in ((0, 1, 1), (1, 0, 1), (1, 1, -1)):
        with pytest.raises(ValueError, match="each must be 1 or more"):
            World(*sizes)
    with pytest.raises(ValueError, match=r"tensor_parallel_size=2 x replicas=2 is 4 ranks, and hosts are known of 3"):
        World(2, replicas=2, nodes=("a", "a", "a"))
    with pytest.raises(ValueError, match="is 4 ranks, and hosts are known of 6"):
        World(4).on("aaabbb")
