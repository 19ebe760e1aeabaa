"""A set of ranks that measures on demand: it answers orders and is idle in between, so that several sets can alternate.
Ranks of `bench --trace` and `verify` get no orders and only answer.
"""

from __future__ import annotations

import json
import os
import secrets
import subprocess
import tempfile
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from types import TracebackType
from typing import Any, Self, TextIO

from ...engine import child
from ...engine.config.load import to_json
from ...engine.config.schema import Deployment
from ..compose.mpi import compose
from ..job import supervised_process as kept
from ..job.fleet import Fleet
from .answers import MARK, answer_in

END_S = 20.0
BENCH_RANK = "laddertron.tools.bench.bench_rank"


class BenchError(RuntimeError):
    """The ranks exited; the message has the end of their output."""


class BenchJob:
    """A context of one replica's loaded ranks. Raises LaunchError, PlacementError or BenchError."""

    def __init__(self, deployment: Deployment, name: str, module: str = BENCH_RANK, words: Sequence[str] = ()) -> None:
        """module: the program of the ranks; words: its further arguments."""
        self.name, self.deployment = name, deployment
        self._module, self._words = module, words
        self._mark = f"{secrets.token_hex(8)} "
        self.about: dict[str, Any] = {}
        self._folder = tempfile.TemporaryDirectory(prefix="laddertron-bench-")
        self._process: subprocess.Popen[str] | None = None
        self._orders: TextIO | None = None

    def __enter__(self) -> Self:
        folder = Path(self._folder.name)
        try:
            one = replace(self.deployment, parallel=replace(self.deployment.parallel, replicas=1))
            fleet = Fleet(one, os.environ)
            (folder / "deployment.json").write_text(json.dumps(to_json(fleet.deployment)))
            file = str(folder / "deployment.json")
            program = child.command(self._module, file, *self._words, python=fleet.site.python)
            command = compose(fleet.deployment, fleet.site, fleet.shares[0], program, (MARK,))
            with (folder / "log").open("w") as log:
                read, write = os.pipe()
                self._orders = os.fdopen(write, "w")
                try:
                    env = {**command.env, MARK: self._mark}
                    self._process = kept.start(command.argv, env, stdout=subprocess.PIPE, stderr=log, orders=read)
                finally:
                    os.close(read)
            self.about = self.answer() | {"nodes": len({host.name for host in fleet.shares[0].hosts})}
        except BaseException:
            self.close()  # ranks that load take no order
            raise
        return self

    def ask(self, kind: str, **order: Any) -> dict[str, Any]:
        """Sends an order and returns the answer. Raises BenchError if the ranks exit."""
        assert self._orders is not None
        with suppress(BrokenPipeError):  # the answer says why
            self._orders.write(json.dumps({"kind": kind, **order}) + "\n")
            self._orders.flush()
        return self.answer()

    def answer(self) -> dict[str, Any]:
        """Reads the ranks' next answer. Raises BenchError if they exit instead."""
        process = self._process
        assert process is not None
        assert process.stdout is not None
        for line in process.stdout:
            if (answer := answer_in(line, self._mark)) is not None:
                if "refused" in answer:
                    raise BenchError(f"{self.name}: {answer['refused']}")
                return answer
        log_tail = (Path(self._folder.name) / "log").read_text()[-4000:]
        raise BenchError(f"{self.name}: the ranks ended with status {process.wait()}:\n{log_tail}")

    def close(self, timeout_s: float = 0.0) -> None:
        """Ends the ranks; `timeout_s`: time for them to exit by themselves."""
        orders, self._orders = self._orders, None
        process, self._process = self._process, None
        try:
            if orders is not None:
                with suppress(BrokenPipeError), orders:
                    orders.write('{"kind": "end"}\n')  # Open MPI 5.0's mpirun keeps the end of its input to itself
            if process is not None:
                kept.end(process, timeout_s)
        finally:
            if process is not None and process.stdout is not None:
                process.stdout.close()
            self._folder.cleanup()

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close(END_S if kind is None else 0.0)
