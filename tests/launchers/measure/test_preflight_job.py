"""Preflight's ranks under a launcher that may never end: signs of life, limits, and who is named."""

from __future__ import annotations

import os
import sys
import threading
from pathlib import Path
from typing import NoReturn

import pytest
from laddertron.launchers.cli import __main__ as cli
from laddertron.launchers.cli.commands import preflight
from laddertron.launchers.cli.commands.preflight import end
from laddertron.launchers.job import supervised_process
from laddertron.launchers.measure import preflight_job
from laddertron.launchers.measure.preflight_job import DONE_S, END_S, MEET_S, SIGNS, START_S, Signs, Watch, hold, sign
from laddertron.topology.placement.identity import Identity
from waiting import FOR_EVER_S, HANG_S

CONFIGS = Path(__file__).resolve().parents[3] / "configs"
WORDS = "laddertron preflight: rank {} {}\n"


def test_what_a_launcher_says_of_an_end_is_not_shown() -> None:
    """Its boilerplate between rules, once a rank has said itself how it ended; before, it may be all that is said."""
    rule, words = "-" * 74 + "\n", "Primary job  terminated normally, but 1 process returned\n"
    early = Signs(["n0", "n1"], 0.0)
    assert [early.take(line, 1.0) for line in (rule, "ssh: no route to host\n", rule)] == [False] * 3
    for said in ("laddertron preflight: rank 0 done\n", "error: rank 0 on n0: broken\n"):
        signs = Signs(["n0", "n1"], 0.0)
        signs.take(said, 1.0)
        assert [signs.take(line, 2.0) for line in (rule, words, rule, "and this\n")] == [True, True, True, False]


def test_what_ranks_say_between_a_launchers_rules_is_shown_and_counts() -> None:
    """Rank 1's error and rank 0's last sign come in the middle of the launcher's words, or after a rule that is never
    closed."""
    rule, words = "-" * 74 + "\n", "Primary job  terminated normally, but 1 process returned\n"
    signs = Signs(["n0", "n1"], 0.0)
    signs.take(WORDS.format(0, "done"), 1.0)
    said = (rule, words, "error: rank 1 on n1: broken\n", words, WORDS.format(0, "done"), words)
    assert [signs.take(line, 2.0) for line in said] == [True, True, False, True, True, True]
    assert signs.deadline == 2.0 + DONE_S
    assert signs.missing() == ""


def test_every_line_of_an_error_says_whose_it_is(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def left(code: int) -> NoReturn:
        raise SystemExit(code)

    monkeypatch.setattr(os, "_exit", left)
    with pytest.raises(SystemExit):
        end(Identity(2, 1, 0, 1, "n1", "openmpi"), "Traceback:\n  File x\nOops", 1)
    shown = capsys.readouterr().err
    assert shown.splitlines() == [f"error: rank 1 on n1: {line}" for line in ("Traceback:", "  File x", "Oops")]


def test_signs_say_how_long_to_wait() -> None:
    """Until all have started, until all have met, then as long as it takes; a rank's error or the end of the work
    leaves a little. Signs are not shown, other lines are."""
    signs = Signs(("n0", "n1"), 100.0)
    assert signs.deadline == 100.0 + START_S
    assert signs.missing().startswith("error: rank 0 on n0, rank 1 on n1 did not start in 120 s")
    assert signs.take(WORDS.format(0, "started"), 101.0)
    assert not signs.take("WARNING: something\n", 101.0)
    assert signs.missing().startswith("error: rank 1 on n1 did not start")
    assert signs.deadline == 100.0 + START_S
    assert signs.take(WORDS.format(1, "started"), 102.0)
    assert signs.deadline == 102.0 + MEET_S
    assert signs.take(WORDS.format(0, "met"), 103.0)
    assert signs.missing().startswith("error: rank 1 on n1 did not meet the others")
    assert signs.take(WORDS.format(1, "met"), 103.0)
    assert signs.missing() == ""
    waits: float | None = signs.deadline
    assert waits is None
    assert signs.take(WORDS.format(0, "done"), 200.0)
    assert signs.deadline == 200.0 + DONE_S
    assert not signs.take("error: rank 1 on n1: CollectiveTimeout\n", 201.0)
    assert not signs.take("error: rank 0 on n0: CollectiveTimeout\n", 205.0)
    assert signs.deadline == 201.0 + END_S


def test_a_rank_gives_signs_only_where_somebody_listens(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.delenv(SIGNS, raising=False)
    sign(3, "started")
    assert capsys.readouterr().err == ""
    monkeypatch.setenv(SIGNS, "1")
    sign(3, "started")
    assert capsys.readouterr().err == WORDS.format(3, "started")


def test_an_interrupt_is_one_line(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    def interrupted(*_: object) -> int:
        raise KeyboardInterrupt

    monkeypatch.setattr(preflight, "hold", interrupted)
    assert cli.main(["preflight", str(CONFIGS / "demo.yaml")]) == 130
    assert capsys.readouterr().err.split() == ["interrupted"]


def held(program: str) -> tuple[int, str]:
    """`program` in Python as the launcher of two ranks; (status, what was shown)."""
    shown: list[str] = []
    status = hold((sys.executable, "-c", program), dict(os.environ), ("n0", "n1"), shown.append)
    return status, "".join(shown)


def test_a_launcher_that_ends_is_left_alone() -> None:
    said = "import sys; sys.stderr.write('hello\\nladdertron preflight: rank 0 started\\n'); sys.exit(2)"
    assert held(said) == (2, "hello\n")


@pytest.mark.parametrize("tag", ["[1,0]<stderr>: ", "0: ", "half a line of a library's"])
def test_signs_are_known_behind_a_launchers_tag(tag: str) -> None:
    """mpirun --tag-output and srun --label write before every line; else ranks would seem never to have started."""
    signs = Signs(("n0",), 100.0)
    assert signs.take(tag + WORDS.format(0, "started"), 101.0)
    assert signs.take(tag + WORDS.format(0, "met"), 102.0)
    assert signs.missing() == ""
    assert not signs.take(f"{tag}error: rank 0 on n0: gone\n", 103.0)
    assert signs.deadline == 103.0 + END_S


def test_a_launcher_whose_hosts_are_silent_is_killed(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """With what it started, and the ranks are named."""
    kept = Signs.take

    def take(self: Signs, line: str, now: float) -> bool:
        told = kept(self, line, now)
        self.deadline = now  # rank 0 has started: the other's time is over
        return told

    monkeypatch.setattr(Signs, "take", take)
    pid = tmp_path / "pid"
    program = f"""
import signal, subprocess, sys, time
signal.signal(signal.SIGTERM, lambda *_: None)
child = subprocess.Popen(["sleep", "600"], start_new_session=True)
open({str(pid)!r}, "w").write(str(child.pid))
sys.stderr.write("laddertron preflight: rank 0 started\\n")
sys.stderr.flush()
time.sleep(600)
"""
    monkeypatch.setattr(supervised_process, "GRACE_S", 0.2)
    status, shown = held(program)
    assert (status, shown.count("\n")) == (1, 1)
    assert "error: rank 1 on n1 did not start" in shown
    with pytest.raises(ProcessLookupError):
        os.kill(int(pid.read_text()), 0)


def test_a_launcher_that_outlives_its_ranks_is_killed(monkeypatch: pytest.MonkeyPatch) -> None:
    """What the rank said is enough."""
    monkeypatch.setattr(preflight_job, "END_S", 0.2)
    program = "import sys, time; sys.stderr.write('error: rank 0 on n0: gone\\n'); sys.stderr.flush(); time.sleep(600)"
    assert held(program) == (1, "error: rank 0 on n0: gone\n")


def test_a_wait_that_lasts_too_long_ends_the_rank() -> None:
    """Contexts in one another: the inner one's words; one that ended in time is forgotten."""
    said: list[str] = []
    came = threading.Event()

    def end(words: str) -> None:
        said.append(words)
        came.set()

    watch = Watch(FOR_EVER_S, end)
    with watch.over(lambda: "never"):
        pass
    with watch.over(lambda: "the outer"), watch.over(lambda: "rank 1 did not answer", 0.05):
        assert came.wait(HANG_S)
    assert said == ["rank 1 did not answer (allowed: 0 s)"]


def test_nothing_is_waited_for_once_a_wait_with_another_inside_has_ended(monkeypatch: pytest.MonkeyPatch) -> None:
    timers: list[threading.Timer] = []

    class Kept(threading.Timer):
        def start(self) -> None:
            timers.append(self)
            super().start()

    monkeypatch.setattr(threading, "Timer", Kept)
    watch = Watch(FOR_EVER_S, lambda words: None)
    with watch.over(lambda: "the outer"):
        with watch.over(lambda: "the inner"):
            assert [timer.finished.is_set() for timer in timers] == [True, False]
        assert [timer.finished.is_set() for timer in timers] == [True, True, False]
    assert all(timer.finished.is_set() for timer in timers)
