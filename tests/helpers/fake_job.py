"""An EngineJob in this very process, without a model: each token follows from the ids before it by a hash.

For tests of everything above the engine. Steps run on the event loop; faults are asked for in the constructor.
"""

from __future__ import annotations

import asyncio
import hashlib
import time
from dataclasses import dataclass, field
from typing import Any

from laddertron.engine.job import JobListener, JobState, MetricRow, RankHeartbeat
from laddertron.engine.request import ModelLimits, Request, TokenLogprob, TokensEvent


def next_token(seed: int, tail: tuple[int, ...], length: int, choice: int, vocab_size: int) -> int:
    """What FakeJob answers after `length` ids, the last of which are `tail`."""
    text = f"{seed} {choice} {' '.join(map(str, tail))} {length}"
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=4).digest(), "little") % vocab_size


@dataclass(slots=True)
class FakeSequence:
    request: Request
    choice: int
    out: list[int] = field(default_factory=list)
    stop_at: int | None = None
    cancelled: bool = False


class FakeJob:
    """`script` (request -> ids) replaces the hash. `die_after`: the job is lost once that many requests have ended.
    `fail`: request ids' prompts (by first id) that end in numerical_error. `hold`: no steps until `release()`."""

    identity: Any = None
    launch = 1

    def __init__(
        self,
        limits: ModelLimits,
        script: dict[tuple[int, ...], tuple[int, ...]] | None = None,
        die_after: int | None = None,
        fail: frozenset[int] = frozenset(),
        hold: bool = False,
        refuse: str | None = None,
        tokens_a_step: int = 1,
    ) -> None:
        self.limits, self.script, self.die_after, self.fail = limits, script or {}, die_after, fail
        self.refuse, self.tokens_a_step = refuse, tokens_a_step
        self.submitted: list[Request] = []
        self.stops: list[tuple[str, int, int]] = []
        self.cancels: list[str] = []
        self.most_waiting = 0
        self.closed = False
        self.steps = 0
        self.state = JobState("starting")
        self.listener: JobListener | None = None
        self.sequences: list[FakeSequence] = []
        self._ended = 0
        self.running = asyncio.Event()
        if not hold:
            self.running.set()
        self._work = asyncio.Event()
        self._task: asyncio.Task[None] | None = None

    async def start(self, listener: JobListener) -> None:
        self.listener = listener
        self._task = asyncio.create_task(self._run())

    def submit(self, request: Request) -> None:
        if self.state.phase != "ready":
            raise RuntimeError(f"the job is {self.state.phase}")
        self.submitted.append(request)
        for choice in request.open_choices:
            known = request.emitted[choice] if request.emitted else ()
            self.sequences.append(FakeSequence(request, choice, list(known or ())))
        self.most_waiting = max(self.most_waiting, len(self.sequences))
        self._work.set()

    def cancel(self, request_id: str) -> None:
        self.cancels.append(request_id)
        for sequence in self.sequences:
            if sequence.request.request_id == request_id:
                sequence.cancelled = True

    def stop_choice(self, request_id: str, choice: int, n_tokens: int) -> None:
        self.stops.append((request_id, choice, n_tokens))
        for sequence in self.sequences:
            if (sequence.request.request_id, sequence.choice) == (request_id, choice):
                sequence.stop_at = n_tokens

    def release(self) -> None:
        self.running.set()

    def hold(self) -> None:
        self.running.clear()

    async def drain(self, timeout_s: float) -> bool:
        self.report_state("draining")
        return True

    async def close(self) -> None:
        if self._task is not None:
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)
        self.closed = True

    async def bundle(self) -> dict[str, Any]:
        return {"ranks": []}

    def lose(self, reason: str) -> None:
        """The job dies now."""
        self._report_step()
        self.report_state("failed", reason)
        assert self.listener is not None
        self.listener.on_lost(self.launch, reason, by_request=True)

    def _report_step(self) -> int:
        """Reports which requests are in the step, and forgets all; how many are."""
        ids = list(dict.fromkeys(s.request.request_id for s in self.sequences))
        running = min(len(ids), self.limits.max_num_seqs)
        self.sequences.clear()
        assert self.listener is not None
        self.listener.on_running(ids[:running], ids[running:])
        return running

    def report_state(self, phase: Any, reason: str = "") -> None:
        self.state = JobState(phase, reason, limits=self.limits)
        assert self.listener is not None
        self.listener.on_state(self.state)

    async def _run(self) -> None:
        await asyncio.sleep(0)
        if self.refuse is not None:
            self.report_state("failed", self.refuse)
            return
        self.report_state("loading")
        self._report()
        self.report_state("ready")
        while True:
            await self.running.wait()
            if not self.sequences:
                self._work.clear()
                self._report()
                await self._work.wait()
                continue  # it may have been held meanwhile
            await asyncio.sleep(0)
            self.step()

    def _report(self) -> None:
        assert self.listener is not None
        rows = [MetricRow("rank_info", ("cpu", "avx2", "1"), 1.0)]
        for exposure, seconds in (("hidden", 0.5 * self.steps), ("exposed", 0.25 * self.steps)):
            rows.append(MetricRow("collective_seconds_total", ("all_reduce", "net", exposure), seconds))
            for layer, share in (("ladder attention", 0.25), ("ladder mlp", 0.75)):
                rows.append(MetricRow("layer_collective_seconds_total", (layer, "net", exposure), share * seconds))
        self.listener.on_report(RankHeartbeat(0, "here", 1, self.steps, time.time(), tuple(rows)))

    def step(self) -> None:
        assert self.listener is not None
        self.steps += 1
        events = []
        for sequence in self.sequences[: self.limits.max_num_seqs]:
            events.append(self.next_event(sequence))
            if events[-1].finish is not None:
                self.sequences.remove(sequence)
                self._ended += 1
        if events:
            self.listener.on_tokens(events)
        if self.die_after is not None and self._ended >= self.die_after:
            self.die_after = None
            self.lose("rank 1 on node-b was killed")

    def next_event(self, sequence: FakeSequence) -> TokensEvent:
        request, params, start = sequence.request, sequence.request.params, len(sequence.out)
        if request.prompt[0] in self.fail:
            return TokensEvent(request.request_id, sequence.choice, 0, (), "numerical_error", message="NaN logits")
        finish: Any = None
        stop_token = None
        if sequence.cancelled:
            finish = "cancelled"
        elif sequence.stop_at is not None:
            finish = "stop"
        while finish is None and len(sequence.out) - start < self.tokens_a_step:
            if len(sequence.out) >= params.max_tokens:
                finish = "length"
                break
            token = self._token(sequence)
            if token in params.stop_token_ids and len(sequence.out) >= params.min_tokens:
                finish, stop_token = "stop", token
                break
            sequence.out.append(token)
            if len(sequence.out) >= params.max_tokens:
                finish = "length"
        new = tuple(sequence.out[start:])
        first = start == 0 and sequence.choice == 0
        return TokensEvent(
            request.request_id,
            sequence.choice,
            start,
            new,
            finish,
            logprobs=None if params.logprobs is None else tuple(self._score(t, params.logprobs) for t in new),
            prompt_logprobs=(None, *(self._score(t, params.prompt_logprobs) for t in request.prompt[1:]))
            if first and params.prompt_logprobs is not None
            else None,
            stop_token=stop_token,
        )

    def _token(self, sequence: FakeSequence) -> int:
        prompt, out = sequence.request.prompt, sequence.out
        scripted = self.script.get(prompt) if self.script else None
        if scripted is not None and len(out) < len(scripted):
            return scripted[len(out)]
        tail, length = (*prompt[-8:], *out[-8:])[-8:], len(prompt) + len(out)
        return next_token(sequence.request.params.seed, tail, length, sequence.choice, self.limits.vocab_size)

    def _score(self, token: int, top: int) -> TokenLogprob:
        others = tuple(((token + i) % self.limits.vocab_size, -0.5 - i) for i in range(top))
        return TokenLogprob(token, -0.5, others, digest=token)
