"""Another wall clock and another disk for a daemon under test, set while it runs (world.c)."""

from __future__ import annotations

import struct
import subprocess
from pathlib import Path


class World:
    """Wall clock and disk of the processes that start with `environment`."""

    def __init__(self, folder: Path) -> None:
        library = folder / "world.so"
        source = Path(__file__).with_name("world.c")
        subprocess.run(["cc", "-shared", "-fPIC", "-O1", "-Wall", "-Werror", "-o", library, source, "-ldl"], check=True)
        self._file = folder / "world"
        self._offset, self._full = 0, False
        self._write()
        self.environment = {"LD_PRELOAD": str(library), "LADDERTRON_WORLD": str(self._file)}

    def _write(self) -> None:
        with self._file.open("r+b" if self._file.exists() else "w+b") as file:
            file.write(struct.pack("<qq", self._offset, self._full))

    def step_clock(self, seconds: int) -> None:
        self._offset += seconds
        self._write()

    def disk(self, full: bool) -> None:
        self._full = full
        self._write()
