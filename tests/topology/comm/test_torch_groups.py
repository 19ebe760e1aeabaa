"""The torch groups of a tensor-parallel group: Megatron-core's HyperCommGrid makes them, whatever the placement."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from laddertron.topology.comm import torch_groups
from laddertron.topology.comm.groups import CommOptions
from laddertron.topology.connect import connect
from laddertron.topology.placement.layout import GroupLayout
from rank_pool import Rank

Ranks = Callable[..., list[Any]]


def case_groups(rank: Rank, per_node: int, collective: str) -> dict[str, Any]:
    """Each group's ranks, and which groups the grids made, in order."""
    before = dist.is_initialized()  # by an earlier case on these ranks
    made = list[Any]()
    grid = torch_groups.hyper_comm_grid()
    create = grid.create_pg

    def noted(self: Any, dims: Any, **options: Any) -> Any:
        made.append(create(self, dims, **options))
        return made[-1]

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(grid, "create_pg", noted)
        options = CommOptions(backend="gloo", collective=collective)  # type: ignore[arg-type]
        with rank.connect(per_node, options) as comm:
            groups = {"tp": comm.tp, **comm.subgroups}
            answer: dict[str, Any] = {name: dist.get_process_group_ranks(group) for name, group in groups.items()}
            answer["made"] = [[name for name, group in groups.items() if group is one] for one in made]
    assert dist.is_initialized() == before
    return answer


def test_every_group_is_the_grids_and_follows_the_layout(ranks: Ranks) -> None:
    """4 ranks on 2 nodes: tensor-parallel group of all, node groups of neighbours, rails across, and the second node
    group that two levels over gloo need."""
    got = ranks(4, "test_torch_groups:case_groups", {"per_node": 2, "collective": "two_level"})
    assert [g["tp"] for g in got] == [[0, 1, 2, 3]] * 4
    assert [g["intra"] for g in got] == [[0, 1], [0, 1], [2, 3], [2, 3]]
    assert [g["gather"] for g in got] == [g["intra"] for g in got]
    assert [g["rail"] for g in got] == [[0, 2], [1, 3], [0, 2], [1, 3]]
    assert all(g["made"] == [["tp"], ["intra"], ["rail"], ["gather"]] for g in got)


@pytest.mark.parametrize(("per_node", "names"), [(1, ["tp", "rail"]), (2, ["tp", "intra"])])
def test_the_same_ranks_share_one_group(ranks: Ranks, per_node: int, names: list[str]) -> None:
    """Where the node or the rail is everybody, it is the tensor-parallel group itself, and a lone rank has no group:
    each of gloo's is connections and a thread that wakes beside the computation."""
    got = ranks(2, "test_torch_groups:case_groups", {"per_node": per_node, "collective": "flat"})
    assert got == [{**{name: [0, 1] for name in names}, "made": [names]}] * 2


def case_leaves_early(rank: Rank, made: str) -> bool:
    """Whether rank 0 had its group when this rank's `connect` returned."""
    grid = torch_groups.hyper_comm_grid()
    create = grid.create_pg

    def late(self: Any, dims: Any, **options: Any) -> Any:
        group = create(self, dims, **options)
        if rank.rank == 0:
            time.sleep(0.5)  # gloo's own connecting, which cannot be held from here
            Path(made).touch()
        return group

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(grid, "create_pg", late)
        with rank.connect(options=CommOptions(backend="gloo")):
            return Path(made).exists()


def test_nobody_has_groups_that_another_still_connects(ranks: Ranks, tmp_path: Path) -> None:
    """gloo's `connectFullMesh` fails on a rank whose peer is connected, done, and gone before it."""
    assert ranks(2, "test_torch_groups:case_leaves_early", {"made": str(tmp_path / "made")}) == [True, True]


def test_a_lone_rank_has_its_group(ranks: Ranks) -> None:
    (got,) = ranks(1, "test_torch_groups:case_groups", {"per_node": 1, "collective": "flat"})
    assert got == {"tp": [0], "made": [["tp"]]}


def case_placed(rank: Rank, groups: list[list[list[int]]], backend: str) -> tuple[int, float, list[float]]:
    """The torch group's rank, a sum over the group, and what each of its ranks gave, in the group's order."""
    rank.close_kept()
    mine = next(g for g in groups if any(rank.rank in node for node in g))
    layout = GroupLayout(tuple(map(tuple, mine)))
    with connect(rank.bootstrap, layout, CommOptions(backend=backend)) as comm:  # type: ignore[arg-type]
        total = float(comm.all_reduce.start(torch.full((4,), float(1 << rank.rank))).wait()[0])
        parts = [torch.empty(1) for _ in range(comm.size)]
        dist.all_gather(parts, torch.full((1,), float(rank.rank)), group=comm.tp)
        assert comm.tp.rank() == comm.rank
        return comm.rank, total, [float(part) for part in parts]


TORN = [[[0], [2]], [[1], [3]]]
BACKWARDS = [[[3, 1], [2, 0]]]
UNLIKE = [[[0], [1]], [[2, 3]]]


@pytest.mark.parametrize("backend", ["native", "gloo"])
@pytest.mark.parametrize("groups", [TORN, BACKWARDS, UNLIKE])
def test_any_placement_is_in_the_grids_order(ranks: Ranks, groups: list[list[list[int]]], backend: str) -> None:
    """Replicas whose ranks alternate, a group numbered backwards, replicas on one and on two nodes: a rank's number in
    torch's groups is its place in the group, and no group meets another's ranks."""
    got = ranks(4, "test_torch_groups:case_placed", {"groups": groups, "backend": backend})
    for members in ([rank for node in group for rank in node] for group in groups):
        for place, rank in enumerate(members):
            assert got[rank] == [place, float(sum(1 << r for r in members)), [float(r) for r in members]]


def case_stray(rank: Rank) -> str | None:
    """A container sets WORLD_SIZE for other purposes, to 1."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("WORLD_SIZE", "1")
        with rank.connect() as comm:
            assert comm.tp.size() == 2
        return os.environ.get("WORLD_SIZE")


def test_a_stray_world_size_is_not_believed_and_not_lost(ranks: Ranks) -> None:
    assert ranks(2, "test_torch_groups:case_stray") == ["1", "1"]


def case_other_world(rank: Rank) -> str:
    with rank.connect(), pytest.raises(ValueError, match="was initialised before") as refused:
        connect(rank.bootstrap, GroupLayout(((rank.rank,),)))
    return str(refused.value)


def test_a_world_of_other_ranks_is_refused(ranks: Ranks) -> None:
    first, second = ranks(2, "test_torch_groups:case_other_world")
    assert "as rank 0 of 2; this is rank 0 of a replica of 1: destroy that" in first
    assert "as rank 1 of 2; this is rank 0 of a replica of 1: destroy that" in second


def test_a_cpu_rank_does_not_import_the_whole_of_megatron() -> None:
    """It takes 2.8 s and 137 MB: the grid's file alone is loaded. Where the package is there already, its class is."""
    code = (
        "import sys, laddertron.engine.step.build, laddertron.topology.comm.torch_groups as t;"
        "grid = t.hyper_comm_grid();"
        "assert grid.__module__ == 'megatron.core.hyper_comm_grid', grid.__module__;"
        "found = [m for m in sys.modules if m.startswith('megatron')]; assert not found, found"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (0, "")


def test_groups_are_made_and_ended_without_a_word() -> None:
    """What torch or a library says of them would stand in every rank's log."""
    code = """
from laddertron.topology.comm.bootstrap import StoreBootstrap, open_store
from laddertron.topology.comm.groups import CommOptions
from laddertron.topology.connect import connect
from laddertron.topology.placement.layout import GroupLayout
bootstrap = StoreBootstrap(open_store("127.0.0.1", 0, True), 0, 1)
with connect(bootstrap, GroupLayout(((0,),)), CommOptions(backend="gloo")) as comm:
    assert comm.tp.size() == 1
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (0, "")


def test_an_absent_megatron_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch_groups, "find_spec", lambda name: None)
    monkeypatch.delitem(sys.modules, "megatron.core", raising=False)
    with pytest.raises(ImportError, match=r"install megatron-core 0\.16"):
        torch_groups.hyper_comm_grid.__wrapped__()
