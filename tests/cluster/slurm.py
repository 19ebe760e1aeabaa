"""Slurm on the emulated cluster: munged and slurmctld on node 0, a slurmd on every node, all with one folder of their
own for configuration, key, sockets and state; nothing is read from /etc/slurm or /etc/munge.
"""

from __future__ import annotations

import contextlib
import os
import secrets
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import TracebackType

from cluster.launching import running
from cluster.nodes import Cluster, kill, why_not

CLIENTS = ("srun", "sbatch", "salloc", "scontrol", "scancel")
PROGRAMS = {"munged": "munge", "slurmctld": "slurmctld", "slurmd": "slurmd", **dict.fromkeys(CLIENTS, "slurm-client")}
"""What is run, and Debian's package of each."""
PORTS = range(6817, 6900)
PMIX = "libpmix.so"
"""What Slurm's own PMIx plugin opens, by this name: without it `srun --mpi=pmix` starts nothing."""
DAEMONS = ("munged", "slurmctld", "slurmd", "slurmscriptd")
_MUNGE = ("key-file", "munge.key"), ("socket", "munge"), ("pid-file", "munge.pid"), ("log-file", "munge.log")


def has_library(name: str) -> bool:
    """Whether the loader finds it; asked in another process, since a library cannot be given back."""
    code = "import ctypes, sys; ctypes.CDLL(sys.argv[1])"
    return subprocess.run([sys.executable, "-c", code, name], capture_output=True, check=False).returncode == 0


def missing() -> str | None:
    """What of Slurm is not here and how to have it, or None."""
    absent = {name: package for name, package in PROGRAMS.items() if shutil.which(name) is None}
    if not has_library(PMIX):
        absent[PMIX] = "libpmix-dev"
    if absent:
        packages = " ".join(sorted(set(absent.values())))
        return f"{', '.join(absent)}: not installed (Debian: apt-get install {packages})"
    return None


def until(what: str | Callable[[], str], done: Callable[[], bool], timeout_s: float = 30.0) -> None:
    """Looks ten times a second: other programs' files and states announce nothing."""
    deadline = time.monotonic() + timeout_s
    while not done():
        assert time.monotonic() < deadline, f"{what if isinstance(what, str) else what()}: not within {timeout_s:g} s"
        time.sleep(0.1)


class Slurm:
    """A context on a running Cluster; its daemons are ended, each by its own id, on exit."""

    def __init__(self, cluster: Cluster, cpus: int = 2) -> None:
        self._cluster, self._cpus = cluster, cpus
        self._daemons: list[subprocess.Popen[str]] = []

    def __enter__(self) -> Slurm:
        self.folder = Path(tempfile.mkdtemp(prefix="laddertron-slurm-"))
        self.folder.chmod(0o755)  # munged serves no socket that others cannot reach
        try:
            self._start()
        except BaseException:
            self.__exit__(None, None, None)
            raise
        return self

    def _start(self) -> None:
        for name in ("state", *(f"{n}.{kind}" for n in self._cluster.names for kind in ("tmp", "spool"))):
            (self.folder / name).mkdir()
        key = self.folder / "munge.key"
        key.touch(0o600)
        key.write_bytes(secrets.token_bytes(128))
        nodes = "\n".join(
            f"NodeName={name} NodeAddr={address} CPUs={self._cpus} State=UNKNOWN"
            for name, address in zip(self._cluster.names, self._cluster.addresses, strict=True)
        )
        first = f"{self._cluster.names[0]}({self._cluster.addresses[0]})"
        names, ports = ",".join(self._cluster.names), f"{PORTS[2]}-{PORTS[-1]}"  # after slurmctld's and slurmd's
        text = _CONF.format(folder=self.folder, first=first, nodes=nodes, names=names, ports=ports)
        (self.folder / "slurm.conf").write_text(text)
        (self.folder / "cgroup.conf").write_text("CgroupPlugin=cgroup/v1\n")
        self.env = {"SLURM_CONF": str(self.folder / "slurm.conf")}
        munge = [f"--{option}={self.folder}/{file}" for option, file in (*_MUNGE, ("seed-file", "munge.seed"))]
        self._daemon(0, "munged", "--foreground", *munge)
        until("munged's socket", (self.folder / "munge").exists, 10.0)
        self._daemon(0, "slurmctld", "-D", "-i")
        for number, name in enumerate(self._cluster.names):
            self._daemon(number, "slurmd", "-D", "-N", name)
        want = f"idle {len(self._cluster.names)}"
        until("idle nodes", lambda: want in self.run(["sinfo", "-h", "-o", "%t %D"]).stdout)

    def _daemon(self, node: int, *argv: str) -> None:
        log = (self.folder / f"{len(self._daemons)}-{argv[0]}.err").open("w")
        with log:
            self._daemons.append(self._cluster.start(node, argv, self.env, stdout=log, stderr=log))

    def run(
        self, argv: Sequence[str], env: Mapping[str, str] | None = None, timeout: float = 30.0
    ) -> subprocess.CompletedProcess[str]:
        """On node 0, where a user would log in."""
        return self._cluster.run(0, argv, {**self.env, **(env or {})}, timeout)

    def submit(self, script: Path, *options: str) -> str:
        """sbatch; the job's number."""
        done = self.run(["sbatch", "--parsable", *options, str(script)])
        assert done.returncode == 0, done.stderr
        return done.stdout.strip()

    def job(self, number: str) -> dict[str, str]:
        """What scontrol shows of a job."""
        shown = self.run(["scontrol", "show", "job", number, "--oneliner"]).stdout
        return dict(word.partition("=")[::2] for word in shown.split())

    def logs(self) -> str:
        """The daemons' last words, for a failed assertion."""
        files = sorted(self.folder.glob("*.log"))
        return "\n".join(f"== {file.name}\n{file.read_text(errors='replace')[-2000:]}" for file in files)

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None
    ) -> None:
        mine = {pid for pid, words in running(self._cluster).items() if any(name in words for name in DAEMONS)}
        for pid in mine:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGTERM)
        try:  # they write their state once more before they go
            until("the end of Slurm's daemons", lambda: not mine & running(self._cluster).keys(), 10.0)
        finally:
            for daemon in self._daemons:
                kill(daemon)
        shutil.rmtree(self.folder, ignore_errors=True)


_CONF = """ClusterName=laddertron
SlurmctldHost={first}
SlurmUser=root
SrunPortRange={ports}
SlurmdUser=root
AuthType=auth/munge
AuthInfo=socket={folder}/munge,cred_expire=5
CredType=cred/munge
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/%n.spool
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/%n.pid
SlurmctldLogFile={folder}/slurmctld.log
SlurmdLogFile={folder}/%n.log
TmpFS={folder}/%n.tmp
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
SelectType=select/cons_tres
SelectTypeParameters=CR_CPU
SchedulerParameters=sched_interval=2,batch_sched_delay=0,bf_interval=2
JobRequeue=1
ReturnToService=2
KillWait=5
MailProg=/bin/true
{nodes}
PartitionName=all Nodes={names} Default=YES MaxTime=INFINITE State=UP
"""


if __name__ == "__main__":  # `make slurm-test`: what is missing is an error there, not seven skipped tests
    sys.exit(why_not() or missing())
