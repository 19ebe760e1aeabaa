"""`python -m laddertron.launchers.demos.race`: several models race through the same prompts in one set of ranks.

The lanes take turns, always the one whose own clock is behind, so that each has the machine to itself while it runs and
both clocks advance together: on a shared machine the only fair way to run side by side. Prints one JSON object a line
for launchers/demos/demo.py, which started it under mpirun and draws the picture.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from ...engine.config import load as deploy
from ...engine.config.schema import Deployment
from ...engine.request import Request, SamplingParams
from ...engine.step.engine import Engine
from ...topology.comm.emulated import emulate
from ...topology.comm.groups import Communicator
from ...topology.comm.ledger import Ledger
from ...topology.emulation import Emulation
from ...topology.placement.identity import Identity
from ..measure.bench_rank import as_rank, say
from ..measure.lanes import Lane, Turns, call, communication, play
from ..rank.rank import choose_device, join_group, set_threads

MAX_TOKENS = 64
SHOW_S = 0.1


@dataclass(slots=True)
class Linked:
    """A lane behind an emulated link, and the account of what travels there."""

    lane: Lane
    num_layers: int
    ledger: Ledger = field(default_factory=Ledger)

    def lay_link(self, communicator: Communicator, delay_s: float) -> None:
        """A new link under the model's all-reduces, with an account that starts at zero."""
        self.ledger = Ledger()
        link = Emulation(f"link, {delay_s * 1e6:.0f} us", delay_s)
        on_gpu = communicator.backend == "nccl"
        self.lane.runner.model.all_reduce = emulate(communicator.all_reduce, link, self.ledger, on_gpu)


@dataclass(slots=True)
class Entrant:
    """A lane on rank 0, with its engine, which goes from race to race."""

    linked: Linked
    engine: Engine
    tokens: int = 0
    seconds: float = 0.0
    steps: int = 0
    first: list[int] = field(default_factory=list)
    done: bool = False

    def line_up(self, name: str, prompts: Sequence[Sequence[int]], count: int) -> None:
        """At the start of a race: nothing done, `count` requests waiting."""
        self.tokens, self.seconds, self.steps, self.first, self.done = 0, 0.0, 0, [], False
        for number in range(count):
            params = SamplingParams(max_tokens=MAX_TOKENS, seed=number, temperature=0.7, top_k=40)
            self.engine.add(Request(f"{name} {number}", tuple(prompts[number % len(prompts)]), params))

    def step(self) -> None:
        started = time.perf_counter()
        events = self.engine.step()
        self.seconds += time.perf_counter() - started
        self.steps += 1
        for event in events:
            self.tokens += len(event.tokens)
            if event.request_id.endswith(" 0"):
                self.first.extend(event.tokens)
        self.done = not self.engine.has_work

    def report(self) -> dict[str, Any]:
        hidden, exposed = communication(self.linked.ledger.entries())
        return {
            "lane": self.linked.lane.name,
            "tokens": self.tokens,
            "seconds": self.seconds,
            "steps": self.steps,
            "hidden": hidden,
            "exposed": exposed,
            "text": self.first,
            "done": self.done,
        }


def race(
    name: str,
    entrants: Sequence[Entrant],
    communicator: Communicator,
    prompts: Sequence[Sequence[int]],
    count: int,
    delay_s: float,
) -> dict[str, dict[str, Any]]:
    """Rank 0: `count` requests through every lane over a link of delay_s; returns each lane's last report."""
    call(communicator, repr(delay_s).encode())
    for entrant in entrants:
        entrant.linked.lay_link(communicator, delay_s)
        entrant.line_up(name, prompts, count)
    shown = 0.0
    while not all(entrant.done for entrant in entrants):
        min((e for e in entrants if not e.done), key=lambda e: e.seconds).step()
        if time.monotonic() - shown > SHOW_S:
            shown = time.monotonic()
            say({"race": name, "lanes": [entrant.report() for entrant in entrants], "total": count * MAX_TOKENS})
    reports = {entrant.linked.lane.name: entrant.report() for entrant in entrants}
    say({"race": name, "lanes": list(reports.values()), "total": count * MAX_TOKENS, "over": True})
    return reports


def lead(
    entered: Sequence[Linked], communicator: Communicator, prompts: Sequence[Sequence[int]], seconds: float
) -> None:
    """Warms up, measures c (what a sub-block computes beyond its waits), then races at L = c and at no delay."""
    entrants = [Entrant(linked, Turns(linked.lane, communicator).engine) for linked in entered]
    seats = entered[0].lane.limits.max_num_seqs
    race("start", entrants, communicator, prompts, seats, 0.0)
    first = race("warm-up", entrants, communicator, prompts, 2 * seats, 0.0)[entered[0].lane.name]
    c = (first["seconds"] - first["exposed"]) / first["steps"] / (2 * entered[0].num_layers)
    say({"c": c, "delay": c})
    rate = first["tokens"] / first["seconds"]
    for name, delay in (("link", c), ("no delay", 0.0)):
        expected = rate / 2 if delay else rate
        count = max(seats, round(expected * seconds / MAX_TOKENS / seats) * seats)
        race(name, entrants, communicator, prompts, count, delay)


def _entered(deployments: Sequence[Deployment], communicator: Communicator, device: Any) -> list[Linked]:
    from ...engine.step.build import build

    entered = []
    for index, deployment in enumerate(deployments):
        built = build(deployment, communicator, device)
        lane = Lane(index, built.config.wiring.name, built.runner, built.scheduler_limits)
        entered.append(Linked(lane, built.config.num_layers))
    return entered


def _be_rank(identity: Identity, paths: Sequence[str], prompts: Sequence[Sequence[int]], seconds: float) -> None:
    deployments = [deploy.load(path) for path in paths]
    set_threads(deployments[0], identity)
    # The group itself has no emulated link: each lane lays its own over it.
    parallel = replace(deployments[0].parallel, collective="auto", emulated_delay=0.0)
    plain = replace(deployments[0], parallel=parallel)
    with join_group(plain, identity) as communicator:
        entered = _entered(deployments, communicator, choose_device(deployments[0], identity))

        def obey(delay: bytes) -> None:
            for linked in entered:
                linked.lay_link(communicator, float(delay))

        lanes = [linked.lane for linked in entered]
        play(lanes, communicator, lambda: lead(entered, communicator, prompts, seconds), obey)


def main() -> int:
    """argv: the job's deployment (each lane has its own instead), seconds a race, a file of prompts (JSON lists of
    ids), then one deployment file a lane."""
    _, seconds, prompts, *paths = sys.argv[1:]
    known = json.loads(Path(prompts).read_text())
    as_rank(lambda identity: _be_rank(identity, paths, known, float(seconds)), "`make demo` starts")
    return 0


if __name__ == "__main__":
    sys.exit(main())
