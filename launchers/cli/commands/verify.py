"""`laddertron verify`: checks that a request has the same bits for any batch composition and layout."""

from __future__ import annotations

import json
import secrets
from typing import Any

import click

from ....engine.config.load import Deployment
from ...control.processes import ended_by_term
from ...measure.rank_job import BenchJob
from ..errors import ended_by
from ..fabric_source import set_option
from .check import read_model

WIDTH = 80
Digests = list[list[tuple[str, list[int]]]]
"""For each request, each sub-block's name and its rows' digests."""


def compare(one: Digests, other: Digests) -> str:
    """The first place, by layer and then by position, where two layouts' digests differ; "" if nowhere."""
    first: tuple[int, int, str] | None = None
    for request, (mine, theirs) in enumerate(zip(one, other, strict=True)):
        for place, ((name, a), (its, b)) in enumerate(zip(mine, theirs, strict=False)):
            at = next((at for at, (x, y) in enumerate(zip(a, b, strict=True)) if x != y), None)
            if its != name or at is not None:
                difference = place, at or 0, f"request {request}, position {at or 0}: {name} differs"
                first = difference if first is None else min(first, difference)
                break
    return "" if first is None else first[2]


@click.command(context_settings={"help_option_names": ["-h", "--help"]})
@click.option(
    "--against", metavar="OTHER", help="A deployment of another layout, whose ranks must compute the same bits."
)
@set_option
@click.option("--requests", type=click.IntRange(1, 1000), default=12, show_default=True, help="Random prompts.")
@click.option(
    "--longest", type=click.IntRange(1, 10**6), default=96, show_default=True, help="Tokens of the longest prompt."
)
@click.option("--cases", type=click.IntRange(0, 10**6), default=20, show_default=True, help="Mixes of these prompts.")
@click.option("--seed", type=click.IntRange(0, 2**63 - 1), help="Seed of prompts and mixes; default: random.")
@click.argument("config")
def command(config: str, against: str | None, overrides: tuple[str, ...], requests: int, longest: int, cases: int,
            seed: int | None) -> int:  # fmt: skip
    """Test that a request's result does not depend on other requests.

    Starts the ranks of CONFIG and computes random prompts alone, then in random mixes of 1 to 300 tokens a step:
    chunked, preempted, resumed from cached blocks. Every sub-block and the head must compute the same bits in both;
    with --against, OTHER's ranks must compute the same bits for prompts alone.

    Exit codes: 0 all bits are equal; 1 some differ, the first is printed; 2 it could not be checked."""
    deployments = [(config, read_model(config, overrides)), *([(against, read_model(against))] if against else [])]
    seed = secrets.randbits(32) if seed is None else seed
    order = {"requests": requests, "longest": longest, "cases": cases, "seed": seed, "digests": bool(against)}
    _say(f"{requests} requests of up to {longest} tokens, --seed {seed}")
    different, digests = False, list[Digests]()
    with ended_by(RuntimeError, ValueError), ended_by_term():
        for name, deployment in deployments:
            result = _run(name, deployment, order)
            different |= result[0]
            digests += result[1]
            order["cases"] = 0  # the other layout's own mixes are a check of its own
    if against:
        where = compare(*digests)
        different |= bool(where)
        _say(f"{config} against {against}: {where or 'all bits are equal'}")
    if different and not all(d.parallel.deterministic for _, d in deployments):
        _say("answers may depend on other requests: set parallel.deterministic: true (or everywhere, for all layouts)")
    return int(different)


def _run(name: str, deployment: Deployment, order: dict[str, Any]) -> tuple[bool, list[Digests]]:
    keys = deployment.parallel
    title = f"{name}: tp {keys.world.tp}, deterministic {str(keys.deterministic).lower()}"
    with BenchJob(deployment, name, "laddertron.launchers.measure.verify_rank", (json.dumps(order),)) as job:
        differences = [difference for _ in range(order["cases"]) if (difference := job.answer()["difference"])]
        digests = [job.answer()["digests"]] if order["digests"] else []
    if not differences:
        _say(title + (f", {order['cases']} mixes: all bits are equal" if order["cases"] else ""))
        return False, digests
    _say(f"{title}: bits differ in {len(differences)} of {order['cases']} mixes, first:")
    _say(f"  {differences[0]}")
    return True, digests


def _say(text: str) -> None:
    click.echo(click.wrap_text(text, WIDTH, subsequent_indent="  ", preserve_paragraphs=True))
