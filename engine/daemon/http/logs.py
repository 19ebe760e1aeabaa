"""Logging: lines of JSON or of text, and an audit file. Both forms show `extra`."""

from __future__ import annotations

import json
import logging
import logging.handlers
import os
import queue
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, TextIO

from ...job import CULPRIT

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
    """Writes lines to a stream through a bounded queue and a thread, so that a blocked stream delays neither the event
    loop nor the exit of the process. Drops and counts lines if the queue is full."""

    def __init__(self, stream: TextIO, most: int = 8192) -> None:
        super().__init__()
        self._lines: queue.Queue[bytes] = queue.Queue(most)
        self._dropped = 0
        self._descriptor = stream.fileno()  # not the stream: its lock would be asked for at the process's end
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
        self._lines.put_nowait(self.format(record).encode("utf-8", "replace") + b"\n")

    def _write(self) -> None:
        while True:
            left = self._lines.get()
            try:
                while left:
                    left = left[os.write(self._descriptor, left) :]
            except OSError:
                self._dropped += 1
            finally:
                self._lines.task_done()

    def flush(self) -> None:
        until = time.monotonic() + _FLUSH_SECONDS
        while self._lines.unfinished_tasks and time.monotonic() < until:
            time.sleep(0.005)


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


def set_up(stream: TextIO, level: str, audit_file: Path | None = None) -> None:
    """Sets up logging: text on a terminal, else JSON. The audit file may be rotated."""
    handler = QueuedHandler(stream)
    handler.setFormatter(TextFormatter() if stream.isatty() else JsonFormatter())
    logging.basicConfig(level=level.upper(), handlers=[handler], force=True)
    logging.getLogger("uvicorn").setLevel(max(logging.WARNING, logging.getLogger().level))
    if audit_file is not None:
        audit = logging.getLogger("laddertron.audit")
        for old in list(audit.handlers):
            audit.removeHandler(old)
            old.close()
        file = logging.handlers.WatchedFileHandler(audit_file, encoding="utf-8")
        file.setFormatter(JsonFormatter())
        audit.addHandler(file)
        audit.setLevel(logging.INFO)
        audit.propagate = False
