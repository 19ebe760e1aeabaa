"""One process that renders chat templates and tokenises, for engine/text_pool.py: frames in, frames out, nothing else.

A frame is a 4-byte little-endian length and that much JSON. The process bounds itself (address space, processor time
an item, end of its input), so that it dies alone whatever a template or a text makes it do.
"""

from __future__ import annotations

import json
import os
import resource
import signal
import struct
import sys
from pathlib import Path
from typing import Any, BinaryIO

from .chat import TemplateError
from .text import ChatOptions, TextError, TextModel

MAX_FRAME = 1 << 28
_LENGTH = struct.Struct("<I")


def read_frame(stream: BinaryIO) -> Any:
    """The next frame's value, or None at the end. Raises ValueError on a length beyond MAX_FRAME."""
    head = stream.read(_LENGTH.size)
    if len(head) < _LENGTH.size:
        return None
    (length,) = _LENGTH.unpack(head)
    if length > MAX_FRAME:
        raise ValueError(f"text worker: a frame of {length} bytes; at most {MAX_FRAME}")
    body = stream.read(length)
    return json.loads(body) if len(body) == length else None


def frame(value: Any) -> bytes:
    """One value as a frame."""
    body = json.dumps(value, ensure_ascii=False, separators=(",", ":")).encode()
    return _LENGTH.pack(len(body)) + body


def answer(model: TextModel, item: dict[str, Any], max_ids: int) -> dict[str, Any]:
    """{"ids"} (none for a grammar that can be used), {"long": how many there are} or {"error", "code"} for one item."""
    try:
        if "grammar" in item:
            from .grammar import validate  # numpy and llguidance: only where someone asks for structured output

            validate(item["grammar"])
            ids: list[int] = []
        elif "messages" in item:
            ids = model.encode_chat(item["messages"], ChatOptions(**item["options"]))
        else:
            ids = model.encode(item["text"], item["add_special_tokens"])
    except TemplateError as error:
        return {"error": str(error), "code": "chat_template_error"}
    except ValueError as error:
        return {"error": str(error), "code": "invalid_grammar"}
    except MemoryError:
        return {"error": "the prompt needs more memory than a text worker may have", "code": "prompt_too_costly"}
    return {"ids": ids} if len(ids) <= max_ids else {"long": len(ids)}


def main(settings: dict[str, Any]) -> int:
    resource.setrlimit(resource.RLIMIT_AS, (settings["memory_bytes"],) * 2)
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    os.environ["TOKENIZERS_PARALLELISM"] = "false"  # one worker, one core
    signal.signal(signal.SIGPROF, signal.SIG_DFL)  # the timer ends this process, even inside native code
    out = sys.stdout.buffer
    try:
        model = TextModel.from_folder(Path(settings["folder"]))
    except TextError as error:
        out.write(frame({"failed": str(error)}))
        out.flush()
        return 1
    out.write(frame({"ready": True}))
    out.flush()
    while (items := read_frame(sys.stdin.buffer)) is not None:
        for item in items:
            signal.setitimer(signal.ITIMER_PROF, settings["cpu_seconds"])
            reply = frame(answer(model, item, settings["max_ids"]))
            signal.setitimer(signal.ITIMER_PROF, 0)
            out.write(reply)
            out.flush()
    return 0


if __name__ == "__main__":
    sys.exit(main(json.loads(sys.argv[1])))
