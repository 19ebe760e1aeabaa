"""The simulations of `laddertron simulate`: a step by every wiring, one replica over more nodes, a fleet with one
queue; each as numbers and as a table. Pure, except that it reads the named fabric.
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
from .fleet_simulator import Demand, Faults, FleetOutcome, replica_of, simulate_fleet
from .layouts import Work
from .plan_source import Asked, from_names
from .roofline import Load
from .step_simulator import StepCost, StepTime, law

COMMITS_PER_S = 1000.0
"""Results that one daemon's store has been seen to commit in a second."""

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
    found, nodes = [], 1
    while nodes <= count:
        size = nodes * per_node
        if splits(config, size):
            q = from_names(model, Asked(preset(f"{nodes}x{node}"), Work(), fp8), size=size, replicas=1)
            group, room, variants = group_in(q), memory_in(q), wirings(part_of(q))
            load = Load(decodes=batch, context=context)
            cost = group.cost(load)
            standard, ladder = group.step(load, variants["standard"]), group.step(load, variants["ladder"])
            found.append(
                ReplicaSpan(
                    nodes, size, room.fits, room.kv_tokens, cost.all_reduce.seconds, cost.sub_block_s,
                    standard.total_s, ladder.total_s,
                    standard.exposed_s / standard.total_s, ladder.exposed_s / ladder.total_s,
                )
            )  # fmt: skip
        nodes *= 2
    if not found:
        raise ValueError(f"{model} does not split over {per_node} ranks or a multiple of them up to {spec}")
    return tuple(found)


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


@dataclass(frozen=True, slots=True)
class FleetAsked:
    """A fleet and its work. `tp` None: as few nodes as the model fits on; `mtbf_hours` None: no failures."""

    model: str
    spec: str
    requests: int
    tp: int | None = None
    wiring: str = "auto"
    fp8: bool = False
    per_s: float | None = None
    prompt: int = 1024
    output: int = 512
    slots: int = 128
    mtbf_hours: float | None = None
    relaunch_s: float = 300.0
    seed: int = 0


def fleet(asked: FleetAsked) -> tuple[FleetOutcome, Sheet]:
    """Raises ValueError where a replica does not fit, PlacementError where it cannot be laid out."""
    count, node = nodes_of(asked.spec)
    work = Work(asked.prompt, asked.output)
    q = _fewest(asked, count, node, work)
    per_node, size = len(preset(node).nodes[0].devices), q.placement.tensor_parallel_size
    nodes = len({s.hostname for s in q.placement.seats})
    replicas = count // nodes if size >= per_node else count * (per_node // size)
    room = memory_in(q)
    fitting = room.sequences(asked.prompt + asked.output + asked.output // 2)
    if fitting < 1:
        raise ValueError(f"{asked.model}: {room.verdict}: use more nodes a replica (--tp) or --fp8")
    slots = min(asked.slots, fitting)
    replica = replica_of(
        replace(group_in(q), split=q.split), slots, asked.prompt, work.context, q.keys.max_num_batched_tokens
    )
    faults = Faults(asked.mtbf_hours * 3600 / nodes if asked.mtbf_hours else None, asked.relaunch_s)
    outcome = simulate_fleet(replica, replicas, Demand(asked.requests, asked.output, asked.per_s, asked.seed), faults)
    return outcome, _fleet_sheet(q, outcome, nodes, slots)


def _fleet_sheet(q: Question, o: FleetOutcome, nodes: int, slots: int) -> Sheet:
    many = o.commits_per_s > COMMITS_PER_S
    commits = f"{o.commits_per_s:,.0f} results/s" + (
        f": more than one store commits (about {COMMITS_PER_S:,.0f}/s), so more than one daemon"
        if many
        else f" of about {COMMITS_PER_S:,.0f} that one store commits"
    )
    rows = (
        ("replicas", f"{o.replicas} of {counted(nodes, 'node')}, {slots} sequences each"),
        ("all done after", _time(o.span_s)),
        ("output", f"{o.tokens_per_s:,.0f} tokens/s, {o.tokens_per_s / o.replicas:,.0f} a replica"),
        ("queue wait, median / p99", f"{_time(o.wait_s[0])} / {_time(o.wait_s[1])}"),
        ("arrival to answer, median / p99", f"{_time(o.took_s[0])} / {_time(o.took_s[1])}"),
        ("replicas busy", f"{o.busy:.0%}"),
        ("replicas lost", f"{o.losses}; {o.down_s / o.span_s / o.replicas:.2%} of replica time down"),
        ("computed twice", f"{o.lost_tokens:,} tokens ({o.lost_tokens / max(1, o.tokens):.2%})"),
        ("the queue commits", commits),
    )
    what = f"{q.name} ({q.stored.weights}, {q.config.wiring.name}), tp {q.placement.tensor_parallel_size}"
    return Sheet(f"{what}: {o.requests:,} requests", ("", ""), rows, 2)


def _fewest(asked: FleetAsked, count: int, node: str, work: Work) -> Question:
    """One replica on as few nodes as it fits on, or of `tp` ranks."""
    per_node = len(preset(node).nodes[0].devices)
    if not per_node:
        raise ValueError(f"{asked.spec}: fleets are of GPU nodes, such as 1000x8xH100")
    config = known(asked.model)
    span = -(-asked.tp // per_node) if asked.tp else 1
    while True:
        size = asked.tp or span * per_node
        q = from_names(asked.model, Asked(preset(f"{span}x{node}"), work, asked.fp8), asked.wiring, size, 1)
        if asked.tp or memory_in(q).fits or span * 2 > count or not splits(config, size * 2):
            return q
        span *= 2


def nodes_of(spec: str) -> tuple[int, str]:
    """(nodes, one node's preset) of `16x8xH100`. A fleet's fabric is never built: one replica's is enough."""
    found = _NODES.fullmatch(spec)
    if found is None:
        raise ValueError(f"--nodes {spec}: expected NODESxGPUSxMODEL such as 16x8xH100")
    return int(found["count"]), found["node"]


def delayed(q: Question, delay_s: float) -> Question:
    """The same with every all-reduce arriving later."""
    from ...topology.link_cost import Emulation

    return replace(q, emulated=Emulation(f"link {delay_s * 1e3:g} ms", delay_s))


def _time(seconds: float) -> str:
    if seconds < 120:
        return f"{seconds:.1f} s"
    return f"{seconds / 60:.1f} min" if seconds < 7200 else f"{seconds / 3600:.1f} h"
