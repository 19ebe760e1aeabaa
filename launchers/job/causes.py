"""Finds in a launcher's output what it failed for: a table of messages of ssh, Slurm, Open MPI, PRTE, PMIx, MPICH and
UCX, else the first lines that report an error. Pure.
"""

from __future__ import annotations

import re
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass

from .rank_logs import is_log_line

FIRST, LAST = 400, 200
"""Lines that are kept of a start's output: the cause is often far from the end."""
LINE = 500
"""Characters of a line that are compared."""

_NAME = r"[A-Za-z0-9][A-Za-z0-9._-]*"
_HOST = rf"(?P<host>{_NAME})"
_GAP = r"(?:.*\n){0,12}?"
"""Lines between two of one message."""


@dataclass(frozen=True, slots=True)
class Cause:
    """A message: `pattern` begins and ends at lines' ends, white space is one blank. `text`: what is shown, with the
    pattern's groups (its match, if empty); `fix`: what to do."""

    pattern: str
    text: str = ""
    fix: str = ""


CAUSES = (
    # ssh and the remote shell
    Cause(rf"ssh: connect to host {_HOST} port \d+: .+"),
    Cause(rf"ssh: Could not resolve hostname {_HOST}: .+"),
    Cause(rf"(?:\S+@)?{_HOST}: Permission denied \(.+\)\.?"),
    Cause(rf"No \S+ host key is known for {_HOST} and you have requested strict checking\.?"),
    Cause(rf"Host key for {_HOST} has changed and you have requested strict checking\.?"),
    Cause(rf"(?:Connection closed by|Connection reset by|Connection to|ssh_exchange_identification:) {_HOST} .*"),
    Cause(r"kex_exchange_identification: .+"),
    Cause(r"Connection timed out during banner exchange"),
    # Slurm
    Cause(rf"srun: error: Task launch for .+ failed on node {_HOST}: .+"),
    Cause(rf'srun: error: Unable to resolve "{_HOST}".*'),
    Cause(rf"slurmstepd: error: \*\*\* STEP \S+ ON {_HOST} CANCELLED AT \S+ .+"),
    Cause(rf"srun: error: {_HOST}: tasks? \S+: (?:Out Of Memory|Bus error|Illegal instruction)"),
    Cause(r"slurmstepd: error: Detected \d+ oom.kill event.*"),
    Cause(
        r"srun: error: (?:Couldn't find the specified plugin name for mpi|cannot find mpi plugin|Invalid MPI type).*",
        fix="`srun --mpi=list` shows those that there are: set launch.slurm.mpi",
    ),
    Cause(r"srun: error: Unable to (?:create step for job|allocate resources|confirm allocation).*: .+"),
    Cause(
        r"The application appears to have been direct launched using .srun.,(?:.*\n){1,2}?.*",
        "Open MPI cannot be started by this srun: it was built without Slurm's PMI",
        "set launch.slurm.mpi: pmix, or launch.launcher: openmpi inside the allocation",
    ),
    # programs and libraries of a host
    Cause(r"Host key verification failed\.?"),
    Cause(r"\S*sh: (?:line )?(?:\d+: )?(?:exec: )?\S*(?:orted|prted|hydra_pmi_proxy|srun|python\S*): .+"),
    Cause(r"slurmstepd: error: execve\(\): .+"),
    Cause(r"(?:\[.*\] )?HYDU_create_process .*execvp error on file .+"),
    Cause(r"Executable: (?P<file>.+)", "{file}: no such program"),
    Cause(r"\S+: error while loading shared libraries: .+"),
    Cause(r"\S*python\S*: Error while finding module specification for .+"),
    Cause(r"\S*python\S*: No module named .+"),
    Cause(
        r"[Uu]nknown option:? -P\nusage: (?P<python>\S+) .*", "{python} is older than Python 3.11", "set launch.python"
    ),
    Cause(r"ImportError: cannot load MPI library.*|RuntimeError: cannot load MPI library.*"),
    # memory and disks of a host
    Cause(
        rf"A daemon failed to report back after being spawned\..*\n{_GAP}Remote host: {_HOST}\nDaemon exit status: 213",
        "mpirun's daemon ended there without a message",
        "can it write to its TMPDIR (or /tmp)?",
    ),
    Cause(
        rf"It appears as if there is not enough space for (?P<file>\S+) .*\n{_GAP}Local host: {_HOST}\n"
        r"Space Requested: (?P<need>\d+) B\nSpace Available: (?P<have>\d+) B",
        "not enough space for {file}: {need} bytes requested, {have} available",
        "enlarge that file system (containers: --shm-size) or remove files from it",
    ),
    Cause(
        r".*(?:[Nn]ot enough memory to write total of|Failed to allocate memory pool|shm_open\(.*\) failed|"
        r"MPL_shm_\w+|MPIDU_Init_shm_\w+\(\d+\)).*",
        fix="is /dev/shm of the host large enough?",
    ),
    Cause(
        rf"A call to (?P<call>mkdir|open|mmap|posix_fallocate)\b.* (?:failed|was unable to) .*\n{_GAP}"
        rf"Local host: {_HOST}\n{_GAP}(?:Error|Errno): (?P<error>.+)",
        "{call}: {error}",
    ),
    Cause(r".*\b(?:No space left on device|Disk quota exceeded)\b.*"),
    Cause(r".*\b(?:Too many open files|Cannot allocate memory|Resource temporarily unavailable)\b.*"),
    # networks
    Cause(
        rf"WARNING: Open MPI failed to TCP connect to a peer MPI process\..*\n{_GAP}Local host: {_HOST}\nPID: \d+\n"
        r"Message: (?P<message>.+)\nError: (?P<error>.+)",
        "MPI: {message}: {error}",
        "if that is no network between the nodes (docker0, virbr0), set launch.interface; else open the port",
    ),
    Cause(
        rf"At least one pair of MPI processes are unable to reach each other .*\n{_GAP}"
        rf"Process 1 .* is on host: {_HOST}\nProcess 2 .* is on host: (?P<peer>.+)\nBTLs attempted: (?P<tried>.*)",
        "MPI: no way to {peer} (tried {tried})",
        "set launch.interface to one that both have",
    ),
    Cause(
        rf"WARNING: An invalid value was given for (?P<key>\w+_if_\w+)\. .*\n{_GAP}Local host: {_HOST}\n"
        r"Value: (?P<value>.+)\nMessage: (?P<message>.+)",
        "{key}: {value}: {message}",
        "launch.interface must be on every host",
    ),
    Cause(
        rf"None of the TCP networks specified to be included for out-of-band .*\n{_GAP}Value given: (?P<value>.+)",
        "no such network interface: {value}",
        "launch.interface must be on every host",
    ),
    Cause(
        rf"An attempt was made to make a TCP connection between two hosts:\n{_GAP}Initiating host: {_HOST}\n"
        r"Receiving host: (?P<peer>.+)",
        "{peer} refused its connection: the two hosts differ in their authentication",
    ),
    Cause(r"(?:\[.*\] )?HYDU_sock_connect .*: (?:unable to|connect) .+"),
    Cause(r"(?:\[.*\] )?HYDU_\w+ .*: unable to .+"),
    Cause(
        r"(?:\[.*\] )?.*\bPMIX? ERROR: (?!.*(?:UNREACHABLE|SILENT)).+", fix="PMIx of the launcher and of MPI may differ"
    ),
    # slots and binding
    Cause(
        r"There are not enough slots available in the system to satisfy the (?P<count>\d+).*",
        "fewer slots than {count} ranks",
        "give the hosts more slots, or set launch.oversubscribe: true",
    ),
    Cause(r"A request was made to bind to that would result in binding more.*", fix="set launch.bind_to: none"),
    Cause(r"(?:Abort|Fatal error)\b.*: Fatal error in .+|Fatal error in .+"),
)
"""The most specific first: the first one that matches is the cause."""
_COMPILED = tuple((re.compile(rf"^(?:{cause.pattern})$", re.MULTILINE), cause) for cause in CAUSES)
_HOSTS = re.compile(rf"^(?:Remote host|Node): {_HOST}$", re.MULTILINE)
"""Lines in which Open MPI names the host, near such a message."""
_ENDED = re.compile(
    rf"process rank \d+ with PID \d+ on node (?P<openmpi>{_NAME})|PID \d+ RUNNING AT (?P<mpich>{_NAME})"
    rf"|srun: error: (?P<slurm>{_NAME}): tasks? \S+: Exited with|Process name: \[\S+,(?P<rank>\d+)\]"
)
"""How launchers name the process that ended first."""
_ERROR = re.compile(r"\b(?:error|fatal|cannot|can't|unable|failed|denied|refused|not found|no such)\b", re.IGNORECASE)


def unreachable(output: Sequence[str]) -> tuple[str, str | None] | None:
    """The cause that the output names, prefixed by its host, and the host (None if not named); None if there is no
    known one."""
    text = "\n".join(" ".join(line[:LINE].split()) for line in output if not is_log_line(line))
    first = next(((match, cause) for pattern, cause in _COMPILED if (match := pattern.search(text))), None)
    if first is None:
        return None
    match, cause = first
    host = match.groupdict().get("host") or _host_in(text)
    shown = cause.text.format(**match.groupdict()) if cause.text else " ".join(match[0].split())
    shown = f"{shown}: {cause.fix}" if cause.fix else shown
    return (f"{host}: {shown}" if host else shown), host


def ended_first(output: Sequence[str]) -> int | str | None:
    """The rank, or the host, of the process that ended first, as the launcher says; None if it does not."""
    text = "\n".join(" ".join(line[:LINE].split()) for line in output if not is_log_line(line))
    if (match := _ENDED.search(text)) is None:
        return None
    return int(match["rank"]) if match["rank"] else match[match.lastgroup or 0]


def _host_in(text: str) -> str | None:
    """The host that another known message names."""
    for pattern in (*(pattern for pattern, _ in _COMPILED), _HOSTS):
        for match in pattern.finditer(text):
            if (host := match.groupdict().get("host")) is not None:
                return str(host)
    return None


def first_errors(output: Sequence[str], count: int = 3) -> tuple[str, ...]:
    """The first lines that report an error, without repetitions."""
    lines = dict.fromkeys(" ".join(line[:LINE].split()) for line in output if not is_log_line(line))
    return tuple(line for line in lines if _ERROR.search(line))[:count]


class StartOutput:
    """The output of a launch until its ranks are ready: its first and its last lines, without those that ranks log."""

    def __init__(self) -> None:
        self._first: list[str] = []
        self._last: deque[str] = deque(maxlen=LAST)

    def take(self, line: str) -> None:
        if is_log_line(line):
            return
        if len(self._first) < FIRST:
            self._first.append(line[:LINE])
        else:
            self._last.append(line[:LINE])

    @property
    def lines(self) -> tuple[str, ...]:
        return (*self._first, *self._last)
