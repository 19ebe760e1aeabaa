"""Logging: lines of JSON or of text, and an audit file. Both forms show `extra`."""

from __future__ import annotations

import contextlib
import json
import logging
import logging.handlers
import os
import queue
import stat
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, TextIO

from ..job import CULPRIT
from .store.disk_watch import DiskWatch

_FLUSH_SECONDS = 1.0
_OWN = frozenset(vars(logging.makeLogRecord({}))) | {"message", "asctime", "taskName", "color_message"}


def fields_of(record: logging.LogRecord) -> dict[str, Any]:
    """The record's extra fields, as JSON values."""
    return {k: v for k, v in vars(record).items() if k not in _OWN and not k.startswith("_") and v is not None}


class JsonFormatter(logging.Formatter):
    """Formats a line as time (UTC, milliseconds), level, logger, message, then the fields; a traceback is part of the
    line."""

    def format(self, record: logging.LogRecord) -> str:
        stamp = time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime(record.created))
        line: dict[str, Any] = {
            "time": f"{stamp}.{int(record.msecs):03}Z",
            "level": record.levelname.lower(),
            "logger": record.name,
            "message": record.getMessage(),
            **fields_of(record),
        }
        if record.exc_info:
            line["traceback"] = self.formatException(record.exc_info)
        return json.dumps(line, ensure_ascii=False, default=str)


class TextFormatter(logging.Formatter):
    """12:34:56 warning replica=1 key=key_1: the message."""

    def format(self, record: logging.LogRecord) -> str:
        message = "".join(c if c.isprintable() else " " for c in record.getMessage())
        hidden = ("rank", "node") if message.startswith("rank ") else ()  # the message says them
        shown = {k: v for k, v in fields_of(record).items() if k in (*CULPRIT, "replica", "key") and k not in hidden}
        named = "".join(f" {k}={v}" for k, v in shown.items() if v != "")
        stamp = time.strftime("%H:%M:%S", time.localtime(record.created))
        line = f"{stamp} {record.levelname.lower()}{named}: {message}"
        return line + ("\n" + self.formatException(record.exc_info) if record.exc_info else "")


class QueuedHandler(logging.Handler):
    """Writes lines through a bounded queue and a thread, so that a blocked stream or disk delays neither the event loop
    nor the exit of the process. Drops and counts lines if the queue is full. `write` may raise OSError."""

    def __init__(self, write: Callable[[bytes], None], most: int = 8192) -> None:
        super().__init__()
        self.lines: queue.Queue[bytes] = queue.Queue(most)
        self._dropped = 0
        self._write_line = write
        threading.Thread(target=self._write, name="log", daemon=True).start()

    def emit(self, record: logging.LogRecord) -> None:
        try:
            if self._dropped:
                message = f"{self._dropped} log lines were dropped: the log was not read"
                self._put(logging.LogRecord(record.name, logging.WARNING, "", 0, message, (), None))
                self._dropped = 0
            self._put(record)
        except queue.Full:
            self._dropped += 1
        except Exception:
            self.handleError(record)

    def _put(self, record: logging.LogRecord) -> None:
        self.lines.put_nowait(self.format(record).encode("utf-8", "replace") + b"\n")

    def _write(self) -> None:
        while True:
            line = self.lines.get()
            try:
                self._write_line(line)
            except OSError:
                self._dropped += 1
            finally:
                self.lines.task_done()

    def flush(self) -> None:
        until = time.monotonic() + _FLUSH_SECONDS
        while self.lines.unfinished_tasks and time.monotonic() < until:
            time.sleep(0.005)


def to_stream(stream: TextIO, watch: DiskWatch) -> Callable[[bytes], None]:
    """Makes the function that writes to a stream. A file must answer; a pipe or terminal may block for as long as its
    reader likes."""
    descriptor = stream.fileno()  # not the stream: its lock would be asked for at the process's end
    on_disk = stat.S_ISREG(os.fstat(descriptor).st_mode)

    def write(left: bytes) -> None:
        with watch.call(descriptor) if on_disk else contextlib.nullcontext():
            while left:
                left = left[os.write(descriptor, left) :]

    return write


def to_file(path: Path, watch: DiskWatch) -> Callable[[bytes], None]:
    """Makes the function that appends to a file, which may be rotated. Raises OSError."""
    file = logging.handlers.WatchedFileHandler(path, encoding="utf-8")

    def write(line: bytes) -> None:
        with watch.call(path):
            file.reopenIfNeeded()
            if file.stream is not None:
                file.stream.write(line.decode())
                file.stream.flush()

    return write


class Sparse:
    """Limits lines to `most` in `seconds`."""

    def __init__(self, most: int, seconds: float = 60.0, monotonic: Callable[[], float] = time.monotonic) -> None:
        self._most, self._seconds, self._monotonic = most, seconds, monotonic
        self._since, self._said, self._left = monotonic(), 0, 0

    def take(self) -> int | None:
        """The number of lines dropped before this one; None: drop this one, too."""
        if (now := self._monotonic()) - self._since >= self._seconds:
            self._since, self._said = now, 0
        if self._said >= self._most:
            self._left += 1
            return None
        self._said += 1
        left, self._left = self._left, 0
        return left


def set_up(stream: TextIO, level: str, audit_file: Path | None = None, watch: DiskWatch | None = None) -> None:
    """Sets up logging: text on a terminal, else JSON. The audit file may be rotated. `watch` names a disk that does not
    answer."""
    watch = watch or DiskWatch()
    handler = QueuedHandler(to_stream(stream, watch))
    handler.setFormatter(TextFormatter() if stream.isatty() else JsonFormatter())
    logging.basicConfig(level=level.upper(), handlers=[handler], force=True)
    logging.getLogger("uvicorn").setLevel(max(logging.WARNING, logging.getLogger().level))
    logging.getLogger("python_multipart").setLevel(logging.ERROR)  # the refusal of a form gives its reason
    if audit_file is not None:
        audit = logging.getLogger("laddertron.audit")
        for old in list(audit.handlers):
            audit.removeHandler(old)
            old.close()
        file = QueuedHandler(to_file(audit_file, watch))
        file.setFormatter(JsonFormatter())
        audit.addHandler(file)
        audit.setLevel(logging.INFO)
        audit.propagate = False
