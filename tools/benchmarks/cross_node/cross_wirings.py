"""The wirings among cross_node.py's measurements, several runs of each delay and batch: the law with a run's own prices
(a step in which all that a wiring can hide is hidden), table and bars. Pure."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from common import spread, table
from laddertron.models.config.lanes import Lanes
from laddertron.models.config.parts import Wiring, WiringKind, make_wiring
from laddertron.models.residual import collectives_per_step
from laddertron.tools.plan.step_simulator import StepCost, Wire, simulate_step

Line = Mapping[str, Any]
Case = Mapping[str, Line]
"""One run at one delay and batch: each wiring's line."""
WIRINGS = ("standard", "parallel", "ladder", "carried", "no-communication")
LATER = "delay-2"
"""Its outputs are read a sub-block later than ladder's: for delays that ladder cannot hide."""
LAW_BAR, FROM_RATIO = 0.85, 0.2
"""The least share of the law, wherever an all-reduce takes at least that share of a sub-block's computation."""
SPEED_BAR, REST_BAR = 1.5, 0.98
"""Ladder over standard at 1 ms, and without a delay."""


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


def lanes_of_the_law(case: Case, lanes: int, delay: int) -> float:
    """The same of a model of lanes, "lanes delay-d": its early layers and its head wait for a sum, its last layers send
    nothing. Outside and L are the Llama's beside it; a sub-block is longer by what its silent step is."""
    p, silent, carried = prices(case), *(float(case[f"lanes {w}"]["step_s"]) for w in ("no-communication", "carried"))
    kind: WiringKind = "lanes"
    one, wiring = (Wiring((kind,) * p.layers, lanes=Lanes(lanes, d, p.layers)) for d in (1, delay))
    carrying = max(0.0, (carried - silent) / (collectives_per_step(one) + 1))
    longer = (silent - p.outside_s) / (p.layers * (p.attention_s + p.mlp_s))
    travels = Wire(0.0, max(0.0, p.all_reduce_s - carrying))
    cost = StepCost(
        [p.attention_s * longer] * p.layers, [p.mlp_s * longer] * p.layers, travels, after_s=p.outside_s + carrying,
        after=travels, start_s=carrying,
    )  # fmt: skip
    return simulate_step(cost, wiring, 2).total_s / float(case[f"lanes delay-{delay}"]["step_s"])


def cases(lines: Sequence[Line]) -> dict[tuple[float, int], dict[str, Line]]:
    """One run's lines by (delay, batch), each with its wirings' lines."""
    found: dict[tuple[float, int], dict[str, Line]] = {}
    for line in lines:
        found.setdefault((line["delay_s"], line["batch"]), {})[line["wiring"]] = line
    return dict(sorted(found.items()))


def cells(lines: Sequence[Line]) -> dict[tuple[str, int], list[Case]]:
    """By (delay in words, batch), each run's case. A delay that was aimed at an L/c differs from run to run."""
    found: dict[tuple[str, int], list[Case]] = {}
    for run in sorted({line["run"] for line in lines}):
        for (delay, batch), case in cases([line for line in lines if line["run"] == run]).items():
            aimed = case["standard"]["aimed"]
            words = f"{delay * 1e3:g} ms" if aimed is None else f"L = {aimed:g} c"
            found.setdefault((words, batch), []).append(case)
    return dict(sorted(found.items(), key=lambda item: (median(delay_s, item[1]), item[0][1])))


def delay_s(case: Case) -> float:
    return float(case["standard"]["delay_s"])


def speed_up(case: Case) -> float:
    return float(case["standard"]["step_s"] / case["ladder"]["step_s"])


def effective_ratio(case: Case) -> float:
    """L/c as the steps themselves say it: what communication adds to what computation takes."""
    return float(case["standard"]["step_s"] / case["no-communication"]["step_s"] - 1.0)


def median(figure: Callable[[Case], float], runs: Sequence[Case]) -> float:
    return statistics.median(map(figure, runs))


def range_of(figure: Callable[[Case], float], runs: Sequence[Case]) -> str:
    return spread([figure(case) for case in runs], ".2f")


def step_of(wiring: str) -> Callable[[Case], float]:
    return lambda case: float(case[wiring]["step_s"])


def of_law(wiring: str) -> Callable[[Case], float]:
    return lambda case: of_the_law(case, wiring)


def ladder_law(case: Case) -> float:
    return predicted_step(prices(case), "ladder")


def wiring_tables(lines: Sequence[Line]) -> list[str]:
    """Markdown: what the steps took, and what the law says of them."""
    number = len({line["run"] for line in lines})
    speeds, steps = [], []
    for (delay, batch), runs in cells(lines).items():
        where = f"{delay}, {batch}"
        rates = (f"{batch / median(step_of(w), runs):.1f}" for w in WIRINGS)
        speeds.append((where, *rates, range_of(speed_up, runs)))
        p = [prices(case) for case in runs]
        names = ("attention_s", "mlp_s", "all_reduce_s", "carrying_s", "outside_s")
        found = [f"{statistics.median(getattr(each, name) for each in p) * 1e3:.2f}" for name in names]
        found.insert(3, f"{statistics.median(each.ratio for each in p):.2f}")
        taken = (f"{median(figure, runs) * 1e3:.1f}" for figure in (ladder_law, step_of("ladder")))
        steps.append((where, *found, *taken, *(range_of(of_law(w), runs) for w in ("ladder", "standard"))))
    shares = [line["switch_share"] for line in lines]
    others = [line["other_threads_share"] for line in lines]
    return [
        f"### Wirings ({lines[0]['model']}, tp 2 over 2 nodes, one core a rank)",
        "",
        f"Decode tokens/s, medians of {number} runs. Speed-up: ladder over standard (slowest to fastest run). Carried: "
        "every message is sent and received, and no rank waits for one; its difference from no communication is the "
        "core time of communication, which no wiring hides.",
        "",
        *table("one way, batch | standard | parallel | ladder | carried | no-comm. | speed-up", speeds),
        "",
        "The same steps against the law, in milliseconds, with times from the same run. Attention, MLP: the "
        "computation of a sub-block. L: one all-reduce of the step's size by itself. Carrying: the core time of an "
        "all-reduce. Outside: the step without its sub-blocks (embedding, head, gather, sampling). The law's step: "
        "ladder's with the largest overlap that the wiring allows (`tools/benchmarks/cross_node/cross_wirings.py`). Of "
        "the law: the law's step over ladder's (worst to best run). Standard, of c + L: the same for standard, which "
        "overlaps nothing.",
        "",
        *table(
            "one way, batch | attention | MLP | L | L/c | carrying | outside | the law's step | ladder's step | "
            "of the law | standard, of c + L",
            steps,
        ),
        "",
        f"The emulated switch took {min(shares):.1%} to {max(shares):.1%} of one core, and a rank's other threads "
        f"{min(others):.1%} to {max(others):.1%}, both on the cores that compute.",
    ]


def later_table(lines: Sequence[Line]) -> list[str]:
    """Markdown: LATER beside ladder, where it ran."""
    rows = []
    for (delay, batch), runs in cells([line for line in lines if line["delay_s"] > 0]).items():
        if all(LATER in case for case in runs):
            rates = (f"{batch / median(step_of(w), runs):.1f}" for w in ("standard", "ladder", LATER))
            gain = range_of(lambda case: step_of("standard")(case) / step_of(LATER)(case), runs)
            ratio = median(lambda case: prices(case).ratio, runs)
            rows.append((f"{delay}, {batch}", f"{ratio:.2f}", *rates, gain, range_of(of_law(LATER), runs)))
    if not rows:
        return []
    return [
        f"{LATER.capitalize()} against ladder: each output is read one sub-block later than with ladder, so a "
        "sub-block takes max(c, (c + L) / 3). Decode tokens/s (slowest to fastest run).",
        "",
        *table(f"one way, batch | L/c | standard | ladder | {LATER} | over standard | of the law", rows),
    ]


def wiring_bars(lines: Sequence[Line]) -> list[tuple[bool, str]]:
    """(met, in words) of every case; each run's medians."""
    found: list[tuple[bool, str]] = []
    for (delay, batch), runs in cells(lines).items():
        where = f"{delay}, batch {batch}"
        if median(lambda case: prices(case).ratio, runs) >= FROM_RATIO:
            share = range_of(of_law("ladder"), runs)
            met = median(of_law("ladder"), runs) >= LAW_BAR
            found.append((met, f"ladder {where}: {share} of the law, at least {LAW_BAR}"))
        bar = {1e-3: SPEED_BAR, 0.0: REST_BAR}.get(delay_s(runs[0]))
        if bar is not None:
            met = median(speed_up, runs) >= bar
            found.append((met, f"ladder {where}: {range_of(speed_up, runs)}x, at least {bar}x"))
    return found


def law_points(lines: Sequence[Line]) -> list[tuple[float, float, int]]:
    """(L/c as the steps say it, speed-up, batch) of every cell, for the picture."""
    return [(median(effective_ratio, runs), median(speed_up, runs), batch) for (_, batch), runs in cells(lines).items()]
