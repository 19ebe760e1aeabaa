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
@click.option("--markdown", "as_markdown", is_flag=True, help="Print docs/metrics.md.")
@click.option("--dashboards", type=click.Path(path_type=Path), help="Write the Grafana dashboards into this folder.")
@click.option("--json", "as_objects", is_flag=True, help="Print JSON: name, type, labels, help, buckets.")
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
    width = max(40, Console().width)
    for title, group in GROUPS.items():
        click.echo(f"{title}\n")
        for series in group:
            labels = f", by {', '.join(series.labels)}" if series.labels else ""
            # the name on a line of its own: one that is folded is found by no search
            text = click.wrap_text(f"{series.kind}{labels}. {series.help}", width, "    ", "    ")
            click.echo(f"  {series.full_name}\n{text}")
        click.echo()


_HEAD = """# Metrics

`laddertron metrics --markdown > docs/metrics.md` writes this page from engine/metrics/catalogue.py.

`GET /metrics` answers in OpenMetrics or in Prometheus' text format, as the scraper requests. Ranks send counters and
gauges once a second, with their heartbeats; counters continue after a relaunch. The number of label values is bounded:
ids of batches and requests are never labels. Prometheus sets the target label `deployment` (see
configs/monitoring/prometheus.yml), by which the dashboards filter; they also work without it.

Names follow vLLM's where both have the metric. Exceptions: `kv_cache_usage_ratio`, and `iteration_tokens`, because
`promtool check metrics` rejects a histogram whose name ends in `_total`. With `metrics.vllm_names: true` the metrics
also have vLLM's own names."""


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
