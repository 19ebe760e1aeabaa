"""The scheduler, on rank 0: turns requests into one Batch per step and sampled tokens into events. No torch. The same
calls with the same times give the same plans. A plan may be made before the result of the previous one is known: it
assumes that every running sequence continues, and `commit` discards surplus tokens. Admission follows the order of
waiting_queue.py strictly: a sequence that does not fit blocks all behind it, so none starves.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Set
from collections.abc import Sequence as Seq
from dataclasses import dataclass, replace

from ..batch import Batch, Chunk, StepResult
from ..request import FinishReason, Request, TokenLogprob, TokensEvent
from .kv_manager import Residency
from .limits import SchedulerLimits as SchedulerLimits
from .sequence import RequestTimes, Sequence
from .speculation import Speculation
from .split import SplitChoice
from .step_planner import Counters, Planner
from .waiting_queue import OpenRequests, WaitingQueues


@dataclass(frozen=True, slots=True)
class _Uncommitted:
    batch: Batch
    sequences: list[Sequence]
    prefills: bool
    planned: float


class Scheduler:
    """`add`, `cancel` and `stop_choice` may be called at any time, `schedule` with at most limits.microbatches
    uncommitted plans; `commit` takes the plans in order."""

    def __init__(self, limits: SchedulerLimits) -> None:
        self.limits = limits
        self.counters = Counters()
        self.waiting = WaitingQueues(limits.ageing_s)
        self.residency = Residency(limits)
        self._planner = Planner(limits, self.waiting, self.residency, self.counters)
        self.open_requests = OpenRequests(limits, self.waiting, self.residency, self._planner.spawn)
        self._split = None if limits.split is None else SplitChoice(limits.split)
        self._uncommitted: deque[_Uncommitted] = deque()
        self._committed = 0.0

    def add(self, request: Request, now: float) -> None:
        """Queues a request. now: unix seconds, like its deadline. Raises RequestTooLarge if it can never fit,
        ValueError if it is invalid or its id is in use."""
        self.open_requests.add(request, now)

    def cancel(self, request_id: str) -> None:
        """Ends all open choices of the request with "cancelled". Ignores unknown ids: the request may just have
        ended."""
        group = self.open_requests.groups.get(request_id)
        if group is not None:
            self.open_requests.end_group(group, "cancelled")

    def stop_choice(self, request_id: str, choice: int, n_tokens: int) -> None:
        """Ends the choice with "stop" after `n_tokens` tokens. Ignores unknown or ended choices."""
        group = self.open_requests.groups.get(request_id)
        if group is not None and 0 <= choice < group.request.params.n:
            self._planner.spawn(group)
            sequence = group.sequences[choice]
            if sequence.state != "ended":
                self.open_requests.finish(sequence, "stop", start=n_tokens)

    def take_events(self) -> list[TokensEvent]:
        """Returns the pending events of choices that ended outside a step (cancelled, timeout, stop). `commit` returns
        them too; call this if `schedule` returns None."""
        return self.open_requests.take_events()

    def take_ended(self) -> list[RequestTimes]:
        """The requests that ended since the last call (at most the latest 4096)."""
        ended = list(self.open_requests.ended)
        self.open_requests.ended.clear()
        return ended

    @property
    def has_work(self) -> bool:
        """Whether a request is open or an event is pending. Plans of ended requests may still be uncommitted."""
        return bool(self.open_requests.groups or self.open_requests.events)

    def request_ids(self, slots: Iterable[int]) -> list[str]:
        """Request ids of the sequences in these slots; empty slots are skipped."""
        there = {sequence.slot: sequence.group.request.request_id for sequence in self.residency.running}
        return [there[slot] for slot in slots if slot in there]

    @property
    def parked(self) -> list[str]:
        """Ids of the requests that the last plan preempted and that have no running choice left."""
        if not self._planner.parked:
            return []
        running = {sequence.group.request.request_id for sequence in self.residency.running}
        return [request_id for request_id in dict.fromkeys(self._planner.parked) if request_id not in running]

    def snapshot(self, now: float | None = None) -> dict[str, float]:
        """Gauges at time `now` (default: the last call's) and counters, by series name."""
        counters, speculation = self.counters, self._planner.speculation
        drafts = (0, 0, 0) if speculation is None else speculation.counts
        now = self.open_requests.now if now is None else now
        pool, oldest = self.residency.pool, self.waiting.oldest_arrival()
        return {
            "num_requests_running": float(len({sequence.number for sequence in self.residency.running})),
            "num_requests_waiting": float(len(self.waiting)),
            "kv_cache_usage_ratio": 1.0 - pool.available / self.limits.num_blocks,
            "kv_cached_blocks": float(pool.cached),
            "engine_oldest_waiting_age_seconds": 0.0 if oldest is None else max(0.0, now - oldest),
            "prompt_tokens_total": float(counters.prompt_tokens),
            "prefix_cache_queries_total": float(counters.prefix_queries),
            "prefix_cache_hits_total": float(counters.prefix_hits),
            "num_preemptions_total": float(counters.preemptions),
            "surplus_tokens_total": float(counters.surplus_tokens),
            "spec_decode_num_drafts_total": float(drafts[0]),
            "spec_decode_num_draft_tokens_total": float(drafts[1]),
            "spec_decode_num_accepted_tokens_total": float(drafts[2]),
            "split_steps_total": 0.0 if self._split is None else float(self._split.steps),
        }

    @property
    def accepted_drafts(self) -> tuple[int, ...]:
        """Accepted drafts by their distance from the last known token; () without speculation."""
        return () if self._planner.speculation is None else tuple(self._planner.speculation.accepted)

    def schedule(self, now: float) -> Batch | None:
        """Plans the next step. None if there is no work, all work waits for a commit, or limits.microbatches + 1 plans
        are uncommitted."""
        if len(self._uncommitted) > self.limits.microbatches:
            self._planner.parked = []
            return None
        self.open_requests.expire(now)
        planned = self._planner.plan(now)
        if planned is None:
            return None
        batch, plan = planned
        if self._split is not None:
            batch = replace(batch, split=self._split.cut(batch))
        self._uncommitted.append(_Uncommitted(batch, plan.sequences, bool(plan.prefilled), now))
        return batch

    def commit(self, batch: Batch, result: StepResult, now: float) -> list[TokensEvent]:
        """Commits the sampled tokens of the oldest uncommitted plan and returns the new events in order. For a batch
        without chunks it only returns pending events. Raises RuntimeError if `batch` is not the oldest uncommitted
        plan, ValueError unless there is one token for each chunk that samples."""
        if not batch.chunks:
            self.open_requests.expire(now)
            return self.take_events()
        if not self._uncommitted or self._uncommitted[0].batch.step != batch.step:
            expected = self._uncommitted[0].batch.step if self._uncommitted else "none"
            raise RuntimeError(f"step {batch.step} is committed, {expected} is due: commit plans in their order")
        done = self._uncommitted[0]
        chunks = done.batch.chunks
        drawn = sum([chunk.samples for chunk in chunks])
        if drawn != len(result.tokens):
            raise ValueError(f"step {batch.step}: {len(result.tokens)} tokens for {drawn} chunks that sample")
        self._uncommitted.popleft()
        seconds = now - max(self._committed, done.planned)  # it started when planned, or when the previous one ended
        if self._split is not None:
            self._split.observe(done.batch, seconds)
        speculation = self._planner.speculation
        if speculation is not None and not done.prefills:
            came = drawn + sum(map(len, result.more.values()))
            speculation.observe_step(len(chunks), sum(result.drafted.values()), came, seconds)
        self.open_requests.now = self._committed = now
        if done.prefills or result.nonfinite or drawn != len(chunks):
            self._commit_prefills(done, result)
        tokens = iter(result.tokens)
        generated = surplus = 0
        for chunk, sequence in zip(chunks, done.sequences, strict=True):
            if not chunk[3]:
                continue
            token = next(tokens)
            more = result.more.get(chunk[0], ()) if speculation is not None else ()
            if sequence.state == "ended":
                surplus += 1 + len(more)
                continue
            group, ids = sequence.group, sequence.tokens
            sequence.inflight -= 1
            if speculation is not None:
                accepted, dropped = self._commit_drafts(speculation, chunk, sequence, token, result, now)
                generated, surplus = generated + accepted, surplus + dropped
                continue
            outputs = len(ids) - group.prompt_len
            scored: tuple[TokenLogprob, ...] | None = None
            if group.logprobs:
                scored = (result.logprobs[chunk[0]],)
            if token in group.stops and outputs >= group.min_tokens:
                self.open_requests.finish(sequence, "stop", logprobs=scored, stop_token=token)
                continue
            ids.append(token)
            generated += 1
            group.count(now)
            if len(ids) > sequence.end:
                self.open_requests.finish(sequence, "length", tokens=(token,), logprobs=scored)
            else:
                self.open_requests.tell(sequence, None, (token,), outputs, scored)
        self.counters.generation_tokens += generated
        self.counters.surplus_tokens += surplus
        self.open_requests.expire(now)
        return self.take_events()

    def _commit_drafts(
        self, speculation: Speculation, chunk: Chunk, sequence: Sequence, token: int, result: StepResult, now: float
    ) -> tuple[int, int]:
        """Commits a sequence's tokens of one step: `token` and those after accepted drafts. Returns how many were used,
        and how many came after the end of the sequence."""
        slot, more = chunk.slot, result.more.get(chunk.slot, ())
        sequence.slack -= chunk.drafts
        sequence.acceptance = speculation.observe_drafts(sequence.acceptance, result.drafted.get(slot, 0), len(more))
        if sequence.state != "waiting":  # a preempted sequence is recomputed from its start
            sequence.computed = min(sequence.computed + len(more), sequence.end)
        group, tokens, first = sequence.group, sequence.tokens, sequence.outputs
        scores: list[TokenLogprob] = []
        for after, (drawn, score) in enumerate(((token, result.logprobs.get(slot)), *more)):
            outputs = len(tokens) - group.prompt_len
            if group.logprobs and score is not None:
                scores.append(score)
            stop = drawn in group.stops and outputs >= group.min_tokens
            if not stop:
                tokens.append(drawn)
                group.count(now)
            if stop or len(tokens) > sequence.end:
                output, scored = tuple(tokens[group.prompt_len + first :]), tuple(scores) or None
                reason: FinishReason = "stop" if stop else "length"
                self.open_requests.finish(
                    sequence, reason, tokens=output, logprobs=scored, stop_token=drawn if stop else None
                )
                return len(output), len(more) - after
        self.open_requests.tell(sequence, None, tuple(tokens[group.prompt_len + first :]), first, tuple(scores) or None)
        return 1 + len(more), 0

    def _commit_prefills(self, done: _Uncommitted, result: StepResult) -> None:
        """Commits the rarer parts of a result: non-finite logits, prompt logprobs, prompts with max_tokens=0."""
        bad = set(result.nonfinite)
        residency, doubtful, failed = self.residency, set[bytes](), set[int]()
        for chunk, sequence in zip(done.batch.chunks, done.sequences, strict=True):
            if chunk.samples and not (sequence.proven or sequence.state == "ended" or chunk.slot in bad):
                sequence.proven = True
                residency.pool.prove(sequence.digests())
        for chunk, sequence in zip(done.batch.chunks, done.sequences, strict=True):
            if chunk.slot in bad:
                doubtful |= residency.pool.doubtful(sequence.digests())
                if not sequence.failed:  # after an earlier failure the number is that of restarted choices
                    failed.add(sequence.number)
                sequence.failed = True
                self._fail(sequence, result.failures.get(chunk.slot))
                sequence.chain, void = None, sequence  # its later results are ignored
            if sequence.state == "ended":
                continue
            if chunk.prompt_logprobs and sequence.prompt_logprobs is not None:
                count = min(chunk.count, sequence.group.prompt_len - 1 - chunk.start)
                scores = result.prompt_logprobs[chunk.slot]
                if len(scores) != count:
                    raise ValueError(f"slot {chunk.slot}: {len(scores)} prompt logprobs for {count} positions")
                sequence.prompt_logprobs[chunk.start + 1 : chunk.start + 1 + count] = scores
            if chunk.start + chunk.count >= sequence.group.prompt_len:
                sequence.prompt_scored = True
            if not sequence.draws and chunk.start + chunk.count == sequence.end:
                self.open_requests.finish(sequence, "length")
        if failed:
            self._forget(doubtful, failed, (done, *self._uncommitted), void)

    def _forget(self, doubtful: set[bytes], failed: Set[int], plans: Seq[_Uncommitted], void: Sequence) -> None:
        """Evicts the possibly non-finite blocks of failed sequences from the prefix cache. Plans in flight may have
        shared them with other sequences, or with further choices of the failed groups (`failed`, by number); these
        read zeros since the ranks zeroed the blocks. They restart, and what they sample until then is discarded
        (attributed to `void`)."""
        residency = self.residency
        there = {*residency.running, *(sequence for plan in plans for sequence in plan.sequences)}
        misled = {
            sequence
            for sequence in there
            if not (sequence.proven or sequence.state == "ended")
            and (sequence.number in failed or not doubtful.isdisjoint(sequence.digests()))
        }
        for sequence in sorted(misled, key=Sequence.order):
            residency.unhold(sequence.group)
            sequence.inflight = sequence.slack = 0
            if sequence.state == "running":
                residency.running.remove(sequence)
                residency.vacate(sequence)
            if sequence.state != "waiting":
                self.waiting.push_back(sequence)
            sequence.state, sequence.computed = "waiting", 0
        for plan in plans:
            plan.sequences[:] = [void if sequence in misled else sequence for sequence in plan.sequences]
        residency.pool.forget(doubtful)

    def _fail(self, sequence: Sequence, constraint: str | None) -> None:
        """Ends the choice: its logits were non-finite, or its constraints allow no token. If no token of any choice is
        known yet, all choices of the request end."""
        group = sequence.group
        self.residency.unhold(group)
        if sequence.state == "ended":
            return
        reason: FinishReason = "numerical_error" if constraint is None else "constraint_error"
        message = f"logits were NaN or Inf after {sequence.outputs} tokens: only this choice was ended"
        if constraint is not None:
            message = f"no token satisfies the request's constraints after {sequence.outputs} tokens: {constraint}"
        if not any(one.outputs for one in group.sequences):
            self.open_requests.end_group(group, reason, message)
        else:
            self.open_requests.finish(sequence, reason, message=message)
