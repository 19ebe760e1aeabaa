"""The wirings among cross_node.py's measurements, several runs of each delay and batch: the law with a run's own prices
(a step in which all that a wiring can hide is hidden), table and bars. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from statistics import median
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


@dataclass(frozen=True, slots=True)
class Cell:
    """Every run's case of one delay (in words: one that was aimed at an L/c differs from run to run) and batch."""

    delay: str
    batch: int
    runs: Sequence[Case]

    @property
    def where(self) -> str:
        return f"{self.delay}, {self.batch}"

    @property
    def delay_s(self) -> float:
        return float(median(case["standard"]["delay_s"] for case in self.runs))

    @property
    def prices(self) -> list[Prices]:
        return [prices(case) for case in self.runs]

    @property
    def ratio(self) -> float:
        """L/c."""
        return median(p.ratio for p in self.prices)

    def steps(self, wiring: str) -> list[float]:
        return [float(case[wiring]["step_s"]) for case in self.runs]

    def rates(self, wirings: Iterable[str]) -> list[str]:
        """Tokens/s."""
        return [f"{self.batch / median(self.steps(wiring)):.1f}" for wiring in wirings]

    def gains(self, wiring: str) -> list[float]:
        """Over standard."""
        return [a / b for a, b in zip(self.steps("standard"), self.steps(wiring), strict=True)]

    def of_law(self, wiring: str) -> list[float]:
        return [of_the_law(case, wiring) for case in self.runs]


def cells(lines: Sequence[Line]) -> list[Cell]:
    """By delay and batch."""
    by_cell: dict[tuple[str, int], dict[int, dict[str, Line]]] = {}
    for line in lines:
        delay = f"{line['delay_s'] * 1e3:g} ms" if line["aimed"] is None else f"L = {line['aimed']:g} c"
        by_cell.setdefault((delay, line["batch"]), {}).setdefault(line["run"], {})[line["wiring"]] = line
    made = [Cell(delay, batch, list(runs.values())) for (delay, batch), runs in by_cell.items()]
    return sorted(made, key=lambda cell: (cell.delay_s, cell.batch))


def wiring_tables(lines: Sequence[Line]) -> list[str]:
    """Markdown: what the steps took, and what the law says of them."""
    speeds, steps = [], []
    for cell in cells(lines):
        speeds.append((cell.where, *cell.rates(WIRINGS), spread(cell.gains("ladder"), ".2f")))
        names = ("attention_s", "mlp_s", "all_reduce_s", "carrying_s", "outside_s")
        cells_text = [f"{median(getattr(price, name) for price in cell.prices) * 1e3:.2f}" for name in names]
        cells_text.insert(3, f"{cell.ratio:.2f}")
        law_s = median(predicted_step(price, "ladder") for price in cell.prices)
        taken = (f"{seconds * 1e3:.1f}" for seconds in (law_s, median(cell.steps("ladder"))))
        steps.append(
            (cell.where, *cells_text, *taken, *(spread(cell.of_law(w), ".2f") for w in ("ladder", "standard")))
        )
    number = len({line["run"] for line in lines})
    shares, others = ([line[f"{name}_share"] for line in lines] for name in ("switch", "other_threads"))
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
    rows = [
        (cell.where, f"{cell.ratio:.2f}", *cell.rates(("standard", "ladder", LATER)),
         spread(cell.gains(LATER), ".2f"), spread(cell.of_law(LATER), ".2f"))
        for cell in cells(lines)
        if cell.delay_s > 0 and all(LATER in case for case in cell.runs)
    ]  # fmt: skip
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
    bars: list[tuple[bool, str]] = []
    for cell in cells(lines):
        where, shares, gains = f"ladder {cell.delay}, batch {cell.batch}", cell.of_law("ladder"), cell.gains("ladder")
        if cell.ratio >= FROM_RATIO:
            bars.append((median(shares) >= LAW_BAR, f"{where}: {spread(shares, '.2f')} of the law, at least {LAW_BAR}"))
        if (bar := {1e-3: SPEED_BAR, 0.0: REST_BAR}.get(cell.delay_s)) is not None:
            bars.append((median(gains) >= bar, f"{where}: {spread(gains, '.2f')}x, at least {bar}x"))
    return bars


def law_points(lines: Sequence[Line]) -> list[tuple[float, float, int]]:
    """(L/c as what communication adds to what computation takes, speed-up, batch) of every cell, for the picture."""
    points = []
    for cell in cells(lines):
        ratio = median(a / b - 1 for a, b in zip(cell.steps("standard"), cell.steps("no-communication"), strict=True))
        points.append((ratio, median(cell.gains("ladder")), cell.batch))
    return points
