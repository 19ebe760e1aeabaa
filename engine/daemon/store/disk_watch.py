"""Names a disk that does not answer: each call on a file that the daemon makes is registered while it runs, on threads
other than the event loop's, so that the loop always turns and can read what is overdue.
"""

from __future__ import annotations

import contextlib
import os
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

from .disk import Files, mount_of

STALL_SECONDS = 5.0
"""A call that has not returned for so long means that the disk does not answer."""
_JOB_FACTOR = 4.0


@dataclass(frozen=True, slots=True)
class _Call:
    where: Path | int  # a path, or an open descriptor
    began: float
    seconds: float


class DiskWatch:
    """The calls that have not returned, one per thread. Thread-safe."""

    def __init__(
        self,
        seconds: float = STALL_SECONDS,
        monotonic: Callable[[], float] = time.monotonic,
        wall: Callable[[], float] = time.time,
    ) -> None:
        self.seconds, self._monotonic, self._wall = seconds, monotonic, wall
        self._calls: dict[int, _Call] = {}

    @contextlib.contextmanager
    def call(self, where: Path | int, job: bool = False) -> Iterator[None]:
        """Registers a call of this thread, or a `job` of several calls, which may take longer. An inner call replaces
        the outer one, whose time begins again after it."""
        thread, before = threading.get_ident(), self._calls.get(threading.get_ident())
        self._calls[thread] = _Call(where, self._monotonic(), self.seconds * (_JOB_FACTOR if job else 1.0))
        try:
            yield
        finally:
            if before is None:
                del self._calls[thread]
            else:
                self._calls[thread] = _Call(before.where, self._monotonic(), before.seconds)

    def stalled(self) -> str | None:
        """Names the disk of the oldest overdue call; None if there is none. Makes no call on that disk."""
        now = self._monotonic()
        overdue = [call for call in list(self._calls.values()) if now - call.began >= call.seconds]
        if not overdue:
            return None
        oldest = min(overdue, key=lambda call: call.began)
        since = time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime(round(self._wall() - (now - oldest.began))))
        path = oldest.where if isinstance(oldest.where, Path) else Path(os.readlink(f"/proc/self/fd/{oldest.where}"))
        return f"{_on_disk(path)} does not answer since {since}: check the disk; the daemon resumes when it answers"


def _on_disk(path: Path) -> str:
    mounts = Path("/proc/self/mountinfo").read_text(encoding="utf-8", errors="replace")
    point, kind, device = mount_of(Path(os.path.abspath(path)), mounts)  # NOTE: not resolve, which would ask the disk
    return f"{path} ({device} mounted at {point}, {kind})"


@dataclass(frozen=True, slots=True)
class WatchedFiles:
    """The calls of `files`, registered with `watch`."""

    files: Files
    watch: DiskWatch

    def write(self, descriptor: int, data: memoryview, /) -> int:
        with self.watch.call(descriptor):
            return self.files.write(descriptor, data)

    def fsync(self, descriptor: int, /) -> None:
        with self.watch.call(descriptor):
            self.files.fsync(descriptor)
