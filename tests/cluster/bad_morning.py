"""What goes wrong on the first morning with new hosts, one fault at a time on emulated nodes, and the line that names
it: for `make rehearse` and test_bad_morning.py.
"""

from __future__ import annotations

import contextlib
import json
import re
import shlex
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path

from laddertron import __version__

from cluster.launching import ROOT, Job
from cluster.nodes import Cluster, kill

NAMED_S, LATE_S = 15.0, 135.0
"""From the launch to the first line of the error; of ranks that do not start at all, for which it waits 120 s."""
QUIET = {"TORCH_CPP_LOG_LEVEL": "ERROR", "OMP_NUM_THREADS": "1"}
MODEL = ROOT / "configs" / "demo" / "demo-ladder"


@dataclass(frozen=True, slots=True)
class Fault:
    """`strike` brings it about for the time of a block, and returns further keys of the launch section. `line`: what
    the first line of the error matches. `ends`: whether the run is refused, else a warning names it, and it answers."""

    name: str
    strike: Callable[[Cluster, Path], contextlib.AbstractContextManager[str]]
    line: str
    ends: bool = True
    limit_s: float = NAMED_S
    per_node: int = 1
    hosts: tuple[str, str] = ("n0", "n1")
    before: str = ":"
    """Run by the shell that starts the command."""


def _shell(cluster: Cluster, node: int, command: str) -> None:
    done = cluster.run(node, ["sh", "-ec", command])
    assert done.returncode == 0, done.stderr


def _python(folder: Path, before: str) -> str:
    """A Python that runs a line of shell on n1 first: keys of the launch section that use it."""
    program = folder / "python"
    program.write_text(f'#!/bin/sh\nif [ "$(hostname)" = n1 ]; then {before}; fi\nexec {sys.executable} "$@"\n')
    program.chmod(0o755)
    return f", python: {program}"


@contextlib.contextmanager
def _on_n1(cluster: Cluster, begin: str, end: str) -> Iterator[None]:
    _shell(cluster, 1, begin)
    try:
        yield
    finally:
        _shell(cluster, 1, end)


@contextlib.contextmanager
def _replaced(cluster: Cluster, files: Mapping[Path, Path]) -> Iterator[None]:
    """On n1 other files, or folders, are where those of this machine are."""
    with contextlib.ExitStack() as stack:
        for place, other in files.items():
            at = shlex.quote(str(place))
            stack.enter_context(_on_n1(cluster, f"mount --bind {shlex.quote(str(other))} {at}", f"umount {at}"))
        yield


@contextlib.contextmanager
def _nothing(cluster: Cluster, folder: Path) -> Iterator[str]:
    yield ""


@contextlib.contextmanager
def _late(cluster: Cluster, folder: Path) -> Iterator[str]:
    yield _python(folder, "sleep 600")


@contextlib.contextmanager
def _interface(cluster: Cluster, folder: Path) -> Iterator[str]:
    yield ", interface: ib0"


@contextlib.contextmanager
def _hostname(cluster: Cluster, folder: Path) -> Iterator[str]:
    with _on_n1(cluster, "hostname n0", "hostname n1"):
        yield ""


@contextlib.contextmanager
def _port(cluster: Cluster, folder: Path) -> Iterator[str]:
    cluster.control.firewall(range(22, 23))
    try:
        yield ""
    finally:
        cluster.control.firewall()


@contextlib.contextmanager
def _model(cluster: Cluster, folder: Path) -> Iterator[str]:
    stale = folder / "config.json"
    config = json.loads((MODEL / "config.json").read_text())
    stale.write_text(json.dumps({**config, "rms_norm_eps": 2 * config["rms_norm_eps"]}))
    with _replaced(cluster, {MODEL / "config.json": stale}):
        yield ""


@contextlib.contextmanager
def _no_model(cluster: Cluster, folder: Path) -> Iterator[str]:
    (folder / "empty").mkdir()
    with _replaced(cluster, {MODEL: folder / "empty"}):
        yield ""


@contextlib.contextmanager
def _laddertron(cluster: Cluster, folder: Path) -> Iterator[str]:
    other = folder / "__init__.py"
    other.write_text((ROOT / "__init__.py").read_text().replace(__version__, "9.9"))
    with _replaced(cluster, {ROOT / "__init__.py": other}):
        yield ""


@contextlib.contextmanager
def _torch(cluster: Cluster, folder: Path) -> Iterator[str]:
    packages = Path(str(metadata.distribution("torch").locate_file("")))
    (about,) = packages.glob("torch-*.dist-info/METADATA")
    other = folder / "METADATA"
    other.write_text(about.read_text().replace(f"Version: {metadata.version('torch')}", "Version: 9.9"))
    with _replaced(cluster, {about: other}):
        yield ""


@contextlib.contextmanager
def _no_python(cluster: Cluster, folder: Path) -> Iterator[str]:
    (folder / "bin").mkdir()
    (folder / "bin" / "python").symlink_to(sys.executable)
    (folder / "empty").mkdir()
    with _replaced(cluster, {folder / "bin": folder / "empty"}):
        yield f", python: {folder / 'bin' / 'python'}"


@contextlib.contextmanager
def _memory_limit(cluster: Cluster, folder: Path) -> Iterator[str]:
    group = "/sys/fs/cgroup/morning"
    mount = f"mount -t cgroup -o memory none /sys/fs/cgroup; mkdir -p {group}"
    begin = f"{mount}; echo 120M > {group}/memory.limit_in_bytes"
    with _on_n1(cluster, begin, f"rmdir {group} || :; umount -l /sys/fs/cgroup"):
        yield _python(folder, f"echo $$ > {group}/cgroup.procs")


@contextlib.contextmanager
def _full_disk(cluster: Cluster, folder: Path) -> Iterator[str]:
    at = cluster.scratch / "n1.tmp"
    begin = f"mount -t tmpfs -o size=4k none {at}; head -c 4096 /dev/zero > {at}/full || :"
    with _on_n1(cluster, begin, f"umount {at}"):
        yield ""


@contextlib.contextmanager
def _password(cluster: Cluster, folder: Path) -> Iterator[str]:
    """As ssh does it: asks on the terminal, else in a window, else fails."""
    agent = folder / "agent"
    asks = '(: < /dev/tty) 2> /dev/null || [ "$SSH_ASKPASS_REQUIRE" != never ]'
    refuses = "echo 'n1: Permission denied (publickey,password).' >&2; exit 255"
    agent.write_text(f"#!/bin/sh\nif {asks}; then sleep 600; fi\n{refuses}\n")
    agent.chmod(0o755)
    yield f", rsh_agent: {agent}"


@contextlib.contextmanager
def odd_hosts(cluster: Cluster, folder: Path) -> Iterator[str]:
    """What hosts may be like: on n1 a clock that is hours off, a locale that is not UTF-8, a HOME that does not exist,
    64 open files, a TMPDIR with a path longer than a socket's that runs no programs, the hostname at 127.0.1.1."""
    temporary, own = folder / ("long-" * 30), folder / "hosts"
    temporary.mkdir()
    text = (cluster.scratch / "hosts").read_text().replace(f"{cluster.addresses[1]} n1\n", "")
    own.write_text(f"{text}127.0.1.1 n1\n")
    (folder / "sitecustomize.py").write_text("import time\nreal = time.time\ntime.time = lambda: real() - 25000\n")
    agent, settings = folder / "agent", f"LC_ALL=POSIX PYTHONUTF8=0 PYTHONCOERCECLOCALE=0 PYTHONPATH={folder}"
    words = cluster.agent.read_text().replace('HOME="$HOME"', f"HOME={temporary}/none {settings}")
    agent.write_text(words.replace("TMPDIR=", f"TMPDIR={temporary} REPLACED="))
    agent.chmod(0o755)
    mount = f"mount -t tmpfs -o noexec none {temporary}; mount --bind {own} /etc/hosts"
    with _on_n1(cluster, mount, f"umount {temporary}; umount /etc/hosts"):
        yield f", rsh_agent: {agent}{_python(folder, 'ulimit -n 64')}"


@contextlib.contextmanager
def _quota(cluster: Cluster, folder: Path) -> Iterator[str]:
    group = "/sys/fs/cgroup/morning"
    begin = f"mount -t cgroup -o cpu none /sys/fs/cgroup; mkdir -p {group}; echo 50000 > {group}/cpu.cfs_quota_us"
    with _on_n1(cluster, begin, f"rmdir {group} || :; umount -l /sys/fs/cgroup"):
        yield _python(folder, f"echo $$ > {group}/cgroup.procs")


@contextlib.contextmanager
def _memory(cluster: Cluster, folder: Path) -> Iterator[str]:
    with _on_n1(cluster, "mount -t tmpfs -o size=64k shm /dev/shm", "umount /dev/shm"):
        yield ""


FAULTS = (
    Fault("the rank on n1 does not start", _late, r"rank 1 on n1 did not start within 120 s", limit_s=LATE_S),
    Fault("launch.interface: ib0, which no host has", _interface, r"ib0 has no address on this host, which has .*eth0"),
    Fault("n1 has the hostname n0", _hostname, r"two machines have the hostname n0: 10\.213\.0\.\d .* 10\.213\.0\.\d"),
    Fault("a firewall drops every port but 22", _port, r"n1: .*10\.213\.0\.1 port \d+, from n1 to n0: timed out"),
    Fault("the model's config.json on n1 is another", _model, r"rank 1 \(node n1.*config\.json"),
    Fault("n1 has a CPU quota of 0.5", _quota, r"on n1: .*the CPU quota of the cgroup is 0\.5 of", ends=False),
    Fault("/dev/shm of n1 has 64 KiB", _memory, r"n1: /dev/shm has \d+ KiB free of 64 KiB", per_node=2),
)


SIBLINGS = (
    Fault("n1 has another laddertron", _laddertron, r"rank 1 \(node n1.*it runs laddertron 9\.9"),
    Fault("n1 has another torch", _torch, r"rank 1 \(node n1.*torch is 9\.9 there"),
    Fault("n1 has no Python at this path", _no_python, r"n1: .*no such program"),
    Fault("n1 has no model", _no_model, r"rank 1 \(node n1.*config\.json is missing there"),
    Fault("n1 allows 120 MiB of memory", _memory_limit, r"rank 1 \(node n1.*signal 9.*limit of its cgroup, 120 MiB"),
    Fault("this process may open 64 files", _nothing, r"may open only 64 files", before="ulimit -n 64"),
    Fault("TMPDIR of n1 is full", _full_disk, r"n1: mpirun's daemon ended there.*TMPDIR"),
    Fault("ssh asks for a password", _password, r"n1: Permission denied"),
    Fault("n0 twice", _nothing, r"launch\.hosts: n0 and 10\.213\.0\.1 are one machine", hosts=("n0", "10.213.0.1")),
)
"""Further ones, by what they change: versions, files, limits, the remote shell, names."""


def meet(fault: Fault, cluster: Cluster, folder: Path) -> tuple[str, float]:
    """Runs two lines of the demo model with one fault; the line that names it, and the seconds from the launch to it.
    Raises AssertionError where the first line of the error, or of a run that goes on a warning, does not."""
    with fault.strike(cluster, folder) as keys:
        hosts = ", ".join(f"'{name}:{fault.per_node}'" for name in fault.hosts)
        agent = "" if "rsh_agent" in keys else f", rsh_agent: {cluster.agent}"
        section = f"launcher: openmpi, hosts: [{hosts}]{agent}{keys}"
        job = Job(folder, section, tp=2 * fault.per_node, lines=2, tokens=4)
        # as a host without a quota would compute: with one, the second thread is warned of
        command = job.command(sys.executable, launch=False, arguments=("--set", "engine.threads=2"))
        command = ["sh", "-c", f'{fault.before}; exec "$@"', "sh", *command]
        process = cluster.start(0, command, QUIET, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE)
        mark, lines, naming = "error:" if fault.ends else "WARNING", list[str](), list[tuple[str, float]]()
        began = time.monotonic()
        try:
            for line in process.stderr:
                if "laddertron: starting" in line and not lines:
                    began = time.monotonic()
                lines.append(line.rstrip())
                if line.startswith(mark):
                    naming.append((line.rstrip(), time.monotonic() - began))
            code = process.wait()
        finally:
            kill(process)
    text = "\n".join(lines)
    named = next((at for at in naming if fault.ends or re.search(fault.line, at[0])), ("", 0.0))
    assert re.search(fault.line, named[0]), text
    assert (code != 0) == fault.ends, text
    assert job.answered() == ([] if fault.ends else job.names), text
    return named
