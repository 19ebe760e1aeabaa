"""One rank of metrics_cost.py: decodes without end, with metrics and heartbeats in every other block of steps.

The switch follows the number of the step, so that all ranks turn it together; a block is a fraction of a second, so
that whatever else the machine does falls on both sides alike.
"""

from __future__ import annotations

import json
import os
import socket
import threading
import time
from dataclasses import dataclass, field
from pathlib import Path

from laddertron.engine.config import load as deploy
from laddertron.engine.request import Request, SamplingParams
from laddertron.engine.schedule.scheduler import Scheduler
from laddertron.engine.step.engine import Engine, StepProgress, follow
from laddertron.launchers.control.messages import to_wire
from laddertron.launchers.rank.rank import choose_device, join_group, set_threads
from laddertron.launchers.rank.rank_health import HealthWatch, make_look
from laddertron.launchers.rank.rank_status import Status
from laddertron.topology.hardware.sysfs import Sysfs
from laddertron.topology.placement.identity import identify

CONFIG = Path(__file__).resolve().parent.parent / "configs/demo.yaml"
REAL_LINK = ("parallel.collective=auto", "parallel.emulated_delay=0s")
SEQUENCES, PROMPT, TOKENS = 8, 16, 224
BEAT_S, SNAPSHOT_S, LOOK_EVERY = 1.0, 0.25, 5
"""As a rank has them: a heartbeat a second, rank 0's snapshot of the schedule four times, a look at memory and ports
every fifth second; of the time in which metrics are on."""


@dataclass(slots=True)
class Switched(StepProgress):
    """Progress that keeps figures in half of the blocks: on, off, off, on, so that a drift falls on both alike."""

    block: int = 32
    due: threading.Event = field(default_factory=threading.Event)
    next_beat: float = 0.0

    @property
    def on(self) -> bool:
        return self.step // self.block % 4 in (0, 3)

    def start(self, tokens: int) -> None:
        if self.on:
            StepProgress.start(self, tokens)
            # early enough in the block for what it costs to fall into it
            if self.total_seconds >= self.next_beat and self.step % self.block < self.block // 2:
                self.next_beat = self.total_seconds + BEAT_S
                self.due.set()
        else:
            self.step_tokens = tokens

    def finish(self) -> None:
        if self.on:
            StepProgress.finish(self)
        else:
            self.last_tokens, self.step_tokens, self.step = self.step_tokens, 0, self.step + 1


class Beats:
    """The heartbeat's thread, and now and then the look at memory and ports, whenever `due` is set."""

    def __init__(self, line: socket.socket, status: Status, due: threading.Event) -> None:
        self._line, self._status, self._due = line, status, due
        self._look = make_look(Sysfs(), True, None)
        self._health = status.health = HealthWatch(self._look)
        self._end = False
        self._thread = threading.Thread(target=self._run)

    def __enter__(self) -> None:
        self._thread.start()

    def __exit__(self, *_: object) -> None:
        self._end = True
        self._due.set()
        self._thread.join()

    def _run(self) -> None:
        beats = 0
        while self._due.wait() and not self._end:
            self._due.clear()
            if beats % LOOK_EVERY == 0:
                self._health.figures = self._look()
            beats += 1
            self._line.sendall(to_wire(self._status.beat()) + b"\n")


def be_rank(port: int, pairs: int, cycles: int, block: int) -> None:
    """A pair is `cycles` times on, off, off, on, each of `block` steps; rank 0 prints a pair's tokens and seconds."""
    me = identify()
    assert me is not None
    deployment = deploy.load(CONFIG, REAL_LINK)
    set_threads(deployment, me)
    from laddertron.engine.step.build import build

    with join_group(deployment, me) as communicator, socket.create_connection(("127.0.0.1", port)) as line:
        line.sendall(json.dumps({"rank": me.rank, "pid": os.getpid()}).encode() + b"\n")
        built = build(deployment, communicator, choose_device(deployment, me))
        progress = Switched(block=block)
        status = Status(progress=progress, communicator=communicator)
        with Beats(line, status, progress.due):
            if me.rank != 0:
                follow(built.runner, communicator.plans, progress)
                return
            scheduler = Scheduler(built.scheduler_limits)
            status.scheduler = scheduler.snapshot(time.time())
            engine = Engine(scheduler, built.runner, communicator.plans, progress)
            measure(engine, status, progress, pairs, cycles)
            engine.close()


def measure(engine: Engine, status: Status, progress: Switched, pairs: int, cycles: int) -> None:
    """Steps that are all decoding count; those with prompts in them, one in some two hundred, belong to neither
    side. `cpu`: seconds of processor time of this rank's threads. The first pair is for warming up."""
    number, snapshot_due, length = 0, 0.0, 4 * progress.block * cycles
    begin = -(-progress.step // length) * length
    for pair in range(pairs + 1):
        seconds, cpu, tokens = {True: 0.0, False: 0.0}, {True: 0.0, False: 0.0}, {True: 0, False: 0}
        end = begin + (pair + 1) * length
        while progress.step < end:
            if not engine.has_work:
                for _ in range(SEQUENCES):
                    params = SamplingParams(max_tokens=TOKENS, seed=number, temperature=0.0)
                    engine.add(Request(str(number), tuple(range(5, 5 + PROMPT)), params))
                    number += 1
            on, step = progress.on, progress.step
            began, used = time.perf_counter(), time.process_time()
            engine.step()
            if on and progress.total_seconds >= snapshot_due:
                status.latencies.add(engine.scheduler.take_ended())
                status.scheduler = engine.scheduler.snapshot(time.time())
                snapshot_due = progress.total_seconds + SNAPSHOT_S
            took, used = time.perf_counter() - began, time.process_time() - used
            if progress.step == step + 1 and progress.last_tokens == SEQUENCES:
                seconds[on] += took
                cpu[on] += used
                tokens[on] += SEQUENCES
        if pair:
            rates = {name: tokens[on] / seconds[on] for name, on in (("on", True), ("off", False))}
            rates["cpu"] = cpu[True] / tokens[True] * tokens[False] / cpu[False]
            print(json.dumps(rates), flush=True)
