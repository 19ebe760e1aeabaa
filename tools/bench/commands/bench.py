"""`laddertron bench`: how fast a deployment decodes, prefills and takes a mix of requests, against what this machine's
memory allows. Variants (wiring, tp) are sets of ranks that are loaded first and then take turns; every case is
warmed up, repeated and reported as a median with its spread.
"""

from __future__ import annotations

import json
import operator
import os
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager, nullcontext
from itertools import product
from pathlib import Path
from typing import Any

import click
from rich.console import Console

from ....engine.config.load import Deployment
from ....launchers.cli.commands.check import read_model
from ....launchers.cli.errors import USAGE, UsageError, check_output, ended_by
from ....launchers.cli.fabric_source import set_option
from ....launchers.control.processes import ended_by_term
from ....launchers.measure.rank_job import BenchJob
from ....models.config.wiring import WIRINGS
from ....topology.json_codec import write_file
from ....topology.placement.identity import IdentityError, identify
from ..bench import Case
from ..bench_measure import Row, Say, Variant, check_lengths, measure, measure_mix, read_items, roomy
from ..bench_view import case_table, mix_table, plot
from ..paper import SWEEPS, Asked, compared, paper_plot, paper_table, run
from ..slo import Slo, slo_option

LINE_S = 5.0
_TRACE = "Also record decode steps of the first case: compute, all-reduces, waits, GPU kernels (Perfetto)."
_FAILS = ended_by(RuntimeError, ValueError, end=click.ClickException)


def _numbers(ctx: click.Context, parameter: click.Parameter, value: str | None) -> tuple[int, ...] | None:
    if value is None:
        return None
    try:
        numbers = tuple(int(part) for part in value.split(","))
    except ValueError:
        raise click.BadParameter(f"{value!r}: numbers with commas between them, such as 1,8,64") from None
    if min(numbers) < 1:
        raise click.BadParameter(f"{value!r}: at least 1 each")
    return numbers


def _range(ctx: click.Context, parameter: click.Parameter, value: str) -> tuple[int, int]:
    low, colon, high = value.partition(":")
    try:
        bounds = int(low), int(high if colon else low)
    except ValueError:
        raise click.BadParameter(f"{value!r}: a number, or a range such as 16:256") from None
    if not 1 <= bounds[0] <= bounds[1]:
        raise click.BadParameter(f"{value!r}: at least 1, and the lower end first")
    return bounds


@_FAILS
def _run(
    config: str, overrides: Sequence[str], variants: Sequence[Variant], cases: Sequence[Case], repeats: int,
    as_json: str | None, picture: str | None, trace: str | None,
) -> None:  # fmt: skip
    deployment = roomy(read_model(config, overrides), cases)
    check_lengths(deployment, cases)
    _check_variants(deployment, variants)
    console = Console(stderr=as_json == "-", highlight=False)
    with ended_by_term(), ExitStack() as stack:
        jobs = _start(stack, deployment, variants)
        with _telling() as say:
            rows = measure(jobs, cases, repeats, say)
    console.print(case_table(rows))
    _say_floor(console, rows)
    _write(rows, as_json)
    if picture is not None:
        plot(rows, Path(picture))
    if trace is not None:
        _trace(variants[0].of(deployment), cases[0], Path(trace))


def _trace(deployment: Deployment, case: Case, output: Path) -> None:
    """Records decode steps of the case with ranks of their own, since recording takes time."""
    options = {"batch": case.batch, "prompt": case.prompt, "output": str(output.resolve())}
    job = BenchJob(deployment, "trace", "laddertron.tools.bench.trace_rank", (json.dumps(options),))
    with ended_by_term(), job:
        pass  # the ranks answer once the trace is written
    click.echo(f"{output}: open it at https://ui.perfetto.dev", err=True)


def _check_variants(deployment: Deployment, variants: Sequence[Variant]) -> None:
    """Raises WiringError or ShapeError for what a variant's ranks would refuse, before any are started."""
    from ....models.config.model_config import from_folder
    from ....models.config.shapes import check_shapes
    from ....models.config.wiring import choose_wiring

    config = from_folder(Path(deployment.model.path))
    for variant in variants:
        keys = variant.of(deployment).model
        wired, _ = choose_wiring(config, keys.wiring, keys.ladder_layers, keys.allow_untrained_ladder)
        check_shapes(wired, variant.tp)


@contextmanager
def _telling() -> Iterator[Say]:
    """Says on stderr what runs: a line that changes on a terminal, elsewhere lines, not more than one in LINE_S."""
    console, last = Console(stderr=True, highlight=False), -LINE_S
    with console.status("") as status:

        def say(text: str) -> None:
            nonlocal last
            status.update(text)
            if not console.is_terminal and time.monotonic() - last >= LINE_S:
                last = time.monotonic()
                console.print(text)

        yield say


def _start(stack: ExitStack, deployment: Deployment, variants: Sequence[Variant]) -> list[tuple[str, BenchJob]]:
    jobs = []
    for variant in variants:
        job = BenchJob(variant.of(deployment), f"tp {variant.tp}, {variant.wiring}")
        with _telling() as say:
            say(f"loading {job.name}")
            stack.enter_context(job)
        jobs.append((variant.name(job.about["wiring"]), job))
    return jobs


def _say_floor(console: Console, rows: Sequence[Row]) -> None:
    floor = rows[0]["floor_bytes_s"] if rows else None
    if floor is None:
        console.print("[yellow]no floor: it is measured by the C kernels, which were not built[/]")
    else:
        console.print(
            f"memory floor: {floor / 1e9:.1f} GB/s, the best read of this node's cores between the runs; "
            "a decode step reads every weight and the KV cache once"
        )


def _write(rows: Sequence[Row], as_json: str | None) -> None:
    if as_json == "-":
        click.echo(json.dumps(rows, indent=1))
    elif as_json is not None:
        Path(as_json).write_text(json.dumps(rows, indent=1) + "\n")


def _writable(_: click.Context, option: click.Parameter, value: str | None) -> str | None:
    if value not in (None, "-"):
        check_output(Path(value), option.opts[0])
    return value


def _common(function: Any) -> Any:
    for option in (
        set_option,
        click.option(
            "--repeats", type=click.IntRange(1, 1000), default=5, show_default=True, help="Runs of each case."
        ),
        click.option(
            "--json", "as_json", metavar="FILE", callback=_writable, help="Write the rows as JSON (- for stdout)."
        ),
        click.argument("config"),
    ):
        function = option(function)
    return function


def _case_options(function: Any) -> Any:
    for option in (
        click.option("--prompt", default="128", show_default=True, callback=_numbers, help="Prompt tokens."),
        click.option("--generate", default="64", show_default=True, callback=_numbers, help="New tokens."),
        click.option("--plot", "picture", metavar="FILE", help="Draw the rates (.png, .svg)."),
        click.option("--trace", metavar="FILE", callback=_writable, help=_TRACE),
    ):
        function = option(function)
    return function


@click.group(context_settings={"help_option_names": ["-h", "--help"]})
def command() -> None:
    """Measure a deployment: latency, throughput, or a sweep over variants."""


@command.command()
@_common
@_case_options
def latency(config: str, overrides: tuple[str, ...], prompt: tuple[int, ...], generate: tuple[int, ...],
            **options: Any) -> None:  # fmt: skip
    """Measure prefill and decode of one sequence at a time."""
    deployment = read_model(config, overrides)
    variant = Variant(deployment.parallel.world.tp, "auto")
    _run(config, overrides, [variant], [Case(1, p, g) for p, g in product(prompt, generate)], **options)


@command.command()
@_common
@_case_options
@click.option("--batch", default="1,8", show_default=True, callback=_numbers, help="Sequences at once.")
@click.option("--tp", callback=_numbers, help="Tensor-parallel sizes, such as 1,2.")
@click.option("--wiring", default="auto", show_default=True, help=f"Comma-separated, of {', '.join(WIRINGS)}.")
def sweep(config: str, overrides: tuple[str, ...], prompt: tuple[int, ...], generate: tuple[int, ...],
          batch: tuple[int, ...], tp: tuple[int, ...] | None, wiring: str, **options: Any) -> None:  # fmt: skip
    """Measure every combination of wiring, tp, batch and lengths, interleaved.

    Wirings that the weights were not trained for are timed too; their answers are meaningless. A wiring is refused if
    the weights lack its norms: parallel unless it is declared, and all but no-communication for weights that declare
    parallel or desync. hybrid needs model.ladder_layers."""
    wirings = tuple(wiring.split(","))
    if unknown := set(wirings) - set(WIRINGS):
        raise click.BadParameter(f"{', '.join(sorted(unknown))}: use {', '.join(WIRINGS)}", param_hint="--wiring")
    sizes = tp or (read_model(config, overrides).parallel.world.tp,)
    variants = [Variant(*v) for v in product(sizes, wirings)]
    _run(config, overrides, variants, [Case(*c) for c in product(batch, prompt, generate)], **options)


@command.command()
@click.option("--model", type=click.Choice(sorted(SWEEPS)), required=True)
@click.option("--tp", callback=_numbers, help="Group sizes.  [default: powers of two that fit]")
@click.option("--batch", callback=_numbers, help="Sequences at once.  [default: the paper's]")
@click.option("--p2p", type=click.Choice(["on", "off"]), default="on", help="Off: NCCL_P2P_DISABLE=1.")
@click.option("--scale", type=click.IntRange(1, 64), default=1, help="Divide layers, widths and lengths: for CPUs.")
@click.option("--repeats", type=click.IntRange(1, 1000), default=3, show_default=True, help="Runs of each case.")
@set_option
@click.option("-o", "--output", type=click.Path(path_type=Path), required=True, help="JSON; keeps earlier rows.")
@click.option("--plot", "picture", metavar="FILE", help="Draw the speed-ups against the law (.png, .svg).")
def paper(model: str, tp: tuple[int, ...] | None, batch: tuple[int, ...] | None, p2p: str, scale: int, repeats: int,
          overrides: tuple[str, ...], output: Path, picture: str | None) -> int:  # fmt: skip
    """Measure the sweep of Ladder Residual's authors, on the ranks of your mpirun, with dummy weights.

    \b
      mpirun -np 8 laddertron bench paper --model 70b -o 70b.json
      mpirun -np 8 laddertron bench paper --model 70b -o 70b.json --p2p off \\
        --plot 70b.svg
      mpirun -np 2 laddertron bench paper --model 8b -o 8b.json --scale 16

    The last example takes two CPU cores some minutes. Compares the measured rows with published and simulated ones
    (H100), and the speed-up with the law."""
    from ....launchers.rank.outer_job import among_ranks

    with ended_by(IdentityError):
        identity = identify()
    if identity is None:
        raise UsageError(f"start it on every rank: mpirun -np 8 laddertron bench paper --model {model} -o {output}")
    sweep, world = SWEEPS[model], identity.size
    sizes = tp or tuple(n for n in (2, 4, 8, 16) if world % n == 0 and (scale > 1 or n >= sweep.least))
    if not sizes or any(world % n for n in sizes):
        if identity.rank:
            return USAGE
        raise UsageError(f"{world} ranks: --tp must divide them, and {model} needs {sweep.least} ranks or --scale")
    if p2p == "off":
        os.environ["NCCL_P2P_DISABLE"] = "1"  # read once, at NCCL's first communicator
    rows: list[Row] = []
    with ended_by(ValueError, OSError):
        if identity.rank == 0 and output.exists():
            rows += json.loads(output.read_text())
    asked = Asked(sweep, sizes, batch or sweep.batches, p2p == "on", scale, repeats, overrides)
    place = operator.itemgetter("model", "scale", "tp", "peer", "wiring", "batch")

    def keep(new: list[Row]) -> None:
        again = {place(row) for row in new}
        rows[:] = [*(row for row in rows if place(row) not in again), *new]
        write_file(output, json.dumps(rows, indent=1) + "\n")

    with _telling() if identity.rank == 0 else nullcontext(lambda text: None) as say:
        among_ranks(identity, lambda: run(asked, identity, say, keep))
    if identity.rank == 0:
        comparison = list(compared([r for r in rows if (r["model"], r["scale"]) == (sweep.name, scale)], sweep))
        Console(highlight=False).print(paper_table(comparison))
        if picture is not None:
            paper_plot(comparison, Path(picture))
    return 0


@command.command()
@_common
@click.option("--requests", "count", type=click.IntRange(1, 10**6), default=500, show_default=True)
@click.option("--prompt", default="16:256", show_default=True, callback=_range, help="Prompt tokens, or a range.")
@click.option("--generate", default="16:128", show_default=True, callback=_range, help="New tokens, or a range.")
@click.option(
    "--rate", type=click.FloatRange(min=0, min_open=True), help="Arrivals a second (Poisson); default: all at once."
)
@click.option(
    "--input",
    "file",
    type=click.Path(exists=True, dir_okay=False),
    help="A JSONL batch file instead of random prompts.",
)
@click.option("--seed", default=0, show_default=True, help="Seed of lengths, prompts and arrivals.")
@slo_option
@_FAILS
def throughput(config: str, overrides: tuple[str, ...], repeats: int, as_json: str | None, file: str | None,
               slo: Slo | None, **mix: Any) -> None:  # fmt: skip
    """Measure a mix of requests, and compare it with pure prefill and decode of full batches.

    With --input and engine.speculation, drafts are verified and the accepted share is shown; random prompts run
    without drafts."""
    deployment = roomy(read_model(config, overrides), (), drafts=file is not None)
    if file is None:
        check_lengths(deployment, [Case(1, mix["prompt"][1], mix["generate"][0])])
    else:
        mix = {"items": read_items(deployment, Path(file), mix["rate"], mix["seed"])}
    console = Console(stderr=as_json == "-", highlight=False)
    variant = Variant(deployment.parallel.world.tp, "auto")
    with ended_by_term(), ExitStack() as stack:
        (name, job), *_ = _start(stack, deployment, [variant])
        with _telling() as say:
            row = measure_mix(name, job, mix, repeats, say)
    console.print(mix_table([row]))
    if slo is not None:
        row["slo"] = slo.verdict(row["first_s"][1], row["between_s"][1])
        console.print(row["slo"])
    _write([row], as_json)
