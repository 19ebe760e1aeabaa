"""Work on GPU streams is ordered and its memory kept: the boundary between stages, all-reduces on their own stream, two
levels, gathers of tensors and recorded graphs, held to a vector-clock checker without a GPU."""

from __future__ import annotations

import contextlib
import gc
from typing import Any

import pytest
import torch
import torch.distributed as dist
from laddertron.engine.step.cuda_graphs import CudaRecorder
from laddertron.topology.comm import gpu_stream, nccl, nccl_boundary, two_level
from laddertron.topology.comm.ledger import Ledger
from stream_order import Event, NcclGroup, Stream, StreamOrder, checked

MODULES = (gpu_stream, nccl, nccl_boundary)


# ---- the checker fires, and only where it should ----


def test_the_checker_finds_an_unordered_read(monkeypatch: pytest.MonkeyPatch) -> None:
    with checked(monkeypatch) as order:
        side, x = Stream(order), torch.zeros(4)
        with order.on(side):
            y = x + 1
        assert [fault.split(":")[0] for fault in order.faults] == ["aten.add.Tensor"]
        order.faults.clear()
        event = Event(order)
        event.record(side)
        order.current.wait_event(event)
        y.add_(x)
        assert not order.faults


def test_the_checker_finds_an_event_recorded_too_early(monkeypatch: pytest.MonkeyPatch) -> None:
    with checked(monkeypatch) as order:
        x, side, early = torch.zeros(4), Stream(order), Event(order)
        early.record(side)
        side.wait_stream(order.current)
        with order.on(side):
            x.add_(1)
        order.current.wait_event(early)
        _ = x + 1
        assert order.faults == ["aten.add.Tensor: read unordered with aten.add_.Tensor"]


@pytest.mark.parametrize("keeps", ["nothing", "record_stream", "wait"])
def test_the_checker_finds_memory_freed_in_use(monkeypatch: pytest.MonkeyPatch, keeps: str) -> None:
    with checked(monkeypatch) as order:
        x, side = torch.zeros(4), Stream(order)
        side.wait_stream(order.current)
        with order.on(side):
            x.add_(1)
        if keeps == "record_stream":
            x.record_stream(side)  # type: ignore[arg-type]
        if keeps == "wait":
            order.current.wait_stream(side)
        del x
        order.sweep()
        assert len(order.faults) == (keeps == "nothing")


# ---- what the engine does ----


@pytest.mark.parametrize("ahead", [1, 2])
def test_received_rows_are_there_before_they_are_read(monkeypatch: pytest.MonkeyPatch, ahead: int) -> None:
    """The receive runs on a stream of NCCL's own: its Work is waited for before the event that the reader waits for."""
    with checked(monkeypatch, *MODULES) as order:
        boundary = nccl_boundary.NcclBoundary(NcclGroup(order, 1, 2), NcclGroup(order, 0, 2), Ledger())
        for pending in boundary.receive((3, 5), torch.float32, ahead):
            rows = pending.wait()
            rows.add_(1)
        del rows, pending
    assert order.faults == []


def test_rows_that_do_not_come_are_said_to_be_late(monkeypatch: pytest.MonkeyPatch) -> None:
    with checked(monkeypatch, *MODULES) as order:
        boundary = nccl_boundary.NcclBoundary(NcclGroup(order, 1, 2), NcclGroup(order, 0, 2), Ledger(), previous=7)
        assert boundary.late() is None
        boundary.receive((3, 5), torch.float32, 1)
        assert boundary.late() is None
        monkeypatch.setattr(Event, "query", lambda event: False)
        assert boundary.late() == ("hidden rows from stage 0 (rank 7) did not come", 7)


def test_sent_rows_are_kept_until_they_are_gone(monkeypatch: pytest.MonkeyPatch) -> None:
    """The share is freed by the host while NCCL still reads it: the stream that it is recorded on has to end later."""
    with checked(monkeypatch, *MODULES) as order:
        boundary = nccl_boundary.NcclBoundary(NcclGroup(order, 0, 2), NcclGroup(order, 0, 2), Ledger())
        x = torch.zeros(3, 5)
        boundary.send(x)
        x.add_(1)
        boundary.send(x)
    assert order.faults == []


@pytest.mark.parametrize(("stage", "calls"), [(0, ["send 1"]), (1, ["recv 0", "send 2"]), (2, ["recv 1"])])
def test_stages_connect_before_free_memory_is_counted(
    monkeypatch: pytest.MonkeyPatch, stage: int, calls: list[str]
) -> None:
    """One message with each neighbour, so that NCCL makes its communicators now."""
    made: list[str] = []

    class Rail(NcclGroup):
        def send(self, tensors: Any, peer: int, tag: int) -> Any:
            made.append(f"send {peer}")
            return super().send(tensors, peer, tag)

        def recv(self, tensors: Any, peer: int, tag: int) -> Any:
            made.append(f"recv {peer}")
            return super().recv(tensors, peer, tag)

    with checked(monkeypatch, *MODULES) as order:
        nccl_boundary.NcclBoundary(Rail(order, stage, 3), NcclGroup(order, 0, 2), Ledger()).connect()
    assert made == calls
    assert order.faults == []


@pytest.mark.parametrize("capturing", [False, True])
@pytest.mark.parametrize("how", ["flat", "two_level", "deterministic"])
def test_sums_are_there_before_they_are_read(monkeypatch: pytest.MonkeyPatch, how: str, capturing: bool) -> None:
    """All-reduces in flight while the current stream computes on other memory, inside and outside of a capture."""
    with checked(monkeypatch, *MODULES) as order:
        monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: capturing)
        monkeypatch.setattr(two_level, "_all_gather", dist.all_gather_into_tensor)

        def scatter(part: Any, whole: Any, group: NcclGroup, async_op: bool) -> Any:
            return group.collective("ncclReduceScatter", [whole], [part], async_op)

        monkeypatch.setattr(two_level, "_reduce_scatter", scatter)
        tp = NcclGroup(order, 0, 2)
        levels = two_level.TwoLevel(tp, NcclGroup(order, 0, 2), lambda size: True) if how == "two_level" else None
        reduce = nccl.nccl_collective(tp, Ledger(), "net", how == "deterministic", () if levels is None else (levels,))
        x, y = torch.zeros(4, 8), torch.zeros(4, 8)
        flying = [reduce.start(x), reduce.start(y)]
        z = torch.ones(4, 8) * 2
        for pending in flying:
            z += pending.wait()
        z += reduce.start(z.clone(), "", True).wait()
        del x, y, flying, pending
    assert order.faults == []


def test_a_sum_that_is_not_waited_for_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    with checked(monkeypatch, *MODULES) as order:
        x = torch.zeros(4)
        flying = nccl.nccl_collective(NcclGroup(order, 0, 2), Ledger(), "net").start(x)
        _ = x + 1
        assert order.faults == ["aten.add.Tensor: read unordered with ncclAllReduce"]
        flying.wait()


def test_gathered_tensors_are_there(monkeypatch: pytest.MonkeyPatch) -> None:
    with checked(monkeypatch, *MODULES) as order:
        wait: Any = None
        gather = nccl.NcclGather(NcclGroup(order, 0, 2), Ledger(), wait)
        _ = gather.gather_tensor(torch.zeros(6)).clone()
        gc.collect()
    assert order.faults == []


def test_a_recorded_step_comes_after_what_it_reads(monkeypatch: pytest.MonkeyPatch) -> None:
    """Warm-up and capture on the recorder's stream, before and after work of the current one. A capture between replays
    starts no collective, and comes after the wait for those in flight, whose timeout is not the device's."""
    with checked(monkeypatch, *MODULES) as order:

        @contextlib.contextmanager
        def graph(recorded: Any, pool: Any, stream: Stream, capture_error_mode: str) -> Any:
            calls.append("capture")
            stream.wait_stream(order.current)  # torch.cuda.graph synchronises the device first
            with order.on(stream):
                yield
            order.current.wait_stream(stream)

        calls = list[str]()
        monkeypatch.setattr(torch.cuda, "Stream", lambda device: Stream(order))
        monkeypatch.setattr(torch.cuda, "graph_pool_handle", lambda: None)
        monkeypatch.setattr(torch.cuda, "CUDAGraph", lambda: type("Graph", (), {"replay": lambda graph: None})())
        monkeypatch.setattr(torch.cuda, "graph", graph)
        monkeypatch.setattr(torch.cuda, "synchronize", lambda device: calls.append("synchronize"))
        reduce, rows = nccl.nccl_collective(NcclGroup(order, 0, 2), ledger := Ledger(), "net"), torch.zeros(4, 8)

        def compute() -> None:
            rows.copy_(reduce.start(rows * 2).wait())

        recorder = CudaRecorder(torch.device("cpu"), ledger, lambda: calls.append("drain"))
        replay = recorder.record(compute)
        rows.add_(1)
        assert ledger.started == 2  # by two runs to warm up; the capture started none
        for _ in range(3):
            replay()
        again = recorder.capture(compute)
        assert ledger.started == 5
        again()
        replay()
    assert order.faults == []
    assert ledger.started == 7
    assert calls == 2 * ["drain", "synchronize", "capture"]


def test_the_stand_in_runs_point_to_point_on_its_own_stream(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without `wait`, what was received may not be read; with it, it may."""
    with checked(monkeypatch) as order:
        group, x = NcclGroup(order, 1, 2), torch.zeros(4)
        work = group.recv([x], 0, 0)
        assert isinstance(order, StreamOrder)
        _ = x + 1
        assert order.faults == ["aten.add.Tensor: read unordered with ncclRecv"]
        order.faults.clear()
        work.wait()
        _ = x + 1
        assert order.faults == []
