"""Cluster: nodes n0, n1, … on this machine, each with its own network, hostname, IPC, /dev/shm and processors, behind a
switch of settable delay, rate and loss. cluster.c has the namespaces and the switch; here they are started, entered and
ended. When the Cluster's process goes, however it goes, every process on every node goes with it.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import shlex
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any

CONTROL = "LADDERTRON_CLUSTER_CONTROL"
"""Names, on every node, the switch's control socket: a rank may change the link in the middle of a benchmark."""
_CLONE_NEWNET = 0x40000000
PASSED_ON = ("PATH", "HOME", "LANG", "PYTHONPATH")


@dataclass(frozen=True, slots=True)
class Stats:
    """What the switch did so far: seconds of processor time, frames, frames dropped, bytes [from][to]."""

    cpu_s: float
    frames: int
    dropped: int
    carried: tuple[tuple[int, ...], ...]

    @property
    def bytes(self) -> int:
        return sum(map(sum, self.carried))


class Control:
    """The switch's knobs, from this process or from one on a node."""

    def __init__(self, path: str) -> None:
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._socket.settimeout(10.0)
        self._socket.connect(path)

    def _ask(self, words: str) -> list[str]:
        self._socket.send(words.encode())
        status, *rest = self._socket.recv(8192).decode().split()
        if status != "ok":
            raise ValueError(f"{words}: {status} {' '.join(rest)}")
        return rest

    def link(self, delay_s: float = 0.0, bytes_per_s: float | None = None, loss: float = 0.0) -> None:
        """Of every pair of nodes: one-way delay, bytes/s of each port, and the share of frames that are lost."""
        self._ask(f"link {round(delay_s * 1e9)} {bytes_per_s or 0.0} {round(loss * 1e6)}")

    def cut(self, a: int, b: int) -> None:
        """No frame passes between nodes a and b any more, in either direction."""
        self._ask(f"cut {a} {b}")

    def fix(self, a: int, b: int) -> None:
        self._ask(f"fix {a} {b}")

    def firewall(self, ports: range = range(0)) -> None:
        """Lets no TCP connection begin to another port between any nodes; without ports: none is in the way."""
        self._ask(f"firewall {ports[0]} {ports[-1]}" if ports else "firewall 0 0")

    def largest(self, sender: int, receiver: int, nbytes: int = 0) -> None:
        """Drops larger packets on their way from one node to another, which nobody tells the sender; 0: none."""
        self._ask(f"largest {sender} {receiver} {nbytes}")

    def stats(self) -> Stats:
        cpu, frames, dropped, *carried = map(int, self._ask("stats"))
        side = round(len(carried) ** 0.5)
        rows = tuple(tuple(carried[at : at + side]) for at in range(0, len(carried), side))
        return Stats(cpu * 1e-9, frames, dropped, rows)

    def close(self) -> None:
        self._socket.close()


def why_not() -> str | None:
    """Why there can be no cluster on this machine, or None."""
    if sys.platform != "linux" or os.geteuid() != 0:
        return "network namespaces need root on Linux"
    for program in ("cc", "nsenter", "taskset"):
        if shutil.which(program) is None:
            return f"{program} is not installed"
    if not Path("/dev/net/tun").exists():
        return "no /dev/net/tun (in a container: --device /dev/net/tun --cap-add NET_ADMIN,SYS_ADMIN)"
    try:
        with Cluster(1):
            return None
    except (OSError, RuntimeError, subprocess.CalledProcessError) as error:
        return f"namespaces are not available: {error}"


class Cluster:
    """A context: nodes stand on entry and are gone on exit. `cores[i]`: the processors of node i (default: all).
    Raises RuntimeError with the switch's words if they cannot be made."""

    def __init__(
        self,
        nodes: int,
        *,
        delay_s: float = 0.0,
        cores: Sequence[Sequence[int]] | None = None,
        mtu: int = 9000,
    ) -> None:
        self.names = tuple(f"n{i}" for i in range(nodes))
        self.addresses = tuple(f"10.213.0.{i + 1}" for i in range(nodes))
        everything = sorted(os.sched_getaffinity(0))
        self.cores = tuple(tuple(c) for c in cores) if cores is not None else (tuple(everything),) * nodes
        self._delay_s, self._mtu = delay_s, mtu
        self._running: list[subprocess.Popen[str]] = []

    def __enter__(self) -> Cluster:
        # mpirun splits the agent's words at blanks, and the path of a socket has room for 107 bytes
        usual = tempfile.gettempdir()
        plain = len(usual) < 60 and len(usual.split()) == 1
        self.scratch = Path(tempfile.mkdtemp(prefix="laddertron-cluster-", dir=usual if plain else "/tmp"))
        try:
            self._start()
        except BaseException:
            self.__exit__(None, None, None)
            raise
        return self

    def _start(self) -> None:
        source = Path(__file__).with_name("cluster.c")
        program = self.scratch / "cluster"
        subprocess.run(["cc", "-O2", "-pthread", "-o", str(program), str(source)], check=True)
        hosts = [f"{address} {name}" for address, name in zip(self.addresses, self.names, strict=True)]
        (self.scratch / "hosts").write_text("\n".join(["127.0.0.1 localhost", *hosts, ""]))
        for name, cores in zip(self.names, self.cores, strict=True):
            (self.scratch / f"{name}.cores").write_text(",".join(map(str, cores)))
            (self.scratch / f"{name}.tmp").mkdir()
        self.agent = self.scratch / "agent"
        self.agent.write_text(_AGENT.format(scratch=self.scratch, control=CONTROL))
        self.agent.chmod(0o755)
        self._switch = subprocess.Popen(
            [str(program), str(self.scratch), str(len(self.names)), str(self._mtu)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            start_new_session=True,  # it outlives what kills this process's group, for as long as it takes to clear up
        )
        assert self._switch.stdout is not None
        assert self._switch.stderr is not None
        answer = self._switch.stdout.readline().split()
        if not answer:
            raise RuntimeError(self._switch.stderr.read().strip() or "the switch ended without a word")
        self.init = int(answer[1])
        self.control = Control(str(self.scratch / "control"))
        self.control.link(self._delay_s)

    def command(self, node: int, argv: Sequence[str]) -> list[str]:
        """What starts argv on a node, in this process's working directory."""
        inside = f"cd {shlex.quote(os.getcwd())} && exec {shlex.join(argv)}"
        return ["nsenter", "-t", str(self.init), "-p", "-m", "--", str(self.agent), self.names[node], inside]

    def start(self, node: int, argv: Sequence[str], env: Mapping[str, str] | None = None, **keys: Any) -> Any:
        """A Popen (text) of argv on a node, in a session of its own, with PATH and the like and `env`. It is ended with
        the cluster at the latest."""
        own = {name: os.environ[name] for name in PASSED_ON if name in os.environ}
        keys.setdefault("stdin", subprocess.DEVNULL)
        words = [f"{name}={value}" for name, value in {**own, **(env or {})}.items()]
        process = subprocess.Popen(
            self.command(node, ["env", *words, *argv] if words else argv), text=True, start_new_session=True, **keys
        )
        self._running.append(process)
        return process

    def run(
        self, node: int, argv: Sequence[str], env: Mapping[str, str] | None = None, timeout: float = 300.0
    ) -> subprocess.CompletedProcess[str]:
        """As subprocess.run with output captured; past the timeout (seconds) the session is killed."""
        process = self.start(node, argv, env, stdout=subprocess.PIPE, stderr=subprocess.PIPE)
        try:
            out, err = process.communicate(timeout=timeout)
        except BaseException:
            kill(process)
            raise
        return subprocess.CompletedProcess(argv, process.returncode, out, err)

    @contextlib.contextmanager
    def network(self, node: int) -> Iterator[None]:
        """Inside the block the calling thread, and every thread and process it starts, is on the node's network: its
        sockets are that node's, its files are the machine's as before. Raises OSError."""
        libc = ctypes.CDLL(None, use_errno=True)

        def enter(descriptor: int) -> None:
            if libc.setns(descriptor, _CLONE_NEWNET):
                raise OSError(ctypes.get_errno(), "setns")

        with (
            open("/proc/thread-self/ns/net") as back,
            open(f"/proc/{self._outer_pid(node)}/ns/net") as there,
        ):
            enter(there.fileno())
            try:
                yield
            finally:
                enter(back.fileno())

    def _outer_pid(self, node: int) -> int:
        """The node's first process, as this process counts: its own pid namespace counts otherwise."""
        inner = (self.scratch / f"{self.names[node]}.pid").read_text().strip()
        namespace = os.readlink(f"/proc/{self.init}/ns/pid")
        for name in filter(str.isdecimal, os.listdir("/proc")):
            with contextlib.suppress(OSError):
                if os.readlink(f"/proc/{name}/ns/pid") == namespace:
                    status = Path(f"/proc/{name}/status").read_text()
                    if status.partition("NSpid:")[2].splitlines()[0].split()[-1] == inner:
                        return int(name)
        raise ProcessLookupError(f"node {self.names[node]} has no process {inner}")

    def mpirun(self, program: Sequence[str], per_node: int = 1, names: Sequence[str] = ()) -> list[str]:
        """Open MPI's command, for node 0, that runs `program` on every node; `names` of variables to pass on."""
        slots = ",".join(f"{name}:{per_node}" for name in self.names)
        words = [mpi_program("mpirun"), "--allow-run-as-root", "--oversubscribe", "--bind-to", "none"]
        words += ["-np", str(per_node * len(self.names)), "--host", slots, "--map-by", f"ppr:{per_node}:node"]
        words += ["--mca", "plm_rsh_agent", str(self.agent), "--mca", "oob_tcp_if_include", "eth0"]
        words += ["--mca", "btl_tcp_if_include", "eth0", "--mca", "pml", "ob1", "--mca", "btl", "self,sm,tcp"]
        for name in (CONTROL, *(n for n in PASSED_ON if n in os.environ), *names):
            words += ["-x", name]
        return [*words, *program]

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None
    ) -> None:
        control, switch = getattr(self, "control", None), getattr(self, "_switch", None)
        if control is not None:
            control.close()
        if switch is not None:
            switch.stdin.close()  # it ends the nodes' init, and with that everything on them
            switch.wait()
            for pipe in (switch.stdout, switch.stderr):
                pipe.close()
        for process in self._running:
            kill(process)
            for stream in (process.stdout, process.stderr):
                if stream is not None:
                    stream.close()
        shutil.rmtree(self.scratch, ignore_errors=True)


def kill(process: subprocess.Popen[str]) -> None:
    """Ends the whole session that `Cluster.start` made."""
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()


def mpi_program(name: str) -> str:
    """mpirun beside this Python, else the one on PATH."""
    beside = Path(sys.executable).with_name(name)
    found = str(beside) if beside.exists() else shutil.which(name)
    if found is None:
        raise RuntimeError(f"no {name} beside {sys.executable} nor on PATH")
    return found


_AGENT = """#!/bin/sh
# In place of ssh, inside the cluster: agent [options] NODE COMMAND… ; the environment stays behind, as with ssh.
while :; do
    case "$1" in
    -l | -o | -p | -i) shift 2 ;;
    -*) shift ;;
    *) break ;;
    esac
done
node=$1
shift
read -r pid < {scratch}/"$node".pid || {{ echo "agent: no node $node" >&2; exit 255; }}
exec nsenter -t "$pid" -n -u -i -m -- env -i PATH="$PATH" HOME="$HOME" TMPDIR={scratch}/"$node".tmp \
    {control}={scratch}/control taskset -c "$(cat {scratch}/"$node".cores)" sh -c "$*"
"""
