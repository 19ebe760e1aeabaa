"""Faults inside a rank: `launch.env` puts this folder on the ranks' PYTHONPATH, Python imports the module by itself.

LADDERTRON_FAULTS names a folder. A file `desync` there makes rank 1 draw another id once. A request that holds the
token LADDERTRON_DEADLY kills rank 1. Nothing else is touched: engine, gathers and digests are the real ones.
"""

from __future__ import annotations

import importlib.abc
import importlib.machinery
import importlib.util
import os
import signal
import sys
from collections.abc import Sequence
from pathlib import Path
from types import ModuleType
from typing import Any

TARGET = "laddertron.engine.step.runner"


def _spoil(runner: Any, step: Any, folder: Path, deadly: int) -> None:
    run, draw = runner.Runner.run, step.Step.run

    def run_or_die(self: Any, batch: Any, ahead: Any = None) -> Any:
        if any(deadly in sequence.tokens for sequence in batch.admitted):
            os.kill(os.getpid(), signal.SIGKILL)
        return run(self, batch, ahead)

    def draw_another(self: Any) -> Any:
        drawn = draw(self)
        try:
            (folder / "desync").unlink()
        except FileNotFoundError:
            return drawn
        drawn.ids[0] ^= 1
        return drawn

    runner.Runner.run, step.Step.run = run_or_die, draw_another


class _Finder(importlib.abc.MetaPathFinder):
    """Lets the module be imported as ever, then spoils it."""

    def find_spec(
        self, name: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        if name != TARGET:
            return None
        sys.meta_path.remove(self)
        spec = importlib.util.find_spec(name)
        assert spec is not None
        assert spec.loader is not None
        execute = spec.loader.exec_module

        def execute_and_spoil(module: ModuleType) -> None:
            execute(module)
            step = importlib.import_module("laddertron.engine.sampling.step")
            _spoil(module, step, Path(os.environ["LADDERTRON_FAULTS"]), int(os.environ["LADDERTRON_DEADLY"]))

        spec.loader.exec_module = execute_and_spoil  # type: ignore[method-assign]
        return spec


if "LADDERTRON_FAULTS" in os.environ and os.environ.get("OMPI_COMM_WORLD_RANK") == "1":
    sys.meta_path.insert(0, _Finder())
