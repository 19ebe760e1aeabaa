"""What `plan` predicts, with its own rates and prices, against published speeds of Ladder Residual on H100 (arXiv
2501.06589): every row, misses listed: docs/plans/validation.md, which plan_docs.py writes.

The measured implementation is not this engine: one flat all-reduce, embedding and head on every rank, keys and values
read from a static cache of 1,536 positions and repeated for every query head. Rates are of decoding alone: with the
prompt counted in, batch 64 without peer access would need links that are faster than they are.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import cache
from math import exp, log

from common import table
from laddertron.models.config.known_models import known
from laddertron.models.config.model_config import ModelConfig
from laddertron.models.config.parts import make_wiring
from laddertron.tools.plan.published import POSITIONS, SHAPES, SPEEDUPS, TOKENS, Key
from laddertron.tools.plan.roofline import (
    NCCL_CONTENTION,
    WEIGHT_SHARE,
    Contention,
    Load,
    SimulatedGroup,
    gpu_rates,
    links,
)
from laddertron.topology.cost.prices import reference
from laddertron.topology.hardware.fabric import LinkClass
from laddertron.topology.hardware.presets import GPU_MODELS

LIMIT = 0.10
KV_READS = 9.3
"""Times that the measured implementation reads each key and value, by what its steps take longer at larger batches."""

FITTED: tuple[Key, ...] = (
    ("70B", "p2p", 1),
    ("70B", "p2p", 64),
    ("70B", "no p2p", 1),
    ("70B", "no p2p", 64),
    ("405B", "2 nodes", 1),
    ("405B", "2 nodes", 16),
)
"""The half of the rows that plan's constants were fitted to (WEIGHT_SHARE, the cost of a call, NCCL_CONTENTION)."""


def model(name: str) -> ModelConfig:
    """The shape that was measured: its 405B has 16 KV heads."""
    if name == "405B":
        return replace(known("llama-3.1-405b"), num_kv_heads=16)
    names = {"1B": "ladder-1b", "3B": "ladder-3b", "8B": "llama-3.1-8b", "34B": "codellama-34b", "70B": "llama-3.1-70b"}
    return known(names[name])


@cache
def group(name: str, interconnect: str, contends: bool = True) -> SimulatedGroup:
    """plan's group, with what the measured implementation does in another way. contends: a collective slows concurrent
    computation."""
    shape, device = SHAPES[interconnect], GPU_MODELS["H100"].device(0, "", 0)
    slowest: LinkClass = "ib" if shape.nodes > 1 else "pcie" if shape.intra == "pcie" else "nvlink"
    contention = NCCL_CONTENTION[slowest] if contends else Contention(0.0, 0.0)
    price = links("nccl", shape, reference("nccl", shape), contention, "untuned")
    rates = replace(gpu_rates(device), kv_bytes_per_s=(device.memory_bandwidth or 0.0) * WEIGHT_SHARE)
    return SimulatedGroup(
        model(name), shape.size, rates, price, replicate_embedding=True, replicate_head=True, kv_reads=KV_READS
    )


def tokens_per_s(key: Key, wiring: str, contends: bool = True) -> float:
    name, interconnect, batch = key
    simulated = group(name, interconnect, contends)
    step = simulated.step(Load(decodes=batch, context=POSITIONS), make_wiring(wiring, simulated.config.num_layers))
    return batch / step.total_s


def gain(key: Key, wiring: str, contends: bool = True) -> float:
    """Over standard."""
    return tokens_per_s(key, wiring, contends) / tokens_per_s(key, "standard", contends)


@dataclass(frozen=True, slots=True)
class Row:
    """One published number and what plan says."""

    what: str
    key: Key
    fitted: bool
    published: float
    simulated: float

    @property
    def error(self) -> float:
        return self.simulated / self.published - 1.0


def speedups(contends: bool = True) -> Iterator[Row]:
    """Ladder (and parallel) over standard, for every row of 70B and 405B, and 405B without peer access."""
    for key, published in TOKENS.items():
        for wiring in ("ladder", "parallel"):
            if wiring in published:
                ratio, fitted = published[wiring] / published["standard"], key in FITTED and wiring == "ladder"
                yield Row(wiring, key, fitted, ratio, gain(key, wiring, contends))
    key = ("405B", "2 nodes, no p2p", 4)
    yield Row("ladder", key, False, SPEEDUPS["no p2p"]["405B"], gain(key, "ladder", contends))


def rates() -> Iterator[Row]:
    for key, published in TOKENS.items():
        for wiring, rate in published.items():
            yield Row(wiring, key, key in FITTED and wiring != "parallel", rate, tokens_per_s(key, wiring))


def other_sizes() -> Iterator[Row]:
    """Batch 4 of models whose own speed was not published: computing extrapolated from 70B and 405B."""
    for interconnect in ("p2p", "no p2p"):
        for name in ("34B", "8B", "3B", "1B"):
            key = (name, interconnect, 4)
            yield Row("ladder", key, False, SPEEDUPS[interconnect][name], gain(key, "ladder"))


TABLES: dict[str, Callable[[], Iterator[Row]]] = {
    "Speed-ups over standard": speedups,
    "Tokens/s": rates,
    "Speed-ups of other sizes, batch 4 (computing extrapolated)": other_sizes,
}


def report() -> list[str]:
    lines = []
    for title, rows_of in TABLES.items():
        rows, cells = list(rows_of()), []
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
            *table("model | interconnect | batch | wiring | fitted | published | predicted | error", cells),
            "",
            f"{len(tested)} rows not used in the fit: mean error {mean:.1%}, worst {max(tested):.1%}, "
            f"{missed} beyond {LIMIT:.0%}.",
        ]
    return lines[1:]
