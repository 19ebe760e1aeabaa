"""`laddertron monitoring`: the shipped alert rules, dashboards and Prometheus configuration as files, and the catalogue
of series, for people, for docs/metrics.md and for programs."""

from __future__ import annotations

import json
import re
import shutil
from pathlib import Path

import click
from rich.console import Console

from ....engine.metrics.catalogue import GROUPS, LABELS
from .config import FOLDER

_RUNBOOK = "docs/runbook.md"
_DEFAULT_TARGET = '["127.0.0.1:8000"]'
_TARGET = re.compile(r"([\w.-]+|\[[0-9a-fA-F:]+\]):\d{1,5}")


@click.group()
def command() -> None:
    """Export this version's alert rules, Grafana dashboards and Prometheus configuration, or print its metrics."""


@command.command()
@click.argument("folder", type=click.Path(path_type=Path))
@click.option(
    "--runbook", metavar="URL",
    help="URL of runbook.md for links of alerts and dashboards.  [default: the file in FOLDER]",
)  # fmt: skip
@click.option(
    "--target", "targets", metavar="HOST:PORT", multiple=True,
    help="A daemon to scrape; may be repeated.  [default: 127.0.0.1:8000]",
)  # fmt: skip
@click.option("--overwrite", is_flag=True, help="Replace files that exist.")
def export(folder: Path, runbook: str | None, targets: tuple[str, ...], overwrite: bool) -> None:
    """Write rules, dashboards, configuration and the runbook of the alerts into FOLDER.

    \b
      laddertron monitoring export monitoring \\
        --runbook https://wiki.example/laddertron/runbook
      promtool check rules monitoring/alerts.yml
    """
    for target in targets:
        if not _TARGET.fullmatch(target):
            raise click.UsageError(f"--target {target!r}: give HOST:PORT without a scheme, such as node1:8000")
    source, page = FOLDER / "monitoring", FOLDER.parent / _RUNBOOK
    files = [path.relative_to(source) for kind in ("*.yml", "grafana/**/*") for path in sorted(source.glob(kind))]
    files = [path for path in files if (source / path).is_file()]
    if not overwrite and (there := [path for path in (*files, Path(page.name)) if (folder / path).exists()]):
        raise click.UsageError(f"{folder / there[0]} exists: name another folder, or replace with --overwrite")
    for path in files:
        (folder / path).parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(source / path, folder / path)
        click.echo(folder / path)
    shutil.copyfile(page, folder / page.name)
    click.echo(folder / page.name)
    link = runbook or (folder / page.name).resolve().as_uri()
    for linking in (folder / "alerts.yml", folder / "alerts_test.yml", *(folder / "grafana").glob("*.json")):
        linking.write_text(linking.read_text().replace(f"{_RUNBOOK}#", f"{link}#"))
    if targets:
        scrapes = folder / "prometheus.yml"
        scrapes.write_text(scrapes.read_text().replace(_DEFAULT_TARGET, json.dumps(targets)))


@command.command()
@click.option("--markdown", "as_markdown", is_flag=True, help="Print docs/metrics.md.")
@click.option("--json", "as_objects", is_flag=True, help="Print JSON: name, type, labels, help, buckets.")
def metrics(as_markdown: bool, as_objects: bool) -> None:
    """Print every series that `/metrics` may contain: its name, type, labels and meaning.

    \b
      laddertron monitoring metrics
      laddertron monitoring metrics --json | jq -r '.[].name'
    """
    if as_markdown:
        click.echo(markdown(), nl=False)
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

`laddertron monitoring metrics --markdown > docs/metrics.md` writes this page from engine/metrics/catalogue.py.

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
