"""The keeper: it ends as its command did, and no descendant of the command outlives it."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import tempfile
import textwrap
import time
from pathlib import Path

from job_tools import left, process_id
from laddertron.launchers.control import processes
from waiting import FOR_EVER_S, HANG_S, until

KEEPER = (sys.executable, "-P", "-m", "laddertron.launchers.job.keeper")


def keep(script: str, grace: str = "0.3", *told: str) -> subprocess.Popen[str]:
    """A keeper over `script`, whose arguments are `told`, with its lifeline and what it writes in the test's hands."""
    scratch = tempfile.mkdtemp(prefix="laddertron-test-")
    command = [*KEEPER, grace, scratch, "--", sys.executable, "-c", textwrap.dedent(script), *told]
    pipe = subprocess.PIPE
    return subprocess.Popen(
        command, stdin=pipe, stdout=pipe, stderr=subprocess.STDOUT, text=True, start_new_session=True
    )


def test_the_keeper_ends_as_its_command_did() -> None:
    for script, status in (("", 0), ("raise SystemExit(7)", 7), ("import os; os.kill(os.getpid(), 9)", -9)):
        keeper = keep(script)
        assert keeper.wait(HANG_S) == status
        for pipe in (keeper.stdin, keeper.stdout):
            assert pipe is not None
            pipe.close()


def test_the_keeper_kills_the_stubborn_and_the_hidden(tmp_path: Path) -> None:
    """The command ignores SIGTERM and has a grandchild in a session of its own whose parent is gone: when the lifeline
    ends, both are killed after the grace, and the scratch folder goes too."""
    script = """
        import json, os, signal, sys
        def tell(name):
            with open(os.path.join(sys.argv[1], "new-" + name), "w") as file:
                json.dump([os.getpid(), os.environ["PRTE_MCA_prte_local_tmpdir_base"]], file)
            os.rename(file.name, os.path.join(sys.argv[1], name))
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        if os.fork() == 0:
            os.setsid()
            if os.fork() == 0:
                tell("hidden")
                while True: signal.pause()
            os._exit(0)
        os.wait()
        tell("stubborn")
        while True: signal.pause()
    """
    with keep(script, "0.3", str(tmp_path)) as keeper:
        assert keeper.stdin is not None
        assert keeper.stdout is not None
        told, said = [tmp_path / "hidden", tmp_path / "stubborn"], keeper.stdout

        def both() -> bool:
            assert keeper.poll() is None, f"ended with {keeper.returncode}: {said.read()}"
            return all(file.exists() for file in told)

        until(both, lambda: str([file.name for file in told if file.exists()]))
        (hidden, scratch), (stubborn, same) = (json.loads(file.read_text()) for file in told)
        assert scratch == same
        assert os.path.isdir(scratch)
        began = time.monotonic()
        keeper.stdin.close()
        assert keeper.wait(HANG_S) == -signal.SIGKILL
        assert time.monotonic() - began >= 0.3
        assert left([hidden, stubborn]) == []
        assert not os.path.exists(scratch)


def test_a_keeper_asked_at_once_ends_its_command_at_once() -> None:
    """However early the request comes, SIGTERM reaches the command: it does not run on until the grace is over."""
    with keep("import signal; signal.pause()", grace=str(FOR_EVER_S)) as keeper:
        assert keeper.stdin is not None
        keeper.stdin.close()
        assert keeper.wait(HANG_S) == -signal.SIGTERM


def test_each_open_mpi_gets_one_word_for_its_session_folder() -> None:
    """5's for this host, 4's for all: ranks of 4 refuse to start where one for this host stands beside it."""
    with keep("import os; print(*sorted(k for k in os.environ if k.endswith('_tmpdir_base')))") as keeper:
        assert keeper.stdout is not None
        said = keeper.stdout.read()  # before the lifeline ends: with it the command would
        assert keeper.wait(HANG_S) == 0, said
    assert said.split() == ["OMPI_MCA_orte_tmpdir_base", "PRTE_MCA_prte_local_tmpdir_base"]


def test_a_recycled_pid_is_never_killed() -> None:
    """The pid is right, the start time is another process's: nothing happens to it."""
    child = subprocess.Popen([sys.executable, "-c", "import signal; signal.pause()"])
    here = process_id(child.pid)
    assert not processes.kill(processes.ProcessId(here.pid, here.started - 1))
    assert child.poll() is None
    assert here in processes.descendants(os.getpid())
    assert processes.kill(here)
    child.wait()
    assert not processes.kill(here)
    assert not processes.is_alive(here)
