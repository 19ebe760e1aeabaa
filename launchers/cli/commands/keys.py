"""`laddertron keys`: the API keys of a daemon, in a file that holds their digests alone."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Any

import click
from pydantic import TypeAdapter, ValidationError
from rich.console import Console
from rich.table import Table
from rich.text import Text

from ....engine.config.bind import allowed
from ....engine.config.schema import DAY, Range, Unit
from ....engine.daemon.keys import (
    Key,
    KeyFileError,
    KeyKind,
    add_key,
    limit_key,
    read_keys,
    revoke_key,
    rotate_key,
)
from ..batch_client import ApiError, BatchClient
from ..errors import UsageError, ended_by, show_warning

_OldFor = Annotated[float, Unit("seconds"), Range(0, 90 * DAY)]
_FILE = click.argument("file", type=click.Path(path_type=Path))


@click.group()
def command() -> None:
    """Manage the API keys in FILE, which daemon.api_key_file names.

    \b
    A running daemon applies changes within two seconds.
      laddertron keys add keys.json alice
      laddertron keys list keys.json
      laddertron keys rotate keys.json alice --old-for 24h
      laddertron keys revoke keys.json alice
      laddertron keys add keys.json ops --kind admin
      laddertron keys adopt keys.json alice
      laddertron keys add keys.json prometheus --kind metrics
      laddertron keys limit keys.json alice --requests-per-minute 60 \\
        --tokens-per-day 1000000
    """


@command.command()
@_FILE
@click.argument("name")
@click.option("--kind", type=click.Choice(["client", "metrics", "admin"]), default="client", show_default=True)
@ended_by(KeyFileError, OSError)
def add(file: Path, name: str, kind: KeyKind) -> None:
    """Make a key for NAME and print it: it is shown only once. A client key gives access to the API, a
    metrics key to /metrics only. An admin key is a client's that sees, cancels and deletes the files and batches of all
    keys."""
    if not 1 <= len(name) <= 128 or not name.isprintable():
        raise UsageError(f"NAME={name!r}: 1 to 128 printable characters")
    others = sum(key.name == name and key.revoked_at is None for key in read_keys(file)) if file.exists() else 0
    key, secret = add_key(file, name, kind)
    if others:
        show_warning(f"{name} has {others} other valid key{'s' * (others > 1)}: use their ids to rotate or revoke one")
    click.echo(f"{key.id} for {name}, kept in {file} as a digest. The key, shown only now:", err=True)
    click.echo(secret)


@command.command()
@_FILE
@click.argument("which", metavar="ID|NAME")
@click.option(
    "--old-for", default="24h", show_default=True, metavar="TIME", help="How long the old secret remains valid."
)
@ended_by(KeyFileError, OSError)
def rotate(file: Path, which: str, old_for: str) -> None:
    """Give a key a new secret and print it: it is shown only once. Files, batches, limits and usage belong to
    the id, which stays the same. The old secret remains valid for --old-for; 0 revokes it now."""
    try:
        seconds = TypeAdapter(_OldFor).validate_python(old_for)
    except ValidationError:
        raise UsageError(f"--old-for {old_for!r} is not {allowed(_OldFor)}") from None
    key, secret = rotate_key(file, which, seconds)
    until = f"works until {_day(key.old_until)} UTC" if seconds else "works no more"
    click.echo(f"{key.id} of {key.name}: the old secret {until}. The new one, shown only now:", err=True)
    click.echo(secret)


@command.command()
@_FILE
@click.argument("which", metavar="ID|NAME")
@ended_by(KeyFileError, OSError)
def revoke(file: Path, which: str) -> None:
    """Revoke a key. Its files and batches are kept, and no other key can read them."""
    key = revoke_key(file, which)
    click.echo(f"{key.id} of {key.name} is revoked", err=True)


@command.command()
@_FILE
@click.argument("which", metavar="ID|NAME")
@click.option("--url", envvar="OPENAI_BASE_URL", default="http://127.0.0.1:8000/v1", show_default=True, metavar="URL")
@ended_by(KeyFileError, OSError)
@ended_by(ApiError, end=click.ClickException)
def adopt(file: Path, which: str, url: str) -> None:
    """Give a key the files, batches and stored responses that no valid key owns: of revoked keys, and from before
    keys were set. The running daemon at URL does it; LADDERTRON_API_KEY has an admin key."""
    keys = [key for key in read_keys(file) if key.revoked_at is None and which in (key.id, key.name)]
    if len(keys) != 1:
        raise UsageError(f"{which!r}: {len(keys)} valid keys in {file}: name one by its id")
    adopted = BatchClient(url, os.environ.get("LADDERTRON_API_KEY")).adopt(keys[0].id)
    click.echo(
        f"{keys[0].id} of {keys[0].name} has {adopted['files']} more files, {adopted['batches']} more batches and "
        f"{adopted['responses']} more stored responses"
    )


def _limit(name: str, text: str) -> Callable[[Any], Any]:
    return click.option(f"--{name}", type=click.IntRange(0), metavar="N", help=f"{text}; 0: no limit.")


@command.command()
@_FILE
@click.argument("which", metavar="ID|NAME")
@_limit("requests-per-minute", "POST requests per minute")
@_limit("concurrent-requests", "Concurrent POST requests")
@_limit("tokens-per-day", "Tokens of prompts and answers per day (UTC); above it batch lines wait for the next day")
@_limit("stored-bytes", "Total size of all files")
@ended_by(KeyFileError, OSError)
def limit(file: Path, which: str, **limits: int | None) -> None:
    """Set the limits of a key; limits that are not given stay unchanged. Requests above a limit get 429."""
    named = {name: most or None for name, most in limits.items() if most is not None}
    key = limit_key(file, which, named)
    click.echo(f"{key.id} of {key.name}: {_limits(key)}", err=True)


def _limits(key: Key) -> str:
    return ", ".join(f"{name} {most}" for name, most in asdict(key.limits).items() if most is not None) or "no limits"


@command.command("list")
@_FILE
@ended_by(KeyFileError)
def show(file: Path) -> None:
    """List the keys with their creation times."""
    table = Table(box=None, pad_edge=False)
    for name in ("id", "name", "kind", "created", "limits", ""):
        table.add_column(name, no_wrap=name == "id")  # a cut id is no use
    for key in read_keys(file):
        state = "" if key.old_until < time.time() else f"old secret until {_day(key.old_until)}"
        if key.revoked_at is not None:
            state = f"revoked {_day(key.revoked_at)}"
        table.add_row(key.id, Text(key.name), key.kind, _day(key.created_at), _limits(key), state)
    Console().print(table)


def _day(seconds: int) -> str:
    return time.strftime("%Y-%m-%d %H:%M", time.gmtime(seconds))
