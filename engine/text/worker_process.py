"""A text worker's process as the pool sees it: two pipes, frames there and back, and how it died."""

from __future__ import annotations

import asyncio
import contextlib
import json
import signal
import sys
from array import array
from itertools import accumulate, pairwise
from typing import Any

from .worker import MAX_FRAME, frame


class WorkerDied(Exception):
    """The worker ended in the middle of an item; `overran`: because of it, beyond doubt."""

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
