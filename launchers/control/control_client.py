"""A rank's end of the control channel, on two threads of its own, so that heartbeats and the loss of the channel do not
depend on the main thread. Create it before importing torch: start-up then sends heartbeats. A rank whose channel ends
without a Shutdown, or is silent for its Welcome's silence_s, exits at once, which frees its device for the next launch.
"""

from __future__ import annotations

import contextlib
import faulthandler
import math
import os
import socket
import sys
import threading
import time
import traceback
from collections import deque
from collections.abc import Callable, MutableMapping, Sequence
from dataclasses import replace
from typing import Any, cast

from ... import __version__
from ...engine.request import TokensEvent
from ...topology.hardware.cpu_quota import memory_limit
from ...topology.placement.machines import boot_id, own_addresses
from . import frames, messages
from .connecting import connect
from .control import ENV_ADDRESS, ENV_SECRET, WATCHDOG_S
from .frames import FrameError
from .processes import start_time
from .pulse import PulseThread, start_pulse

BEAT_S = 1.0
BACKLOG_LIMIT = 64 << 20
DUMP_LIMIT = 4 << 20
EXIT_CHANNEL_LOST = 75
"""The exit status of a rank that lost its channel (EX_TEMPFAIL: nothing is wrong with the rank)."""


def address_and_secret(environ: MutableMapping[str, str]) -> tuple[str, bytes]:
    """The launch's variables; removes the secret from the environment. Raises ValueError if they are missing."""
    address, secret = environ.get(ENV_ADDRESS, ""), environ.pop(ENV_SECRET, "")
    if not address or len(secret) != 2 * frames.SECRET_BYTES:
        raise ValueError(
            f"{ENV_ADDRESS} and {ENV_SECRET} are not set: workers are started by `laddertron serve` or `run`"
        )
    return address, bytes.fromhex(secret)


def _end_process(reason: str) -> None:
    os.write(2, f"laddertron: this rank ends itself: {reason}\n".encode())
    os._exit(EXIT_CHANNEL_LOST)


class ControlClient:
    """Connected and authenticated once constructed; `config` is what to run. `beat` is called every second from
    another thread, so it may only read plain attributes; `dump` (same rule) adds to the stacks that a Dump asks for.
    `watchdog` starts the rank's pulse (pulse.py), else faulthandler's timer, which ends a process whose C code holds
    the interpreter's lock. `end` is called with a reason when the channel is lost (tests replace it). Raises
    ConnectionError naming why."""

    def __init__(
        self,
        address: str,
        secret: bytes,
        rank: int,
        local_rank: int,
        beat: Callable[[], messages.Beat],
        dump: Callable[[], dict[str, Any]] | None = None,
        *,
        silence_s: float | None = None,
        watchdog: bool = True,
        version: str = __version__,
        end: Callable[[str], None] = _end_process,
    ) -> None:
        self.rank = rank
        self._beat, self._dump, self._end = beat, dump, end
        self._watchdog = watchdog
        self._lock = threading.Condition()
        self._commands: deque[messages.Command] = deque()
        self._outgoing: deque[bytes] = deque()
        self._outgoing_bytes = 0
        self._closing = self._over = self.shutdown_announced = False
        self._assembled: messages.Assembled | None = None
        self._doors: messages.Doors | None = None
        self._finished = threading.Event()
        self._beat_broken = False
        self._armed = -math.inf

        self._socket, self._reader, self._writer = connect(address, secret, rank)
        welcome = self._receive()
        if not isinstance(welcome, messages.Welcome):
            raise ConnectionError(f"the daemon began with {type(welcome).__name__}, not Welcome")
        self.config, self.replica = welcome.config, welcome.replica
        self.standby = welcome.standby
        self._silence_s = welcome.silence_s if silence_s is None else silence_s
        self._socket.settimeout(self._silence_s)
        pid = os.getpid()
        host, here = socket.gethostname(), own_addresses(self._socket.getsockname()[0])
        limit = memory_limit() or 0
        self._put(messages.Hello(rank, local_rank, host, pid, start_time(pid) or 0, boot_id(), version, here, limit))
        threads = (self._write_on, "control-write"), (self._read_on, "control-read")
        writer, reader = self._threads = [threading.Thread(target=t, name=name, daemon=True) for t, name in threads]
        self._pulse: PulseThread | None = None
        writer.start()
        if watchdog and writer.native_id is not None:
            self._pulse = start_pulse(address, secret, rank, writer.native_id, self._silence_s, EXIT_CHANNEL_LOST)
        reader.start()

    def poll(self, timeout: float | None = 0.0) -> list[messages.Command]:
        """Messages since the last call, in order; sleeps up to `timeout` seconds (None: no limit) for the first."""
        if not self._commands and (timeout is None or timeout > 0):
            with self._lock:
                self._lock.wait_for(lambda: self._commands or self._over, timeout)
        commands = []
        while self._commands:  # the reader only appends: no lock on the way of every step
            commands.append(self._commands.popleft())
        return commands

    def wait_for_ranks(self) -> tuple[str, ...]:
        """Waits until every rank of the job is connected to its owner, which names those that do not come. Returns the
        hostname of each; () after the channel's end."""
        with self._lock:
            self._lock.wait_for(lambda: self._assembled or self._over)
            return self._assembled.hosts if self._assembled else ()

    def exchange_doors(self, place: str) -> tuple[str, ...]:
        """Sends where this rank listens; returns where each does, () after the channel's end."""
        self._put(messages.Door(place))
        with self._lock:
            self._lock.wait_for(lambda: self._doors or self._over)
            return self._doors.places if self._doors else ()

    def send_state(self, message: messages.StateMessage) -> None:
        if isinstance(message, messages.Loading):
            message = replace(message, detail=message.detail[: messages.MAX_NAME])
        self._put(message)

    def send_tokens(self, events: Sequence[TokensEvent]) -> None:
        """Queues tokens; blocks while 64 MiB are queued. An event too large for a message ends its request with an
        error."""
        if len(events) > messages.MAX_EVENTS:
            for at in range(0, len(events), messages.MAX_EVENTS):
                self.send_tokens(events[at : at + messages.MAX_EVENTS])
            return
        try:
            self._put(messages.Tokens(tuple(events)))
        except ValueError as error:
            if len(events) > 1:
                for event in events:
                    self.send_tokens([event])
                return
            (event,) = events
            if event.logprobs is None and event.prompt_logprobs is None:
                raise
            self._commands.append(messages.Cancel(event.request_id))
            text = f"its logprobs are too many for one message: {error}"
            self._put(
                messages.Tokens((replace(event, finish="error", logprobs=None, prompt_logprobs=None, message=text),))
            )

    def fail(self, text: str, *, consequence: bool = False, refused: bool = False, unreached: int = -1) -> None:
        """Reports the failure, waiting up to 2 s. See Failure for its kinds."""
        self._put(messages.Failure(text[-messages.MAX_TEXT :], consequence, refused, unreached))
        self.flush(2.0)

    def flush(self, timeout_s: float) -> bool:
        """Waits until everything queued was passed to the kernel; False after the timeout."""
        with self._lock:
            return self._lock.wait_for(lambda: not self._outgoing_bytes or self._over, timeout_s)

    def close(self) -> None:
        """Sends queued messages (for up to 5 s) and closes the channel, after Shutdown."""
        self.flush(5.0)
        with self._lock:
            self._closing = True
            self._lock.notify_all()
        self._finished.set()
        if self._pulse is not None:
            self._pulse.stop()
        elif self._watchdog:
            faulthandler.cancel_dump_traceback_later()
        with contextlib.suppress(OSError):  # the other side was faster
            self._socket.shutdown(socket.SHUT_RDWR)
        self._socket.close()
        for thread in self._threads:
            if thread is not threading.current_thread():
                thread.join(5.0)

    # threads

    def _put(self, message: messages.RankMessage) -> None:
        payload = messages.to_wire(message)
        if len(payload) > frames.MESSAGE_LIMIT:
            raise ValueError(f"{len(payload)} bytes, the limit is {frames.MESSAGE_LIMIT}")
        with self._lock:
            self._lock.wait_for(lambda: self._outgoing_bytes < BACKLOG_LIMIT or self._over)
            self._outgoing.append(payload)
            self._outgoing_bytes += len(payload)
            self._lock.notify_all()

    def _lost(self, reason: str) -> None:
        with self._lock:
            over, self._over = self._over, True
            self._lock.notify_all()
        if over or self._closing:
            return
        # asked to end and the daemon is gone: the main thread gets some time to finish
        if self.shutdown_announced and self._finished.wait(self._silence_s):
            return
        self._end(reason)

    def _receive(self) -> messages.ServerMessage:
        while (payload := self._reader.next()) is None:
            data = self._socket.recv(1 << 18)
            if not data:
                raise ConnectionError("the daemon closed the control channel")
            self._reader.feed(data)
        return cast(messages.ServerMessage, messages.from_wire(payload, "server"))

    def _read_on(self) -> None:
        try:
            while True:
                self._arm_watchdog()
                self._take(self._receive())
        except TimeoutError:
            self._lost(f"nothing was heard on the control channel for {self._silence_s:g} s")
        except (OSError, ValueError) as error:
            self._lost(str(error))

    def _arm_watchdog(self) -> None:
        if self._pulse is not None:  # it is the watchdog then, and can tell a slow process from a locked one
            self._pulse.heard()
            return
        now = time.monotonic()
        if self._watchdog and not self._closing and now - self._armed > 0.5:  # each time costs a thread
            faulthandler.dump_traceback_later(self._silence_s + WATCHDOG_S, exit=True)
            self._armed = now

    def _take(self, message: messages.ServerMessage) -> None:
        if isinstance(message, messages.Ping):
            return
        if isinstance(message, messages.Dump):
            self._put(messages.DumpReply(message.dump_id, self._dumped()))
            return
        if isinstance(message, messages.Welcome):
            raise FrameError("a second Welcome")
        if isinstance(message, messages.Shutdown):
            self.shutdown_announced = True
        with self._lock:
            if isinstance(message, messages.Assembled):
                self._assembled = message
            elif isinstance(message, messages.Doors):
                self._doors = message
            else:
                self._commands.append(message)
            self._lock.notify_all()

    def _dumped(self) -> dict[str, Any]:
        names = {thread.ident: thread.name for thread in threading.enumerate()}
        stacks = {
            names.get(ident, str(ident)): "".join(traceback.format_stack(frame, 64))
            for ident, frame in sys._current_frames().items()
        }
        try:
            extra = self._dump() if self._dump is not None else {}
            if (size := len(messages.to_wire(messages.DumpReply(0, extra)))) > DUMP_LIMIT:
                raise ValueError(f"a dump of {size} bytes is longer than {DUMP_LIMIT}")
        except Exception as error:  # a broken dump must not cost the stacks, nor the rank
            extra = {"error": repr(error)}
        return {"stacks": stacks, **extra}

    def _write_on(self) -> None:
        due = time.monotonic()
        try:
            while True:
                with self._lock:
                    self._lock.wait_for(lambda: self._outgoing or self._closing, max(0.0, due - time.monotonic()))
                    payload = self._outgoing.popleft() if self._outgoing else None
                    if self._closing or self._over:
                        return
                if payload is not None:
                    self._socket.sendall(self._writer.frame(payload))
                    with self._lock:
                        self._outgoing_bytes -= len(payload)
                        self._lock.notify_all()
                if time.monotonic() >= due:
                    self._socket.sendall(self._writer.frame(messages.to_wire(self._checked_beat())))
                    due = time.monotonic() + BEAT_S
                    if self._pulse is not None:
                        self._pulse.note()
        except TimeoutError:
            self._lost(f"nothing could be sent on the control channel for {self._silence_s:g} s")
        except (OSError, ValueError) as error:
            self._lost(str(error))

    def _checked_beat(self) -> messages.Beat:
        try:
            beat = self._beat()
        except Exception:  # a fault in the figures must not look like a dead rank
            if not self._beat_broken:
                traceback.print_exc()
            self._beat_broken = True
            return messages.Beat()
        rows = tuple(row for row in beat.rows if math.isfinite(row.value))
        return replace(beat, rows=rows, waiting=beat.waiting[: messages.MAX_WAITING])
