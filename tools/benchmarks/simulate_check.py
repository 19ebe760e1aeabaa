"""The simulator against this engine on the emulated cluster: reads the results of cross_node.py.

    python tools/benchmarks/simulate_check.py [FILE]     default: tools/benchmarks/results/cross_node.json

From each model's step without communication and each case's all-reduce, as measured, every wiring's step is predicted.
Three constants are fitted on every other delay and tested on the rest: what setting an all-reduce off takes from
computing, how much slower computing gets beside one, and how far ranks drift apart in a sub-block, which the faster one
waits for. Ends with 1 if a tested step is missed by more than 15 %.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import product
from math import exp, log
from pathlib import Path
from typing import Any

from common import table
from laddertron.models.config.parts import make_wiring
from laddertron.tools.plan.step_simulator import StepCost, Wire, simulate_step

RESULTS = Path(__file__).resolve().parent / "results" / "cross_node.json"
LIMIT = 0.15
SILENT = "no-communication"


@dataclass(frozen=True, slots=True)
class Case:
    """One wiring at one delay and batch: seconds a step as measured, and what the prediction starts from: the step
    without communication, an all-reduce at this delay and at the smallest one, the MLP's share of a layer."""

    model: str
    delay_s: float
    batch: int
    wiring: str
    step_s: float
    silent_s: float
    all_reduce_s: float
    at_rest_s: float
    sub_blocks: int
    mlp_share: float


@dataclass(frozen=True, slots=True)
class Constants:
    """Shares: of an all-reduce at rest, of computing's speed, of a sub-block."""

    start: float
    slows: float
    skew: float


def read_lines(path: Path) -> list[dict[str, Any]]:
    """The measurements of decoding in a results file. Raises OSError, ValueError."""
    parts = json.loads(path.read_text(encoding="utf-8"))
    return [line for part in parts.values() for line in part["lines"] if "wiring" in line]


def cases(lines: Iterable[dict[str, Any]]) -> list[Case]:
    """One for each line with a silent and a standard step of the same run, delay and batch: they were measured in
    turns, so that what else the machine did weighs on all. Carried messages are no wiring of the simulator's."""
    by_run: dict[tuple[str, int, int], list[dict[str, Any]]] = {}
    for line in lines:
        by_run.setdefault((line["model"], line["run"], line["batch"]), []).append(line)
    found = []
    for run in by_run.values():
        at_rest = min(line["all_reduce_s"] for line in run)
        beside = {(line["delay_s"], line["wiring"]): line for line in run}
        for line in run:
            delay, wiring = line["delay_s"], line["wiring"]
            silent, standard = beside.get((delay, SILENT)), beside.get((delay, "standard"))
            if silent is None or standard is None or wiring in (SILENT, "carried"):
                continue
            found.append(
                Case(
                    line["model"], delay, line["batch"], wiring, line["step_s"], silent["step_s"],
                    line["all_reduce_s"], at_rest, line["sub_blocks"], mlp_share(standard["sub_blocks_s"]),
                )
            )  # fmt: skip
    return found


def mlp_share(sub_blocks_s: Sequence[float]) -> float:
    """The larger sub-block's share of a layer's computation; a half where there was nothing to see."""
    return max(sub_blocks_s) / sum(sub_blocks_s) if any(sub_blocks_s) else 0.5


def predicted(case: Case, constants: Constants) -> float:
    """Seconds of the step. The delay is latency, which overlaps; the rest of an all-reduce has the wire to itself. The
    step without communication holds one collective, too: the gather of candidates after the layers. Before them there
    is none: every rank has the whole embedding."""
    layers = case.sub_blocks // 2
    layer = (case.silent_s - case.all_reduce_s) / layers
    busy = min(case.at_rest_s, case.all_reduce_s)
    wire = Wire(busy, case.all_reduce_s - busy + constants.skew * layer / 2, constants.slows)
    start = constants.start * case.at_rest_s
    cost = StepCost(
        [layer * (1 - case.mlp_share)] * layers, [layer * case.mlp_share] * layers, wire,
        after=wire, start_s=start,
    )  # fmt: skip
    return simulate_step(cost, make_wiring(case.wiring, layers), 2).total_s


def fit(known: Sequence[Case]) -> Constants:
    """The three on a grid with the smallest mean square of relative errors."""

    def badness(constants: Constants) -> float:
        return sum(log(predicted(c, constants) / c.step_s) ** 2 for c in known)

    grid = product(
        (0.0, 0.25, 0.5, 0.75, 1.0, 1.5), (0.0, 0.1, 0.2, 0.3, 0.5, 0.75), (0.0, 0.05, 0.1, 0.2, 0.3, 0.4, 0.6)
    )
    return min((Constants(*point) for point in grid), key=badness)


def halves(listed: Sequence[Case]) -> tuple[list[Case], list[Case]]:
    """Every other delay to fit on, the rest to test."""
    delays = sorted({c.delay_s for c in listed})
    fitted = set(delays[::2])
    return [c for c in listed if c.delay_s in fitted], [c for c in listed if c.delay_s not in fitted]


def report(listed: Sequence[Case]) -> tuple[list[str], int]:
    """Lines of a table, and how many tested steps are missed."""
    known, tested = halves(listed)
    constants = fit(known)
    about = (
        f"setting off {constants.start:.0%} of an all-reduce, computing {constants.slows:.0%} slower beside one, ranks "
        f"{constants.skew:.0%} of a sub-block apart; fitted on {len(known)} steps, tested on {len(tested)}"
    )
    rows, errors = [], []
    for case in sorted(listed, key=lambda c: (c.model, c.batch, c.delay_s, c.wiring)):
        seconds = predicted(case, constants)
        error = seconds / case.step_s - 1
        held = case in tested
        if held:
            errors.append(abs(error))
        mark = "fitted" if not held else "miss" if abs(error) > LIMIT else ""
        ratio = case.all_reduce_s * case.sub_blocks / case.silent_s
        times = [f"{s * 1e3:.2f}" for s in (case.delay_s, case.step_s, seconds)]
        rows.append((case.model, times[0], case.batch, case.wiring, f"{ratio:.2f}", *times[1:], f"{error:+.1%}", mark))
    lines = [about, *table("model | delay ms | batch | wiring | L/c | measured ms | simulated ms | error | ", rows)]
    missed = sum(error > LIMIT for error in errors)
    if errors:
        mean = exp(sum(log(1 + e) for e in errors) / len(errors)) - 1
        lines.append(f"tested: mean error {mean:.1%}, worst {max(errors):.1%}, {missed} beyond {LIMIT:.0%}")
    return lines, missed


def main(argv: Sequence[str]) -> int:
    path = Path(argv[0]) if argv else RESULTS
    try:
        listed = cases(read_lines(path))
    except (OSError, ValueError) as error:
        print(f"{path}: {error}: run tools/benchmarks/cross_node/cross_node.py first", file=sys.stderr)
        return 2
    if not listed:
        print(
            f"{path}: no wiring beside a {SILENT} step: run tools/benchmarks/cross_node/cross_node.py --only wirings",
            file=sys.stderr,
        )
        return 2
    lines, missed = report(listed)
    print("\n".join(lines))
    return int(missed > 0)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
