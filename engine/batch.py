"""The plan of one step: plain ints, decided by rank 0, broadcast as one binary frame, obeyed by every rank.

The scheduler makes it, `engine/runner.py` obeys it, neither knows the other. Sequences live in *slots* (0 ..
max_num_seqs - 1) of the runner; a slot's tokens and block table are mirrored on every rank and only ever changed by a
Batch or by the token that the step sampled. KV lives in fixed-size *blocks*.

A plan is made before the previous step's tokens are known. It is optimistic: it takes every running sequence to go on.
A sequence that turns out to have ended costs one surplus token, which commit discards; its blocks are released by a
later Batch.
"""

from __future__ import annotations

import struct
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import chain
from typing import NamedTuple

from .request import SamplingParams, TokenLogprob


@dataclass(frozen=True, slots=True)
class NewSequence:
    """A sequence that enters a slot with this step. `tokens` is everything known: the prompt and, after a preemption,
    the outputs so far; `prompt_len` says how much of it is prompt, so that output positions (and with them the noise)
    go on where they stopped."""

    slot: int
    choice: int
    prompt_len: int
    tokens: tuple[int, ...]
    params: SamplingParams


class Chunk(NamedTuple):
    """Positions [start, start + count) of a slot are computed in this step; a slot has at most one chunk in a step.
    Where `samples`, the logits of the last one yield the slot's next token. `prompt_logprobs`: the logits of every
    position of the chunk that is followed by a prompt token are scored against that token.

    A named tuple, because a step makes one for each running sequence and a frozen dataclass costs thrice as much."""

    slot: int
    start: int
    count: int  # type: ignore[assignment]  # hides tuple.count, which nobody needs here
    samples: bool
    prompt_logprobs: bool = False


@dataclass(frozen=True, slots=True)
class Batch:
    """One step, in the order the runner applies it: `released` slots are emptied, `admitted` ones filled, `blocks`
    appended to block tables, `copies` made (KV block src -> dst, every layer), then `chunks` computed."""

    step: int
    released: tuple[int, ...] = ()
    admitted: tuple[NewSequence, ...] = ()
    blocks: tuple[tuple[int, tuple[int, ...]], ...] = ()
    copies: tuple[tuple[int, int], ...] = ()
    chunks: tuple[Chunk, ...] = ()

    @property
    def num_tokens(self) -> int:
        return sum(chunk.count for chunk in self.chunks)


@dataclass(frozen=True, slots=True)
class StepResult:
    """What a step gave, on the host. `tokens` is aligned with the batch's chunks that sample, in their order; the rest
    goes by slot and is empty unless asked for (`params.logprobs`, `Chunk.prompt_logprobs`) or something went wrong."""

    tokens: Sequence[int]
    nonfinite: Collection[int] = ()
    """Slots whose logits held NaN or Inf; their token, if they sample, means nothing."""
    logprobs: Mapping[int, TokenLogprob] = field(default_factory=dict)
    prompt_logprobs: Mapping[int, Sequence[TokenLogprob]] = field(default_factory=dict)
    """For a chunk that asks: one entry for each of its positions that a prompt token follows, in order."""
    failures: Mapping[int, str] = field(default_factory=dict)
    """For nonfinite slots whose grammar, not the model, left nothing to draw: why."""


MAGIC = 0x4C544231  # "LTB1"
_HEAD = struct.Struct("<IQ5I")
_SEQ = struct.Struct("<4I")
_PARAMS = struct.Struct("<IQI6dIIiiIII")


def _ints(values: tuple[int, ...]) -> bytes:
    return struct.pack(f"<I{len(values)}I", len(values), *values)


def encode(batch: Batch) -> bytes:
    """The Batch as one frame of little-endian integers and doubles; `decode` is its inverse."""
    out = [
        _HEAD.pack(
            MAGIC,
            batch.step,
            len(batch.released),
            len(batch.admitted),
            len(batch.blocks),
            len(batch.copies),
            len(batch.chunks),
        ),
        struct.pack(f"<{len(batch.released)}I", *batch.released),
    ]
    for sequence in batch.admitted:
        p = sequence.params
        grammar = b"" if p.grammar is None else p.grammar.encode()
        out.append(_SEQ.pack(sequence.slot, sequence.choice, sequence.prompt_len, len(sequence.tokens)))
        out.append(struct.pack(f"<{len(sequence.tokens)}I", *sequence.tokens))
        out.append(
            _PARAMS.pack(
                p.max_tokens,
                p.seed,
                p.min_tokens,
                p.temperature,
                p.top_p,
                p.min_p,
                p.presence_penalty,
                p.frequency_penalty,
                p.repetition_penalty,
                p.top_k,
                p.n,
                -1 if p.logprobs is None else p.logprobs,
                -1 if p.prompt_logprobs is None else p.prompt_logprobs,
                len(p.logit_bias),
                len(p.stop_token_ids),
                len(grammar),
            )
        )
        out.extend(struct.pack("<Id", token, bias) for token, bias in p.logit_bias)
        out.append(struct.pack(f"<{len(p.stop_token_ids)}I", *p.stop_token_ids))
        out.append(grammar)
    for slot, blocks in batch.blocks:
        out.append(struct.pack("<I", slot))
        out.append(_ints(blocks))
    out.extend(struct.pack("<2I", src, dst) for src, dst in batch.copies)
    flat = [(c[0], c[1], c[2], c[3] | c[4] << 1) for c in batch.chunks]
    out.append(struct.pack(f"<{4 * len(flat)}I", *chain.from_iterable(flat)))
    return b"".join(out)


class _Reader:
    def __init__(self, data: bytes | memoryview) -> None:
        self.data, self.at = memoryview(data), 0

    def take(self, layout: struct.Struct) -> tuple[int | float, ...]:
        values = layout.unpack_from(self.data, self.at)
        self.at += layout.size
        return values

    def ints(self, count: int) -> tuple[int, ...]:
        if count * 4 > len(self.data) - self.at:
            raise ValueError(f"step plan: {count} integers announced, {len(self.data) - self.at} bytes left")
        values: tuple[int, ...] = struct.unpack_from(f"<{count}I", self.data, self.at)
        self.at += 4 * count
        return values

    def raw(self, count: int) -> bytes:
        if count > len(self.data) - self.at:
            raise ValueError(f"step plan: {count} bytes announced, {len(self.data) - self.at} left")
        self.at += count
        return bytes(self.data[self.at - count : self.at])


_ONE, _BIAS = struct.Struct("<I"), struct.Struct("<Id")


def _sequence(reader: _Reader) -> NewSequence:
    slot, choice, prompt_len, count = (int(v) for v in reader.take(_SEQ))
    tokens = reader.ints(count)
    p = reader.take(_PARAMS)
    n_bias, n_stop, n_grammar = int(p[13]), int(p[14]), int(p[15])
    bias = tuple((int(t), float(b)) for t, b in (reader.take(_BIAS) for _ in range(n_bias)))
    stop = reader.ints(n_stop)
    grammar = reader.raw(n_grammar).decode() if n_grammar else None
    logprobs, prompt_logprobs = int(p[11]), int(p[12])
    params = SamplingParams(
        max_tokens=int(p[0]),
        seed=int(p[1]),
        min_tokens=int(p[2]),
        temperature=float(p[3]),
        top_p=float(p[4]),
        min_p=float(p[5]),
        presence_penalty=float(p[6]),
        frequency_penalty=float(p[7]),
        repetition_penalty=float(p[8]),
        top_k=int(p[9]),
        n=int(p[10]),
        logprobs=None if logprobs < 0 else logprobs,
        prompt_logprobs=None if prompt_logprobs < 0 else prompt_logprobs,
        logit_bias=bias,
        stop_token_ids=stop,
        grammar=grammar,
    )
    return NewSequence(slot, choice, prompt_len, tokens, params)


def decode(frame: bytes | memoryview) -> Batch:
    """Raises ValueError (wrong magic, counts beyond the frame, bytes left over) or struct.error (too short)."""
    reader = _Reader(frame)
    magic, step, *counts = (int(v) for v in reader.take(_HEAD))
    if magic != MAGIC:
        raise ValueError(f"step plan: magic {magic:#x} is not {MAGIC:#x}: ranks of different versions?")
    n_released, n_admitted, n_blocks, n_copies, n_chunks = counts
    released = reader.ints(n_released)
    admitted = tuple(_sequence(reader) for _ in range(n_admitted))
    blocks = []
    for _ in range(n_blocks):
        slot, count = (int(reader.take(_ONE)[0]) for _ in range(2))
        blocks.append((slot, reader.ints(count)))
    flat = reader.ints(2 * n_copies)
    copies = tuple(zip(flat[::2], flat[1::2], strict=True))
    flat = reader.ints(4 * n_chunks)
    columns = zip(flat[::4], flat[1::4], flat[2::4], flat[3::4], strict=True)
    chunks = tuple(Chunk(slot, start, count, flags & 1 == 1, flags & 2 == 2) for slot, start, count, flags in columns)
    if reader.at != len(reader.data):
        raise ValueError(f"step plan: {len(reader.data) - reader.at} bytes left over")
    return Batch(step, released, admitted, tuple(blocks), copies, chunks)
