"""What a rank's heartbeat says: counts of collectives, the one waited in, times of steps, the host's figures."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from engine_cases import build_on, deployment, request
from fake_model import FakeRunner
from laddertron.engine.batch import Batch, StepResult, encode
from laddertron.engine.job import MetricRow
from laddertron.engine.metrics.histogram import STEP_TOKENS, Buckets
from laddertron.engine.request import BATCH, INTERACTIVE, Request
from laddertron.engine.schedule.scheduler import Scheduler, SchedulerLimits
from laddertron.engine.step.engine import Ahead, Engine, StepProgress, drain, follow
from laddertron.launchers.control.messages import Cancel, Command, Shutdown, from_wire, to_wire
from laddertron.launchers.rank.rank import lead
from laddertron.launchers.rank.rank_status import HealthWatch, Status, collective_rows, make_look, run_delay_s
from laddertron.topology.comm.ledger import Entry, Ledger
from laddertron.topology.hardware.health import PORT_COUNTERS, Figures, gpu_figures, port_counters
from laddertron.topology.hardware.sysfs import Sysfs
from laddertron.topology.transport.transport import STRATEGIES
from rank_pool import Rank
from test_scheduler import ask, limits
from test_transport import _transports
from waiting import HANG_S, until

Ranks = Callable[..., list[Any]]


def test_a_waiting_rank_names_its_collective() -> None:
    """Rank 0 starts two all-reduces and waits for the second: its place says so, from another thread. Once rank 1 has
    come both say that they wait for nothing, and have started two."""
    with _transports(2, 2) as (one, other):
        ledger = Ledger()
        ledger.add_source(lambda: (), lambda: (), one.place)
        assert ledger.place() == (0, "")
        xs = [torch.ones(8), torch.ones(8)]
        seqs = [one.start(x, STRATEGIES["exchange"]) for x in xs]
        assert ledger.place() == (2, "")

        def wait_for_both() -> None:
            for seq in seqs:
                one.wait(seq)

        waiter = threading.Thread(target=wait_for_both)
        waiter.start()
        until(lambda: ledger.place()[1] != "")
        assert ledger.place() == (2, "collective 0 (all_reduce of 32 bytes)")
        for _ in seqs:
            other.wait(other.start(torch.ones(8), STRATEGIES["exchange"]))
        waiter.join(HANG_S)
        assert ledger.place() == other.place() == (2, "")


def case_gloo_place(rank: Rank) -> tuple[list[int], bool]:
    import numpy as np
    from laddertron.topology.comm.groups import CommOptions

    with rank.connect(options=CommOptions(backend="gloo")) as communicator:
        started = [communicator.ledger.place()[0]]
        communicator.all_reduce.start(torch.ones(4)).wait()
        started.append(communicator.ledger.place()[0])
        communicator.gather(np.ones(3, np.uint8))
        return [*started, communicator.ledger.place()[0]], communicator.ledger.place()[1] == ""


def test_gloo_counts_what_it_starts(ranks: Ranks) -> None:
    assert ranks(2, "test_rank_status:case_gloo_place") == [[[0, 1, 2], True]] * 2


def test_under_an_emulated_link_only_the_link_counts() -> None:
    """The native exchange that does the arithmetic is part of the emulated travel: counted once."""
    entries = [
        Entry("all_reduce", "exchange", "node", 4, 400, 0.5, 0.25),
        Entry("all_reduce", "emulated", "emulated link 1 ms", 3, 300, 2.5, 0.5, "ladder mlp"),
        Entry("all_reduce", "emulated", "emulated link 1 ms", 1, 100, 1.5, 0.5),
        Entry("gather", "exchange", "node", 2, 20, 0.2, 0.2),
    ]
    found = {(row.series, *row.labels): row.value for row in collective_rows(entries)}
    link = "emulated link 1 ms"
    assert found["collective_seconds_total", "all_reduce", link, "hidden"] == 3.0
    assert found["collective_seconds_total", "all_reduce", link, "exposed"] == 1.0
    layers = {name[1:]: value for name, value in found.items() if name[0] == "layer_collective_seconds_total"}
    assert layers == {("ladder mlp", link, "hidden"): 2.0, ("ladder mlp", link, "exposed"): 0.5}
    assert found["collective_bytes_total", "gather", "node"] == 20
    assert not [name for name in found if name[1:3] == ("all_reduce", "node")]


def case_beat(rank: Rank, folder: str) -> dict[str, Any]:
    built = build_on(rank, deployment(folder, rank.size))
    status = Status(communicator=rank.communicator)
    before = list(collective_rows(rank.communicator.ledger.entries()))  # of earlier cases on these ranks
    if rank.rank != 0:
        follow(built.runner, rank.communicator.plans, status.progress)
    else:
        engine = Engine(Scheduler(built.scheduler_limits), built.runner, rank.communicator.plans, status.progress)
        for number in range(3):
            engine.add(request(number, [1, 2, 3, 4 + number], max_tokens=6))
        assert sum(len(event.tokens) for event in drain(engine)) == 18
        status.latencies.add(engine.scheduler.take_ended())
        status.scheduler = engine.scheduler.snapshot(time.time())
        engine.close()
    beat = status.beat()
    assert from_wire(to_wire(beat), "rank") == beat
    return {
        "before": before,
        "rows": beat.rows,
        "steps": beat.step,
        "seconds": status.progress.durations.total,
        "collective": beat.collective,
        "waiting": beat.waiting,
    }


def test_a_heartbeat_adds_up(ranks: Ranks, tmp_path: Path) -> None:
    """Two ranks answer three requests: both count the same collectives and steps; buckets add up to what they count;
    rank 0 alone speaks for the schedule."""
    from checkpoints import save

    save(tmp_path)
    first, second = ranks(2, "test_rank_status:case_beat", {"folder": str(tmp_path)})
    assert first["collective"] == second["collective"] > 0
    assert first["waiting"] == second["waiting"] == ""
    rows = [
        {(series, *labels): (value, counts) for series, labels, value, counts in each["rows"]}
        for each in (first, second)
    ]
    for each, found in zip((first, second), rows, strict=True):
        seconds, counts = found["step_duration_seconds",]
        assert sum(counts) == each["steps"]
        assert seconds == pytest.approx(each["seconds"])
    mine, others = rows
    before = {(series, *labels): value for series, labels, value, _ in first["before"]}
    exposed = {
        name: value - before.get(name, 0.0) for name, (value, _) in mine.items() if name[-1] == "exposed" and value > 0
    }
    layers = {name[1]: s for name, s in exposed.items() if name[0] == "layer_collective_seconds_total" and s > 0}
    assert layers.keys() == {"standard attention", "standard mlp", "embedding"}
    whole = sum(s for name, s in exposed.items() if name[:2] == ("collective_seconds_total", "all_reduce"))
    assert sum(layers.values()) == pytest.approx(whole), "every all-reduce of the model is somebody's"
    assert sum(mine["request_queue_time_seconds",][1]) == 3
    assert mine["iteration_tokens",][0] >= 12 + 15
    assert ("kv_cache_usage_ratio",) in mine
    assert ("kv_cache_usage_ratio",) not in others
    assert ("iteration_tokens",) not in others


class _Runner:
    """The fake model behind the engine's loop; no step is run without its plan having been sent."""

    def __init__(self, limits: SchedulerLimits) -> None:
        self._fake = FakeRunner(
            limits.max_num_seqs, limits.max_num_batched_tokens, limits.block_size, limits.num_blocks
        )

    def run(self, batch: Batch, ahead: Ahead | None = None) -> StepResult:
        result = self._fake.run(batch) if batch.chunks else StepResult(())
        if ahead is not None:
            ahead(())
        return result

    def wait_result(self) -> None: ...

    def send(self, frame: bytes) -> None: ...


def _news_of(requests: list[Request]) -> tuple[list[tuple[list[str], list[str]]], int]:
    """What the engine says of entering and parking, and how often somebody was preempted."""
    few = limits(num_blocks=12, max_model_len=48, watermark=0.0)
    scheduler, runner = Scheduler(few), _Runner(few)
    news: list[tuple[list[str], list[str]]] = []
    engine = Engine(scheduler, runner, runner, StepProgress(), lambda *told: news.append(told))
    for one in requests:
        engine.add(one)
    for _ in drain(engine):
        pass
    return news, scheduler.counters.preemptions


def test_a_preempted_request_is_reported_as_parked() -> None:
    """KV runs out under three sequences. Every request that is put back to wait is named before it starts again; the
    one that is never touched is not."""
    names = (("late-batch", BATCH), ("first", INTERACTIVE), ("second", INTERACTIVE))
    news, preemptions = _news_of([ask(name, 8, 30, priority=priority) for name, priority in names])
    parked = [name for _, names in news for name in names]
    assert len(parked) == preemptions > 0
    assert set(parked) == {"late-batch", "second"}
    running: set[str] = set()
    for started, back in news:
        assert running >= set(back), "who is parked was running"
        running = (running - set(back)) | set(started)
    assert news[0] == (["first", "second", "late-batch"], [])


def test_a_choice_put_back_does_not_park_its_request() -> None:
    """n = 3 and KV for two: while one choice waits the others run, so the request stays where it is."""
    news, preemptions = _news_of([ask("a", 8, 30, n=3)])
    assert preemptions > 0
    assert not [back for _, back in news if back]


def test_a_rank_says_what_it_computes_with_once_it_knows() -> None:
    assert not [row for row in Status().beat().rows if row.series == "rank_info"]
    rows = Status(computes_with=("cpu", "avx2", "4")).beat().rows
    assert MetricRow("rank_info", ("cpu", "avx2", "4"), 1.0) in rows


@pytest.mark.parametrize(
    ("rank", "first_layer", "counts", "reports"),
    [(0, 0, False, False), (0, 2, True, True), (1, 2, True, False), (0, 4, True, False)],
)
def test_rows_of_experts_in_a_pipeline(rank: int, first_layer: int, counts: bool, reports: bool) -> None:
    """Three stages of two layers, of which the first has no experts: each rank with experts counts its own rows, and
    one reports every expert's."""
    layers = (False, False, False, True, True, True)

    def config(layers: tuple[bool, ...]) -> Any:
        return SimpleNamespace(experts=SimpleNamespace(layers=layers))

    own = config(layers[first_layer : first_layer + 2])
    stage = SimpleNamespace(first_layer=first_layer)
    shard = SimpleNamespace(expert_ids=range(2), rank=rank, stage=stage)
    model: Any = SimpleNamespace(config=own, shard=shard, on_rows=None)
    status = Status()
    status.count_experts(model, config(layers))
    if model.on_rows is not None:
        model.on_rows(torch.tensor([3, 0, 5]))
    found = {row.series: row.value for row in status.beat().rows}
    assert found.get("rank_expert_rows_total") == (3.0 if counts else None)
    assert found.get("expert_rows") == (8.0 if reports else None)


def test_buckets_count_by_upper_bound() -> None:
    buckets = Buckets(STEP_TOKENS)
    for value in (1, 2, 8, 9, 16384, 20000):
        buckets.observe(value)
    counts = (1, 2, 1, *[0] * 9, 1, 1)
    assert buckets.to_rows("x") == (MetricRow("x", (), 1 + 2 + 8 + 9 + 16384 + 20000, counts),)
    assert Buckets((1.0,)).to_rows("y") == ()


@pytest.fixture
def port(tmp_path: Path) -> Path:
    folder = tmp_path / "sys/class/infiniband/mlx5_0/ports/1"
    for name, value in {
        "state": "4: ACTIVE",
        "counters/port_rcv_data": "1000",
        "counters/port_xmit_data": "18446744073709551615",
        "counters/symbol_error": "3",
        "hw_counters/out_of_sequence": "7",
        "counters/port_rcv_errors": "junk",
    }.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(value + "\n")
    return folder


def test_port_counters_in_bytes_and_by_error(port: Path, tmp_path: Path) -> None:
    """Words of four bytes become bytes; a counter that is no number is left out; a port that went down says so."""
    found = port_counters(Sysfs(tmp_path))
    assert found["infiniband_received_bytes_total", "mlx5_0", "1"] == 4000.0
    assert found["infiniband_errors_total", "symbol", "mlx5_0", "1"] == 3.0
    assert found["infiniband_errors_total", "out_of_sequence", "mlx5_0", "1"] == 7.0
    assert found["infiniband_port_up", "mlx5_0", "1"] == 1.0
    assert ("infiniband_errors_total", "receive", "mlx5_0", "1") not in found
    assert ("infiniband_errors_total", 1, "receive") in PORT_COUNTERS.values()
    (port / "state").write_text("1: DOWN\n")
    assert port_counters(Sysfs(tmp_path))["infiniband_port_up", "mlx5_0", "1"] == 0.0
    assert port_counters(Sysfs(tmp_path / "nowhere")) == {}


class Nvml:
    """pynvml as far as it is asked; `broken` names calls that the driver refuses."""

    NVMLError = type("NVMLError", (Exception,), {})
    NVML_MEMORY_ERROR_TYPE_CORRECTED, NVML_MEMORY_ERROR_TYPE_UNCORRECTED, NVML_VOLATILE_ECC = 0, 1, 0
    NVML_TEMPERATURE_GPU = NVML_CLOCK_SM = 0

    def __init__(self, *broken: str) -> None:
        self.broken = broken
        self.begun = 0

    def __getattribute__(self, name: str) -> Any:
        if name.startswith("nvmlDevice") and name in self.broken:
            raise Nvml.NVMLError("not supported")
        return super().__getattribute__(name)

    def nvmlInit(self) -> None:
        self.begun += 1

    def nvmlDeviceGetHandleByUUID(self, uuid: str) -> str:
        if uuid != "GPU-1":
            raise Nvml.NVMLError("not found")
        return uuid

    def nvmlDeviceGetMemoryInfo(self, handle: str) -> Any:
        return SimpleNamespace(used=60 << 30, total=80 << 30)

    def nvmlDeviceGetUtilizationRates(self, handle: str) -> Any:
        return SimpleNamespace(gpu=97)

    def nvmlDeviceGetTemperature(self, handle: str, sensor: int) -> int:
        return 71

    def nvmlDeviceGetPowerUsage(self, handle: str) -> int:
        return 650_000

    def nvmlDeviceGetClockInfo(self, handle: str, clock: int) -> int:
        return 1755

    def nvmlDeviceGetCurrentClocksThrottleReasons(self, handle: str) -> int:
        return 0x20

    def nvmlDeviceGetTotalEccErrors(self, handle: str, kind: int, since: int) -> int:
        return (5, 2)[kind]


def test_gpu_figures_and_what_a_driver_does_not_have() -> None:
    found = gpu_figures(Nvml(), "GPU-1")
    assert found["gpu_memory_used_bytes",] == 60 << 30
    assert found["gpu_utilization_ratio",] == 0.97
    assert found["gpu_sm_clock_hertz",] == 1.755e9
    assert (found["gpu_throttled", "thermal"], found["gpu_throttled", "power"]) == (1.0, 0.0)
    assert found["gpu_ecc_errors_total", "uncorrected"] == 2.0
    less = gpu_figures(Nvml("nvmlDeviceGetTotalEccErrors", "nvmlDeviceGetPowerUsage"), "GPU-1")
    assert less == {k: v for k, v in found.items() if k[0] not in ("gpu_ecc_errors_total", "gpu_power_watts")}
    assert gpu_figures(Nvml(), "GPU-2") == {}


def test_a_look_that_fails_or_hangs_holds_nothing_up() -> None:
    """The first look fails: there are no figures. The second hangs: closing does not wait for it."""
    hangs, calls = threading.Event(), []

    def look() -> Figures:
        calls.append(1)
        if len(calls) == 1:
            raise OSError("gone")
        hangs.wait()
        return {}

    watch = HealthWatch(look, period_s=0.001)
    watch.start()
    until(lambda: len(calls) == 2)
    assert watch.figures == {}
    closing = threading.Thread(target=watch.close)
    closing.start()
    closing.join(HANG_S)
    assert not closing.is_alive()
    hangs.set()


def test_time_without_a_processor(tmp_path: Path) -> None:
    """Nanoseconds become seconds; a kernel without the account, or with another form of it, tells nothing."""
    account = tmp_path / "proc/self/schedstat"
    account.parent.mkdir(parents=True)
    for text, seconds in (("5 2500000000 7\n", 2.5), ("", None), ("5 -1 7", None), ("5 6", None)):
        account.write_text(text)
        assert run_delay_s(Sysfs(tmp_path)) == seconds
    assert run_delay_s(Sysfs(tmp_path / "nowhere")) is None
    if run_delay_s(Sysfs()) is not None:
        assert "rank_run_delay_seconds_total" in {row.series for row in Status().beat().rows}


def test_a_rank_looks_at_ports_or_not_and_at_its_gpu(port: Path, tmp_path: Path) -> None:
    nvml = Nvml()
    look = make_look(Sysfs(tmp_path), True, "GPU-1", nvml)
    assert {("infiniband_port_up", "mlx5_0", "1"), ("gpu_utilization_ratio",)} <= look().keys() & look().keys()
    assert nvml.begun == 1
    assert make_look(Sysfs(tmp_path), False, None)() == {}
    assert make_look(Sysfs(), False, None)()["rank_resident_memory_bytes",] > 1 << 20
    status = Status(health=HealthWatch(look))
    assert status.health is not None
    status.health.figures = look()
    beat = {(row.series, *row.labels) for row in status.beat().rows}
    assert ("infiniband_received_bytes_total", "mlx5_0", "1") in beat
    assert ("gpu_utilization_ratio",) in beat


class _Desk:
    """A channel that hands out one command a call, and waits when there is none."""

    def __init__(self, *commands: Command) -> None:
        self._commands, self.idle = list(commands), threading.Event()
        self.more = threading.Event()

    def poll(self, timeout: float | None = 0.0) -> list[Command]:
        if self._commands:
            return [self._commands.pop(0)]
        self.idle.set()
        self.more.wait()
        return [Shutdown()]

    def send_tokens(self, events: Any) -> None: ...

    def send_state(self, message: Any) -> None: ...


def test_a_thread_that_hangs_outside_a_step_shows_as_busy(monkeypatch: pytest.MonkeyPatch) -> None:
    """Rank 0 takes a command that never returns (a grammar that compiles for ever): its heartbeat tells for how long,
    outside any step. Once it waits for work it is idle."""
    stuck, entered = threading.Event(), threading.Event()
    runner: Any = SimpleNamespace()
    engine = Engine(Scheduler(limits()), runner, SimpleNamespace(send=lambda frame: None), StepProgress())

    def cancel(request_id: str) -> None:
        entered.set()
        stuck.wait()

    monkeypatch.setattr(engine.scheduler, "cancel", cancel)
    desk, status = _Desk(Cancel("r")), Status(engine.progress)
    leading = threading.Thread(target=lead, args=(engine, desk, status))
    leading.start()
    try:
        assert entered.wait(HANG_S)
        until(lambda: status.beat().busy_s > 0.02)
        assert status.beat().step_tokens == 0
        stuck.set()
        assert desk.idle.wait(HANG_S)
        assert status.beat().busy_s == 0.0
    finally:
        stuck.set()
        desk.more.set()
        leading.join(HANG_S)


def test_a_follower_is_idle_while_it_waits_for_a_plan_and_busy_before_its_step() -> None:
    progress, seen = StepProgress(), list[bool]()
    frames = [encode(Batch(step=0)), encode(Batch(step=1)), b""]

    def receive() -> bytes:
        seen.append(progress.turn_since is not None)
        return frames.pop(0)

    class Runner(FakeRunner):
        def run(self, batch: Batch, ahead: Ahead | None = None) -> StepResult:
            assert progress.turn_since is not None
            return StepResult(())

        def wait_result(self) -> None: ...

    follow(Runner.__new__(Runner), SimpleNamespace(receive=receive), progress)
    assert seen == [False, False, False]
    assert progress.step == 2
