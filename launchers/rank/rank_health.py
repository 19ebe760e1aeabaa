"""A rank's own look at its port counters, its GPU and its memory, every few seconds on a thread of its own: a driver
that hangs must hold up neither steps nor heartbeats. Status.beat reads what was seen last.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

from ...topology.hardware.health import Figures, gpu_figures, port_counters
from ...topology.hardware.nvml import load_nvml
from ...topology.hardware.sysfs import Sysfs, resident_bytes

PERIOD_S = 5.0


def run_delay_s(fs: Sysfs) -> float | None:
    """Seconds in which this process's main thread, the one that steps, could have run and had no processor; None where
    the kernel keeps no such account."""
    words = fs.text("proc/self/schedstat").split()
    return int(words[1]) * 1e-9 if len(words) == 3 and words[1].isdecimal() else None


class HealthWatch:
    """`figures` holds what the last look saw. `look` is called on the watch's thread; what it raises ends that look."""

    def __init__(self, look: Callable[[], Figures], period_s: float = PERIOD_S) -> None:
        self._look, self._period_s = look, period_s
        self.figures: Figures = {}
        self._end = threading.Event()
        self._thread = threading.Thread(target=self._run, name="health", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def close(self) -> None:
        """Does not wait for a look that hangs."""
        self._end.set()
        self._thread.join(0.2)

    def _run(self) -> None:
        while True:
            try:
                self.figures = self._look()
            except Exception:  # figures are a help, never a reason to stop
                self.figures = {}
            if self._end.wait(self._period_s):
                return


def make_look(fs: Sysfs, ports: bool, gpu_uuid: str | None, nvml: Any | None = None) -> Callable[[], Figures]:
    """What a rank looks at: the host's ports if it is the first rank there, its GPU if it has one."""
    if gpu_uuid is not None:
        nvml = nvml or load_nvml()
    begun = False

    def look() -> Figures:
        nonlocal begun
        out = port_counters(fs) if ports else {}
        if held := resident_bytes(fs):
            out["rank_resident_memory_bytes",] = float(held)
        if nvml is not None and gpu_uuid is not None:
            if not begun:
                nvml.nvmlInit()
                begun = True
            out |= gpu_figures(nvml, gpu_uuid)
        return out

    return look
