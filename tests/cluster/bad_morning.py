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
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

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
    stale, file = folder / "config.json", shlex.quote(str(MODEL / "config.json"))
    config = json.loads((MODEL / "config.json").read_text())
    stale.write_text(json.dumps({**config, "rms_norm_eps": 2 * config["rms_norm_eps"]}))
    with _on_n1(cluster, f"mount --bind {shlex.quote(str(stale))} {file}", f"umount {file}"):
        yield ""


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


def meet(fault: Fault, cluster: Cluster, folder: Path) -> tuple[str, float]:
    """Runs two lines of the demo model with one fault; the line that names it, and the seconds from the launch to it.
    Raises AssertionError where the first line of the error, or of a run that goes on a warning, does not."""
    with fault.strike(cluster, folder) as keys:
        hosts = ", ".join(f"'{name}:{fault.per_node}'" for name in ("n0", "n1"))
        section = f"launcher: openmpi, hosts: [{hosts}], rsh_agent: {cluster.agent}{keys}"
        job = Job(folder, section, tp=2 * fault.per_node, lines=2, tokens=4)
        # as a host without a quota would compute: with one, the second thread is warned of
        command = job.command(sys.executable, launch=False, arguments=("--set", "engine.threads=2"))
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
