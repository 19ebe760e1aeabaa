"""Ranks of cross_node.py. Rank 0 sets the link itself and prints a JSON line a case. argv: a JSON spec, whose `task` is

collectives   all-reduces of every backend in turns, over sizes and delays
decode        one model behind several wirings that decode in turns, over delays and batches
split         one model's steps whole, in two streams, and as `auto` chooses, over delays; and *carried*, where no
              rank waits for a message
drafts        decodes without drafts, with all that are found and with those that pay, over delays. Drafts are the
              model's own answers, recorded before, each wrong with a stated probability: what is measured is the
              engine, not how often texts repeat
"""

from __future__ import annotations

import json
import os
import statistics
import sys
import time
import traceback
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace
from random import Random
from typing import Any

import numpy as np
import torch
from bench_model import Size, make_model, make_runner, rewired
from cluster.nodes import CONTROL, Control
from common import say, to_and_fro
from laddertron.engine.batch import Batch, StepResult
from laddertron.engine.schedule.speculation import SpeculationRule
from laddertron.engine.schedule.split import TRIAL, SplitRule
from laddertron.engine.step import runner as runners
from laddertron.engine.step.engine import Ahead
from laddertron.models.llama import LlamaModel
from laddertron.tools.bench.bench import spread
from laddertron.topology.comm.bootstrap import MpiBootstrap
from laddertron.topology.comm.groups import CommOptions, Communicator
from laddertron.topology.connect import connect
from laddertron.topology.hardware.interfaces import address_of
from laddertron.topology.placement.identity import identify
from laddertron.topology.placement.layout import GroupLayout, observed_layout
from numpy.typing import NDArray
from variants import Driver, Steps, Unawaited, Variant, play, probe

Spec = dict[str, Any]
Task = Callable[[Spec, MpiBootstrap, GroupLayout, str], None]


def of_all(communicator: Communicator, values: NDArray[np.float64]) -> NDArray[np.float64]:
    """Every rank's values, [ranks, n]."""
    return np.ascontiguousarray(communicator.gather(values.view(np.uint8))).view(np.float64)


def in_turns(
    make: Callable[[Spec, LlamaModel, Communicator], Iterable[Variant]],
    lead: Callable[[Spec, Size, list[Driver], Communicator, Control], None],
) -> Task:
    """Variants of one random model, of spec["size"] (bench_model.Size), and what rank 0 does with them."""

    def task(spec: Spec, bootstrap: MpiBootstrap, layout: GroupLayout, address: str) -> None:
        torch.set_grad_enabled(False)
        size = Size(**spec["size"])
        with connect(bootstrap, layout, CommOptions(address=address)) as communicator:
            variants = list(make(spec, make_model(size, communicator), communicator))

            def lead_variants() -> None:
                drivers = [Driver(variant, communicator) for variant in variants]
                lead(spec, size, drivers, communicator, Control(os.environ[CONTROL]))

            play(variants, communicator, lead_variants)

    return task


# all-reduces


def collectives(spec: Spec, bootstrap: MpiBootstrap, layout: GroupLayout, address: str) -> None:
    """spec: delays_s, sizes (bytes), lanes (native, gloo, openmpi), seconds (each lane, size and delay)."""
    opened: list[Communicator] = []

    def joined(backend: Any) -> Communicator:
        options = CommOptions(backend=backend, process_groups=backend == "gloo", address=address)
        opened.append(connect(bootstrap, layout, options))
        return opened[-1]

    control = joined("native")
    lanes: dict[str, Callable[[torch.Tensor], object]] = {}
    for name in spec["lanes"]:
        lanes[name] = _raw_mpi(bootstrap) if name == "openmpi" else _waiting(joined(name))
    switch = Control(os.environ[CONTROL]) if control.rank == 0 else None
    for delay in spec["delays_s"]:
        if switch is not None:
            switch.link(delay)
        control.gather(np.zeros(1, np.uint8))
        for size in spec["sizes"]:
            for name, times in _turns(lanes, control, size, spec["seconds"]).items():
                if control.rank == 0:
                    say(
                        nodes=len(layout.nodes),
                        per_node=layout.per_node,
                        delay_s=delay,
                        lane=name,
                        bytes=size,
                        median_s=float(np.median(times)),
                        p90_s=float(np.quantile(times, 0.9)),
                        calls=len(times),
                    )
    for communicator in reversed(opened):
        communicator.close()


def _waiting(communicator: Communicator) -> Callable[[torch.Tensor], object]:
    return lambda x: communicator.all_reduce.start(x).wait()


def _raw_mpi(bootstrap: MpiBootstrap) -> Callable[[torch.Tensor], object]:
    """The library's own blocking all-reduce, from this thread."""
    out: dict[int, NDArray[np.float32]] = {}

    def call(x: torch.Tensor) -> None:
        given = x.numpy()
        bootstrap.comm.Allreduce(given, out.setdefault(given.size, np.empty_like(given)))

    return call


def _turns(
    lanes: dict[str, Callable[[torch.Tensor], object]], control: Communicator, size: int, seconds: float
) -> dict[str, NDArray[np.float64]]:
    """Seconds of each call, from the last rank's entry to the last one's return (the nodes share a clock: without
    that, ranks that fall into step a delay apart would show nought and twice the delay in turns). Five rounds, every
    lane in each."""
    x = torch.zeros(size // 4)
    rounds, times = {}, {name: list[NDArray[np.float64]]() for name in lanes}
    for name, call in lanes.items():
        once = float(np.median(_timed(control, call, x, 5)))
        rounds[name] = int(min(200, max(3, seconds / 5 / once)))
    for _ in range(5):
        for name, call in lanes.items():
            times[name].append(_timed(control, call, x, rounds[name]))
    return {name: np.concatenate(parts) for name, parts in times.items()}


def _timed(
    control: Communicator, call: Callable[[torch.Tensor], object], x: torch.Tensor, count: int
) -> NDArray[np.float64]:
    began, ended = np.empty(count), np.empty(count)
    for i in range(count):
        began[i] = time.monotonic()
        call(x)
        ended[i] = time.monotonic()
    found: NDArray[np.float64] = of_all(control, ended).max(0) - of_all(control, began).max(0)
    return found


# wirings


def wirings(spec: Spec, model: LlamaModel, communicator: Communicator) -> Iterator[Variant]:
    """spec: size, wirings, batches, delays_s, ratios (L/c of batch 1 to aim at), prompt, steps (decode steps a case),
    turn (steps a variant takes in a row); lanes: of the model whose wirings are called "lanes ..."."""
    seats, lanes = max(spec["batches"]), None
    if "lanes" in spec:
        lanes = make_model(Size(**spec["size"], lanes=spec["lanes"]), communicator)
    for index, name in enumerate(spec["wirings"]):
        wiring = name.removeprefix("lanes ")
        carrier = Unawaited(communicator.all_reduce) if wiring == "carried" else None
        of = model if lanes is None or wiring == name else lanes
        runner, limits = make_runner(rewired(of, wiring, carrier), communicator, seats, seats * spec["prompt"])
        yield Variant(index, name, runner, limits, awaited=carrier is None)


def lead_wirings(spec: Spec, size: Size, drivers: list[Driver], communicator: Communicator, switch: Control) -> None:
    width = torch.tensor([], dtype=getattr(torch, size.dtype)).element_size()
    switch.link(0.0)
    for driver in drivers:
        driver.begin(1, spec["prompt"], 6)
        driver.end()
    silent = _case(spec, drivers, 1, 0, [])["no-communication"]
    c = statistics.median(silent.decode_s) / (2 * size.layers)
    at_rest = statistics.median(probe(communicator, size.hidden * width, 100))
    delays = [(d, None) for d in spec["delays_s"]] + [(max(0.0, r * c - at_rest), r) for r in spec["ratios"]]
    for delay, aimed in delays:
        switch.link(delay)
        for batch in spec["batches"]:
            alone: list[float] = []
            before, began = switch.stats(), time.perf_counter()
            results = _case(spec, drivers, batch, batch * size.hidden * width, alone)
            spent, wall = switch.stats().cpu_s - before.cpu_s, time.perf_counter() - began
            for name, steps in results.items():
                say(
                    model=size.name,
                    delay_s=delay,
                    aimed=aimed,
                    batch=batch,
                    wiring=name,
                    step_s=steady(steps.decode_s),
                    # of wirings that overlap, the time between two messages is no sub-block's computation
                    sub_blocks_s=steps.sub_blocks_s if name in ("standard", "carried") else None,
                    steps=len(steps.decode_s),
                    hidden_s=steps.hidden_s / len(steps.decode_s),
                    exposed_s=steps.exposed_s / len(steps.decode_s),
                    all_reduce_s=statistics.median(alone),
                    sub_blocks=2 * size.layers,
                    prompt=spec["prompt"],
                    switch_share=spent / wall,
                    other_threads_share=steps.other_cpu_s / sum(steps.decode_s),
                )


def _case(spec: Spec, drivers: list[Driver], batch: int, nbytes: int, alone: list[float]) -> dict[str, Steps]:
    """Every variant's prefill, then its steps, in turns of a few; between these, all-reduces of nbytes by
    themselves (the mean of each eight into `alone`: a rank that begins a delay earlier waits twice as long for every
    other one, and not at all between): the machine that they are compared with is that of the same minute."""
    turns = max(1, spec["steps"] // spec["turn"])
    for driver in drivers:
        # two more than are timed: the last step of a request has its successor planned, and nothing to do in it
        driver.begin(batch, spec["prompt"], turns * spec["turn"] + 4)
    for turn in range(turns):
        for driver in to_and_fro(drivers, turn):
            driver.turn(spec["turn"])
        if nbytes:
            alone.append(statistics.fmean(drivers[0].probe(nbytes, 8)))
    return {driver.variant.name: driver.end() for driver in drivers}


def steady(seconds: Sequence[float]) -> float:
    """The median of the means of every two steps: a rank that begins a step a delay earlier than the others ends it a
    delay later, so steps take turns."""
    return statistics.median(map(statistics.fmean, zip(seconds[::2], seconds[1::2], strict=True)))


# split steps

WARM = len(TRIAL) + 2
"""Steps until `auto` has made its choice."""
SPLITS = {"whole": None, "split": SplitRule(always=True), "auto": SplitRule(), "carried": None}


def splits(spec: Spec, model: LlamaModel, communicator: Communicator) -> Iterator[Variant]:
    """spec: size, delays_s, seats; prompts ([batch, tokens] each) and their repeats, decodes (batches) and their turns
    (of four decode steps)."""
    seats = spec["seats"]
    tokens = max([seats, *(batch * prompt for batch, prompt in spec.get("prompts", [(seats, 16)]))])
    for index, (kind, rule) in enumerate(SPLITS.items()):
        carrier = Unawaited(communicator.all_reduce) if kind == "carried" else None
        runner, limits = make_runner(rewired(model, "standard", carrier), communicator, seats, tokens)
        yield Variant(index, kind, runner, replace(limits, split=rule), awaited=carrier is None)


def lead_splits(spec: Spec, size: Size, drivers: list[Driver], communicator: Communicator, switch: Control) -> None:
    auto = next(driver for driver in drivers if driver.variant.name == "auto")
    for delay in spec["delays_s"]:
        switch.link(delay)
        auto.forget()
        for batch, prompt in spec.get("prompts", ()):
            for _ in range(WARM):
                auto.begin(batch, prompt, 2)
                auto.finish()
            for driver in drivers:
                driver.end()
            for again in range(spec["repeats"]):
                for driver in to_and_fro(drivers, again):
                    driver.begin(batch, prompt, 2)
                    driver.finish()
            seconds = {driver.variant.name: driver.end().prefills_s for driver in drivers}
            said = {name: spread(taken) for name, taken in seconds.items()}
            say(model=size.name, delay_s=delay, case=f"prefill {batch} x {prompt}", **said)
        for batch in spec.get("decodes", ()):
            for driver in drivers:
                driver.begin(batch, 16, WARM + 4 * spec["turns"] + 4)
                driver.turn(WARM)
            for turn in range(spec["turns"]):
                for driver in to_and_fro(drivers, turn):
                    driver.turn(4)
            seconds = {driver.variant.name: driver.end().decode_s[WARM:] for driver in drivers}
            said = {name: (steady(taken), min(taken), max(taken)) for name, taken in seconds.items()}
            say(model=size.name, delay_s=delay, case=f"decode {batch}", **said)


# drafts

PROMPTS = 5
ALL, PAYING = SpeculationRule(priced=False), SpeculationRule()
DRAFTS = {
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


def drafts(spec: Spec, model: LlamaModel, communicator: Communicator) -> Iterator[Variant]:
    """spec: size, batches, delays_s, prompt, answer (tokens), steps (a turn), turns."""
    seats, answers = max(spec["batches"]), Answers(spec["prompt"])
    vars(runners)["look_up"] = answers.look_up
    for index, (kind, (rule, rate)) in enumerate(DRAFTS.items()):
        runner, limits = make_runner(model, communicator, seats, seats * spec["prompt"])
        answers.behind(runner, rate)
        if index == 0:
            answers.record(runner)
        yield Variant(index, kind, runner, replace(limits, speculation=rule))


def lead_drafts(spec: Spec, size: Size, drivers: list[Driver], communicator: Communicator, switch: Control) -> None:
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
            found: dict[str, list[float]] = {kind: [] for kind in DRAFTS}
            for turn in range(spec["turns"]):
                for driver in to_and_fro(drivers, turn):
                    began, before = time.perf_counter(), driver.tokens
                    driver.turn(spec["steps"])
                    found[driver.variant.name].append((driver.tokens - before) / (time.perf_counter() - began))
            for driver in drivers:
                driver.cancel(batch)
            say(model=size.name, delay_s=delay, batch=batch, **{kind: spread(each) for kind, each in found.items()})


TASKS: dict[str, Task] = {
    "collectives": collectives,
    "decode": in_turns(wirings, lead_wirings),
    "split": in_turns(splits, lead_splits),
    "drafts": in_turns(drafts, lead_drafts),
}


def main() -> None:
    """Runs the task of argv's JSON; a rank that fails leaves at once, and mpirun ends those that wait for it."""
    try:
        torch.set_num_threads(1)
        spec = json.loads(sys.argv[1])
        bootstrap = MpiBootstrap()
        me = identify()
        assert me is not None
        nodes = tuple(name.decode() for name in bootstrap.all_gather(me.node.encode()))
        TASKS[spec["task"]](spec, bootstrap, observed_layout(nodes, 0, bootstrap.size), address_of("eth0"))
    except BaseException:
        traceback.print_exc()
        sys.stderr.flush()
        os._exit(1)


if __name__ == "__main__":
    main()
