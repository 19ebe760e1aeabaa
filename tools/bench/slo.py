"""Service level objectives: limits for a request's first token and for each token after it, at the 99th percentile."""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from dataclasses import dataclass

import click

SHARE = 0.99
NAMED = {"mlperf-405b-server": "ttft=6s,tpot=175ms", "mlperf-405b-interactive": "ttft=4.5s,tpot=80ms"}
"""MLPerf Inference's limits for Llama 3.1 405B."""
_LIMIT = re.compile(r"(ttft|tpot)=([0-9]*\.?[0-9]+)(ms|s)")


@dataclass(frozen=True, slots=True)
class Slo:
    """Seconds, of SHARE of the requests: until the first token, and a token after it (a request's mean). Infinite: no
    limit."""

    ttft_s: float = math.inf
    tpot_s: float = math.inf

    def __str__(self) -> str:
        limits = {"ttft": self.ttft_s, "tpot": self.tpot_s}
        return ", ".join(f"{name} {_time(limit)}" for name, limit in limits.items() if limit < math.inf)

    def holds(self, ttft_s: float, tpot_s: float) -> bool:
        """Whether these percentiles keep both limits; NaN, of no requests, keeps none."""
        return ttft_s <= self.ttft_s and tpot_s <= self.tpot_s

    def verdict(self, ttft_s: float, tpot_s: float) -> str:
        """One line: kept, or missed and by what."""
        word = "kept" if self.holds(ttft_s, tpot_s) else "missed"
        return f"{self}: {word} (99th percentiles {_time(ttft_s)} and {_time(tpot_s)})"


def read_slo(text: str) -> Slo:
    """`ttft=6s,tpot=175ms`, either alone, or a name of NAMED. Raises ValueError."""
    limits: dict[str, float] = {}
    for part in NAMED.get(text, text).split(","):
        match = _LIMIT.fullmatch(part.strip())
        if match is None or not float(match[2]):
            raise ValueError(f"{part!r}: expected ttft=6s,tpot=175ms, or {' or '.join(NAMED)}")
        if match[1] in limits:
            raise ValueError(f"{text!r}: {match[1]} is named twice")
        limits[match[1]] = float(match[2]) / (1000 if match[3] == "ms" else 1)
    return Slo(limits.get("ttft", math.inf), limits.get("tpot", math.inf))


class SloType(click.ParamType[Slo]):
    name = "slo"

    def convert(self, value: object, param: click.Parameter | None, ctx: click.Context | None) -> Slo:
        try:
            return value if isinstance(value, Slo) else read_slo(str(value))
        except ValueError as error:
            self.fail(str(error), param, ctx)


slo_option = click.option(
    "--slo", type=SloType(), metavar="LIMITS", help="Limits on 99th percentiles, such as ttft=6s,tpot=175ms."
)


def percentile(values: Sequence[float], share: float) -> float:
    """The value that `share` of them are below; NaN of none."""
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, int(share * len(ordered)))] if ordered else float("nan")


def _time(seconds: float) -> str:
    return f"{seconds * 1e3:,.0f} ms" if seconds < 1 else f"{seconds:.3g} s"
