"""Reads the output files of an interrupted `laddertron run`, for `--resume`."""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple

from ...models.weights.manifest import sampled_digest
from ...topology.json_codec import ReadError, parse
from ..config.schema import Deployment
from ..openai.batch_input import key_of, line_digests
from ..text.tokenizer import text_digest

_LASTING = {"numerical_error", "constraint_error", "quarantined"}  # a second run would only repeat them
_BEGINNING = b'{"id":"batch_req_'
_NAME = re.compile(r"batch_req_([0-9a-f]{14})-([0-9a-f]{10})")
"""An answer's id: digest of its line, digest of what answered it (`model_digest`)."""
LINE_BYTES = 7
"""Bytes of a line's digest in its answer's id."""


class RunFileError(ValueError):
    """The run cannot use these files; the message names the file and the fix."""


def answer_name(digest: bytes, model: str) -> str:
    """An answer's id: which line (digest_of) and which model (model_digest) it is of."""
    return f"{digest[:LINE_BYTES].hex()}-{model}"


class Past(NamedTuple):
    """Results of earlier runs: shortened digests of finished lines, error lines to keep, and ids of answers whose input
    lines have changed. `changed`: the number of changed lines, including those with error lines."""

    finished: frozenset[bytes] = frozenset()
    errors: tuple[bytes, ...] = ()
    outdated: frozenset[str] = frozenset()
    changed: int = 0


def read_past(
    file: BinaryIO, answers: Path, answers_fd: int, errors: Path, errors_fd: int, model: str, max_line_bytes: int
) -> Past:
    """Changes nothing but torn last lines. Raises RunFileError for answers of another model."""
    lines = {digest[:LINE_BYTES] for digest, _, _ in line_digests(file, max_line_bytes)}
    done, kept, others, failed = set[bytes](), [], dict[str, bytes](), set[bytes]()
    for number, (line, _) in enumerate(whole_lines(answers, answers_fd), 1):
        found = _NAME.fullmatch(str(line.get("id")))
        if found is None or found[2] != model:
            raise RunFileError(f"{answers}:{number}: {_another_model(found and found[2], model)}")
        if (digest := bytes.fromhex(found[1])) in lines:
            done.add(digest)
        else:
            others[found[0]] = key_of(str(line["custom_id"]))
    for line, raw in whole_lines(errors, errors_fd):
        body, found = (line["response"] or {}).get("body") or {}, _NAME.fullmatch(str(line.get("id")))
        if found is None or found[2] != model or (body.get("error") or {}).get("code") not in _LASTING:
            continue
        if (digest := bytes.fromhex(found[1])) in lines:
            done.add(digest)
            kept.append(raw)
        else:
            failed.add(key_of(str(line["custom_id"])))
    wanted = failed.union(others.values())
    asked = _keys(file, max_line_bytes, wanted) if wanted else set()
    file.seek(0)
    # NOTE: an answer whose line is no longer in the input stays: nothing replaces it.
    outdated = frozenset(name for name, key in others.items() if key in asked)
    return Past(frozenset(done), tuple(kept), outdated, len(outdated) + len(failed & asked))


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


def _keys(file: BinaryIO, max_line_bytes: int, wanted: set[bytes]) -> set[bytes]:
    """Those of `wanted` (key_of) that are custom_ids of the input."""
    file.seek(0)
    found = set()
    for _, _, raw in line_digests(file, max_line_bytes):
        with contextlib.suppress(ReadError):
            value = parse(raw)
            if isinstance(value, dict) and isinstance(name := value.get("custom_id"), str):
                found |= wanted & {key_of(name)}
    return found


def whole_lines(path: Path, descriptor: int) -> Iterator[tuple[dict[str, Any], bytes]]:
    """The good lines of an output file, in order; a torn last one is cut off, any other bad one is an error."""
    with path.open("rb") as file:
        good = 0
        for number, raw in enumerate(file, 1):
            line = _read_line(raw)
            if line is None:
                if not _torn(raw):
                    fix = "remove it, or start over with --overwrite"
                    raise RunFileError(f"{path}:{number}: not a line of a batch's output: {fix}")
                os.ftruncate(descriptor, good)
                return
            good += len(raw)
            yield line, raw


def _torn(raw: bytes) -> bool:
    """Whether a file's bad line is the beginning of one of ours (or what a disk left of it: zeros)."""
    ours = raw.startswith(_BEGINNING) or _BEGINNING.startswith(raw) or not raw.strip(b"\0")
    return ours and not raw.endswith(b"\n")


def _read_line(raw: bytes) -> dict[str, Any] | None:
    """An output line, if it is whole."""
    if not raw.endswith(b"\n"):
        return None
    try:
        line = json.loads(raw)
    except (ValueError, RecursionError):
        return None
    if not isinstance(line, dict) or not {"custom_id", "response", "error"} <= line.keys():
        return None
    return line if isinstance(line["response"], dict | None) else None


_BYTES = 5


def model_digest(deployment: Deployment) -> str:
    """10 hex digits of the weights, config.json, the tokenizer and chat template, and the settings that decide which
    tokens are drawn. How the model is spread is not part of it: a run may resume on other ranks. Raises OSError."""
    model, engine = deployment.model, deployment.engine
    settings = model.dtype, model.weights, model.wiring, model.ladder_layers, engine.kv_cache_dtype, engine.seed
    made = () if deployment.dummy_seed is None else (model.load_format,)
    weights, text = sampled_digest(Path(model.path), _BYTES), text_digest(Path(deployment.text_folder))
    return hashlib.blake2b(json.dumps([settings, weights, text, *made]).encode(), digest_size=_BYTES).hexdigest()
