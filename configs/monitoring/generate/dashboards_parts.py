"""What panels are made of: filters by the dashboards' variables, rates, ratios, quantiles, panels of a kind."""

from __future__ import annotations

from .dashboards import Panel, Query

D = 'deployment=~"$deployment"'
R = f'{D}, replica=~"$replica"'
K = f'{R}, node=~"$node", rank=~"$rank"'
RATE = "$__rate_interval"
ME = "{{replica}}/{{rank}} {{node}}"


def rate(series: str, where: str, by: str = "") -> str:
    inner = f"rate(laddertron_{series}{{{where}}}[{RATE}])"
    return f"sum by ({by}) ({inner})" if by else f"sum({inner})"


def ratio(above: str, below: str, where: str, by: str = "") -> str:
    return f"{rate(above, where, by)} / {rate(below, where, by)}"


def quantiles(series: str, where: str = D) -> tuple[Query, ...]:
    return tuple(
        Query(f"histogram_quantile({q}, {rate(f'{series}_bucket', where, 'le')})", f"p{round(q * 100)}")
        for q in (0.5, 0.95, 0.99)
    )


def lines(title: str, unit: str, *queries: Query, help: str = "", **rest: object) -> Panel:
    return Panel(title, "timeseries", unit, queries, help, **rest)  # type: ignore[arg-type]


def stat(title: str, unit: str, expr: str, *steps: tuple[float, str], help: str = "") -> Panel:
    return Panel(title, "stat", unit, (Query(expr),), help, width=4, height=4, steps=steps)


def heat(title: str, series: str, where: str = D, unit: str = "s", width: int = 12) -> Panel:
    return Panel(title, "heatmap", unit, (Query(rate(f"{series}_bucket", where, "le")),), width=width)


GENERATION = Query(rate("generation_tokens_total", R), "generated")
HIDDEN = rate("collective_seconds_total", f'{K}, op="all_reduce", exposure="hidden"', "link")
EXPOSED = rate("collective_seconds_total", f'{K}, op="all_reduce", exposure="exposed"', "link")
TRAVEL = rate("collective_seconds_total", f'{K}, op="all_reduce"', "link")
STEPS = rate("step_duration_seconds_count", K)
WAITS, GATHERS, FIRST = f'{K}, exposure="exposed"', f'{K}, op="gather"', f'{R}, rank="0"'
EACH = "replica, rank, node"
ENDED = rate("request_success_total", D)
ERRORS = f'{D}, finished_reason=~"error|numerical_error|timeout"'
