"""Lines on their way to the engine: read ahead, tokenised beside one another, handed on in order.

Shared by `laddertron run` (engine/batchrun.py) and the daemon's batches; knows no job and no files.
"""

from __future__ import annotations

import asyncio
import hashlib
from collections import deque
from collections.abc import AsyncGenerator, Iterable

from ..text_pool import Encoder
from .intake import Line
from .requests import check_model, encode_prompts
from .rules import BadRequest
from .schema import Body

READ_AHEAD_LINES, READ_AHEAD_BYTES = 256, 16 << 20

Prompts = list[tuple[int, ...]]


async def encoded(body: Body, served: str, encoder: Encoder) -> Prompts | BadRequest:
    """The ids of a body's prompts. A refusal is a result here: one bad prompt must not end the others' tasks."""
    try:
        check_model(body, served)
        return await encode_prompts(body, encoder)
    except BadRequest as bad:
        return bad


async def prepared(
    lines: Iterable[Line | None], encoder: Encoder, served: str
) -> AsyncGenerator[tuple[Line, Prompts | BadRequest], None]:
    """Each line with its prompts' ids, or with why it has none; None stands for a line that is passed over. Close it
    (contextlib.aclosing) if left early."""
    ahead: deque[tuple[Line, asyncio.Task[Prompts | BadRequest] | BadRequest]] = deque()
    size = count = 0
    try:
        for line in lines:
            count += 1
            if count % 32 == 0:
                await asyncio.sleep(0)  # tokens must not wait for a long stretch of lines
            if line is None:
                continue
            if line.error is not None or line.body is None:
                ahead.append((line, line.error or BadRequest("the line has no body")))
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
    ahead: deque[tuple[Line, asyncio.Task[Prompts | BadRequest] | BadRequest]],
) -> tuple[Line, Prompts | BadRequest]:
    line, task = ahead[0]
    prompts = await task if isinstance(task, asyncio.Task) else task
    ahead.popleft()
    return line, prompts


def answer_id(run_id: str, line: Line) -> str:
    """The same for the same line of the same run or batch; unique within it."""
    name = f"{run_id}\0{line.custom_id or ''}\0{line.number}"
    return hashlib.blake2b(name.encode(), digest_size=12).hexdigest()
