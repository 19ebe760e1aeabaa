"""Tracks the state of every rank of one launch and derives failures, suspicion and readiness. Makes decisions as data:
methods take the time (monotonic seconds) and return news in order, on which job_launch.py acts.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

from ... import __version__
from ...engine.identity import Difference, ModelIdentity, between_ranks, from_owner
from ...engine.job import Culprit
from ...engine.request import ModelLimits
from ...topology.placement.machines import shared_hostname
from ...topology.placement.world import World
from ..control.control import UNREACHABLE
from ..control.messages import SILENCE_S, Announce, Beat, Failure, Hello, Loading, RankMessage, Ready, Standing
from .causes import ended_first, first_errors, unreachable
from .detect import SAME_FILES, Evidence, FailureKind, JobFailure, StepWatch, behind, blame, differing, stalled
from .options import JobTimeouts

_NOTICED = re.compile(r"\brank (\d+) with PID \d+")
"""mpirun's message that names the rank because of whose exit it ends the others."""
_KILLED = re.compile(r"\bsignal:? 9\b")
"""In messages of mpirun and mpiexec about a rank."""
NODE_LOST = "lost communication with a remote daemon"
"""mpirun's message about an unreachable node; it then ends the ranks on all other nodes."""
_LOST_NODE = re.compile(r"\bRemote daemon\s*: \S+ on node (\S+)")


_LOST_PACKETS = "are packets lost on the way (MTU, firewall, cable)? `laddertron preflight` tests it"
_EXPLAINED = ("rank_lost", "launcher_exit", "launcher_killed", "launch", "load_stalled", "consequence")
"""The kinds of failure whose cause the launcher's output may name."""


@dataclass(frozen=True, slots=True)
class Suspect:
    rank: int
    text: str


@dataclass(frozen=True, slots=True)
class Recovered:
    """No rank is suspected any more."""


News = Evidence | Loading | Standing | Ready | Suspect | Recovered
"""News about a launch. Combined from all ranks: Loading with the slowest rank's fraction; Standing once every rank
waits for Load, with the largest resident memory and whether all have room; Ready once all have loaded and agree."""


@dataclass(slots=True)
class RankState:
    """The state of one rank; None: not reported yet."""

    hello: Hello | None = None
    beat: Beat | None = None
    heard: float = 0.0
    beat_at: float = 0.0
    fraction: float = 0.0
    standing: Standing | None = None
    announced: Announce | None = None
    limits: ModelLimits | None = None
    file: int = -1
    suspect: bool = False
    ended: bool = False


def _out_of_memory(limit: int) -> str:
    of_group = f", or raise the memory limit of its cgroup, {limit >> 20} MiB" if limit else ""
    return f"; it was killed by signal 9: see `dmesg` on its host, whether it was out of memory{of_group}"


def _silence(seconds: float) -> str:
    return f"no heartbeat for {seconds:.1f} s (stopped, swapped out, cut off, or its large packets are lost)"


class RankBoard:
    """`began`: when mpirun was started. `seats`: the listed
    name of each rank's host; () if unknown. identity: of the model that the job serves, which every rank must read;
    `fix`: what to do if one reads another. `owner`: the hostname of this process."""

    def __init__(
        self,
        world: World,
        timeouts: JobTimeouts,
        began: float,
        seats: Sequence[str] = (),
        identity: ModelIdentity | None = None,
        fix: str = SAME_FILES,
        owner: str = "its owner",
    ) -> None:
        self._identity, self._fix, self._owner = identity, fix, owner
        self._world = world
        self.ranks = {rank: RankState() for rank in range(world.size)}
        self.hosts: dict[int, str | None] = dict(enumerate(seats))
        """By rank. Corrected by the ranks' Hello: a launcher may start ranks in another order."""
        self.evidence: list[Evidence] = []
        self._unreached: list[Evidence] = []
        """Reports of ranks that cannot connect to another, which is the evidence's rank."""
        self.notes: dict[str, str] = {}
        """By listed name, why hosts of missing ranks could not be asked."""
        self._timeouts = timeouts
        self._steps = StepWatch(timeouts.first_step_s, timeouts.least_step_s)
        self._began = self._moved = began
        self.ready = self.loads = False

    def missing(self) -> list[tuple[int, str | None]]:
        """The ranks that have not started, with the listed names of their hosts."""
        return [(rank, self.hosts.get(rank)) for rank, state in self.ranks.items() if state.hello is None]

    @property
    def healthy(self) -> bool:
        return not self.evidence and not any(state.suspect for state in self.ranks.values())

    def load(self, now: float) -> None:
        """Records that `Load` was sent to the ranks; from now on, they must make progress in loading."""
        self.loads, self._moved = True, now

    def name(self, rank: int) -> str:
        hello = self.ranks[rank].hello
        stage = f"stage {self._world.stage_of(rank)}" if self._world.stages > 1 else ""
        process = "" if hello is None else f"node {hello.hostname}, pid {hello.pid}"
        place = ", ".join(filter(None, (stage, process)))
        return f"rank {rank} ({place})" if place else f"rank {rank}"

    def node(self, rank: int | None) -> str | None:
        hello = self.ranks[rank].hello if rank is not None else None
        return None if hello is None else hello.hostname

    def heard(self, rank: int, message: RankMessage, now: float) -> list[News]:
        """Handles a rank's message, which is valid. Tokens, Running, Pulse and DumpReply only count as signs of
        life."""
        state = self.ranks[rank]
        state.heard = now
        news: list[News] = []
        if state.suspect:
            state.suspect = False
            # a launch that is ending does not recover, even if ranks still send
            if not self.evidence and not any(other.suspect for other in self.ranks.values()):
                news.append(Recovered())
        match message:
            case Beat():
                if state.beat is not None and message.step > state.beat.step and message.last_tokens > 0:
                    self._steps.learn(message.last_tokens, message.last_s)
                state.beat, state.beat_at = message, now
            case Hello():
                state.hello, self._moved = message, now
                if message.version != __version__:
                    text = f"it runs laddertron {message.version}, the daemon {__version__}: install one everywhere"
                    news.append(self.sign(Evidence("mismatch", rank, text)))
                greeted = {other: one.hello.machine for other, one in self.ranks.items() if one.hello is not None}
                if (shared := shared_hostname(greeted)) is not None:
                    news.append(self.sign(Evidence("mismatch", *shared)))
                news.append(self._progress(""))
            case Announce(digests, samples):
                state.announced = message
                difference = self._identity and from_owner(self._identity, rank, digests, samples)
                news += [self._differs(difference)] if difference else self._agreement()
            case Loading(fraction, detail):
                fraction = min(1.0, max(0.0, fraction))
                if fraction != state.fraction:
                    self._moved = now
                state.fraction = fraction
                news.append(self._progress(detail))
            case Standing():
                state.standing, self._moved = message, now
                if not self.evidence and (standing := self._standing()):
                    most = max(one.resident for one in standing)
                    news.append(Standing(most, all(one.room for one in standing)))
            case Ready(limits, file):
                state.file = file
                state.limits, state.fraction, self._moved = limits, 1.0, now
                news += self._agreement()
            case Failure(text, consequence, unreached=peer) if 0 <= peer < len(self.ranks) and not consequence:
                state.ended = True
                self._unreached.append(self.sign(Evidence("rank_error", peer, text)))
                news.append(self._unreached[-1])
            case Failure(text, consequence, refused, unreached=peer):
                state.ended = True
                kind: FailureKind = "consequence" if consequence else "refused" if refused else "rank_error"
                if consequence and peer in self.ranks and self.node(peer) != self.node(rank):
                    # NOTE: if nothing else explains it, both ranks are well, and what is between them is not
                    way = f"nothing arrives from {self.name(peer)} at {self.name(rank)}"
                    news.append(self.sign(Evidence(kind, None, f"{way}: {text.strip()}: {_LOST_PACKETS}")))
                else:
                    news.append(self.sign(Evidence(kind, rank, text.strip())))
                if (
                    consequence
                    and (silent := next((at for at, one in self.ranks.items() if one.suspect), None)) is not None
                ):
                    # this rank gave up waiting before the one that is silent was given up: that one is the cause
                    news.append(self.sign(Evidence("silent", silent, _silence(now - self.ranks[silent].heard))))
            case _:
                pass
        return news

    def gone(self, rank: int, reason: str) -> list[News]:
        state = self.ranks[rank]
        if state.ended:
            return []
        state.ended = True
        if reason == UNREACHABLE:
            return [self.sign(Evidence("silent", rank, f"{reason}, from {self.node(rank)} to {self._owner}"))]
        text = "its process exited without reporting an error" + (f" ({reason})" if reason else "")
        return [self.sign(Evidence("rank_lost", rank, text))]

    def sign(self, evidence: Evidence) -> Evidence:
        """Records evidence for `judge`. The launch also calls it, for events that no rank reports (mpirun's exit)."""
        self.evidence.append(evidence)
        return evidence

    def _standing(self) -> list[Standing]:
        """The ranks' Standing messages; [] until each has sent one."""
        standings = [state.standing for state in self.ranks.values() if state.standing is not None]
        return standings if len(standings) == len(self.ranks) else []

    def _progress(self, detail: str) -> Loading:
        return Loading(min(state.fraction for state in self.ranks.values()), detail)

    def _agreement(self) -> list[News]:
        announced = {rank: state.announced for rank, state in self.ranks.items() if state.announced is not None}
        differs = any(one.kind == "model_changed" for one in self.evidence)  # which names the file
        if self.ready or differs or len(announced) < len(self.ranks):
            return []
        digests, loading = (
            {r: m.digests for r, m in announced.items()},
            any(s.limits is None for s in self.ranks.values()),
        )
        if loading and len({frozenset(one) for one in digests.values()}) > 1:
            return []  # some have loaded, and announced more
        if (difference := differing(digests)) is not None:
            return [self.sign(Evidence("mismatch", *difference))]
        if self.evidence or loading:
            return []
        samples = {rank: message.samples for rank, message in announced.items()}
        if (odd := between_ranks(self._identity, samples)) is not None:
            return [self._differs(odd)]
        self.ready = True
        limits = self.ranks[0].limits
        assert limits is not None
        return [Ready(limits)]

    def _differs(self, difference: Difference) -> Evidence:
        than = "the model that this job serves" if difference.other is None else self.name(difference.other)
        return self.sign(Evidence("model_changed", difference.rank, f"{difference.text} from {than}: {self._fix}"))

    def held_up(self, seconds: float) -> None:
        """Extends all deadlines by `seconds`, for which this process was suspended."""
        self._began, self._moved = self._began + seconds, self._moved + seconds
        for state in self.ranks.values():
            state.heard += seconds
            state.beat_at += seconds

    def look(self, now: float, spoke: Mapping[int, float] = MappingProxyType({})) -> list[News]:
        """Checks deadlines; call it a few times a second. `spoke`: by rank, the arrival time of its newest message,
        also if this process was too busy to handle it yet."""
        timeouts, greeted = self._timeouts, [rank for rank, state in self.ranks.items() if state.hello is not None]
        news: list[News] = []
        if len(greeted) < len(self.ranks):
            if now - self._began > timeouts.launch_s:
                # NOTE: mpirun starts no rank before it has reached every host: those that answer wait for the others
                missing = [at for at in self.missing() if at[1] in self.notes] or self.missing()
                hosts = dict.fromkeys(host for _, host in missing if host)
                where = f" on {', '.join(hosts)}" if hosts else ""
                ranks = ", ".join(str(rank) for rank, _ in missing)
                text = f"rank {ranks}{where} did not start within {timeouts.launch_s:g} s"
                text = "; ".join((text, *self.notes.values()))
                news.append(self.sign(Evidence("launch", missing[0][0] if len(hosts) == 1 else None, text)))
        elif not self.ready and (self.loads or not self._standing()) and now - self._moved > timeouts.load_stall_s:
            slowest = min(greeted, key=lambda rank: self.ranks[rank].fraction)
            text = f"loading has made no progress for {timeouts.load_stall_s:g} s"
            news.append(self.sign(Evidence("load_stalled", slowest, text)))
        for rank in greeted:
            state = self.ranks[rank]
            silent = now - max(state.heard, spoke.get(rank, 0.0))
            text = _silence(silent)
            if silent >= timeouts.dead_s:
                news.append(self.sign(Evidence("silent", rank, text)))
            elif silent >= timeouts.suspect_s and not state.suspect:
                state.suspect = True
                news.append(Suspect(rank, text))
        return news + self._stall(now)

    def _stall(self, now: float) -> list[News]:
        # a silent rank explains why the others wait; its own deadline decides
        if not self.ready or any(state.suspect for state in self.ranks.values()):
            return []
        beats = {rank: state.beat for rank, state in self.ranks.items() if state.beat is not None}
        stall = stalled(beats, self._steps, {rank: now - self.ranks[rank].beat_at for rank in beats})
        if stall is None:
            return []
        slow, text = stall
        if len(beats) == 1:  # no other ranks to compare with
            return [self.sign(Evidence("stalled", slow, text))]
        late = behind(beats, self._world)
        where = next((beat.waiting for beat in beats.values() if beat.waiting), "")
        if late is None and all(beat.busy_s <= 0 for rank, beat in beats.items() if rank != slow):
            # the others have finished the step and wait for work: the rank hangs between two steps
            late, text = slow, f"{text}; the others wait for the next step"
        elif late is not None and beats[late].waiting and (away := self._away(late)):
            # it waits for what the others, whose collectives are later ones, have sent
            text = f"nothing arrives at {self.name(late)} from {', '.join(away)}: {text}: {_LOST_PACKETS}"
            late = None
        elif late is not None:
            text += f"; the others wait in {where}" if where else "; it is behind the others"
        else:
            text += f"; all ranks wait in {where}: suspect the link" if where else "; no rank is behind the others"
        return [self.sign(Evidence("stalled", late, text))]

    def _away(self, rank: int) -> list[str]:
        """The other nodes of the job."""
        nodes = dict.fromkeys(name for other in self.ranks if (name := self.node(other)) is not None)
        return [name for name in nodes if name != self.node(rank)]

    def judge(
        self,
        exit_code: int | None,
        output: tuple[str, ...],
        dumps: dict[int, dict[str, Any]],
        stood_still: float = 0.0,
        start_output: Sequence[str] = (),
    ) -> JobFailure:
        """Determines the cause from all evidence (at least one). stood_still: seconds for which this process was
        suspended before the first. `output`: the last lines, start_output: those until the ranks were ready."""
        sign, words = blame(self.evidence), " ".join(output)
        if sign in self._unreached:
            # a host that most cannot reach, and in a tie another than the first
            counts = Counter(self.node(one.rank) for one in self._unreached)
            first = self.node(0)
            sign = max(self._unreached, key=lambda one: (counts[self.node(one.rank)], self.node(one.rank) != first))
        elif sign.kind == "rank_lost" and NODE_LOST in words:
            sign = self._lost_node(words)
        elif sign.kind == "rank_lost" and stood_still >= SILENCE_S:
            text = f"this process was suspended for {stood_still:.0f} s: ranks exit without it"
            sign = Evidence("consequence", None, text)
        elif sign.kind == "rank_lost":
            # connections are read in any order, so the first end that was read need not be the first that happened
            noticed = {int(rank) for rank in _NOTICED.findall(words)}
            lost = [other for other in self.evidence if other.kind == "rank_lost" and other.rank in noticed]
            sign = lost[0] if len(lost) == 1 else sign
        state = self.ranks[sign.rank] if sign.rank is not None else RankState()
        beat = state.beat or Beat()
        collective = beat.waiting or (f"collective {beat.collective}" if beat.collective else "")
        stage = self._world.stage_of(sign.rank) if sign.rank is not None and self._world.stages > 1 else None
        device = next((row.labels[0] for row in beat.rows if row.series == "rank_info"), "")
        if device == "cuda" and state.hello is not None:
            device = f"cuda:{state.hello.local_rank}"
        reason = sign.text if sign.rank is None or sign.kind == "launch" else f"{self.name(sign.rank)}: {sign.text}"
        node, host = self.node(sign.rank), self.hosts.get(-1 if sign.rank is None else sign.rank)
        began = any(state.hello is not None for state in self.ranks.values())
        # NOTE: a start's output often names the cause long before its end; later, only the end is about the failure.
        lines = output if self.ready else tuple(start_output) or output
        cause = unreachable(lines) if sign.kind in _EXPLAINED else None
        ended = ended_first(output) if sign.kind == "launcher_exit" and not self.ready else None
        there = self.hosts.get(ended) if isinstance(ended, int) else ended
        if cause is not None and cause[1] is None and there is not None:
            cause = f"{there}: {cause[0]}", there
        if sign.kind == "rank_lost" and _KILLED.search(words):
            reason += _out_of_memory(0 if state.hello is None else state.hello.memory_limit)
        if cause is not None and sign.kind == "launcher_exit" and not began:
            # NOTE: the launcher's own advice (firewalls) is only in `output`: this line names the cause
            reason, node = f"{cause[0]} ({sign.text})", cause[1]
        elif cause is not None:
            reason, node = f"{reason}; the output says: {cause[0]}", node or cause[1]
        elif sign.kind in ("rank_lost", "launcher_exit", "launcher_killed") and output:
            errors = [line for line in first_errors(lines) if line not in output[-5:]]
            reason += f"; first errors: {' | '.join(errors)}" if errors else ""
            reason += f"; last output: {' | '.join(output[-5:])}"
            reason, node = f"{there}: {reason}" if there else reason, node or there
        culprit = Culprit(sign.rank, node, stage, device, collective)
        return JobFailure(sign.kind, reason, culprit, exit_code, host, output, dumps)

    def _lost_node(self, words: str) -> Evidence:
        name = match[1] if (match := _LOST_NODE.search(words)) else None
        there = [rank for rank in self.ranks if name is not None and name in (self.node(rank), self.hosts.get(rank))]
        if not there:
            return Evidence("launcher_exit", None, "mpirun lost a node, and ended the ranks on the others")
        return Evidence("silent", there[0], "mpirun lost this node, and ended the ranks on the others")

    def describe(self, now: float) -> dict[str, Any]:
        ranks = {}
        for rank, state in self.ranks.items():
            beat = state.beat or Beat()
            ranks[str(rank)] = {
                "node": self.node(rank),
                "pid": state.hello.pid if state.hello else None,
                "heard_s_ago": round(now - state.heard, 3) if state.hello else None,
                "step": beat.step,
                "busy_s": beat.busy_s,
                "collective": beat.collective,
                "waiting": beat.waiting,
            }
        return ranks
