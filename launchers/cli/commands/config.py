"""`laddertron config`: a deployment file to begin with."""

from __future__ import annotations

from pathlib import Path

import click

FOLDER = Path(__file__).parents[3] / "configs"


@click.command()
@click.argument("name", default="reference")
@click.option("--list", "as_list", is_flag=True, help="List the shipped deployments.")
def command(name: str, as_list: bool) -> None:
    """Print a deployment file: every key with its default and a comment, or the shipped deployment NAME.

    \b
      laddertron config > deploy.yaml
      laddertron config --list
      laddertron config 405b/stock > deploy.yaml
    """
    names = sorted(path.relative_to(FOLDER).with_suffix("").as_posix() for path in FOLDER.rglob("*.yaml"))
    if as_list:
        click.echo("\n".join(names))
        return
    if name not in names:
        raise click.UsageError(f"no shipped deployment {name!r}: choose one of {', '.join(names)}")
    click.echo((FOLDER / f"{name}.yaml").read_text(encoding="utf-8"), nl=False)
