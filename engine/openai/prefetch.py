"""Reads lines ahead, tokenises several at once, yields them in order; for `laddertron run` and the daemon's batches."""

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
    """The line with its prompts' ids. A refusal is a result here: one bad prompt must not end the others' tasks."""
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
    """Each line with its prompts' ids, or with why it has none; None is a line that is skipped. `large`:
    who looks at lines that came as they are. Close it (contextlib.aclosing) if left early."""
    ahead: deque[tuple[int, asyncio.Task[Ready]]] = deque()
    size = 0
    try:
        async for line in lines if isinstance(lines, AsyncIterable) else _breathing(lines):
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


async def _breathing(lines: Iterable[BatchLine | None]) -> AsyncIterator[BatchLine]:
    for count, line in enumerate(lines, 1):
        if count % 32 == 0:
            await asyncio.sleep(0)  # tokens must not wait for a long stretch of lines
        if line is not None:
            yield line


def answer_id(run_id: str, line: BatchLine) -> str:
    """The same for the same line of the same run or batch; unique within it."""
    name = f"{run_id}\0{line.custom_id or ''}\0{line.number}"
    return hashlib.blake2b(name.encode(), digest_size=12).hexdigest()
