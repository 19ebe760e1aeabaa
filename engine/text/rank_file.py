"""Reads tiktoken's ranks (`tiktoken.model`, as Kimi publishes them) into `tokenizers`: the same ids as tiktoken's."""

from __future__ import annotations

import binascii
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers

from .text_files import RANKS

_RESERVED = 256  # ids after the ranks: of named tokens, and of reserved ones
_LARGE = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}&&[^\p{Han}]]"
_SMALL = r"[\p{Ll}\p{Lm}\p{Lo}\p{M}&&[^\p{Han}]]"
_BEFORE, _AFTER = r"[^\r\n\p{L}\p{N}]?", "(?i:'s|'t|'re|'ve|'m|'ll|'d)?"
_WORDS = (f"{_BEFORE}{_LARGE}*{_SMALL}+{_AFTER}", f"{_BEFORE}{_LARGE}+{_SMALL}*{_AFTER}")
_SPACES = (r"\s*[\r\n]+", r"\s+(?!\S)", r"\s+")
KIMI = "|".join((r"[\p{Han}]+", *_WORDS, r"\p{N}{1,3}", r" ?[^\s\p{L}\p{N}]+[\r\n]*", *_SPACES))
"""How the Kimi family splits text before it merges bytes; ranks files do not contain it."""


def is_rank_file(folder: Path, config: dict[str, Any]) -> bool:
    """Whether a folder has no tokenizer.json and ranks whose split is known; `config`: its tokenizer_config.json."""
    return (
        not (folder / "tokenizer.json").is_file()
        and (folder / RANKS).is_file()
        and "tokenization_kimi" in str(config.get("auto_map"))
    )


def grammar_source(folder: Path) -> Path | str:
    """The folder's tokenizer for grammars: the path of tokenizer.json, or the text that it would have. Raises
    ValueError or OSError."""
    path = folder / "tokenizer.json"
    if path.is_file():
        return path
    config = json.loads((folder / "tokenizer_config.json").read_text(encoding="utf-8"))
    return str(read_ranks(folder / RANKS, config).to_str())


def read_ranks(path: Path, config: dict[str, Any]) -> Tokenizer:
    """The tokenizer of a ranks file; `config`: its folder's tokenizer_config.json. Raises ValueError."""
    lines = path.read_bytes().split(b"\n")
    ranks = {binascii.a2b_base64(token): int(rank) for token, rank in (line.split() for line in lines if line.strip())}
    if sorted(ranks.values()) != [*range(len(ranks))] or any(bytes([byte]) not in ranks for byte in range(256)):
        raise ValueError("the ranks are not consecutive from 0, or a byte has none: fetch the file again")
    vocab = {_word(token): rank for token, rank in ranks.items()}
    tokenizer = Tokenizer(models.BPE(vocab, [*_merges(ranks)], ignore_merges=True))
    split = pre_tokenizers.Split(Regex(KIMI), "isolated")
    letters = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([split, letters])
    tokenizer.decoder = decoders.ByteLevel()
    named = config.get("added_tokens_decoder", {})
    if stray := [i for i in map(int, named) if not len(ranks) <= i < len(ranks) + _RESERVED]:
        raise ValueError(f"added_tokens_decoder has the id {stray[0]}, and the ids after the ranks are {len(ranks)} on")
    for number in range(len(ranks), len(ranks) + _RESERVED):
        token = named.get(str(number), {"content": f"<|reserved_token_{number}|>", "special": True})
        tokenizer.add_tokens([AddedToken(token["content"], special=token.get("special", False), normalized=False)])
        if tokenizer.token_to_id(token["content"]) != number:
            raise ValueError(f"the token {token['content']!r} has two ids in added_tokens_decoder and the ranks")
    return tokenizer


def _merges(ranks: dict[bytes, int]) -> Iterator[tuple[str, str]]:
    """Every pair that makes a token, lowest rank first: tiktoken merges whatever makes the lowest."""
    for token in sorted(ranks, key=ranks.__getitem__):
        pairs = [(token[:at], token[at:]) for at in range(1, len(token))]
        parts = sorted((ranks[a], ranks[b], a, b) for a, b in pairs if a in ranks and b in ranks)
        yield from ((_word(a), _word(b)) for _, _, a, b in parts)


def _letters() -> list[str]:
    """The character by which byte-level tokenizers write each byte: itself where it is visible."""
    visible = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    others = iter(range(0x100, 0x200))
    return [chr(byte) if byte in visible else chr(next(others)) for byte in range(256)]


_LETTERS = _letters()


def _word(token: bytes) -> str:
    return "".join(_LETTERS[byte] for byte in token)
