"""The diagnostics bundle: an archive of ranks, configuration, this host and the last output, without secrets. Written
when a launch fails (`FailureBundles`), on SIGUSR1, and by `laddertron bundle`.
"""

from __future__ import annotations

import io
import json
import logging
import os
import re
import tarfile
import threading
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

from ... import __version__
from ...engine.config.load import Deployment, to_json
from ...topology.hardware.discover import discover
from ...topology.hardware.fabric import Fabric
from ...topology.hardware.health import port_counters
from ...topology.hardware.sysfs import Sysfs
from ..control.messages import Beat
from .detect import JobFailure, behind

log = logging.getLogger(__name__)

KEPT = 16
"""Automatic bundles in a folder; older ones are deleted."""
MAX_PART = 16 << 20
_SECRET = re.compile(r"key|token|secret|passw|credential|auth", re.IGNORECASE)
_IN_URL = re.compile(r"://[^/@\s:]+:[^/@\s]+@")
_HEADER = re.compile(r"(?i)(bearer\s+|sk-)[A-Za-z0-9._~+/-]{8,}")


def redacted(value: Any, name: str = "") -> Any:
    """Redacts secrets in JSON values, recognised by the name of the key or the form of the text; keeps paths of key
    files."""
    if isinstance(value, Mapping):
        return {key: redacted(item, key) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [redacted(item, name) for item in value]
    if isinstance(value, str):
        if value and _SECRET.search(name) and not name.endswith(("_file", "_cert", "_path", "tls_key")):
            return "(taken out)"
        return _HEADER.sub("(taken out)", _IN_URL.sub("://(taken out)@", value))
    return value


def verdict(failure: JobFailure | None, dumps: Mapping[str, Mapping[str, Any]]) -> str:
    """The archive's first line: the cause according to the supervisor, else to `dumps`, the ranks' dumps by rank."""
    if failure is not None:
        inside = failure.culprit.collective
        where = f" (in {inside})" if inside and inside not in failure.reason else ""
        return f"{failure.kind}: {failure.reason}{where}"
    beats = {
        int(rank): Beat(step=int(dump.get("step", 0)), collective=dump["started"], waiting=dump.get("waiting", ""))
        for rank, dump in dumps.items()
        if isinstance(dump.get("started"), int)
    }
    if not beats:
        return "no rank responded: check the launcher and the nodes first"
    waiting = next((beat.waiting for beat in beats.values() if beat.waiting), "")
    if len(beats) > 1 and (late := behind(beats)) is not None:
        rest = f"; the others wait in {waiting}" if waiting else ""
        return f"rank {late} is behind: step {beats[late].step}, {beats[late].collective} collectives started{rest}"
    return f"all ranks wait in {waiting}: suspect the link between them" if waiting else "no rank is behind the others"


def parts_of(
    deployment: Deployment,
    job: Mapping[str, Any],
    failure: JobFailure | None = None,
    replica: int = 0,
    first_line: str = "",
) -> dict[str, bytes]:
    """The archive's files. `job`: EngineJob.bundle's data or {}; `first_line`: without a job. A failed part
    contains its error."""
    dumps: dict[str, Mapping[str, Any]] = {str(rank): dump for rank, dump in (job.get("dumps") or {}).items()}
    if failure is not None:
        dumps = {str(rank): dump for rank, dump in failure.dumps.items()} | dumps
    out = {"config.json": _json(redacted(to_json(deployment)))}
    if job:
        out["job.json"] = _json(redacted({key: value for key, value in job.items() if key != "dumps"}))
    if failure is not None:
        shown = {"kind": failure.kind, "reason": failure.reason, **asdict(failure.culprit)}
        shown["exit_code"] = failure.exit_code
        out["failure.json"] = _json(redacted(shown))
        out["output.txt"] = redacted("\n".join(failure.output) + "\n").encode()
    for rank, dump in dumps.items():
        stacks = dump.get("stacks", {})
        out[f"ranks/{rank}/stacks.txt"] = "\n".join(f"--- {name}\n{text}" for name, text in stacks.items()).encode()
        out[f"ranks/{rank}/collectives.json"] = _json({k: v for k, v in dump.items() if k != "stacks"})
    seen = os.environ.get("CUDA_VISIBLE_DEVICES")
    out["host/topology.json"] = _tried(lambda: _json(json.loads(Fabric((discover(seen).node,)).to_json())))
    out["host/ports.json"] = _tried(lambda: _json(port_counters(Sysfs())))
    if deployment.engine.device != "cpu":
        for path in nccl_records(os.environ):
            out[f"host/nccl/{path.name}"] = _tried(lambda path=path: path.read_bytes()[:MAX_PART])  # type: ignore[misc]
    return {"README.txt": _readme(first_line or verdict(failure, dumps), replica, job, out).encode()} | out


def nccl_records(environ: Mapping[str, str]) -> list[Path]:
    """Files of NCCL's flight recorder on this host (copied as bytes, never opened)."""
    start = Path(environ.get("TORCH_NCCL_DEBUG_INFO_TEMP_FILE", "/tmp/nccl_trace_rank_"))
    try:
        return sorted(path for path in start.parent.glob(f"{start.name}*") if path.is_file())[:64]
    except OSError:
        return []


def log_tails(folder: Path) -> dict[str, bytes]:
    """The last 256 KiB of each log file of a data folder."""
    out = {}
    for path in sorted((*folder.glob("*.log"), *folder.glob("*.jsonl"))):
        try:
            with path.open("rb") as file:
                file.seek(max(0, path.stat().st_size - (256 << 10)))
                out[f"logs/{path.name}"] = redacted(file.read().decode(errors="replace")).encode()
        except OSError as error:
            out[f"logs/{path.name}"] = f"cannot be read: {error}\n".encode()
    return out


def write_bundle(path: Path, parts: Mapping[str, bytes]) -> Path:
    """Writes a .tar.gz that only its owner can read; README.txt is its first file. Written atomically."""
    path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
    unfinished = path.with_name(f".{path.name}.{os.getpid()}.part")
    descriptor = os.open(unfinished, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
    try:
        with os.fdopen(descriptor, "wb") as file, tarfile.open(fileobj=file, mode="w:gz") as archive:
            for name in sorted(parts, key=lambda name: (name != "README.txt", name)):
                member = tarfile.TarInfo(f"{path.name.removesuffix('.tar.gz')}/{name}")
                member.size, member.mtime, member.mode = len(parts[name]), int(time.time()), 0o600
                archive.addfile(member, io.BytesIO(parts[name]))
        os.replace(unfinished, path)
    except BaseException:
        unfinished.unlink(missing_ok=True)
        raise
    return path


class FailureBundles:
    """Writes a bundle for every failed launch into `folder`, on a thread of its own, and keeps the newest KEPT."""

    def __init__(self, deployment: Deployment, folder: Path, logs: Path | None = None) -> None:
        self._deployment, self._folder, self._logs = deployment, folder, logs
        self._lock = threading.Lock()
        self._written_ns = 0

    def failed(self, replica: int, failure: JobFailure) -> threading.Thread | None:
        """Writes a bundle in the background, for JobHooks.failed. A refusal needs none: its message is complete."""
        if failure.kind == "refused":
            return None
        thread = threading.Thread(target=self.write, args=({}, failure, replica), name="bundle")
        try:
            thread.start()
        except RuntimeError as error:  # a failed diagnosis must not affect serving
            log.warning("no bundle was written: %s", error)
            return None
        return thread

    def write(self, job: Mapping[str, Any], failure: JobFailure | None = None, replica: int = 0) -> Path | None:
        """Writes a bundle and returns its path; None, with a log line, if that fails. Never raises."""
        kind = failure.kind if failure is not None else "asked"
        with self._lock:
            # the time never decreases, so names sort in the order of writing, by which the oldest are deleted
            self._written_ns = max(time.time_ns(), self._written_ns + 1)
            second, fraction = divmod(self._written_ns, 10**9)
            stamp = time.strftime("%Y%m%dT%H%M%SZ", time.gmtime(second))
            name = f"laddertron-{stamp}-{fraction:09d}-{kind}-replica{replica}.tar.gz"
            try:
                parts = parts_of(self._deployment, job, failure, replica)
                parts |= log_tails(self._logs) if self._logs is not None else {}
                path = write_bundle(self._folder / name, parts)
                for old in newest(self._folder)[KEPT:]:
                    old.unlink(missing_ok=True)
            except Exception as error:  # a failed diagnosis must not affect serving
                log.warning("no bundle was written: %s", error)
                return None
        log.warning("bundle written: %s", path, extra={"event": "bundle", "replica": replica})
        return path


def newest(folder: Path) -> list[Path]:
    """The bundles of a folder, newest first."""
    return sorted(folder.glob("laddertron-*.tar.gz"), key=lambda path: path.name, reverse=True)


_PARTS = {
    "config.json": "the deployment, without secrets",
    "failure.json": "what the supervisor reported; output.txt: the last output of launcher and ranks",
    "job.json": "phase, ranks, earlier failures",
    "ranks/": "stacks of every thread, the last collectives (seconds on CLOCK_MONOTONIC), what each waits in",
    "host/": "this machine's topology, RDMA ports' counters, NCCL's flight recorder if there is one",
}


def _readme(first: str, replica: int, job: Mapping[str, Any], parts: Iterable[str]) -> str:
    """The text of README.txt: the cause, earlier failures, and the archive's contents."""
    state, failures = job.get("state") or {}, job.get("failures") or ()
    lines = [first, "", f"laddertron {__version__}, replica {replica}, {time.strftime('%F %T UTC', time.gmtime())}"]
    if state:
        lines.append(
            f"phase {state.get('phase')}, {state.get('restarts', 0)} restarts: {state.get('reason') or 'no fault'}"
        )
    lines += [f"failed before: {one.get('kind')}: {one.get('reason')}" for one in failures]
    names = list(parts)
    lines += [f"{name:<14}{text}" for name, text in _PARTS.items() if any(part.startswith(name) for part in names)]
    text: str = redacted("\n".join((*lines, "logs/         the last lines of log files, if there are any", "")))
    return text


def _json(value: Any) -> bytes:
    return json.dumps(value, indent=1, default=str).encode() + b"\n"


def _tried(make: Callable[[], bytes]) -> bytes:
    try:
        return make()
    except Exception as error:  # the other parts are still written
        return f"not available: {error}\n".encode()
