"""`laddertron serve`: builds the daemon from configuration, jobs, keys, logs and signals. Errors are detected before
anything is launched. Without torch and MPI.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import signal
import socket
import sys
import time
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import NoReturn

from prometheus_client import CollectorRegistry

from .. import __version__
from ..engine.config.load import ConfigError, Deployment, LoadedDeployment
from ..engine.daemon.http.server import listen
from ..engine.daemon.http.tls import TlsFault, check_pair
from ..engine.daemon.keys import KeyFileError, KeyRing
from ..engine.daemon.logs import set_up
from ..engine.daemon.service import Daemon, Parts, freeze_gc
from ..engine.daemon.store.disk import DiskError, make_folder
from ..engine.daemon.store.disk_watch import DiskWatch
from ..engine.daemon.store.store import StoreOptions
from ..engine.daemon.threads import started_threads
from ..engine.metrics.observer import AnswerTimes, Observer
from ..engine.metrics.otel import TelemetryError, export_histograms, export_spans
from ..engine.text.tokenizer import TextError, TextModel
from ..models.weights.checkpoint import CheckpointError
from .control.first_process import TOGETHER_S, twice_within_s
from .job.bundle import FailureBundles
from .job.detect import JobFailure
from .job.fleet import replica_specs
from .job.reload import SERVING, Reloader, Serving
from .job.replica import Replica, ReplicaSpec

log = logging.getLogger(__name__)

_THREADS = 8  # for calls that block, such as those on disks


class ServeError(RuntimeError):
    """The daemon cannot start: exit code 2, one line."""


def serve(
    loaded: LoadedDeployment,
    text: TextModel,
    serving: Serving,
    observer: Observer | None = None,
    adopt: bool = False,
    check_again: Callable[[LoadedDeployment], object] = lambda loaded: None,
    skip_damaged: bool = False,
) -> int:
    """Runs the daemon to its end; the exit code. `serving`: how a reload reads the deployment again, whose text files
    `check_again` checks. `adopt`, `skip_damaged`: StoreOptions. Raises ServeError, or ConfigError for the files it
    names."""
    deployment = loaded.deployment
    daemon = deployment.daemon
    data_dir = Path(daemon.data_dir)
    if daemon.tls_cert is not None and daemon.tls_key is not None:
        try:
            check_pair(daemon.tls_cert, daemon.tls_key)
        except TlsFault as fault:
            raise ConfigError([loaded.fault(f"daemon.{fault.key}", str(fault))]) from None
    try:
        try:
            make_folder(data_dir)
        except OSError as error:
            raise ServeError(f"daemon.data_dir: {data_dir} cannot be made: {error.strerror}") from error
        watch = DiskWatch()
        set_up(sys.stderr, daemon.log_level, data_dir / "audit.jsonl", watch)
        keys = None if daemon.api_key_file is None else KeyRing(Path(daemon.api_key_file))
        watcher = observer or _observer(deployment)
        in_use = dict[str, int]()

        def specs(changed: Deployment) -> list[ReplicaSpec]:
            return replica_specs(changed, _failure_reporter(watcher, changed), in_use=in_use)

        jobs = [Replica(spec) for spec in specs(deployment)]
    except (OSError, ValueError, KeyFileError) as error:
        raise ServeError(str(error)) from error
    with contextlib.ExitStack() as sockets:
        listener = sockets.enter_context(_listen(daemon.host, daemon.port, "daemon.port"))
        scraped = None
        if (metrics := deployment.metrics).port is not None:
            scraped = sockets.enter_context(_listen(metrics.host, metrics.port, "metrics.port"))
        store = StoreOptions(adopt=adopt, skip_damaged=skip_damaged, watch=watch)
        try:
            reloader = Reloader(loaded, serving.read_again, specs, jobs, watcher.reloaded, check_again)
            parts = Parts(jobs, text, Path(deployment.text_folder), __version__, watcher, store, keys, reloader.model)
            return asyncio.run(_run(deployment, parts, reloader, listener, scraped, serving))
        except (DiskError, TextError, OSError, CheckpointError) as error:
            nameless = isinstance(error, OSError) and error.filename is None
            raise ServeError(f"{data_dir} or its export: {error}" if nameless else str(error)) from error


def _listen(host: str, port: int, key: str) -> socket.socket:
    try:
        listener = listen(host, port)
    except OSError as error:
        raise ServeError(f"{host}:{port} cannot be listened on ({error.strerror}): set {key}") from error
    at = listener.getsockname()[1]
    log.info("listening on %s:%d (%s)", host, at, key, extra={"event": "listening", "port": at})
    return listener


async def _run(
    deployment: Deployment,
    parts: Parts,
    reloader: Reloader,
    listener: socket.socket,
    scraped: socket.socket | None,
    serving: Serving,
) -> int:
    asyncio.get_running_loop().set_default_executor(started_threads(_THREADS, "daemon"))
    daemon = Daemon(deployment, parts)
    asked: list[float] = []

    def stop(number: int) -> None:
        now = time.monotonic()
        if asked and now - asked[0] >= twice_within_s():
            _leave(128 + number)
        if not asked:  # later: once the log says that a second signal ends at once, it does
            asyncio.get_running_loop().call_later(TOGETHER_S, daemon.stop)
        asked.append(now)

    for number in (signal.SIGINT, signal.SIGTERM):
        asyncio.get_running_loop().add_signal_handler(number, stop, number)
    writing: set[asyncio.Task[None]] = set()

    async def write_bundles() -> None:
        for replica, told in enumerate(await daemon.dispatcher.bundle()):
            await asyncio.to_thread(_bundles(reloader.deployments[replica]).write, told, None, replica)

    def asked_for_bundle() -> None:
        task = asyncio.ensure_future(write_bundles())
        writing.add(task)
        task.add_done_callback(writing.discard)

    asyncio.get_running_loop().add_signal_handler(signal.SIGUSR1, asked_for_bundle)
    asyncio.get_running_loop().add_signal_handler(signal.SIGUSR2, reloader.ask)
    if signal.getsignal(signal.SIGHUP) != signal.SIG_IGN:  # as nohup sets it: a terminal that closes asks for nothing
        asyncio.get_running_loop().add_signal_handler(signal.SIGHUP, reloader.ask)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, [signal.SIGHUP])
    beside = [
        asyncio.create_task(freeze_gc(daemon)),
        asyncio.create_task(reloader.run()),
        asyncio.create_task(_say_ready(deployment, daemon, listener, scraped)),
        asyncio.create_task(_say_serving(daemon, Path(deployment.daemon.data_dir), serving)),
    ]
    try:
        return await daemon.run(listener, scraped)
    finally:
        for task in beside:
            task.cancel()


def _leave(code: int) -> NoReturn:
    """Exits at once. Ranks' keepers and clients see it even if a thread stays in a call on a disk that does not answer,
    which the kernel does not interrupt: its descriptors stay open until then, so that pipes and sockets are closed."""
    signal.set_wakeup_fd(-1)  # a further signal finds asyncio's pipe closed
    for name in os.listdir("/proc/self/fd"):
        with contextlib.suppress(OSError):
            if os.readlink(f"/proc/self/fd/{name}").startswith(("socket:", "pipe:")):
                os.close(int(name))
    os._exit(code)


async def _say_serving(daemon: Daemon, folder: Path, serving: Serving) -> None:
    """Writes the start's arguments, once this daemon has locked the folder: another one must not write there."""
    await daemon.started.wait()
    try:
        await asyncio.to_thread(serving.write, folder)
    except OSError as error:
        log.warning("%s/%s cannot be written, and `laddertron reload` is refused: %s", folder, SERVING, error)


async def _say_ready(
    deployment: Deployment, daemon: Daemon, listener: socket.socket, scraped: socket.socket | None
) -> None:
    """Logs one line once every replica is ready: address, model and number of ranks."""
    await daemon.dispatcher.complete.wait()
    pids = daemon.services.observer.pids()
    world, door = deployment.parallel.world, _url(listener, deployment.daemon.tls_cert is not None)
    log.info(
        "ready: %s/v1 serves %s: all %d ranks of %d replica%s%s, metrics at %s/metrics, page at %s/",
        door,
        deployment.served_model_name,
        world.replica_size,
        world.replicas,
        "s" * (world.replicas > 1),
        f" (pids {' '.join(map(str, pids))})" if pids else "",
        door if scraped is None else _url(scraped),
        door,
        extra={"event": "ready", "model": deployment.served_model_name},
    )


def _url(listener: socket.socket, tls: bool = False) -> str:
    host, port = listener.getsockname()[:2]
    return f"http{'s' * tls}://{f'[{host}]' if ':' in host else host}:{port}"


def _observer(deployment: Deployment) -> Observer:
    vllm = (deployment.served_model_name, deployment.engine.block_size) if deployment.metrics.vllm_names else None
    observer = Observer(CollectorRegistry(), _telemetry(deployment), vllm=vllm)
    observer.series.set("build_info", 1.0, __version__, deployment.served_model_name, deployment.model.wiring)
    return observer


def _telemetry(deployment: Deployment) -> Callable[[AnswerTimes], None]:
    """Makes the function that sends every answered body to the deployment's collectors."""
    takers: list[Callable[[AnswerTimes], None]] = []
    for key, export in (("traces_endpoint", export_spans), ("otlp_metrics_endpoint", export_histograms)):
        if (endpoint := getattr(deployment.metrics, key)) is not None:
            try:
                takers.append(export(endpoint, deployment.served_model_name).finished)
            except TelemetryError as error:
                raise ServeError(f"metrics.{key}: {error}") from error

    def finished(times: AnswerTimes) -> None:
        for taker in takers:
            taker(times)

    return finished


def _bundles(deployment: Deployment) -> FailureBundles:
    data_dir = Path(deployment.daemon.data_dir)
    return FailureBundles(deployment, data_dir / "bundles", logs=data_dir)


def _failure_reporter(observer: Observer, deployment: Deployment) -> Callable[[int, JobFailure], None]:
    bundles = _bundles(deployment)

    def tell(replica: int, failure: JobFailure) -> None:
        observer.failure(replica, failure.kind, failure.reason, failure.culprit)
        bundles.failed(replica, failure)
        log_fields = {"event": "failure", "replica": replica, "kind": failure.kind}
        log.error("replica %d: %s", replica, failure.reason, extra={**log_fields, **asdict(failure.culprit)})

    return tell
