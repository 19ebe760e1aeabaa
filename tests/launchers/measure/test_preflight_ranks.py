"""What a rank of preflight does before and after the measuring: whom it blames, how it ends. No other ranks."""

from __future__ import annotations

import contextlib
import io
import json
import os
import threading
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import asdict, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import click
import pytest
import torch
from laddertron.engine.config.schema import Deployment, EngineConfig, ModelSection, ParallelConfig
from laddertron.launchers.cli.commands import preflight as door
from laddertron.launchers.cli.commands.preflight import show
from laddertron.launchers.measure import preflight, preflight_links
from laddertron.launchers.measure.preflight_job import MEET_S, START_S, Watch
from laddertron.launchers.measure.preflight_plan import NodeTransport, RankReport
from laddertron.topology.comm.bootstrap import MpiBootstrap
from laddertron.topology.comm.nccl import nccl_log, nccl_log_path
from laddertron.topology.cost.cost import Shape
from laddertron.topology.hardware.discover import discover
from laddertron.topology.hardware.fabric import Fabric
from laddertron.topology.placement.identity import Identity, IdentityError
from laddertron.topology.placement.world import World
from rich.console import Console
from waiting import HANG_S

SECOND = Identity(2, 1, 0, 1, "n1", "openmpi")


class Gathered:
    """Rank 1 of two; rank 0 says what this one says, changed."""

    rank, size = 1, 2

    def __init__(self, change: Callable[[dict[str, Any]], dict[str, Any]]) -> None:
        self.change = change

    def all_gather(self, payload: bytes) -> list[bytes]:
        said = json.loads(payload)
        other = {**said, **({"rank": 0} if "rank" in said else {}), "hostname": "n0", **self.change(said)}
        return [json.dumps(other).encode(), payload]

    def close(self) -> None:
        pass


class Exited(BaseException):
    """os._exit was called: its code."""


@pytest.fixture
def exits(monkeypatch: pytest.MonkeyPatch) -> None:
    def leave(code: int) -> None:
        raise Exited(code)

    monkeypatch.setattr("os._exit", leave)


def deployment(size: int = 2) -> Deployment:
    return Deployment(
        model=ModelSection(path="nowhere"),
        parallel=ParallelConfig(tensor_parallel_size=size),
        engine=EngineConfig(device="cpu"),
    )


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda said: {"config": "c0ffee"}, "on the others c0ffee: start all ranks with one file"),
        (lambda said: {"versions": {**said["versions"], "torch": "1.0"}}, "on the others 1.0: install one torch"),
    ],
    ids=["config", "torch"],
)
def test_other_ranks_are_judged_before_anything_else(
    monkeypatch: pytest.MonkeyPatch, change: Callable[[dict[str, Any]], dict[str, Any]], words: str
) -> None:
    """Even where the file also has another size of the job in it: what differs is named with rank and host, and nothing
    was connected."""
    monkeypatch.setattr(preflight, "watched_bootstrap", lambda *_: Gathered(change))
    monkeypatch.setattr(preflight, "connect", None)
    with pytest.raises(preflight.UnlikeRanks, match=r"^error: rank 1 on n1: ") as caught:
        preflight.run_preflight(deployment(4), SECOND)
    assert words in str(caught.value)


def test_ranks_alike_and_too_few_each_say_so(
    monkeypatch: pytest.MonkeyPatch, exits: None, capsys: pytest.CaptureFixture[str]
) -> None:
    """One file on all, and it wants four: every rank says that with its host, and ends with 2."""
    monkeypatch.setattr(preflight, "watched_bootstrap", lambda *_: Gathered(lambda said: {}))
    with pytest.raises(IdentityError):
        preflight.run_preflight(deployment(4), SECOND)
    with pytest.raises(Exited, match="2"):
        door.be_rank(deployment(4), SECOND, None, False)
    assert "error: rank 1 on n1: openmpi started 2 ranks, tensor_parallel_size=4 needs 4" in capsys.readouterr().err


def test_a_result_that_could_not_be_saved_is_refused_before_the_measuring(
    monkeypatch: pytest.MonkeyPatch, exits: None, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    monkeypatch.setattr(preflight, "run_preflight", None)
    first = replace(SECOND, rank=0, local_rank=0)
    for save in (tmp_path / "none" / "t.json", tmp_path):
        with pytest.raises(Exited, match="2"):
            door.be_rank(deployment(), first, save, False)
        assert f"--save {save}: cannot write there" in capsys.readouterr().err


def test_a_file_that_one_rank_cannot_read_is_named_with_the_rank(
    monkeypatch: pytest.MonkeyPatch, exits: None, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    monkeypatch.setattr(door, "identify", lambda: SECOND)
    with pytest.raises(Exited, match="2"):
        click.Context(door.command).invoke(door.command, config=str(tmp_path / "gone.yaml"), save=None, overrides=())
    assert "error: rank 1 on n1: " in (said := capsys.readouterr().err)
    assert "gone.yaml" in said


def test_the_tuning_is_the_slowest_groups() -> None:
    """Two groups of two, each on its node: the second's all-reduces take twice as long, on another kind of host. Its
    points and its host are in the file."""
    here = discover(None).node
    fabric = Fabric((replace(here, hostname="a"), replace(here, hostname="b", cpu="slow")))
    shapes = [Shape(1, 2)] * 2
    sizes = (1 << 10, 1 << 15, 1 << 20)

    def said(rank: int) -> bytes:
        report = RankReport(rank, "ab"[rank // 2], NodeTransport(), 0.0, 1e-3)
        sweep = [("exchange", n, (1 + rank // 2) * (1e-5 + n * 1e-9)) for n in sizes]
        return json.dumps({"report": asdict(report), "links": [], **({} if rank % 2 else {"sweep": sweep})}).encode()

    found = preflight.judged_outcome(
        deployment(), World(2).on("aabb"), fabric, shapes, "native", [said(rank) for rank in range(4)]
    )
    assert found.tuning is not None
    assert found.group == 1
    assert [t["cpu"] for t in found.tuning.traits] == ["slow"]
    assert [p.seconds for p in found.tuning.points] == [2 * (1e-5 + n * 1e-9) for n in sizes]
    stream = io.StringIO()
    show(found, None, Console(file=stream, width=120))
    assert "the slowest of 2 groups: ranks 2 to 3" in stream.getvalue()


def test_each_backend_says_its_own_name(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Between nodes; NCCL alone has a log to read, and counts as sockets until that says otherwise."""
    monkeypatch.setattr(preflight_links, "matmul_s", lambda device: 1e-3)
    silent = SimpleNamespace(rank=1, size=2, all_gather=lambda payload: [payload] * 2)
    (tmp_path / "log").write_text("x NCCL INFO Using network IB\n")

    def used(backend: Any, spans: bool = True, log: Path | None = None) -> str:
        bootstrap: Any = silent
        report = preflight_links.report(SECOND, bootstrap, backend, torch.device("cpu"), spans, log)
        return report.transport.used

    assert [used(backend) for backend in ("native", "gloo")] == ["native", "gloo"]
    assert [used("nccl"), used("nccl", log=tmp_path / "log")] == ["NET/Socket", "NET/IB"]
    assert used("native", spans=False) == ""


def test_nccls_log_is_removed(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Also where measuring fails; who asked for it before keeps it."""
    for name in ("NCCL_DEBUG", "NCCL_DEBUG_SUBSYS", "NCCL_DEBUG_FILE"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    failed = False
    with contextlib.suppress(RuntimeError), nccl_log("INIT") as log:
        assert log is not None
        assert os.environ["NCCL_DEBUG_FILE"] == str(log)
        log.write_text("x")
        failed = True
        raise RuntimeError("no communicator")
    assert failed
    assert list(tmp_path.iterdir()) == []
    assert "NCCL_DEBUG" not in os.environ
    monkeypatch.setenv("NCCL_DEBUG", "WARN")
    with nccl_log("INIT") as log:
        assert log is None
    assert os.environ["NCCL_DEBUG"] == "WARN"


def test_nccls_log_goes_with_a_rank_that_ends_itself(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    ended = threading.Event()
    said: list[str] = []

    def give_up(words: str) -> None:
        said.append(words)
        ended.set()

    def hangs(_: Deployment, __: Identity, ___: object, watch: Watch) -> tuple[int, None]:
        nccl_log_path().write_text("x")
        with watch.over(lambda: "nothing came", 0.01):
            assert ended.wait(HANG_S)
        return 1, None

    monkeypatch.setattr(preflight, "watched_bootstrap", lambda identity, watch: None)
    monkeypatch.setattr(preflight, "_measure", hangs)
    assert preflight.run_preflight(deployment(), SECOND, give_up) == (1, None)
    assert said == ["nothing came (allowed: 0 s)"]
    assert list(tmp_path.iterdir()) == []


def test_rank_0_speaks_before_those_that_wait_for_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """It alone knows who is missing: the others give it longer than it may enter later than they did. MPI's start is
    left to whoever holds the job, who can tell a host that starts late from one that is cut off."""
    limits = dict[int, float]()
    monkeypatch.setattr(MpiBootstrap, "__init__", lambda self: None)
    monkeypatch.setattr(MpiBootstrap, "star_gather", lambda self, payload: [payload])
    alarms: list[int] = []
    monkeypatch.setattr("signal.alarm", alarms.append)
    for rank in range(3):
        watch = Watch(30.0, print)
        monkeypatch.setattr(
            watch, "over", lambda words, limit, rank=rank: limits.update({rank: limit}) or nullcontext()
        )
        star: Any = preflight.watched_bootstrap(SECOND, watch)
        star.rank = rank
        assert star.all_gather(b"x") == [b"x"]
    assert limits[1] == limits[2] == limits[0] + 10.0
    assert alarms[1] == 0
    assert alarms[0] > START_S + MEET_S
