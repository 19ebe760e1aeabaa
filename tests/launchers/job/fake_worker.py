"""A rank without torch or MPI: the real control client around a deterministic fake engine.

Started like the worker (`python tests/launchers/job/fake_worker.py`), also by mpirun. The welcome's config is a JSON
object:
  max_num_seqs (8), step_s (0.005), load_s (0), load_until: a file that must be there, raise_loading: rank,
  refuse: rank,
  refuse_after: a file whose presence makes that refusal hold, digests: {rank: text}, version: {rank: text},
  vocab (50000), starts: a file that is told the id of every request that enters a step, one a line,
  warns: {rank: text} that it logs as a warning while it loads,
  reads: a file whose text is announced as the digest of config.json,
  raise_standing: rank, raise_taking_over: rank, stand_until: a file that must be there for a rank to stand by,
  no_room_to_stand: rank that refuses for want of memory,
  room: whether there is room (true),
  poison: ids whose appearance in a prompt makes the rank of that index (or 0) kill itself in the step.
Signals, obeyed between two steps: SIGUSR1 raises in the main thread, SIGUSR2 hangs it (heartbeats go on). Token i of
choice c is `fake_token(seed, c, i)`, whatever else runs; a request ends by "length".
"""

from __future__ import annotations

import json
import logging
import os
import signal
import sys
import threading
import time
import traceback
from collections import deque
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from laddertron.engine.job import MetricRow
from laddertron.engine.request import FinishReason, ModelLimits, Request, TokenLogprob, TokensEvent
from laddertron.launchers.control.control_client import ControlClient, address_and_secret
from laddertron.launchers.control.messages import (
    Announce,
    Beat,
    Cancel,
    Command,
    HeldWeights,
    Load,
    Loading,
    Ready,
    Running,
    Shutdown,
    Standing,
    StopChoice,
    Submit,
)
from laddertron.launchers.control.processes import die_with_parent
from laddertron.launchers.job.rank_logs import set_up_logs

VOCAB = 50000
ORDERS = {signal.SIGUSR1, signal.SIGUSR2}
IDLE_S = 0.02


def fake_token(seed: int, choice: int, position: int) -> int:
    """The token that this fake model "computes"."""
    return (seed * 2654435761 + choice * 40503 + position * 97) % VOCAB


def scored(token: int, top: int) -> TokenLogprob:
    return TokenLogprob(token, -1.0, tuple((number, -1.0 - number) for number in range(top)))


def fake_tokens(request: Request, choice: int = 0) -> list[int]:
    """A choice's whole answer."""
    return [fake_token(request.params.seed, choice, i) for i in range(request.params.max_tokens)]


class AskedToRaise(RuntimeError):
    """SIGUSR1 came."""


@dataclass
class Sequence:
    request: Request
    produced: dict[int, int]
    stops: dict[int, int] = field(default_factory=dict)


class FakeEngine:
    """Rank 0's: admits, steps, reports."""

    def __init__(self, client: ControlClient, config: dict[str, object], beat: Beats) -> None:
        self.client, self.beat = client, beat
        self.max_num_seqs = int(str(config.get("max_num_seqs", 8)))
        self.poison = {int(str(i)) for i in config.get("poison", [])}  # type: ignore[attr-defined]
        self.vocab = int(str(config.get("vocab", VOCAB)))
        self.starts = str(config.get("starts", ""))
        self.waiting: deque[Sequence] = deque()
        self.running: dict[str, Sequence] = {}

    @property
    def idle(self) -> bool:
        return not self.waiting and not self.running

    def handle(self, command: Command) -> None:
        match command:
            case Submit(request):
                known = request.emitted or ((),) * request.params.n
                produced = {choice: len(known[choice] or ()) for choice in request.open_choices}
                self.waiting.append(Sequence(request, produced))
            case Cancel(request_id):
                self._end_all(request_id, "cancelled")
            case StopChoice(request_id, choice, n_tokens):
                if (sequence := self.running.get(request_id)) and choice in sequence.produced:
                    sequence.stops[choice] = n_tokens
            case _:
                pass

    def _end_all(self, request_id: str, finish: FinishReason) -> None:
        sequence = self.running.pop(request_id, None)
        for queued in [s for s in self.waiting if s.request.request_id == request_id]:
            self.waiting.remove(queued)
            sequence = queued
        if sequence is not None:
            self.client.send_tokens([TokensEvent(request_id, c, at, (), finish) for c, at in sequence.produced.items()])

    def step(self) -> None:
        started = []
        while self.waiting and len(self.running) < self.max_num_seqs:
            sequence = self.waiting.popleft()
            self.running[sequence.request.request_id] = sequence
            started.append(sequence.request.request_id)
        if started:
            self.client.send_state(Running(started=tuple(started)))
        if started and self.starts:
            with open(self.starts, "ab", buffering=0) as file:
                file.write("".join(f"{request_id.partition('#')[0]}\n" for request_id in started).encode())
        if self.poison and any(self.poison & set(s.request.prompt) for s in self.running.values()):
            self.client.flush(1.0)
            os.kill(os.getpid(), signal.SIGKILL)
        events = []
        for request_id, sequence in list(self.running.items()):
            request = sequence.request
            for choice, position in list(sequence.produced.items()):
                finish: FinishReason | None = None
                if choice in sequence.stops:
                    position = min(position, sequence.stops[choice])
                    tokens: tuple[int, ...] = ()
                    finish = "stop"
                else:
                    tokens = (fake_token(request.params.seed, choice, position) % self.vocab,)
                    sequence.produced[choice] += 1
                    finish = "length" if position + 1 >= request.params.max_tokens else None
                top = request.params.logprobs
                scores = None if top is None else tuple(scored(token, top) for token in tokens)
                event = TokensEvent(request_id, choice, position, tokens, finish, scores)
                events.append(event)
                if finish:
                    del sequence.produced[choice]
            if not sequence.produced:
                del self.running[request_id]
        self.client.send_tokens(events)


class Beats:
    """The plain attributes that the heartbeat reads."""

    def __init__(self) -> None:
        self.step = 0
        self.since: float | None = None
        self.last_s = 0.0
        self.tokens = 0
        self.waiting = ""

    def __call__(self) -> Beat:
        busy = 0.0 if self.since is None else time.monotonic() - self.since
        rows = (MetricRow("generation_tokens_total", (), float(self.step)),)
        return Beat(self.step, busy, self.tokens, self.tokens, self.last_s, self.step, self.waiting, rows)


def obey(beats: Beats, seconds: float) -> None:
    """What a signal that comes within so many seconds asks for. A handler would run amid any line, also one that holds
    the control client's lock."""
    if (told := signal.sigtimedwait(ORDERS, seconds)) is None:
        return
    if told.si_signo == signal.SIGUSR1:
        raise AskedToRaise("asked to raise")
    beats.since, never = time.monotonic(), threading.Event()
    never.wait()


def main() -> None:
    die_with_parent()
    signal.pthread_sigmask(signal.SIG_BLOCK, ORDERS)  # before any thread starts
    rank, local = int(os.environ["OMPI_COMM_WORLD_RANK"]), int(os.environ["OMPI_COMM_WORLD_LOCAL_RANK"])
    address, secret = address_and_secret(os.environ)
    beats = Beats()
    versions = json.loads(os.environ.get("FAKE_VERSIONS", "{}"))
    extra = {"version": versions[str(rank)]} if str(rank) in versions else {}
    client = ControlClient(
        address, secret, rank, local, beats, lambda: {"collectives": [f"step {beats.step}"]}, **extra
    )
    try:
        work(client, beats, rank)
    except Exception:
        client.fail(traceback.format_exc())
        os._exit(1)
    client.close()


def stand_by(client: ControlClient, config: dict[str, Any], rank: int) -> bool:
    """Until Load; False: Shutdown."""
    if config.get("raise_standing") == rank:
        raise AskedToRaise("asked to raise while it comes up")
    if config.get("no_room_to_stand") == rank:
        client.fail("no memory for a standby: 2 ranks here", refused=True)
        os._exit(1)
    while config.get("stand_until") and not os.path.exists(config["stand_until"]):
        time.sleep(0.01)
    client.send_state(Standing(1_000_000, config.get("room", True)))
    while commands := client.poll(None):
        for command in commands:
            if isinstance(command, HeldWeights):
                with open(config["keeps"], "a") as keeps:
                    keeps.write(f"{rank} {command.pid} {command.start_time} {command.file}\n")
        if any(isinstance(command, Load | Shutdown) for command in commands):
            break
    if config.get("raise_taking_over") == rank:
        raise AskedToRaise("asked to raise as it takes over")
    return not client.shutdown_announced


def work(client: ControlClient, beats: Beats, rank: int) -> None:
    config = json.loads(client.config)
    if client.standby and not stand_by(client, config, rank):
        return
    digests = config.get("digests", {})
    read = {"config.json": Path(config["reads"]).read_text()} if "reads" in config else {}
    client.send_state(Announce({"config": "c0ffee", "weights": digests.get(str(rank), "feed"), **read}))
    client.send_state(Loading(0.5, "weights"))
    if text := config.get("warns", {}).get(str(rank)):
        set_up_logs(rank, "n0")
        logging.getLogger("laddertron.fake").warning("%s", text)
    if config.get("load_s"):
        threading.Event().wait(config["load_s"])
    while config.get("load_until") and not os.path.exists(config["load_until"]):
        time.sleep(0.01)
    if config.get("raise_loading") == rank:
        raise AskedToRaise("asked to raise while loading")
    if config.get("refuse") == rank and os.path.exists(config.get("refuse_after", "/")):
        client.fail("model.safetensors: 3 bytes are missing", refused=True)
        os._exit(1)
    limits = ModelLimits(4096, int(config.get("vocab", VOCAB)), int(config.get("max_num_seqs", 8)), 65536, (2,))
    client.send_state(Ready(limits, int(config.get("weights_file", -1))))
    print(f"fake rank {rank} is ready", flush=True)
    engine = FakeEngine(client, config, beats)
    step_s = float(config.get("step_s", 0.005))
    while True:
        obey(beats, 0.0 if engine.idle else step_s)
        for command in client.poll(IDLE_S if engine.idle else 0.0):
            engine.handle(command)
        if client.shutdown_announced:
            return
        if engine.idle:
            continue
        beats.since, beats.tokens = time.monotonic(), len(engine.running) or 1
        engine.step()
        beats.last_s, beats.since = time.monotonic() - beats.since, None
        beats.step += 1


if __name__ == "__main__":
    main()
    sys.exit(0)
