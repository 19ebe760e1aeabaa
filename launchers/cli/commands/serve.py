"""`laddertron serve`: the batch daemon."""

from __future__ import annotations

import os

import click

from ....engine.config.load import read
from ....topology.placement.identity import IdentityError, identify
from ...job.reload import Serving
from ..errors import UsageError, ended_by, show_warning
from ..fabric_source import set_option
from .check import unmeasured_weights
from .run import read_text


@click.command()
@click.argument("config", type=click.Path())
@set_option
@click.option(
    "--adopt",
    is_flag=True,
    help="Use daemon.data_dir even if its store is missing, empty, of another folder, or lacks commits.",
)
@click.option(
    "--skip-damaged", is_flag=True, help="Rebuild from an export without its unreadable frames, and log them."
)
def command(config: str, overrides: tuple[str, ...], adopt: bool, skip_damaged: bool) -> int:
    """Serve the model that CONFIG describes over the OpenAI API: files, batches, chats, completions.

    Launches and supervises its ranks, and relaunches them after a failure; batches resume from the store in
    daemon.data_dir. SIGTERM drains (daemon.drain_timeout), a second one ends at once. SIGHUP reads CONFIG
    again: `laddertron reload`.

    \b
      laddertron serve deploy.yaml
      laddertron serve deploy.yaml --set daemon.port=8080
      laddertron batch submit prompts.jsonl

    Exit codes: 0 stopped; 1 the ranks failed repeatedly, or refused the model; 2 the command line, CONFIG or
    the data folder is wrong; 143 ended at once by a second SIGTERM (130: ^C).
    """
    from ...serve import ServeError, serve

    with ended_by(IdentityError):
        identity = identify()
    if identity is not None:
        raise UsageError(
            f"serve under an outer {identity.launcher}: the daemon launches its own ranks; run it without a launcher: "
            f"laddertron serve {config} (or, for one file inside your own launch: laddertron run {config} -i … -o …)"
        )
    loaded = read(config, overrides)
    text = read_text(loaded)
    if (unmeasured := unmeasured_weights(loaded.deployment)) is not None:
        show_warning(unmeasured)
    with ended_by(ServeError):
        serving = Serving(os.getpid(), config, overrides, os.getcwd())
        return serve(loaded, text, serving, adopt=adopt, check_again=read_text, skip_damaged=skip_damaged)
