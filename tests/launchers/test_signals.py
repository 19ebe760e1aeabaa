"""Signals as systemd, container runtimes, nohup and terminals send them, and laddertron as process 1."""

from __future__ import annotations

import contextlib
import http.client
import json
import os
import shutil
import signal
import subprocess
import sys
import textwrap
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from faults.night import Night, line
from laddertron.engine import child
from laddertron.launchers.cli.commands.reload import _reload_signal
from laddertron.launchers.control import processes
from waiting import HANG_S, until

ROOT = Path(__file__).parents[2]
NAMESPACES = os.geteuid() == 0 and shutil.which("unshare") is not None
first_process = pytest.mark.skipif(not NAMESPACES, reason="a process namespace needs root and unshare")


@contextlib.contextmanager
def served(night: Night) -> Iterator[Night]:
    try:
        night.start()
        night.ready(HANG_S)
        yield night
    finally:
        night.close()


@pytest.mark.parametrize("launcher", ["openmpi", pytest.param("torchrun", marks=pytest.mark.slow)])
def test_a_signal_to_every_process_of_the_service_drains(tmp_path: Path, launcher: str) -> None:
    """As systemd sends SIGTERM, and as `timeout` and a kill of its group do, twice to the daemon: the open stream goes
    on to its end, and the daemon exits with 0."""
    night = Night(tmp_path, real=True, sets=(f"launch.launcher={launcher}", "parallel.emulated_delay=2ms"))
    with served(night):
        body = {"model": "demo", "prompt": "Once", "max_tokens": 100, "ignore_eos": True, "stream": True}
        connection = http.client.HTTPConnection("127.0.0.1", night.port, timeout=HANG_S)
        connection.request("POST", "/v1/completions", json.dumps(body), {"content-type": "application/json"})
        answer = connection.getresponse()
        assert answer.readline().startswith(b"data:")
        for process in (*processes.descendants(night.process.pid), processes.ProcessId(night.process.pid, 0)):
            os.kill(process.pid, signal.SIGTERM)
        os.kill(night.process.pid, signal.SIGINT)  # another number: of two equal ones the kernel may deliver one
        rest = answer.read()
        assert rest.endswith(b"data: [DONE]\n\n"), rest[-500:]
        assert b'"finish_reason":"length"' in rest
        assert night.process.wait(HANG_S) == 0
    assert not night.events("failure")


HANGING = """\
import os, pathlib, sys, time
from laddertron.launchers.cli.__main__ import main
real, flag = os.write, pathlib.Path(sys.argv.pop(1))
def write(descriptor, data):
    if flag.exists() and os.readlink(f"/proc/self/fd/{descriptor}").endswith("store.count"):
        flag.with_suffix(".hangs").touch()
        time.sleep(3600)
    return real(descriptor, data)
os.write = write
sys.exit(main(sys.argv[1:]))
"""


def test_a_second_sigterm_ends_a_daemon_whose_disk_hangs(tmp_path: Path) -> None:
    """The first one waits for the disk. At the second the daemon, its ranks and its connections are gone."""
    night = Night(tmp_path, real=True, sets=("parallel.emulated_delay=0s",))
    flag = tmp_path / "flag"
    night.argv[1:4] = ["-c", HANGING, str(flag), "serve"]
    with served(night):
        flag.touch()
        family = night.everyone()
        with ThreadPoolExecutor(1) as threads:
            upload = threads.submit(night.submit, [line("a", 4, 1)])
            until(flag.with_suffix(".hangs").exists)
            os.kill(night.process.pid, signal.SIGTERM)
            until(lambda: any("drained" in event["message"] for event in night.events("drain")))
            with pytest.raises(subprocess.TimeoutExpired):
                night.process.wait(0.3)
            os.kill(night.process.pid, signal.SIGTERM)
            assert night.process.wait(HANG_S) == 128 + signal.SIGTERM
            assert upload.exception(HANG_S) is not None
        until(lambda: not any(processes.is_alive(process) for process in family))


def test_a_rank_ends_only_by_its_parents_signal() -> None:
    program = (
        "import signal, sys; from laddertron.launchers.control.processes import ended_by_parent_alone as ready\n"
        "ready(); print('up', flush=True); sys.stdin.read()"
    )
    pipe = subprocess.PIPE
    for number in (signal.SIGTERM, signal.SIGINT):
        with subprocess.Popen([sys.executable, "-c", program], stdin=pipe, stdout=pipe, text=True) as rank:
            assert rank.stdout is not None
            assert rank.stdout.readline() == "up\n"
            done = subprocess.run(["kill", f"-{int(number)}", str(rank.pid)], check=True)
            assert done.returncode == 0
            with pytest.raises(subprocess.TimeoutExpired):
                rank.wait(0.2)
            rank.send_signal(number)
            assert rank.wait(HANG_S) == -number


@pytest.mark.parametrize("ignored", [True, False])
def test_a_daemon_under_nohup_reloads_by_command_alone(tmp_path: Path, ignored: bool) -> None:
    """SIGHUP of a terminal that closes asks for nothing, though another daemon reloads by it."""
    night = Night(tmp_path, real=True, sets=("parallel.emulated_delay=0s",))
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN if ignored else signal.SIG_DFL)
    try:
        with served(night):
            assert _reload_signal(night.process.pid) == (signal.SIGUSR2 if ignored else signal.SIGHUP)
            os.kill(night.process.pid, signal.SIGHUP)
            if ignored:
                os.kill(night.process.pid, signal.SIGUSR2)
            until(lambda: night.events("reload"))
            assert len([event for event in night.events("reload") if "reading" in event["message"]]) == 1
            assert night.stop() == 0
    finally:
        signal.signal(signal.SIGHUP, before)


FIRST = """\
import os, signal, sys, time
from laddertron.launchers.control.first_process import go_on_below
{before}
if os.getpid() == 1:
    go_on_below()
{after}
"""


def as_first(after: str, before: str = "") -> subprocess.Popen[str]:
    """The program as process 1 of a namespace."""
    program = FIRST.format(before=textwrap.dedent(before), after=textwrap.dedent(after))
    argv = ["unshare", "--pid", "--fork", "--mount-proc", "--kill-child", sys.executable, "-c", program]
    return subprocess.Popen(argv, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)


@first_process
def test_as_process_1_it_reaps_orphans_and_ends_as_its_command_did() -> None:
    program = """
        if os.fork() == 0:
            if os.fork() == 0:
                os._exit(0)
            os._exit(0)
        os.wait()
        def state(pid):
            try:
                return open(f"/proc/{pid}/stat").read().rpartition(")")[2].split()[0]
            except OSError:
                return ""
        def zombies():
            return sum(state(name) == "Z" for name in os.listdir("/proc") if name.isdigit())
        deadline = time.monotonic() + 60
        while zombies() and time.monotonic() < deadline:
            time.sleep(0.01)
        print("zombies", zombies(), "pid", os.getpid() > 1, flush=True)
        sys.exit(7)
    """
    with as_first(program) as done:
        assert done.communicate(timeout=HANG_S)[0] == "zombies 0 pid True\n"
    assert done.returncode == 7


@first_process
@pytest.mark.parametrize("handled", [False, True])
def test_process_1_passes_signals_on(handled: bool) -> None:
    """Before the command has a handler SIGTERM ends it, as it would another process; later the handler gets it."""
    handler = "signal.signal(signal.SIGTERM, lambda *_: sys.exit(3))" if handled else ""
    program = f"{handler}\nprint('up', flush=True)\nsignal.pause()"
    with as_first(program) as running:
        assert running.stdout is not None
        assert running.stdout.readline() == "up\n"
        (first,) = [p.pid for p in processes.descendants(running.pid) if _parent(p.pid) == running.pid]
        os.kill(first, signal.SIGTERM)
        assert running.wait(HANG_S) == (3 if handled else 128 + signal.SIGTERM)


def _parent(pid: int) -> int:
    return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])


@first_process
def test_the_daemon_as_process_1_drains_once(tmp_path: Path) -> None:
    """A container's runtime sends SIGTERM to all its processes; process 1 passes its own on: that is no second one."""
    night = Night(tmp_path, real=True, sets=("parallel.emulated_delay=0s",))
    night.argv[:0] = ["unshare", "--pid", "--fork", "--mount-proc", "--kill-child"]
    with served(night):
        inside = [p.pid for p in processes.descendants(night.process.pid) if "serve" in processes.words_of(p.pid)]
        assert len(inside) == 2
        for pid in inside:
            os.kill(pid, signal.SIGTERM)
        assert night.process.wait(HANG_S) == 0
        assert night.events("drain")


def test_children_have_no_signal_blocked() -> None:
    status = "print([l.split()[1] for l in open('/proc/self/status') if l.startswith('SigBlk')])"
    done = subprocess.run([sys.executable, "-c", status], **child.options(), capture_output=True, text=True)
    assert int(done.stdout.strip("[]'\n"), 16) == 0
