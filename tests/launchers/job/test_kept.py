"""What `bench` starts ends with them: orders reach it, its end is seen, and kill -9 leaves nothing."""

from __future__ import annotations

import os
import select
import signal
import subprocess
import sys
import textwrap
import time
from pathlib import Path

import pytest
from laddertron.launchers.control.processes import descendants
from laddertron.launchers.job import supervised_process as kept
from waiting import HANG_S, until

CONFIG = Path(__file__).parents[3] / "configs" / "demo-standard.yaml"
STUBBORN = (
    "import signal, sys; signal.signal(signal.SIGTERM, signal.SIG_IGN); print('here', flush=True); signal.pause()"
)


def all_end(pidfds: list[int], within_s: float) -> bool:
    """Whether every process ends in time. Closes the descriptors."""
    try:
        deadline, left = time.monotonic() + within_s, list(pidfds)
        while left:
            ended, _, _ = select.select(left, [], [], max(0.0, deadline - time.monotonic()))
            if not ended:
                return False
            left = [pidfd for pidfd in left if pidfd not in ended]
        return True
    finally:
        for pidfd in pidfds:
            os.close(pidfd)


def test_orders_arrive_and_their_end_ends_it() -> None:
    read, write = os.pipe()
    echo = "import sys\nfor line in sys.stdin: print(line.strip() + '!', flush=True)\nsys.exit(3)"
    keeper = kept.start(
        [sys.executable, "-c", echo], {}, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, orders=read
    )
    os.close(read)
    assert keeper.stdout is not None
    try:
        os.write(write, b"go\n")
        assert keeper.stdout.readline() == "go!\n"
        os.close(write)
        assert keeper.wait(HANG_S) == 3
    finally:
        kept.end(keeper)
        keeper.stdout.close()


def test_what_will_not_end_is_ended(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kept, "GRACE_S", 0.2)
    keeper = kept.start([sys.executable, "-c", STUBBORN], {}, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL)
    assert keeper.stdout is not None
    assert keeper.stdout.readline() == "here\n"
    pidfds = [os.pidfd_open(process.pid) for process in descendants(keeper.pid)]
    assert len(pidfds) == 1
    kept.end(keeper, 0.1)
    keeper.stdout.close()
    assert keeper.returncode == -signal.SIGKILL
    assert all_end(pidfds, 0.0)


def test_kill_9_of_the_caller_ends_it() -> None:
    script = f"""
        import sys
        from laddertron.launchers.job import supervised_process as kept
        kept.GRACE_S = 0.2
        job = kept.start([sys.executable, "-c", {STUBBORN!r}], {{}}, stdout=1, stderr=2)
        job.wait()
    """
    words = [sys.executable, "-c", textwrap.dedent(script)]
    with subprocess.Popen(words, stdout=subprocess.PIPE, text=True) as caller:
        assert caller.stdout is not None
        assert caller.stdout.readline() == "here\n"
        pidfds = [os.pidfd_open(process.pid) for process in descendants(caller.pid)]
        assert len(pidfds) == 2
        caller.kill()
    assert all_end(pidfds, HANG_S)


@pytest.mark.parametrize(
    ("words", "program"),
    [(["bench", "latency", str(CONFIG), "--repeats", "1000"], "bench_rank"),
     (["verify", str(CONFIG), "--cases", "1000"], "verify_rank")],
    ids=["bench", "verify"],
)  # fmt: skip
def test_kill_9_of_a_command_ends_its_ranks(words: list[str], program: str, tmp_path: Path) -> None:
    """Two ranks of the demo model under mpirun have started; the command is killed."""
    command = [sys.executable, "-m", "laddertron.launchers.cli", *words]
    with subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, cwd=tmp_path) as caller:

        def started() -> bool:
            assert caller.poll() is None
            found = sum(_runs(process.pid, program) for process in descendants(caller.pid))
            return found >= 4  # keeper, mpirun, two ranks

        until(started, pause_s=0.05)
        pidfds = [os.pidfd_open(process.pid) for process in descendants(caller.pid)]
        caller.kill()
    assert all_end(pidfds, HANG_S)


def _runs(pid: int, program: str) -> bool:
    try:
        return program.encode() in Path(f"/proc/{pid}/cmdline").read_bytes()
    except OSError:
        return False
