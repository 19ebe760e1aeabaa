"""Where which layout is the best: a picture over sequences and context, by link and weights at hand. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from html import escape

from laddertron.tools.plan.estimate import devices_of
from laddertron.tools.plan.layouts import Layout, Work, layouts
from laddertron.tools.plan.plan_source import Asked, from_names
from laddertron.topology.hardware.fabric import LinkClass
from laddertron.topology.hardware.presets import preset

LINKS: Mapping[str, tuple[LinkClass, float]] = {
    "InfiniBand, 400 Gbit/s a GPU": ("ib", 50e9),
    "RoCE, 100 Gbit/s a GPU": ("roce", 12.5e9),
    "TCP, 25 Gbit/s a GPU": ("tcp", 3.1e9),
}
KINDS = {
    "bf16, stock": ("bfloat16", "standard"),
    "bf16, ladder": ("bfloat16", "ladder"),
    "fp8, stock": ("fp8", "standard"),
    "fp8, ladder": ("fp8", "ladder"),
}
ACROSS, STAGES, INSIDE, NONE = "tensor parallel across nodes", "pipeline across nodes", "replicas in nodes", "no room"
COLOURS = {ACROSS: "#0f8a6a", STAGES: "#3b6fc4", INSIDE: "#c77d0a", NONE: "#e3e6ea"}
CONTEXTS, BATCHES = tuple(1024 << i for i in range(8)), Work().batches
CELL_X, CELL_Y, LEFT, TOP, GAP = 24, 16, 130, 80, 34


def crossing(found: Sequence[Layout], kind: tuple[str, str], batch: int, per_node: int) -> str:
    """How the layout with most output tokens a second, so the cheapest, crosses nodes, for these weights."""
    mine = [x for x in found if (x.stored.weights, x.wiring.name) == kind]
    offers = [(s.output_per_s, x.tp, x.stages) for x in mine for s in x.speeds if s.batch == batch]
    _, tp, stages = max(offers, default=(0.0, 0, 0))
    return NONE if not offers else ACROSS if tp > per_node else STAGES if tp * stages > per_node else INSIDE


def regions(model: str, nodes: str, link: str) -> dict[str, list[list[str]]]:
    """`crossing` by the name of KINDS: a row for each of CONTEXTS, a column for each of BATCHES."""
    q = from_names(model, Asked(preset(nodes), Work()), max_model_len=CONTEXTS[-1])
    inter, rate = LINKS[link]
    devices = devices_of(replace(q, shape=replace(q.shape, inter=inter, inter_bytes_per_s=rate)))
    rows: dict[str, list[list[str]]] = {name: [] for name in KINDS}
    for context in CONTEXTS:
        work = replace(q.work, prompt=context - q.work.output // 2, contexts=())
        found = layouts(q.config, devices.total, q.stored, q.keys, devices, work)
        for name, kind in KINDS.items():
            rows[name].append([crossing(found, kind, batch, devices.per_node) for batch in BATCHES])
    return rows


def picture(model: str, nodes: str) -> str:
    """One SVG: a panel for each link (across) and kind of weights (down)."""
    wide, high = len(BATCHES) * CELL_X + GAP, len(CONTEXTS) * CELL_Y + GAP
    width, height = LEFT + len(LINKS) * wide, TOP + len(KINDS) * high + 14
    out = [_rect(0, 0, width, height, "#fff"), _text(LEFT, 22, f"{model} on {nodes}: the cheapest layout a token", 15)]
    for i, (name, colour) in enumerate(COLOURS.items()):
        out += [_rect(LEFT + 205 * i, 32, 12, 12, colour), _text(LEFT + 205 * i + 17, 42, name)]
    for x, link in zip(range(LEFT, width, wide), LINKS, strict=False):
        out.append(_text(x, TOP - 6, link, 12))
        for y, (name, rows) in zip(range(TOP, height, high), regions(model, nodes, link).items(), strict=False):
            if x == LEFT:
                out.append(_text(10, y + 12, name, 12))
                out += [_text(x - 6, y + CELL_Y * r + 12, f"{n >> 10}k", 11, "end") for r, n in enumerate(CONTEXTS)]
            for r, row in enumerate(rows):
                for c, how in enumerate(row):
                    out.append(_rect(x + CELL_X * c, y + CELL_Y * r, CELL_X - 1, CELL_Y - 1, COLOURS[how]))
            below = y + high - GAP + 10
            out += [_text(x + CELL_X * c + 12, below, str(n), 9, "middle") for c, n in enumerate(BATCHES)]
    out.append(_text(LEFT, height - 8, "across: sequences at once; down: positions of context of each"))
    style = 'font-family="system-ui,sans-serif" fill="#1b1f24"'
    return f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" {style}>{"".join(out)}</svg>\n'


def _text(x: int, y: int, words: str, size: int = 11, anchor: str = "start") -> str:
    return f'<text x="{x}" y="{y}" font-size="{size}" text-anchor="{anchor}">{escape(words)}</text>'


def _rect(x: int, y: int, width: int, height: int, colour: str) -> str:
    return f'<rect x="{x}" y="{y}" width="{width}" height="{height}" fill="{colour}"/>'
