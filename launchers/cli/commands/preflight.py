"""`laddertron preflight`: measures a deployment's fabric and writes its tuning file. It launches one rank for each of
the deployment's, or is one of them.
"""

from __future__ import annotations

import json
import logging
import os
import signal
import sys
import traceback
from collections.abc import Sequence
from pathlib import Path
from typing import NoReturn

import click
from rich.console import Console
from rich.table import Table

from ....engine import child
from ....engine.config.load import Deployment, LoadedDeployment, read
from ....engine.config.yaml_tree import ConfigError
from ....topology.cost.fit import Fit
from ....topology.hardware.fabric import counted
from ....topology.json_codec import unbuild
from ....topology.placement.identity import Identity, IdentityError, identify
from ....topology.placement.world import World
from ...compose.host_allocation import together
from ...compose.mpi import compose
from ...compose.ports import ports_at
from ...control.processes import die_with_parent
from ...job.fleet import Fleet
from ...job.missing import Answer, ask
from ...measure.preflight import PreflightOutcome
from ...measure.preflight_job import DONE_S, SIGNS, hold, sign
from ..errors import FAILED, UsageError, check_output, ended_by, show_error
from ..fabric_source import set_option


def launch(loaded: LoadedDeployment, words: list[str]) -> int:
    """The same command as ranks of a job; its exit status. Raises UsageError where it cannot be launched."""
    with ended_by(ValueError, OSError):
        fleet = Fleet(loaded.deployment, os.environ)
        program = child.laddertron("preflight", *words, python=fleet.site.python)
        share = together(fleet.shares)
        job = compose(loaded.deployment, fleet.site, share, program, (SIGNS,))
    hosts = [host.name for host in share.hosts for _ in range(host.slots)]

    def ask_missing(missing: Sequence[str]) -> dict[str, Answer]:
        away, address = [host for host in missing if not fleet.names.is_here(host)], fleet.control_host()
        return ask(job.agent, job.python, away if job.agent else [], address, ports_at(loaded.deployment, address))

    environment = {**job.env, SIGNS: "1"}
    code = hold(job.argv, environment, hosts, lambda line: click.echo(line, nl=False, err=True), ask_missing)
    return code if code in (0, 2, 130) else 1  # mpirun has codes of its own, such as 255 for a host out of reach


def be_rank(deployment: Deployment, identity: Identity, save: Path | None, as_json: bool) -> int:
    """Measures as one rank; rank 0 prints and writes. Ends the process at once on an error, as others wait for it."""
    from ...measure.preflight import UnlikeRanks, run_preflight  # with torch, which may take long from a cold disk

    sign(identity.rank, "started")
    try:
        if identity.rank == 0 and save is not None:
            check_output(save, "--save")
        status, outcome = run_preflight(deployment, identity, lambda text: end(identity, text, 1))
        signal.alarm(int(DONE_S))  # MPI's own end waits for all ranks, and cannot be ended from Python
        if outcome is not None:
            if outcome.tuning is not None and save is not None:
                outcome.tuning.save(save)
            if as_json:
                click.echo(json.dumps(unbuild(outcome)))
            else:
                show(outcome, save if outcome.tuning is not None else None)
            sign(identity.rank, "done")
        return status
    except UnlikeRanks as error:
        if identity.rank == 0:
            show_error(str(error))
        return FAILED
    except (IdentityError, UsageError) as error:
        end(identity, str(error), 2)
    except BaseException as error:
        expected = isinstance(error, ValueError | RuntimeError | OSError)
        text = f"{type(error).__name__}: {error}" if expected else traceback.format_exc()
        end(identity, text, 1)


def end(identity: Identity, text: str, code: int) -> NoReturn:
    """Exits at once, since MPI_Finalize waits for all ranks. Each line begins with the rank."""
    head = f"error: rank {identity.rank} on {identity.node}: "
    click.echo("\n".join(head + line for line in text.splitlines()), err=True)
    sys.stderr.flush()
    os._exit(code)


@click.command()
@click.argument("config", type=click.Path())
@click.option(
    "--save",
    type=click.Path(dir_okay=False, path_type=Path),
    metavar="FILE",
    help="Write the tuning file here.  [default: parallel.tuning_file]",
)
@click.option("--json", "as_json", is_flag=True, help="Print every number as JSON, in base units.")
@set_option
def command(config: str, save: Path | None, as_json: bool, overrides: tuple[str, ...]) -> int:
    """Measure CONFIG's fabric: every link, every all-reduce algorithm with the model's message sizes and 32 KiB to
    8 MiB, and every rank's clock, libraries, transport and speed.

    \b
      laddertron preflight deploy.yaml --save fabric-tuning.json
      mpirun -np 16 --hostfile hosts laddertron preflight deploy.yaml

    With --save or parallel.tuning_file it writes the tuning file from which `collective: auto` chooses the all-reduce
    of each size.

    Exit codes: 0 no fault; 1 a fault, printed with its rank or link; 2 the command line or CONFIG is wrong.
    """
    logging.basicConfig(level=logging.WARNING, format="%(levelname)s: %(message)s")
    with ended_by(IdentityError):
        identity = identify()
    try:
        loaded = read(config, overrides)
    except ConfigError as error:
        if identity is None:
            raise
        end(identity, str(error), 2)  # this rank's file: the others' may be right
    if identity is None:
        words = [os.path.abspath(config)]
        words += ["--save", os.path.abspath(save)] if save is not None else []
        words += ["--json"] if as_json else []
        return launch(loaded, words + [word for override in overrides for word in ("--set", override)])
    die_with_parent()
    configured = loaded.deployment.parallel.tuning_file
    return be_rank(loaded.deployment, identity, save or (Path(configured) if configured else None), as_json)


_MARKS = {"error": "red", "warning": "yellow"}


def size_name(nbytes: int) -> str:
    for unit, scale in (("MiB", 1 << 20), ("KiB", 1 << 10)):
        if nbytes >= scale:
            return f"{nbytes / scale:.4g} {unit}"
    return f"{nbytes} B"


def links_table(outcome: PreflightOutcome) -> Table:
    host = {r.rank: r.hostname for r in outcome.reports}
    table = Table(
        "link", "rail", "one way", "rate", title=f"Links, {outcome.carrier}, point to point", title_justify="left"
    )
    for link in outcome.links:
        pair = link.pair
        table.add_row(
            f"{host[pair.a]} rank {pair.a} - {host[pair.b]} rank {pair.b}",
            "" if pair.rail is None else str(pair.rail),
            f"{link.latency_s * 1e6:.1f} us",
            f"{link.bytes_per_s / 1e9:.2f} GB/s",
        )
    return table


def sweep_table(fitted: Fit, backend: str) -> Table:
    """Microseconds of every strategy, the fastest of a size marked, and what the fitted model says of it."""
    residuals = fitted.residuals
    strategies = list(dict.fromkeys(r.point.strategy for r in residuals))
    title = f"All-reduces, {backend}, us (predicted)"
    table = Table("size", *strategies, title=title, title_justify="left")
    for nbytes in sorted({r.point.nbytes for r in residuals}):
        row = {r.point.strategy: r for r in residuals if r.point.nbytes == nbytes}
        best = min(r.point.seconds for r in row.values())
        cells = []
        for strategy in strategies:
            r = row.get(strategy)
            if r is None:
                cells.append("")
                continue
            text = f"{r.point.seconds * 1e6:.1f} ({r.predicted_s * 1e6:.1f})"
            cells.append(f"[bold]{text}[/]" if r.point.seconds == best and len(row) > 1 else text)
        table.add_row(size_name(nbytes), *cells)
    return table


def show(outcome: PreflightOutcome, saved: Path | None, console: Console | None = None) -> None:
    """Prints everything; findings last, where they are read."""
    # mpirun hands ranks a terminal of its own making: neither its width nor its colours are the user's
    console = console or Console(highlight=False, width=120, force_terminal=False)
    ranks = len(outcome.reports)
    console.print(f"{counted(ranks, 'rank')} on {counted(len(outcome.fabric.nodes), 'node')}")
    if outcome.links:
        console.print(links_table(outcome))
    if outcome.fitted is not None:
        console.print(sweep_table(outcome.fitted, outcome.backend))
        if (world := World(outcome.shape.size).on([r.hostname for r in outcome.reports])).groups > 1:
            slow = world.ranks_of(outcome.group)
            console.print(f"the slowest of {world.groups} groups: ranks {slow[0]} to {slow[-1]}")
        console.print(f"cost model: {outcome.fitted.report()}", markup=False)
    else:
        console.print("tensor_parallel_size is 1: no all-reduce to measure, no tuning file to write")
    slowest = max(outcome.reports, key=lambda r: r.matmul_s)
    console.print(f"slowest matmul: {slowest.matmul_s * 1e3:.2f} ms, rank {slowest.rank} on {slowest.hostname}")
    for finding in outcome.findings:
        console.print(str(finding), style=_MARKS[finding.severity], markup=False, soft_wrap=True)
    if saved is not None:
        console.print(f"saved {saved}: set parallel.tuning_file to it", soft_wrap=True)
    elif outcome.broken:
        console.print("no tuning file written: the fabric has faults", style="red")
