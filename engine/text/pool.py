"""Encodes text in worker processes: `await pool.encode(…)`, in order, fair among owners. A worker that hangs or uses
too much memory is killed and replaced; only an item that was the cause gets an error. A worker that cannot be started
is tried again until it can: `failure` says why none runs. Long items leave one worker free for the others.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections import OrderedDict, deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from .chat_shape import SIMPLE_KINDS
from .process import STARTING_LOOKS, WorkerDied, WorkerProcess
from .text_files import RESTORE, changed_files
from .tokenizer import ChatOptions, ChatSupport, TextError
from .worker import MAX_FRAME

log = logging.getLogger(__name__)


_BATCH_ITEMS, _BATCH_BYTES = 64, 1 << 20
LARGE_BYTES = 64 << 10
"""An item larger than this may take long: it is sent alone, and one worker is always free of such items."""
Blob = bytes | memoryview
_MAX_FAILED_STARTS = 3  # of the first worker, before any has run
_FIRST_WAIT_S, _LONGEST_WAIT_S = 0.1, 5.0
_OWN_DEATHS, _ALL_DEATHS = 2, 5
"""Workers that exited during an item, by an error of their own or in any way, after which the item is the cause."""


class PromptError(ValueError):
    """This text cannot become a prompt; `code` is for the error object: chat_template_error, prompt_too_costly,
    context_length_exceeded, invalid_grammar."""

    def __init__(self, message: str, code: str) -> None:
        super().__init__(message)
        self.code = code


class TextUnavailable(OSError):
    """No text worker runs: not the text's fault. It may be sent again later."""


class Encoder:
    """Encodes text by `ask`, which a subclass defines. Every method may raise PromptError or TextUnavailable."""

    async def ask(self, payload: dict[str, Any], size: int, blob: Blob = b"") -> dict[str, Any]:
        """Returns the result of worker.py's `answer` for one item; `size` in characters, or bytes of `blob`."""
        raise NotImplementedError

    async def encode(self, text: str, add_special_tokens: bool = True, longer: int = 1) -> Sequence[int]:
        """Encodes a plain prompt of at most `longer` times the usual number of tokens."""
        payload = {"text": text, "add_special_tokens": add_special_tokens, "longer": longer}
        return (await self._ids(payload, len(text)))[0]

    async def encode_chat(self, messages: list[dict[str, Any]], options: ChatOptions, longer: int = 1) -> Sequence[int]:
        payload = {"messages": messages, "options": asdict(options), "longer": longer}
        return (await self._ids(payload, sum(len(str(m.get("content", ""))) for m in messages)))[0]

    async def check_grammar(self, spec: str) -> tuple[str, tuple[str, ...]]:
        """Returns a grammar (llguidance's JSON) as ranks compile it, and what of it is not enforced. Raises PromptError
        if it cannot be used, or the library is not installed."""
        reply = await self.ask({"grammar": spec}, len(spec))
        if "grammar" not in reply:
            raise PromptError(reply["error"], reply["code"])
        return reply["grammar"], tuple(reply["unenforced"])

    async def bad_word_ids(self, words: tuple[str, ...]) -> tuple[tuple[int, ...], ...]:
        """See TextModel."""
        return tuple(map(tuple, await self._ids({"words": words}, sum(map(len, words)))))

    async def _ids(self, payload: dict[str, Any], size: int) -> Sequence[Sequence[int]]:
        reply = await self.ask(payload, size)
        if "ids" not in reply:
            raise PromptError(reply["error"], reply["code"])
        ids: Sequence[Sequence[int]] = reply["ids"]
        return ids


@dataclass(frozen=True, slots=True)
class PoolLimits:
    """An item's `cpu_seconds` of processor time, a worker's `memory_bytes`, and `max_ids`; `special_in_content`: as
    model.allow_special_tokens_in_content."""

    workers: int = 2
    cpu_seconds: float = 10.0
    memory_bytes: int = 4 << 30
    max_ids: int = 1 << 20
    special_in_content: bool = True


@dataclass(slots=True)
class _Item:
    payload: dict[str, Any]
    size: int
    future: asyncio.Future[dict[str, Any]]
    owner: str = ""
    stream: str = ""
    patience_s: float = 0.0
    blob: Blob = b""
    answered: bool = False
    deaths: int = 0
    own_deaths: int = 0

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

    def drop(self, condition: Callable[[_Item], bool]) -> list[_Item]:
        """Removes the items for which the condition holds."""
        items, dropped = list(iter(self.next, None)), list[_Item]()
        for item in items:
            if condition(item):
                dropped.append(item)
            else:
                self.put(item)
        return dropped


@dataclass(slots=True)
class _Slot:
    """The place of one worker. `failures`: failed starts and workers that exited unused, in a row; `reason` of the last
    failed start, "" since a worker runs."""

    worker: WorkerProcess | None = None
    failures: int = 0
    reason: str = ""
    since: float = 0.0

    def failed(self, reason: str) -> None:
        if reason != self.reason:
            log.error("a text worker cannot be started: %s", reason, extra={"event": "text_worker"})
        self.since = self.since if self.reason else time.monotonic()
        self.reason = reason

    def runs(self, worker: WorkerProcess) -> None:
        if self.reason:
            log.info("a text worker runs again", extra={"event": "text_worker"})
        self.worker, self.reason = worker, ""

    @property
    def wait_s(self) -> float:
        """Seconds before the next start."""
        return min(_LONGEST_WAIT_S, _FIRST_WAIT_S * 2 ** min(self.failures, 10)) if self.failures else 0.0


class TextPool:
    """Workers for one checkpoint folder, as an async context. `module`: another worker program. `files`: the text_files
    that every worker must have read; None: those of the first worker."""

    def __init__(
        self,
        folder: Path,
        limits: PoolLimits = PoolLimits(),
        module: str = f"{__package__}.worker",
        files: Mapping[str, str] | None = None,
    ) -> None:
        self._folder, self._limits, self._module, self.checked_files = folder, limits, module, files
        self.chat = ChatSupport()
        """What the first worker found out about the chat template."""
        self.waiting = _Queues()
        self._large = 0
        self._arrived = asyncio.Event()
        self.slots = [_Slot() for _ in range(limits.workers)]
        self._tasks: list[asyncio.Task[None]] = []

    async def __aenter__(self) -> TextPool:
        """Starts the workers. Raises TextError if the first one cannot read the checkpoint, or exits repeatedly."""
        for attempt in range(1, _MAX_FAILED_STARTS + 1):
            try:
                self.slots[0].runs(await self._spawn())
                self._report()
                break
            except (WorkerDied, OSError) as error:
                if attempt == _MAX_FAILED_STARTS:
                    message = f"a text worker for {self._folder} failed to start {attempt} times: {error}"
                    raise TextError(message) from error
        self._tasks = [asyncio.create_task(self._serve(slot)) for slot in self.slots]
        return self

    async def __aexit__(self, *exc: object) -> None:
        tasks, self._tasks = self._tasks, []
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        self._give_up(lambda item: True, "the text workers are closed")

    def of(self, owner: str, stream: str = "", patience_s: float = 0.0) -> OwnedPool:
        """The pool for this owner; the streams of one owner share its turns. `patience_s`: how long its items wait
        while no worker can be started."""
        return OwnedPool(self, owner, stream, patience_s)

    @property
    def failure(self) -> str:
        """Why no worker runs; "" while one does, or is only being replaced."""
        reasons = [slot.reason for slot in self.slots]
        return f"no text worker runs: {reasons[0]}" if all(reasons) else ""

    async def ask(self, item: _Item) -> dict[str, Any]:
        """Returns a worker's answer to the item. Raises PromptError or TextUnavailable."""
        if not self._tasks:
            raise TextUnavailable("the text workers are not running")
        if item.size * 4 > MAX_FRAME:
            message = f"the prompt has {item.size} characters; at most {MAX_FRAME // 4}"
            raise PromptError(message, "prompt_too_costly")
        if self.failure and self._out_of_patience(item):
            raise TextUnavailable(self.failure)
        self.waiting.put(item)
        self._arrived.set()
        return await item.future

    async def _serve(self, slot: _Slot) -> None:
        """Runs one worker after another until the pool is closed."""
        try:
            while True:
                if slot.worker is None:
                    await asyncio.sleep(slot.wait_s)
                    await self._start(slot)
                else:
                    await self._work(slot, slot.worker)
        finally:
            if slot.worker is not None:
                await slot.worker.kill()

    async def _start(self, slot: _Slot) -> None:
        try:
            slot.runs(await self._spawn())
        except Exception as error:  # also of what is not expected here: no caller may wait for ever
            slot.failures += 1
            slot.failed(str(error) or repr(error))
            if self.failure:
                self._give_up(self._out_of_patience, self.failure)

    async def _work(self, slot: _Slot, worker: WorkerProcess) -> None:
        """Lets the worker answer the next items."""
        items = await self._take(worker)
        if worker.ended:  # while it had nothing to do: no item's fault
            self._again(items)
            await self._replace(slot, worker)
            return
        large = items[0].large
        self._large += large
        try:
            await self._run(worker, items)
        except asyncio.CancelledError:
            self._again(items)  # closing fails them with what waits
            raise
        except Exception as error:
            died = error if isinstance(error, WorkerDied) else WorkerDied(repr(error), itself=True)
            level = logging.INFO if died.overran else logging.WARNING
            log.log(level, "a text worker is replaced: %s", died, extra={"event": "text_worker"})
            self._blame(items, died)
            await self._replace(slot, worker)
        finally:
            self._large -= large
            self._arrived.set()

    async def _replace(self, slot: _Slot, worker: WorkerProcess) -> None:
        slot.failures = 0 if worker.answers > 1 else slot.failures + 1
        await worker.kill()  # the slot keeps it as long: a pool that closes meanwhile waits for its end
        slot.worker = None

    async def _take(self, worker: WorkerProcess) -> list[_Item]:
        """Takes the next items for one worker: a fair share of the queue, so that no item waits for it while another
        worker is idle. A large item is taken alone, and one worker is reserved for small ones. Returns [] if the worker
        exits first."""
        while (first := self._next(self._large >= max(1, self._limits.workers - 1))) is None:
            if worker.ended:
                return []
            self._arrived.clear()
            await self._arrived.wait()
        share = max(1, min(_BATCH_ITEMS, -(-(self.waiting.count + 1) // self._limits.workers)))
        items, size = [first], first.size
        while not first.large and len(items) < share and size < _BATCH_BYTES:
            item = self._next(small=True)
            if item is None:
                break
            items.append(item)
            size += item.size
        return items

    def _next(self, small: bool) -> _Item | None:
        """The next item whose caller still waits."""
        while (item := self.waiting.next(small)) is not None and item.future.done():
            pass
        return item

    async def _run(self, worker: WorkerProcess, items: list[_Item]) -> None:
        async with worker.watched():
            payloads = [{**item.payload, "blob": len(item.blob)} if item.blob else item.payload for item in items]
            await worker.send(payloads)
            for item in items:
                await worker.send_raw(item.blob)
            for item in items:
                reply = await worker.receive()
                item.answered = True
                if not item.future.done():  # cancelled by the caller
                    item.future.set_result(reply)

    def _blame(self, items: list[_Item], died: WorkerDied) -> None:
        """Handles the items of a dead worker, which was working on the first unanswered one. That item fails if it used
        up its processor time, or if further workers died during it. The others wait for the next worker."""
        left = [item for item in items if not item.answered]
        if left:
            first = left[0]
            first.deaths, first.own_deaths = first.deaths + 1, first.own_deaths + died.itself
            if died.overran or first.own_deaths >= _OWN_DEATHS or first.deaths >= _ALL_DEATHS:
                left.pop(0)
                if not first.future.done():
                    error = PromptError(f"the prompt could not be made: {died}", "prompt_too_costly")
                    first.future.set_exception(error)
        self._again(left)

    def _again(self, items: list[_Item]) -> None:
        for item in reversed(items):
            if not item.future.done():
                self.waiting.put(item, first=True)
        self._arrived.set()

    def _out_of_patience(self, item: _Item) -> bool:
        return item.patience_s <= time.monotonic() - max(slot.since for slot in self.slots)

    def _give_up(self, condition: Callable[[_Item], bool], why: str) -> None:
        for item in self.waiting.drop(condition):
            if not item.future.done():
                item.future.set_exception(TextUnavailable(why))

    async def _spawn(self) -> WorkerProcess:
        """Starts a worker that has read the checkpoint. Raises TextError, WorkerDied or OSError."""
        worker = await WorkerProcess.start(self._module, {"folder": str(self._folder), **asdict(self._limits)})
        worker.exit.add_done_callback(lambda _: self._arrived.set())
        try:
            async with worker.watched(STARTING_LOOKS):
                hello = await worker.receive()
            if not hello.get("ready"):
                raise TextError(hello.get("failed", "the text worker sent no reason"))
            self._check_files(hello.get("files"))
            self.chat = ChatSupport(**hello["chat"])
        except BaseException:
            await worker.kill()
            raise
        return worker

    def _report(self) -> None:
        if self.chat.shape:
            formats = f"tools {self.chat.tool_format or 'none'}, reasoning {self.chat.reasoning or 'none'}"
            log.info("chat template: %s; formats: %s", self.chat.shape, formats, extra={"event": "chat_template"})
        if kinds := [*self.chat.lost, *self.chat.refused]:
            # Many templates know no tools and no later system messages; one that loses a simple chat is a surprise.
            level = logging.WARNING if {*kinds} & {*SIMPLE_KINDS} else logging.INFO
            text = "chat template: cannot render %s: such chats are refused"
            log.log(level, text, ", ".join(kinds), extra={"event": "chat_template"})

    def _check_files(self, files: Mapping[str, str] | None) -> None:
        """Compares what a worker read with what this process and the other workers read. Raises TextError."""
        if files is None:
            raise TextError("the text worker did not report which files it read")
        self.checked_files = files if self.checked_files is None else self.checked_files
        if changed := changed_files(self.checked_files, files):
            raise TextError(f"{self._folder / changed[0]} changed since this process read it: {RESTORE}")


class OwnedPool(Encoder):
    """A pool as used by one owner."""

    def __init__(self, pool: TextPool, owner: str, stream: str, patience_s: float) -> None:
        self._pool, self._owner, self._stream, self._patience_s = pool, owner, stream, patience_s

    async def ask(self, payload: dict[str, Any], size: int, blob: Blob = b"") -> dict[str, Any]:
        future = asyncio.get_running_loop().create_future()
        return await self._pool.ask(_Item(payload, size, future, self._owner, self._stream, self._patience_s, blob))
