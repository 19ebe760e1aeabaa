"""Ranks of cross_node.py: one model behind several wirings that decode in turns, over delays and batches. Rank 0 sets
the link itself and prints a JSON line a case."""

from __future__ import annotations

import os
import statistics
import time
from collections.abc import Sequence

import torch
from bench_model import Size, make_model, make_runner, rewired
from cluster.nodes import CONTROL, Control
from laddertron.launchers.measure.lanes import Lane
from laddertron.topology.comm.bootstrap import MpiBootstrap
from laddertron.topology.comm.groups import CommOptions, Communicator
from laddertron.topology.connect import connect
from laddertron.topology.placement.layout import GroupLayout
from lanes import Driver, Steps, Unawaited, play, probe
from rank_task import Spec, be_rank, say


def decoding(spec: Spec, bootstrap: MpiBootstrap, layout: GroupLayout, address: str) -> None:
    """spec: size (of bench_model.Size), wirings, batches, delays_s, ratios (L/c of batch 1 to aim at), prompt, steps
    (decode steps a case), turn (steps a lane takes in a row), prefills (a case)."""
    torch.set_grad_enabled(False)
    batches = spec["batches"]
    size = Size(**spec["size"])
    with connect(bootstrap, layout, CommOptions(address=address)) as communicator:
        model = make_model(size, communicator)
        lanes = []
        for index, wiring in enumerate(spec["wirings"]):
            tokens = max(batches) * spec["prompt"]
            carrier = Unawaited(communicator.all_reduce) if wiring == "carried" else None
            runner, limits = make_runner(rewired(model, wiring, carrier), communicator, max(batches), tokens)
            lanes.append(Lane(index, wiring, runner, limits, awaited=carrier is None))
        play(lanes, communicator, lambda: _lead(spec, size, lanes, communicator, Control(os.environ[CONTROL])))


def _lead(spec: Spec, size: Size, lanes: list[Lane], communicator: Communicator, switch: Control) -> None:
    drivers = [Driver(lane, communicator) for lane in lanes]
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
                    larger_share=steps.larger_share,
                    sub_blocks_s=steps.sub_blocks_s,
                    steps=len(steps.decode_s),
                    prefill_s=steps.prefill_s,
                    prefill_range_s=[min(steps.prefills_s), max(steps.prefills_s)],
                    prefills=len(steps.prefills_s),
                    hidden_s=steps.hidden_s / len(steps.decode_s),
                    exposed_s=steps.exposed_s / len(steps.decode_s),
                    all_reduce_s=statistics.median(alone),
                    sub_blocks=2 * size.layers,
                    prompt=spec["prompt"],
                    switch_share=spent / wall,
                    other_threads_share=steps.other_cpu_s / sum(steps.decode_s),
                )


def _case(spec: Spec, drivers: list[Driver], batch: int, nbytes: int, alone: list[float]) -> dict[str, Steps]:
    """Every lane's prefills, in turns, then its steps, in turns of a few; between these, all-reduces of nbytes by
    themselves (the mean of each eight into `alone`: a rank that begins a delay earlier waits twice as long for every
    other one, and not at all between): the machine that they are compared with is that of the same minute."""
    turns = max(1, spec["steps"] // spec["turn"])
    for again in reversed(range(spec["prefills"])):
        for driver in _by_turn(drivers, again):
            # two more than are timed: the last step of a request has its successor planned, and nothing to do in it
            driver.begin(batch, spec["prompt"], 4 if again else turns * spec["turn"] + 4)
            if again:
                driver.finish()
    for turn in range(turns):
        for driver in _by_turn(drivers, turn):
            driver.turn(spec["turn"])
        if nbytes:
            alone.append(statistics.fmean(drivers[0].probe(nbytes, 8)))
    return {driver.lane.name: driver.end() for driver in drivers}


def steady(seconds: Sequence[float]) -> float:
    """The median of the means of every two steps: a rank that begins a step a delay earlier than the others ends it a
    delay later, so steps take turns."""
    return statistics.median(map(statistics.fmean, zip(seconds[::2], seconds[1::2], strict=True)))


def _by_turn(drivers: list[Driver], turn: int) -> list[Driver]:
    """To and fro: who comes first is last in the next turn."""
    return drivers if turn % 2 == 0 else drivers[::-1]


if __name__ == "__main__":
    be_rank(decoding)
