"""`python -m laddertron.tools.bench.profile_rank DEPLOYMENT.json OPTIONS`: decodes on every rank of a deployment
and records what happens when.

Started by launchers/measure/rank_job.py for `laddertron profile`; OPTIONS are JSON. Rank 0 gathers the spans over the
group itself (no shared folder is needed) and writes the trace.
"""

from __future__ import annotations

import gzip
import json
import socket
import sys
import tempfile
import time
from contextlib import AbstractContextManager, nullcontext
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np

from ...engine.batch import Batch, StepResult
from ...engine.request import Request, SamplingParams
from ...engine.schedule.scheduler import Scheduler
from ...engine.step.engine import Ahead, Engine, StepProgress, drain, follow
from ...launchers.measure.rank_work import main, say
from ...topology.comm.groups import Communicator
from .spans import Span, SpanRecorder, chrome_trace, watch

WARM_UP = 8
"""Steps before the first one that is recorded."""


class _ProfiledRunner:
    """The runner; steps [WARM_UP, WARM_UP + steps) that decode alone are recorded."""

    def __init__(self, runner: Any, communicator: Communicator, recorder: SpanRecorder, steps: int) -> None:
        self._runner, self._communicator, self._recorder, self._steps = runner, communicator, recorder, steps
        self._seen = 0

    def run(self, batch: Batch, ahead: Ahead | None = None) -> StepResult | None:
        decodes = bool(batch.chunks) and all(chunk.count == 1 for chunk in batch.chunks)
        number = self._seen
        self._seen += decodes

        def run() -> StepResult | None:
            result: StepResult | None = self._runner.run(batch, ahead)
            waits = self._communicator.pipeline is None  # stages would stand idle if every step were waited for
            return self.wait_result() if waits and result is None else result

        if not decodes or not WARM_UP <= number < WARM_UP + self._steps:
            return run()
        self._recorder.begin_step(number - WARM_UP)
        started = time.monotonic()
        with self._recorder.annotate(f"step {number - WARM_UP}"):
            result = run()
        self._recorder.end_step(started, self._communicator.ledger.history())
        return result

    def wait_result(self) -> StepResult | None:
        result: StepResult | None = self._runner.wait_result()
        return result


def _requests(batch: int, prompt: int, tokens: int, vocab: int) -> list[Request]:
    """Synthetic prompts; nothing ends them early."""
    dice = np.random.default_rng(0)
    params = SamplingParams(max_tokens=tokens, seed=0, temperature=0.0)
    return [Request(f"p{i}", tuple(dice.integers(0, vocab, prompt).tolist()), params) for i in range(batch)]


def _moment(communicator: Communicator) -> float:
    """About the same moment on every rank, on its own clock: the end of a gather that began when all were there; of a
    pipeline by the nodes' wall clocks."""
    if communicator.pipeline is not None:
        return time.monotonic() - time.time()
    communicator.gather(np.zeros(1, np.uint8))
    communicator.gather(np.zeros(1, np.uint8))
    return time.monotonic()


def profile(built: Any, communicator: Communicator) -> None:
    """This rank's part."""
    options = json.loads(sys.argv[2])
    wanted = communicator.layout.ranks[communicator.rank] in options["ranks"]
    operators = _Operators() if options["ops"] and wanted else None
    recorder = SpanRecorder(operators.annotate) if operators else SpanRecorder()
    runner = _ProfiledRunner(built.runner, communicator, recorder, options["steps"])
    watch(built.runner.model, recorder)
    with operators or nullcontext():
        if communicator.leads:
            engine = Engine(Scheduler(built.scheduler_limits), runner, communicator.plans, StepProgress())
            tokens = WARM_UP + options["steps"] + 4
            for request in _requests(options["batch"], options["prompt"], tokens, built.limits.vocab_size):
                engine.add(request)
            for event in drain(engine):
                if event.finish == "error":
                    raise ValueError(event.message)
            engine.close()
        else:
            follow(runner, communicator.plans, StepProgress())
    said = {
        "node": socket.gethostname(),
        "moment": _moment(communicator),
        "spans": [asdict(span) for span in recorder.spans] if wanted else [],
        "ops": operators.trace if operators else None,
    }
    packed = gzip.compress(json.dumps(said).encode(), compresslevel=1)
    everyone = [json.loads(gzip.decompress(item)) for item in communicator.collect(packed)]
    if communicator.leads:
        links = sorted({entry.link for entry in communicator.ledger.entries() if entry.op == "all_reduce"})
        about = {
            "model": options["model"],
            "wiring": built.config.wiring.name,
            "layers": built.config.num_layers,
            "ranks": len(everyone),
            "batch": options["batch"],
            "link": next((link for link in links if link.startswith("emulated")), ", ".join(links)),
        }
        write_trace(Path(options["output"]), everyone, about)
        say({"written": options["output"]})


def write_trace(path: Path, everyone: list[dict[str, Any]], about: dict[str, Any]) -> None:
    """The spans of all ranks in one file; each rank's operators, where they were asked for, in a second one."""
    first = everyone[0]
    ranks = {}
    for rank, said in enumerate(everyone):
        offset = 0.0 if said["node"] == first["node"] else first["moment"] - said["moment"]
        if said["spans"]:
            ranks[rank] = (said["node"], offset, [Span(**span) for span in said["spans"]])
        if said["ops"] is not None:
            path.with_name(f"{path.stem}.rank{rank}.ops.json").write_text(said["ops"])
    path.write_text(json.dumps(chrome_trace(ranks, about)))


class _Operators:
    """torch's own profiler around everything: operators and kernels, with the spans' names as ranges."""

    def __init__(self) -> None:
        from torch import profiler

        self._profiler: Any = profiler
        self._profile: Any = profiler.profile()
        self.trace = ""

    def annotate(self, name: str) -> AbstractContextManager[Any]:
        named: AbstractContextManager[Any] = self._profiler.record_function(name)
        return named

    def __enter__(self) -> None:
        self._profile.__enter__()

    def __exit__(self, *error: Any) -> None:
        self._profile.__exit__(*error)
        with tempfile.TemporaryDirectory(prefix="laddertron-") as folder:
            file = Path(folder) / "trace.json"
            self._profile.export_chrome_trace(str(file))
            self.trace = file.read_text()


if __name__ == "__main__":
    sys.exit(main(profile))
