"""Text to ids in worker processes that can be killed: `await pool.encode(…)`, in order, a few texts a round trip.

A template that loops, a text that explodes: the worker dies, its item alone gets an error, a fresh worker takes over.
asyncio; no torch. Used by the daemon's door and by engine/batchrun.py.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import signal
import sys
from collections import deque
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from .text import ChatOptions, TextError
from .text_worker import MAX_FRAME, frame

_BATCH_ITEMS, _BATCH_BYTES = 64, 1 << 20
_START_SECONDS = 120.0
_MAX_FAILED_STARTS = 3


class PromptError(ValueError):
    """This text cannot become a prompt; `code` is for the error object: chat_template_error, prompt_too_costly,
    context_length_exceeded (`n_tokens` then says how long it is), invalid_grammar, server_error."""

    def __init__(self, message: str, code: str, n_tokens: int | None = None) -> None:
        super().__init__(message)
        self.code, self.n_tokens = code, n_tokens


class Encoder(Protocol):
    """What the doors need of a text pool."""

    async def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        """Ids of a plain prompt. Raises PromptError."""

    async def encode_chat(self, messages: list[dict[str, Any]], options: ChatOptions) -> list[int]:
        """Ids of a chat. Raises PromptError."""

    async def check_grammar(self, spec: str) -> None:
        """Raises PromptError if a grammar (llguidance's JSON) cannot be used, or the library is not installed."""


@dataclass(frozen=True, slots=True)
class PoolLimits:
    """What one item may cost: `cpu_seconds` of processor time (and four times that on the clock), `memory_bytes` of
    address space a worker, `max_ids` tokens."""

    workers: int = 2
    cpu_seconds: float = 10.0
    memory_bytes: int = 4 << 30
    max_ids: int = 1 << 20


@dataclass(slots=True)
class _Item:
    payload: dict[str, Any]
    size: int
    future: asyncio.Future[list[int]]
    answered: bool = False
    deaths: int = 0


class _Died(Exception):
    """The worker ended in the middle of an item; `overran`: because of it, beyond doubt."""

    def __init__(self, why: str, overran: bool = False) -> None:
        super().__init__(why)
        self.overran = overran


class TextPool:
    """Workers over one checkpoint folder. `async with TextPool(folder) as pool:`, or `start` and `close`."""

    def __init__(self, folder: Path, limits: PoolLimits = PoolLimits()) -> None:
        self._folder, self._limits = folder, limits
        self._waiting: deque[_Item] = deque()
        self._arrived = asyncio.Event()
        self._tasks: list[asyncio.Task[None]] = []
        self._closed = False

    async def __aenter__(self) -> TextPool:
        await self.start()
        return self

    async def __aexit__(self, *exc: object) -> None:
        await self.close()

    async def start(self) -> None:
        """Starts the workers. Raises TextError if the first one cannot read the checkpoint."""
        first = await self._spawn()
        self._tasks = [asyncio.create_task(self._serve(first))]
        self._tasks += [asyncio.create_task(self._serve(None)) for _ in range(self._limits.workers - 1)]

    async def close(self) -> None:
        """Ends the workers; what still waits gets an error."""
        self._closed = True
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        self._fail_waiting("the text workers are closed")

    async def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        return await self._ask({"text": text, "add_special_tokens": add_special_tokens}, len(text))

    async def encode_chat(
        self,
        messages: list[dict[str, Any]],
        options: ChatOptions = ChatOptions(),  # noqa: B008 (frozen)
    ) -> list[int]:
        payload = {
            "messages": messages,
            "options": {
                "add_generation_prompt": options.add_generation_prompt,
                "continue_final_message": options.continue_final_message,
                "add_special_tokens": options.add_special_tokens,
                "variables": options.variables,
            },
        }
        return await self._ask(payload, sum(len(str(m.get("content", ""))) for m in messages))

    async def check_grammar(self, spec: str) -> None:
        await self._ask({"grammar": spec}, len(spec))

    async def _ask(self, payload: dict[str, Any], size: int) -> list[int]:
        if self._closed or not self._tasks or all(task.done() for task in self._tasks):
            raise PromptError("the text workers are not running", "server_error")
        if size * 4 > MAX_FRAME:
            raise PromptError(f"the prompt has {size} characters; at most {MAX_FRAME // 4}", "prompt_too_costly")
        item = _Item(payload, size, asyncio.get_running_loop().create_future())
        self._waiting.append(item)
        self._arrived.set()
        return await item.future

    async def _serve(self, worker: _Worker | None) -> None:
        """One worker after another, for as long as the pool lives."""
        items: list[_Item] = []
        try:
            while True:
                if worker is None:
                    worker = await self._spawn()
                items = await self._take()
                try:
                    await self._run(worker, items)
                except _Died as died:
                    await worker.kill()
                    worker = None
                    self._blame(items, died)
                items = []
        except Exception as error:  # no process to be had, or a worker that talks nonsense: nobody may wait for ever
            self._waiting.extendleft(item for item in reversed(items) if not item.future.done())
            if sum(not task.done() for task in self._tasks) <= 1:
                self._fail_waiting(str(error))
            self._arrived.set()
        finally:
            if worker is not None:
                await worker.kill()

    async def _take(self) -> list[_Item]:
        while not self._waiting:
            self._arrived.clear()
            await self._arrived.wait()
        # a fair share of what waits, so that one worker does not queue what another could do now
        share = max(1, min(_BATCH_ITEMS, -(-len(self._waiting) // self._limits.workers)))
        items, size = [self._waiting.popleft()], 0
        while self._waiting and len(items) < share and size + self._waiting[0].size < _BATCH_BYTES:
            items.append(self._waiting.popleft())
            size += items[-1].size
        return items

    async def _run(self, worker: _Worker, items: list[_Item]) -> None:
        await worker.send([item.payload for item in items])
        for item in items:
            reply = await worker.receive(4 * self._limits.cpu_seconds)
            item.answered = True
            if item.future.done():  # cancelled by whoever asked
                continue
            if "ids" in reply:
                item.future.set_result(reply["ids"])
            elif "long" in reply:
                n = reply["long"]
                message = f"the prompt has {n} tokens, more than the {self._limits.max_ids} that are taken here"
                item.future.set_exception(PromptError(message, "context_length_exceeded", n))
            else:
                item.future.set_exception(PromptError(reply["error"], reply["code"]))

    def _blame(self, items: list[_Item], died: _Died) -> None:
        """The first unanswered item was being worked on: its error if it overran, or if a second worker died of it
        (the first may have been killed by something else). The others wait for the next worker."""
        left = [item for item in items if not item.answered]
        if left:
            left[0].deaths += 1
            if died.overran or left[0].deaths > 1:
                future = left.pop(0).future
                if not future.done():
                    future.set_exception(PromptError(f"the prompt could not be made: {died}", "prompt_too_costly"))
        self._waiting.extendleft(item for item in reversed(left) if not item.future.done())
        self._arrived.set()

    def _fail_waiting(self, why: str) -> None:
        while self._waiting:
            item = self._waiting.popleft()
            if not item.future.done():
                item.future.set_exception(PromptError(why, "server_error"))

    async def _spawn(self) -> _Worker:
        """A worker that has read the checkpoint. Raises TextError after a few failed starts."""
        settings = {
            "folder": str(self._folder),
            "cpu_seconds": self._limits.cpu_seconds,
            "memory_bytes": self._limits.memory_bytes,
            "max_ids": self._limits.max_ids,
        }
        said = ""
        for _ in range(_MAX_FAILED_STARTS):
            worker = await _Worker.start(settings)
            try:
                hello = await worker.receive(_START_SECONDS)
            except _Died as died:
                said = str(died)
                await worker.kill()
                continue
            except asyncio.CancelledError:
                await worker.kill()
                raise
            if hello.get("ready"):
                return worker
            await worker.kill()
            raise TextError(hello.get("failed", "the text worker said nothing"))
        raise TextError(f"a text worker for {self._folder} ended {_MAX_FAILED_STARTS} times while starting: {said}")


class _Worker:
    """One process and its two pipes."""

    def __init__(self, process: asyncio.subprocess.Process) -> None:
        self._process = process

    @classmethod
    async def start(cls, settings: dict[str, Any]) -> _Worker:
        # a session of its own: the terminal's ^C is for the parent, which then ends its workers in order
        process = await asyncio.create_subprocess_exec(
            sys.executable,
            "-m",
            f"{__package__}.text_worker",
            json.dumps(settings),
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
            limit=1 << 22,
            start_new_session=True,
        )
        return cls(process)

    async def send(self, value: Any) -> None:
        assert self._process.stdin is not None
        with contextlib.suppress(ConnectionError):  # its death shows when the answer is read
            self._process.stdin.write(frame(value))
            await self._process.stdin.drain()

    async def receive(self, seconds: float) -> dict[str, Any]:
        assert self._process.stdout is not None
        try:
            async with asyncio.timeout(seconds):
                head = await self._process.stdout.readexactly(4)
                length = int.from_bytes(head, "little")
                if length > MAX_FRAME:
                    raise _Died(f"its text worker announced {length} bytes")
                value: dict[str, Any] = json.loads(await self._process.stdout.readexactly(length))
                return value
        except TimeoutError:
            raise _Died(f"it took longer than {seconds:g} s", overran=True) from None
        except (asyncio.IncompleteReadError, ConnectionError):
            code = await self._process.wait()
            if code == -signal.SIGPROF:
                raise _Died("it took too much processor time", overran=True) from None
            raise _Died(f"its text worker ended with exit code {code} (too much memory?)") from None

    async def kill(self) -> None:
        """Ends the process and waits for it."""
        with contextlib.suppress(ProcessLookupError):
            self._process.kill()
        await self._process.wait()
