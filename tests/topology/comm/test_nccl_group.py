"""A group over NCCL: how it connects, how it ends, and whom it names when a collective does not end. No GPU: torch's
calls, events and store are stand-ins."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from laddertron.engine.step.cuda_graphs import StepGraphs
from laddertron.topology.comm import nccl
from laddertron.topology.comm.collectives import Alone, AloneGather, CollectiveTimeout, PeerLost
from laddertron.topology.comm.groups import Communicator, TorchGroups
from laddertron.topology.comm.ledger import Ledger
from laddertron.topology.comm.lines import PlanChannel
from laddertron.topology.comm.nccl import DeviceWait, Roll, describe_paths, join, verdict
from laddertron.topology.placement.layout import GroupLayout

HOSTS = ("node-a", "node-a", "node-b", "node-b")


def test_who_is_blamed() -> None:
    """One that does not answer, one that stands behind, all of them where several do, the links where none does; an
    error of NCCL's is a lost peer."""
    silent = verdict("gather", 30.0, 812, {0: 812, 1: 812, 3: 812}, HOSTS)
    assert isinstance(silent, CollectiveTimeout)
    assert str(silent) == "gather (collective 812) did not end in 30 s: rank 2 on node-b does not answer"
    assert (silent.peer, silent.seq) == (2, 812)
    behind = verdict("gather", 30.0, 812, {0: 812, 1: 790, 2: 812, 3: 812}, HOSTS)
    assert "rank 1 on node-a set off 790 collectives, this rank 812" in str(behind)
    assert behind.peer == 1
    several = verdict("gather", 30.0, 5, {0: 5, 1: 5}, HOSTS)
    assert "rank 2 on node-b, rank 3 on node-b do not answer" in str(several)
    assert several.peer == -1
    assert "look at the links" in str(verdict("gather", 30.0, 5, dict.fromkeys(range(4), 5), HOSTS))
    lost = verdict("gather", 30.0, 5, {0: 5, 1: 5, 2: 5}, HOSTS, "REMOTE_ERROR")
    assert isinstance(lost, PeerLost)
    assert str(lost) == "NCCL reports REMOTE_ERROR in gather (collective 5): rank 3 on node-b does not answer"


class Store(dict[str, str]):
    """torch's, of one process; with `gone`, of a rank that has ended."""

    gone = False

    def set(self, key: str, value: str) -> None:
        if self.gone:
            raise RuntimeError("Connection reset by peer")
        self[key] = value

    def check(self, keys: list[str]) -> bool:
        return all(key in self for key in keys)


def test_ranks_that_waited_in_vain_tell_one_another_where_they_stand() -> None:
    """Ranks 1 and 3 have written their places; rank 2 never does. A store that is gone leaves this rank's own."""
    store = Store({"laddertron/place/0/1": "7", "laddertron/place/0/3": "6"})
    roll = Roll(store, 0, HOSTS)
    assert roll.call(7, grace_s=0.05) == {0: 7, 1: 7, 3: 6}
    assert store["laddertron/place/0/0"] == "7"
    store.gone = True
    assert roll.call(7, grace_s=0.05) == {0: 7}
    assert Roll(None, 0, HOSTS).call(7) == {0: 7}


class Event:
    """Over after so many looks."""

    def __init__(self, looks: float) -> None:
        self.looks = looks

    def query(self) -> bool:
        self.looks -= 1
        return self.looks < 0


def waiting(error: str = "SUCCESS", timeout_s: float = 1e-4) -> tuple[DeviceWait, Ledger]:
    """Over two groups, of which the second has the error."""
    ledger = Ledger()
    ledger.started = 9

    def group_of(name: str) -> Any:
        backend = SimpleNamespace(get_error=lambda: SimpleNamespace(name=name), _comm_ptr=lambda: 0)
        return SimpleNamespace(_get_backend=lambda device: backend)

    groups = [group_of("SUCCESS"), group_of(error)]
    return DeviceWait(groups, ledger, [timeout_s], Roll(Store({"laddertron/place/0/1": "9"}), 0, HOSTS[:3])), ledger


def test_a_wait_ends_with_its_event() -> None:
    wait, ledger = waiting(timeout_s=1e6)
    wait(Event(3), "gather")
    assert ledger.waiting == ""


@pytest.mark.parametrize(("error", "kind"), [("SUCCESS", CollectiveTimeout), ("REMOTE_ERROR", PeerLost)])
def test_a_wait_in_vain_names_the_rank(error: str, kind: type, monkeypatch: pytest.MonkeyPatch) -> None:
    """After its time, or as soon as NCCL reports an error; what was waited for stays for the heartbeat. Kernels that
    wait for ever are ended."""
    monkeypatch.setattr(nccl, "GRACE_S", 0.05)
    monkeypatch.setattr(nccl, "_ASK_S", 0.0)
    wait, ledger = waiting(error, 1e6 if error != "SUCCESS" else 1e-4)
    ended: list[str] = []
    wait.aborts.append(lambda: ended.append("one_shot"))
    with pytest.raises(kind, match=r"gather \(collective 9\).*rank 2 on node-b does not answer"):
        wait(Event(float("inf")), "gather")
    assert ended == ["one_shot"]
    assert ledger.waiting == "gather"


@pytest.mark.parametrize("answers", [True, False])
def test_a_group_that_waits_for_the_stage_before_names_it(answers: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Rather than its own links; but a rank of the group that is missing is named first."""
    monkeypatch.setattr(nccl, "GRACE_S", 0.05)
    ledger, store = Ledger(), Store({"laddertron/place/0/1": "0"} if answers else {})
    wait = DeviceWait([], ledger, [1e-4], Roll(store, 0, HOSTS[:2]))
    wait.late = lambda: ("hidden rows from stage 0 (rank 5) did not come", 5)
    with pytest.raises(CollectiveTimeout) as caught:
        wait(Event(float("inf")), "gather")
    assert ("did not end in 0.0001 s: hidden rows from stage 0 (rank 5) did not come" in str(caught.value)) is answers
    assert ("rank 1 on" in str(caught.value)) is not answers
    assert (caught.value.peer, caught.value.rank) == ((-1, 5) if answers else (1, -1))


def test_a_communicator_is_asked_itself(monkeypatch: pytest.MonkeyPatch) -> None:
    """torch knows of no error, because a replay makes no Work; NCCL's own answer names the lost peer at once."""
    asked: list[int] = []

    class Library:
        def __init__(self, result: int, error: int) -> None:
            self._result, self._error = result, error

        def ncclCommGetAsyncError(self, communicator: Any, error: Any) -> int:
            asked.append(communicator.value)
            error._obj.value = self._error
            return self._result

    cases = {(0, 0): "", (0, 7): "", (0, 6): "REMOTE_ERROR", (2, 0): "SYSTEM_ERROR", (0, 99): "error 99"}
    assert {case: nccl.communicator_error(4096, Library(*case)) for case in cases} == cases
    assert nccl.communicator_error(0) == ""
    assert asked == [4096] * len(cases)
    wait, _ = waiting(timeout_s=1e6)
    monkeypatch.setattr(nccl, "GRACE_S", 0.05)
    monkeypatch.setattr(nccl, "_ASK_S", 0.0)
    monkeypatch.setattr(nccl, "communicator_error", lambda communicator: "REMOTE_ERROR")
    with pytest.raises(PeerLost, match="NCCL reports REMOTE_ERROR"):
        wait(Event(float("inf")), "gather")


def test_what_carries_messages() -> None:
    """NCCL's lines of two ranks on one node and one on another, channels and directions put together."""
    first = (
        "a:1:2 [0] NCCL INFO Channel 00/0 : 0[0] -> 1[1] via P2P/CUMEM\n"
        "a:1:2 [0] NCCL INFO Channel 01/0 : 0[0] -> 1[1] via P2P/CUMEM\n"
        "a:1:2 [0] NCCL INFO Connected all rings\n"
    )
    second = "a:1:3 [1] NCCL INFO Channel 00/0 : 1[1] -> 2[0] [send] via NET/IB/0/GDRDMA\n"
    assert describe_paths([first, second, ""]) == "NET/IB/0/GDRDMA 1-2; P2P/CUMEM 0-1"
    assert "did not say" in describe_paths(["", ""])


@pytest.fixture
def no_debug(monkeypatch: pytest.MonkeyPatch, tmp_path: Any) -> Iterator[None]:
    for name in ("NCCL_DEBUG", "NCCL_DEBUG_SUBSYS", "NCCL_DEBUG_FILE"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    yield
    assert list(tmp_path.iterdir()) == []


@pytest.mark.usefixtures("no_debug")
def test_it_connects_by_a_collective_that_is_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    """One small all-reduce, flat and in two levels, then the host's wait; what NCCL logged meanwhile comes back, and
    its log is gone."""
    calls: list[str] = []

    def all_reduce(x: Any, group: Any) -> None:
        calls.append(f"all_reduce {len(x)}")
        with open(os.environ["NCCL_DEBUG_FILE"], "a") as log:
            log.write("NCCL INFO Channel 00/0 : 0[0] -> 1[1] via SHM/direct/direct\n" * 2)

    class Levels:
        ranks = 2

        def __call__(self, x: Any) -> None:
            calls.append(f"two_level {len(x)}")

    levels: Any = Levels()
    monkeypatch.setattr(nccl, "_DEVICE", "cpu")
    monkeypatch.setattr("laddertron.topology.comm.nccl.dist.all_reduce", all_reduce)
    waits: Any = lambda event, what: calls.append(what)  # noqa: E731
    said = join(None, levels, waits)
    assert calls == ["all_reduce 1", "two_level 2", "the first all-reduce"]
    assert describe_paths([said]) == "SHM/direct/direct 0-1"


class Sender:
    def __init__(self, log: list[str]) -> None:
        self._log = log

    def close(self) -> None:
        self._log.append("channel")


def group(log: list[str], backend: str = "nccl") -> Communicator:
    return Communicator(
        0, GroupLayout(((0,),)), backend, Alone(), AloneGather(), PlanChannel(0, (None,)), Ledger(),
        TorchGroups(end=lambda: log.append("torch's groups")), [Sender(log).close], lambda seconds: None,
    )  # fmt: skip


class Recorder:
    def __init__(self, log: list[str]) -> None:
        self._log = log

    def wait(self) -> None:
        self._log.append("device")


def graphs_of(log: list[str]) -> StepGraphs:
    """A recorded step and a recorded draw that say when the last reference to one is gone."""

    class Graph:
        def __call__(self) -> None: ...

        def __del__(self) -> None:
            log.append("graph")

    graphs = StepGraphs.__new__(StepGraphs)
    recorder: Any = Recorder(log)
    replays: Any = {(1, 0): Graph()}
    graphs._recorder, graphs._replays, graphs._draws = recorder, replays, {1: Graph()}
    return graphs


def test_graphs_go_before_the_groups_that_they_captured() -> None:
    log: list[str] = []
    graphs = graphs_of(log)
    with group(log) as communicator:
        communicator.before_close(graphs.drop)
    communicator.close()
    assert log == ["device", "graph", "graph", "channel", "torch's groups"]


def test_graphs_that_are_gone_already_hold_nothing_up() -> None:
    """Somebody built a second runner on the group: the first one's graphs went with it."""
    log: list[str] = []
    with group(log) as communicator:
        graphs = graphs_of(log)
        communicator.before_close(graphs.drop)
        del graphs
    assert log == ["graph", "graph", "channel", "torch's groups"]


@pytest.mark.parametrize(("backend", "ends"), [("nccl", []), ("gloo", ["torch's groups"])])
def test_after_an_error_nccls_groups_are_left(backend: str, ends: list[str]) -> None:
    """Ending them would wait for peers that never come, and for graphs; the error leaves at once."""
    log: list[str] = []
    with pytest.raises(ZeroDivisionError), group(log, backend):
        raise ZeroDivisionError
    assert log == ["channel", *ends]


def test_a_group_of_one_needs_no_collective() -> None:
    """Neither NCCL's nor the host's: x is its own sum, on whatever device, in whatever layout."""
    x = torch.arange(6.0).view(2, 3).t()
    assert Alone().start(x).wait() is x
    payload = x.numpy().tobytes()
    gathered = AloneGather().start(np.frombuffer(payload, "u1")).wait()
    assert gathered.shape == (1, 24)
    assert gathered[0].tobytes() == payload


NCCL_ALONE = """
import time, torch, torch.distributed as dist
from laddertron.engine.step.cuda_graphs import CudaRecorder
from laddertron.topology.comm.ledger import Ledger
from laddertron.topology.comm.nccl import DeviceWait, NcclGather, Roll, join, nccl_collective

device, ledger = torch.device("cuda", 0), Ledger()
torch.cuda.set_device(device)
dist.init_process_group("nccl", store=dist.HashStore(), rank=0, world_size=1)
group = dist.group.WORLD
wait = DeviceWait([group], ledger, [30.0], Roll(None, 0, ["here"]))
join(group, None, wait)
collective, x = nccl_collective(group, ledger, "node"), torch.zeros(8, 4096, dtype=torch.bfloat16, device=device)

def step():
    x.add_(1.0)
    collective.start(x, "", True).wait()
    collective.start(x).wait()

recorder = CudaRecorder(device, ledger)
replay = recorder.record(step)
x.zero_()
for _ in range(5):
    replay()
assert NcclGather(group, ledger, wait).start(x[0, :2].float().cpu().numpy().view("u1")).wait().shape == (1, 8)
assert bool((x == 5.0).all())
began = time.monotonic()
recorder.wait()
del replay, recorder
dist.destroy_process_group()
print(time.monotonic() - began)
"""


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
def test_nccl_in_graphs_and_an_end_within_two_seconds() -> None:
    """A group of one that does use NCCL: on both streams, recorded and replayed; it ends when its graph has gone."""
    done = subprocess.run([sys.executable, "-c", NCCL_ALONE], capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stderr
    assert float(done.stdout.split()[-1]) < 2.0
