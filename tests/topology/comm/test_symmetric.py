"""How one_shot is connected: what each rank is asked, that all agree, what checks its sums, and what then carries which
message. No GPU and no Triton: memory and kernel are stand-ins."""

from __future__ import annotations

import logging
import math
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from laddertron.launchers.measure import preflight_links
from laddertron.launchers.measure.preflight_job import Watch
from laddertron.launchers.measure.preflight_plan import PreflightPlan
from laddertron.launchers.rank.load_tuning import look_up
from laddertron.topology.comm import backends, symmetric
from laddertron.topology.comm.groups import CommOptions, OneShotImpossible, TorchGroups
from laddertron.topology.comm.one_shot import MOST_RANKS
from laddertron.topology.comm.symmetric import DirectLevels, Site, connect_one_shot
from laddertron.topology.connect import _collectives, _library_strategy
from laddertron.topology.cost.cost import Shape, Strategy
from laddertron.topology.link_cost import ONE_SHOT_BYTES, in_two_shots
from laddertron.topology.placement.layout import GroupLayout
from torch import Tensor

CPU = torch.device("cpu")
TWO_BY_TWO = GroupLayout(((0, 1), (2, 3)))
HOSTS = ("a", "a", "b", "b")


class Fake:
    """A OneShot of one rank of `ranks`, whose peers bring what the check expects of them; `spoils`: message bytes whose
    sum gets a wrong last value."""

    device, rank = CPU, 1

    def __init__(self, ranks: int = 4, spoils: int = 0) -> None:
        self.ranks, self.calls, self._spoils = ranks, list[str](), spoils

    def carries(self, x: Tensor) -> bool:
        return x.nbytes <= ONE_SHOT_BYTES

    def __call__(self, x: Tensor) -> None:
        self.calls.append("sum")
        x.copy_(symmetric.exact_total(self.ranks, x.numel(), CPU))
        if x.nbytes == self._spoils:
            x[-1] += 1

    def scatter(self, flat: Tensor, part: Tensor) -> None:
        self.calls.append("scatter")

    def collect(self, flat: Tensor, part: Tensor) -> None:
        self.calls.append("collect")
        flat.copy_(symmetric.exact_total(self.ranks, flat.numel(), CPU))

    def abort(self) -> None:
        self.calls.append("abort")

    def missing(self) -> list[int]:
        return [3]


class Event:
    def __init__(self, done: bool = True) -> None:
        self._done = done

    def record(self) -> None: ...

    def query(self) -> bool:
        return self._done


def test_what_a_rank_is_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    """Enough ranks and not too many, Triton, CUDA's memory, and access to every GPU of its node; the same GPU needs no
    access, one that is hidden cannot be asked."""
    triton = SimpleNamespace(fault=None)
    monkeypatch.setattr(symmetric, "triton_missing", lambda: triton.fault)
    backend = SimpleNamespace(name="CUDA")
    monkeypatch.setattr("torch.distributed._symmetric_memory.get_backend", lambda device: backend.name)
    assert symmetric.unable(8, CPU) == ""
    assert "its node has 1 of the group's ranks" in symmetric.unable(1, CPU)
    assert "2 to 16" in symmetric.unable(17, CPU)
    backend.name = "NVSHMEM"
    assert "is NVSHMEM's, not CUDA's: unset TORCH_SYMMMEM" in symmetric.unable(8, CPU)
    triton.fault = "no compiler"
    assert symmetric.unable(8, CPU) == "no compiler"

    monkeypatch.setattr(symmetric, "_uuid", lambda index: f"uuid-{index}")
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 3)
    monkeypatch.setattr(torch.cuda, "can_device_access_peer", lambda a, b: (a, b) == (0, 1))
    assert symmetric.unreachable(0, ["uuid-0", "uuid-1"]) == ""
    assert symmetric.unreachable(0, ["uuid-0", "uuid-0"]) == "", "ranks that share a GPU"
    assert symmetric.unreachable(0, ["uuid-0", "uuid-2"]) == "GPU 0 has no peer access to GPU 2"
    assert "GPU uuid-7 of its node is hidden from it" in symmetric.unreachable(0, ["uuid-0", "uuid-7"])


class Job:
    """A bootstrap of rank 1; `others`: (gather, rank) -> what that rank says there."""

    rank = 1

    def __init__(self, size: int, others: dict[tuple[int, int], bytes]) -> None:
        self.said: list[bytes] = []
        self._size, self._others = size, others

    def all_gather(self, payload: bytes) -> list[bytes]:
        self.said.append(payload)
        told = [self._others.get((len(self.said) - 1, rank), b"") for rank in range(self._size)]
        told[self.rank] = payload
        return told


STEPS = ("ask", "share", "node", "group")


def connected(
    monkeypatch: pytest.MonkeyPatch, others: dict[tuple[int, int], bytes], mine: dict[str, str | Exception]
) -> tuple[DirectLevels | None, tuple[str, ...], list[str], Job]:
    """Rank 1 of 2 x 2, beside a group of two more ranks: what came of it, and the steps that it took."""
    took: list[str] = []
    job = Job(6, others)

    def step(name: str, good: Any = "") -> Callable[..., Any]:
        def run(*_: Any) -> Any:
            took.append(name)
            outcome = mine.get(name, good)
            if isinstance(outcome, Exception):
                raise outcome
            return outcome

        return run

    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr(symmetric, "_uuid", lambda index: "uuid")
    monkeypatch.setattr(symmetric, "unable", step("ask"))
    monkeypatch.setattr(symmetric, "unreachable", lambda index, uuids: "")
    monkeypatch.setattr(symmetric, "share_memory", step("share", Fake(2)))
    monkeypatch.setattr(symmetric, "wrong_in_node", step("node"))
    monkeypatch.setattr(symmetric, "wrong_in_group", step("group"))
    given: Any = job
    groups = TorchGroups("tp", {"intra": "intra", "rail": "rail"})
    levels, faults = connect_one_shot(
        Site(given, TWO_BY_TWO, groups, HOSTS, lambda event, what: None, 1.0), lambda nbytes: nbytes <= 4096
    )
    return levels, faults, took, job


def test_all_ranks_of_a_group_use_it_or_none(monkeypatch: pytest.MonkeyPatch) -> None:
    """A step that fails on any rank of the group ends it there, on all of them, and names the rank and its host; the
    gathers go on, in which the job's other groups take part. What fails in another group is not this one's."""
    levels, faults, took, job = connected(monkeypatch, {}, {})
    assert (levels is not None, faults, took, len(job.said)) == (True, (), list(STEPS), 5)
    for at, name in enumerate(STEPS):
        levels, faults, took, job = connected(monkeypatch, {(at + 1, 3): b"no", (at + 1, 0): b"nor I"}, {})
        assert (levels, faults) == (None, ("rank 0 on a: nor I", "rank 3 on b: no"))
        assert (took, len(job.said)) == (list(STEPS[: at + 1]), 5), name
        outcomes: tuple[tuple[Any, str], ...] = ((RuntimeError("x y\nz"), "RuntimeError: x y"), ("wrong", "wrong"))
        for outcome, words in outcomes[: 1 if name == "share" else 2]:
            levels, faults, took, job = connected(monkeypatch, {}, {name: outcome})
            assert (levels, faults, len(job.said)) == (None, (f"rank 1 on a: {words}",), 5)
    levels, faults, took, _ = connected(monkeypatch, {(2, 4): b"of another group"}, {})
    assert (levels is not None, faults, took) == (True, (), list(STEPS))


@pytest.mark.parametrize("spoils", [64, 32 << 10, ONE_SHOT_BYTES])
def test_a_wrong_sum_is_found(monkeypatch: pytest.MonkeyPatch, spoils: int) -> None:
    monkeypatch.setattr(symmetric, "_EVENT", Event)
    good: Any = Fake()
    assert symmetric.wrong_in_node(good, 1.0, True) == ""
    assert good.calls.count("sum") == 3 * good.calls.count("scatter") > 0
    good.calls.clear()
    assert symmetric.wrong_in_node(good, 1.0, False) == ""
    assert set(good.calls) == {"sum"}
    bad: Any = Fake(spoils=spoils)
    assert symmetric.wrong_in_node(bad, 1.0, False) == f"a sum of {spoils} bytes of torch.bfloat16 was wrong"


def test_every_size_of_the_check_is_whole_vectors_of_each_rank() -> None:
    """Of as many ranks as a node may have: what is summed in two shots is split among them."""
    for ranks in range(2, MOST_RANKS + 1):
        sizes = symmetric.checked_sizes(ranks)
        assert [nbytes % (16 * ranks) for nbytes in sizes] == [0] * 5
        assert min(sizes) == 16 * ranks
        assert max(sizes) <= ONE_SHOT_BYTES
        assert in_two_shots(max(sizes), ranks) == (ranks > 2)
        assert len(set(sizes)) == 5


def test_sums_of_the_check_are_exact() -> None:
    for size in (2, 8, 16, 64, 256):
        total = symmetric.exact_total(size, 1000, CPU)
        assert torch.equal(total, total.to(torch.bfloat16).float())
        assert float(total.min()) < float(total.max())


def test_a_check_that_does_not_end_is_ended(monkeypatch: pytest.MonkeyPatch) -> None:
    """The kernels that wait are told to stop, and the rank that is missing is named."""
    monkeypatch.setattr(symmetric, "_EVENT", lambda: Event(False))
    late: Any = Fake()
    assert symmetric.wrong_in_node(late, 0.01, False) == "waited 0.01 s for rank 3 of its node in a sum of 64 bytes"
    assert late.calls[-1] == "abort"


def test_a_group_is_compared_with_nccl(monkeypatch: pytest.MonkeyPatch) -> None:
    waits: list[str] = []
    other = SimpleNamespace(value=0)

    def all_reduce(x: Tensor, group: str) -> None:
        x.copy_(symmetric.exact_total(4, x.numel(), CPU) + other.value)

    monkeypatch.setattr(symmetric, "dist", SimpleNamespace(all_reduce=all_reduce, get_world_size=lambda group: 4))
    fake: Any = Fake()
    levels = DirectLevels(fake, None, lambda nbytes: True)
    assert symmetric.wrong_in_group(levels, "tp", 1, lambda event, what: waits.append(what)) == ""
    assert waits == ["the first sum of one_shot"] * 2
    other.value = 1
    assert "a sum of 64 bytes over the group differs" in symmetric.wrong_in_group(levels, "tp", 1, lambda *_: None)


def test_one_node_needs_one_kernel_and_several_three_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    """Across nodes the two-level algorithm is the same, with the node's parts by one_shot."""
    fake: Any = Fake(2)
    monkeypatch.setattr(
        "laddertron.topology.comm.two_level.dist.all_reduce",
        lambda part, group, async_op: fake.calls.append(f"{group} {part.storage_offset()} of {part.numel()}"),
    )
    x = torch.zeros(64)
    DirectLevels(fake, None, lambda nbytes: True)(x)
    assert fake.calls == ["sum"]
    levels = DirectLevels(fake, "rail", lambda nbytes: nbytes <= 4096)
    levels(x)
    assert fake.calls[1:] == ["scatter", "rail 32 of 32", "collect"]
    assert [levels.carries(torch.zeros(n)) for n in (64, 1024, 2048)] == [True, True, False]


# ---- what asks for it ----


def test_it_is_made_where_a_size_asks_for_it(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    """A table that has it for some size, or the option by name, which is refused where a rank cannot; by the table a
    group goes on with NCCL and says who could not. Its kernels end with a wait in vain."""
    fake: Any = Fake()
    outcome: list[Any] = [(DirectLevels(fake, None, lambda nbytes: True), ())]
    asked: list[Callable[[int], bool]] = []

    def connect(site: Site, takes: Callable[[int], bool]) -> Any:
        asked.append(takes)
        return outcome[0]

    monkeypatch.setattr(symmetric, "connect_one_shot", connect)
    site: Any = SimpleNamespace(bootstrap=SimpleNamespace(rank=0), layout=TWO_BY_TWO)

    def direct(collective: Any, choose: Callable[[int], str] | None = None) -> list[Any]:
        options = CommOptions(collective=collective)
        return backends._direct(site, options, _library_strategy(options, choose), aborts)

    aborts: list[Callable[[], None]] = []
    assert direct("auto") == direct("flat") == direct("two_level") == []
    assert direct("auto", lambda nbytes: "two_level") == direct("flat", lambda nbytes: "one_shot") == []
    assert asked == []
    assert direct("one_shot") == [outcome[0][0]]
    assert len(direct("auto", lambda nbytes: "one_shot" if nbytes < 1000 else "flat")) == 1
    assert [asked[0](1 << 30), asked[1](999), asked[1](1000)] == [True, True, False]
    aborts[0]()
    assert fake.calls == ["abort"]
    outcome[0] = (None, ("rank 3 on b: no peer access", "rank 0 on a: x"))
    with pytest.raises(
        OneShotImpossible, match="one_shot is not possible: rank 3 on b: no peer access; rank 0 on a: x"
    ):
        direct("one_shot")
    with caplog.at_level(logging.WARNING):
        assert direct("auto", lambda nbytes: "one_shot") == []
    assert "small all-reduces go by NCCL, not by one_shot: rank 3 on b" in caplog.text


def test_groups_of_a_strategy_are_made_if_a_size_goes_by_it() -> None:
    """Each has communicators and their memory. A table may have one for a range of sizes without a power of two."""
    table = look_up([(40_000, "flat"), (55_000, "two_level"), (1 << 20, "one_shot"), (1 << 40, "flat")])
    assert [backends._takes(table, name) is None for name in ("two_level", "one_shot", "exchange")] == [
        False,
        False,
        True,
    ]
    assert backends._takes(lambda nbytes: "one_shot", "two_level") is None
    assert backends._takes(None, "two_level") is None


@pytest.mark.parametrize("backend", ["gloo", "native"])
def test_it_is_refused_without_gpus(backend: str) -> None:
    missing: Any = None
    options, sizes = CommOptions(collective="one_shot"), (4096, 4096)
    with pytest.raises(ValueError, match="one_shot is between GPUs"):
        _collectives(
            backend, missing, TWO_BY_TWO, options, None, missing, sizes, TorchGroups(), missing, [], False,
        )  # fmt: skip


def test_preflight_goes_on_without_it(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    """A group in which a rank cannot has no figures of it, says why, and gathers as often as the job's others."""
    gathered: list[bytes] = []
    bootstrap: Any = SimpleNamespace(rank=0, all_gather=gathered.append)
    control: Any = object()

    def connect(*_: Any) -> Any:
        raise OneShotImpossible("collective: one_shot is not possible: rank 1 on a: no peer access")

    monkeypatch.setattr(preflight_links, "connect", connect)
    monkeypatch.setattr(preflight_links, "_all_reduce_s", lambda own, *_: 1.0 if own is control else 2.0)
    rows: tuple[tuple[Strategy, int], ...] = (("flat", 64), ("one_shot", 64), ("one_shot", 128))
    points = preflight_links.sweep(
        PreflightPlan((), rows), control, bootstrap, TWO_BY_TWO, CommOptions(), Shape(2, 2, "nvlink"), CPU, rows,
        Watch(math.inf, print),
    )  # fmt: skip
    assert [(p.strategy, p.nbytes) for p in points] == [("flat", 64)]
    assert len(gathered) == 3
    assert "rank 1 on a: no peer access" in caplog.text
