"""The thread without Python by which a rank whose heartbeats are late shows that it computes (pulse.c). It ends a rank
whose interpreter is locked or whose owner is silent.
"""

from __future__ import annotations

import ctypes
import os
import threading
from ctypes import c_char_p, c_double, c_int, c_size_t, c_void_p
from typing import Any

from ...topology.transport.native import bind, load
from . import frames, messages
from .connecting import connect

EXTENSION = "laddertron.launchers.control._pulse"
SLOW_S = 120.0
"""Seconds for which a rank may show that it computes without a heartbeat, then it is ended."""
_PULSE = messages.to_wire(messages.Pulse())


class PulseThread:
    """A running thread. `note` and `heard` are called by the threads of the control channel, `stop` at the end."""

    def __init__(self, library: ctypes.CDLL, handle: int, writer: frames.FrameWriter) -> None:
        self._handle, self._writer, self._lock = handle, writer, threading.Lock()
        self._note = bind(library.lt_pulse_note, c_size_t, c_void_p)
        self._heard = bind(library.lt_pulse_heard, None, c_void_p)
        self._feed = bind(library.lt_pulse_feed, c_int, c_void_p, c_char_p, c_size_t)
        self._stop = bind(library.lt_pulse_stop, None, c_void_p)
        self._seal(round(SLOW_S))

    def note(self) -> None:
        """Records that the interpreter runs."""
        with self._lock:
            if self._handle and (used := self._note(self._handle)):
                self._seal(used)

    def heard(self) -> None:
        """Records that the owner was heard."""
        with self._lock:
            if self._handle:
                self._heard(self._handle)

    def stop(self) -> None:
        with self._lock:
            handle, self._handle = self._handle, 0
            if handle:
                self._stop(handle)

    def _seal(self, count: int) -> None:
        """Makes so many further pulses."""
        self._feed(self._handle, b"".join(self._writer.frame(_PULSE) for _ in range(count)), count)


def start_pulse(
    address: str, secret: bytes, rank: int, writer_thread: int, silence_s: float, status: int
) -> PulseThread | None:
    """Connects and starts the thread of this rank; None if the extension was not built, or no thread can be had.
    `writer_thread`: the native id of the thread that sends heartbeats; `silence_s`: as in Welcome; `status`: the exit
    status with which it ends the rank. Raises ConnectionError."""
    library = load(EXTENSION)
    if library is None:
        return None
    connection, _, writer = connect(address, secret, rank, pulse=True)
    dump: Any = getattr(ctypes.pythonapi, "_Py_DumpTracebackThreads", None)
    arguments = (c_int, c_int, c_int, c_size_t, c_double, c_double, c_double, c_void_p, c_int)
    handle = bind(library.lt_pulse_start, c_void_p, *arguments)(
        *(descriptor := connection.detach(), os.getpid(), writer_thread, frames.sealed_bytes(_PULSE)),
        *(silence_s + 1.0, silence_s + 1.0, max(SLOW_S, silence_s)),
        *(dump and ctypes.cast(dump, c_void_p), status),
    )
    if not handle:  # no memory or thread for it
        os.close(descriptor)
        return None
    return PulseThread(library, handle, writer)
