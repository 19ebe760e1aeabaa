"""A plan's basis, its verdict, and the tables that compare layouts. Pure."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from operator import eq, le

from ...engine.step.memory import GIB
from ...topology.hardware.fabric import counted
from .advice import describe
from .estimate import CapacityEstimate
from .layouts import Layout
from .mixtures import BATCHES, best_of

TOKEN_MS = (5, 10, 20, 25, 30, 40, 50, 75, 100, 200, 500)
"""Milliseconds that a sequence's token may take."""


@dataclass(frozen=True, slots=True)
class Sheet:
    """One table. The first `left` columns are words, the rest numbers; `note` is printed below."""

    title: str
    columns: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]
    left: int = 1
    note: str = ""


def ms(seconds: float) -> str:
    """As tables show it, without its unit."""
    return f"{seconds * 1e3:.2f}" if seconds < 0.1 else f"{seconds * 1e3:,.0f}"


def binary(count: float) -> str:
    for unit, scale in (("GiB", GIB), ("MiB", 1 << 20), ("KiB", 1 << 10)):
        if count >= scale:
            return f"{count / scale:.3g} {unit}" if count < 1000 * scale else f"{count / scale:,.0f} {unit}"
    return f"{count:.0f} B"


def basis(plan: CapacityEstimate) -> str:
    """Which machines the answer is for, and the error of such predictions."""
    devices, assumed = predicted_for(plan)
    where = f"{devices} assumed; name yours with --fabric" if assumed else f"{devices}, as named"
    return f"{where}. {_MISSED[plan.question.keys.gpu]}"


def predicted_for(plan: CapacityEstimate) -> tuple[str, bool]:
    """The devices that the answer is for, and whether they are assumed."""
    return _devices(plan), any("no fabric was named" in note for note in plan.question.notes)


_MISSED = {
    True: "Predicted; mean error against published H100 runs: 3.3% in tokens/s, 24.9% at most.",
    False: "Predicted; mean error against steps over emulated links: 4.0 %, 14.0 % at most.",
}
"""From docs/plans/validation.md."""


def _devices(plan: CapacityEstimate) -> str:
    return next((n.devices[0].name for n in plan.question.fabric.nodes if n.devices), "CPU cores")


def headline(plan: CapacityEstimate) -> str:
    q = plan.question
    world = q.placement.world
    nodes, devices = {s.hostname for s in q.placement.seats}, _devices(plan)
    many = f" x pp {world.stages}" * (world.stages > 1) + f" x {world.replicas} replicas" * (world.replicas > 1)
    return (
        f"{q.name}: {parameters(q.config.num_parameters)} parameters ({q.stored.weights}, {q.config.wiring.name}), "
        f"tp {world.tp}{many} on {counted(len(nodes), 'node')} of {devices}: {plan.memory.verdict}"
    )


def parameters(count: int) -> str:
    """405.9B, or 0.9M."""
    return f"{count / 1e9:.1f}B" if count >= 1e8 else f"{count / 1e6:.1f}M"


def mixture_sheets(plan: CapacityEstimate) -> list[Sheet]:
    """The layouts of a mixture of experts; none for a dense model."""
    if not plan.mixtures:
        return []
    best = [best_of(plan.mixtures, i) for i in range(len(BATCHES))]
    rows, notes = [], []
    for x in plan.mixtures:
        if x.memory is None:
            notes.append(f"{x.name}: {x.refused}.")
            continue
        times = [
            "-" if t is None else f"{1e3 * t:.1f}{'*' if x is quickest else ' '}"
            for t, quickest in zip(x.step_s, best, strict=True)
        ]
        if not x.built:
            name = x.name.capitalize()
            notes.append(f"{name} needs the native backend, which sums on CPUs: not built for these devices.")
        rows.append((x.name, f"{x.memory.weight_bytes / GIB:.1f}", str(x.messages), binary(x.sent[-1]), *times))
    note = " ".join(
        (
            "Milliseconds per token, by batch; * the fastest. GiB: weights of a rank; messages: per step, between "
            f"nodes; sent: by a rank at batch {BATCHES[-1]}. Assumes even routing.",
            *notes,
        )
    )
    columns = ("layout", "GiB", "messages", "sent", *map(str, BATCHES))
    return [Sheet("Layouts of the experts", columns, tuple(rows), 1, note)]


def verdicts(plan: CapacityEstimate, priced: bool = True) -> list[Sheet]:
    """The cheapest layout for each kind of weights, by sequences, by time per token and by context."""
    batches = [(x, s.batch, s.dollars) for x in plan.layouts for s in x.speeds]
    times = [(x, s.step_s * 1e3, s.dollars) for x in plan.layouts for s in x.speeds]
    depths = [(x, d.context, d.dollars) for x in plan.layouts for d in x.depths if d.sequences]
    return [
        _verdict("sequences", "{:,}", sorted({n for _, n, _ in batches}), eq, batches, priced),
        _verdict("time per token", "{} ms", TOKEN_MS, le, times, priced),
        _verdict("context", "{:,}", sorted({n for _, n, _ in depths}), eq, depths, priced),
    ]


def _verdict(
    given: str,
    form: str,
    limits: Sequence[int],
    suits: Callable[[float, float], bool],
    offers: Sequence[tuple[Layout, float, float]],
    priced: bool,
) -> Sheet:
    """offers: a layout, its value of the given quantity, and dollars per million tokens then. A row equal to the
    previous one is left out."""
    kinds = dict.fromkeys((x.stored.weights, x.wiring.name) for x, _, _ in offers)
    rows: list[tuple[str, ...]] = []
    for limit in limits:
        cells = []
        for kind in kinds:
            mine = [offer for offer in offers if (offer[0].stored.weights, offer[0].wiring.name) == kind]
            fitting = (offer for offer in mine if suits(offer[1], limit))
            best = min(fitting, key=lambda offer: offer[2], default=None)
            name = describe(best[0]).replace(" replicas of ", " x ").partition(",")[0] if best else "-"
            cells.append(f"{name}: ${best[2]:.2f}" if best and priced else name)
        if set(cells) != {"-"} and (not rows or tuple(cells) != rows[-1][1:]):
            rows.append((form.format(limit), *cells))
    columns = (given, *(f"{weights.replace('bfloat', 'bf')} {wiring}" for weights, wiring in kinds))
    return Sheet(f"Cheapest layout for these weights, by {given}", columns, tuple(rows))
