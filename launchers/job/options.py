"""Job options: the number of ranks, the address, time limits in seconds."""

from __future__ import annotations

from dataclasses import dataclass, field

from ...topology.hardware.ports import ANY_PORT
from ...topology.placement.world import World
from ..compose.host_names import HostNames
from ..control.messages import SILENCE_S
from .rank_logs import RankWords


@dataclass(frozen=True, slots=True)
class JobTimeouts:
    """Time limits in seconds."""

    launch_s: float = 120.0
    """From mpirun's start until every rank has sent Hello."""
    load_stall_s: float = 600.0
    """Without progress of any rank's loading."""
    suspect_s: float = 3.0
    dead_s: float = 10.0
    """Without a message from a rank."""
    first_step_s: float = 120.0
    least_step_s: float = 10.0
    """See StepWatch."""
    silence_s: float = SILENCE_S
    """A rank exits after this time without a message of its owner."""


@dataclass(frozen=True, slots=True)
class JobOptions:
    """Times in seconds. `control_host`: loopback if every rank is on this host, else the address of an interface that
    the ranks' nodes can reach; the control channel listens there, on one of `ports`. `restart=False`: the first failure
    is final (`laddertron run`)."""

    world: World
    """Of this replica alone."""
    replica: int = 0
    control_host: str = "127.0.0.1"
    ports: range = ANY_PORT
    restart: bool = True
    max_failures: int = 3
    """Failures in a row without progress after which the job is still launched again; the next one is final."""
    timeouts: JobTimeouts = field(default_factory=JobTimeouts)
    settle_s: float = 0.5
    """From the first evidence of a failure until its cause is decided: the explanation may arrive later."""
    shutdown_s: float = 10.0
    """For ranks to exit after Shutdown."""
    kill_grace_s: float = 2.0
    """For mpirun, from SIGTERM to SIGKILL."""
    gone_s: float = 15.0
    """For killed processes to exit; if one does not, its node is quarantined."""
    healthy_s: float = 60.0
    """Being ready for this long counts as progress."""
    standby: bool = False
    """Whether to maintain a hot standby."""
    longest_backoff_s: float = 30.0
    hosts: HostNames | None = None
    """Binds the listed names of hosts to the machines that ranks report: one for all replicas of a deployment."""
    words: RankWords = field(default_factory=RankWords)
    """The log of ranks' output: one for all replicas of a deployment, so that lines are not repeated."""
