"""Answers of measuring ranks to their owner: lines of JSON on standard output, since launchers give ranks no other
descriptors. A mark, and a line of its own, tell an answer from what a library or a user's sitecustomize prints.
"""

from __future__ import annotations

import json
import os
import sys
from typing import Any

MARK = "LADDERTRON_ANSWER_MARK"
"""Variable with the text before each answer; the owner draws it."""


def say(message: dict[str, Any]) -> None:
    sys.stdout.write(f"\n{os.environ[MARK]}{json.dumps(message)}\n")
    sys.stdout.flush()


def answer_in(line: str, mark: str) -> dict[str, Any] | None:
    """The answer in a line of output; None if there is none."""
    _, mark_found, text = line.partition(mark)
    return json.loads(text) if mark_found else None
