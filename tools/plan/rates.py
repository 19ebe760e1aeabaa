"""The rate of requests at which a layout still keeps limits on their times: `plan --slo`. Pure; no torch."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import ceil
from typing import Any

from ..slo import Slo
from .advice import describe
from .answer import Sheet
from .fleet_simulator import Demand, FleetOutcome, Replica, simulate_fleet
from .layouts import Layout, Work

_REQUESTS, _SHOWN = 2000, 8
_HALVINGS = 9
"""Halvings of the interval from no load to saturation: the rate is known to 0.2 % of that."""


@dataclass(frozen=True, slots=True)
class HeldRate:
    """The highest rate of arrivals (Poisson) at which the limits hold, requests a second; 0 where not even a lone
    request keeps them. `outcome` at that rate, or at the lowest one tried."""

    layout: Layout
    per_s: float
    outcome: FleetOutcome


def held_rates(layouts: Sequence[Layout], slo: Slo, work: Work) -> tuple[HeldRate, ...]:
    """The rates of every layout that runs, the highest first. Raises ValueError where no layout holds the limits at any
    rate."""
    if not layouts:
        raise ValueError("layouts are compared on several GPUs: name them, such as --nodes 2x8xH100")
    found = [_held(layout, slo, work) for layout in layouts if layout.speeds]
    found.sort(key=lambda held: held.per_s, reverse=True)
    if not found or not found[0].per_s:
        best = min((held.outcome for held in found), key=lambda o: (o.first_s[1], o.each_s[1]), default=None)
        text = "no layout fits" if best is None else slo.verdict(best.first_s[1], best.each_s[1])
        raise ValueError(f"no layout of these devices holds it at any rate: {text}; shorten prompts or add devices")
    return tuple(found)


def _held(layout: Layout, slo: Slo, work: Work) -> HeldRate:
    by_count = {ceil(s.batch / layout.replicas): s.step_s for s in layout.speeds}
    later_s = (layout.stages - 1) * layout.prompt_s / layout.chunks
    replica = Replica(sorted(by_count.items()), layout.prompt_s, max(by_count), later_s)

    def at(per_s: float) -> FleetOutcome:
        return simulate_fleet(replica, layout.replicas, Demand(_REQUESTS, work.output, per_s))

    def holds(outcome: FleetOutcome) -> bool:
        return slo.holds(outcome.first_s[1], outcome.each_s[1])

    high = max(s.output_per_s for s in layout.speeds) / work.output
    low, kept = 0.0, at(high / 2**_HALVINGS)
    for _ in range(_HALVINGS):
        middle = (low + high) / 2
        if holds(outcome := at(middle)):
            low, kept = middle, outcome
        else:
            high = middle
    return HeldRate(layout, low, kept)


def as_numbers(held: HeldRate) -> dict[str, Any]:
    """For JSON: requests a second, and the percentiles (median, 99th) there, seconds."""
    o = held.outcome
    return {"layout": describe(held.layout), "per_s": held.per_s, "ttft_s": o.first_s, "tpot_s": o.each_s}


def rates_sheet(held: Sequence[HeldRate], slo: Slo, work: Work) -> Sheet:
    """As a table."""
    rows = []
    for x in held[:_SHOWN]:
        o = x.outcome
        hour = x.layout.gpus * work.gpu_hour
        dollars = f"{hour / 3600 / (x.per_s * work.output) * 1e6:.2f}" if x.per_s else "-"
        rate, tokens = (f"{x.per_s:.2f}", f"{x.per_s * work.output:,.0f}") if x.per_s else ("-", "-")
        rows.append((describe(x.layout), rate, tokens, f"{o.first_s[1]:.2f}", f"{o.each_s[1] * 1e3:.0f}", dollars))
    columns = ("layout", "req/s", "tok/s", "ttft s", "tpot ms", "$/M")
    note = (
        f"Requests and output tokens a second, dollars a million of those; {work.prompt} tokens in, {work.output} out, "
        "arrivals at random; ttft and tpot are 99th percentiles at that rate, by the fleet simulator. -: not even a "
        "lone request keeps the limits."
    )
    return Sheet(f"The highest rate at {slo} (99 %)", columns, tuple(rows), 1, note)
