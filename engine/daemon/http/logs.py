"""Logging: one JSON object a line for machines, one readable line for a terminal, an audit file; both show `extra`."""

from __future__ import annotations

import json
import logging
import logging.handlers
import time
from pathlib import Path
from typing import Any, TextIO

from ...job import CULPRIT

_OWN = frozenset(vars(logging.makeLogRecord({}))) | {"message", "asctime", "taskName", "color_message"}


def fields_of(record: logging.LogRecord) -> dict[str, Any]:
    """What the caller added, as JSON values."""
    return {k: v for k, v in vars(record).items() if k not in _OWN and not k.startswith("_") and v is not None}


class JsonFormatter(logging.Formatter):
    """time (UTC, milliseconds), level, logger, message, then the fields; a traceback stays within the line."""

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


def set_up(stream: TextIO, form: str, level: str, audit_file: Path | None = None) -> None:
    """`form`: auto (text on a terminal, else json), json, text. The audit file is opened again when it was moved away,
    for logrotate."""
    if form == "auto":
        form = "text" if stream.isatty() else "json"
    handler = logging.StreamHandler(stream)
    handler.setFormatter(JsonFormatter() if form == "json" else TextFormatter())
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
