"""`laddertron files`: the files on a running server, from a terminal."""

from __future__ import annotations

import click

from ..batch_client import BatchClient
from .batch import API_FAILS, client_of, limit_option, made_at, print_table, url_option


@click.group()
@url_option
@click.pass_context
def command(context: click.Context, url: str | None) -> None:
    """List and delete files on a laddertron daemon, or any server of OpenAI's API.

    The key is read from LADDERTRON_API_KEY or OPENAI_API_KEY.

    \b
      laddertron files list
      laddertron files delete file-1f… file-2a…
    """
    context.obj = client_of(url)


@command.command("list")
@limit_option
@click.pass_obj
@API_FAILS
def show(client: BatchClient, limit: int) -> None:
    """List your files, newest first: uploads (purpose batch) and answers (batch_output)."""
    rows = [
        (file["id"], file["purpose"], str(file["bytes"]), made_at(file), file["filename"])
        for file in client.list(limit, "files")
    ]
    print_table(("id", "purpose", "bytes", "created", "name"), rows)


@command.command()
@click.argument("file_ids", nargs=-1, required=True)
@click.pass_obj
@API_FAILS
def delete(client: BatchClient, file_ids: tuple[str, ...]) -> None:
    """Delete files. An output or error file is deleted with its answers; the input of an open batch is not deleted."""
    for file_id in file_ids:
        client.delete("files", file_id)
