"""`laddertron keys`: the API keys of a daemon, in a file that holds their digests alone."""

from __future__ import annotations

import time
from pathlib import Path

import click
from rich.console import Console
from rich.table import Table

from ...engine.daemon.keys import KeyFileError, add_key, read_keys, revoke_key
from .run import UsageError

_FILE = click.argument("file", type=click.Path(path_type=Path))


@click.group(short_help="Add, revoke and list API keys.")
def command() -> None:
    """Manage the API keys in FILE, which daemon.api_key_file names.

    \b
    A running daemon sees a change within a second or two.
      laddertron keys add keys.json alice
      laddertron keys list keys.json
      laddertron keys revoke keys.json alice
    """


@command.command()
@_FILE
@click.argument("name")
def add(file: Path, name: str) -> None:
    """Make a key for NAME and print it: it is shown this once."""
    if not 1 <= len(name) <= 128 or not name.isprintable():
        raise UsageError(f"NAME={name!r}: 1 to 128 printable characters")
    try:
        key, secret = add_key(file, name)
    except (KeyFileError, OSError) as error:
        raise UsageError(str(error)) from error
    click.echo(f"{key.id} for {name}, kept in {file} as a digest. The key, shown only now:", err=True)
    click.echo(secret)


@command.command()
@_FILE
@click.argument("which", metavar="ID|NAME")
def revoke(file: Path, which: str) -> None:
    """End a key. What its holder made stays theirs alone."""
    try:
        key = revoke_key(file, which)
    except (KeyFileError, OSError) as error:
        raise UsageError(str(error)) from error
    click.echo(f"{key.id} of {key.name} is revoked", err=True)


@command.command("list")
@_FILE
def show(file: Path) -> None:
    """Who has a key, and since when."""
    try:
        keys = read_keys(file)
    except KeyFileError as error:
        raise UsageError(str(error)) from error
    table = Table("id", "name", "made", "revoked")
    for key in keys:
        table.add_row(key.id, key.name, _day(key.created_at), "" if key.revoked_at is None else _day(key.revoked_at))
    Console().print(table)


def _day(seconds: int) -> str:
    return time.strftime("%Y-%m-%d %H:%M", time.gmtime(seconds))
