"""Derives an Identity from a launcher's environment, or None for a process that is not a rank. Without MPI. Below
launchers/, only this module and topology/hardware/cpu_tier.py read the environment.
"""

from __future__ import annotations

import os
import socket
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

from .world import World

Launcher = Literal["openmpi", "mpich", "slurm", "torchrun"]

# Slurm numbers the steps that are an allocation's own shell or container from the top of 32 bits.
_FIRST_RESERVED_STEP = 0xFFFFFFF0


PTY = "SLURM_PTY_PORT"
"""Set by `srun --pty`. A step of one rank that is started from its shell must have it empty."""


class IdentityError(ValueError):
    """The environment describes an impossible rank; the message has the values and the fix."""


@dataclass(frozen=True, slots=True)
class Identity:
    """A rank as launched, of `size` ranks. `local_rank` numbers the job's ranks on this `node`, in any order."""

    size: int
    rank: int
    local_rank: int
    local_size: int
    node: str
    launcher: Launcher

    def only_task_for(self, world: World) -> bool:
        """Whether this is a Slurm step's single task and the job needs more: a shell or script in it, not a rank."""
        return self.launcher == "slurm" and self.size == 1 < world.size


def identify(environ: Mapping[str, str] | None = None, hostname: str | None = None) -> Identity | None:
    """The rank that `environ` (default: this process's) describes; None if there is none: a plain shell, or a Slurm
    allocation without a step. Raises IdentityError if variables are invalid or contradictory."""
    env = os.environ if environ is None else environ
    node = socket.gethostname() if hostname is None else hostname
    identities = [i for i in (_openmpi(env, node), _mpich(env, node), _torchrun(env, node)) if i is not None]
    slurm = _slurm(env, node)
    # Slurm is the outermost: mpirun, Hydra and torchrun are themselves started by srun, one a node, and hand their
    # own step's variables down. Bare RANK and WORLD_SIZE are only a copy of what srun says.
    if slurm is not None and (
        not identities or (identities[0].launcher == "torchrun" and "TORCHELASTIC_RUN_ID" not in env)
    ):
        identities.insert(0, slurm)
    if not identities:
        return None
    first = identities[0]
    for other in identities[1:]:
        if (first.size, first.rank) != (other.size, other.rank):
            raise IdentityError(
                f"two launchers disagree: {first.launcher} says rank {first.rank} of {first.size}, "
                f"{other.launcher} says rank {other.rank} of {other.size}: start ranks with one of them, or "
                f"unset {' and '.join(_NAMES[other.launcher])}"
            )
    return first


def require_world(identity: Identity, world: World) -> None:
    """Raises IdentityError unless as many ranks were started as `world` has."""
    if identity.size != world.size:
        raise IdentityError(
            f"{identity.launcher} started {identity.size} rank{'s' * (identity.size > 1)}, {world.keys} needs "
            f"{world.size}: start {world.size} (laddertron launch prints the command) or set tensor_parallel_size to "
            "match"
        )


def allocation(environ: Mapping[str, str] | None = None) -> str | None:
    """The id of the Slurm allocation that this process may launch into, or None. A rank is inside one as well."""
    return (os.environ if environ is None else environ).get("SLURM_JOB_ID") or None


_NAMES: dict[Launcher, tuple[str, str]] = {
    "openmpi": ("OMPI_COMM_WORLD_SIZE", "OMPI_COMM_WORLD_RANK"),
    "mpich": ("PMI_SIZE", "PMI_RANK"),
    "torchrun": ("WORLD_SIZE", "RANK"),
    "slurm": ("SLURM_STEP_NUM_TASKS", "SLURM_PROCID"),
}


def _openmpi(env: Mapping[str, str], node: str) -> Identity | None:
    if "OMPI_COMM_WORLD_SIZE" not in env:
        return None
    return _identity(
        env, node, "openmpi", *_NAMES["openmpi"], "OMPI_COMM_WORLD_LOCAL_RANK", "OMPI_COMM_WORLD_LOCAL_SIZE"
    )


def _mpich(env: Mapping[str, str], node: str) -> Identity | None:
    if "PMI_SIZE" not in env:
        return None
    for local_rank, local_size in (("MPI_LOCALRANKID", "MPI_LOCALNRANKS"), ("PMI_LOCAL_RANK", "PMI_LOCAL_SIZE")):
        if local_rank in env:
            return _identity(env, node, "mpich", *_NAMES["mpich"], local_rank, local_size)
    if _in_step(env):  # srun --mpi=pmi2 speaks PMI too, and says the local rank in its own words
        return None
    return _identity(env, node, "mpich", *_NAMES["mpich"], "MPI_LOCALRANKID", "MPI_LOCALNRANKS")


def _torchrun(env: Mapping[str, str], node: str) -> Identity | None:
    if "RANK" not in env or "WORLD_SIZE" not in env:
        return None
    if "LOCAL_RANK" not in env and any(n in env for n in ("OMPI_COMM_WORLD_SIZE", "PMI_SIZE", "SLURM_STEP_ID")):
        # A wrapper copied world size and rank for torch; the launcher itself says where on the node. Only the
        # agreement of the two matters, which identify() checks.
        size, rank = _integer(env, "WORLD_SIZE"), _integer(env, "RANK")
        return Identity(size, rank, 0, 1, node, "torchrun")
    return _identity(env, node, "torchrun", *_NAMES["torchrun"], "LOCAL_RANK", "LOCAL_WORLD_SIZE")


def _in_step(env: Mapping[str, str]) -> bool:
    step = env.get("SLURM_STEP_ID") or env.get("SLURM_STEPID")
    if step is None or "SLURM_PROCID" not in env:
        return False
    return step.isdecimal() and int(step) < _FIRST_RESERVED_STEP


def _slurm(env: Mapping[str, str], node: str) -> Identity | None:
    if not _in_step(env):
        return None
    size_name = "SLURM_STEP_NUM_TASKS" if "SLURM_STEP_NUM_TASKS" in env else "SLURM_NTASKS"
    if env.get(PTY) and env.get(size_name) == "1":
        return None  # a shell in `srun --pty`; larger steps that it starts inherit the variable
    size, rank, local_rank = (_integer(env, n) for n in (size_name, "SLURM_PROCID", "SLURM_LOCALID"))
    tasks_name = "SLURM_STEP_TASKS_PER_NODE" if "SLURM_STEP_TASKS_PER_NODE" in env else "SLURM_TASKS_PER_NODE"
    if tasks_name not in env:
        raise IdentityError(f"SLURM_PROCID={rank} without {tasks_name}: start ranks with srun, one task a GPU")
    tasks = _tasks_per_node(tasks_name, env[tasks_name])
    node_index = _integer(env, "SLURM_NODEID")
    if not 0 <= node_index < len(tasks):
        raise IdentityError(
            f"SLURM_NODEID={node_index} is none of the {len(tasks)} nodes of {tasks_name}={env[tasks_name]!r}"
        )
    identity = Identity(size, rank, local_rank, tasks[node_index], node, "slurm")
    _check(
        identity, f"{size_name}={size} SLURM_PROCID={rank} SLURM_LOCALID={local_rank} {tasks_name}={env[tasks_name]}"
    )
    return identity


def _tasks_per_node(name: str, text: str) -> list[int]:
    """`8(x2),4` -> [8, 8, 4]."""
    tasks: list[int] = []
    for part in text.split(","):
        count, _, times = part.strip().partition("(x")
        times = times.removesuffix(")") if times else "1"
        if not (count.isdecimal() and times.isdecimal()) or int(times) > 1_000_000:
            raise IdentityError(f"{name}={text!r} is not a list such as 8(x2),4")
        tasks.extend([int(count)] * int(times))
    return tasks


def _identity(
    env: Mapping[str, str], node: str, launcher: Launcher, size: str, rank: str, local_rank: str, local_size: str
) -> Identity:
    names = (size, rank, local_rank, local_size)
    values = [_integer(env, name) for name in names]
    identity = Identity(values[0], values[1], values[2], values[3], node, launcher)
    _check(identity, " ".join(f"{name}={value}" for name, value in zip(names, values, strict=True)))
    return identity


def _integer(env: Mapping[str, str], name: str) -> int:
    text = env.get(name)
    if text is None:
        raise IdentityError(
            f"{name} is not set although its launcher's other variables are: "
            "start ranks with mpirun, mpiexec, srun or torchrun, or unset the others"
        )
    if not text.strip().isdecimal():
        raise IdentityError(f"{name}={text!r} is not a number: it is the launcher's to set, unset it")
    return int(text)


def _check(i: Identity, env: str) -> None:
    # Local ranks need not ascend with ranks: Open MPI 5 numbers a node's ranks by the core that it maps them to.
    if not (0 <= i.rank < i.size and 0 <= i.local_rank < i.local_size <= i.size):
        raise IdentityError(
            f"{env}: a rank must be below its world size, a local rank below its node's count, and that count at most "
            "the world size: start ranks with one launcher and unset what another one left"
        )
