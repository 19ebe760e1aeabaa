"""Reads the output files of an interrupted `laddertron run`, for `--resume`."""

from __future__ import annotations

import contextlib
import json
import os
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple

from ...topology.json_codec import ReadError, parse
from ..config.schema import Deployment
from ..identity import identity_of
from ..openai.batch_input import key_of, line_digests
from .journal import LineCheck, Mark, mark_of

_LASTING = {"numerical_error", "constraint_error", "quarantined"}  # a second run would only repeat them
_BEGINNING = b'{"id":"batch_req_'
_NAME = re.compile(r"batch_req_([0-9a-f]{14})-([0-9a-f]{10})")
"""An answer's id: digest of its line, digest of its model (`model_digest`)."""
LINE_BYTES = 7
"""Bytes of a line's digest in its answer's id."""


class RunFileError(ValueError):
    """The run cannot use these files; the message names the file and the fix."""


def answer_name(digest: bytes, model: str) -> str:
    """Makes an answer's id from the digests of its line (digest_of) and its model (model_digest)."""
    return f"{digest[:LINE_BYTES].hex()}-{model}"


class Past(NamedTuple):
    """Results of earlier runs: shortened digests of finished lines, error lines to keep, ids of answers whose input
    lines have changed, and marks of the answers that were read. `changed`: the number of changed lines, including those
    with error lines; `damaged`: of answers that do not match the journal."""

    finished: frozenset[bytes] = frozenset()
    errors: tuple[bytes, ...] = ()
    outdated: frozenset[str] = frozenset()
    changed: int = 0
    marks: tuple[Mark, ...] = ()
    damaged: int = 0


def read_past(file: BinaryIO, answers: OpenOutput, errors: OpenOutput, model: str, max_line_bytes: int) -> Past:
    """Reads earlier results; changes the files only to remove a torn last line. Raises RunFileError for answers of
    another model."""
    lines = {digest[:LINE_BYTES] for digest, _, _ in line_digests(file, max_line_bytes)}
    done, current, others, failed = set[bytes](), [], dict[str, bytes](), set[bytes]()
    marks, damaged = list[Mark](), 0
    for number, (line, raw) in enumerate(whole_lines(answers), 1):
        if line is None:
            damaged += 1
            continue
        marks.append(mark_of(raw))
        match = _NAME.fullmatch(str(line.get("id")))
        if match is None or match[2] != model:
            raise RunFileError(f"{answers.path}:{number}: {_another_model(match and match[2], model)}")
        if (digest := bytes.fromhex(match[1])) in lines:
            done.add(digest)
        else:
            others[match[0]] = key_of(str(line["custom_id"]))
    for line, raw in whole_lines(errors):
        if line is None:
            continue
        body, match = (line["response"] or {}).get("body") or {}, _NAME.fullmatch(str(line.get("id")))
        if match is None or match[2] != model or (body.get("error") or {}).get("code") not in _LASTING:
            continue
        if (digest := bytes.fromhex(match[1])) in lines:
            done.add(digest)
            current.append(raw)
        else:
            failed.add(key_of(str(line["custom_id"])))
    keys = failed.union(others.values())
    asked = _keys(file, max_line_bytes, keys) if keys else set()
    file.seek(0)
    # NOTE: an answer whose line is no longer in the input stays: nothing replaces it.
    outdated = frozenset(name for name, key in others.items() if key in asked)
    changed = len(outdated) + len(failed & asked)
    return Past(frozenset(done), tuple(current), outdated, changed, tuple(marks), damaged)


def _another_model(before: str | None, now: str) -> str:
    if before is None:
        return (
            "its id does not say which line and model it is of (an earlier version, or no output of `laddertron run`): "
            "name another output, or replace all with --overwrite"
        )
    return (
        f"was answered by another model (digest {before}, now {now}: its weights, config.json, tokenizer or chat "
        "template, or model.dtype, weights, wiring, ladder_layers, engine.kv_cache_dtype or engine.seed differ): go on "
        "with that one, name another output, or replace all with --overwrite"
    )


def _keys(file: BinaryIO, max_line_bytes: int, requested: set[bytes]) -> set[bytes]:
    """The keys in `requested` (see key_of) of custom_ids that are in the input."""
    file.seek(0)
    present = set()
    for _, _, raw in line_digests(file, max_line_bytes):
        with contextlib.suppress(ReadError):
            value = parse(raw)
            if isinstance(value, dict) and isinstance(name := value.get("custom_id"), str):
                present |= requested & {key_of(name)}
    return present


class OpenOutput(NamedTuple):
    """An output file of an earlier run, open and locked."""

    path: Path
    descriptor: int
    check: LineCheck


def whole_lines(output: OpenOutput) -> Iterator[tuple[dict[str, Any] | None, bytes]]:
    """Yields the lines of an output file in order, None for those that do not match the journal; removes a torn last
    line. Any other invalid line is an error."""
    with output.path.open("rb") as file:
        good = 0
        for number, raw in enumerate(file, 1):
            line = None if output.check.is_damaged(raw) else _read_line(raw)
            if line is None:
                if _torn(raw):
                    os.ftruncate(output.descriptor, good)
                    return
                if not output.check.suspicious:
                    fix = "remove it, or start over with --overwrite"
                    raise RunFileError(f"{output.path}:{number}: not a line of a batch's output: {fix}")
            good += len(raw)
            yield line, raw


def _torn(raw: bytes) -> bool:
    """Whether an invalid line is the beginning of an output line (or zeros, after a crash of the host)."""
    ours = raw.startswith(_BEGINNING) or _BEGINNING.startswith(raw) or not raw.strip(b"\0")
    return ours and not raw.endswith(b"\n")


def _read_line(raw: bytes) -> dict[str, Any] | None:
    """Parses an output line; None if it is not valid."""
    if not raw.endswith(b"\n"):
        return None
    try:
        line = json.loads(raw)
    except (ValueError, RecursionError):
        return None
    if not isinstance(line, dict) or not {"custom_id", "response", "error"} <= line.keys():
        return None
    return line if isinstance(line["response"], dict | None) else None


def model_digest(deployment: Deployment) -> str:
    """The digest of `identity_of`, with which answers are stored. Raises OSError or CheckpointError."""
    return identity_of(deployment).digest
