"""Reads lines ahead, tokenises several at once, yields them in order; for `laddertron run` and the daemon's batches."""

from __future__ import annotations

import asyncio
import hashlib
from collections import deque
from collections.abc import AsyncGenerator, Callable, Coroutine, Iterable
from typing import Any

from ..text.pool import Encoder
from .batch_input import BatchLine
from .body import Body
from .errors import ApiError
from .to_engine import check_model, encode_prompts

READ_AHEAD_LINES, READ_AHEAD_BYTES = 256, 16 << 20

Prompts = list[tuple[int, ...]]
Ready = tuple[BatchLine, Prompts | ApiError]


async def encoded(body: Body, served: str, encoder: Encoder) -> Prompts | ApiError:
    """The ids of a body's prompts. A refusal is a result here: one bad prompt must not end the others' tasks."""
    try:
        check_model(body, served)
        return await encode_prompts(body, encoder)
    except ApiError as bad:
        return bad


async def prepared(
    lines: Iterable[BatchLine | None],
    encoder: Encoder,
    served: str,
    large: Callable[[BatchLine], Coroutine[Any, Any, Ready]] | None = None,
) -> AsyncGenerator[Ready, None]:
    """Each line with its prompts' ids, or with why it has none; None stands for a line that is passed over. `large`:
    who looks at lines that came as they are. Close it (contextlib.aclosing) if left early."""
    ahead: deque[tuple[BatchLine, asyncio.Task[Prompts | ApiError] | asyncio.Task[Ready] | ApiError]] = deque()
    size = count = 0
    try:
        for line in lines:
            count += 1
            if count % 32 == 0:
                await asyncio.sleep(0)  # tokens must not wait for a long stretch of lines
            if line is None:
                continue
            if line.raw is not None and large is not None:
                ahead.append((line, asyncio.create_task(large(line))))
            elif line.error is not None or line.body is None:
                ahead.append((line, line.error or ApiError("the line has no body")))
            else:
                ahead.append((line, asyncio.create_task(encoded(line.body, served, encoder))))
            size += line.length
            while ahead and (len(ahead) >= READ_AHEAD_LINES or size >= READ_AHEAD_BYTES):
                size -= ahead[0][0].length
                yield await _first(ahead)
        while ahead:
            yield await _first(ahead)
    finally:
        for _, task in ahead:
            if isinstance(task, asyncio.Task):
                task.cancel()


async def _first(
    ahead: deque[tuple[BatchLine, asyncio.Task[Prompts | ApiError] | asyncio.Task[Ready] | ApiError]],
) -> Ready:
    line, task = ahead[0]
    found = await task if isinstance(task, asyncio.Task) else task
    ahead.popleft()
    return found if isinstance(found, tuple) else (line, found)


def answer_id(run_id: str, line: BatchLine) -> str:
    """The same for the same line of the same run or batch; unique within it."""
    name = f"{run_id}\0{line.custom_id or ''}\0{line.number}"
    return hashlib.blake2b(name.encode(), digest_size=12).hexdigest()
