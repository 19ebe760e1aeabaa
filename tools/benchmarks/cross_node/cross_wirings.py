"""The part `wirings` of cross_node.py, several runs of each delay and batch: its measurements, the law with a run's own
prices (a step in which all that a wiring can hide is hidden), tables and bars."""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from itertools import product
from statistics import fmean, median
from typing import Any

from common import in_turns, spread, table
from laddertron.launchers.measure.rank_job import BenchJob
from laddertron.models.config.lanes import Lanes
from laddertron.models.config.parts import Wiring, WiringKind, make_wiring
from laddertron.models.config.quantisation import BYTES
from laddertron.models.residual import collectives_per_step
from laddertron.tools.plan.step_simulator import StepCost, Wire, simulate_step
from two_nodes import MS, SHAPE, Row, Site, declaring, on_nodes

Line = Mapping[str, Any]
Case = Mapping[str, Line]
"""One run at one delay and batch: each wiring's line."""
WIRINGS = ("standard", "parallel", "ladder", "carried", "no-communication")
LATER = "delay-2"
"""Its outputs are read a sub-block later than ladder's: for delays that ladder cannot hide."""
WIDE = {**SHAPE, "num_hidden_layers": 16, "torch_dtype": "float32", "tie_word_embeddings": True}
LAW_BAR, FROM_RATIO = 0.85, 0.2
"""The least share of the law, wherever an all-reduce takes at least that share of a sub-block's computation."""
SPEED_BAR, REST_BAR = 1.5, 0.98
"""Ladder over standard at 1 ms, and without a delay."""


def wiring_job(site: Site, kind: str, ranks: int) -> BenchJob:
    """A job with the model `llama` or `parallel`; for a kind "lanes ..." with `lanes-1` or `lanes-2`, whose broadcasts
    have this delay."""
    name = kind.removeprefix("lanes ")
    if name != kind:
        model = "lanes-2" if name == LATER else "lanes-1"
    else:
        model = "parallel" if name == "parallel" else "llama"
    wiring = name if model == "llama" or name == "no-communication" else "auto"
    wiring = "standard" if wiring == "carried" else wiring
    deployment = site.deployment(model, wiring, {"tensor_parallel_size": ranks}, max_num_seqs=8)
    return site.job(kind, deployment, carried=name == "carried")


def wirings(
    site: Site, kinds: list[str], delays_s: list[float], ratios: list[float], shape: Row, ranks: int = 2, turns: int = 3
) -> Iterator[Row]:
    """Decode steps of each kind in turns, over delays and those that give an L/c of `ratios`."""
    sub_blocks, row = 2 * shape["num_hidden_layers"], int(BYTES[shape["torch_dtype"]]) * shape["hidden_size"]
    with ExitStack() as stack:
        jobs = {kind: stack.enter_context(wiring_job(site, kind, ranks)) for kind in kinds}

        def run(batch: int, kind: str) -> Row:
            timing = jobs[kind].ask("case", batch=batch, prompt=32, generate=11)
            # a rank that begins a delay earlier waits twice as long for every other one: their mean
            alone_s = fmean(jobs[kind].ask("all_reduce", bytes=batch * row, count=8)["seconds"])
            return timing | {"alone_s": alone_s, "step_s": batch * timing["decode_s"] / timing["decode_tokens"]}

        site.switch.link(0.0)
        first = in_turns(jobs, 3, partial(run, 1))
        c = median(run["step_s"] for run in first["no-communication"]) / sub_blocks
        at_rest = median(run["alone_s"] for run in first["standard"])
        delays = [(d, None) for d in delays_s] + [(max(0.0, r * c - at_rest), r) for r in ratios]
        for (delay_s, aimed), batch in product(delays, (1, 8)):
            site.switch.link(delay_s)
            before, began = site.switch.stats().cpu_s, time.perf_counter()
            runs_by_kind = in_turns(jobs, turns, partial(run, batch))
            switch_share = (site.switch.stats().cpu_s - before) / (time.perf_counter() - began)
            all_reduce_s = median(timing["alone_s"] for runs in runs_by_kind.values() for timing in runs)
            for kind, runs in runs_by_kind.items():
                busy_s = sum(timing["prefill_s"] + timing["decode_s"] for timing in runs)
                yield {
                    "model": f"hidden {shape['hidden_size']}, {sub_blocks // 2} layers, {shape['torch_dtype']}",
                    "delay_s": delay_s, "aimed": aimed, "batch": batch, "wiring": kind, "sub_blocks": sub_blocks,
                    "step_s": median(timing["step_s"] for timing in runs), "all_reduce_s": all_reduce_s,
                    "sub_blocks_s": [median(timing["sub_blocks_s"][at] for timing in runs) for at in (0, 1)],
                    "switch_share": switch_share,
                    "other_threads_share": sum(timing["other_threads_s"] for timing in runs) / busy_s,
                }  # fmt: skip


def wiring_runs() -> Iterator[Row]:
    models = {"llama": WIDE, "parallel": declaring(WIDE, "parallel")}
    delays, ratios = [delay * MS for delay in (0, 0.1, 0.5, 1, 2)], [0.5, 0.66, 1.0]
    return on_nodes(wirings, models, [*WIRINGS, LATER], delays, ratios, WIDE)


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


def speeds_table(lines: Sequence[Line]) -> list[str]:
    """Decode tokens/s. Speed-up: ladder over standard."""
    rows = [(cell.where, *cell.rates(WIRINGS), spread(cell.gains("ladder"), ".2f")) for cell in cells(lines)]
    shares, others = ([line[f"{name}_share"] for line in lines] for name in ("switch", "other_threads"))
    return [
        *table("one way, batch | standard | parallel | ladder | carried | no-comm. | speed-up", rows),
        "",
        f"Of {lines[0]['model']}, medians of {len({line['run'] for line in lines})} runs. The emulated switch took "
        f"{min(shares):.1%} to {max(shares):.1%} of one core, and a rank's other threads {min(others):.1%} to "
        f"{max(others):.1%}, both on the cores that compute.",
    ]


def law_table(lines: Sequence[Line]) -> list[str]:
    """What the law says of the same steps, in milliseconds, with times from the same run."""
    rows = []
    for cell in cells(lines):
        names = ("attention_s", "mlp_s", "all_reduce_s", "carrying_s", "outside_s")
        cells_text = [f"{median(getattr(price, name) for price in cell.prices) * 1e3:.2f}" for name in names]
        cells_text.insert(3, f"{cell.ratio:.2f}")
        law_s = median(predicted_step(price, "ladder") for price in cell.prices)
        taken = (f"{seconds * 1e3:.1f}" for seconds in (law_s, median(cell.steps("ladder"))))
        rows.append((cell.where, *cells_text, *taken, *(spread(cell.of_law(w), ".2f") for w in ("ladder", "standard"))))
    return table(
        "one way, batch | attention | MLP | L | L/c | carrying | outside | the law's step | ladder's step | "
        "of the law | standard, of c + L",
        rows,
    )


def later_table(lines: Sequence[Line]) -> list[str]:
    """LATER beside ladder, where a message takes time."""
    rows = [
        (cell.where, f"{cell.ratio:.2f}", *cell.rates(("standard", "ladder", LATER)),
         spread(cell.gains(LATER), ".2f"), spread(cell.of_law(LATER), ".2f"))
        for cell in cells(lines)
        if cell.delay_s > 0
    ]  # fmt: skip
    return table(f"one way, batch | L/c | standard | ladder | {LATER} | over standard | of the law", rows)


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
