"""`laddertron acceptance`: one page about machines that have arrived, by the commands that measure them."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import tempfile
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import click

from ....engine import child
from ....engine.config.load import Deployment
from ....launchers.cli.batch_client import ApiError, BatchClient
from ....launchers.cli.commands.check import read_model
from ....launchers.cli.errors import FAILED, OK, check_output, show_error, show_warning
from ....launchers.cli.fabric_source import faults_of, set_option
from ....launchers.compose.mpi import WORKER
from ....launchers.control.processes import descendants, ended_by_term, kill, words_of
from ....launchers.job import supervised_process as kept
from ....topology.json_codec import build, write_file
from ...plan.estimate import CapacityEstimate, make_plan, memory_in
from ...plan.layouts import Work
from ...plan.plan_source import question
from .. import acceptance as pages
from ..bench import Case
from ..bench_measure import check_lengths

LOAD_S = 2.0
"""How long other processes are watched before anything is measured."""
LIMIT_S = 3600.0
"""The longest that one measurement may take."""
STREAM_S = 5.0
"""About how long the stream whose rank is killed would take undisturbed."""
_COUNT = click.IntRange(1, 10**6)


class StepFailed(RuntimeError):
    """A measurement without a result: its last words."""


class Steps:
    """Runs commands of laddertron about one deployment; when a step ends, none of its processes is left."""

    def __init__(self, config: str, overrides: Sequence[str], folder: Path) -> None:
        self._config, self._folder = config, folder
        self._sets = [word for override in overrides for word in ("--set", override)]

    @contextmanager
    def started(self, name: str, *words: str) -> Iterator[subprocess.Popen[str]]:
        argv = child.laddertron(*words, *self._sets, self._config)
        click.echo(f"{name} …", err=True)
        with (self._folder / f"{name}.out").open("w") as out, (self._folder / f"{name}.err").open("w") as err:
            process = kept.start(argv, {}, stdout=out, stderr=err)
            try:
                yield process
            finally:
                kept.end(process)

    def run(self, name: str, *words: str, codes: Sequence[int] = (OK,)) -> tuple[int, str]:
        """Exit code and output. Raises StepFailed for another code than `codes`, or past the time limit."""
        with self.started(name, *words) as process:
            try:
                code = process.wait(LIMIT_S)
            except subprocess.TimeoutExpired:
                raise StepFailed(f"{name}: no end within {LIMIT_S:g} s") from None
        if code not in codes:
            raise StepFailed(f"{name}: {self.last_words(name) or f'exit code {code}'}")
        return code, (self._folder / f"{name}.out").read_text()

    def last_words(self, name: str) -> str:
        """The first error that the step reported, else its last line."""
        lines = [line.strip() for line in (self._folder / f"{name}.err").read_text().splitlines() if line.strip()]
        errors = [line.removeprefix("error: ") for line in lines if line.startswith("error: ")]
        return (errors or lines[-1:] or [""])[0]

    def wait(self, process: subprocess.Popen[str], name: str, what: str, condition: Callable[[], bool]) -> None:
        """Asks twenty times a second. Raises StepFailed."""
        deadline = time.monotonic() + LIMIT_S
        while not condition():
            if process.poll() is not None:
                raise StepFailed(f"{name}: {self.last_words(name) or f'exit code {process.returncode}'}")
            if time.monotonic() > deadline:
                raise StepFailed(f"{name}: no {what} within {LIMIT_S:g} s")
            time.sleep(0.05)


def busy_share(seconds: float) -> float:
    """The share of this host's processors in use during the next `seconds`."""

    def ticks() -> tuple[int, int]:
        user, nice, system, idle, iowait, *rest = map(int, Path("/proc/stat").read_text().split("\n")[0].split()[1:9])
        return idle + iowait, user + nice + system + idle + iowait + sum(rest)

    before = ticks()
    time.sleep(seconds)
    idle, total = (now - then for now, then in zip(ticks(), before, strict=True))
    return 1.0 - idle / max(1, total)


class _StreamReader(threading.Thread):
    """Reads one streamed completion: when each event came, its text, and whether it came to its end."""

    def __init__(self, client: BatchClient, model: str, tokens: int) -> None:
        super().__init__(daemon=True)
        self._client = client
        self._body = {
            "model": model, "prompt": [5, 6, 7, 8], "max_tokens": tokens, "seed": 1, "temperature": 0,
            "ignore_eos": True,
        }  # fmt: skip
        self.times: list[float] = []
        self.text, self.end = "", ""
        self.start()

    def run(self) -> None:
        try:
            for event in self._client.stream("/completions", self._body):
                self.times.append(time.monotonic())
                for choice in event.get("choices", ()):
                    self.text += choice.get("text") or ""
                    self.end = choice.get("finish_reason") or self.end
        except ApiError as error:
            self.end = str(error)


class Served:
    """The deployment's daemon with a store of its own, on loopback, for as long as a context lasts."""

    def __init__(self, steps: Steps, deployment: Deployment, folder: Path) -> None:
        self._steps, self._deployment = steps, deployment
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            self._port = int(probe.getsockname()[1])
        own = {
            "host": "127.0.0.1", "port": self._port, "data_dir": folder / "data", "export_dir": "null",
            "api_key_file": "null", "tls_cert": "null", "tls_key": "null", "drain_timeout": 0,
            "limits.min_free_disk": 0,
        }  # fmt: skip
        keys = [*(f"daemon.{key}={value}" for key, value in own.items()), "metrics.port=null"]
        self.sets = tuple(word for key in keys for word in ("--set", key))

    @contextmanager
    def started(self) -> Iterator[None]:
        began = time.monotonic()
        with self._steps.started("serve", "serve", *self.sets) as self._process:
            self._wait("ready daemon", self._ready)
            self.start_s = time.monotonic() - began
            yield

    def _wait(self, what: str, condition: Callable[[], bool]) -> None:
        self._steps.wait(self._process, "serve", what, condition)

    def _readiness(self) -> dict[str, Any]:
        """The body of /ready; {} while the daemon does not answer."""
        try:
            with urllib.request.urlopen(f"http://127.0.0.1:{self._port}/ready", timeout=5) as answer:
                body: dict[str, Any] = json.load(answer)
        except urllib.error.HTTPError as error:
            body = json.load(error)
        except OSError:
            return {}
        return body

    def _ready(self) -> bool:
        readiness = self._readiness()
        standby = "ready" if self._deployment.daemon.standby else "none"
        return readiness.get("status") == "ready" and all(one["standby"] == standby for one in readiness["replicas"])

    def kill_a_rank(self, tokens: int) -> pages.Recovery:
        """Kills one that runs on this host while a stream of so many tokens is open. Raises StepFailed."""
        client = BatchClient(f"http://127.0.0.1:{self._port}/v1", timeout=LIMIT_S)
        name = self._deployment.served_model_name
        undisturbed = _StreamReader(client, name, tokens)
        self._wait("undisturbed stream", lambda: not undisturbed.is_alive())
        stream = _StreamReader(client, name, tokens)
        self._wait("stream", lambda: len(stream.times) > 2 or not stream.is_alive())
        flags = list(child.command(WORKER)[1:])
        ranks = [p for p in descendants(self._process.pid) if words_of(p.pid)[1 : 1 + len(flags)] == flags]
        if not ranks:
            raise StepFailed("serve: no rank runs on this host: run acceptance on one of the deployment's hosts")
        killed, reason = time.monotonic(), ""
        kill(min(ranks, key=lambda rank: rank.started))

        def noticed() -> bool:
            nonlocal reason
            failed = [one["reason"] for one in self._readiness().get("replicas", ()) if one["restarts"]]
            reason = reason or "".join(failed[:1])
            return bool(failed) or not stream.is_alive()

        self._wait("restart", noticed)
        seen = len(stream.times)
        self._wait("token after the restart", lambda: len(stream.times) > seen or not stream.is_alive())
        if len(stream.times) == seen:
            raise StepFailed(f"serve: the stream ended at the kill of a rank: {stream.end}")
        self._wait("end of the stream", lambda: not stream.is_alive())
        return pages.Recovery(
            self.start_s, stream.times[seen] - killed, reason, stream.end == "length", stream.text == undisturbed.text
        )


@click.command(context_settings={"help_option_names": ["-h", "--help"]})
@click.argument("config", type=click.Path())
@click.option("-o", "--output", type=click.Path(dir_okay=False, path_type=Path), help="The page.  [default: stdout]")
@click.option("--prompt", default=512, show_default=True, type=_COUNT, help="Tokens of a prompt.")
@click.option("--generate", default=64, show_default=True, type=click.IntRange(2, 10**6), help="New tokens.")
@click.option("--repeats", default=3, show_default=True, type=click.IntRange(1, 1000), help="Runs of each batch size.")
@click.option("--cases", default=20, show_default=True, type=_COUNT, help="Random mixes of `verify`.")
@set_option
def command(
    config: str, output: Path | None, prompt: int, generate: int, repeats: int, cases: int, overrides: tuple[str, ...]
) -> int:  # fmt: skip
    """Measure a deployment's machines before they serve: one Markdown page, predictions and measurements.

    Runs `preflight`, `bench` at four batch sizes and `verify`; starts the daemon with an empty store,
    kills a rank and times the next token. Run it on one of CONFIG's hosts, all of them idle.

    \b
      laddertron acceptance deploy.yaml -o acceptance.md

    Exit codes: 0 every bound of CONFIG's `acceptance` section is met; 1 one is not, or could not be measured; 2 the
    command line or CONFIG is wrong."""
    deployment = read_model(config, overrides)
    check_lengths(deployment, [Case(1, prompt, generate)])
    if output is not None:
        check_output(output, "--output")
    plan = _predict(config, deployment, overrides, prompt, generate)
    limits, parts, when = deployment.acceptance, list[pages.Part](), datetime.now(UTC)
    load = busy_share(LOAD_S)
    parts.append(pages.load_part(load, limits))
    with ended_by_term(), tempfile.TemporaryDirectory(prefix="laddertron-acceptance-") as name:
        steps = Steps(os.path.abspath(config), overrides, Path(name))
        asked = Asked(prompt, generate, repeats, cases)
        try:
            parts += measure(steps, deployment, plan, asked)
        except StepFailed as error:
            step, _, reason = str(error).partition(": ")
            parts.append(pages.failed_part(step, reason))
            show_error(str(error))
    busy = load > limits.max_load
    where = f"{when:%Y-%m-%d %H:%M} UTC, from {socket.gethostname()}"
    text, accepted = pages.page(f"{deployment.served_model_name}", where, parts, busy)
    if output is None:
        click.echo(text, nl=False)
    else:
        write_file(output.absolute(), text)
        click.echo(f"{pages.verdict(parts)} Measurements and demands: {output}")
    if busy:
        show_warning(f"other processes use {load:.0%} of this machine's processors: {pages.NOT_KEPT}")
    return OK if accepted else FAILED


@dataclass(frozen=True, slots=True)
class Asked:
    """The workload of the command line."""

    prompt: int
    generate: int
    repeats: int
    cases: int


def _predict(
    config: str, deployment: Deployment, overrides: Sequence[str], prompt: int, generate: int
) -> CapacityEstimate:
    """The plan at four batch sizes up to what the deployment admits and its KV cache has room for."""
    with faults_of(config, "parallel: "):
        asked = question(config, None, None, Work(prompt, generate), overrides=overrides)
        most = min(deployment.engine.max_num_seqs, memory_in(asked).sequences(prompt + generate))
        return make_plan(replace(asked, work=replace(asked.work, batches=pages.batches(max(1, most)))))


def measure(steps: Steps, deployment: Deployment, plan: CapacityEstimate, asked: Asked) -> Iterator[pages.Part]:
    """Each part as soon as it is measured. Raises StepFailed."""
    from ....launchers.measure.preflight import PreflightOutcome  # with torch

    limits, work = deployment.acceptance, plan.question.work
    _, out = steps.run("preflight", "preflight", "--json", codes=(OK, FAILED))
    if not out.startswith("{"):
        raise StepFailed(f"preflight: {steps.last_words('preflight')}")
    outcome = build(PreflightOutcome, json.loads(out))
    yield pages.environment_part(outcome)
    yield pages.fabric_part(outcome)
    sizes = ("--prompt", str(work.prompt), "--generate", str(work.output))
    batch = ("--batch", ",".join(map(str, work.batches)), "--repeats", str(asked.repeats))
    rows = json.loads(steps.run("bench", "bench", "sweep", *sizes, *batch, "--json", "-")[1])
    yield pages.memory_part(rows, plan)
    yield pages.speed_part(rows, plan, limits)
    code, out = steps.run("verify", "verify", "--cases", str(asked.cases), codes=(OK, FAILED))
    yield pages.text_part("verify", out, code == OK if deployment.parallel.deterministic else None)
    with tempfile.TemporaryDirectory(prefix="laddertron-acceptance-") as folder:
        served = Served(steps, deployment, Path(folder))
        with served.started():
            most = (deployment.model.max_model_len or plan.question.config.max_position_embeddings) // 2
            tokens = max(16, min(most, round(STREAM_S * rows[0]["decode_tok_s"][0])))
            yield pages.recovery_part(served.kill_a_rank(tokens), limits)
