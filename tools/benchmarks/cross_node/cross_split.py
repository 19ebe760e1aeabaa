"""Ranks of cross_node.py: one model's steps whole, in two streams, and as `auto` chooses, in turns, over delays; beside
them *carried*, where nobody waits for a message. Rank 0 sets the link itself and prints a JSON line a case."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from bench_model import Size, make_runner, rewired
from cluster.nodes import Control
from common import say, to_and_fro
from cross_decode import steady
from laddertron.engine.schedule.split import TRIAL, SplitRule
from laddertron.models.llama import LlamaModel
from laddertron.tools.bench.bench import spread
from laddertron.topology.comm.groups import Communicator
from rank_task import Spec, be_rank, in_turns
from variants import Driver, Unawaited, Variant

WARM = len(TRIAL) + 2
"""Steps until `auto` has made its choice."""
KINDS = {"whole": None, "split": SplitRule(always=True), "auto": SplitRule(), "carried": None}


def kinds(spec: Spec, model: LlamaModel, communicator: Communicator) -> Iterator[Variant]:
    """spec: size, delays_s, seats; prompts ([batch, tokens] each) and their repeats, decodes (batches) and their turns
    (of four decode steps)."""
    seats = spec["seats"]
    tokens = max([seats, *(batch * prompt for batch, prompt in spec.get("prompts", [(seats, 16)]))])
    for index, (kind, rule) in enumerate(KINDS.items()):
        carrier = Unawaited(communicator.all_reduce) if kind == "carried" else None
        runner, limits = make_runner(rewired(model, "standard", carrier), communicator, seats, tokens)
        yield Variant(index, kind, runner, replace(limits, split=rule), awaited=carrier is None)


def lead(spec: Spec, size: Size, drivers: list[Driver], communicator: Communicator, switch: Control) -> None:
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


if __name__ == "__main__":
    be_rank(in_turns(kinds, lead))
