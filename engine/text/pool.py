"""Encodes text in worker processes: `await pool.encode(…)`, in order, fair among owners. A worker that hangs or uses
too much memory is killed and replaced; only its item gets an error. Long items leave one worker free for the others.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import signal
import sys
from array import array
from collections import OrderedDict, deque
from dataclasses import asdict, dataclass
from itertools import accumulate, pairwise
from pathlib import Path
from typing import Any

from .tokenizer import ChatOptions, TextError
from .worker import MAX_FRAME, frame


class WorkerDied(Exception):
    """The worker exited during an item; `overran`: certainly because of that item."""

    def __init__(self, why: str, overran: bool = False) -> None:
        super().__init__(why)
        self.overran = overran


class WorkerProcess:
    def __init__(self, process: asyncio.subprocess.Process) -> None:
        self._process = process

    @classmethod
    async def start(cls, module: str, settings: dict[str, Any]) -> WorkerProcess:
        # a session of its own: the terminal's ^C is for the parent, which then ends its workers in order
        process = await asyncio.create_subprocess_exec(
            sys.executable,
            "-m",
            module,
            json.dumps(settings),
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
            limit=1 << 22,
            start_new_session=True,
        )
        return cls(process)

    @property
    def ended(self) -> bool:
        return self._process.returncode is not None

    async def send(self, value: Any) -> None:
        await self.send_raw(frame(value))

    async def send_raw(self, data: bytes | memoryview) -> None:
        assert self._process.stdin is not None
        with contextlib.suppress(ConnectionError):  # its death shows when the answer is read
            self._process.stdin.write(data)
            await self._process.stdin.drain()

    async def receive(self, seconds: float) -> dict[str, Any]:
        assert self._process.stdout is not None
        try:
            async with asyncio.timeout(seconds):
                value: dict[str, Any] = json.loads(await self._frame())
                if "ids" in value:
                    packed, ends = array("I", await self._frame()), list(accumulate(value["ids"], initial=0))
                    value["ids"] = [packed[start:end].tolist() for start, end in pairwise(ends)]
                elif "answer" in value:
                    value["answer"] = await self._frame()
                return value
        except TimeoutError:
            raise WorkerDied(f"it took longer than {seconds:g} s", overran=True) from None
        except (asyncio.IncompleteReadError, ConnectionError):
            code = await self._process.wait()
            if code == -signal.SIGPROF:
                raise WorkerDied("it took too much processor time", overran=True) from None
            raise WorkerDied(f"its text worker ended with exit code {code} (too much memory?)") from None

    async def _frame(self) -> bytes:
        assert self._process.stdout is not None
        length = int.from_bytes(await self._process.stdout.readexactly(4), "little")
        if length > MAX_FRAME:
            raise WorkerDied(f"its text worker announced {length} bytes")
        return await self._process.stdout.readexactly(length)

    async def kill(self) -> None:
        with contextlib.suppress(ProcessLookupError):
            self._process.kill()
        await self._process.wait()


_BATCH_ITEMS, _BATCH_BYTES = 64, 1 << 20
LARGE_BYTES = 64 << 10
"""An item larger than this may take long: it is sent alone, and one worker is always free of such items."""
Blob = bytes | memoryview
_START_SECONDS = 120.0
_MAX_FAILED_STARTS = 3


class PromptError(ValueError):
    """This text cannot become a prompt; `code` is for the error object: chat_template_error, prompt_too_costly,
    context_length_exceeded, invalid_grammar, server_error."""

    def __init__(self, message: str, code: str) -> None:
        super().__init__(message)
        self.code = code


class Encoder:
    """Encodes text by `ask`, which a subclass defines. Every method may raise PromptError."""

    async def ask(self, payload: dict[str, Any], size: int, blob: Blob = b"") -> dict[str, Any]:
        """Returns the result of worker.py's `answer` for one item; `size` in characters, or bytes of `blob`."""
        raise NotImplementedError

    async def encode(self, text: str, add_special_tokens: bool = True, longer: int = 1) -> list[int]:
        """Encodes a plain prompt of at most `longer` times the usual number of tokens."""
        payload = {"text": text, "add_special_tokens": add_special_tokens, "longer": longer}
        return (await self._ids(payload, len(text)))[0]

    async def encode_chat(self, messages: list[dict[str, Any]], options: ChatOptions, longer: int = 1) -> list[int]:
        payload = {"messages": messages, "options": asdict(options), "longer": longer}
        return (await self._ids(payload, sum(len(str(m.get("content", ""))) for m in messages)))[0]

    async def check_grammar(self, spec: str) -> None:
        """Raises PromptError if a grammar (llguidance's JSON) cannot be used, or the library is not installed."""
        await self._ids({"grammar": spec}, len(spec))

    async def bad_word_ids(self, words: tuple[str, ...]) -> tuple[tuple[int, ...], ...]:
        """See TextModel."""
        return tuple(map(tuple, await self._ids({"words": words}, sum(map(len, words)))))

    async def _ids(self, payload: dict[str, Any], size: int) -> list[list[int]]:
        reply = await self.ask(payload, size)
        if "ids" not in reply:
            raise PromptError(reply["error"], reply["code"])
        found: list[list[int]] = reply["ids"]
        return found


@dataclass(frozen=True, slots=True)
class PoolLimits:
    """An item's `cpu_seconds` (four times that in wall-clock time), a worker's `memory_bytes`, and `max_ids`."""

    workers: int = 2
    cpu_seconds: float = 10.0
    memory_bytes: int = 4 << 30
    max_ids: int = 1 << 20


@dataclass(slots=True)
class _Item:
    payload: dict[str, Any]
    size: int
    future: asyncio.Future[dict[str, Any]]
    owner: str = ""
    stream: str = ""
    blob: Blob = b""
    answered: bool = False
    deaths: int = 0

    @property
    def large(self) -> bool:
        return self.size > LARGE_BYTES


class _Queues:
    """Queued items by owner, stream and size class. Owners take turns, and so do the streams of each owner."""

    def __init__(self) -> None:
        self._owners: OrderedDict[str, OrderedDict[tuple[str, bool], deque[_Item]]] = OrderedDict()
        self.count = 0

    def put(self, item: _Item, first: bool = False) -> None:
        queue = self._owners.setdefault(item.owner, OrderedDict()).setdefault((item.stream, item.large), deque())
        (queue.appendleft if first else queue.append)(item)
        self.count += 1

    def next(self, small: bool = False) -> _Item | None:
        """Takes the next item, or None; `small`: only from items that are not large."""
        for owner, queues in self._owners.items():
            for key, queue in queues.items():
                if not (small and key[1]):
                    item = queue.popleft()
                    self.count -= 1
                    queues.move_to_end(key)
                    self._owners.move_to_end(owner)
                    if not queue:
                        del queues[key]
                    if not queues:
                        del self._owners[owner]
                    return item
        return None


class TextPool:
    """Workers for one checkpoint folder, as an async context. `module`: another worker program."""

    def __init__(self, folder: Path, limits: PoolLimits = PoolLimits(), module: str = f"{__package__}.worker") -> None:
        self._folder, self._limits, self._module = folder, limits, module
        self._waiting = _Queues()
        self._large = 0
        self._arrived = asyncio.Event()
        self._tasks: list[asyncio.Task[None]] = []
        self._closed = False

    async def __aenter__(self) -> TextPool:
        """Starts the workers. Raises TextError if the first one cannot read the checkpoint."""
        first = await self._spawn()
        self._tasks = [asyncio.create_task(self._serve(first))]
        self._tasks += [asyncio.create_task(self._serve(None)) for _ in range(self._limits.workers - 1)]
        return self

    async def __aexit__(self, *exc: object) -> None:
        self._closed = True
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        self._fail_waiting("the text workers are closed")

    def of(self, owner: str, stream: str = "") -> OwnedPool:
        """The pool for this owner; the streams of one owner share its turns."""
        return OwnedPool(self, owner, stream)

    async def ask(
        self, owner: str, stream: str, payload: dict[str, Any], size: int, blob: Blob = b""
    ) -> dict[str, Any]:
        if self._closed or not self._tasks or all(task.done() for task in self._tasks):
            raise PromptError("the text workers are not running", "server_error")
        if size * 4 > MAX_FRAME:
            raise PromptError(f"the prompt has {size} characters; at most {MAX_FRAME // 4}", "prompt_too_costly")
        item = _Item(payload, size, asyncio.get_running_loop().create_future(), owner, stream, blob)
        self._waiting.put(item)
        self._arrived.set()
        return await item.future

    async def _serve(self, worker: WorkerProcess | None) -> None:
        """Runs one worker after another until the pool is closed."""
        items: list[_Item] = []
        try:
            while True:
                if worker is None:
                    worker = await self._spawn()
                items = await self._take()
                if worker.ended:  # while it had nothing to do: no item's fault
                    self._again(items)
                    worker, items = None, []
                    continue
                large = items[0].large
                self._large += large
                try:
                    await self._run(worker, items)
                except WorkerDied as died:
                    await worker.kill()
                    worker = None
                    self._blame(items, died)
                finally:
                    self._large -= large
                    self._arrived.set()
                items = []
        except asyncio.CancelledError:
            self._again(items)  # closing fails them with what waits
            raise
        except Exception as error:  # no process to be had, or a worker that talks nonsense: no caller may wait for ever
            self._again(items)
            if sum(not task.done() for task in self._tasks) <= 1:
                self._fail_waiting(str(error))
        finally:
            if worker is not None:
                await worker.kill()

    async def _take(self) -> list[_Item]:
        """Takes the next items for one worker: a fair share of the queue, so that no item waits for it while another
        worker is idle. A large item is taken alone, and one worker is reserved for small ones."""
        while (first := self._waiting.next(self._large >= max(1, self._limits.workers - 1))) is None:
            self._arrived.clear()
            await self._arrived.wait()
        share = max(1, min(_BATCH_ITEMS, -(-(self._waiting.count + 1) // self._limits.workers)))
        items, size = [first], first.size
        while not first.large and len(items) < share and size < _BATCH_BYTES:
            item = self._waiting.next(small=True)
            if item is None:
                break
            items.append(item)
            size += item.size
        return items

    async def _run(self, worker: WorkerProcess, items: list[_Item]) -> None:
        await worker.send([{**item.payload, "blob": len(item.blob)} if item.blob else item.payload for item in items])
        for item in items:
            await worker.send_raw(item.blob)
        for item in items:
            reply = await worker.receive(4 * self._limits.cpu_seconds)
            item.answered = True
            if not item.future.done():  # cancelled by the caller
                item.future.set_result(reply)

    def _blame(self, items: list[_Item], died: WorkerDied) -> None:
        """Handles the items of a dead worker, which was working on the first unanswered one. That item fails if it
        overran, or if a second worker died during it (the first may have been killed by something else). The others
        wait for the next worker."""
        left = [item for item in items if not item.answered]
        if left:
            left[0].deaths += 1
            if died.overran or left[0].deaths > 1:
                future = left.pop(0).future
                if not future.done():
                    future.set_exception(PromptError(f"the prompt could not be made: {died}", "prompt_too_costly"))
        self._again(left)

    def _again(self, items: list[_Item]) -> None:
        for item in reversed(items):
            if not item.future.done():
                self._waiting.put(item, first=True)
        self._arrived.set()

    def _fail_waiting(self, why: str) -> None:
        while (item := self._waiting.next()) is not None:
            if not item.future.done():
                item.future.set_exception(PromptError(why, "server_error"))

    async def _spawn(self) -> WorkerProcess:
        """Starts a worker that has read the checkpoint. Raises TextError after a few failed starts."""
        settings, said = {"folder": str(self._folder), **asdict(self._limits)}, ""
        for _ in range(_MAX_FAILED_STARTS):
            worker = await WorkerProcess.start(self._module, settings)
            try:
                hello = await worker.receive(_START_SECONDS)
            except WorkerDied as died:
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


class OwnedPool(Encoder):
    """A pool as used by one owner."""

    def __init__(self, pool: TextPool, owner: str, stream: str) -> None:
        self._pool, self._owner, self._stream = pool, owner, stream

    async def ask(self, payload: dict[str, Any], size: int, blob: Blob = b"") -> dict[str, Any]:
        return await self._pool.ask(self._owner, self._stream, payload, size, blob)
