"""A process that renders chat templates and tokenizes, for engine/text/pool.py, with limits on its address space and on
CPU time per item. It ends when its socket, the descriptor in its first argument, is closed. A frame is a 4-byte
little-endian length and that many bytes of JSON. An item with `blob` is followed by that many bytes, an answer with
`ids` (the number for each text) by a frame of 32-bit integers, one with `answer` by a frame of bytes for a client.
"""

from __future__ import annotations

import contextlib
import functools
import json
import os
import resource
import signal
import struct
import sys
from array import array
from collections.abc import Callable
from dataclasses import asdict
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO

from .chat_template import TemplateError
from .rank_file import grammar_source
from .text_files import RESTORE, changed_files, text_files
from .tokenizer import ChatOptions, TextError, TextModel

if TYPE_CHECKING:
    from ..sampling.grammar import GrammarSlots

MAX_FRAME = 1 << 28
_LENGTH = struct.Struct("<I")


def read_frame(stream: BinaryIO) -> Any:
    """Reads the next frame's value; None at the end. Raises ValueError for a length beyond MAX_FRAME."""
    head = stream.read(_LENGTH.size)
    if len(head) < _LENGTH.size:
        return None
    (length,) = _LENGTH.unpack(head)
    if length > MAX_FRAME:
        raise ValueError(f"text worker: a frame of {length} bytes; at most {MAX_FRAME}")
    body = stream.read(length)
    return json.loads(body) if len(body) == length else None


def frame(value: Any) -> bytes:
    body = json.dumps(value, ensure_ascii=False, separators=(",", ":")).encode()
    return _LENGTH.pack(len(body)) + body


def answer(model: TextModel, item: dict[str, Any], max_ids: int) -> dict[str, Any]:
    """Answers one item with {"ids": [...]}, for a grammar {"grammar", "unenforced"}, or {"error", "code"}."""
    try:
        if "grammar" in item:
            spec, unenforced = _grammars(model).check(item["grammar"])
            return {"grammar": spec, "unenforced": unenforced}
        if "words" in item:
            return {"ids": model.bad_word_ids(item["words"])}
        max_ids *= item.get("longer", 1)
        text, options = item.get("text", ""), ChatOptions(add_special_tokens=item.get("add_special_tokens", True))
        encode: Callable[[str, bool], list[int]] = model.encode
        if "messages" in item:
            options = ChatOptions(**item["options"])
            text, encode = model.render(item["messages"], options), model.encode_rendered
        count = _least_ids(model, text, max_ids)
        ids = [] if count > max_ids else encode(text, options.add_special_tokens)
    except TemplateError as error:
        return {"error": str(error), "code": "chat_template_error"}
    except ValueError as error:
        return {"error": str(error), "code": "invalid_grammar"}
    except MemoryError:
        return {"error": "the prompt needs more memory than a text worker may have", "code": "prompt_too_costly"}
    count = max(count, len(ids))
    if count <= max_ids:
        return {"ids": [ids]}
    message = f"the prompt has {count} tokens, more than the {max_ids} that are taken here"
    if not ids:
        message = f"the prompt has {len(text)} characters, more than {max_ids} tokens, which is what is taken here"
    return {"error": message, "code": "context_length_exceeded"}


@functools.cache
def _grammars(model: TextModel) -> GrammarSlots:
    """Makes the grammars of the tokenizer. Raises ValueError if the library is missing or cannot read the tokenizer, or
    if the folder changed since the model was read."""
    from ..sampling.grammar import GrammarSlots  # numpy and llguidance: only where one asks for structured output

    grammars = GrammarSlots(grammar_source(model.folder), model.vocab_size, model.eos_ids)
    if changed := changed_files(model.files, text_files(model.folder)):
        raise ValueError(f"{model.folder / changed[0]} changed since this process read it: {RESTORE}")
    return grammars


_PIECE_CHARS, _CUT_IDS = 1 << 14, 64
_USUAL_CHARS = 4  # a token


def _least_ids(model: TextModel, text: str, max_ids: int) -> int:
    """A lower bound of the number of ids of `text`; 0 for a short one. Tokenizes pieces until there are too many, so
    that megabytes of text cost no more than the longest allowed text."""
    count = 0
    if len(text) > _USUAL_CHARS * max_ids:
        for start in range(0, len(text), _PIECE_CHARS):
            ids = model.encode(text[start : start + _PIECE_CHARS], False)
            count += max(0, len(ids) - _CUT_IDS)  # a cut may make a few more than the whole has
            if count > max_ids:
                break
    return count


Answer = Callable[[TextModel, dict[str, Any], int], dict[str, Any]]


def main(argv: list[str], answer: Answer = answer) -> int:
    """argv: the socket's descriptor, and PoolLimits with `folder` as JSON."""
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)  # sent to every process of a service: its owner ends this one
    connection, settings = int(argv[0]), json.loads(argv[1])
    resource.setrlimit(resource.RLIMIT_AS, (settings["memory_bytes"],) * 2)
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    os.environ["TOKENIZERS_PARALLELISM"] = "false"  # one worker, one core
    signal.signal(signal.SIGPROF, signal.SIG_DFL)  # the timer ends this process, even inside native code
    signal.signal(signal.SIGPIPE, signal.SIG_DFL)  # and so does an answer whose reader is gone
    requests, out = os.fdopen(connection, "rb", closefd=False), os.fdopen(connection, "wb", closefd=False)
    try:
        model = TextModel.from_folder(Path(settings["folder"]), settings["special_in_content"])
        signal.setitimer(signal.ITIMER_PROF, settings["cpu_seconds"])
        chat = asdict(model.chat)
        signal.setitimer(signal.ITIMER_PROF, 0)
    except (TextError, TemplateError) as error:
        out.write(frame({"failed": str(error)}))
        out.flush()
        return 1
    out.write(frame({"ready": True, "files": dict(model.files), "chat": chat}))
    out.flush()
    with contextlib.suppress(ConnectionResetError):  # its owner was killed before it had read the last answer
        while (items := read_frame(requests)) is not None:
            for item in items:
                if "blob" in item:
                    item["blob"] = requests.read(item["blob"])
                signal.setitimer(signal.ITIMER_PROF, settings["cpu_seconds"])
                reply = _reply(answer(model, item, settings["max_ids"]))
                signal.setitimer(signal.ITIMER_PROF, 0)
                out.write(reply)
                out.flush()
    return 0


def _reply(value: dict[str, Any]) -> bytes:
    if "answer" in value:
        packed: bytes = value["answer"]
        value = {"answer": None}
    elif "ids" in value:
        ids = value["ids"]
        packed, value = array("I", chain.from_iterable(ids)).tobytes(), {**value, "ids": [len(one) for one in ids]}
    else:
        return frame(value)
    return frame(value) + _LENGTH.pack(len(packed)) + packed


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
