"""`python -m laddertron.tools.bench.trace_rank DEPLOYMENT.json OPTIONS`: decodes on every rank of a deployment and
records when each rank computed, communicated and waited.

Started by launchers/measure/rank_job.py for `laddertron bench --trace`; OPTIONS are JSON. Rank 0 gathers the spans over
the group itself (no shared folder is needed) and writes the trace.
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
from ...launchers.measure.answers import say
from ...launchers.measure.rank_work import main
from ...topology.comm.groups import Communicator
from .spans import RankTrace, Span, SpanRecorder, chrome_trace, device_events, watch

WARM_UP = 8
"""Steps before the first one that is recorded."""
STEPS = 8


class _RecordedRunner:
    """The runner; steps [WARM_UP, WARM_UP + STEPS) that decode alone are recorded."""

    def __init__(self, runner: Any, communicator: Communicator, recorder: SpanRecorder) -> None:
        self._runner, self._communicator, self._recorder = runner, communicator, recorder
        self._seen = 0

    def run(self, batch: Batch, ahead: Ahead | None = None) -> StepResult | None:
        decodes = bool(batch.chunks) and all(chunk.count == 1 for chunk in batch.chunks)
        number = self._seen
        self._seen += decodes

        def run() -> StepResult | None:
            result: StepResult | None = self._runner.run(batch, ahead)
            waits = self._communicator.pipeline is None  # stages would stand idle if every step were waited for
            return self.wait_result() if waits and result is None else result

        if not decodes or not WARM_UP <= number < WARM_UP + STEPS:
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


def _requests(batch: int, prompt: int, vocab: int) -> list[Request]:
    """Synthetic prompts; nothing ends them early."""
    dice = np.random.default_rng(0)
    params = SamplingParams(max_tokens=WARM_UP + STEPS + 4, seed=0, temperature=0.0)
    return [Request(f"p{i}", tuple(dice.integers(0, vocab, prompt).tolist()), params) for i in range(batch)]


def _moment(communicator: Communicator) -> float:
    """About the same moment on every rank, on its own clock: the end of a gather that began when all were there; of a
    pipeline by the nodes' wall clocks."""
    if communicator.pipeline is not None:
        return time.monotonic() - time.time()
    communicator.gather(np.zeros(1, np.uint8))
    communicator.gather(np.zeros(1, np.uint8))
    return time.monotonic()


def record(built: Any, communicator: Communicator) -> None:
    """This rank's part."""
    options = json.loads(sys.argv[2])
    kernels = Kernels() if built.runner.cache.keys[0].device.type == "cuda" else None
    recorder = SpanRecorder(kernels.annotate) if kernels else SpanRecorder()
    runner = _RecordedRunner(built.runner, communicator, recorder)
    watch(built.runner.model, recorder)
    with kernels or nullcontext():
        if communicator.leads:
            engine = Engine(Scheduler(built.scheduler_limits), runner, communicator.plans, StepProgress())
            for request in _requests(options["batch"], options["prompt"], built.limits.vocab_size):
                engine.add(request)
            for event in drain(engine):
                if event.finish == "error":
                    raise ValueError(event.message)
            engine.close()
        else:
            follow(runner, communicator.plans, StepProgress())
    report = {
        "node": socket.gethostname(),
        "moment": _moment(communicator),
        "spans": [asdict(span) for span in recorder.spans],
        "kernels": kernels.events if kernels else [],
    }
    packed = gzip.compress(json.dumps(report).encode(), compresslevel=1)
    reports = [json.loads(gzip.decompress(item)) for item in communicator.collect(packed)]
    if communicator.leads:
        about = {
            "wiring": built.config.wiring.name,
            "layers": built.config.num_layers,
            "ranks": len(reports),
            "batch": options["batch"],
        }
        Path(options["output"]).write_text(json.dumps(chrome_trace(_on_one_clock(reports), about)))
        say({"written": options["output"]})


def _on_one_clock(reports: list[dict[str, Any]]) -> dict[int, RankTrace]:
    first, ranks = reports[0], {}
    for rank, report in enumerate(reports):
        offset = 0.0 if report["node"] == first["node"] else first["moment"] - report["moment"]
        spans = [Span(**span) for span in report["spans"]]
        ranks[rank] = RankTrace(report["node"], offset, spans, report["kernels"])
    return ranks


class Kernels:
    """A context of torch's own profiler around everything, with the spans' names as ranges; `events` at its end: the
    device's, and the ranges."""

    def __init__(self) -> None:
        from torch import profiler

        self._profiler: Any = profiler
        self._profile: Any = profiler.profile()
        self.events: list[dict[str, Any]] = []

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
            self.events = device_events(json.loads(file.read_text()))


if __name__ == "__main__":
    sys.exit(main(record))
