"""`laddertron monitoring`: the shipped alert rules, dashboards and Prometheus configuration, as files."""

from __future__ import annotations

import shutil
from pathlib import Path

import click

from .config import FOLDER

_RUNBOOK = "docs/runbook.md"


@click.group()
def command() -> None:
    """Export this version's alert rules, Grafana dashboards and Prometheus configuration."""


@command.command()
@click.argument("folder", type=click.Path(path_type=Path))
@click.option(
    "--runbook", metavar="URL", help="URL of runbook.md for the alerts' links.  [default: the file in FOLDER]"
)
@click.option("--overwrite", is_flag=True, help="Replace files that exist.")
def export(folder: Path, runbook: str | None, overwrite: bool) -> None:
    """Write rules, dashboards, configuration and the runbook of the alerts into FOLDER.

    \b
      laddertron monitoring export monitoring --runbook https://wiki.example/laddertron/runbook
      promtool check rules monitoring/alerts.yml
    """
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
    for rules in (folder / "alerts.yml", folder / "alerts_test.yml"):
        rules.write_text(rules.read_text().replace(f"{_RUNBOOK}#", f"{link}#"))
