"""`laddertron monitoring`: the shipped alert rules, dashboards and Prometheus configuration, as files."""

from __future__ import annotations

import json
import re
import shutil
from pathlib import Path

import click

from .config import FOLDER

_RUNBOOK = "docs/runbook.md"
_DEFAULT_TARGET = '["127.0.0.1:8000"]'
_TARGET = re.compile(r"([\w.-]+|\[[0-9a-fA-F:]+\]):\d{1,5}")


@click.group()
def command() -> None:
    """Export this version's alert rules, Grafana dashboards and Prometheus configuration."""


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
