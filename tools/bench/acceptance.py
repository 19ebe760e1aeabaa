"""The page of `laddertron acceptance`: what was measured and what `plan` predicts, judged by the deployment file.

Pure: the measurements come as the JSON that preflight and bench print, and as a plan.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from statistics import median
from typing import TYPE_CHECKING, Any

from ...engine.config.schema import AcceptanceConfig
from ...topology.cost.cost import predict
from ...topology.cost.prices import reference
from ..plan.answer import Sheet, binary, predicted_for
from ..plan.estimate import CapacityEstimate
from ..plan.tables import sheet_lines

if TYPE_CHECKING:
    from ...launchers.measure.preflight import PreflightOutcome

MAX_MEMORY = 1.1
"""Memory of a GPU rank after loading, as a multiple of the prediction."""
NOT_KEPT = "these figures are not worth keeping"


@dataclass(frozen=True, slots=True)
class Check:
    """One demand of the deployment file's `acceptance` section, and whether it is met."""

    what: str
    measured: str
    demanded: str
    met: bool


@dataclass(frozen=True, slots=True)
class Part:
    """A section of the page, in Markdown, and what it was judged by."""

    lines: tuple[str, ...]
    checks: tuple[Check, ...] = ()


@dataclass(frozen=True, slots=True)
class Recovery:
    """The recovery of an open stream from a killed rank. start_s: from the start of `serve` until it was ready; next_s:
    from the kill to the next token; `reason`: the daemon's words; `complete`: the stream ended normally; `same`: its
    text equals that of an undisturbed stream."""

    start_s: float
    next_s: float
    reason: str
    complete: bool
    same: bool


def batches(most: int) -> tuple[int, ...]:
    """Four sizes from one sequence to `most`, powers of two in between."""
    steps = (most.bit_length() - 1) / 3
    return tuple(sorted({1, 2 ** round(steps), 2 ** round(2 * steps), most}))


def at_least(what: str, measured: float, limit: float) -> tuple[Check, ...]:
    """No check where the limit is 0."""
    return (Check(what, f"{measured:.0%}", f"≥ {limit:.0%}", measured >= limit),) if limit else ()


def load_part(load: float, limits: AcceptanceConfig) -> Part:
    """load: the share of this host's processors that other processes used before anything was measured."""
    check = Check("processors in use by others", f"{load:.0%}", f"≤ {limits.max_load:.0%}", load <= limits.max_load)
    return Part((), (check,))


def failed_part(name: str, reason: str) -> Part:
    return Part(
        (f"## {name}", "", "Not measured: " + " ".join(reason.split())), (Check(name, "failed", "done", False),)
    )


def text_part(name: str, text: str, met: bool | None) -> Part:
    """A part with a command's output; `met` None: not judged."""
    checks = () if met is None else (Check(name, "exit code 0" if met else "exit code 1", "exit code 0", met),)
    return Part((f"## {name}", "", *(f"    {line}".rstrip() for line in text.strip().splitlines())), checks)


def environment_part(outcome: PreflightOutcome) -> Part:
    """Every rank's host, device, transport and clock; versions, which are the same on all; preflight's findings."""
    now = median(rank.clock_s for rank in outcome.reports)
    rows = tuple(
        (
            str(r.rank), r.hostname, r.device, r.transport.used or "one node",
            f"{r.matmul_s * 1e3:.2f}", f"{(r.clock_s - now) * 1e3:+.0f}",
        )
        for r in outcome.reports
    )  # fmt: skip
    columns = ("rank", "host", "device", "between nodes", "matmul ms", "clock ms")
    note = "Every rank: " + ", ".join(f"{name} {version}" for name, version in outcome.versions.items()) + "."
    findings = [f"- {finding}" for finding in outcome.findings]
    errors = sum(finding.severity == "error" for finding in outcome.findings)
    lines = (*sheet_lines(Sheet("Environment", columns, rows, 4, note)), *(["", *findings] if findings else []))
    return Part(lines, (Check("preflight", f"{errors} errors", "0 errors", not errors),))


def fabric_part(outcome: PreflightOutcome) -> Part:
    """Links against their nominal rates, all-reduces against the price of these."""
    shape, hosts = outcome.shape, {r.rank: r.hostname for r in outcome.reports}
    rows = []
    for link in outcome.links:
        nominal = shape.intra_bytes_per_s if link.pair.rail is None else shape.inter_bytes_per_s
        ends = (f"{hosts[rank]} rank {rank}" for rank in (link.pair.a, link.pair.b))
        rates = ("-" if rate is None else f"{rate / 1e9:.2f}" for rate in (nominal, link.bytes_per_s))
        rows.append((" - ".join(ends), f"{link.latency_s * 1e6:.1f}", *rates))
    columns = ("link", "one way us", "nominal GB/s", "measured GB/s")
    lines = sheet_lines(Sheet("Links", columns, tuple(rows), 1, f"Measured by {outcome.carrier}.")) if rows else []
    if outcome.fitted is None:
        return Part(tuple(lines))
    costs, rows = reference(outcome.backend, shape), []
    points = [residual.point for residual in outcome.fitted.residuals]
    for size in sorted({point.nbytes for point in points}):
        best = min((p for p in points if p.nbytes == size), key=lambda p: p.seconds)
        times = (predict(costs, shape, best.strategy, size), best.seconds)
        rows.append((binary(size), str(best.strategy), *(f"{seconds * 1e6:,.0f}" for seconds in times)))
    columns = ("size", "fastest strategy", "predicted us", "measured us")
    note = f"{outcome.backend} over {shape.nodes} x {shape.per_node} ranks; predicted by nominal rates."
    return Part((*lines, "", *sheet_lines(Sheet("All-reduces", columns, tuple(rows), 2, note))))


def memory_part(rows: Sequence[Mapping[str, Any]], plan: CapacityEstimate) -> Part:
    """Bytes in use of each rank after loading, from bench's rows."""
    m, gpu = plan.memory, plan.question.keys.gpu
    in_use = rows[0]["rank_bytes"]
    fullest = max(range(len(in_use)), key=in_use.__getitem__)
    predicted = sum(m.parts.values()) + m.kv_bytes
    cells = (("every rank", binary(predicted), f"{binary(min(in_use))} to {binary(in_use[fullest])} (rank {fullest})"),)
    note = "" if gpu else "Not judged on CPUs: Python and torch are in what is measured, untouched KV blocks are not."
    lines = sheet_lines(Sheet("Memory after loading", ("", "predicted", "measured"), cells, 1, note))
    share = in_use[fullest] / predicted
    check = Check("memory of the fullest rank", f"{share:.2f}", f"≤ {MAX_MEMORY:.2f}", share <= MAX_MEMORY)
    return Part(tuple(lines), (check,) if gpu else ())


def speed_part(rows: Sequence[Mapping[str, Any]], plan: CapacityEstimate, limits: AcceptanceConfig) -> Part:
    """Prefill, decode and the hidden share of the all-reduces, from bench's rows, a batch each."""
    wiring, cells, checks = rows[0]["wiring"], [], list[Check]()
    decoding = {p.batch: p for p in plan.predictions if p.wiring == wiring}
    (prompt,) = (p for p in plan.prefills if (p.wiring, p.tokens) == (wiring, rows[0]["prompt"]))
    for row in rows:
        batch, expected = row["batch"], decoding[row["batch"]]
        flight = expected.time.hidden_s + expected.time.exposed_s
        hidden, exposed = row["hidden_share"], row["exposed_share"]
        cells.append((
            str(batch), f"{prompt.tokens_per_s:,.0f}", f"{row['prefill_tok_s'][0]:,.0f}",
            f"{expected.tokens_per_s:,.1f}", f"{row['decode_tok_s'][0]:,.1f}",
            f"{expected.time.hidden_s / flight:.0%}" if flight else "-", "-" if hidden is None else f"{hidden:.0%}",
            f"{expected.time.exposed_s / expected.time.total_s:.0%}", f"{exposed:.0%}",
        ))  # fmt: skip
        checks += at_least(
            f"decode of {batch} over predicted", row["decode_tok_s"][0] / expected.tokens_per_s, limits.min_speed
        )
    checks += at_least("prefill over predicted", rows[0]["prefill_tok_s"][0] / prompt.tokens_per_s, limits.min_speed)
    pairs = ("prefill", "decode", "hidden", "exposed")
    columns = ("batch", *(f"{name} {kind}" for name in pairs for kind in ("predicted", "measured")))
    devices, assumed = predicted_for(plan)
    note = (
        f"Predicted for {devices}{', assumed: set launch.fabric to your machines' if assumed else ''}. "
        f"Tokens/s, medians of {rows[0]['repeats']}; prompts of {rows[0]['prompt']}, {rows[0]['generate']} new tokens; "
        f"{wiring} wiring. Prefill is predicted for one prompt. Hidden: of the all-reduces' time; exposed: of all time."
    )
    return Part(tuple(sheet_lines(Sheet("Speed", columns, tuple(cells), 0, note))), tuple(checks))


def recovery_part(kill: Recovery, limits: AcceptanceConfig) -> Part:
    most = kill.start_s + limits.recovery_margin
    text = "the text of an undisturbed one" if kill.same else "another text than an undisturbed one"
    cells = (
        ("start of the daemon until it is ready", "-", f"{kill.start_s:.1f} s"),
        ("kill of a rank to the next token", f"{most:.1f} s at most", f"{kill.next_s:.1f} s"),
    )
    note = f"The daemon reported: {kill.reason.rstrip('.')}. The stream {'has ' + text if kill.complete else 'broke'}."
    lines = sheet_lines(Sheet("A killed rank", ("", "predicted", "measured"), cells, 1, note))
    checks = (
        Check("kill to the next token", f"{kill.next_s:.1f} s", f"≤ {most:.1f} s", kill.next_s <= most),
        Check("the stream over the kill", "complete" if kill.complete else "broken", "complete", kill.complete),
    )
    return Part(tuple(lines), checks)


def verdict(parts: Iterable[Part]) -> str:
    """One sentence: accepted, or the demands that are not met."""
    missed = [check.what for part in parts for check in part.checks if not check.met]
    return f"Not accepted: {', '.join(missed)}." if missed else "Accepted."


def page(title: str, when: str, parts: Iterable[Part], busy: bool) -> tuple[str, bool]:
    """The Markdown, and whether every demand is met."""
    parts = tuple(parts)
    checks = [check for part in parts for check in part.checks]
    accepted = all(check.met for check in checks)
    busy_words = ["", f"The machine was busy: {NOT_KEPT}."] if busy else []
    rows = tuple((c.what, c.measured, c.demanded, "yes" if c.met else "**no**") for c in checks)
    table = sheet_lines(Sheet("Demands", ("", "measured", "demanded", "met"), rows))
    lines = [f"# Acceptance of {title}", "", f"{when}.", "", f"**{verdict(parts)}**", *busy_words, "", *table]
    for part in parts:
        lines += ["", *part.lines] if part.lines else []
    return "\n".join(lines) + "\n", accepted
