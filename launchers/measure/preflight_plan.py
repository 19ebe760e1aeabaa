"""The measurements of preflight and their judgement. Pure: a `Setup` from every rank gives a `PreflightPlan`,
measurements give findings, each with the culprit, what is wrong and the fix.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from math import log
from typing import Literal

from ...topology.cost.cost import Backend, Shape, Strategy, candidates
from ...topology.cost.fit import TOLERANCE, Fit, Point
from ...topology.hardware.fabric import Fabric
from ...topology.placement.placement import Placement
from ..rank.network import sockets_refused

SWEEP_BYTES = tuple(32 << 10 << step for step in range(9))
"""32 KiB to 8 MiB, doubling."""

MAX_SKEW_S, BROKEN_SKEW_S = 0.5, 5.0
"""Clock skew from which a warning is given, and from which the clock is a fault: logs and traces of its node cannot be
compared with others', and certificates may be invalid there."""
SLOW_RANK = 1.15
"""A rank whose matmul takes this many times the median is reported as slow."""
FEW_RANKS, SLOW_OF_FEW = 4, 1.5
"""With fewer ranks the median is not meaningful: a rank is compared with the fastest, and slow from this ratio on."""
SLOW_LINK = 1.5
"""A link whose round trip or transfer takes this many times the median of its class is reported as slow."""

NOMINAL_SHARE = 1 / 3
"""The least share of its port's nominal rate that a sound link between nodes has."""
FAR_S, SLOW_BYTES_PER_S = 1e-3, 125e6
"""The most latency of a link between nodes of one site (one way), and the port assumed where no rate is known: of
1 Gb/s."""

MIN_SHM_BYTES = 256 << 20

Severity = Literal["error", "warning"]


@dataclass(frozen=True, slots=True)
class Pair:
    """Two ranks to send between. `rail` is the HCA's place on its nodes for pairs of different nodes, else None; `path`
    (pairs of one node) is that between their devices, or NUMA nodes: links of one path are alike."""

    a: int
    b: int
    rail: int | None = None
    path: str = ""


@dataclass(frozen=True, slots=True)
class PreflightPlan:
    """In `rounds`, pairs of any group measured at once: no rank occurs twice in one. `sweep` is every (strategy,
    bytes) of one group."""

    rounds: tuple[tuple[Pair, ...], ...]
    sweep: tuple[tuple[Strategy, int], ...]


def make_preflight_plan(
    fabric: Fabric,
    placement: Placement,
    shape: Shape,
    backend: Backend,
    message_bytes: Sequence[int] = (),
) -> PreflightPlan:
    """Pairs of every group: neighbours inside every node, then each rail from every node to the next. Sweep of a group
    of this shape: every strategy that the backend has for a size, over the model's own message sizes and 32 KiB to 8
    MiB."""
    pairs = []
    for layout in placement.groups:
        for node in layout.nodes:
            pairs += [Pair(a, b, path=_path(fabric, placement, a, b)) for a, b in pairwise(node)]
        if len(layout.nodes) > 1:
            for rail, ranks in enumerate(layout.rails):
                around = zip(ranks, ranks[1:] + ranks[:1] if len(ranks) > 2 else ranks[1:], strict=False)
                pairs += [Pair(a, b, rail) for a, b in around]
    rounds: list[list[Pair]] = []
    for pair in pairs:
        for others in rounds:
            alike = (others[0].rail is None) == (pair.rail is None)
            if alike and not any({pair.a, pair.b} & {p.a, p.b} for p in others):
                others.append(pair)
                break
        else:
            rounds.append([pair])
    sizes = sorted({*message_bytes, *SWEEP_BYTES})
    sweep = tuple((s, n) for n in sizes for s in candidates(backend, shape, n))
    return PreflightPlan(tuple(tuple(r) for r in rounds), sweep)


def _path(fabric: Fabric, placement: Placement, a: int, b: int) -> str:
    """The path between two ranks of one node: their devices', else NODE or SYS."""
    one, other = placement.seats[a], placement.seats[b]
    if one.device is None or other.device is None:
        return "NODE" if one.numa == other.numa else "SYS"
    (node,) = (n for n in fabric.nodes if n.hostname == one.hostname)
    return node.path(f"GPU{one.device}", f"GPU{other.device}")


@dataclass(frozen=True, slots=True)
class NodeTransport:
    """The transport of a rank's traffic to other nodes, and what RDMA would need. `used`: NET/IB, NET/Socket or a
    plugin's name from NCCL, else the backend's own name; empty where there is one node. `memlock_bytes` None:
    unlimited."""

    used: str = ""
    devices: tuple[str, ...] = ()
    memlock_bytes: int | None = None
    library: str = ""
    shm_bytes: int | None = None


@dataclass(frozen=True, slots=True)
class Setup:
    """Values that must be equal on all ranks before any of them connects. `config`: the configuration's digest;
    `versions`: nccl, cuda, driver, laddertron, torch, …"""

    rank: int
    hostname: str
    config: str
    versions: dict[str, str]


@dataclass(frozen=True, slots=True)
class RankReport:
    """One rank's own measurements. `clock_s` is unix time at a barrier, `matmul_s` the best of a few short matmuls;
    `device` names the GPU or processor."""

    rank: int
    hostname: str
    transport: NodeTransport
    clock_s: float
    matmul_s: float
    device: str = ""


@dataclass(frozen=True, slots=True)
class LinkTime:
    """A pair's measured one-way latency (half a round trip of few bytes) and bytes/s."""

    pair: Pair
    latency_s: float
    bytes_per_s: float


@dataclass(frozen=True, slots=True)
class Finding:
    severity: Severity
    culprit: str
    message: str

    def __str__(self) -> str:
        return f"{self.severity}: {self.culprit}: {self.message}"


def slowest(sweeps: Sequence[Sequence[Point]]) -> int:
    """The group with the slowest all-reduces, for which the tuning file is made. Raises ValueError without a group."""
    times = [{(p.strategy, p.nbytes): p.seconds for p in points} for points in sweeps]
    common = set.intersection(*map(set, times)) if times else set()
    return max(range(len(times)), key=lambda group: sum(log(times[group][key]) for key in common))


def judge(
    reports: Sequence[RankReport],
    links: Sequence[LinkTime] = (),
    fitted: Fit | None = None,
    require_transport: str = "any",
    port_bytes_per_s: float | None = None,
    max_spread: float | None = None,
) -> tuple[Finding, ...]:
    """All findings, errors first. `port_bytes_per_s`: the nominal rate of a port (None: unknown). max_spread: in place
    of SLOW_RANK, SLOW_OF_FEW and SLOW_LINK."""
    findings = [
        *_transports(reports, require_transport),
        *_clocks(reports),
        *_shared_memory(reports),
        *_slow_ranks(reports, max_spread or SLOW_RANK, max_spread or SLOW_OF_FEW),
        *_slow_links(reports, links, max_spread or SLOW_LINK),
        *_poor_links(reports, links, port_bytes_per_s),
        *_unexplained(fitted),
    ]
    return tuple(sorted(findings, key=lambda f: f.severity != "error"))


def unlike(setups: Sequence[Setup]) -> tuple[Finding, ...]:
    """Ranks whose configuration or libraries differ from most, found before anything is measured."""
    names = sorted({name for s in setups for name in s.versions})
    facts = {"config": [s.config for s in setups]}
    facts |= {name: [s.versions.get(name, "none") for s in setups] for name in names}
    findings = []
    for name, values in facts.items():
        usual = Counter(values).most_common(1)[0][0] if values else ""
        odd = [(s, value) for s, value in zip(setups, values, strict=True) if value != usual]
        if odd:
            fix = "start all ranks with one file" if name == "config" else f"install one {name} on every node"
            theirs = ", ".join(sorted({value for _, value in odd}))
            text = f"{name} is {theirs}, on the others {usual}: {fix}"
            findings.append(Finding("error", _who([s for s, _ in odd]), text))
    return tuple(findings)


def _transports(reports: Sequence[RankReport], require: str) -> list[Finding]:
    if require == "any":
        return []
    if by_sockets := [r for r in reports if r.transport.used in ("native", "gloo")]:
        text = sockets_refused(by_sockets[0].transport.used)
        return [Finding("error", _who(by_sockets), text)] if require == "ib" else []
    if require == "socket":
        wrong = [r for r in reports if "IB" in r.transport.used]
        if not wrong:
            return []
        return [Finding("error", _who(wrong), "traffic goes by NET/IB, parallel.require_transport is socket")]
    findings: list[Finding] = []
    for r in reports:
        if not r.transport.used or r.transport.used == "NET/IB":
            continue
        lacks = []
        if not r.transport.devices:
            lacks.append("no /dev/infiniband device (in a container: mount it)")
        if r.transport.memlock_bytes is not None and r.transport.memlock_bytes < 1 << 30:
            kib = r.transport.memlock_bytes >> 10
            lacks.append(f"memlock is limited to {kib} KiB (ulimit -l unlimited; in a container: IPC_LOCK)")
        if not r.transport.library:
            lacks.append("libibverbs is not installed")
        why = (
            "; ".join(lacks) or "devices, memlock and libibverbs are there: is the port active, is NCCL_IB_DISABLE set?"
        )
        findings.append(
            Finding("error", _who([r]), f"traffic goes by {r.transport.used}, parallel.require_transport is ib: {why}")
        )
    return findings


def _clocks(reports: Sequence[RankReport]) -> list[Finding]:
    if len(reports) < 2:
        return []
    middle = sorted(r.clock_s for r in reports)[len(reports) // 2]
    return [
        Finding(
            "error" if abs(off) > BROKEN_SKEW_S else "warning",
            _who([r]),
            f"its clock is {off:+.1f} s off the others': run chrony or ntpd",
        )
        for r in reports
        if abs(off := r.clock_s - middle) > MAX_SKEW_S
    ]


def _shared_memory(reports: Sequence[RankReport]) -> list[Finding]:
    crowded = Counter(r.hostname for r in reports)
    small = [
        r
        for r in reports
        if crowded[r.hostname] > 1 and r.transport.shm_bytes is not None and r.transport.shm_bytes < MIN_SHM_BYTES
    ]
    if not small:
        return []
    text = f"/dev/shm holds {min(r.transport.shm_bytes or 0 for r in small) >> 20} MiB (in a container: --shm-size=16g)"
    return [Finding("error", _who(small), text)]


def _slow_ranks(reports: Sequence[RankReport], slow: float, slow_of_few: float) -> list[Finding]:
    times = sorted(r.matmul_s for r in reports)
    few = len(times) < FEW_RANKS
    usual = 0.0 if not times else times[0] if few else times[(len(times) - 1) // 2]
    beside = f"the quickest's of {len(times)}" if few else "the median"
    return [
        Finding(
            "error" if not few or r.matmul_s > slow_of_few * usual else "warning",
            _who([r]),
            f"a matmul takes {r.matmul_s * 1e3:.2f} ms, {r.matmul_s / usual:.2f} times {beside}: every step waits "
            "for it: look at its clocks, power limit, temperature and neighbours",
        )
        for r in reports
        if usual > 0 and r.matmul_s > slow * usual
    ]


def _slow_links(reports: Sequence[RankReport], links: Sequence[LinkTime], slow: float) -> list[Finding]:
    """Findings for links that are slower than others of the same path inside nodes, or between nodes."""
    findings = []
    for path in sorted({k.pair.path for k in links}):
        alike = [k for k in links if k.pair.path == path]
        if len(alike) < 2:
            continue
        latency = sorted(k.latency_s for k in alike)[(len(alike) - 1) // 2]
        rate = sorted(k.bytes_per_s for k in alike)[len(alike) // 2]
        for k in alike:
            what = []
            if k.latency_s > slow * latency:
                what.append(f"latency {k.latency_s * 1e6:.1f} us, others {latency * 1e6:.1f} us")
            if k.bytes_per_s * slow < rate:
                what.append(f"{k.bytes_per_s / 1e9:.1f} GB/s, others {rate / 1e9:.1f} GB/s")
            if what:
                text = f"{'; '.join(what)}: look at cable, port errors and PCIe width"
                findings.append(Finding("error", _ends(reports, k), text))
    return findings


def _poor_links(
    reports: Sequence[RankReport], links: Sequence[LinkTime], port_bytes_per_s: float | None
) -> list[Finding]:
    """Findings for links between nodes with less than NOMINAL_SHARE of the port's rate, or a latency above FAR_S: all
    may be equally slow, and a single link has no others to compare with."""
    across = [k for k in links if k.pair.rail is not None]
    least = (port_bytes_per_s or SLOW_BYTES_PER_S) * NOMINAL_SHARE
    slow = sorted((k for k in across if k.bytes_per_s < least), key=lambda k: k.bytes_per_s)
    far = sorted((k for k in across if k.latency_s > FAR_S), key=lambda k: -k.latency_s)
    poor_links = []
    if slow:
        nominal = f"a port has {port_bytes_per_s / 1e9:.3g} GB/s" if port_bytes_per_s else "even 1 Gb/s are 0.125 GB/s"
        fix = "does the traffic take this port (launch.interface), and is it otherwise idle?"
        poor_links.append((slow, f"{slow[0].bytes_per_s / 1e9:.3g} GB/s, {nominal}: {fix}"))
    if far:
        poor_links.append((far, f"latency {far[0].latency_s * 1e6:.1f} us: are these nodes of one site?"))
    return [Finding("warning", _ends(reports, *poor), text) for poor, text in poor_links]


def _ends(reports: Sequence[RankReport], link: LinkTime, *others: LinkTime) -> str:
    host, pair = {r.rank: r.hostname for r in reports}, link.pair
    rail = "" if pair.rail is None else f" on rail {pair.rail}"
    more = f" and {len(others)} more" if others else ""
    return f"link {host.get(pair.a, '?')} rank {pair.a} to {host.get(pair.b, '?')} rank {pair.b}{rail}{more}"


def _unexplained(fitted: Fit | None) -> list[Finding]:
    if fitted is None or not fitted.outliers:
        return []
    worst = fitted.outliers[0]
    text = (
        f"{len(fitted.outliers)} of {len(fitted.residuals)} measured all-reduces differ from the cost model by more "
        f"than {TOLERANCE:.0%}, worst {worst.point.strategy} of {worst.point.nbytes} bytes ({worst.relative:+.0%}): "
        "is the fabric or a host under load?"
    )
    return [Finding("warning", "cost model", text)]


def _who(reports: Sequence[RankReport | Setup]) -> str:
    named = ", ".join(f"rank {r.rank} on {r.hostname}" for r in reports[:4])
    return f"{named} and {len(reports) - 4} more" if len(reports) > 4 else named
