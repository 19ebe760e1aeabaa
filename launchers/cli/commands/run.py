"""`laddertron run`: a JSONL file of requests in, answers out. It launches its ranks, or is one under mpirun, srun or
torchrun.
"""

from __future__ import annotations

import asyncio
import logging
import os
import shlex
import signal
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import click
from rich.console import Console

from ....engine.config.load import ConfigError, Deployment, LoadedDeployment, read
from ....engine.identity import ModelIdentity, identity_of
from ....engine.job import EngineJob
from ....engine.run.files import RunFiles, open_run
from ....engine.run.past import RunFileError
from ....engine.run.progress import Summary
from ....engine.run.run import BatchRun
from ....engine.text.pool import PoolLimits, TextPool
from ....engine.text.tokenizer import TextError, TextModel
from ....models.weights.checkpoint import CheckpointError
from ....topology.hardware.fabric import counted
from ....topology.placement.identity import Identity, IdentityError, identify, require_world
from ...control.first_process import twice_within_s
from ...job.bundle import FailureBundles
from ..errors import FAILED, OK, USAGE, UsageError, ended_by
from ..fabric_source import set_option
from ..run_view import ConsoleLog, RunView, default_errors, progress_console, say, say_error, summary_table
from .check import dummy_faults, memory_faults, missing_files, model_faults

_TEXT_PATIENCE_S = 120.0  # without a text worker: then the run ends, and its ranks are free for others
_SHOWN_CAUSES = 5


@dataclass(frozen=True, slots=True)
class Arguments:
    """The command line, for running and for saying how to resume."""

    config: str
    input: Path
    output: Path
    errors: Path
    resume: bool
    overwrite: bool
    overrides: tuple[str, ...]
    strict: bool = False

    def resume_line(self) -> str:
        words = ["laddertron", "run", self.config, "-i", str(self.input), "-o", str(self.output)]
        if self.errors != default_errors(self.output):
            words += ["--errors", str(self.errors)]
        for override in self.overrides:
            words += ["--set", override]
        if self.strict:
            words.append("--strict")
        return shlex.join([*words, "--resume"])


@dataclass(slots=True)
class Prepared:
    """Checked and opened inputs of a run, without its job."""

    deployment: Deployment
    text: TextModel
    files: RunFiles
    identity: ModelIdentity


def read_text(loaded: LoadedDeployment) -> TextModel:
    """The deployment's text side, its model folder having been looked at too. Raises ConfigError."""
    if faults := [*missing_files(loaded), *model_faults(loaded), *memory_faults(loaded), *dummy_faults(loaded)]:
        raise ConfigError(faults)
    key = "model.path" if loaded.deployment.model.tokenizer is None else "model.tokenizer"
    try:
        return TextModel.from_folder(Path(loaded.deployment.text_folder))
    except TextError as error:
        raise ConfigError([loaded.fault(key, str(error))]) from error


def read_identity(deployment: Deployment) -> ModelIdentity:
    """The identity of the model that answers. Raises UsageError."""
    with ended_by(CheckpointError, OSError):
        return identity_of(deployment)


def open_files(arguments: Arguments, deployment: Deployment, console: Console, identity: ModelIdentity) -> RunFiles:
    """The last thing before anything is launched: `--overwrite` empties here. Raises UsageError."""
    given = arguments.input, arguments.output, arguments.errors, arguments.resume, arguments.overwrite
    with ended_by(RunFileError, OSError):
        files = open_run(*given, identity.digest, deployment.daemon.limits.max_line_bytes)
    if files.damaged:
        damaged = counted(files.damaged, "line")
        say(
            console,
            f"{damaged} of {arguments.output} changed since they were written and will be computed again; "
            f"what was there is in {files.outdated}",
        )
    if files.changed:
        lines = "1 line has" if files.changed == 1 else f"{files.changed:,} lines have"
        moved = f"; their earlier answers are in {files.outdated}" if files.outdated else ""
        say(console, f"{lines} changed since the last run and will be computed again{moved}")
    return files


def bundles_of(deployment: Deployment) -> FailureBundles:
    """The folder of the daemon's bundles, which `laddertron bundle` reads."""
    return FailureBundles(deployment, Path(deployment.daemon.data_dir) / "bundles")


def launched_jobs(deployment: Deployment) -> Sequence[EngineJob]:
    """The ranks that the deployment's `launch:` asks for, by replica; not started. A launch that fails leaves a bundle.
    Raises ValueError where they cannot be."""
    from ...job.fleet import replica_specs
    from ...job.replica import Replica

    return [Replica(spec) for spec in replica_specs(deployment, bundles_of(deployment).failed, restart=False)]


async def drive(jobs: Sequence[EngineJob], prepared: Prepared, arguments: Arguments, console: Console) -> int:
    """The run itself; the exit code. Signals are handled where this is the main thread (elsewhere mpirun's are)."""
    deployment = prepared.deployment
    for job in jobs:
        job.identity = prepared.identity
    limits = PoolLimits(
        max_ids=deployment.model.max_model_len or PoolLimits().max_ids,
        special_in_content=deployment.model.allow_special_tokens_in_content,
    )
    caught: list[signal.Signals] = []
    caught_at = 0.0
    stopping = asyncio.Event()
    task = asyncio.current_task()
    assert task is not None

    def stop(number: signal.Signals) -> None:
        nonlocal caught_at
        now = time.monotonic()
        if caught and now - caught_at < twice_within_s():
            return
        if caught:
            # NOTE: at once: the ranks' keeper sees this process go, and the first signal's hint would come after them
            os._exit(_interrupted(arguments, number, console))
        caught.append(number)
        caught_at = now
        if number == signal.SIGTERM:
            stopping.set()  # a batch system's: there is time to finish what is under way
        else:
            task.cancel()

    if threading.current_thread() is threading.main_thread():
        for number in (signal.SIGINT, signal.SIGTERM):
            asyncio.get_running_loop().add_signal_handler(number, stop, number)
    try:
        with RunView(console) as view:
            async with TextPool(Path(deployment.text_folder), limits, files=prepared.text.files) as pool:
                model = deployment.model
                prepared.text.chat = pool.chat.with_formats(model.tool_format, model.reasoning_format)
                encoder = pool.of("", patience_s=_TEXT_PATIENCE_S)
                run = BatchRun(jobs, prepared.text, encoder, prepared.files, deployment, view.update)
                summary = await run.run(stopping)
    except TextError as error:
        say_error(console, str(error))
        return FAILED
    except asyncio.CancelledError:
        if not caught:
            raise
        return _interrupted(arguments, caught[0], console)
    if summary.stopped and caught and summary.reason is None:
        console.print(summary_table(summary))
        return _interrupted(arguments, caught[0], console)
    return report(summary, arguments, console)


def _interrupted(arguments: Arguments, number: signal.Signals, console: Console) -> int:
    say(console, f"interrupted: resume with\n  {arguments.resume_line()}")
    return 128 + number


def report(summary: Summary, arguments: Arguments, console: Console) -> int:
    if began := summary.reason is None or summary.ok + summary.failed + summary.skipped + summary.lost:
        console.print(summary_table(summary))
    if summary.failed:
        say(console, f"errors: {arguments.errors}")
    for cause in summary.causes[:_SHOWN_CAUSES]:
        say(console, f"  {cause.count:,} x {cause.code}: {cause.message}")
    if summary.reason is None:
        if summary.failed and not summary.ok + summary.skipped:
            say_error(console, "no line was answered")
            return FAILED
        return FAILED if summary.failed and arguments.strict else OK
    say_error(console, summary.reason)
    if began:
        were = "was" if summary.lost == 1 else "were"
        lost = f"{counted(summary.lost, 'request')} in flight {were} lost; finished lines are kept; resume with"
        say(console, f"{lost}\n  {arguments.resume_line()}")
    return FAILED


def run_launched(arguments: Arguments, loaded: LoadedDeployment, console: Console) -> int:
    text = read_text(loaded)
    with ended_by(ValueError, OSError):
        jobs = launched_jobs(loaded.deployment)
    model = read_identity(loaded.deployment)
    files = open_files(arguments, loaded.deployment, console, model)
    prepared = Prepared(loaded.deployment, text, files, model)
    try:
        return asyncio.run(drive(jobs, prepared, arguments, console))
    finally:
        prepared.files.close()


def run_among_ranks(arguments: Arguments, loaded: LoadedDeployment, identity: Identity, console: Console) -> int:
    """As one of an outer mpirun's ranks; rank 0 alone opens the files."""
    from ...rank.outer_job import run_inside

    deployment = loaded.deployment
    try:
        if deployment.parallel.replicas > 1 and identity.launcher == "torchrun":
            raise IdentityError(
                f"replicas={deployment.parallel.replicas} under torchrun: run `laddertron run` without torchrun (it "
                f"launches every replica), start it with mpirun or srun, or set parallel.replicas=1"
            )
        require_world(identity, deployment.parallel.world)
    except IdentityError as error:
        if identity.rank == 0:
            raise UsageError(str(error)) from error
        return USAGE
    failed = bundles_of(deployment).failed
    if identity.rank != 0:
        return run_inside(deployment, identity, failed, lambda jobs: asyncio.sleep(0, 0))
    text, model = read_text(loaded), read_identity(deployment)
    prepared = Prepared(deployment, text, open_files(arguments, deployment, console, model), model)
    try:
        return run_inside(deployment, identity, failed, lambda jobs: drive(jobs, prepared, arguments, console))
    finally:
        prepared.files.close()


@click.command()
@click.argument("config", type=click.Path())
@click.option("-i", "--input", required=True, type=click.Path(path_type=Path), help="Requests, one per line.")
@click.option(
    "-o",
    "--output",
    required=True,
    type=click.Path(path_type=Path),
    help="Answers, one per line, in the order of completion.",
)
@click.option(
    "--errors",
    type=click.Path(path_type=Path),
    help="File for failed lines.  [default: OUT.errors.jsonl for OUT.jsonl]",
)
@click.option(
    "--resume",
    is_flag=True,
    help="Resume an interrupted run; finished lines that changed are computed again.",
)
@click.option("--overwrite", is_flag=True, help="Replace existing output files.")
@click.option("--strict", is_flag=True, help="Exit with 1 if any line failed.")
@set_option
def command(errors: Path | None, **options: Any) -> int:
    """Answer every line of a JSONL file with the model that CONFIG describes.

    \b
    Lines have the Batch API's form, for /v1/chat/completions or /v1/completions:
      {"custom_id": "r-1", "method": "POST", "url": "/v1/completions",
       "body": {"model": "NAME", "prompt": "Once upon", "max_tokens": 32}}

    Failed lines are written to the error file. CONFIG's launch section says how the ranks are launched; under
    mpirun its processes are the ranks:

    \b
      laddertron run deploy.yaml -i in.jsonl -o out.jsonl
      laddertron run deploy.yaml -i in.jsonl -o out.jsonl --resume
      mpirun -np 2 laddertron run deploy.yaml -i in.jsonl -o out.jsonl

    Exit codes: 0 every line has its answer or error line; 1 the job failed, no line was answered, or with --strict
    one failed; 2 the command line or CONFIG is wrong; 130 interrupted (^C: at once); 143 stopped by SIGTERM, after
    running requests finished (daemon.drain_timeout). A second signal ends it at once.
    """
    console = progress_console()
    logging.basicConfig(level=logging.WARNING, format="%(levelname)s %(message)s", handlers=[ConsoleLog(console)])
    with ended_by(IdentityError):
        identity = identify()
    arguments = Arguments(errors=errors or default_errors(options["output"]), **options)
    loaded = read(arguments.config, arguments.overrides)
    if identity is None or identity.only_task_for(loaded.deployment.parallel.world):
        return run_launched(arguments, loaded, console)
    return run_among_ranks(arguments, loaded, identity, console)
