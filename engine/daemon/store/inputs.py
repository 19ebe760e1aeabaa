"""Whether the bytes of an uploaded file still are those that were uploaded. Knows files and their rows, no batches."""

from __future__ import annotations

import hashlib
from functools import partial
from pathlib import Path

from .rows import FileRow

new_digest = partial(hashlib.blake2b, digest_size=16)


class InputFault(Exception):
    """An input file is missing or has changed: no line of it can be computed."""

    def __init__(self, code: str, message: str) -> None:
        super().__init__(message)
        self.code = code


def check_input(file: FileRow, path: Path) -> None:
    """By size, and by digest where an earlier version has not left that out. Raises InputFault or OSError."""
    try:
        with path.open("rb") as opened:
            size = opened.seek(0, 2)
            opened.seek(0)
            same = size == file.bytes
            if same and file.digest is not None:
                same = hashlib.file_digest(opened, new_digest).hexdigest() == file.digest
    except FileNotFoundError as error:
        raise InputFault("input_file_missing", f"the input file is gone: {error.strerror}") from error
    if not same:
        raise InputFault(
            "input_file_changed",
            f"input file {file.id} ({file.filename}) has changed on the disk since it was uploaded ({file.bytes} bytes "
            f"then, {size} now): upload it again and start a batch with reuse_batch_id",
        )
