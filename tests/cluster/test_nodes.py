"""The emulated cluster itself: the link does what it is told, nodes share nothing else, and nothing is left behind."""

from __future__ import annotations

import os
import select
import signal
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest
from waiting import HANG_S, until

from cluster.nodes import Cluster, kill

pytestmark = [pytest.mark.cluster, pytest.mark.usefixtures("possible")]

ECHO = """
import socket, sys
s = socket.create_server(("10.213.0.2", 0))
print(s.getsockname()[1], flush=True)
while True:
    c = s.accept()[0]
    c.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    while data := c.recv(1 << 20):
        c.sendall(data[:1])
    c.close()
"""

ASK = """
import socket, sys, time
c = socket.create_connection(("10.213.0.2", int(sys.argv[4])), timeout=float(sys.argv[3]))
c.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
size, times = int(sys.argv[1]), []
for _ in range(int(sys.argv[2])):
    began = time.perf_counter()
    c.sendall(b"x" * size)
    if size == 1:
        c.recv(1)
    else:
        c.shutdown(socket.SHUT_WR)
        while c.recv(1 << 20):
            pass
    times.append(time.perf_counter() - began)
print(min(times))
"""


def ask(cluster: Cluster, size: int, count: int, timeout_s: float = 60.0) -> float:
    """The quickest of `count` exchanges of `size` bytes between the nodes, in seconds."""
    server = cluster.start(1, [sys.executable, "-c", ECHO], stdout=subprocess.PIPE)
    try:
        port = server.stdout.readline().strip()
        done = cluster.run(0, [sys.executable, "-c", ASK, str(size), str(count), str(timeout_s), port])
        assert done.returncode == 0, done.stderr
        return float(done.stdout)
    finally:
        kill(server)


def ask_at_least(least_s: float, cluster: Cluster, size: int, count: int) -> float:
    took = ask(cluster, size, count)
    assert took >= least_s
    return took


def test_the_link_has_its_delay(link: Cluster) -> None:
    """A round trip never takes less than two one-way delays, and without a delay, or with it, one is seen that takes
    little more: however busy the machine is, one in many finds it idle."""
    delay = 20e-3
    until(lambda: ask(link, 1, 20) < delay)
    link.control.link(delay_s=delay)
    until(lambda: ask_at_least(2 * delay, link, 1, 20) < 3 * delay)


def test_the_link_has_its_rate(link: Cluster) -> None:
    """8 MB over 8 MB/s never take less than a second; without a limit, or with it, a transfer is seen that takes little
    more than it must."""
    until(lambda: ask(link, 8_000_000, 1) < 1.0)
    link.control.link(bytes_per_s=8e6)
    until(lambda: ask_at_least(1.0, link, 8_000_000, 1) < 2.0)


def test_frames_are_lost_and_tcp_mends_it(link: Cluster) -> None:
    """A lossy link still carries everything, in more frames than arrive."""
    before = link.control.stats()
    link.control.link(loss=0.02)
    ask(link, 4_000_000, 1)
    after = link.control.stats()
    assert after.dropped - before.dropped >= 3
    assert after.carried[0][1] - before.carried[0][1] >= 4_000_000


def test_a_cut_link_carries_nothing_and_can_be_mended(link: Cluster) -> None:
    """With the cable out the connection cannot be made in time; with it in again it can."""
    link.control.cut(0, 1)
    before = link.control.stats()
    with pytest.raises(AssertionError, match="timed out"):
        ask(link, 1, 1, timeout_s=0.5)
    assert link.control.stats().bytes == before.bytes
    link.control.fix(0, 1)
    ask(link, 1, 1)


def test_a_wrong_command_is_refused(link: Cluster) -> None:
    with pytest.raises(ValueError, match="no such command"):
        link.control.cut(0, 7)


def test_nodes_share_nothing_but_the_link(link: Cluster) -> None:
    """Names, shared memory, loopback and abstract sockets are each node's own: what n0 makes, n1 does not see."""
    make = textwrap.dedent("""
        import socket, os, sys
        a = socket.create_server(("127.0.0.1", 8)); b = socket.socket(socket.AF_UNIX); b.bind("\\0meet"); b.listen()
        open("/dev/shm/seen", "w").close()
        print(socket.gethostname(), flush=True)
        sys.stdin.read()
    """)
    look = textwrap.dedent("""
        import socket, os
        print(socket.gethostname(), os.listdir("/dev/shm"))
        for kind, at in ((socket.AF_INET, ("127.0.0.1", 8)), (socket.AF_UNIX, "\\0meet")):
            try:
                socket.socket(kind).connect(at)
                print("reached")
            except ConnectionRefusedError:
                print("refused")
    """)
    maker = link.start(0, [sys.executable, "-c", make], stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    try:
        assert maker.stdout.readline().strip() == "n0"
        seen = {n: link.run(n, [sys.executable, "-c", look]).stdout.split("\n")[:3] for n in (0, 1)}
    finally:
        maker.stdin.close()
        maker.wait()
    assert seen[1] == ["n1 []", "refused", "refused"]
    assert seen[0] == ["n0 ['seen']", "reached", "reached"], "the control: on its own node everything is seen"


def test_a_node_has_the_cores_it_was_given(possible: None) -> None:
    first = min(os.sched_getaffinity(0))
    with Cluster(1, cores=[[first]]) as cluster:
        words = [sys.executable, "-c", "import os; print(sorted(os.sched_getaffinity(0)))"]
        assert cluster.run(0, words).stdout.strip() == f"[{first}]"


def test_nothing_is_left_when_the_cluster_ends(possible: None) -> None:
    """A process that ignores every signal it can, on each of two nodes, and their folder: gone on exit."""
    stubborn = [
        sys.executable,
        "-c",
        "import signal, sys; signal.pthread_sigmask(0, range(1, 65)); print(1, flush=True); sys.stdin.read()",
    ]
    with Cluster(2) as cluster:
        for node in (0, 1):
            started = cluster.start(node, stubborn, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
            assert started.stdout.readline().strip() == "1"
        within = processes_of(cluster.init)
        scratch = cluster.scratch
    assert len(within) >= 5
    assert not [pid for pid in within if Path(f"/proc/{pid}").exists()]
    assert not scratch.exists()


@pytest.mark.parametrize("group", [False, True], ids=["alone", "with its group"])
def test_nothing_is_left_when_its_owner_is_killed(group: bool) -> None:
    """SIGKILL of the process that holds the cluster, or of its whole process group, as a shell's or a batch system's
    is: no `finally` runs, and still nodes, processes and folder go."""
    owner = textwrap.dedent(f"""
        import sys
        sys.path.insert(0, {str(Path(__file__).parents[1])!r})
        from cluster.nodes import Cluster
        with Cluster(2) as cluster:
            cluster.start(1, ["sleep", "1000"])
            print(cluster.init, cluster._switch.pid, cluster.scratch, flush=True)
            sys.stdin.read()
    """)
    with subprocess.Popen(
        [sys.executable, "-c", owner],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        start_new_session=True,
    ) as process:
        assert process.stdout is not None
        init, switch, scratch = process.stdout.readline().split()
        within = processes_of(int(init))
        watched = [os.pidfd_open(int(pid)) for pid in (init, switch)]
        (os.killpg if group else os.kill)(process.pid, signal.SIGKILL)
    for descriptor in watched:
        assert select.select([descriptor], [], [], HANG_S)[0], "still alive long after its owner"
        os.close(descriptor)
    assert within
    assert not [pid for pid in within if Path(f"/proc/{pid}").exists()]
    assert not Path(scratch).exists()


def processes_of(init: int) -> list[int]:
    """All processes of a PID namespace, by the numbers they have here."""
    space = os.readlink(f"/proc/{init}/ns/pid")
    found = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdecimal():
            try:
                if os.readlink(entry / "ns" / "pid") == space:
                    found.append(int(entry.name))
            except OSError:
                continue
    return found
