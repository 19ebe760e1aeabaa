"""`laddertron check-store`: compares everything that a daemon or a run stored with its checksums."""

from __future__ import annotations

import sqlite3
from pathlib import Path

import click

from ....engine.config.load import read
from ....topology.hardware.fabric import counted
from ..errors import FAILED, OK, ended_by
from ..fabric_source import set_option
from ..run_view import progress_console, say_error


@click.command()
@click.argument("config", type=click.Path())
@set_option
@ended_by(OSError, sqlite3.Error, end=click.ClickException)
def command(config: str, overrides: tuple[str, ...]) -> int:
    """Read everything in CONFIG's data folder and export, and compare it with its checksums.

    CONFIG may also be the output file of `laddertron run`: its lines are compared with its journal. Changes nothing,
    and may run while the daemon runs. Prints what is damaged: rows by key, files and export segments by path and
    offset.

    \b
      laddertron check-store deploy.yaml
      laddertron check-store deploy.yaml --set daemon.data_dir=/mnt/copy
      laddertron check-store answers.jsonl

    Exit codes: 0 everything matches; 1 something is damaged or cannot be read; 2 the command line or CONFIG is wrong.
    """
    from ....engine.daemon.store.check import check_store
    from ....engine.daemon.store.schema import SchemaVersionError
    from ....engine.run.journal import damaged_lines, journal_of

    if journal_of(Path(config)).is_file():
        with ended_by(ValueError, end=click.ClickException):
            intact, wrong = damaged_lines(Path(config))
        return _report(config, counted(intact, "line"), wrong)
    daemon = read(config, overrides).deployment.daemon
    export_dir = None if daemon.export_dir is None else Path(daemon.export_dir)
    with ended_by(SchemaVersionError, end=click.ClickException):
        checked = check_store(Path(daemon.data_dir), export_dir)
    parts = [counted(checked.rows, "row"), f"{counted(checked.files, 'file')} ({checked.file_bytes / 1e9:.2f} GB)"]
    if export_dir is not None:
        parts.append(f"{counted(checked.groups, 'commit')} of the export")
    return _report(daemon.data_dir, ", ".join(parts), checked.wrong)


def _report(path: str, parts: str, wrong: list[str]) -> int:
    for one in wrong:
        say_error(progress_console(), one)
    click.echo(f"{path}: {parts}: {f'{len(wrong)} damaged' if wrong else 'intact'}")
    return FAILED if wrong else OK
