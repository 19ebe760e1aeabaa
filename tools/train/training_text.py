"""Training documents from plain text and JSONL with `text`, or with `messages` through the checkpoint's chat template,
of which only the assistant's turns are trained on.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

from ...engine.text.chat_template import TemplateError
from ...engine.text.tokenizer import ChatOptions, TextModel
from .tokens import Piece

MAX_PIECE = 20_000
"""Characters of a plain text's document: whole paragraphs."""
HELD_OUT_PERCENT = 5


class TrainingTextError(ValueError):
    """A file that is not training text; the message names file and line."""


def files_in(paths: Sequence[Path]) -> list[Path]:
    """The files named, and of folders the *.txt, *.md and *.jsonl, in order. Raises TrainingTextError for none."""
    inside = [f for path in paths for f in (sorted(path.rglob("*")) if path.is_dir() else [path])]
    files = [f for f in inside if f.is_file() and (f in paths or f.suffix in (".txt", ".md", ".jsonl"))]
    if not files:
        raise TrainingTextError(f"{', '.join(map(str, paths))}: no *.txt, *.md or *.jsonl there")
    return files


def digest(files: Iterable[Path]) -> str:
    """SHA-256 over the files' bytes in order: what a run's data is named by."""
    hasher = hashlib.sha256()
    for file in files:
        with file.open("rb") as stream:
            while block := stream.read(1 << 20):
                hasher.update(block)
    return hasher.hexdigest()


def pieces(text: TextModel, files: Iterable[Path], held_out: bool | None = None) -> Iterator[Piece]:
    """Every document's ids. `held_out`: of one text in twenty, by its hash, or of the others alone; None: of all.
    Raises TrainingTextError."""
    for file in files:
        for where, document in read_documents(file):
            written = document if isinstance(document, str) else json.dumps(document, sort_keys=True)
            if held_out is None or is_held_out(written) is held_out:
                try:
                    yield _plain(text, document) if isinstance(document, str) else _chat(text, document)
                except TemplateError as error:
                    raise TrainingTextError(f"{where}: {error}") from error


def hash_of(text: str) -> int:
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "little")


def is_held_out(text: str) -> bool:
    """Whether a document is one of those that are evaluated on: one in twenty."""
    return hash_of(text) % 100 < HELD_OUT_PERCENT


def read_documents(file: Path, most: int = MAX_PIECE) -> Iterator[tuple[str, str | list[dict[str, Any]]]]:
    """Each document with its place: a text, plain ones of at most about `most` characters, or a conversation's
    messages. Raises TrainingTextError."""
    try:
        with file.open(encoding="utf-8") as lines:
            if file.suffix != ".jsonl":
                yield from ((str(file), piece) for piece in _paragraphs(lines, most))
                return
            for number, line in enumerate(lines, 1):
                if line.strip():
                    yield f"{file}, line {number}", _body(f"{file}, line {number}", line)
    except UnicodeDecodeError as error:
        raise TrainingTextError(f"{file}: is not UTF-8: {error}") from error


def _body(where: str, line: str) -> str | list[dict[str, Any]]:
    try:
        data = json.loads(line)
    except ValueError as error:
        raise TrainingTextError(f"{where}: is not JSON: {error}") from error
    match data:
        case {"text": str(text)}:
            return text
        case {"messages": [*messages]} if all(isinstance(m, dict) and isinstance(m.get("role"), str) for m in messages):
            return messages
    raise TrainingTextError(f"{where}: needs `text`, a string, or `messages`, a list of objects with role and content")


def _paragraphs(lines: Iterable[str], most: int) -> Iterator[str]:
    """Whole paragraphs, joined up to `most` characters; one that is longer by itself is cut between lines."""
    piece = ""
    for line in lines:
        if len(piece) + len(line) > most or (not line.strip() and len(piece) > most // 2):
            if piece.strip():
                yield piece.strip("\n")
            piece = ""
        piece += line
    if piece.strip():
        yield piece.strip("\n")


def _plain(text: TextModel, document: str) -> Piece:
    return [*text.encode(document), *text.eos_ids[:1]], None


def _chat(text: TextModel, messages: list[dict[str, Any]]) -> Piece:
    """The whole conversation's ids; taught are those whose characters an assistant's turn adds to the prompt before
    it. Raises TemplateError for a template that does not put turn behind turn."""
    closed = ChatOptions(add_generation_prompt=False)
    rendered = text.render(messages, closed)
    spans = []
    for number, message in enumerate(messages):
        if message["role"] == "assistant":
            before, after = text.render(messages[:number]), text.render(messages[: number + 1], closed)
            if not (rendered.startswith(after) and after.startswith(before)):
                raise TemplateError("the chat template does not put turn behind turn: no way to teach answers alone")
            spans.append((len(before), len(after)))
    encoding = text.tokenizer.encode(rendered, add_special_tokens=False)
    taught = [any(low <= first < high for low, high in spans) for first, _ in encoding.offsets]
    return list(encoding.ids), taught
