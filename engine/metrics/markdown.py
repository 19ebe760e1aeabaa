"""The catalogue for people: a table for the terminal, and docs/metrics.md."""

from __future__ import annotations

from .catalogue import GROUPS, LABELS

_HEAD = """# Metrics

Made by `laddertron metrics --markdown > docs/metrics.md` from engine/metrics/catalogue.py; a test holds the two
together.

`GET /metrics` answers in OpenMetrics or in Prometheus' text form, as the scraper asks. Ranks send counters and gauges
with their heartbeats, once a second; counters go on where they were after a relaunch. Every label has a closed set of
values: no batch, request or key ever becomes one. The target label `deployment` is set by your Prometheus (see
configs/monitoring/prometheus.yml); the dashboards' variables expect it and do without.

Names follow the serving engines that dashboards already know, with one exception: the histogram of tokens in a step is
`iteration_tokens`, since `promtool check metrics` refuses `_total` on what is no counter.
"""


def markdown() -> str:
    out = [_HEAD]
    for title, group in GROUPS.items():
        out += [f"\n## {title}\n", "| name | type | labels | meaning |", "|---|---|---|---|"]
        for series in group:
            labels = ", ".join(series.labels)
            out.append(f"| `{series.full_name}` | {series.kind} | {labels} | {series.help} |")
    out += ["\n## Labels\n", "| label | values |", "|---|---|"]
    out += [f"| {name} | {text} |" for name, text in LABELS.items()]
    return "\n".join(out) + "\n"


def as_json() -> list[dict[str, object]]:
    """One object a series: name, type, labels, help, buckets."""
    return [
        {
            "name": series.full_name,
            "type": series.kind,
            "labels": list(series.labels),
            "help": series.help,
            "buckets": list(series.bounds),
            "group": title,
        }
        for title, group in GROUPS.items()
        for series in group
    ]
