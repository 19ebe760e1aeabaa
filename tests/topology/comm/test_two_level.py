"""All-reduces of gloo and NCCL in two levels: right, the same everywhere, and only where they are asked for."""

from __future__ import annotations

import contextlib
import hashlib
import json
import logging
import math
from collections.abc import Callable, Iterator
from dataclasses import replace
from datetime import timedelta
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from laddertron.engine.config.schema import Deployment, LaunchConfig, ModelSection, ParallelConfig
from laddertron.launchers.measure import preflight_links
from laddertron.launchers.measure.preflight_job import Watch
from laddertron.launchers.measure.preflight_plan import PreflightPlan
from laddertron.launchers.rank import load_tuning as tuned
from laddertron.topology import connect as connecting
from laddertron.topology.comm import backends, gpu_stream, nccl, two_level
from laddertron.topology.comm.backends import other_backend
from laddertron.topology.comm.collectives import CollectiveTimeout, CommunicationError
from laddertron.topology.comm.groups import CommOptions, Communicator, TorchGroups
from laddertron.topology.comm.ledger import Ledger
from laddertron.topology.connect import connect
from laddertron.topology.cost.cost import Shape, Strategy, shape_of
from laddertron.topology.cost.fit import Point, fit
from laddertron.topology.cost.tuning import make
from laddertron.topology.hardware.discover import discover
from laddertron.topology.hardware.fabric import Fabric
from laddertron.topology.link_cost import Emulation
from laddertron.topology.placement.layout import GroupLayout
from rank_pool import Rank
from waiting import HANG_S

Ranks = Callable[..., list[Any]]
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}
TWO_BY_TWO = GroupLayout(((0, 1), (2, 3)))
COUNTS = [1, 2, 3, 6, 1000, 4098, 30_001, 300_012]
TABLE = [(4096, "flat"), (65_536, "two_level"), (1 << 40, "flat")]


def _parts(size: int, count: int, dtype: str, seed: int) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(count, generator=generator).to(DTYPES[dtype]) for _ in range(size)]


def _strategies(comm: Communicator) -> dict[str, int]:
    return {entry.strategy: entry.count for entry in comm.ledger.entries()}


# ---- gloo, on real ranks ----


def case_sums(rank: Rank, per_node: int, inference: bool) -> dict[str, Any]:
    """Every size and type, two in flight, held to the exact sum and to flat gloo; what came, hashed, and how."""
    digests = []
    with (
        rank.connect(per_node, CommOptions(backend="gloo", collective="two_level", timeout_s=HANG_S)) as comm,
        rank.connect(per_node, CommOptions(backend="gloo", collective="flat", timeout_s=HANG_S)) as flat,
        torch.inference_mode(inference),
    ):
        for count in COUNTS:
            for dtype in DTYPES:
                given = [_parts(rank.size, count, dtype, seed) for seed in (1, 2)]
                xs = [parts[rank.rank].clone() for parts in given]
                flying = [comm.all_reduce.start(x) for x in xs]
                for x, pending, parts in zip(xs, flying, given, strict=True):
                    assert pending.wait() is x, "the sum must be x itself"
                    other = flat.all_reduce.start(parts[rank.rank].clone()).wait()
                    scale = torch.stack(parts).double().abs().sum(0).clamp_min(1e-3)
                    exact = torch.stack(parts).double().sum(0)
                    tolerance = rank.size / 2 * torch.finfo(DTYPES[dtype]).eps  # gloo rounds at every addition
                    assert ((x.double() - exact).abs() / scale).max() <= tolerance
                    assert ((x.double() - other.double()).abs() / scale).max() <= 2 * tolerance
                    digests.append(hashlib.sha256(x.view(torch.uint8).numpy().tobytes()).hexdigest())
                    assert pending.wait() is x, "a second wait gives the same again"
        return {"digests": digests, "strategies": _strategies(comm), "flat": _strategies(flat)}


@pytest.mark.parametrize(
    ("size", "per_node", "inference"), [(4, 2, False), (4, 2, True), (6, 3, False), (4, 4, False), (4, 1, False)]
)
def test_every_rank_gets_the_same_sum_and_gets_it_again(
    ranks: Ranks, size: int, per_node: int, inference: bool
) -> None:
    """Over 2 x 2 and 2 x 3 ranks, whose sizes do and do not divide: those that do go in two levels, the rest flat, as
    all do on one node and with one rank a node. All ranks hold the same bits, and a second run holds them again."""
    args = {"per_node": per_node, "inference": inference}
    first = ranks(size, "test_two_level:case_sums", args)
    again = ranks(size, "test_two_level:case_sums", args)
    assert all(answer["digests"] == first[0]["digests"] for answer in first + again)
    divide = sum(count % per_node == 0 for count in COUNTS) if 1 < per_node < size else 0
    calls = 2 * len(DTYPES)
    expected = {"gloo": calls * (len(COUNTS) - divide), "gloo two_level": calls * divide}
    assert first[0]["strategies"] == {name: count for name, count in expected.items() if count}
    assert first[0]["flat"] == {"gloo": calls * len(COUNTS)}


def case_chosen(rank: Rank, choice: str) -> dict[str, int]:
    """Messages around the table's borders; `choice`: whether connect gets the table, and which collective."""
    options = CommOptions(
        backend="gloo", collective="flat" if choice == "flat" else "auto", deterministic=choice == "deterministic"
    )
    choose = None if choice == "auto" else tuned.look_up(TABLE)
    with connect(rank.bootstrap, TWO_BY_TWO, options, choose) as comm:
        for nbytes in (256, 4096, 4104, 65_536, 65_544, 1 << 20):
            assert comm.all_reduce.start(torch.ones(nbytes // 4)).wait().eq(4).all()
        return {f"{entry.strategy} {entry.bytes}": entry.count for entry in comm.ledger.entries()}


def test_auto_goes_by_the_table_and_without_one_flat(ranks: Ranks) -> None:
    """Of six sizes the two between the table's borders go in two levels; none does without a table, where flat is said,
    and where one order of summation is."""
    low, high = 256 + 4096 + 65_544 + (1 << 20), 4104 + 65_536
    assert (
        ranks(4, "test_two_level:case_chosen", {"choice": "table"})
        == [{f"gloo {low}": 4, f"gloo two_level {high}": 2}] * 4
    )
    for choice in ("auto", "flat", "deterministic"):
        answers = ranks(4, "test_two_level:case_chosen", {"choice": choice})
        assert answers == [{f"gloo {low + high}": 6}] * 4, choice


def case_ahead(rank: Rank) -> bool:
    """Nobody waits, and the sums come; then a sum that one rank is late for, and the end of that."""
    with rank.connect(2, CommOptions(backend="gloo", collective="two_level", timeout_s=HANG_S)) as comm:
        x, y = torch.full((1000,), 1.0 + rank.rank), torch.ones(10)
        pending: Any = [comm.all_reduce.start(x), comm.all_reduce.start(y)]
        arrived = pending[1].work.exception(HANG_S) is None
        assert [p.wait() for p in pending] == [x, y]
        assert bool(x.eq(10).all() and y.eq(4).all())
        if rank.rank == 3:
            rank.bootstrap.all_gather(b"the others have given up")
        comm.set_timeout(0.2)
        late: Any = comm.all_reduce.start(x)
        work = late.work
        if rank.rank != 3:
            for _ in range(2):  # never x without its sum
                with pytest.raises(CollectiveTimeout, match=r"collective 2: timed out after 0\.2 s"):
                    late.wait()
            assert comm.ledger.place() == (3, "all_reduce 2 of 4000 bytes")
            rank.bootstrap.all_gather(b"given up")
        work.wait(timedelta(seconds=HANG_S))
        return bool(arrived and x.eq(40).all())


def test_it_travels_by_itself_and_a_late_rank_is_not_waited_for_longer_than_allowed(ranks: Ranks) -> None:
    assert ranks(4, "test_two_level:case_ahead") == [True] * 4


def case_uneven(rank: Rank) -> bool:
    """One rank of each node starts four messages at once, the other each when the one before is there."""
    with rank.connect(2, CommOptions(backend="gloo", collective="two_level", timeout_s=HANG_S)) as comm:
        xs = [torch.full((1000 * n,), float(n + rank.rank)) for n in (4, 1, 3, 2)]
        for at_once in (1, 0):
            flying = []
            for x in xs:
                flying.append(comm.all_reduce.start(x))
                if rank.rank % 2 != at_once:
                    flying.pop().wait()
            for pending in flying:
                pending.wait()
        return [float(x.min()) for x in xs] == [float(x.max()) for x in xs] == [4.0 * (4 * n + 6) for n in (4, 1, 3, 2)]


def test_ranks_of_a_node_need_not_go_in_step(ranks: Ranks) -> None:
    """A second message is scattered before or after the first is gathered, as the rank's own time has it: either way
    the calls of every group come in one order on all of its ranks."""
    assert ranks(4, "test_two_level:case_uneven") == [True] * 4


def case_sweep(rank: Rank) -> list[Any]:
    """Preflight's sweep over gloo; every communicator's strategies as they are when it ends."""
    seen: list[dict[str, int]] = []

    class Watched:
        def __init__(self, comm: Communicator) -> None:
            self._comm, self.all_reduce = comm, comm.all_reduce

        def close(self) -> None:
            seen.append(_strategies(self._comm))
            self._comm.close()

    patch = pytest.MonkeyPatch()
    patch.setattr(preflight_links, "connect", lambda *given: Watched(connect(*given)))
    patch.setattr(preflight_links, "_SECONDS", 0.01)
    options = CommOptions(backend="gloo")
    wanted = PreflightPlan((), (("flat", 4096), ("two_level", 4096)))
    with rank.connect(2, options) as control, contextlib.ExitStack() as stack:
        stack.callback(patch.undo)
        device = torch.device("cpu")
        shape, watch = Shape(2, 2), Watch(math.inf, print)
        points = preflight_links.sweep(wanted, control, rank.bootstrap, TWO_BY_TWO, options, shape, device, (), watch)
        return [[p.strategy for p in points if p.seconds > 0], sorted(_strategies(control)), [sorted(s) for s in seen]]


def test_preflight_measures_both(ranks: Ranks) -> None:
    """Flat on the communicator that is there, two levels on one of their own."""
    assert ranks(4, "test_two_level:case_sweep") == [[["flat", "two_level"], ["gloo"], [["gloo two_level"]]]] * 4


# ---- what is asked for, and what is refused; no ranks ----


@pytest.mark.parametrize(
    ("backend", "collective"),
    [(b, c) for b in ("gloo", "nccl") for c in ("exchange", "doubling", "pipeline")],
)
def test_the_native_transports_strategies_are_refused(backend: str, collective: Any) -> None:
    """Value, rule and fix."""
    words = f"collective: {collective} is the native transport's, backend {backend} has .*: use collective auto, flat"
    missing: Any = None
    with pytest.raises(ValueError, match=words):
        other_backend(backend, missing, TWO_BY_TWO, TorchGroups(), CommOptions(collective=collective), Ledger())


def _fake_dist(monkeypatch: pytest.MonkeyPatch, ranks: int, index: int) -> None:
    fake = SimpleNamespace(get_world_size=lambda group: ranks, get_rank=lambda group: index, all_reduce=None)
    monkeypatch.setattr(two_level, "dist", fake)


def test_who_goes_in_two_levels(monkeypatch: pytest.MonkeyPatch) -> None:
    """Both groups must be there, and the strategy asked for or chosen; then the size and its divisibility decide."""
    _fake_dist(monkeypatch, 8, 0)
    both, choose = {"intra": "i", "rail": "r"}, tuned.look_up(TABLE)

    def levels(collective: Any, given: Any = None, **more: Any) -> two_level.TwoLevel | None:
        emulation = Emulation("x", 0.0) if collective == "emulated" else None
        options = CommOptions(collective=collective, emulation=emulation, **more)
        return two_level.two_level(both, backends._takes(connecting._library_strategy(options, given), "two_level"))

    assert two_level.two_level({"intra": "i"}, lambda nbytes: True) is None
    assert two_level.two_level({"rail": "r"}, lambda nbytes: True) is None
    assert [levels("auto"), levels("flat", choose), levels("emulated", choose)] == [None] * 3
    assert [levels("auto", choose, deterministic=True), levels("two_level", deterministic=True)] == [None] * 2
    always, chosen = levels("two_level"), levels("auto", choose)
    assert always is not None
    assert chosen is not None
    sizes = [(8, True, False), (1024, True, False), (4096, True, True), (4097, False, False), (65_536, True, False)]
    for numel, by_name, by_table in sizes:
        x = torch.zeros(numel)
        assert (always.carries(x), chosen.carries(x)) == (by_name, by_table), numel
    assert chosen.carries(torch.zeros(2, 4096, dtype=torch.bfloat16)), "by bytes, not by numbers"


class _Told:
    """A bootstrap of rank 0, which the others agree with."""

    rank, size = 0, 4

    def __init__(self) -> None:
        self.said: list[bytes] = []

    def all_gather(self, payload: bytes) -> list[bytes]:
        self.said.append(payload)
        return [payload] * self.size

    def close(self) -> None:
        pass


@pytest.mark.parametrize("backend", ["gloo", "nccl"])
def test_the_engine_obeys_a_tuning_file_over_libraries(
    backend: Any, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Two levels from where they were measured to win; flat without a file (nothing is even asked), with one for
    another fabric, and inside a node."""
    here = discover(None).node
    pair = Fabric(tuple(replace(here, hostname=name) for name in ("a", "b")))
    pair.save(tmp_path / "fabric.json")
    shape, hosts = shape_of(pair, tuned.placed(pair, _deployment(tmp_path, backend, None), NODES), 0), NODES
    assert (shape.nodes, shape.per_node) == (2, 2)
    times: list[tuple[Strategy, float, float]] = [("flat", 1e-4, 1e-8), ("two_level", 2e-4, 5e-9)]
    points = [
        Point(strategy, nbytes, start + nbytes * each, shape)
        for nbytes in (1 << 12, 1 << 14, 1 << 16, 1 << 18)
        for strategy, start, each in times
    ]
    fitting = make(pair, shape, fit(points, backend), tuned.versions())
    fitting.save(tmp_path / "fits.json")
    replace(fitting, fabric="0" * 32).save(tmp_path / "other.json")

    def choice(file: str | None, nodes: tuple[str, ...] = hosts) -> list[str] | None:
        found = tuned.tuned_choice(_deployment(tmp_path, backend, file), _Told(), nodes, TWO_BY_TWO)
        return None if found is None else [found(n) for n in (1 << 12, 1 << 14, 1 << 16, 1 << 26)]

    assert choice("fits.json") == ["flat", "flat", "two_level", "two_level"]
    assert choice(None) is None
    assert choice("fits.json", ("a",) * 4) is None
    with caplog.at_level(logging.WARNING):
        assert choice("other.json") is None
    assert "made for another fabric" in caplog.text


NODES = ("a", "a", "b", "b")


def _deployment(folder: Path, backend: Any, file: str | None) -> Deployment:
    tuning = None if file is None else str(folder / file)
    return Deployment(
        model=ModelSection(path="nowhere"),
        parallel=ParallelConfig(tensor_parallel_size=4, backend=backend, tuning_file=tuning),
        launch=LaunchConfig(fabric=str(folder / "fabric.json")),
    )


def test_ranks_of_a_group_inside_a_node_gather_with_those_of_one_that_spans(tmp_path: Path) -> None:
    """Six ranks a host and groups of four: the second spans both hosts. Every rank takes part in the gathering, or the
    job would hang at its start."""
    nodes = ("a",) * 6 + ("b",) * 6
    here = discover(None).node
    Fabric(tuple(replace(here, hostname=name) for name in ("a", "b"))).save(tmp_path / "fabric.json")
    for layout in (GroupLayout(((0, 1, 2, 3),)), GroupLayout(((4, 5), (6, 7)))):
        for backend, file in (("native", None), ("gloo", "gone.json")):
            told = _Told()
            given = _deployment(tmp_path, backend, file)
            given = replace(given, parallel=replace(given.parallel, replicas=3))
            tuned.tuned_choice(given, told, nodes, layout)
            assert len(told.said) == 1, (layout, backend)


def case_unlike(rank: Rank) -> list[float]:
    """Two groups of one job, connected again and again: the first over two nodes, the second inside one."""
    rank.close_kept()
    mine = TWO_BY_TWO if rank.rank < 4 else GroupLayout(((4, 5, 6, 7),))
    sums = []
    with contextlib.ExitStack() as stack:
        for again in range(4):
            options = CommOptions(backend="gloo", collective="two_level", timeout_s=HANG_S)
            comm = stack.enter_context(connect(rank.bootstrap, mine, options))
            x = comm.all_reduce.start(torch.full((8,), float(rank.rank + again))).wait()
            assert bool(x.eq(x[0]).all())
            sums.append(float(x[0]))
            names = ["gloo two_level" if rank.rank < 4 else "gloo"]
            assert [entry.strategy for entry in comm.ledger.entries()] == names
            mine_named = [(g.group_name, dist.get_process_group_ranks(g)) for g in comm.subgroups.values()]
            told = rank.bootstrap.all_gather(json.dumps(mine_named).encode())
            named = {(name, *members) for data in told for name, members in json.loads(data)}
            assert len({name for name, *_ in named}) == len(named), "one name, under which two groups would meet"
    return sums


def test_groups_that_lie_otherwise_share_no_connections(ranks: Ranks) -> None:
    """Only those that span nodes have groups of a node and of a rail: nobody takes them for somebody else's."""
    answers = ranks(8, "test_two_level:case_unlike")
    assert answers == [[6.0 + 4 * again for again in range(4)]] * 4 + [[22.0 + 4 * again for again in range(4)]] * 4


def case_limits(rank: Rank) -> list[list[float]]:
    """What torch itself allows each group: as made, with a long limit, with a short one."""
    options = CommOptions(backend="gloo", collective="two_level", timeout_s=90, connect_timeout_s=70)
    limits = []
    with rank.connect(2, options) as comm:
        groups = (comm.tp, *(comm.subgroups[name] for name in ("intra", "rail", "gather")))
        for seconds in (None, 600.0, 0.2):
            if seconds is not None:
                comm.set_timeout(seconds)
            backends = [group._get_backend(torch.device("cpu")) for group in groups]
            limits.append(sorted({backend.options._timeout.total_seconds() for backend in backends}))
    return limits


def test_torch_allows_what_is_allowed(ranks: Ranks) -> None:
    """Else it ends a collective after the time to connect, whatever a slow node was given to load its weights. Never
    less than that: who waits says by itself when it was too long."""
    assert ranks(4, "test_two_level:case_limits") == [[[90.0], [600.0], [70.0]]] * 4


# ---- NCCL: what its stream is given to do. No GPU: streams and events are stand-ins, and gloo adds up ----


class _Streams:
    """torch.cuda as far as StreamCollective asks it: which stream is current, and who waited for what."""

    def __init__(self, patch: pytest.MonkeyPatch, capturing: bool = False) -> None:
        self.current, self.waits = "computing", list[str]()
        outer = self

        class Stream:
            def __init__(self, priority: int) -> None:
                assert priority == -1

            def wait_event(self, event: Any) -> None:
                outer.waits.append("side")

        class Event:
            def __init__(self, enable_timing: bool) -> None:
                assert enable_timing is not capturing

            def record(self, stream: Any = None) -> None:
                pass

            def query(self) -> bool:
                return True

            def elapsed_time(self, other: Any) -> float:
                return 1.0

        @contextlib.contextmanager
        def stream(side: Any) -> Iterator[None]:
            self.current = "side"
            yield
            self.current = "computing"

        computing = SimpleNamespace(wait_event=lambda event: self.waits.append("computing"))
        patch.setattr(gpu_stream, "_STREAM", Stream)
        patch.setattr(gpu_stream, "_EVENT", Event)
        patch.setattr(torch.cuda, "stream", stream)
        patch.setattr(torch.cuda, "current_stream", lambda: computing)
        patch.setattr(torch.cuda, "is_current_stream_capturing", lambda: capturing)
        patch.setattr(nccl, "_DEVICE", "cpu")

        def host_waits(*_: Any) -> None:
            raise AssertionError("the host must not wait")

        patch.setattr(torch.cuda, "synchronize", host_waits)


@pytest.mark.parametrize("capturing", [False, True])
def test_nccl_is_called_in_place_on_the_side_stream(monkeypatch: pytest.MonkeyPatch, capturing: bool) -> None:
    """Rank 5 of 8 on its node: three blocking calls in order, on the stream that is beside; the part lies in the whole
    where NCCL wants it for working in place, so that nothing is allocated. A
    message that does not divide is one call on the whole group."""
    _fake_dist(monkeypatch, 8, 5)
    calls: list[tuple[Any, ...]] = []
    streams = _Streams(monkeypatch, capturing)

    def called(name: str) -> Callable[..., None]:
        def call(*tensors: torch.Tensor, group: str, async_op: bool = False) -> None:
            assert not async_op, "that would go to a stream of the library's own"
            places = [(t.data_ptr(), t.numel()) for t in tensors]
            calls.append((name, group, streams.current, *places))

        return call

    monkeypatch.setattr(two_level, "_reduce_scatter", called("reduce_scatter"))
    monkeypatch.setattr(two_level, "_all_gather", called("all_gather"))
    monkeypatch.setattr("laddertron.topology.comm.two_level.dist.all_reduce", called("all_reduce"))
    monkeypatch.setattr("laddertron.topology.comm.nccl.dist.all_reduce", called("all_reduce"))
    levels = two_level.two_level({"intra": "intra", "rail": "rail"}, lambda nbytes: True)
    ledger = Ledger()
    assert levels is not None
    collective = nccl.nccl_collective("tp", ledger, "net", ways=[levels])
    x, odd = torch.zeros(4, 4096, dtype=torch.bfloat16), torch.zeros(4097)
    assert collective.start(x).wait() is x
    assert collective.start(odd).wait() is odd
    whole, part = (x.data_ptr(), 16_384), (x.data_ptr() + 5 * 2048 * 2, 2048)
    assert calls == [
        ("reduce_scatter", "intra", "side", part, whole),
        ("all_reduce", "rail", "side", part),
        ("all_gather", "intra", "side", whole, part),
        ("all_reduce", "tp", "side", (odd.data_ptr(), 4097)),
    ]
    assert streams.waits == ["side", "computing"] * 2
    counted = {entry.strategy: (entry.count, entry.bytes) for entry in ledger.entries()}
    assert counted == ({} if capturing else {"nccl two_level": (1, x.nbytes), "nccl": (1, odd.nbytes)})


@pytest.mark.parametrize("capturing", [False, True])
def test_what_is_waited_for_at_once_stays_on_the_computing_stream(
    monkeypatch: pytest.MonkeyPatch, capturing: bool
) -> None:
    """No event to another stream and none back; counted and timed as in flight for as long as it was waited for."""
    calls: list[str] = []
    streams = _Streams(monkeypatch, capturing)
    monkeypatch.setattr("laddertron.topology.comm.nccl.dist.all_reduce", lambda x, group: calls.append(streams.current))
    ledger, x = Ledger(), torch.zeros(16)
    collective = nccl.nccl_collective("tp", ledger, "net")
    assert collective.start(x, "standard mlp", True).wait() is x
    assert collective.start(x, "ladder mlp").wait() is x
    assert calls == ["computing", "side"]
    assert streams.waits == ["side", "computing"]
    assert ledger.started == 2
    found = {entry.layer: entry.hidden_s for entry in ledger.entries()}
    assert found.keys() == (set() if capturing else {"standard mlp", "ladder mlp"})
    assert found.get("standard mlp", 0.0) == 0.0


def case_nccl_over_gloo(rank: Rank) -> list[str]:
    """The NCCL path's own code over gloo's groups: its sums, hashed, held to the exact ones."""
    digests = []
    with rank.connect(2, CommOptions(backend="gloo")) as comm, pytest.MonkeyPatch.context() as patch:
        _Streams(patch)
        ledger = Ledger()
        choose = tuned.look_up(TABLE)
        levels = two_level.two_level(comm.subgroups, lambda nbytes: choose(nbytes) == "two_level")
        assert levels is not None
        collective = nccl.nccl_collective(comm.tp, ledger, "net", ways=[levels])
        for count in (1000, 2000, 2001, 16_000, 16_001, 20_000):
            parts = _parts(rank.size, count, "float32", count)
            x = collective.start(parts[rank.rank].clone()).wait()
            scale = torch.stack(parts).double().abs().sum(0).clamp_min(1e-3)
            assert ((x.double() - torch.stack(parts).double().sum(0)).abs() / scale).max() <= 1e-6
            digests.append(hashlib.sha256(x.numpy().tobytes()).hexdigest())
        counts = {entry.strategy: entry.count for entry in ledger.entries()}
        assert counts == {"nccl": 4, "nccl two_level": 2}, counts
    return digests


def test_the_nccl_path_adds_up(ranks: Ranks) -> None:
    first, *others = ranks(4, "test_two_level:case_nccl_over_gloo")
    assert all(answer == first for answer in others)


def test_a_lost_peer_is_told_from_a_late_one() -> None:
    """What the thread met is raised where the sum is awaited, as gloo's own words would be."""
    from laddertron.topology.comm.backends import _guard

    aside = two_level.SerialExecutor()

    def broken() -> None:
        raise RuntimeError("something else")

    call = aside.submit(broken)
    with pytest.raises(CommunicationError, match="collective 7: something else"):
        _guard(lambda: call.wait(timedelta(seconds=HANG_S)), 7)
    two_level.end_all(aside)
