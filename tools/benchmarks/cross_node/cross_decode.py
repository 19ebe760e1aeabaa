"""Ranks of cross_node.py: one model behind several wirings that decode in turns, over delays and batches. Rank 0 sets
the link itself and prints a JSON line a case."""

from __future__ import annotations

import statistics
import time
from collections.abc import Iterator, Sequence

import torch
from bench_model import Size, make_model, make_runner, rewired
from cluster.nodes import Control
from common import say, to_and_fro
from laddertron.models.llama import LlamaModel
from laddertron.topology.comm.groups import Communicator
from rank_task import Spec, be_rank, in_turns
from variants import Driver, Steps, Unawaited, Variant, probe


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


def lead(spec: Spec, size: Size, drivers: list[Driver], communicator: Communicator, switch: Control) -> None:
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


if __name__ == "__main__":
    be_rank(in_turns(wirings, lead))
