"""`laddertron acceptance`: what its page demands, when no figure is worth keeping, and steps without a result."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from laddertron.engine import child
from laddertron.engine.config.schema import AcceptanceConfig
from laddertron.launchers.cli.__main__ import main
from laddertron.launchers.control.processes import descendants
from laddertron.launchers.measure.preflight import PreflightOutcome
from laddertron.launchers.measure.preflight_plan import Finding, LinkTime, NodeTransport, Pair, RankReport
from laddertron.models.cpu.kernels import Kernels
from laddertron.tools.bench import acceptance as pages
from laddertron.tools.bench.commands import acceptance
from laddertron.tools.plan.estimate import CapacityEstimate, make_plan
from laddertron.tools.plan.layouts import Work
from laddertron.tools.plan.plan_source import question
from laddertron.topology.cost.cost import Shape
from laddertron.topology.cost.fit import Point, fit
from laddertron.topology.hardware.presets import preset
from laddertron.topology.json_codec import build, unbuild

CONFIG = Path(__file__).parents[3] / "configs" / "demo-standard.yaml"
LIMITS = AcceptanceConfig()
BATCHES = (1, 2, 4, 8)
SHORT = ("--prompt", "16", "--generate", "4", "--repeats", "1", "--cases", "1")


@pytest.fixture(scope="module")
def plan() -> CapacityEstimate:
    return make_plan(question(str(CONFIG), None, None, Work(16, 4, batches=BATCHES)))


def rows(plan: CapacityEstimate, share: float, hidden: float | None = 0.5, held: float = 1.0) -> list[dict[str, Any]]:
    """Bench's, of a machine with this share of the predicted speed."""
    (prompt,) = (p for p in plan.prefills if (p.wiring, p.tokens) == ("standard", 16))
    speeds = {p.batch: p.tokens_per_s for p in plan.predictions if p.wiring == "standard"}
    size = int(held * (sum(plan.memory.parts.values()) + plan.memory.kv_bytes))
    return [
        {
            "wiring": "standard", "batch": batch, "prompt": 16, "generate": 4, "repeats": 1, "rank_bytes": [1, size],
            "prefill_tok_s": [share * prompt.tokens_per_s] * 3, "decode_tok_s": [share * speeds[batch]] * 3,
            "hidden_share": hidden, "exposed_share": 0.25,
        }
        for batch in BATCHES
    ]  # fmt: skip


def missed(part: pages.Part) -> list[str]:
    return [check.what for check in part.checks if not check.met]


def test_four_batch_sizes() -> None:
    assert [pages.batches(n) for n in (1, 8, 128, 256)] == [(1,), (1, 2, 4, 8), (1, 4, 32, 128), (1, 8, 32, 256)]


def test_speed_is_held_to_the_plan(plan: CapacityEstimate) -> None:
    """Every batch size is judged by its own prediction; with a limit of 0, none is."""
    assert missed(pages.speed_part(rows(plan, 0.71), plan, LIMITS)) == []
    slow = pages.speed_part(rows(plan, 0.69), plan, LIMITS)
    assert "Predicted for CPU cores, assumed: set launch.fabric" in "".join(slow.lines)
    assert missed(slow) == [*(f"decode of {n} over predicted" for n in BATCHES), "prefill over predicted"]
    assert pages.speed_part(rows(plan, 0.69), plan, replace(LIMITS, min_speed=0.0)).checks == ()
    assert missed(pages.speed_part(rows(plan, 1.0, hidden=None), plan, LIMITS)) == []


def test_memory_is_judged_on_gpus(plan: CapacityEstimate) -> None:
    """The fullest rank counts. A process on a CPU has more in it than the plan predicts."""
    gpu = replace(plan, question=replace(plan.question, keys=replace(plan.question.keys, gpu=True)))
    assert missed(pages.memory_part(rows(plan, 1.0, held=1.2), gpu)) == ["memory of the fullest rank"]
    assert missed(pages.memory_part(rows(plan, 1.0, held=1.0), gpu)) == []
    assert pages.memory_part(rows(plan, 1.0, held=1.2), plan).checks == ()


def test_a_recovery_may_take_a_start_and_the_margin() -> None:
    found = pages.Recovery(20.0, 30.0, "rank 3 was killed", True, True)
    assert missed(pages.recovery_part(found, LIMITS)) == []
    assert missed(pages.recovery_part(replace(found, next_s=30.1), LIMITS)) == ["kill to the next token"]
    broken = pages.recovery_part(replace(found, complete=False), LIMITS)
    assert missed(broken) == ["the stream over the kill"]
    assert "rank 3 was killed. The stream broke." in broken.lines[-1]


def test_preflights_figures_survive_as_json() -> None:
    """A link of 25 GB/s that reached 20, a size with two strategies, and a finding that is an error."""
    shape = Shape(2, 2, "nvlink", "ib", inter_bytes_per_s=25e9)
    times = (
        ("flat", 1 << 20, 3e-4),
        ("two_level", 1 << 20, 2e-4),
        ("flat", 1 << 15, 5e-5),
        ("two_level", 1 << 15, 6e-5),
    )
    points = [Point(strategy, nbytes, seconds, shape) for strategy, nbytes, seconds in times]  # type: ignore[arg-type]
    reports = tuple(RankReport(r, f"n{r // 2}", NodeTransport("NET/IB"), 100.0, 1e-3, "H100") for r in range(4))
    outcome = PreflightOutcome(
        preset("2x2xH100"), shape, "nccl", reports, (LinkTime(Pair(0, 2, 0), 5e-6, 20e9),), fit(points, "nccl"),
        (Finding("error", "rank 3 on n1", "slow"),), None, "NCCL", versions={"torch": "2.13"},
    )  # fmt: skip
    found = build(PreflightOutcome, json.loads(json.dumps(unbuild(outcome))))
    environment = pages.environment_part(found)
    assert missed(environment) == ["preflight"]
    assert "| 3 | n1 | H100 | NET/IB | 1.00 | +0 |" in environment.lines
    assert "- error: rank 3 on n1: slow" in environment.lines
    fabric = pages.fabric_part(found).lines
    assert "| n0 rank 0 - n1 rank 2 | 5.0 | 25.00 | 20.00 |" in fabric
    assert [line.split(" | ")[:2] + line.split(" | ")[3:] for line in fabric if "KiB" in line or "MiB" in line] == [
        ["| 32 KiB", "flat", "50 |"], ["| 1 MiB", "two_level", "200 |"]
    ]  # fmt: skip


def test_the_page_begins_with_what_was_missed() -> None:
    fine, bad = pages.Check("a", "1", "1", True), pages.Check("b", "2", "1", False)
    text, accepted = pages.page("m", "today", [pages.Part(("## A",), (fine,))], busy=False)
    assert accepted
    assert "**Accepted.**" in text
    assert "## A" in text
    text, accepted = pages.page("m", "today", [pages.Part((), (fine, bad))], busy=True)
    assert not accepted
    assert "**Not accepted: b.**" in text
    assert f"The machine was busy: {pages.NOT_KEPT}." in text


def test_processors_in_use_are_counted() -> None:
    with subprocess.Popen([sys.executable, "-c", "while True: pass"]) as spins:
        try:
            assert acceptance.busy_share(0.5) > 0.3 / len(os.sched_getaffinity(0))
        finally:
            spins.kill()


@pytest.fixture
def stand_in(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[str], None]:
    """`stand_in(script)`: what every step runs in place of laddertron; $1 is the command's name."""

    def install(script: str) -> None:
        (tmp_path / "python").write_text(f"#!/bin/sh\n{script}\n")
        (tmp_path / "python").chmod(0o755)
        monkeypatch.setattr(child, "laddertron", lambda *words: (str(tmp_path / "python"), *words))
        monkeypatch.setattr(acceptance, "busy_share", lambda seconds: 0.0)

    return install


@pytest.mark.parametrize(
    ("script", "reason"),
    [
        ("sleep 1000 & sleep 1000", "preflight: no end within 1 s"),
        ("echo noise >&2; echo 'error: rank 8 on n1 did not start in 120 s: is the network cut?' >&2; exit 1",
         "preflight: rank 8 on n1 did not start in 120 s: is the network cut?"),
        ("exit 7", "preflight: exit code 7"),
    ],
    ids=["never ends", "never answers", "says nothing"],
)  # fmt: skip
def test_a_step_without_a_result(
    stand_in: Callable[[str], None], tmp_path: Path, monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str], script: str, reason: str,
) -> None:  # fmt: skip
    """One line names it, the page says it, the exit code is 1, and no process is left."""
    stand_in(script)
    if "no end" in reason:
        monkeypatch.setattr(acceptance, "LIMIT_S", 1.0)
    before, out = {p.pid for p in descendants(os.getpid())}, tmp_path / "page.md"
    assert main(["acceptance", str(CONFIG), "-o", str(out), *SHORT]) == 1
    errors = [line for line in capsys.readouterr().err.splitlines() if line.startswith("error: ")]
    assert errors == [f"error: {reason}"]
    assert "**Not accepted: preflight.**" in out.read_text()
    assert reason.partition(": ")[2] in out.read_text()
    assert {p.pid for p in descendants(os.getpid())} <= before


def test_a_busy_machine_is_named(
    stand_in: Callable[[str], None], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """On the page and on stderr; with the limit raised, neither."""
    stand_in("exit 1")
    monkeypatch.setattr(acceptance, "busy_share", lambda seconds: 0.5)
    for more, busy in (((), True), (("--set", "acceptance.max_load=0.6"), False)):
        assert main(["acceptance", str(CONFIG), *SHORT, *more]) == 1
        said = capsys.readouterr()
        assert ("processors in use by others, " in said.out) == busy
        assert (
            (pages.NOT_KEPT in said.out) == (f"50% of this machine's processors: {pages.NOT_KEPT}" in said.err) == busy
        )


def test_nothing_starts_where_the_page_cannot_be_written(
    stand_in: Callable[[str], None], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    stand_in(f"touch {tmp_path}/began")
    assert main(["acceptance", str(CONFIG), *SHORT, "-o", str(tmp_path / "no" / "page.md")]) == 2
    assert "page.md: cannot write there" in capsys.readouterr().err
    assert not (tmp_path / "began").exists()


@pytest.mark.slow
@pytest.mark.skipif(Kernels.find() is None, reason="the C kernels were not built here")
def test_the_whole_page(tmp_path: Path) -> None:
    """Two ranks of the demo model, which are held to nothing that a busy machine misses: every
    section has its figures, the stream outlives the kill, and no process is left."""
    sets = [f"acceptance.{key}" for key in ("min_speed=0", "max_load=1", "recovery_margin=1d")]
    sets += ["parallel.collective=auto", "parallel.emulated_delay=0", "parallel.deterministic=true"]
    words = [word for key in sets for word in ("--set", key)]
    before, out = {p.pid for p in descendants(os.getpid())}, tmp_path / "page.md"
    assert main(["acceptance", str(CONFIG), "-o", str(out), *SHORT, *words]) == 0
    text = out.read_text()
    titles = [line[3:] for line in text.splitlines() if line.startswith("## ")]
    assert titles == [
        "Demands", "Environment", "Links", "All-reduces", "Memory after loading", "Speed", "verify",
        "A killed rank",
    ]  # fmt: skip
    assert "**Accepted.**" in text
    assert "all bits are equal" in " ".join(text.split())  # the line is folded where the path is long
    assert "signal 9" in text or "exited without reporting" in text  # which is seen first
    assert "The stream has the text of an undisturbed one." in text
    assert {p.pid for p in descendants(os.getpid())} <= before
