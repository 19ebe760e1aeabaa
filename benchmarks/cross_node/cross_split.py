"""Ranks of cross_node.py: one model's steps whole, in two streams, and as `auto` chooses, in turns, over delays; beside
them *carried*, where nobody waits for a message. Rank 0 sets the link itself and prints a JSON line a case."""

from __future__ import annotations

import os
import statistics
from dataclasses import replace

import torch
from bench_model import Size, make_model, make_runner, rewired
from cluster.nodes import CONTROL, Control
from cross_decode import steady
from laddertron.engine.schedule.split import TRIAL, SplitRule
from laddertron.launchers.measure.lanes import Lane
from laddertron.topology.comm.bootstrap import MpiBootstrap
from laddertron.topology.comm.groups import CommOptions, Communicator
from laddertron.topology.connect import connect
from laddertron.topology.placement.layout import GroupLayout
from lanes import Driver, Unawaited, play
from rank_task import Spec, be_rank, say

WARM = len(TRIAL) + 2
"""Steps until `auto` has made its choice."""
KINDS = {"whole": None, "split": SplitRule(always=True), "auto": SplitRule(), "carried": None}


def splitting(spec: Spec, bootstrap: MpiBootstrap, layout: GroupLayout, address: str) -> None:
    """spec: size (of bench_model.Size), prompts ([batch, tokens] each), decodes (batches), delays_s, repeats, turns (of
    four decode steps), seats."""
    torch.set_grad_enabled(False)
    size = Size(**spec["size"])
    with connect(bootstrap, layout, CommOptions(address=address)) as communicator:
        model = make_model(size, communicator)
        lanes = []
        for index, kind in enumerate(KINDS):
            carrier = Unawaited(communicator.all_reduce) if kind == "carried" else None
            tokens = max([batch * prompt for batch, prompt in spec["prompts"]], default=spec["seats"] * 16)
            runner, limits = make_runner(
                rewired(model, "standard", carrier), communicator, spec["seats"], max(tokens, spec["seats"])
            )
            lanes.append(Lane(index, kind, runner, replace(limits, split=KINDS[kind]), awaited=carrier is None))
        play(lanes, communicator, lambda: _lead(spec, size, lanes, communicator, Control(os.environ[CONTROL])))


def _lead(spec: Spec, size: Size, lanes: list[Lane], communicator: Communicator, switch: Control) -> None:
    drivers = {lane.name: Driver(lane, communicator) for lane in lanes}
    for delay in spec["delays_s"]:
        switch.link(delay)
        drivers["auto"].forget()
        for batch, prompt in spec["prompts"]:
            for _ in range(WARM):
                drivers["auto"].begin(batch, prompt, 2)
                drivers["auto"].finish()
            for driver in drivers.values():
                driver.end()
            for again in range(spec["repeats"]):
                for driver in _turns(drivers, again):
                    driver.begin(batch, prompt, 2)
                    driver.finish()
            said = {name: sorted(driver.end().prefills_s) for name, driver in drivers.items()}
            _tell(size, delay, f"prefill {batch} x {prompt}", said, statistics.median)
        for batch in spec["decodes"]:
            for driver in drivers.values():
                driver.begin(batch, 16, WARM + 4 * spec["turns"] + 4)
                driver.turn(WARM)
            for turn in range(spec["turns"]):
                for driver in _turns(drivers, turn):
                    driver.turn(4)
            taken = {name: list(driver.end().decode_s)[WARM:] for name, driver in drivers.items()}
            _tell(size, delay, f"decode {batch}", taken, steady)


def _turns(drivers: dict[str, Driver], turn: int) -> list[Driver]:
    return list(drivers.values())[:: -1 if turn % 2 else 1]


def _tell(size: Size, delay: float, case: str, seconds: dict[str, list[float]], middle: object) -> None:
    assert callable(middle)
    said = {name: [middle(found), min(found), max(found)] for name, found in seconds.items()}
    say(model=size.name, delay_s=delay, case=case, **said)


if __name__ == "__main__":
    be_rank(splitting)
