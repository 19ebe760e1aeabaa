"""`laddertron bench`: fair order, honest sums, and the three commands on the demo model's ranks."""

from __future__ import annotations

import json
import math
import time
from collections.abc import Iterator
from functools import partial
from itertools import cycle, pairwise
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from click.testing import CliRunner
from laddertron.engine.request import Request, TokensEvent
from laddertron.engine.step.engine import StepProgress
from laddertron.launchers.cli.__main__ import group
from laddertron.launchers.job import supervised_process as kept
from laddertron.launchers.measure import rank_job as bench_job
from laddertron.launchers.measure.rank_job import BenchError, BenchJob
from laddertron.tools.bench import bench_rank
from laddertron.tools.bench.bench import (
    Case,
    interleaved,
    random_mix,
    run_case,
    run_mix,
    spread,
    step_bytes,
)
from laddertron.tools.bench.bench_view import case_table, mix_table, plot
from laddertron.tools.bench.slo import percentile
from laddertron.topology.comm.ledger import Ledger
from rich.console import Console
from waiting import FOR_EVER_S, HANG_S

CONFIG = Path(__file__).parents[3] / "configs" / "demo-standard.yaml"
QUICK = ["--set", "parallel.collective=auto", "--set", "parallel.emulated_delay=0s", "--set", "engine.max_num_seqs=4"]

ALONE = ["--set", "parallel.tensor_parallel_size=1"]


class Steps:
    """An engine that computes prompts at 1 s a step and tokens at 0.1 s a step, on a clock of its own."""

    def __init__(self, clock: list[float]) -> None:
        self.clock, self.progress = clock, StepProgress()
        self.scheduler = SimpleNamespace(limits=SimpleNamespace(microbatches=1))
        self.left: dict[str, int] = {}
        self.fresh: list[Request] = []
        self.seen: set[tuple[int, ...]] = set()

    @property
    def has_work(self) -> bool:
        return bool(self.left)

    def add(self, request: Request) -> None:
        assert request.prompt not in self.seen, "a prefix cache would answer it"
        self.seen.add(request.prompt)
        self.left[request.request_id] = request.params.max_tokens
        self.fresh.append(request)

    def step(self) -> list[TokensEvent]:
        self.progress.last_tokens = sum(len(r.prompt) for r in self.fresh) or len(self.left)
        self.clock[0] += 1.0 if self.fresh else 0.1
        self.progress.step += 1
        self.fresh.clear()
        events = []
        for name in list(self.left):
            self.left[name] -= 1
            finish = None if self.left[name] else "length"
            events.append(TokensEvent(name, 0, 0, (5,), finish))  # type: ignore[arg-type]
            if finish:
                del self.left[name]
        return events


class LateSteps(Steps):
    """Steps that overlap: a call sets one off, which costs nothing, and ends the one before."""

    def __init__(self, clock: list[float]) -> None:
        super().__init__(clock)
        self.owed: list[tuple[int, float]] = []

    @property
    def has_work(self) -> bool:
        return bool(self.left or self.owed)

    def step(self) -> list[TokensEvent]:
        step, now, tokens, events = self.progress.step, self.clock[0], self.progress.last_tokens, []
        if self.left:
            events = super().step()
            self.owed.append((self.progress.last_tokens, self.clock[0] - now))
            self.clock[0], self.progress.step, self.progress.last_tokens = now, step, tokens
        if len(self.owed) == 2 or not events:
            self.progress.last_tokens, took = self.owed.pop(0)
            self.clock[0] += took
            self.progress.step += 1
        return events


class StagedSteps(Steps):
    """A pipeline with two micro-batches: a call ends a step of half of the sequences, which takes half a second with
    prompts and 50 ms without; one half is ahead of the other."""

    def __init__(self, clock: list[float]) -> None:
        super().__init__(clock)
        self.scheduler.limits.microbatches = 2
        self.calls = 0

    def step(self) -> list[TokensEvent]:
        names, self.calls = sorted(self.left)[self.calls % 2 :: 2], self.calls + 1
        self.clock[0] += 0.5 if self.fresh and self.calls < 3 else 0.05
        events = []
        for name in names:
            self.left[name] -= 1
            events.append(TokensEvent(name, 0, 0, (5,), None if self.left[name] else "length"))
        if not any(self.left.values()):
            self.left.clear()
            self.fresh.clear()
            self.calls = 0
        return events


@pytest.fixture
def steps(monkeypatch: pytest.MonkeyPatch) -> Any:
    clock = [0.0]
    monkeypatch.setattr("laddertron.tools.bench.bench.time", SimpleNamespace(perf_counter=lambda: clock[0]))
    return Steps(clock)


@pytest.mark.parametrize("late", [False, True])
def test_prefill_and_decode_are_told_apart(steps: Any, late: bool) -> None:
    """Four prompts of 16 in one second, then 9 steps of four tokens in 0.1 s each; another seed has other prompts. The
    same where each step ends with the call that sets off the next."""
    engine: Any = LateSteps(steps.clock) if late else steps
    for seed in (1, 2):
        timing = run_case(engine, Case(4, 16, 10), 1000, seed)
        assert timing.prompt_tokens / timing.prefill_s == pytest.approx(64.0)
        assert timing.decode_tokens / timing.decode_s == pytest.approx(40.0)
        assert timing.decode_tokens == 36
        assert timing.step_s == pytest.approx(0.1)


def test_a_pipeline_is_timed_by_its_tokens(steps: Any) -> None:
    """Prompts until the later half has a token; then 40 tokens a second until the earlier half ends, each sequence's
    0.1 s apart."""
    timing = run_case(StagedSteps(steps.clock), Case(4, 16, 10), 1000, 1)  # type: ignore[arg-type]
    assert timing.prefill_s == pytest.approx(1.0)
    assert timing.decode_tokens / timing.decode_s == pytest.approx(40.0)
    assert timing.decode_tokens == 34
    assert timing.step_s == pytest.approx(0.1)
    assert run_case(StagedSteps(steps.clock), Case(1, 16, 1), 1000, 2).decode_tokens == 0  # type: ignore[arg-type]


def test_a_mix_counts_every_request_once(steps: Any) -> None:
    items = random_mix(6, (3, 9), (2, 5), None, 100, 7)
    assert items == random_mix(6, (3, 9), (2, 5), None, 100, 7)
    timing = run_mix(steps, items, "m")
    assert timing.generated_tokens == sum(item.generate for item in items)
    assert timing.prompt_tokens == sum(len(item.prompt) for item in items)
    assert len(timing.end_s) == 6
    assert all(value == pytest.approx(0.1) for value in timing.between_s)
    assert timing.total_s == pytest.approx(1.0 + 0.1 * (max(item.generate for item in items) - 1))


def test_arrivals_come_at_their_rate() -> None:
    items = random_mix(2000, (1, 1), (1, 1), 50.0, 100, 0)
    assert items[-1].at == pytest.approx(40.0, rel=0.1)
    assert all(a.at < b.at for a, b in pairwise(items))


def test_cases_take_turns_forwards_and_backwards() -> None:
    assert list(interleaved(3, 2)) == [(0, 0), (0, 1), (0, 2), (1, 2), (1, 1), (1, 0)]


def test_small_statistics() -> None:
    assert spread([3.0, 1.0, 2.0]) == (2.0, 1.0, 3.0)
    assert percentile([1.0, 2.0, 3.0, 4.0], 0.5) == 3.0
    assert math.isnan(percentile([], 0.5))
    about = {"weights": 1000, "kv_per_token": 10, "microbatches": 1, "experts": None}
    assert step_bytes(about, Case(2, 8, 4)) == 1200.0
    assert step_bytes(about | {"microbatches": 4}, Case(2, 8, 4)) == 2200.0


def test_experts_that_a_step_reads() -> None:
    """Of four experts with 200 bytes each in all layers a row chooses one: two rows read 1.75 of them; in two
    micro-batches, one each."""
    about = {"weights": 1000, "kv_per_token": 0, "microbatches": 1, "experts": [800, 4, 1.0]}
    assert step_bytes(about, Case(2, 8, 4)) == pytest.approx(200 + 1.75 * 200)
    assert step_bytes(about | {"microbatches": 2}, Case(2, 8, 4)) == pytest.approx(2 * 400)


@pytest.mark.slow
def test_a_sweep_on_real_ranks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two wirings on two ranks, loaded together, in turns: rows, JSON and picture; shares of a measured floor. Told to
    end, the ranks do so by themselves: what mpirun does with the end of its input is not waited for."""
    statuses, end = list[int](), kept.end

    def ended(keeper: Any, timeout_s: float) -> None:
        statuses.append(keeper.wait(HANG_S))
        end(keeper)

    monkeypatch.setattr(kept, "end", ended)
    pytest.importorskip("matplotlib")
    out, picture = tmp_path / "rows.json", tmp_path / "rows.svg"
    words = ["bench", "sweep", str(CONFIG), *QUICK, "--wiring", "standard,ladder", "--batch", "1,2", "--prompt", "8"]
    words += ["--generate", "6", "--repeats", "2", "--json", str(out), "--plot", str(picture)]
    result = CliRunner().invoke(group, words, catch_exceptions=False)
    assert result.exit_code == 0, result.output
    rows = json.loads(out.read_text())
    assert [(row["wiring"], row["batch"], row["tp"]) for row in rows] == [
        ("standard", 1, 2), ("ladder", 1, 2), ("standard", 2, 2), ("ladder", 2, 2)
    ]  # fmt: skip
    for row in rows:
        median, low, high = row["decode_tok_s"]
        assert 0 < low <= median <= high
        assert row["floor_tok_s"] is None or 0 < row["floor_share"] < 1
        assert 0 <= row["hidden_share"] <= 1
    assert statuses == [0, 0]
    assert picture.read_text().lstrip().startswith("<?xml")
    assert "floor" in result.output
    for said in ("loading tp 2, standard", "loading tp 2, ladder", "warming up: tp 2, standard, batch 1"):
        assert said in result.stderr  # no terminal: lines
    case_table(rows)
    plot(rows, tmp_path / "rows.png")


def test_the_table_of_a_mix_has_its_title_in_one_line_and_no_empty_row() -> None:
    row: dict[str, Any] = {"variant": "tp 2, ladder", "requests": 500, "pure_decode_share": 0.5, "drafts_right": None}
    row |= dict.fromkeys(("generated_tok_s", "total_tok_s"), (664.3, 660.0, 670.0))
    row |= dict.fromkeys(("first_s", "between_s"), (0.011, 0.02))
    console = Console(width=80)
    with console.capture() as said:
        console.print(mix_table([row]))
    assert said.get().splitlines()[0].strip() == "a mix of requests: median, ± half the spread"
    assert "drafts" not in said.get()


@pytest.mark.slow
def test_a_pipeline_on_real_ranks(tmp_path: Path) -> None:
    out = tmp_path / "rows.json"
    words = ["bench", "sweep", str(CONFIG), *QUICK, *ALONE, "--set", "parallel.pipeline_parallel_size=2"]
    words += ["--batch", "1,4", "--prompt", "8", "--generate", "6", "--repeats", "1", "--json", str(out)]
    result = CliRunner().invoke(group, words, catch_exceptions=False)
    assert result.exit_code == 0, result.output
    for row in json.loads(out.read_text()):
        assert row["decode_tok_s"][0] > 0
        assert row["floor_tok_s"] is None or 0 < row["floor_share"] < 1


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--wiring", "standard,parallel"], "model.wiring=parallel: these weights are standard, whose norms"),
        (["--wiring", "ladder,hybrid"], "model.wiring=hybrid needs model.ladder_layers"),
        (["--tp", "1,3"], "tensor_parallel_size=3 does not split this model"),
    ],
)
def test_variants_that_cannot_be_are_refused_before_any_is_loaded(words: list[str], said: str) -> None:
    """One line with the reason, and no traceback of ranks that others have been loaded beside."""
    result = CliRunner().invoke(group, ["bench", "sweep", str(CONFIG), *QUICK, *words])
    assert result.exit_code == 1, result.output
    assert said in result.stderr
    assert "loading" not in result.stderr
    assert "Traceback" not in result.stderr


@pytest.mark.parametrize("command", [["bench", "latency"], ["bench", "sweep"], ["bench", "throughput"], ["acceptance"]])
def test_what_the_context_cannot_hold_is_refused_before_anything_is_loaded(command: list[str]) -> None:
    result = CliRunner().invoke(group, [*command, str(CONFIG), *QUICK, "--prompt", "250", "--generate", "7"])
    assert (result.exit_code, result.stdout) == (2, "")
    assert "250 prompt and 7 new tokens are more than max_model_len=256: lower --prompt" in result.stderr
    assert "loading" not in result.stderr


@pytest.mark.slow  # the same mix with a clock of its own is above
def test_a_mix_from_a_file_on_real_ranks(tmp_path: Path) -> None:
    """Three lines of a batch file; the row says how the mix compares with full batches of its mean lengths."""
    lines = [
        {"custom_id": f"c{i}", "method": "POST", "url": "/v1/completions",
         "body": {"model": "demo", "prompt": "def " * (i + 1), "max_tokens": 5 + i}}
        for i in range(3)
    ]  # fmt: skip
    file, out = tmp_path / "in.jsonl", tmp_path / "row.json"
    file.write_text("".join(json.dumps(line) + "\n" for line in lines))
    words = [
        "bench",
        "throughput",
        str(CONFIG),
        *QUICK,
        *ALONE,
        "--input",
        str(file),
        "--repeats",
        "1",
        "--json",
        str(out),
    ]
    result = CliRunner().invoke(group, words, catch_exceptions=False)
    assert result.exit_code == 0, result.output
    (row,) = json.loads(out.read_text())
    assert (row["requests"], row["generated_tokens"]) == (3, 5 + 6 + 7)
    assert row["pure_decode_share"] > 0
    file.write_text('{"custom_id": "x"}\n')
    result = CliRunner().invoke(group, words)
    assert result.exit_code == 1
    assert "line 1" in result.output


def test_ranks_that_end_say_why(tmp_path: Path) -> None:
    """A model whose weights are missing: the error has the rank's own words, and nothing is left running."""
    from laddertron.engine.config.load import load

    (tmp_path / "config.json").write_bytes((CONFIG.parent / "demo" / "demo-standard" / "config.json").read_bytes())
    deployment = load(CONFIG, [f"model.path={tmp_path}", "parallel.tensor_parallel_size=1"])
    with pytest.raises(BenchError, match="safetensors"), BenchJob(deployment, "broken"):
        pass


def test_what_ranks_refuse_is_told_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """In one line, without a traceback or a launcher's words; what this host cannot hold starts no rank at all."""
    from laddertron.engine.config.load import load

    more = ["parallel.tensor_parallel_size=2", "engine.kv_cache_memory=1TiB"]
    with pytest.raises(BenchError) as caught, BenchJob(load(CONFIG, more), "too much"):
        pass
    assert str(caught.value).startswith("too much: a rank needs about"), caught.value
    assert "\n" not in str(caught.value)
    monkeypatch.setattr(BenchJob, "__enter__", lambda job: pytest.fail("ranks were started"))
    result = CliRunner().invoke(group, ["bench", "latency", str(CONFIG), "--set", more[1]])
    assert "this host has" in str(result.exception), result.output


def test_interrupted_while_they_load_they_are_ended_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Ranks that load take no order: nobody waits for them."""
    from laddertron.engine.config.load import load

    def interrupted(job: BenchJob) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(bench_job, "END_S", FOR_EVER_S)
    monkeypatch.setattr(BenchJob, "answer", interrupted)
    with pytest.raises(KeyboardInterrupt), BenchJob(load(CONFIG, []), "interrupted"):
        pass


@pytest.mark.parametrize(
    "words",
    [["--batch", "0"], ["--batch", "a"], ["--wiring", "spiral"], ["--tp", "1,x"], ["--json", "/proc/none/rows.json"]],
)
def test_a_command_line_that_cannot_be(words: list[str]) -> None:
    result = CliRunner().invoke(group, ["bench", "sweep", str(CONFIG), *words])
    assert result.exit_code == 2
    assert words[0] in result.output


def test_a_gpus_floor_is_the_copies_of_all_of_a_nodes_gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    """And not the host's memory, which no decode step there waits for."""
    asked = list[Any]()

    def copy_bandwidth(device: Any, size: int) -> float:
        asked.append((device.type, size))
        return 2e12

    monkeypatch.setattr(bench_rank, "copy_bandwidth", copy_bandwidth)
    monkeypatch.setattr(bench_rank, "read_floor", lambda size: pytest.fail("read the host's memory"))
    leader: Any = object.__new__(bench_rank.Bench)
    leader.seed = 0
    leader.built = SimpleNamespace(runner=SimpleNamespace(device=SimpleNamespace(type="cuda")))
    leader.communicator = SimpleNamespace(size=16, ledger=Ledger())
    assert leader.ask("floor", nodes=2) == {"floor": 8 * 2e12}
    assert asked == [("cuda", bench_rank.LEAST_READ)]


def test_copies_are_counted_read_and_written(monkeypatch: pytest.MonkeyPatch) -> None:
    """In the best round: of rounds of 3, 2, 1, 3, 2, 1 … seconds those of one."""

    def clock() -> Iterator[int]:
        now = 0
        for seconds in cycle((3, 2, 1)):
            yield now
            now += seconds
            yield now

    monkeypatch.setattr(time, "perf_counter", partial(next, clock()))
    assert bench_rank.copy_bandwidth(torch.device("cpu"), 1 << 16) == 2 * bench_rank.COPIES * (1 << 16)
