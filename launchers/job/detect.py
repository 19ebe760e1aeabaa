"""The supervisor's decisions as pure functions of the ranks' reports: silent ranks, hanging steps, the cause of a
failure, differing ranks, relaunches. No clocks and no processes: times are arguments, in seconds.
"""

from __future__ import annotations

import errno
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, get_args

from ...engine.job import NOBODY, Culprit
from ...topology.placement.world import World
from ..control.messages import Beat
from .causes import unreachable as unreachable

FailureKind = Literal[
    "mismatch", "protocol", "model_changed", "refused", "rank_error", "launcher_killed", "rank_lost", "silent",
    "stalled", "load_stalled", "consequence", "launch", "shortage", "launcher_exit",
]  # fmt: skip
"""A closed set, because it labels `engine_restarts_total`. The strongest evidence first: see `blame`."""


@dataclass(frozen=True, slots=True)
class JobFailure:
    """The cause of a launch's end, for the log, the metrics and the bundle."""

    kind: FailureKind
    reason: str
    culprit: Culprit = NOBODY
    exit_code: int | None = None
    host: str | None = None
    """The listed name of the culprit's host, by which a spare can replace it."""
    output: tuple[str, ...] = ()
    dumps: dict[int, dict[str, Any]] = field(default_factory=dict)


_SHORTAGES = (errno.EMFILE, errno.ENFILE, errno.EAGAIN, errno.ENOMEM)


def no_launch(error: Exception) -> JobFailure:
    """The failure of a launch that could not begin: a `shortage` if this host had no free descriptor, process, thread
    or memory, which passes."""
    short = isinstance(error, RuntimeError) or (isinstance(error, OSError) and error.errno in _SHORTAGES)
    return JobFailure("shortage" if short else "launch", f"cannot launch: {error}")


def by_a_request(failure: JobFailure, here: str) -> bool:
    """True if a request may have caused the failure: a rank exited, raised or hung without another known cause. A rank
    on another node than `here` that becomes silent is a lost node or link."""
    if failure.kind == "silent":
        return failure.culprit.node == here
    return failure.kind in ("rank_lost", "rank_error", "stalled", "protocol") and failure.culprit.rank is not None


NODE_FAILURES = 3


def bad_node(failures: Sequence[JobFailure], here: str) -> str | None:
    """The host that a spare should replace, by its listed name if known: its node became silent, or the last
    NODE_FAILURES failures all name it."""
    names = [failure.host or failure.culprit.node for failure in failures[-NODE_FAILURES:]]
    repeated = len(names) == NODE_FAILURES and len(set(names)) == 1
    silent = failures[-1].kind == "silent" and failures[-1].culprit.node != here
    return names[-1] if repeated or silent else None


@dataclass(frozen=True, slots=True)
class Evidence:
    """Evidence that a launch has ended. `rank` None: no rank is the cause."""

    kind: FailureKind
    rank: int | None
    text: str


def blame(evidence: Sequence[Evidence]) -> Evidence:
    """The evidence that explains the others. When one rank dies, its peers fail in their collectives and mpirun ends
    them all, and evidence of that may arrive first. Of the same kind, the first counts. A silent or stalled rank
    explains all later evidence; only earlier evidence can explain it."""
    first = evidence[0]
    if first.kind in ("silent", "stalled", "load_stalled"):
        return first
    return min(evidence, key=lambda sign: get_args(FailureKind).index(sign.kind))


FROM_STAGE = " from stage "
"""Marks, in the name of a wait, that another stage must send the message (topology/comm/pipeline.py)."""


class StepWatch:
    """Limits the time of a step without progress, from the steps measured so far, by size. `first_s`: the limit until
    a step was measured; `floor_s`: the least limit; `factor`: the limit relative to the (slowly decaying) longest step
    of about that size."""

    def __init__(self, first_s: float = 120.0, floor_s: float = 10.0, factor: float = 20.0) -> None:
        self.first_s, self.floor_s, self.factor = first_s, floor_s, factor
        self._longest: dict[int, float] = {}

    def learn(self, tokens: int, seconds: float) -> None:
        size = tokens.bit_length()
        self._longest[size] = max(seconds, 0.98 * self._longest.get(size, 0.0))

    def allowance(self, tokens: int) -> float:
        if not self._longest:
            return self.first_s
        size = tokens.bit_length()
        measured = max((s for s in self._longest if s <= size), default=min(self._longest))
        least = self.factor * self._longest[measured]
        if measured >= size:
            return max(self.floor_s, least)
        # this size was never measured: assume the time a token of the largest smaller size
        return max(self.floor_s, least, min(least * float(1 << (size - measured)), self.first_s))


def stalled(beats: Mapping[int, Beat], watch: StepWatch, since_beat: Mapping[int, float]) -> tuple[int, str] | None:
    """A rank without progress for too long, and a sentence about it; None if there is none. Another rank may be the
    cause (`behind`). `since_beat`: the age of each beat."""
    for rank, beat in beats.items():
        if beat.busy_s <= 0:
            continue
        busy = beat.busy_s + since_beat[rank]
        allowed = watch.allowance(beat.step_tokens)
        if busy > allowed:
            where = f"in step {beat.step} ({beat.step_tokens} tokens" if beat.step_tokens else f"at step {beat.step} ("
            comma = "; " if beat.step_tokens else ""
            return rank, f"no progress for {busy:.1f} s {where}{comma}{allowed:.1f} s allowed)"
    return None


def behind(beats: Mapping[int, Beat], world: World | None = None) -> int | None:
    """The rank for which the others wait: at the lowest step, then with the fewest collectives started, then computing
    while others wait. None if all wait in the same collective: then a link is the cause. Stages of the
    replica's `world` may differ in steps and collectives, so the late stage is the only one that waits for no
    other: its ranks compute, or wait inside their group."""
    if not beats:
        return None
    if world is not None and world.stages > 1 and world.tp < len(beats):
        stages = {rank: world.stage_of(rank) for rank in beats}
        working = {stages[rank] for rank, beat in beats.items() if beat.busy_s > 0 and FROM_STAGE not in beat.waiting}
        if len(working) != 1:
            return None
        group = {rank: beat for rank, beat in beats.items() if stages[rank] in working}
        return min(group) if len(group) == 1 else behind(group)
    place = {rank: (beat.step, beat.collective, beat.waiting != "") for rank, beat in beats.items()}
    late = min(place.values())
    ranks = [rank for rank, where in place.items() if where == late]
    if len(ranks) == len(place) and len(place) > 1:
        return None
    return min(ranks)


SAME_FILES = "the nodes must have the same files, at the same paths"
GPU_KERNELS = ("flashinfer", "triton")
"""Names among those of digests of which the value is "" where a host has no use for them."""
INSTALLED = ("torch", *GPU_KERNELS)
"""Names among those of digests of what is installed on a host."""


def differing(announced: Mapping[int, Mapping[str, str]]) -> tuple[int, str] | None:
    """The first rank whose digests differ from those of most ranks (in a tie: from the lowest rank's), and a sentence
    about it; None if all agree."""
    names = sorted({name for digests in announced.values() for name in digests})
    for name in names:
        values = {rank: digests.get(name, "") for rank, digests in sorted(announced.items())}
        if name in GPU_KERNELS:
            values = {rank: value for rank, value in values.items() if value} or {0: ""}
        usual = Counter(values.values()).most_common(1)[0][0]
        for rank, value in values.items():
            if value != usual:
                fix = "install the same on every host" if name in INSTALLED else SAME_FILES
                there, elsewhere = value[:24] or "missing", usual[:24] or "missing"
                return rank, f"{name} is {there} there and {elsewhere} elsewhere: {fix}"
    return None


class RestartPolicy:
    """Decides whether and when to launch a failed job again. After `limit` failures in a row without progress the next
    one is final. The first relaunch is immediate, later ones wait 1, 2, 4 ... `longest_s` seconds."""

    def __init__(self, limit: int = 3, longest_s: float = 30.0) -> None:
        self.limit, self.longest_s = limit, longest_s
        self.in_a_row = 0

    def after_failure(self, progress: bool) -> float | None:
        """Seconds to wait before the relaunch; None: no relaunch."""
        self.in_a_row = 1 if progress else self.in_a_row + 1
        if self.in_a_row > self.limit:
            return None
        return 0.0 if self.in_a_row == 1 else min(self.longest_s, 2.0 ** (self.in_a_row - 2))
