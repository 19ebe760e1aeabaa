"""The law with a run's own prices: what a step takes where everything that a wiring allows to be hidden is. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from laddertron.models.config.parts import make_wiring
from laddertron.tools.plan.step_simulator import StepCost, Wire, simulate_step

Case = Mapping[str, Mapping[str, Any]]
"""One run at one delay and batch: each wiring's line of cross_node.py."""


@dataclass(frozen=True, slots=True)
class Prices:
    """Seconds of an attention's and an MLP's computation; of an all-reduce by itself (L), and of what one takes from
    the core that computes, whether anybody waits or not; and of a step outside of its sub-blocks: embedding, head,
    gather, sampling, planning."""

    attention_s: float
    mlp_s: float
    all_reduce_s: float
    carrying_s: float
    outside_s: float
    layers: int

    @property
    def compute_s(self) -> float:
        """c: the mean sub-block's computation."""
        return (self.attention_s + self.mlp_s) / 2

    @property
    def ratio(self) -> float:
        """L/c."""
        return self.all_reduce_s / self.compute_s


def prices(case: Case) -> Prices:
    """As the run measured them. Carrying: what the step in which every message is sent and taken and none is waited for
    is slower by than the one without messages. Sub-blocks are timed in that step, from message to message."""
    carried, silent = (float(case[name]["step_s"]) for name in ("carried", "no-communication"))
    number = int(case["carried"]["sub_blocks"])
    attention, mlp = map(float, case["carried"]["sub_blocks_s"])
    carrying = max(0.0, (carried - silent) / number)
    return Prices(
        attention_s=attention - carrying,
        mlp_s=mlp - carrying,
        all_reduce_s=float(case["carried"]["all_reduce_s"]),
        carrying_s=carrying,
        outside_s=carried - number / 2 * (attention + mlp),
        layers=number // 2,
    )


def predicted_step(p: Prices, wiring: str) -> float:
    """Seconds of a step, by the simulator's clock. What an all-reduce takes from the core counts as computing, so only
    the rest of it travels. With equal sub-blocks and nothing to carry a sub-block takes c + L, and max(c, (c + L) / 2)
    with ladder."""
    travels = Wire(0.0, max(0.0, p.all_reduce_s - p.carrying_s))
    attention, mlp = [p.attention_s] * p.layers, [p.mlp_s] * p.layers
    cost = StepCost(attention, mlp, travels, after_s=p.outside_s, start_s=p.carrying_s)
    return simulate_step(cost, make_wiring(wiring, p.layers), 2).total_s


def of_the_law(case: Case, wiring: str) -> float:
    """The step that the law predicts over the one that was measured: 1.0 is the law itself."""
    return predicted_step(prices(case), wiring) / float(case[wiring]["step_s"])
