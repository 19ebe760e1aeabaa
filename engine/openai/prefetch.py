"""Reads lines ahead, tokenizes several at once, yields them in order; for `laddertron run` and the daemon's batches."""

from __future__ import annotations

import asyncio
import hashlib
from collections import deque
from collections.abc import AsyncGenerator, AsyncIterable, AsyncIterator, Callable, Coroutine, Iterable
from typing import Any

from ..text.pool import Encoder
from .batch_input import BatchLine
from .errors import ApiError
from .to_engine import check_model, encode_prompts, with_word_ids

READ_AHEAD_LINES, READ_AHEAD_BYTES = 256, 16 << 20

Prompts = list[tuple[int, ...]]
Ready = tuple[BatchLine, Prompts | ApiError]


async def encoded(line: BatchLine, served: str, encoder: Encoder) -> Ready:
    """Encodes the line's prompts; returns the line with their ids, or with its error: one bad prompt must not end the
    tasks of the others."""
    try:
        if line.error is not None or line.body is None:
            return line, line.error or ApiError("the line has no body")
        check_model(line.body, served)
        body = await with_word_ids(line.body, encoder)
        return line._replace(body=body), await encode_prompts(body, encoder)
    except ApiError as bad:
        return line, bad


async def prepared(
    lines: Iterable[BatchLine | None] | AsyncIterable[BatchLine],
    encoder: Encoder,
    served: str,
    large: Callable[[BatchLine], Coroutine[Any, Any, Ready]] | None = None,
) -> AsyncGenerator[Ready, None]:
    """Yields each line with its prompts' ids, or with its error; a line of None is skipped. `large`: prepares lines
    that are not parsed yet (`raw`). Close it (contextlib.aclosing) if left early."""
    ahead: deque[tuple[int, asyncio.Task[Ready]]] = deque()
    size = 0
    try:
        async for line in lines if isinstance(lines, AsyncIterable) else _yielding(lines):
            work = large(line) if line.raw is not None and large is not None else encoded(line, served, encoder)
            ahead.append((line.length, asyncio.create_task(work)))
            size += line.length
            while ahead and (len(ahead) >= READ_AHEAD_LINES or size >= READ_AHEAD_BYTES):
                size -= ahead[0][0]
                yield await ahead[0][1]
                ahead.popleft()
        while ahead:
            yield await ahead[0][1]
            ahead.popleft()
    finally:
        for _, task in ahead:
            task.cancel()


async def _yielding(lines: Iterable[BatchLine | None]) -> AsyncIterator[BatchLine]:
    for count, line in enumerate(lines, 1):
        if count % 32 == 0:
            await asyncio.sleep(0)  # else many lines in a row would delay tokens
        if line is not None:
            yield line


def answer_id(run_id: str, line: BatchLine) -> str:
    """The id of a line's answer: deterministic for a line and run (or batch), unique in the run."""
    name = f"{run_id}\0{line.custom_id or ''}\0{line.number}"
    return hashlib.blake2b(name.encode(), digest_size=12).hexdigest()
