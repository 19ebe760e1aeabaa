"""Why a launcher could not start ranks on a host, from what ssh, Open MPI, MPICH and Slurm print. Pure."""

from __future__ import annotations

import re
from collections.abc import Sequence

_HOST = r"(?P<host>[A-Za-z0-9][A-Za-z0-9._-]*)"
_CAUSES = tuple(
    re.compile(pattern)
    for pattern in (
        rf"ssh: connect to host {_HOST} port \d+: .+",
        rf"ssh: Could not resolve hostname {_HOST}: .+",
        rf"(?:\S+@)?{_HOST}: Permission denied \(.+\)\.?",
        rf"No \S+ host key is known for {_HOST} and you have requested strict checking\.?",
        rf"Host key for {_HOST} has changed and you have requested strict checking\.?",
        rf"srun: error: Task launch for .+ failed on node {_HOST}: .+",
        rf'srun: error: Unable to resolve "{_HOST}".*',
        r"Host key verification failed\.?",
        r"\S*sh: (?:line )?(?:\d+: )?(?:exec: )?\S*(?:orted|prted|hydra_pmi_proxy|srun|python\S*): .+",
        r"slurmstepd: error: execve\(\): .+",
        r"(?:\[.*\] )?HYDU_create_process .*execvp error on file .+",
        r"Executable: .+",
    )
)
"""Lines that say it, the best first; some without their host."""
_HOSTS = tuple(re.compile(rf"{title}: {_HOST}") for title in ("Remote host", "Node"))
"""Where Open MPI names the host in the block around such a line."""


def unreachable(output: Sequence[str]) -> tuple[str, str | None] | None:
    """The line that says why, behind its host, and the host where the launcher names it; None where no line is
    known."""
    lines = [" ".join(line.split()) for line in output]
    found = next((match for pattern in _CAUSES for line in lines if (match := pattern.fullmatch(line))), None)
    if found is None:
        return None
    named = [match for pattern in (*_CAUSES, *_HOSTS) for line in lines if (match := pattern.fullmatch(line))]
    host = next((name for match in (found, *named) if (name := match.groupdict().get("host"))), None)
    text = re.sub(r"^Executable: (.+)", r"\1: no such program", found[0])
    return (f"{host}: {text}" if host else text), host
