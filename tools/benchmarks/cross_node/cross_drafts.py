"""Ranks of cross_node.py: decodes without drafts, with all that are found and with those that pay, in turns, over
delays. Drafts are the model's own answers, recorded before, each wrong with a stated probability: what is measured is
the engine, not how often texts repeat. Rank 0 sets the link itself and prints a JSON line a case."""

from __future__ import annotations

import time
from collections.abc import Iterator
from dataclasses import replace
from random import Random

import numpy as np
from bench_model import Size, make_runner
from cluster.nodes import Control
from common import say, to_and_fro
from laddertron.engine.batch import Batch, StepResult
from laddertron.engine.schedule.speculation import SpeculationRule
from laddertron.engine.step import runner as runners
from laddertron.engine.step.engine import Ahead
from laddertron.models.llama import LlamaModel
from laddertron.tools.bench.bench import spread
from laddertron.topology.comm.groups import Communicator
from numpy.typing import NDArray
from rank_task import Spec, be_rank, in_turns
from variants import Driver, Variant

PROMPTS = 5
ALL, PAYING = SpeculationRule(priced=False), SpeculationRule()
KINDS = {
    "off": (None, None),
    "ngram, 70%": (ALL, 0.7),
    "auto, 70%": (PAYING, 0.7),
    "auto, 0%": (PAYING, 0.0),
    "auto, no drafts": (PAYING, None),
}
"""With how many of the drafts right; None: where nothing repeats, so that there are none."""


class Answers:
    """What the model said to each prompt; `rate`: how probably a draft made of it is right, on every rank alike. None:
    there are no drafts."""

    def __init__(self, prompt: int) -> None:
        self.prompt = prompt
        self.rate: float | None = None
        self._known: dict[bytes, NDArray[np.int32]] = {}

    def record(self, runner: runners.Runner) -> None:
        """Keeps the tokens of every slot that the runner frees."""
        apply = runner._apply

        def keep(batch: Batch) -> None:
            for slot in batch.released:
                known = runner.tokens[slot, : runner.length[slot]].copy()
                self._known.setdefault(known[: self.prompt].tobytes(), known)
            apply(batch)

        runner._apply = keep  # type: ignore[method-assign]

    def look_up(self, known: NDArray[np.int32], most: int) -> list[int]:
        answer, at, rate = self._known.get(known[: self.prompt].tobytes()), len(known), self.rate
        if rate is None or answer is None or not np.array_equal(answer[:at], known):
            return []
        drafts: list[int] = answer[at : at + max(0, most)].tolist()
        chance = [Random(f"{known[0]} {at} {i}").random() for i in range(len(drafts))]
        return [draft if c < rate else (draft + 1) % 1000 for draft, c in zip(drafts, chance, strict=True)]

    def behind(self, runner: runners.Runner, rate: float | None) -> None:
        """From now on the runner's drafts are right with this probability."""
        run = runner.run_through

        def at_rate(batch: Batch, ahead: Ahead | None = None) -> StepResult:
            self.rate = rate
            return run(batch, ahead)

        runner.run_through = at_rate  # type: ignore[method-assign]


def kinds(spec: Spec, model: LlamaModel, communicator: Communicator) -> Iterator[Variant]:
    """spec: size, batches, delays_s, prompt, answer (tokens), steps (a turn), turns."""
    seats, answers = max(spec["batches"]), Answers(spec["prompt"])
    vars(runners)["look_up"] = answers.look_up
    for index, (kind, (rule, rate)) in enumerate(KINDS.items()):
        runner, limits = make_runner(model, communicator, seats, seats * spec["prompt"])
        answers.behind(runner, rate)
        if index == 0:
            answers.record(runner)
        yield Variant(index, kind, runner, replace(limits, speculation=rule))


def lead(spec: Spec, size: Size, drivers: list[Driver], communicator: Communicator, switch: Control) -> None:
    switch.link(0.0)
    drivers[0].begin(max(spec["batches"]), spec["prompt"], spec["answer"], PROMPTS)
    drivers[0].finish()
    drivers[0].begin(1, spec["prompt"], 2)  # empties the slots: the answers are recorded
    drivers[0].finish()
    for delay in spec["delays_s"]:
        switch.link(delay)
        for batch in spec["batches"]:
            for driver in drivers:
                driver.begin(batch, spec["prompt"], spec["answer"], PROMPTS)
                driver.turn(2 * spec["steps"])  # auto learns first
            found: dict[str, list[float]] = {kind: [] for kind in KINDS}
            for turn in range(spec["turns"]):
                for driver in to_and_fro(drivers, turn):
                    began, before = time.perf_counter(), driver.tokens
                    driver.turn(spec["steps"])
                    found[driver.variant.name].append((driver.tokens - before) / (time.perf_counter() - began))
            for driver in drivers:
                driver.cancel(batch)
            say(model=size.name, delay_s=delay, batch=batch, **{kind: spread(each) for kind, each in found.items()})


if __name__ == "__main__":
    be_rank(in_turns(kinds, lead))
