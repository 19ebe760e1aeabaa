"""`laddertron reload`: a running daemon goes over to its changed deployment file."""

from __future__ import annotations

import json
import os
import signal
import time
from pathlib import Path
from typing import Any

import click

from ....engine.config.load import read
from ....engine.daemon.store.disk import holder_pid
from ...job.reload import OUTCOME, WAITS, different_keys, serving_in
from ..errors import FAILED, OK, UsageError, show_error, show_warning
from ..fabric_source import set_option
from .run import read_text

_SHOWN_KEYS = 5


@click.command()
@click.argument("config", type=click.Path())
@set_option
def command(config: str, overrides: tuple[str, ...]) -> int:
    """Check CONFIG, send SIGHUP to the daemon of its daemon.data_dir, which reads it again, and wait for the outcome.

    If memory allows, new ranks start while the old ones serve; otherwise running requests finish first and new
    ones wait. A change of the daemon itself (ports, data folder, keys, tokenizer) needs a restart: such a
    reload is refused, and nothing changes. The daemon reads the file and --set options with which it was started:
    give the same ones here.

    \b
      laddertron reload deploy.yaml

    Exit codes: 0 the new configuration serves; 1 refused or failed, and the old one continues; 2 the
    command line or CONFIG is wrong, or no daemon on this host uses the data folder.
    """
    loaded = read(config, overrides)
    read_text(loaded)
    folder = Path(loaded.deployment.daemon.data_dir)
    pid = holder_pid(folder)
    if pid is None:
        raise UsageError(f"no daemon on this host uses {folder}: start it with `laddertron serve {config}`")
    if (number := _reload_signal(pid)) is None:
        raise UsageError(f"the daemon (process {pid}) runs an earlier version, which exits on SIGHUP: restart it")
    serving = serving_in(folder, pid)
    if serving is None:
        raise UsageError(
            f"the daemon (process {pid}) has not reported its deployment: wait until /health responds, or "
            "restart it if it runs an earlier version"
        )
    if others := list(different_keys(serving.read_again().deployment, loaded.deployment)):
        more = ", …" if len(others) > _SHOWN_KEYS else ""
        raise UsageError(
            f"the daemon (process {pid}) was started with {serving.command}, which differs in "
            f"{', '.join(others[:_SHOWN_KEYS])}{more}: change that file and reload it with the same --set, or restart "
            "the daemon with this one"
        )
    sent = time.time()
    os.kill(pid, number)
    shown: list[str] = []
    while (outcome := _outcome(folder, pid, sent)).get("outcome", WAITS) == WAITS:
        if holder_pid(folder) != pid:
            raise UsageError(f"the daemon (process {pid}) exited during the reload: see its log")
        if (reasons := outcome.get("reasons", [])) != shown:
            shown = reasons
            show_warning(f"reload: {WAITS}: {'; '.join(shown)}")
        time.sleep(0.1)  # there is no event for a replaced file
    for reason in outcome["reasons"]:
        show_error(reason)
    if outcome["outcome"] != "done":
        show_error(f"reload: {outcome['outcome']}: the daemon continues with the old configuration")
        return FAILED
    click.echo("reload: done")
    return OK


def _reload_signal(pid: int) -> signal.Signals | None:
    """The signal that makes a daemon reload: SIGUSR2 if it was started with SIGHUP ignored; None if there is none."""
    try:
        status = Path(f"/proc/{pid}/status").read_text(encoding="utf-8")
    except OSError:
        return signal.SIGHUP  # it ended, or the system does not say
    masks = dict(line.split()[:2] for line in status.splitlines() if line.startswith("Sig"))
    caught, ignored = int(masks.get("SigCgt:", "0"), 16), int(masks.get("SigIgn:", "0"), 16)
    bit, other = (1 << (number - 1) for number in (signal.SIGHUP, signal.SIGUSR2))
    if caught & bit:
        return signal.SIGHUP
    return signal.SIGUSR2 if ignored & bit and caught & other else None


def _outcome(folder: Path, pid: int, since: float) -> dict[str, Any]:
    """What the daemon wrote of a reload that began after `since`; empty if it wrote nothing yet."""
    try:
        outcome: dict[str, Any] = json.loads((folder / OUTCOME).read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    return outcome if outcome.get("began", 0.0) >= since and outcome["pid"] == pid else {}
