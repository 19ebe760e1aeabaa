"""Applies a changed deployment file to a running daemon (SIGHUP, `laddertron reload`): checks which keys changed, and
restarts the replicas' ranks one after another.
"""

from __future__ import annotations

import asyncio
import json
import logging
import os
import shlex
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from typing import Literal, TypeVar

from ...engine.config.load import ConfigError, Deployment, LoadedDeployment, read, to_json
from ...engine.daemon.store.disk_watch import DiskWatch
from ...engine.identity import identity_of
from ...engine.text.text_files import text_digest
from ...models.weights.checkpoint import CheckpointError
from ...topology.json_codec import build, write_file
from .replica import Replica, ReplicaSpec

log = logging.getLogger(__name__)

OUTCOME = "reload.json"
"""File in daemon.data_dir with the outcome of the last reload."""
WAITS = "waits"
"""In place of an outcome, while a disk does not answer."""
SERVING = "serving.json"
_MAX_SERVING = 1 << 20
_LOOK_SECONDS = 1.0
_OF_RANKS = ("model", "parallel", "launch", "engine", "acceptance")
_OF_JOBS = ("load_timeout", "heartbeat_timeout", "max_restarts", "control_host", "standby")

Outcome = Literal["done", "refused", "failed"]
T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Serving:
    """The arguments of a daemon's start, with which it reads its configuration again: file, `--set` and working
    directory. Stored in daemon.data_dir, where `laddertron reload` compares them."""

    pid: int
    config: str
    overrides: tuple[str, ...]
    working: str

    def write(self, folder: Path) -> None:
        write_file(folder / SERVING, json.dumps(asdict(self)))

    def read_again(self) -> LoadedDeployment:
        return read(self.config, self.overrides, Path(self.working))

    @property
    def command(self) -> str:
        sets = [word for override in self.overrides for word in ("--set", override)]
        return f"{shlex.join(['laddertron', 'serve', self.config, *sets])} (in {self.working})"


def serving_in(folder: Path, pid: int) -> Serving | None:
    """The arguments of the start of process `pid`; None if it has not written them."""
    try:
        with (folder / SERVING).open("rb") as file:
            serving = build(Serving, json.loads(file.read(_MAX_SERVING)))
    except (OSError, ValueError, RecursionError):
        return None
    return serving if serving.pid == pid else None


def different_keys(old: Deployment, new: Deployment) -> Iterator[str]:
    before, after = to_json(old), to_json(new)
    for section in before:
        yield from (f"{section}.{key}" for key, value in before[section].items() if value != after[section][key])


def unchangeable(old: Deployment, new: Deployment) -> Iterator[tuple[str, str]]:
    """Yields changed keys that cannot change while the daemon runs, each with the reason."""
    for path in different_keys(old, new):
        section, key = path.split(".")
        if section not in _OF_RANKS and key not in _OF_JOBS:
            yield path, "it belongs to the daemon's process: restart `laddertron serve`"
    if old.parallel.replicas != new.parallel.replicas:
        yield "parallel.replicas", "the daemon has as many queues to them: restart `laddertron serve`"
    for name in ("tool_format", "reasoning_format", "allow_special_tokens_in_content"):
        if getattr(old.model, name) != getattr(new.model, name):
            yield f"model.{name}", f"it is {getattr(old.model, name)}: restart `laddertron serve`"
    if old.served_model_name != new.served_model_name:
        text = f"clients ask for {old.served_model_name!r}: set it to that, or restart `laddertron serve`"
        yield "model.served_model_name", text
    longest, length = old.model.max_model_len, new.model.max_model_len
    if longest is not None and (length is None or length > longest):
        yield "model.max_model_len", f"the text workers take up to {longest} tokens: restart `laddertron serve`"


class Reloader:
    """`read` reads the file again, `check` checks its text files (ConfigError). `specs` makes those of a deployment's
    replicas (ValueError, OSError). `on_outcome` is called with every outcome."""

    def __init__(
        self,
        loaded: LoadedDeployment,
        read: Callable[[], LoadedDeployment],
        specs: Callable[[Deployment], Sequence[ReplicaSpec]],
        replicas: Sequence[Replica],
        on_outcome: Callable[[Outcome], None] = lambda outcome: None,
        check: Callable[[LoadedDeployment], object] = lambda loaded: None,
        watch: DiskWatch | None = None,
    ) -> None:
        self._began, self._replicas = loaded.deployment, replicas
        self.deployments = [loaded.deployment] * len(replicas)
        """The deployment of each replica."""
        self._read, self._specs, self._on_outcome, self._check = read, specs, on_outcome, check
        self._watch = watch or DiskWatch()
        self._config = Path(os.path.abspath(loaded.name))
        identity = identity_of(loaded.deployment)
        self._models = [identity.digest] * len(replicas)
        self._text = text_digest(Path(loaded.deployment.text_folder))
        for replica in replicas:
            replica.identity = identity
        self._asked = asyncio.Event()

    def model(self) -> str:
        """The digest of the model that every replica serves; "" while they differ, or one is being replaced."""
        return self._models[0] if len(set(self._models)) == 1 else ""

    def ask(self) -> None:
        """Requests a reload, from a signal handler. It runs after the current one; requests meanwhile are merged."""
        self._asked.set()

    async def run(self) -> None:
        while True:
            await self._asked.wait()
            self._asked.clear()
            log.info("reload: reading the configuration", extra={"event": "reload"})
            began = time.time()
            try:
                outcome, reasons = await self._reload(began)
            except RuntimeError as error:  # no thread: the next request may find one
                outcome, reasons = "failed", [str(error)]
            for reason in reasons:
                log.error("reload: %s: %s", outcome, reason, extra={"event": "reload", "outcome": outcome})
            if outcome == "done":
                log.info("reload: done", extra={"event": "reload", "outcome": outcome})
            await asyncio.to_thread(self._write, began, outcome, reasons)
            self._on_outcome(outcome)

    async def _call(self, began: float, where: Path, work: Callable[[], T]) -> T:
        """Calls `work`, which reads `where`, in a thread; names the disk if it does not answer meanwhile."""

        def watched() -> T:
            with self._watch.call(where, job=True):
                return work()

        task, before = asyncio.ensure_future(asyncio.to_thread(watched)), None
        while not (await asyncio.wait({task}, timeout=_LOOK_SECONDS))[0]:
            if (stall := self._watch.stalled()) is not None and stall != before:
                before = stall
                log.error("reload: %s: %s", WAITS, stall, extra={"event": "reload", "outcome": WAITS})
                await asyncio.to_thread(self._write, began, WAITS, [stall])
        return task.result()

    async def _reload(self, began: float) -> tuple[Outcome, list[str]]:
        try:
            loaded = await self._call(began, self._config, self._read)
            new = loaded.deployment
            text_folder = Path(new.text_folder)
            await self._call(began, text_folder, partial(self._check, loaded))
            problems = [
                loaded.fault(key, f"cannot change by a reload, {why}") for key, why in unchangeable(self._began, new)
            ]
            if await self._call(began, text_folder, partial(text_digest, text_folder)) != self._text:
                key = "model.tokenizer" if new.model.tokenizer else "model.path"
                text = "another tokenizer or chat template, which the text workers hold: restart `laddertron serve`"
                problems.append(loaded.fault(key, f"cannot change by a reload, {text}"))
            if problems:
                return "refused", problems
            model = Path(new.model.path)
            identity = await self._call(began, model, partial(identity_of, new))
            specs = await self._call(began, model, partial(self._specs, new))
        except ConfigError as error:
            return "refused", str(error).splitlines()
        except (ValueError, OSError, CheckpointError) as error:
            return "refused", [str(error)]
        for index, (replica, spec) in enumerate(zip(self._replicas, specs, strict=True)):
            before, self._models[index] = self._models[index], ""
            reason = await replica.replace(replace(spec, identity=identity))
            self._models[index] = identity.digest if reason is None else before
            if reason is not None:
                unchanged = f"replica {index} keeps the old configuration"
                return "failed", [f"{unchanged}{', those before it have the new one' if index else ''}: {reason}"]
            self.deployments[index] = new
        return "done", []

    def _write(self, began: float, outcome: str, reasons: list[str]) -> None:
        path = Path(self._began.daemon.data_dir) / OUTCOME
        value = {"pid": os.getpid(), "began": began, "outcome": outcome, "reasons": reasons}
        try:
            write_file(path, json.dumps(value) + "\n")
        except OSError as error:
            log.warning("reload: %s cannot be written: %s", path, error)
