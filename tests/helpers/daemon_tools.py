"""A whole daemon in this process, for tests: real store, real uvicorn on loopback, a fake engine."""

from __future__ import annotations

import asyncio
import contextlib
import json
import socket
import threading
from collections.abc import Callable, Coroutine, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from fake_job import FakeJob, FakeSequence
from laddertron.engine.config.schema import DaemonConfig as DaemonConfig
from laddertron.engine.config.schema import Deployment, LimitsConfig, ModelSection
from laddertron.engine.daemon.http.server import listen
from laddertron.engine.daemon.keys import KeyRing
from laddertron.engine.daemon.service import Daemon, Parts
from laddertron.engine.daemon.store.store import StoreOptions
from laddertron.engine.job import Culprit, JobState
from laddertron.engine.metrics.observer import Observer
from laddertron.engine.request import ModelLimits
from laddertron.engine.text.tokenizer import TextModel
from openai import OpenAI
from waiting import HANG_S, until

LIMITS = ModelLimits(max_model_len=512, vocab_size=300, max_num_seqs=8, kv_tokens=1 << 16)
NAME = "tiny"


def deployment(folder: Path, limits: LimitsConfig | None = None, **daemon: Any) -> Deployment:
    kept = replace(limits or LimitsConfig(), min_free_disk=0)
    settings = DaemonConfig(data_dir=str(folder / "data"), limits=kept, drain_timeout=HANG_S)
    return Deployment(ModelSection(str(folder), served_model_name=NAME), daemon=replace(settings, **daemon))


class Served:
    """A running daemon. `jobs` are its fake engines; `on_loop` runs a coroutine, or a function, where it lives: on
    `loop`."""

    def __init__(
        self,
        config: Deployment,
        text_folder: Path,
        make_jobs: Callable[[], Sequence[Any]] = lambda: [FakeJob(LIMITS)],
        store: StoreOptions | None = None,
        keys: Path | None = None,
        observer: Observer | None = None,
        probes: bool = False,
        model: str = "a model",
    ) -> None:
        self.config, self._text_folder, self._make_jobs = config, text_folder, make_jobs
        self._store, self._keys, self._observer = store or StoreOptions(), keys, observer or Observer()
        self.model = model
        self.jobs: Sequence[Any] = ()
        self.daemon: Daemon
        self.code: int | None = None
        self.error: BaseException | None = None
        self.loop = asyncio.new_event_loop()
        self._up = threading.Event()
        self._listener = listen("127.0.0.1", 0)
        self.port: int = self._listener.getsockname()[1]
        self._probes = listen("127.0.0.1", 0) if probes else None
        self.probe_port: int = 0 if self._probes is None else self._probes.getsockname()[1]
        self.url = f"http://127.0.0.1:{self.port}"
        self._thread = threading.Thread(target=self._run)
        self._thread.start()
        assert self._up.wait(HANG_S)
        self._raise_fault()

    def _raise_fault(self) -> None:
        if self.error is not None:
            self._thread.join()
            raise self.error

    def _run(self) -> None:
        asyncio.set_event_loop(self.loop)
        try:
            self.code = self.loop.run_until_complete(self._main())
        except BaseException as error:
            self.error = error
        finally:
            self._listener.close()
            if self._probes is not None:
                self._probes.close()
            self.loop.close()
            self._up.set()

    async def _main(self) -> int:
        self.jobs = self._make_jobs()
        ring = None if self._keys is None else KeyRing(self._keys)
        text = TextModel.from_folder(self._text_folder)
        self.daemon = Daemon(
            self.config,
            Parts(self.jobs, text, self._text_folder, "0", self._observer, self._store, ring, lambda: self.model),
        )
        running = asyncio.ensure_future(self.daemon.run(self._listener, self._probes))
        started = asyncio.ensure_future(self.daemon.started.wait())
        await asyncio.wait({running, started}, return_when=asyncio.FIRST_COMPLETED)
        started.cancel()
        if not running.done():
            self._up.set()
        return await running

    def on_loop(self, what: Coroutine[Any, Any, Any] | Callable[[], Any]) -> Any:
        async def call() -> Any:
            return what() if callable(what) else await what

        return asyncio.run_coroutine_threadsafe(call(), self.loop).result(HANG_S)

    def client(self, key: str = "none", **options: Any) -> OpenAI:
        return OpenAI(base_url=f"{self.url}/v1", api_key=key, **{"max_retries": 0, "timeout": HANG_S, **options})

    def raw(self, data: bytes, port: int = 0) -> bytes:
        """Sends bytes, returns what comes until the connection is closed."""
        with socket.create_connection(("127.0.0.1", port or self.port), timeout=HANG_S) as connection:
            connection.sendall(data)
            out = b""
            with contextlib.suppress(ConnectionError):
                while part := connection.recv(65536):
                    out += part
            return out

    def stop(self) -> int | None:
        """Drains; the exit code."""
        with contextlib.suppress(RuntimeError):
            self.loop.call_soon_threadsafe(self.daemon.stop)
        return self.join()

    def join(self) -> int | None:
        self._thread.join(HANG_S)
        assert not self._thread.is_alive(), "the daemon does not end"
        self._raise_fault()
        return self.code


def read_keys_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Makes every look at a ring of keys read its file first, as the daemon does each second."""
    for name in ("holder", "limits_of", "works", "revoked"):
        method = getattr(KeyRing, name)

        def fresh(self: KeyRing, *arguments: Any, method: Any = method) -> Any:
            self.refresh()
            return method(self, *arguments)

        monkeypatch.setattr(KeyRing, name, fresh)


@contextlib.contextmanager
def served(*arguments: Any, **options: Any) -> Iterator[Served]:
    daemon = Served(*arguments, **options)
    try:
        yield daemon
    finally:
        daemon.stop()


def line(name: str, prompt: Any = "hello", **body: Any) -> bytes:
    body = {"model": NAME, "prompt": prompt, "max_tokens": 8, "ignore_eos": True, **body}
    value = {"custom_id": name, "method": "POST", "url": "/v1/completions", "body": body}
    return json.dumps(value).encode() + b"\n"


def wait_batch(client: OpenAI, batch_id: str) -> Any:
    """The batch once it has ended."""
    batch: Any = None

    def ended() -> bool:
        nonlocal batch
        batch = client.batches.retrieve(batch_id)
        return batch.status in ("completed", "failed", "expired", "cancelled")

    until(ended, lambda: str(batch), 0.02)
    return batch


def submit(client: OpenAI, data: bytes, **options: Any) -> Any:
    """Uploads lines and starts a batch over them."""
    file = client.files.create(file=("in.jsonl", data), purpose="batch")
    return client.batches.create(
        input_file_id=file.id, **{"endpoint": "/v1/completions", "completion_window": "24h", **options}
    )


def lines_of(client: OpenAI, file_id: str | None) -> dict[str, Any]:
    """A batch's file by custom_id."""
    if file_id is None:
        return {}
    found = [json.loads(raw) for raw in client.files.content(file_id).read().splitlines()]
    by_name = {entry["custom_id"]: entry for entry in found}
    assert len(by_name) == len(found), "a line stands twice"
    return by_name


class MortalJob(FakeJob):
    """A FakeJob that dies and comes back as a real one does: restarting (with the rank to blame), what was in flight
    lost (the latest to enter the step first), ready again. `poison`: a first prompt id whose step kills rank 1, once it
    has `poison_after` tokens; `company`: how many were in the step at each death; `most`: the failure in a row, without
    a token between, that is final. `pause_at`: the step after which it holds."""

    def __init__(
        self, limits: ModelLimits, poison: int | None = None, most: int = 4, poison_after: int = 0, **options: Any
    ) -> None:
        super().__init__(limits, **options)
        self.poison, self.most, self.poison_after = poison, most, poison_after
        self.company: list[int] = []
        self.deaths = self.in_a_row = 0
        self.pause_at: int | None = None

    def die(self, rank: int | None = 1, reason: str = "rank 1 on node-b was killed") -> None:
        self.company.append(self._report_step())
        self.deaths += 1
        self.in_a_row += 1
        assert self.listener is not None
        restarts = self.state.restarts + 1
        self.state = JobState(
            "restarting", reason, restarts, self.limits, Culprit(rank, None if rank is None else "node-b")
        )
        self.listener.on_state(self.state)
        self.listener.on_lost(self.launch, reason, by_request=rank is not None)
        if self.in_a_row >= self.most:
            reason = f"{self.in_a_row} failures in a row without progress, the last: {reason}"
            self.state = JobState("failed", reason, restarts, self.limits, Culprit(rank, "node-b"))
        else:
            self.state = JobState("ready", "", restarts, self.limits)
        self.listener.on_state(self.state)

    def step(self) -> None:
        running = self.sequences[: self.limits.max_num_seqs]
        if self.poison is not None and any(
            s.request.prompt[0] == self.poison and len(s.out) >= self.poison_after for s in running
        ):
            self.die()
            return
        super().step()
        if running:
            self.in_a_row = 0
        if self.steps == self.pause_at:
            self.hold()


class OneTokenJob(MortalJob):
    """Answers with one token again and again. Tokens of the hash may be parts of a character, which have no text."""

    def __init__(self, limits: ModelLimits, token: int) -> None:
        super().__init__(limits)
        self._only = token

    def _token(self, sequence: FakeSequence) -> int:
        return self._only
