"""The plan of one step: plain ints, made by rank 0 (the scheduler), broadcast as one binary frame, executed by every
rank (`engine/step/runner.py`).

A sequence has a slot (0 .. max_num_seqs - 1). Every rank mirrors each slot's tokens and block table, which only a Batch
or a sampled token changes. A plan is made before the previous step's tokens are known and assumes that every running
sequence continues; if one has ended, commit discards its surplus token.
"""

from __future__ import annotations

import json
import struct
from collections import deque
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import chain
from typing import Any, NamedTuple

from ..topology.json_codec import from_json
from .request import SamplingParams, TokenLogprob, params_to_json


@dataclass(frozen=True, slots=True)
class NewSequence:
    """A sequence that enters a slot with this step. `tokens`: the prompt and, after a preemption, the outputs so far.
    `prompt_len`: how many of them are prompt, so that output positions (and with them the noise) continue."""

    slot: int
    choice: int
    prompt_len: int
    tokens: tuple[int, ...]
    params: SamplingParams


class Chunk(NamedTuple):
    """Positions [start, start + count) of a slot, computed in this step; at most one chunk per slot. `samples`: whether
    the next token is sampled from the last row. `prompt_logprobs`: rows followed by a prompt token are scored against
    it. `drafts`: upper bound of a decode's further rows; with drafts `start` is a lower bound. `proposals`: upper bound
    of the drafts that the ranks that sample propose for the sequence's next step (engine/sampling/drafts.py). A named
    tuple, because a frozen dataclass takes three times as long per step."""

    slot: int
    start: int
    count: int  # type: ignore[assignment]  # hides tuple.count, which is not used
    samples: bool
    prompt_logprobs: bool = False
    drafts: int = 0
    proposals: int = 0


@dataclass(frozen=True, slots=True)
class Batch:
    """One step, in the order in which the runner applies it: empties the `released` slots, fills the `admitted` ones,
    appends `blocks` to block tables, makes `copies` (KV block src -> dst, in every layer), and computes `chunks`."""

    step: int
    released: tuple[int, ...] = ()
    admitted: tuple[NewSequence, ...] = ()
    blocks: tuple[tuple[int, tuple[int, ...]], ...] = ()
    copies: tuple[tuple[int, int], ...] = ()
    chunks: tuple[Chunk, ...] = ()
    split: int = 0
    """Rows of the first of two streams (see `streams`); 0: one stream."""

    @property
    def num_tokens(self) -> int:
        return sum([chunk.count + chunk.drafts for chunk in self.chunks])


def in_order(chunks: Iterable[Chunk]) -> list[Chunk]:
    """The chunks in the order of the step's rows: decodes first."""
    return sorted(chunks, key=lambda chunk: chunk.count != 1)  # a stable sort


def streams(chunks: Sequence[Chunk], split: int) -> list[list[Chunk]]:
    """Divides ordered chunks into two streams, the first of about `split` rows. A prompt may be divided, but never so
    that one row of it is left, which would count as a decode among prompts. Returns one stream if the other would be
    empty."""
    first: list[Chunk] = []
    rest, left = deque(chunks), split
    while rest and left >= rest[0].count:
        left -= rest[0].count
        first.append(rest.popleft())
    if rest and left > 1:
        chunk = rest.popleft()
        if chunk.count - left > 1:
            first.append(chunk._replace(count=left, samples=False))
            rest.appendleft(chunk._replace(start=chunk.start + left, count=chunk.count - left))
        else:
            first.append(chunk)
    return [part for part in (first, list(rest)) if part]


@dataclass(frozen=True, slots=True)
class StepResult:
    """A step's results, on the host. `tokens` is aligned with the chunks of the batch that sample. The other fields are
    by slot, and empty unless requested (`params.logprobs`, `Chunk.prompt_logprobs`) or after an error."""

    tokens: Sequence[int]
    nonfinite: Collection[int] = ()
    """Slots with NaN or Inf in their logits; their tokens are invalid."""
    logprobs: Mapping[int, TokenLogprob] = field(default_factory=dict)
    prompt_logprobs: Mapping[int, Sequence[TokenLogprob]] = field(default_factory=dict)
    """For a chunk with `prompt_logprobs`: one entry for each position that a prompt token follows, in order."""
    failures: Mapping[int, str] = field(default_factory=dict)
    """The reason for each slot in `nonfinite` whose grammar, not the model, allowed no token."""
    more: Mapping[int, Sequence[tuple[int, TokenLogprob | None]]] = field(default_factory=dict)
    """For a chunk with accepted drafts: the tokens after its first one, one for each accepted draft."""
    drafted: Mapping[int, int] = field(default_factory=dict)
    """For a chunk with drafts: their number."""
    proposed: Mapping[int, Sequence[int]] = field(default_factory=dict)
    """In a pipeline: the drafts of the slot's next step."""


def encode_result(result: StepResult, ids_alone: bool = False) -> bytes:
    """Encodes a result for ranks that do not sample; `decode_result` is the inverse. ids_alone: leaves out the fields
    that only rank 0 reports."""
    fields: dict[str, object] = {"tokens": list(result.tokens)}
    fields |= {"proposed": sorted(result.proposed.items())} if result.proposed else {}
    if result.more:
        more = ((slot, [(token, None if ids_alone else p) for token, p in ids]) for slot, ids in result.more.items())
        fields["more"] = sorted(more)
    if not ids_alone:
        fields |= {"drafted": sorted(result.drafted.items())} if result.drafted else {}
        fields |= {"nonfinite": sorted(result.nonfinite)} if result.nonfinite else {}
        fields |= {"failures": sorted(result.failures.items())} if result.failures else {}
        fields |= {"logprobs": sorted(result.logprobs.items())} if result.logprobs else {}
        fields |= {"prompt_logprobs": sorted(result.prompt_logprobs.items())} if result.prompt_logprobs else {}
    return json.dumps(fields, separators=(",", ":")).encode()  # TokenLogprob is a tuple


def decode_result(data: bytes) -> StepResult:
    """Decodes a result. Raises ValueError, KeyError or TypeError for data that `encode_result` did not write."""
    fields = json.loads(data)

    def scored(entry: list[Any]) -> TokenLogprob:
        made = TokenLogprob(*entry)
        return made._replace(top=tuple((token, p) for token, p in made.top))

    return StepResult(
        fields["tokens"],
        frozenset(fields.get("nonfinite", ())),
        {slot: scored(entry) for slot, entry in fields.get("logprobs", ())},
        {slot: [scored(entry) for entry in entries] for slot, entries in fields.get("prompt_logprobs", ())},
        {slot: str(why) for slot, why in fields.get("failures", ())},
        {slot: [(token, p and scored(p)) for token, p in ids] for slot, ids in fields.get("more", ())},
        dict(fields.get("drafted", ())),
        dict(fields.get("proposed", ())),
    )


MAGIC = 0x4C544234  # "LTB4"
_HEAD = struct.Struct("<IQ6I")


def encode(batch: Batch) -> bytes:
    """Encodes a Batch as one frame: little-endian integers, sampling parameters as JSON. `decode` is the inverse."""
    counts = map(len, (batch.released, batch.admitted, batch.blocks, batch.copies, batch.chunks))
    out = [
        _HEAD.pack(MAGIC, batch.step, *counts, batch.split),
        struct.pack(f"<{len(batch.released)}I", *batch.released),
    ]
    for sequence in batch.admitted:
        params = json.dumps(params_to_json(sequence.params), separators=(",", ":")).encode()
        count = len(sequence.tokens)
        head = (sequence.slot, sequence.choice, sequence.prompt_len, count, len(params))
        out.append(struct.pack(f"<{5 + count}I", *head, *sequence.tokens))
        out.append(params)
    for slot, blocks in batch.blocks:
        out.append(struct.pack(f"<{2 + len(blocks)}I", slot, len(blocks), *blocks))
    out.extend(struct.pack("<2I", src, dst) for src, dst in batch.copies)
    flat = [(c[0], c[1], c[2], c[3] | c[4] << 1 | c[5] << 2 | c[6] << 16) for c in batch.chunks]
    out.append(struct.pack(f"<{4 * len(flat)}I", *chain.from_iterable(flat)))
    return b"".join(out)


class _Reader:
    def __init__(self, data: bytes | memoryview, at: int) -> None:
        self.data, self.at = memoryview(data), at

    def ints(self, count: int) -> tuple[int, ...]:
        return struct.unpack(f"<{count}I", self.raw(4 * count))

    def raw(self, count: int) -> memoryview:
        if count > len(self.data) - self.at:
            raise ValueError(f"step plan: {count} bytes announced, {len(self.data) - self.at} left")
        self.at += count
        return self.data[self.at - count : self.at]


def _sequence(reader: _Reader) -> NewSequence:
    slot, choice, prompt_len, count, length = reader.ints(5)
    tokens = reader.ints(count)
    return NewSequence(slot, choice, prompt_len, tokens, from_json(SamplingParams, bytes(reader.raw(length))))


def decode(frame: bytes | memoryview) -> Batch:
    """Decodes a frame. Raises ValueError (wrong magic, counts beyond the frame, surplus bytes) or struct.error (too
    short)."""
    magic, step, n_released, n_admitted, n_blocks, n_copies, n_chunks, split = _HEAD.unpack_from(frame)
    if magic != MAGIC:
        raise ValueError(f"step plan: magic {magic:#x} is not {MAGIC:#x}: ranks of different versions?")
    reader = _Reader(frame, _HEAD.size)
    released = reader.ints(n_released)
    admitted = tuple(_sequence(reader) for _ in range(n_admitted))
    blocks = []
    for _ in range(n_blocks):
        slot, count = reader.ints(2)
        blocks.append((slot, reader.ints(count)))
    flat = reader.ints(2 * n_copies)
    copies = tuple(zip(flat[::2], flat[1::2], strict=True))
    flat = reader.ints(4 * n_chunks)
    columns = zip(flat[::4], flat[1::4], flat[2::4], flat[3::4], strict=True)
    chunks = tuple(
        Chunk(slot, start, count, flags & 1 == 1, flags & 2 == 2, flags >> 2 & 0x3FFF, flags >> 16)
        for slot, start, count, flags in columns
    )
    if reader.at != len(reader.data):
        raise ValueError(f"step plan: {len(reader.data) - reader.at} bytes left over")
    return Batch(step, released, admitted, tuple(blocks), copies, chunks, split)
