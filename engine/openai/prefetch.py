"""Reads lines ahead, tokenizes several at once, yields them in an order that shares prefixes; for `laddertron run` and
the daemon's batches."""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
from collections import deque
from collections.abc import AsyncGenerator, AsyncIterable, AsyncIterator, Callable, Coroutine, Iterable
from typing import Any

from ..text.pool import Encoder
from .batch_input import BatchLine
from .errors import ApiError
from .line_order import LineOrder, PreparedLine, Prompts
from .to_engine import check_model, encode_prompts, with_worker_params

FIRST_LINES, READ_AHEAD_LINES, READ_AHEAD_BYTES = 256, 1024, 16 << 20
"""At first FIRST_LINES are read ahead, so that the first answer does not wait for more; then more with each line."""
_HUNGRY_SECONDS = 0.05

Ready = tuple[BatchLine, Prompts | ApiError]


async def encoded(line: BatchLine, served: str, encoder: Encoder) -> Ready:
    """Encodes the line's prompts; returns the line with their ids, or with its error: one bad prompt must not end the
    tasks of the others."""
    try:
        if line.error is not None or line.body is None:
            return line, line.error or ApiError("the line has no body")
        check_model(line.body, served)
        body = await with_worker_params(line.body, encoder)
        return line._replace(body=body), await encode_prompts(body, encoder)
    except ApiError as bad:
        return line, bad


async def prepared(
    lines: Iterable[BatchLine | None] | AsyncIterable[BatchLine],
    encoder: Encoder,
    served: str,
    large: Callable[[BatchLine], Coroutine[Any, Any, Ready]] | None = None,
    hungry: Callable[[], bool] = lambda: False,
) -> AsyncGenerator[PreparedLine, None]:
    """Yields each line with its prompts' ids in LineOrder's order, or with its error; a line of None is skipped. The
    first lines are compared with all that are read ahead, unless `hungry`: an engine has nothing else to do. `large`:
    prepares lines that are not parsed yet (`raw`). Close it (contextlib.aclosing) if left early."""
    order, ready = LineOrder(READ_AHEAD_LINES), deque[asyncio.Task[Ready]]()
    tasks: set[asyncio.Task[Ready]] = set()
    size = yielded = 0
    compared = False
    moved = asyncio.Event()

    def done(task: asyncio.Task[Ready]) -> None:
        tasks.discard(task)
        if not task.cancelled():
            task.exception()  # retrieved, also if this task's turn does not come
            ready.append(task)
        moved.set()

    unread = aiter(lines if isinstance(lines, AsyncIterable) else _yielding(lines))
    line: BatchLine | None = None
    try:
        while True:
            most = min(READ_AHEAD_LINES, FIRST_LINES + yielded)
            while len(tasks) + len(ready) + len(order) < most and size < READ_AHEAD_BYTES:
                if (line := await anext(unread, None)) is None:
                    break
                work = large(line) if line.raw is not None and large is not None else encoded(line, served, encoder)
                task = asyncio.create_task(work)
                tasks.add(task)
                task.add_done_callback(done)
                size += line.length
            while ready:
                prepared_line = PreparedLine(*ready.popleft().result())
                if not isinstance(prepared_line.prompts, ApiError):
                    order.add(prepared_line.line, prepared_line.prompts)
                    continue
                size -= prepared_line.line.length
                yielded += 1
                yield prepared_line
            compared = compared or not tasks
            if order and (compared or hungry()):
                prepared_line = order.take()
                size -= prepared_line.line.length
                yielded += 1
                yield prepared_line
            elif tasks:
                moved.clear()
                # NOTE: wait_for of Python 3.11 loses a cancellation that comes with what it waits for
                with contextlib.suppress(TimeoutError):
                    async with asyncio.timeout(_HUNGRY_SECONDS):
                        await moved.wait()
            elif line is None:
                return
    finally:
        for task in tasks:
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
