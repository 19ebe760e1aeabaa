"""`laddertron metrics`: the catalogue of series, for people, for docs/metrics.md and for programs."""

from __future__ import annotations

import json
from pathlib import Path

import click
from rich.console import Console

from ....engine.metrics.catalogue import GROUPS, LABELS
from ..errors import ended_by
from .config import FOLDER


@click.command()
@ended_by(OSError, end=click.ClickException)
@click.option("--markdown", "as_markdown", is_flag=True, help="As docs/metrics.md.")
@click.option("--dashboards", type=click.Path(path_type=Path), help="Write Grafana's dashboards into this folder.")
@click.option("--json", "as_objects", is_flag=True, help="As JSON: name, type, labels, help, buckets.")
def command(as_markdown: bool, dashboards: Path | None, as_objects: bool) -> None:
    """Print every series that `/metrics` may contain: its name, type, labels and meaning.

    \b
      laddertron metrics
      laddertron metrics --json | jq -r '.[].name'
      laddertron metrics --dashboards /var/lib/grafana/dashboards
    """
    if as_markdown:
        click.echo(markdown(), nl=False)
    elif dashboards is not None:
        dashboards.mkdir(parents=True, exist_ok=True)
        for path in sorted((FOLDER / "monitoring/grafana").glob("*.json")):
            (dashboards / path.name).write_bytes(path.read_bytes())
            click.echo(dashboards / path.name)
    elif as_objects:
        click.echo(json.dumps(as_json(), indent=1))
    else:
        _print()


def _print() -> None:
    width = Console().width
    for title, group in GROUPS.items():
        click.echo(f"{title}\n")
        for series in group:
            labels = f", by {', '.join(series.labels)}" if series.labels else ""
            # the name on a line of its own: one that is folded is found by no search
            said = click.wrap_text(f"{series.kind}{labels}. {series.help}", width, "    ", "    ")
            click.echo(f"  {series.full_name}\n{said}")
        click.echo()


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
