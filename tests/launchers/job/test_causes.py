"""What a launch failed for, from messages as launchers print them, wherever in the output they are."""

from __future__ import annotations

import pytest
from laddertron.launchers.job.causes import CAUSES, FIRST, LAST, StartOutput, first_errors, unreachable
from laddertron.launchers.job.detect import Evidence
from laddertron.launchers.job.options import JobTimeouts
from laddertron.launchers.job.rank_board import RankBoard
from laddertron.topology.placement.world import World
from test_detect import hello, ready_board

SHM = """
It appears as if there is not enough space for /dev/shm/sm_segment.n1.0.db500001.1 (the shared-memory backing
file). It is likely that your MPI job will now either abort or experience
performance degradation.

  Local host:  n1
  Space Requested: 16777216 B
  Space Available: 65536 B
"""
DOCKER = """
WARNING: Open MPI failed to TCP connect to a peer MPI process.  This
should not happen.

Your Open MPI job may now hang or fail.

  Local host: n0
  PID:        771
  Message:    connect() to 172.17.0.1:1024 failed
  Error:      Connection refused (111)
"""
NO_WAY = """
At least one pair of MPI processes are unable to reach each other for
MPI communications.  This means that no Open MPI device has indicated
that it can be used to communicate between these processes.  This is
an error; Open MPI requires that all MPI processes be able to reach
each other.  This error can sometimes be the result of forgetting to
specify the "self" BTL.

  Process 1 ([[14511,1],0]) is on host: n0
  Process 2 ([[14511,1],1]) is on host: n1
  BTLs attempted: self tcp
"""
INTERFACE = """
None of the TCP networks specified to be included for out-of-band communications
could be found:

  Value given: eth7

Please revise the specification and try again.
"""
SLOTS = """
There are not enough slots available in the system to satisfy the 4
slots that were requested by the application:

  python
"""
NOISE = """
prterun has exited due to process rank 1 with PID 0 on node n1 calling
"abort". This may have caused other processes in the application to be
terminated by signals sent by prterun (as reported here).
You can avoid this message by specifying -quiet on the prterun command
line.
"""


@pytest.mark.parametrize(
    ("message", "host", "says"),
    [
        (SHM, "n1", "not enough space for /dev/shm/sm_segment.n1.0.db500001.1: 16777216 bytes requested, 65536 avail"),
        (DOCKER, "n0", "connect() to 172.17.0.1:1024 failed: Connection refused (111)"),
        (NO_WAY, "n0", "no way to n1 (tried self tcp)"),
        (INTERFACE, None, "no such network interface: eth7"),
        (SLOTS, None, "fewer slots than 4 ranks"),
        ("[proxy:0:1@n1] HYDU_sock_connect (lib/utils/sock.c:145): unable to connect from \"n1\" to \"n0\" (No route "
         "to host)", None, 'unable to connect from "n1" to "n0" (No route to host)'),
        ("[1700.1] [n1:55  :0]  mm_posix.c:233  UCX  ERROR Not enough memory to write total of 4292720 bytes. "
         "Please check that /dev/shm or the directory you specified has more available memory.", None, "of 4292720"),
        ("srun: error: Couldn't find the specified plugin name for mpi/pmix looking at all files", None, "mpi/pmix"),
        ("slurmstepd: error: *** STEP 12.0 ON n1 CANCELLED AT 2026-01-01T00:00:00 DUE TO NODE FAILURE ***", "n1",
         "NODE FAILURE"),
        ("srun: error: n1: task 1: Out Of Memory", "n1", "Out Of Memory"),
        ("prted: error while loading shared libraries: libpmix.so.2: cannot open shared object file: No such file or "
         "directory\n  Remote host:   n1", "n1", "libpmix.so.2"),
        ("/usr/bin/python3: Error while finding module specification for 'laddertron.launchers.rank.worker' "
         "(ModuleNotFoundError: No module named 'laddertron')", None, "No module named 'laddertron'"),
        ("unknown option -P\nusage: /opt/python3.8 [option] ... [-c cmd | -m mod | file | -] [arg] ...", None,
         "/opt/python3.8 is older than Python 3.11: set launch.python"),
        ("kex_exchange_identification: Connection closed by remote host", None, "kex_exchange"),
        ("[n1:00033] PMIX ERROR: PMIX_ERR_OUT_OF_RESOURCE in file gds_shmem2.c at line 1051", None, "OUT_OF_RESOURCE"),
    ],
)  # fmt: skip
def test_a_known_message_is_picked_from_the_whole_output(message: str, host: str | None, says: str) -> None:
    """It comes amid lines of ranks and far from the end, behind the launcher's own."""
    logged = ["2026-01-01 00:00:00,000 WARNING rank 0 on n0 laddertron.x: Fatal error in nothing"] * 300
    output = StartOutput()
    for line in [*logged, *message.splitlines(), *logged, *NOISE.splitlines() * 60]:
        output.take(line)
    assert len(output.lines) <= FIRST + LAST
    cause = unreachable(output.lines)
    assert cause is not None
    assert (cause[1], says in cause[0]) == (host, True), cause
    assert unreachable(NOISE.splitlines()) is None


def test_it_is_in_the_reason_of_a_start_that_fails_in_any_way_and_of_no_later_failure() -> None:
    for kind in ("rank_lost", "launch", "load_stalled", "consequence", "launcher_exit"):
        board = RankBoard(World(2), JobTimeouts(), 0.0)
        board.heard(0, hello(0), 1.0)
        board.sign(Evidence(kind, 0 if kind == "rank_lost" else None, "it failed"))
        failure = board.judge(1, tuple(NOISE.splitlines()), {}, start_output=SHM.splitlines())
        assert "it failed; the output says: n1: not enough space for /dev/shm" in failure.reason
        assert failure.culprit.node == ("node-0" if kind == "rank_lost" else "n1")
    board = ready_board(2)
    board.gone(0, "")
    assert "not enough space" not in board.judge(1, ("killed",), {}, start_output=SHM.splitlines()).reason


def test_without_a_known_message_the_first_errors_come_before_the_last_lines() -> None:
    lines = ["starting", "E: Failed to reach the moon", "E: Failed to reach the moon", *NOISE.strip().splitlines()]
    assert first_errors(lines) == ("E: Failed to reach the moon",)
    board = RankBoard(World(2), JobTimeouts(), 0.0)
    board.sign(Evidence("launcher_exit", None, "mpirun ended with status 1"))
    reason = board.judge(1, tuple(lines[-6:]), {}, start_output=lines).reason
    assert "first errors: E: Failed to reach the moon; last output: prterun has exited" in reason


@pytest.mark.parametrize("known", [True, False])
@pytest.mark.parametrize(
    "ended",
    [
        "prterun detected that one or more processes exited with non-zero status\nProcess name: [prterun-n0-19@1,1]",
        "prterun noticed that process rank 1 with PID 51 on node n1 exited on signal 11 (Segmentation fault).",
        "=   BAD TERMINATION OF ONE OF YOUR APPLICATION PROCESSES\n=   PID 1208 RUNNING AT n1\n=   EXIT CODE: 1",
        "srun: error: n1: task 1: Exited with exit code 1",
        "srun: error: n1: tasks 8-15: Exited with exit code 1",
    ],
)
def test_a_message_without_a_host_is_that_of_the_process_that_ended_first(ended: str, known: bool) -> None:
    """Before any rank is ready; afterwards the ranks' own evidence says more."""
    message = "/usr/bin/python3: No module named laddertron" if known else "terrible things"
    output = (message, *ended.splitlines())
    board = RankBoard(World(2), JobTimeouts(), 0.0, seats=("n0", "n1"))
    board.sign(Evidence("launcher_exit", None, "mpirun ended with status 1"))
    failure = board.judge(1, output, {}, start_output=output)
    assert failure.reason.startswith("n1: "), failure.reason
    assert message in failure.reason
    assert failure.culprit.node == "n1"


def test_no_pattern_takes_long_on_a_long_output() -> None:
    """A pattern that backtracks over lines would hold the supervisor up: bounded by the lines kept and their length."""
    lines = ["Local host: x " + "a " * 240] * (FIRST + LAST)
    lines[0] = "It appears as if there is not enough space for x y"
    assert unreachable(lines) is None
    assert len(CAUSES) == len({cause.pattern for cause in CAUSES})
