"""The daemon: runs store, text workers, replicas, batches and HTTP until a signal or a failure."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import logging
import socket
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from pathlib import Path

from starlette.middleware.cors import CORSMiddleware
from starlette.types import ASGIApp

from ..config.rules import is_loopback
from ..config.schema import Deployment
from ..job import EngineJob
from ..metrics.observer import Observer
from ..openai import body_worker
from ..text.pool import PoolLimits, TextPool
from ..text.tokenizer import TextModel
from .batches import Batches
from .core import Core
from .dispatch import Dispatcher
from .http.app import make_app, make_probe_app
from .http.bodies import HeldBodies
from .http.connections import ServerOptions, connections_within
from .http.guard import Guard
from .http.probes import ProbeListener
from .http.reservations import Reservations
from .http.server import make_server
from .http.state import Services
from .keys import NO_LIMITS, KeyLimits, KeyRing
from .retained import RetainedResponses
from .store import records
from .store.disk_watch import WatchedFiles
from .store.open import open_store
from .store.store import Store, StoreOptions, StoreUnavailable
from .usage import Usage

log = logging.getLogger(__name__)

_READABLE = ("retry-after", "x-laddertron-not-enforced", "x-request-id")
"""Headers that a page of another origin may read."""

_WATCH_SECONDS = 1.0
_FAILING_SECONDS = 20.0  # after a failure of the engine, time for the failed batches to get their files


@dataclass(frozen=True, slots=True)
class Parts:
    """The daemon's dependencies. `store`: observers and, in tests, failing disks; `model_digest`: see Core."""

    jobs: Sequence[EngineJob]
    text: TextModel
    text_folder: Path
    version: str
    observer: Observer = field(default_factory=Observer)
    store: StoreOptions = field(default_factory=StoreOptions)
    keys: KeyRing | None = None
    model_digest: Callable[[], str] = lambda: ""


class Daemon:
    """Call `run` once; `stop` may be called at any time, also from a signal handler."""

    def __init__(self, deployment: Deployment, parts: Parts) -> None:
        self._deployment, self.parts = deployment, parts
        self._stop = asyncio.Event()
        self._ended = ""
        self._store: Store | None = None
        self.started = asyncio.Event()
        """Set once HTTP is being served."""
        self.dispatcher = Dispatcher(parts.jobs, parts.observer)
        self.services: Services

    def stop(self) -> None:
        self._stop.set()

    async def run(self, listener: socket.socket, metrics_listener: socket.socket | None = None) -> int:
        """Serves until stopped or failed; returns the exit code: 0 if stopped, 1 if failed. Raises DiskError, TextError
        or OSError if it cannot start."""
        async with contextlib.AsyncExitStack() as stack:
            naming = asyncio.create_task(self._name_stalls())
            stack.callback(naming.cancel)
            store = self._store = await self._open_store()
            stack.push_async_callback(store.close)
            limits = PoolLimits(
                max_ids=self._deployment.model.max_model_len or PoolLimits().max_ids,
                special_in_content=self._deployment.model.allow_special_tokens_in_content,
            )
            pool = TextPool(self.parts.text_folder, limits, body_worker.MODULE, self.parts.text.files)
            await stack.enter_async_context(pool)
            model = self._deployment.model
            self.parts.text.chat = pool.chat.with_formats(model.tool_format, model.reasoning_format)
            keys = self.parts.keys
            usage = Usage(store, self.parts.observer, self._limits_of)
            await usage.load()
            self.services = self._services(store, pool, usage)
            batches = self.services.batches
            await self._name_orphans(store)
            stack.push_async_callback(self._flush, usage)
            stack.push_async_callback(self.dispatcher.close)
            store.on_change = lambda: self._look(store, batches)
            self.dispatcher.on_over = lambda reason: self._fail(reason, batches)
            if self._stop.is_set():
                log.info("stopped before anything was launched", extra={"event": "drain"})
                return 0
            await self.dispatcher.start()
            await batches.start()
            stack.push_async_callback(batches.close)
            daemon = self._deployment.daemon
            options = ServerOptions(
                connections_within(daemon.limits.max_connections),
                daemon.limits.max_connections_per_address,
                daemon.limits.header_timeout,
                daemon.keep_alive,
                daemon.tls_cert,
                daemon.tls_key,
                keyed=keys is not None,
                watch=store.watch,
            )
            version = self.parts.version
            app = make_app(self.services, version, keys, metrics_listener is None, self._local_names(listener))
            served: ASGIApp = app
            if daemon.cors_origins:
                served = CORSMiddleware(app, daemon.cors_origins, ("*",), ("*",), expose_headers=_READABLE)
            server = make_server(served, options)
            serving = asyncio.create_task(server.serve(sockets=[listener]))
            if metrics_listener is not None:
                probes = make_probe_app(self.services, version, keys, self._local_names(metrics_listener))
                stack.push_async_callback(ProbeListener(probes, metrics_listener, options).close)
            watches = [self._watch(store, batches), self._check_disks(store), self._record(store)]
            if keys is not None:
                watches.append(self._watch_keys(app, keys, batches))
            tasks = [serving, *map(asyncio.create_task, watches)]
            try:
                self.started.set()
                stopping = asyncio.create_task(self._stop.wait())
                await asyncio.wait({stopping, *tasks}, return_when=asyncio.FIRST_COMPLETED)
                stopping.cancel()
                for task in tasks:
                    if task.done() and (error := task.exception()) is not None:
                        log.error("internal error of the daemon", exc_info=error)
                        self._ended = self._ended or f"internal error of the daemon: {error!r}"
                await self._wind_down(batches)
            finally:
                for task in tasks[1:]:
                    task.cancel()
                server.should_exit = True
                await asyncio.gather(*tasks, return_exceptions=True)
        return 1 if self._ended else 0

    async def _wind_down(self, batches: Batches) -> None:
        if self._ended:
            log.error("ending: %s", self._ended, extra={"event": "failed"})
            self.dispatcher.end(self._ended)
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(_FAILING_SECONDS):
                    await batches.settled()
            return
        seconds = self._deployment.daemon.drain_timeout
        log.info("draining for up to %g s; a second signal ends at once", seconds, extra={"event": "drain"})
        drained = await self.dispatcher.drain(seconds)
        self.dispatcher.end(f"the daemon is stopping, and daemon.drain_timeout={seconds:g} s is over")
        log.info(
            "drained" if drained else "not all ended in time: batches resume from the store", extra={"event": "drain"}
        )

    def _fail(self, reason: str, batches: Batches) -> None:
        self._ended = reason
        batches.engine_over(reason)
        self._stop.set()

    async def _watch(self, store: Store, batches: Batches) -> None:
        while True:
            self._look(store, batches)
            await asyncio.sleep(_WATCH_SECONDS)

    async def _record(self, store: Store) -> None:
        """Stores usage and counts batches each second; waits while the disk does not answer."""
        while True:
            await self._flush(self.services.usage)
            with contextlib.suppress(StoreUnavailable, OSError):
                counts = await store.read(records.count_batches)
                self.parts.observer.batches(await store.read(records.batch_view))
                self.parts.observer.queues(counts, self.dispatcher.waiting, self.dispatcher.in_flight)
            await asyncio.sleep(_WATCH_SECONDS)

    async def _check_disks(self, store: Store) -> None:
        """Looks at the data folder and at the key file each second; waits while a disk does not answer."""
        keys = self.parts.keys

        def check() -> None:
            store.look()
            if keys is not None:
                with store.watch.call(keys.path):
                    keys.refresh()

        thread = ThreadPoolExecutor(1, "disks")
        try:
            while True:
                await asyncio.get_running_loop().run_in_executor(thread, check)
                await asyncio.sleep(_WATCH_SECONDS)
        finally:
            thread.shutdown(wait=False)

    async def _name_orphans(self, store: Store) -> None:
        if (keys := self.parts.keys) is not None:
            valid = keys.valid_ids()
            ids = await store.read(lambda db: records.orphans(db, valid))
            if any(ids.values()):
                log.warning(
                    "%d files, %d batches and %d stored responses belong to no valid key: a key of the kind admin sees "
                    "files and batches, `laddertron keys adopt` gives all to a key",
                    *(len(ids[table]) for table in ("files", "batches", "responses")),
                    extra={"event": "keys"},
                )

    async def _name_stalls(self) -> None:
        """Refuses writes while a disk does not answer; from before the store is opened until after it is closed."""
        watch, before = self.parts.store.watch, None
        while True:
            if (stall := watch.stalled()) != before:
                (log.info if stall is None else log.error)(stall or "the disk answers again", extra={"event": "disk"})
                if self._store is not None:
                    self._store.stall(stall)
                before = stall
            await asyncio.sleep(watch.seconds / 5)

    @staticmethod
    async def _watch_keys(guard: Guard, keys: KeyRing, batches: Batches) -> None:
        """Ends the requests and batches of revoked keys, within a few seconds."""
        while True:
            guard.end_revoked(keys)
            with contextlib.suppress(StoreUnavailable):
                await batches.cancel_revoked(keys.revoked)
            await asyncio.sleep(_WATCH_SECONDS)

    def _look(self, store: Store, batches: Batches) -> None:
        store.clock.now()
        self.parts.observer.clock(store.clock.jump)
        self.services.samples.take(self.parts.observer.figures, time.monotonic())
        if store.fenced and not self._ended:
            self._ended = store.failure or "another daemon uses the store"
            self._stop.set()
        self.parts.observer.store(store.refusal, store.room)
        least = self._deployment.daemon.limits.min_free_disk
        why = store.refusal or self.services.encoder.failure
        match store.room:
            case str(unknown) if not why:
                why = f"batches pause: {unknown}"
            case (int(free), _) if not why and free < least:
                why = f"batches pause: {free} bytes are free in {store.folder}, limits.min_free_disk={least}"
        if why != batches.gate.why:
            (log.warning if why else log.info)(why or "batches resume", extra={"event": "gate"})
            batches.gate.set(why)

    # the parts

    def _limits_of(self, owner: str) -> KeyLimits:
        """A key's limits. A key without its own may have half of the connections, so that no key takes all."""
        if (keys := self.parts.keys) is None or not owner:
            return NO_LIMITS
        limits, most = keys.limits_of(owner), max(1, self._deployment.daemon.limits.max_connections // 2)
        return limits if limits.concurrent_requests is not None else replace(limits, concurrent_requests=most)

    def _local_names(self, listener: socket.socket) -> tuple[str, ...] | None:
        """The names of this daemon if it has no keys and `listener` is on loopback, else None: any name will do."""
        if self.parts.keys is not None or not is_loopback(listener.getsockname()[0]):
            return None
        return tuple(name.lower() for name in (self._deployment.daemon.host, self._deployment.metrics.host))

    async def _open_store(self) -> Store:
        daemon, given = self._deployment.daemon, self.parts.store
        export = Path(daemon.export_dir) if daemon.export_dir is not None else None
        observer = self.parts.observer
        options = replace(
            given,
            export_dir=export,
            files=WatchedFiles(given.files, given.watch),
            observe_commit=observer.commit,
            observe_error=observer.store_error,
            observe_damage=observer.damage,
        )
        return await open_store(Path(daemon.data_dir), options)

    @staticmethod
    async def _flush(usage: Usage) -> None:
        with contextlib.suppress(StoreUnavailable):
            await usage.flush()

    def _services(self, store: Store, pool: TextPool, usage: Usage) -> Services:
        daemon, parts = self._deployment.daemon, self.parts
        limits, served = daemon.limits, self._deployment.served_model_name
        model = served, self._deployment.batch.deduplicate, parts.model_digest
        retained = None
        if (retention := daemon.responses_retention) is not None:
            most = limits.max_responses_bytes, limits.max_line_bytes
            retained = RetainedResponses(store, usage, parts.observer, retention, *most)
        core = (store, self.dispatcher, parts.text, pool, parts.observer, usage, limits, *model, retained)
        batches = Batches(Core(*core), daemon.retention)
        bodies = HeldBodies(limits.max_held_bytes, limits.max_line_bytes)
        uploads = Reservations(store, usage, limits.min_free_disk)
        return Services(*core, batches, int(time.time()), bodies, uploads)


async def freeze_gc(daemon: Daemon) -> None:
    """Once the daemon listens, exempts all existing objects from garbage collection, which would delay every stream by
    a tenth of a second. Only for a process that runs nothing but this daemon."""
    await daemon.started.wait()
    gc.collect()
    gc.freeze()
