"""The simulator against this engine on the emulated cluster: reads the JSON lines of cross_node.py.

    python benchmarks/simulate_check.py [FILE]     default: benchmarks/results/cross_node.json; also plain JSON lines

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
from laddertron.engine.estimate.step_simulator import StepCost, Wire, simulate_step
from laddertron.models.config.parts import make_wiring

RESULTS = Path(__file__).resolve().parent / "results" / "cross_node.json"
LIMIT = 0.15
SILENT = "no-communication"
MLP_SHARE = 0.65
"""Of a layer's time, where the lines do not tell: two thirds of its weights, and fewer small operators."""


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
    mlp_share: float = MLP_SHARE


@dataclass(frozen=True, slots=True)
class Constants:
    """Shares: of an all-reduce at rest, of computing's speed, of a sub-block."""

    start: float
    slows: float
    skew: float


def read_lines(path: Path) -> list[dict[str, Any]]:
    """The measurements of decoding in a results file or in a file of JSON lines. Raises OSError, ValueError."""
    text = path.read_text(encoding="utf-8")
    if text.lstrip().startswith("{\n") or '"lines"' in text[:4000]:
        found = [line for part in json.loads(text).values() for line in part.get("lines", ())]
    else:
        found = [json.loads(line) for line in text.splitlines() if line.startswith("{")]
    return [line for line in found if "wiring" in line and "step_s" in line and "all_reduce_s" in line]


def cases(lines: Iterable[dict[str, Any]]) -> list[Case]:
    """One for each line that has a silent step beside it, of the same run, delay and batch: they were measured in
    turns, so that what else the machine did weighs on both. Carried messages are no wiring of the simulator's."""
    listed = list(lines)
    silent: dict[tuple[str, int, int, float], float] = {}
    at_rest: dict[tuple[str, int, int], float] = {}
    shares: dict[tuple[str, int, int, float], float] = {}
    for line in listed:
        key = (line["model"], line.get("run", 1), line["batch"])
        at_rest[key] = min(line["all_reduce_s"], at_rest.get(key, float("inf")))
        if line["wiring"] == SILENT:
            silent[*key, line["delay_s"]] = line["step_s"]
        elif line["wiring"] == "standard":
            shares[*key, line["delay_s"]] = line.get("larger_share", MLP_SHARE)
    found = []
    for line in listed:
        key = (line["model"], line.get("run", 1), line["batch"])
        beside = silent.get((*key, line["delay_s"]))
        if beside is not None and line["wiring"] not in (SILENT, "carried"):
            found.append(
                Case(
                    line["model"], line["delay_s"], line["batch"], line["wiring"], line["step_s"], beside,
                    line["all_reduce_s"], at_rest[key], line["sub_blocks"],
                    shares.get((*key, line["delay_s"]), MLP_SHARE),
                )
            )  # fmt: skip
    return found


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
        print(f"{path}: {error}: run benchmarks/cross_node/cross_node.py first", file=sys.stderr)
        return 2
    if not listed:
        print(
            f"{path}: no wiring beside a {SILENT} step: run benchmarks/cross_node/cross_node.py --only wirings",
            file=sys.stderr,
        )
        return 2
    lines, missed = report(listed)
    print("\n".join(lines))
    return int(missed > 0)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
