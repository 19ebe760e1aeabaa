"""Digests of the files that determine the conversion between text and ids. Ranks use it, so it imports no tokenizer."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from pathlib import Path

_FILES = (
    "tokenizer.json", "tokenizer_config.json", "special_tokens_map.json", "generation_config.json",
    "chat_template.jinja", "chat_template.json",
)  # fmt: skip
RANKS = "tiktoken.model"
NAMED_TEMPLATES = "additional_chat_templates"
RESTORE = "restore the file, or restart with the changed ones"


def text_files(folder: Path) -> dict[str, str]:
    """A digest of each file that determines the conversion between text and ids; "" for a missing one."""
    named = sorted(f"{NAMED_TEMPLATES}/{path.name}" for path in (folder / NAMED_TEMPLATES).glob("*.jinja"))
    named += [RANKS] if (folder / RANKS).is_file() else []
    data = {name: (folder / name).read_bytes() if (folder / name).is_file() else None for name in (*_FILES, *named)}
    return {name: "" if raw is None else hashlib.blake2b(raw, digest_size=16).hexdigest() for name, raw in data.items()}


def text_digest(folder: Path) -> str:
    """Hex digest of `text_files`."""
    return hashlib.blake2b(json.dumps(text_files(folder)).encode(), digest_size=16).hexdigest()


def changed_files(before: Mapping[str, str], now: Mapping[str, str]) -> list[str]:
    return sorted(name for name in {*before, *now} if before.get(name, "") != now.get(name, ""))
