"""The simulations of `laddertron simulate`: a step by every wiring, and one replica over more nodes; each as
numbers and as a table. Pure, except that it reads the named fabric.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, replace

from ...models.config.known_models import known
from ...models.config.parts import make_wiring
from ...models.config.shapes import splits
from ...topology.hardware.fabric import counted
from ...topology.hardware.presets import preset
from .answer import Sheet
from .estimate import Question, group_in, memory_in, part_of, steps_in, wirings
from .layouts import Work
from .plan_source import Asked, from_names
from .roofline import Load
from .step_simulator import StepCost, StepTime, law

_NODES = re.compile(r"(?P<count>[1-9][0-9]{0,4})x(?P<node>[1-9][0-9]*x[A-Za-z0-9-]+)")


def steps(q: Question, load: Load) -> tuple[dict[str, StepTime], StepCost, Sheet]:
    """The step `load` of the question's group by every wiring, what its parts cost, and the table."""
    group = group_in(q)
    cost = group.cost(load)
    later = {name: make_wiring(name, part_of(q).num_layers) for name in ("delay-2", "delay-3")}
    times = {**steps_in(q, group, load), **{name: group.step(load, wiring) for name, wiring in later.items()}}
    rows = []
    for name, t in times.items():
        parts = (t.total_s, t.compute_s, t.flight_s, t.hidden_s, t.waited_s, t.slowed_s)
        speedup = times["standard"].total_s / t.total_s
        rows.append((name, *(f"{part * 1e3:.2f}" for part in parts), f"{speedup:.2f}x"))
    ell, c = cost.all_reduce.seconds, cost.sub_block_s
    note = (
        f"L {ell * 1e6:.0f} us, c {c * 1e6:.0f} us, L/c {ell / c:.2f}: the law allows ladder {law(c, ell):.2f}x, "
        f"delay-2 {law(c, ell, 2):.2f}x. "
        f"{group.rates.source}; {group.links.source}."
    )
    beside = f", {load.prompt} of prompt" if load.prompt else ""
    title = f"{q.name}, tp {group.size}, {counted(load.decodes, 'sequence')} at {load.context:g}{beside}"
    columns = ("wiring", "step ms", "computing", "in flight", "hidden", "waited", "slowed", "gain")
    return times, cost, Sheet(title, columns, tuple(rows), 1, note)


@dataclass(frozen=True, slots=True)
class ReplicaSpan:
    """One replica over `nodes` nodes; seconds; shares of the step that are exposed."""

    nodes: int
    tp: int
    fits: bool
    kv_tokens: int
    all_reduce_s: float
    sub_block_s: float
    standard_s: float
    ladder_s: float
    standard_exposed: float
    ladder_exposed: float


def scaling(model: str, spec: str, batch: int, context: int, fp8: bool = False) -> tuple[ReplicaSpan, ...]:
    """One replica over 1, 2, 4 … nodes of `spec`. Raises ValueError if the model never splits."""
    count, node = nodes_of(spec)
    config, per_node = known(model), len(preset(node).nodes[0].devices)
    spans, nodes = [], 1
    while nodes <= count:
        size = nodes * per_node
        if splits(config, size):
            q = from_names(model, Asked(preset(f"{nodes}x{node}"), Work(), fp8), size=size, replicas=1)
            group, room, variants = group_in(q), memory_in(q), wirings(part_of(q))
            load = Load(decodes=batch, context=context)
            cost = group.cost(load)
            standard, ladder = group.step(load, variants["standard"]), group.step(load, variants["ladder"])
            spans.append(
                ReplicaSpan(
                    nodes, size, room.fits, room.kv_tokens, cost.all_reduce.seconds, cost.sub_block_s,
                    standard.total_s, ladder.total_s,
                    standard.exposed_s / standard.total_s, ladder.exposed_s / ladder.total_s,
                )
            )  # fmt: skip
        nodes *= 2
    if not spans:
        raise ValueError(f"{model} does not split over {per_node} ranks or a multiple of them up to {spec}")
    return tuple(spans)


def scaling_sheet(model: str, batch: int, context: int, spans: tuple[ReplicaSpan, ...]) -> Sheet:
    rows = tuple(
        (str(s.nodes), str(s.tp), f"{s.kv_tokens:,}" if s.fits else "no room", f"{s.all_reduce_s * 1e6:.0f}",
         f"{s.sub_block_s * 1e6:.0f}", f"{s.all_reduce_s / s.sub_block_s:.2f}",
         f"{s.standard_s * 1e3:.1f} {s.standard_exposed:4.0%}", f"{s.ladder_s * 1e3:.1f} {s.ladder_exposed:4.0%}",
         f"{s.standard_s / s.ladder_s:.2f}x", f"{batch / s.ladder_s:,.0f}")
        for s in spans
    )  # fmt: skip
    columns = (
        "nodes", "tp", "KV tokens", "L us", "c us", "L/c", "standard", "ladder", "gain", "tok/s",
    )  # fmt: skip
    note = (
        "Standard and ladder: ms a step, and the share of it that is exposed; ladder's gain and tokens/s. Flat NCCL, "
        "untuned prices."
    )
    return Sheet(f"{model}, one replica, {batch} sequences at {context}", columns, rows, 1, note)


def nodes_of(spec: str) -> tuple[int, str]:
    """(nodes, one node's preset) of `16x8xH100`. Raises ValueError."""
    match = _NODES.fullmatch(spec)
    if match is None:
        raise ValueError(f"--nodes {spec}: expected NODESxGPUSxMODEL such as 16x8xH100")
    return int(match["count"]), match["node"]


def delayed(q: Question, delay_s: float) -> Question:
    """The same with every all-reduce arriving later."""
    from ...topology.link_cost import Emulation

    return replace(q, emulated=Emulation(f"link {delay_s * 1e3:g} ms", delay_s))
