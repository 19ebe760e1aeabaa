"""The simulator against published speeds of Ladder Residual on H100 (arXiv 2501.06589): constants fitted on half of the
rows, every row predicted, misses listed: docs/plans/validation.md, which plan_docs.py writes.

The measured implementation is not this engine: one flat all-reduce, embedding and head on every rank, keys and values
read from a static cache of 1,536 positions and repeated for every query head. Rates are of decoding alone: with the
prompt counted in, batch 64 without peer access would need links that are faster than they are.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from math import exp, log

import numpy as np
from common import table
from laddertron.models.config.known_models import known
from laddertron.models.config.model_config import ModelConfig
from laddertron.models.config.parts import make_wiring
from laddertron.tools.plan.published import POSITIONS, SHAPES, SPEEDUPS, TOKENS, Key
from laddertron.tools.plan.roofline import (
    NCCL_CONTENTION,
    WEIGHT_SHARE,
    ComputeRates,
    Contention,
    Links,
    Load,
    SimulatedGroup,
    gpu_rates,
    links,
)
from laddertron.tools.plan.step_simulator import Wire
from laddertron.topology.cost.cost import Costs, Regime
from laddertron.topology.cost.prices import reference
from laddertron.topology.hardware.presets import GPU_MODELS
from laddertron.topology.link_cost import LinkCost

OVERHEAD_S = 10e-6
LIMIT = 0.10

FITTED: tuple[Key, ...] = (
    ("70B", "p2p", 1),
    ("70B", "p2p", 64),
    ("70B", "no p2p", 1),
    ("70B", "no p2p", 64),
    ("405B", "2 nodes", 1),
    ("405B", "2 nodes", 16),
)
"""The half that constants are fitted on; the other half tests them."""


def model(name: str) -> ModelConfig:
    """The shape that was measured: its 405B has 16 KV heads."""
    if name == "405B":
        return replace(known("llama-3.1-405b"), num_kv_heads=16)
    names = {"1B": "ladder-1b", "3B": "ladder-3b", "8B": "llama-3.1-8b", "34B": "codellama-34b", "70B": "llama-3.1-70b"}
    return known(names[name])


@dataclass(frozen=True, slots=True)
class Constants:
    """One set for all rows: `rates` and `kv_reads` of computing, a price of each link, contention by interconnect."""

    rates: ComputeRates
    kv_reads: float
    links: dict[str, LinkCost]
    contention: dict[str, Contention]

    def price(self, interconnect: str) -> Links:
        shape = SHAPES[interconnect]
        inside = self.links["pcie" if shape.intra == "pcie" else "nvlink"]
        costs = Costs("nccl", (Regime(OVERHEAD_S, inside, self.links["ib"]),))
        slowest = "2 nodes" if shape.nodes > 1 else interconnect
        return links("nccl", shape, costs, self.contention[slowest], "fitted")

    def group(self, name: str, interconnect: str) -> SimulatedGroup:
        return SimulatedGroup(
            model(name), SHAPES[interconnect].size, self.rates, self.price(interconnect),
            replicate_embedding=True, replicate_head=True, kv_reads=self.kv_reads,
        )  # fmt: skip

    def tokens_per_s(self, key: Key, wiring: str) -> float:
        name, interconnect, batch = key
        group = self.group(name, interconnect)
        step = group.step(Load(decodes=batch, context=POSITIONS), make_wiring(wiring, group.config.num_layers))
        return batch / step.total_s

    def gain(self, key: Key, wiring: str) -> float:
        """Over standard."""
        return self.tokens_per_s(key, wiring) / self.tokens_per_s(key, "standard")


def fit(rows: Sequence[Key] = FITTED) -> Constants:
    """All constants, in three stages: computing from rows without communication, links from what standard takes
    longer, contention from what ladder leaves of that."""
    rates, kv_reads = _fit_rates([row for row in rows if "none" in TOKENS[row]])
    free = dict.fromkeys(("nvlink", "pcie", "ib"), LinkCost(0, 1e15))
    constants = Constants(rates, kv_reads, free, dict.fromkeys(("p2p", "no p2p", "2 nodes"), Contention(0.0, 0.0)))
    for interconnect, link in (("p2p", "nvlink"), ("no p2p", "pcie"), ("2 nodes", "ib")):
        mine = [row for row in rows if row[1] == interconnect]
        constants = replace(constants, links={**constants.links, link: _fit_link(constants, interconnect, mine)})
        constants = replace(
            constants, contention={**constants.contention, interconnect: _fit_contention(constants, mine)}
        )
    return constants


def _fit_rates(rows: Sequence[Key]) -> tuple[ComputeRates, float]:
    """Seconds = weight bytes, calls with one row, calls with more and KV bytes, each at its price."""
    lines, seconds = [], []
    for name, interconnect, batch in rows:
        size = SHAPES[interconnect].size
        unit = ComputeRates(1e30, 1.0, 1.0, 0.0, 0.0, "")
        group = SimulatedGroup(model(name), size, unit, Links(lambda n: Wire(0.0), lambda n: "none", ""),
                      replicate_embedding=True, replicate_head=True)  # fmt: skip
        layers = group.config.num_layers
        weights, both = (
            group.step(Load(decodes=batch, context=context), make_wiring("none", layers)).total_s
            for context in (0, POSITIONS)
        )
        calls = 2 * layers
        lines.append([weights, calls * (batch == 1), calls * (batch > 1), both - weights])
        seconds.append(batch / TOKENS[name, interconnect, batch]["none"])
    a, b, c, d = _least_squares(lines, seconds)
    return ComputeRates(GPU_MODELS["H100"].bf16_flops * 0.55, 1 / a, 1 / a, b, c, "fitted"), d / a


def _least_squares(lines: Sequence[Sequence[float]], target: Sequence[float]) -> list[float]:
    """The prices whose sums over each line have the least relative errors."""
    matrix, goals = np.asarray(lines, dtype=float), np.asarray(target)
    scale = np.abs(matrix).max(axis=0)
    prices: list[float] = (
        np.linalg.lstsq(matrix / scale / goals[:, None], np.ones(len(goals)), rcond=None)[0] / scale
    ).tolist()
    return prices


def _fit_link(constants: Constants, interconnect: str, rows: Sequence[Key]) -> LinkCost:
    """Latency and bytes/s of the one link that is not known yet, from what standard takes longer than computing."""
    shape = SHAPES[interconnect]
    hops, volume = (14.0, 1.75) if shape.nodes == 1 else (2.0, 1.875)
    lines, rest = [], []
    for name, _, batch in rows:
        group = constants.group(name, interconnect)
        layers = group.config.num_layers
        alone = group.step(Load(decodes=batch, context=POSITIONS), make_wiring("none", layers)).total_s
        slower = batch / TOKENS[name, interconnect, batch]["standard"] - alone
        known_s = OVERHEAD_S + (14 * constants.links["nvlink"].latency_s if shape.nodes > 1 else 0.0)
        lines.append([hops, volume * group.message_bytes(Load(decodes=batch))])
        rest.append(slower / (2 * layers) - known_s)
    latency, byte_s = _least_squares(lines, rest)
    if latency < 0 or byte_s <= 0:
        raise ValueError(f"{interconnect}: fitted {latency} s and {byte_s} s a byte: the rows contradict the model")
    return LinkCost(latency, 1 / byte_s)


def _fit_contention(fitted: Constants, rows: Sequence[Key]) -> Contention:
    """Where ladder's rows are met: the smallest batch, whose messages are mostly latency, says what waiting costs, the
    largest what moving bytes does; in turns, as each has a little of both."""
    interconnect = rows[0][1]
    small, large = min(rows, key=lambda row: row[2]), max(rows, key=lambda row: row[2])
    best = Contention(0.0, 0.0)

    def too_fast(row: Key, trial: Contention) -> float:
        constants = replace(fitted, contention={**fitted.contention, interconnect: trial})
        return log(TOKENS[row]["ladder"] / constants.tokens_per_s(row, "ladder"))

    for _ in range(6):
        moving = best.moving
        best = Contention(_crossing(lambda x, m=moving: too_fast(small, Contention(x, m))), moving)  # type: ignore[misc]
        waiting = best.waiting
        best = Contention(waiting, _crossing(lambda x, w=waiting: too_fast(large, Contention(w, x))))  # type: ignore[misc]
    return best


def _crossing(f: Callable[[float], float]) -> float:
    """Where the rising f crosses 0 in [0, 2]; the nearer end where it does not."""
    places = 1 << 20
    return 2 * bisect_left(range(places), 0.0, key=lambda i: f(2 * i / places)) / places


@dataclass(frozen=True, slots=True)
class Row:
    """One published number and what the simulator says."""

    what: str
    key: Key
    fitted: bool
    published: float
    simulated: float

    @property
    def error(self) -> float:
        return self.simulated / self.published - 1.0


def speedups(constants: Constants) -> Iterator[Row]:
    """Ladder (and parallel) over standard, for every row of 70B and 405B, and 405B without peer access."""
    for key, published in TOKENS.items():
        for wiring in ("ladder", "parallel"):
            if wiring in published:
                published_ratio = published[wiring] / published["standard"]
                yield Row(
                    wiring, key, key in FITTED and wiring == "ladder", published_ratio, constants.gain(key, wiring)
                )
    key = ("405B", "2 nodes, no p2p", 4)
    yield Row("ladder", key, False, SPEEDUPS["no p2p"]["405B"], constants.gain(key, "ladder"))


def rates(constants: Constants) -> Iterator[Row]:
    for key, published in TOKENS.items():
        for wiring, published_rate in published.items():
            yield Row(
                wiring, key, key in FITTED and wiring != "parallel", published_rate, constants.tokens_per_s(key, wiring)
            )


def other_sizes(constants: Constants) -> Iterator[Row]:
    """Batch 4 of models whose own speed was not published: computing extrapolated from 70B and 405B."""
    for interconnect in ("p2p", "no p2p"):
        for name in ("34B", "8B", "3B", "1B"):
            key = (name, interconnect, 4)
            yield Row("ladder", key, False, SPEEDUPS[interconnect][name], constants.gain(key, "ladder"))


def shipped(constants: Constants) -> Constants:
    """The rates, prices and contention that `plan` uses; of the fitted ones only what its engine does not do, the
    repeated reading of keys and values."""
    prices = {}
    for link, interconnect in (("nvlink", "p2p"), ("pcie", "no p2p"), ("ib", "2 nodes")):
        regime = reference("nccl", SHAPES[interconnect]).regimes[0]
        if (price := regime.inter if link == "ib" else regime.intra) is not None:
            prices[link] = price
    contention = {"p2p": NCCL_CONTENTION["nvlink"], "no p2p": NCCL_CONTENTION["pcie"], "2 nodes": NCCL_CONTENTION["ib"]}
    device = GPU_MODELS["H100"].device(0, "", 0)
    kv_bytes_per_s = device.memory_bandwidth * WEIGHT_SHARE if device.memory_bandwidth else 0.0
    rates = replace(gpu_rates(device), kv_bytes_per_s=kv_bytes_per_s)
    return Constants(rates, constants.kv_reads, prices, contention)


def report(constants: Constants) -> list[str]:
    r = constants.rates
    peak = GPU_MODELS["H100"].memory_bandwidth
    constant = [
        ("share of memory bandwidth", f"{r.weight_bytes_per_s / peak:.1%}"),
        ("fixed cost of a sub-block, one row / more", f"{r.call_one_s * 1e6:.1f} / {r.call_many_s * 1e6:.1f} us"),
        ("reads of each key and value", f"{constants.kv_reads:.1f}"),
    ]
    for name, link in constants.links.items():
        constant.append((name, f"{link.latency_s * 1e6:.2f} us per hop, {link.bytes_per_s / 1e9:.1f} GB/s"))
    for name, slows in constants.contention.items():
        slower = f"slowdown of computation by a collective, {name}: latency / transfer"
        constant.append((slower, f"{slows.waiting:.2f} / {slows.moving:.2f}"))
    lines = table("constant | fitted", constant)
    for title, rows in (
        ("Speed-ups over standard", list(speedups(constants))),
        ("Tokens/s", list(rates(constants))),
        ("Speed-ups of other sizes, batch 4 (computing extrapolated)", list(other_sizes(constants))),
        ("Speed-ups with the prices that plan uses", list(speedups(shipped(constants)))),
    ):
        cells = []
        for row in rows:
            shown = [f"{rate:.{2 if row.published < 10 else 1}f}" for rate in (row.published, row.simulated)]
            error = f"{row.error:+.1%}" + ("" if abs(row.error) <= LIMIT else " **miss**")
            cells.append((*row.key, row.what, "yes" if row.fitted else "", *shown, error))
        tested = [abs(row.error) for row in rows if not row.fitted]
        missed = sum(error > LIMIT for error in tested)
        mean = exp(sum(log(1 + error) for error in tested) / len(tested)) - 1
        lines += [
            "",
            f"### {title}",
            "",
            *table("model | interconnect | batch | wiring | fitted | published | simulated | error", cells),
            "",
            f"{len(tested)} rows not used in the fit: mean error {mean:.1%}, worst {max(tested):.1%}, "
            f"{missed} beyond {LIMIT:.0%}.",
        ]
    return lines
