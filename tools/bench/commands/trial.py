"""`laddertron trial`: the same requests to this deployment's daemon and to another server, in turns."""

from __future__ import annotations

import io
import json
import os
import secrets
import time
from collections.abc import Callable
from pathlib import Path

import click

from ....engine.config.load import Deployment, read
from ....engine.openai.batch_input import read_lines
from ....engine.text.tokenizer import TextError, TextModel
from ....launchers.cli.batch_client import ApiError, BatchClient
from ....launchers.cli.errors import UsageError, ended_by
from ...slo import Slo, slo_option
from ..trial import (
    FEWEST,
    Reply,
    Request,
    Round,
    Spread,
    Trial,
    cost,
    deal,
    mix,
    percentiles,
    play,
    verdict,
)

_UNKNOWN_FIELD = (400, 422)
_COUNT, _PRICE = click.IntRange(1, 10**6), click.FloatRange(0, min_open=True)
_FILE = click.Path(exists=True, path_type=Path)


class Server:
    """A server under trial: asks it for streams, and times them."""

    def __init__(self, name: str, url: str, variable: str, model: str | None) -> None:
        """variable: the environment's variable that has its key, if it needs one."""
        self.name = name
        self._client = BatchClient(url, os.environ.get(variable), timeout=600.0, variable=variable)
        found = self._client.models() if model is None else (model,)
        if len(found) != 1:
            raise ApiError(f"{url} has {len(found)} models: name one with --model, such as {', '.join(found[:3])}")
        self._model, self._usage = found[0], True
        self.count: Callable[[str], int] | None = None
        """Tokens of a text, where the two servers' own counts cannot be compared."""

    def warm_up(self, request: Request) -> bool:
        """Sends one request; returns whether the server reports token counts. Raises ApiError."""
        try:
            _, _, _, used = self._stream(request)
        except ApiError as error:
            if error.status not in _UNKNOWN_FIELD:
                raise
            self._usage = False  # a server that does not know stream_options
            _, _, _, used = self._stream(request)
        return used is not None

    def ask(self, request: Request) -> Reply:
        try:
            seconds, first, text, used = self._stream(request)
        except ApiError as error:
            return Reply(0.0, error=str(error))
        tokens = self.count(text) if self.count is not None else used or 0
        return Reply(seconds, first, tokens, text, None if tokens else "an answer without a token")

    def _stream(self, request: Request) -> tuple[float, float, str, int | None]:
        path, body = request
        body = {**body, "model": self._model} | ({"stream_options": {"include_usage": True}} if self._usage else {})
        began, first, parts, used = time.perf_counter(), None, [], None
        for event in self._client.stream(path, body):
            for choice in event.get("choices") or ():
                delta = choice.get("delta") or choice
                text = delta.get("content") or delta.get("reasoning_content") or delta.get("text")
                if text:
                    first = first or time.perf_counter() - began
                    parts.append(text)
            used = (event.get("usage") or {}).get("completion_tokens", used)
        seconds = time.perf_counter() - began
        return seconds, first or seconds, "".join(parts), used


@click.command(context_settings={"help_option_names": ["-h", "--help"]})
@click.argument("config", type=click.Path())
@click.option("--against", required=True, metavar="URL", help="The other server's API, such as http://host:8000/v1.")
@click.option("--model", help="Model name on the other server.  [default: its only model]")
@click.option("-i", "--input", "file", type=_FILE, help="Batch lines to send.  [default: random prompts]")
@click.option("--prompt", default=512, show_default=True, type=_COUNT, help="Words per random prompt.")
@click.option("--generate", default=128, show_default=True, type=_COUNT, help="Tokens per answer.")
@click.option("--requests", default=16, show_default=True, type=_COUNT, help="Requests per round.")
@click.option("--at-once", default=8, show_default=True, type=click.IntRange(1, 512), help="Concurrent requests.")
@click.option("--rounds", default=7, show_default=True, type=click.IntRange(FEWEST, 100), help="Rounds on each server.")
@click.option(
    "--price", nargs=2, type=_PRICE, metavar="OURS THEIRS", help="Price of an hour of each server, in any currency."
)
@click.option("--seed", type=click.IntRange(0, 2**32), help="Seed of the prompts.  [default: random, printed]")
@slo_option
@click.option("--set", "overrides", multiple=True, metavar="SECTION.KEY=VALUE", help="Override one key of CONFIG.")
def command(
    config: str, against: str, model: str | None, file: Path | None, prompt: int, generate: int, requests: int,
    at_once: int, rounds: int, price: tuple[float, float] | None, seed: int | None, slo: Slo | None,
    overrides: tuple[str, ...],
) -> None:  # fmt: skip
    """Compare this deployment's daemon with another OpenAI-compatible server on your requests.

    Both must be running: this one at CONFIG's daemon.host and daemon.port, with the key in LADDERTRON_API_KEY; the
    other at --against, with OPENAI_API_KEY. Each round sends the same new streamed requests to both in turn.

    \b
      laddertron trial deploy.yaml --against http://vllm:8000/v1 --price 98.4 49.2
      laddertron trial deploy.yaml --against http://vllm:8000/v1 -i prompts.jsonl --at-once 32

    Exit code 0: measured; 1: it could not be measured; 2: the command line or CONFIG is wrong."""
    deployment = read(config, overrides).deployment
    seed = secrets.randbits(32) if seed is None else seed
    try:
        sets = mix(rounds, requests, prompt, generate, seed) if file is None else deal(_lines(file), rounds)
    except ValueError as error:
        raise UsageError(f"{file}: {error}") from error
    work = f"from {file}" if file is not None else f"{prompt} words in, {generate} out, --seed {seed}"
    click.echo(f"{rounds} rounds of {len(sets[0])} requests, {at_once} at once: {work}")
    ours, theirs = _servers(deployment, against, model, sets[0][0])
    pairs: list[tuple[Round, Round]] = []
    try:
        for number, pair in enumerate(play(sets, ours.ask, theirs.ask, at_once), 1):
            pairs.append(pair)
            click.echo(f"round {number}: {pair[0].rate:,.1f} and {pair[1].rate:,.1f} tokens/s", err=True)
    except KeyboardInterrupt:
        if not pairs:
            raise
    trial = Trial(tuple(p[0] for p in pairs), tuple(p[1] for p in pairs), price)
    click.echo("\n".join(report(trial, theirs.name)))
    if slo is not None:
        for name, played in (("this deployment", trial.ours), (theirs.name, trial.theirs)):
            click.echo(f"{name}: {slo.verdict(*percentiles(played))}")


def _servers(deployment: Deployment, against: str, model: str | None, first: Request) -> tuple[Server, Server]:
    keys = deployment.daemon
    scheme = "http" if keys.tls_cert is None else "https"
    url = f"{scheme}://{keys.host}:{keys.port}/v1"
    with ended_by(ApiError, end=click.ClickException):
        name = deployment.model.served_model_name or Path(deployment.model.path).name
        ours = Server("this deployment", url, "LADDERTRON_API_KEY", name)
        theirs = Server(against, against, "OPENAI_API_KEY", model)
        counted = [server.warm_up(first) for server in (ours, theirs)]
    if not all(counted):
        try:
            text = TextModel.from_folder(Path(deployment.model.path))
        except TextError as error:
            raise click.ClickException(
                f"{against} does not count tokens, and they cannot be counted here: {error}"
            ) from error
        ours.count = theirs.count = lambda said: len(text.encode(said, add_special_tokens=False))
        click.echo(f"{against} does not count tokens: both servers' are counted from their text, by this tokenizer")
    return ours, theirs


def _lines(file: Path) -> list[Request]:
    data, found = file.read_bytes(), list[Request]()
    rows = data.split(b"\n")
    for line in read_lines(io.BytesIO(data)):
        if line.error is not None:
            raise ValueError(line.error.message)
        body = json.loads(rows[line.number - 1])["body"]
        found.append((str(line.url).removeprefix("/v1"), body))
    return found


def report(trial: Trial, other: str) -> list[str]:
    """The output: a table of 80 columns, then the verdict."""
    figures: list[tuple[str, Callable[[Round], float], float]] = [
        ("tokens/s", lambda r: r.rate, 1.0),
        ("first token, ms", lambda r: r.first, 1e3),
        ("a token after it, ms", lambda r: r.between, 1e3),
    ]
    rows: list[tuple[str, ...]] = [("median (lowest-highest)", "this deployment", "the other")]
    if not any(reply.error for found in (*trial.ours, *trial.theirs) for reply in found.replies):
        for name, figure, unit in figures:
            both = [Spread.of([figure(r) * unit for r in rounds]) for rounds in (trial.ours, trial.theirs)]
            rows.append((name, *map(_shown, both)))
        rates = [Spread.of([r.rate for r in rounds]) for rounds in (trial.ours, trial.theirs)]
        if trial.prices is not None:
            costs = [cost(rate, price) for rate, price in zip(rates, trial.prices, strict=True)]
            rows.append(("cost of a million tokens", *(f"{value:,.2f}" for value in costs)))
        rows.append(("answers that are the same", f"{trial.same_text:.0%}", ""))
    lines = [f"{name:<27}{mine:<27}{its}".rstrip() for name, mine, its in rows]
    said = (click.wrap_text(line, 80, subsequent_indent="  ") for line in verdict(trial, other))
    return [*lines, "", *said]


def _shown(spread: Spread) -> str:
    middle, low, high = (f"{v:,.0f}" if v >= 1000 else f"{v:.1f}" for v in (spread.middle, spread.low, spread.high))
    return f"{middle} ({low}-{high})"
