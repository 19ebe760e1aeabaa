"""Who runs next: requests in, one Batch a step out, sampled tokens in, events out. No torch; data in and data out.

Rank 0 alone has one. The same calls with the same times give the same plans. A plan may be made while the one before
it is still unknown: it takes every running sequence to go on, and `commit` discards what that had too much. Admission
is strict in its order (engine/queues.py): who does not fit is waited for, so that nobody is passed over for ever.
"""

from __future__ import annotations

import heapq
from collections import deque
from collections.abc import Iterable
from collections.abc import Sequence as Seq
from dataclasses import dataclass, field

from .batch import Batch, Chunk, NewSequence, StepResult
from .prefix import DigestChain
from .queues import WaitingQueues
from .request import FinishReason, Request, TokenLogprob, TokensEvent
from .residency import Residency, Reuse
from .sequence import Group, Sequence, end_position

BLOCKED_STEPS = 8
"""Without chunked prefill: steps that a prompt waits for room beside the running sequences before it gets a step of
its own."""
_RECORDS = 4096


@dataclass(frozen=True, slots=True)
class SchedulerLimits:
    """Tokens, sequences and blocks of one replica. `ageing_s` seconds of waiting outweigh one priority;
    `watermark` is the share of the blocks that admission leaves free for those who run already."""

    max_num_seqs: int
    max_num_batched_tokens: int
    max_model_len: int
    block_size: int
    num_blocks: int
    enable_prefix_caching: bool = True
    enable_chunked_prefill: bool = True
    ageing_s: float = 60.0
    watermark: float = 0.01

    def __post_init__(self) -> None:
        for name in ("max_num_seqs", "max_num_batched_tokens", "max_model_len", "block_size", "num_blocks"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name}={getattr(self, name)} is below 1: a step needs at least one of each")
        if self.max_num_batched_tokens < self.max_num_seqs:
            raise ValueError(
                f"max_num_batched_tokens={self.max_num_batched_tokens} is less than max_num_seqs={self.max_num_seqs}: "
                "every running sequence needs one token a step, raise the one or lower the other"
            )
        if not self.enable_chunked_prefill and self.max_num_batched_tokens < self.max_model_len:
            raise ValueError(
                f"max_num_batched_tokens={self.max_num_batched_tokens} is less than max_model_len="
                f"{self.max_model_len}: a prompt must fit a step, enable chunked prefill or raise the former"
            )


class RequestTooLarge(ValueError):
    """The request could never run, however empty the engine: `value` is what was asked, `rule` what it breaks, `mend`
    what would do."""

    def __init__(self, value: str, rule: str, mend: str) -> None:
        super().__init__(f"{value}: {rule}; {mend}")
        self.value, self.rule, self.mend = value, rule, mend


@dataclass(frozen=True, slots=True)
class RequestTimes:
    """One ended request, for the histograms; unix seconds, None for what never came."""

    request_id: str
    priority: int
    arrival: float
    admitted: float | None
    first_token: float | None
    finished: float
    prompt_tokens: int
    output_tokens: int
    cached_tokens: int


@dataclass(slots=True)
class Counters:
    """Since the start. Prefix queries and hits are in tokens; `surplus` tokens were computed for nothing."""

    steps: int = 0
    prompt_tokens: int = 0
    generation_tokens: int = 0
    prefix_queries: int = 0
    prefix_hits: int = 0
    preemptions: int = 0
    surplus_tokens: int = 0


@dataclass(slots=True)
class _Plan:
    """A Batch in the making. `sequences` is aligned with `chunks`."""

    budget: int
    chunks: list[Chunk] = field(default_factory=list)
    sequences: list[Sequence] = field(default_factory=list)
    admitted: list[NewSequence] = field(default_factory=list)
    blocks: list[tuple[int, tuple[int, ...]]] = field(default_factory=list)
    copies: list[tuple[int, int]] = field(default_factory=list)
    prefilled: list[Sequence] = field(default_factory=list)
    preempted: bool = False
    blocked: bool = False
    invited: Sequence | None = None
    """The waiting sequence for whom others were preempted: it need not leave the watermark free."""


@dataclass(frozen=True, slots=True)
class _Uncommitted:
    batch: Batch
    sequences: list[Sequence]
    prefills: bool


class Scheduler:
    """`add`, `cancel` and `stop_choice` at any moment; `schedule` and `commit` in turns, at most two plans ahead."""

    def __init__(self, limits: SchedulerLimits) -> None:
        self.limits = limits
        self.counters = Counters()
        self._groups: dict[str, Group] = {}
        self._waiting = WaitingQueues(limits.ageing_s)
        self._residency = Residency(
            limits.max_num_seqs, limits.block_size, limits.num_blocks, limits.enable_prefix_caching
        )
        self._uncommitted: deque[_Uncommitted] = deque()
        self._deadlines: list[tuple[float, int, str]] = []
        self._events: list[TokensEvent] = []
        self._ended: deque[RequestTimes] = deque(maxlen=_RECORDS)
        self._arrivals = 0
        self._step = 0
        self._blocked_steps = 0
        self._reserve = int(limits.watermark * limits.num_blocks)
        self._now = 0.0

    # ---- what is asked from outside

    def add(self, request: Request, now: float) -> None:
        """`now` in unix seconds, like the request's deadline. Raises RequestTooLarge if it can never fit, ValueError
        if it is no request at all or its id is in use."""
        self._check(request)
        group = Group(request, self._arrivals, now)
        self._arrivals += 1
        self._groups[request.request_id] = group
        self._waiting.join(group)
        chain = DigestChain(request.salt, self.limits.block_size) if self.limits.enable_prefix_caching else None
        group.sequences.append(Sequence(group, 0, chain, self.limits.max_model_len))
        self._waiting.push(group.sequences[0])
        if request.deadline is not None:
            heapq.heappush(self._deadlines, (request.deadline, group.number, request.request_id))

    def cancel(self, request_id: str) -> None:
        """All choices that have not ended do so with "cancelled"; unknown ids are ignored: it may just have ended."""
        group = self._groups.get(request_id)
        if group is not None:
            self._end_group(group, "cancelled")

    def stop_choice(self, request_id: str, choice: int, n_tokens: int) -> None:
        """The choice ends with "stop" after `n_tokens`; unknown or ended ones are ignored."""
        group = self._groups.get(request_id)
        if group is not None and 0 <= choice < len(group.sequences) and group.sequences[choice].state != "ended":
            self._finish(group.sequences[choice], "stop", start=n_tokens)

    def take_events(self) -> list[TokensEvent]:
        """Ends that no step brought (cancelled, timeout, stop), for whenever `schedule` returns None; `commit` returns
        them too. They follow all events returned before."""
        events, self._events = self._events, []
        return events

    def take_ended(self) -> list[RequestTimes]:
        """Requests ended since the last call, the latest 4096 of them."""
        ended = list(self._ended)
        self._ended.clear()
        return ended

    @property
    def has_work(self) -> bool:
        """Whether a request is open or an event is owed; plans of ended requests may still be uncommitted."""
        return bool(self._groups or self._events)

    @property
    def num_running(self) -> int:
        """Sequences in slots."""
        return len(self._residency.running)

    @property
    def num_waiting(self) -> int:
        """Sequences that wait, preempted ones included."""
        return len(self._waiting)

    def request_ids(self, slots: Iterable[int]) -> list[str]:
        """Who runs in these slots; slots that nobody runs in are left out."""
        there = {sequence.slot: sequence.group.request.request_id for sequence in self._residency.running}
        return [there[slot] for slot in slots if slot in there]

    @property
    def num_uncommitted(self) -> int:
        return len(self._uncommitted)

    @property
    def kv_usage(self) -> float:
        """Share of the KV blocks that somebody holds; cached ones that nobody holds count as free."""
        return 1.0 - self._residency.pool.available / self.limits.num_blocks

    def oldest_waiting_age(self, now: float) -> float:
        """Seconds; 0 if nobody waits."""
        arrival = self._waiting.oldest_arrival()
        return 0.0 if arrival is None else max(0.0, now - arrival)

    def snapshot(self, now: float | None = None) -> dict[str, float]:
        """Gauges as of `now` (default: the last call's time) and counters, by the metrics' names."""
        counters = self.counters
        return {
            "num_requests_running": float(len({sequence.number for sequence in self._residency.running})),
            "num_requests_waiting": float(len(self._waiting)),
            "kv_cache_usage_ratio": self.kv_usage,
            "kv_cached_blocks": float(self._residency.pool.cached),
            "oldest_queued_request_age_seconds": self.oldest_waiting_age(self._now if now is None else now),
            "prompt_tokens_total": float(counters.prompt_tokens),
            "generation_tokens_total": float(counters.generation_tokens),
            "prefix_cache_queries_total": float(counters.prefix_queries),
            "prefix_cache_hits_total": float(counters.prefix_hits),
            "num_preemptions_total": float(counters.preemptions),
            "surplus_tokens_total": float(counters.surplus_tokens),
            "steps_total": float(counters.steps),
        }

    # ---- planning

    def schedule(self, now: float) -> Batch | None:
        """The next step, or None when nothing can be planned now: there is no work, or what there is waits for a
        commit. Raises RuntimeError when two plans are uncommitted already."""
        if len(self._uncommitted) > 1:
            raise RuntimeError("two plans are uncommitted: commit one before the next is made")
        self._now = now
        self._expire(now)
        plan = _Plan(self.limits.max_num_batched_tokens)
        alone = self._blocked_steps >= BLOCKED_STEPS
        self._invite(plan, alone)
        prefills: list[Sequence] = []
        if not alone:
            self._decode(plan, prefills)
        self._prefill(plan, prefills)
        if alone and not plan.chunks:
            self._decode(plan, prefills)
        self._blocked_steps = self._blocked_steps + 1 if plan.blocked else 0
        return self._seal(plan) if plan.chunks else None

    def _decode(self, plan: _Plan, prefills: list[Sequence]) -> None:
        """One position for each sequence that needs one. Where blocks run out, the last of the order goes."""
        running = self._residency.running
        chunks, planned, left = plan.chunks, plan.sequences, False
        for sequence in running:
            at = sequence.computed
            inflight = sequence.inflight
            if at >= sequence.end:
                self._residency.vacate(sequence)
                sequence.state = "leaving"
                left = True
                continue
            if at < sequence.prompt_len or len(sequence.tokens) + inflight - at != 1:
                prefills.append(sequence)
                continue
            if inflight and sequence.lockstep:
                continue
            if at == sequence.room and not self._grow(plan, sequence):
                break
            chunks.append(Chunk(sequence.slot, at, 1, True))
            planned.append(sequence)
            sequence.computed = at + 1
            sequence.inflight = inflight + 1
        if left:
            self._residency.running = [sequence for sequence in running if sequence.state == "running"]
        plan.budget -= len(chunks)

    def _grow(self, plan: _Plan, sequence: Sequence) -> bool:
        """One block more for a running sequence, at the price of the held prompts, then of those after it in the
        order, then of itself: False."""
        residency = self._residency
        while not residency.pool.available:
            if residency.holders:
                residency.unhold(residency.holders[next(reversed(residency.holders))])
                continue
            victim = residency.running[-1]
            self._preempt(plan, victim)
            if victim is sequence:
                return False
        plan.blocks.append((sequence.slot, (residency.grow(sequence),)))
        return True

    def _preempt(self, plan: _Plan, victim: Sequence) -> None:
        """The last in the order leaves its slot; what it has computed is to be computed again."""
        residency = self._residency
        assert residency.running[-1] is victim
        residency.running.pop()
        if victim.state != "running":
            return
        residency.vacate(victim)
        if victim.finishing:
            victim.state = "leaving"
            return
        victim.state = "waiting"
        victim.computed = 0
        plan.preempted = True
        self.counters.preemptions += 1
        self._waiting.push_back(victim)

    def _invite(self, plan: _Plan, alone: bool) -> None:
        """Where the next in line is of a better rank than some who run and lacks a slot or blocks, they make room."""
        residency = self._residency
        running, pool = residency.running, residency.pool
        turn = self._waiting.peek(self._now)
        if turn is None or not running or running[-1].rank <= turn[1] or turn[0].inflight:
            return
        head, rank = turn
        if head.group.request.priority != rank:
            return  # ageing gives turns, it evicts nobody
        reuse = residency.reuse(head)
        if residency.slots and pool.available - residency.need(head, reuse) >= self._spare():
            return
        remaining = len(head.tokens) - reuse.start
        if any(other.rank <= rank and other.remaining > 1 for other in running):
            return  # its prompt would not be begun in this step
        if not self.limits.enable_chunked_prefill and not alone and remaining + len(running) > plan.budget:
            return
        lower = [other for other in running if other.rank > rank]
        gain = sum(pool.references(block) == 1 for other in lower for block in other.blocks)
        if pool.available + gain - residency.need(head, reuse) < len(running) - len(lower):
            return
        while running[-1].rank > rank:
            self._preempt(plan, running[-1])
            if pool.available - residency.need(head, reuse) >= len(running):
                break
        plan.invited = head

    def _spare(self) -> int:
        """Blocks that admission leaves free: enough that a newcomer is not at once preempted by those who run."""
        running = len(self._residency.running)
        return max(self._reserve, running) if running else 0

    def _prefill(self, plan: _Plan, prefills: list[Sequence]) -> None:
        """What is left of the budget goes to prompts begun, then to those who wait; a better rank goes first."""
        for sequence in prefills:
            if sequence.state != "running":
                continue
            self._admit(plan, sequence.rank)
            if plan.budget == 0:
                return
            self._extend(plan, sequence)
        self._admit(plan, None)

    def _admit(self, plan: _Plan, below: int | None) -> None:
        """Those whose turn it is, while there are slots, blocks and tokens; only ranks better than `below`."""
        residency = self._residency
        while plan.budget and residency.slots:
            turn = self._waiting.peek(self._now)
            if turn is None or (below is not None and turn[1] >= below):
                return
            sequence, rank = turn
            invited = sequence is plan.invited
            # A sequence that was preempted with a token under way cannot come back before that token is known.
            if sequence.inflight or (plan.preempted and not invited):
                return
            reuse = residency.reuse(sequence)
            if not self.limits.enable_chunked_prefill and len(sequence.tokens) - reuse.start > plan.budget:
                plan.blocked = True
                return
            if not residency.running and residency.pool.available < residency.need(sequence, reuse):
                for group in list(residency.holders.values()):
                    residency.unhold(group)
                reuse = residency.reuse(sequence)
            spare = 0 if invited else self._spare()
            if residency.pool.available - residency.need(sequence, reuse) < spare:
                return
            self._waiting.pop(self._now)
            self._enter(plan, sequence, rank, reuse)

    def _enter(self, plan: _Plan, sequence: Sequence, rank: int, reuse: Reuse) -> None:
        residency, group = self._residency, sequence.group
        residency.enter(sequence, rank, reuse)
        slot, blocks = sequence.slot, tuple(sequence.blocks)
        plan.admitted.append(
            NewSequence(slot, sequence.choice, group.prompt_len, tuple(sequence.tokens), group.request.params)
        )
        plan.blocks.append((slot, blocks))
        if reuse.copied is not None:
            plan.copies.append((reuse.copied, blocks[len(reuse.shared)]))
        if reuse.cached and self.limits.enable_prefix_caching and sequence.prompt_scored:
            self.counters.prefix_queries += len(sequence.tokens)
            self.counters.prefix_hits += reuse.start
        if sequence.fresh:
            sequence.fresh = False
            group.unforked -= 1
        elif group.admitted is None:
            group.admitted = self._now
            group.cached_tokens = reuse.start
            group.flow.served += group.prompt_len
            self.counters.prompt_tokens += group.prompt_len
        self._extend(plan, sequence)

    def _extend(self, plan: _Plan, sequence: Sequence) -> None:
        """The next chunk of what the sequence knows, as large as the budget allows."""
        start, known = sequence.computed, len(sequence.tokens)
        count = min(known - start, plan.budget)
        last = start + count == known
        scores = not sequence.prompt_scored and start < sequence.group.prompt_len - 1
        plan.chunks.append(Chunk(sequence.slot, start, count, last and sequence.draws, scores))
        plan.sequences.append(sequence)
        plan.prefilled.append(sequence)
        plan.budget -= count
        sequence.computed = start + count
        if last and sequence.draws:
            sequence.inflight += 1

    def _seal(self, plan: _Plan) -> Batch:
        """The plan as a Batch, and what holds only once it is made: blocks that it fills are known by content, prompts
        that it completes can be forked."""
        residency = self._residency
        for sequence in plan.prefilled:
            residency.register(sequence)
            group = sequence.group
            if group.unforked and not group.held and sequence.computed >= group.prompt_len:
                self._fork(sequence)
        for group in [group for group in residency.holders.values() if not group.unforked]:
            residency.unhold(group)
        batch = Batch(
            self._step,
            tuple(residency.released),
            tuple(plan.admitted),
            tuple(plan.blocks),
            tuple(plan.copies),
            tuple(plan.chunks),
        )
        residency.released.clear()
        self._step += 1
        self.counters.steps += 1
        self._uncommitted.append(_Uncommitted(batch, plan.sequences, bool(plan.prefilled)))
        return batch

    def _fork(self, sequence: Sequence) -> None:
        """The prompt is planned: hold it for the choices to come, and let them wait for their slots."""
        group = sequence.group
        self._residency.hold(sequence)
        if len(group.sequences) == 1:
            full = group.prompt_len // self.limits.block_size
            for choice in range(1, group.request.params.n):
                chain = None if sequence.chain is None else sequence.chain.fork(full)
                other = Sequence(group, choice, chain, self.limits.max_model_len)
                group.sequences.append(other)
                self._waiting.push_back(other)

    # ---- what came of it

    def commit(self, batch: Batch, result: StepResult, now: float) -> list[TokensEvent]:
        """The oldest uncommitted plan's tokens, in; what is to be released, out, in order. A batch without chunks is
        nobody's plan: it only brings out the events owed. Raises RuntimeError on another plan's, ValueError where the
        tokens are not one for each chunk that samples."""
        if not batch.chunks:
            self._now = now
            self._expire(now)
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
        self._now = now
        if done.prefills or result.nonfinite or drawn != len(chunks):
            self._commit_prefills(done, result)
        tokens = iter(result.tokens)
        generated = surplus = 0
        for chunk, sequence in zip(chunks, done.sequences, strict=True):
            if not chunk[3]:
                continue
            token = next(tokens)
            if sequence.state == "ended":
                surplus += 1
                continue
            group, known = sequence.group, sequence.tokens
            sequence.inflight -= 1
            outputs = len(known) - group.prompt_len
            if token in group.stops and outputs >= group.min_tokens:
                self._finish(sequence, "stop", stop_token=token)
                continue
            known.append(token)
            generated += 1
            group.output_tokens += 1
            group.flow.served += 1
            scored: tuple[TokenLogprob, ...] | None = None
            if group.logprobs:
                scored = (result.logprobs[chunk[0]],)
            if outputs == 0 and group.first_token is None:
                group.first_token = now
            if len(known) > sequence.end:
                self._finish(sequence, "length", tokens=(token,), logprobs=scored)
            elif outputs == 0:
                self._tell(sequence, None, (token,), outputs, scored)
            else:
                request = group.request
                self._events.append(
                    TokensEvent(
                        request.request_id,
                        sequence.choice,
                        outputs,
                        (token,),
                        None,
                        scored,
                        None,
                        None,
                        None,
                        group.cached_tokens,
                        request.epoch,
                    )
                )
        self.counters.generation_tokens += generated
        self.counters.surplus_tokens += surplus
        self._expire(now)
        return self.take_events()

    def _commit_prefills(self, done: _Uncommitted, result: StepResult) -> None:
        """The rarer parts of a result: logits that are no numbers, prompt logprobs, prompts that nothing follows."""
        bad = set(result.nonfinite)
        for chunk, sequence in zip(done.batch.chunks, done.sequences, strict=True):
            if sequence.state == "ended":
                continue
            if chunk.slot in bad:
                self._fail(sequence)
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
                self._finish(sequence, "length")

    def _fail(self, sequence: Sequence) -> None:
        """Logits were NaN or Inf: the choice ends, what it computed is forgotten. Before the prompt was through there
        is only one sequence, and its fate is every choice's."""
        group = sequence.group
        message = f"logits were NaN or Inf after {sequence.outputs} tokens: only this choice was ended"
        if sequence.chain is not None:
            full = min(sequence.computed, len(sequence.tokens)) // self.limits.block_size
            digests = sequence.chain.upto(full, sequence.tokens)
        else:
            digests = []
        self._residency.unhold(group)
        if group.open > 1 and len(group.sequences) == 1:
            self._end_group(group, "numerical_error", message)
        else:
            self._finish(sequence, "numerical_error", message=message)
        self._residency.pool.forget(digests)

    # ---- ends

    def _finish(
        self,
        sequence: Sequence,
        reason: FinishReason,
        *,
        tokens: tuple[int, ...] = (),
        logprobs: tuple[TokenLogprob, ...] | None = None,
        stop_token: int | None = None,
        start: int | None = None,
        message: str | None = None,
    ) -> None:
        """The choice's last event; slot and blocks are given back. `start` defaults to the tokens told before."""
        group = sequence.group
        if sequence.state == "running":
            self._residency.running.remove(sequence)
            self._residency.vacate(sequence)
        elif sequence.state == "waiting":
            self._waiting.remove(sequence)
        sequence.state = "ended"
        if sequence.fresh:
            sequence.fresh = False
            group.unforked -= 1
        told = sequence.outputs - len(tokens) if start is None else start
        self._tell(sequence, reason, tokens, told, logprobs, stop_token, message)
        group.open -= 1
        if group.open == 0:
            self._close(group)

    def _tell(
        self,
        sequence: Sequence,
        finish: FinishReason | None,
        tokens: tuple[int, ...],
        start: int,
        logprobs: tuple[TokenLogprob, ...] | None = None,
        stop_token: int | None = None,
        message: str | None = None,
    ) -> None:
        request = sequence.group.request
        prompt: Seq[TokenLogprob | None] | None = sequence.prompt_logprobs if sequence.prompt_scored else None
        if prompt is not None:
            sequence.prompt_logprobs = None
        self._events.append(
            TokensEvent(
                request.request_id,
                sequence.choice,
                start,
                tokens,
                finish,
                logprobs,
                None if prompt is None else tuple(prompt),
                stop_token,
                message,
                sequence.group.cached_tokens,
                request.epoch,
            )
        )

    def _end_group(self, group: Group, reason: FinishReason, message: str | None = None) -> None:
        """Every choice that has not ended does, those that never came to be included."""
        for choice in range(len(group.sequences), group.request.params.n):
            group.sequences.append(Sequence(group, choice, None, self.limits.max_model_len))
            self._waiting.push_back(group.sequences[-1])
        for sequence in group.sequences:
            if sequence.state != "ended":
                self._finish(sequence, reason, message=message)

    def _close(self, group: Group) -> None:
        request = group.request
        self._residency.unhold(group)
        self._waiting.leave(group)
        del self._groups[request.request_id]
        self._ended.append(
            RequestTimes(
                request.request_id,
                request.priority,
                group.arrival,
                group.admitted,
                group.first_token,
                self._now,
                group.prompt_len,
                group.output_tokens,
                group.cached_tokens,
            )
        )

    def _expire(self, now: float) -> None:
        deadlines = self._deadlines
        while deadlines and deadlines[0][0] <= now:
            _, number, request_id = heapq.heappop(deadlines)
            group = self._groups.get(request_id)
            if group is not None and group.number == number:
                self._end_group(group, "timeout")
        if len(deadlines) > 2 * len(self._groups) + 64:
            numbers = {group.number for group in self._groups.values()}
            self._deadlines = [entry for entry in deadlines if entry[1] in numbers]
            heapq.heapify(self._deadlines)

    def _check(self, request: Request) -> None:
        limits, params, prompt_len = self.limits, request.params, len(request.prompt)
        if not prompt_len or params.n < 1 or params.max_tokens < 0:
            raise ValueError(
                f"request {request.request_id}: {prompt_len} prompt tokens, n={params.n}, "
                f"max_tokens={params.max_tokens}: at least one, one and none are needed"
            )
        if request.request_id in self._groups:
            raise ValueError(f"request {request.request_id} is running: ids are unique, choose another")
        room = limits.max_model_len - (params.max_tokens > 0)
        if prompt_len > room:
            raise RequestTooLarge(
                f"a prompt of {prompt_len} tokens",
                f"max_model_len={limits.max_model_len} leaves room for {room}",
                "shorten the prompt",
            )
        end = end_position(prompt_len, params.max_tokens, limits.max_model_len)
        needed = self._residency.blocks_for(end)
        if needed > limits.num_blocks:
            has = limits.num_blocks * limits.block_size
            raise RequestTooLarge(
                f"a prompt of {prompt_len} tokens with max_tokens={params.max_tokens}",
                f"it may need {end} KV positions, {needed} blocks of {limits.block_size}, and there are "
                f"{limits.num_blocks} ({has} tokens)",
                f"keep the prompt and max_tokens together below {has + 2}, or give the cache more memory",
            )
