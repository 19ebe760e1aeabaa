"""The plan of one step: who decodes, whose prompt goes on, who enters and who makes room. Changes the scheduler's books
(waiting_queue.py, kv_manager.py) as if the plan had run; scheduler.py is its only caller.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from ..batch import Batch, Chunk, NewSequence
from .kv_manager import Residency, Reuse
from .limits import SchedulerLimits
from .sequence import RequestGroup, Sequence
from .speculation import Speculation
from .waiting_queue import Turn, WaitingQueues

BLOCKED_STEPS = 8
"""Without chunked prefill: steps that a prompt waits for room next to the running sequences before it gets a step of
its own."""
LEAST_CHUNK = 256
"""Tokens of a prompt's chunk below which it is not cut to fill a pipeline: a stage reads its weights for each."""
MOST_PAYLOAD = 8 << 20
"""Bytes of prompts, biases and grammars that enter with one plan, the last not counted: a plan is one frame."""


@dataclass(slots=True)
class Counters:
    """Since the start. Prefix queries and hits are in tokens; `surplus` tokens were computed for nothing."""

    prompt_tokens: int = 0
    generation_tokens: int = 0
    prefix_queries: int = 0
    prefix_hits: int = 0
    preemptions: int = 0
    surplus_tokens: int = 0


@dataclass(slots=True)
class StepPlan:
    """A Batch in the making. `sequences` is aligned with `chunks`."""

    now: float
    budget: int
    scored: int
    """Prompt positions that may still be scored in this step."""
    chunks: list[Chunk] = field(default_factory=list)
    sequences: list[Sequence] = field(default_factory=list)
    admitted: list[NewSequence] = field(default_factory=list)
    blocks: list[tuple[int, tuple[int, ...]]] = field(default_factory=list)
    copies: list[tuple[int, int]] = field(default_factory=list)
    prefilled: list[Sequence] = field(default_factory=list)
    payload: int = 0
    preempted: bool = False
    blocked: bool = False
    invited: Turn | None = None
    """For whom others were preempted: it enters next, and need not leave the watermark free."""


class Planner:
    """`plan` is the whole of it; `spawn` is also for choices that end before they were planned."""

    def __init__(
        self, limits: SchedulerLimits, waiting: WaitingQueues, residency: Residency, counters: Counters
    ) -> None:
        self.limits, self.waiting, self.residency, self.counters = limits, waiting, residency, counters
        self.speculation = None if limits.speculation is None else Speculation(limits.speculation)
        self.step = 0
        self.parked: list[str] = []
        """Requests of which the last plan preempted a choice."""
        self._blocked_steps = 0
        self._reserve = int(limits.watermark * limits.num_blocks)

    def plan(self, now: float) -> tuple[Batch, StepPlan] | None:
        """The next step, or None when nothing can be planned."""
        plan = StepPlan(now, self.limits.max_num_batched_tokens, self.limits.max_scored_positions)
        self.parked = []
        alone = self._blocked_steps >= BLOCKED_STEPS
        self._invite(plan, alone)
        prefills: list[Sequence] = []
        if not alone:
            self._decode(plan, prefills)
        self._prefill(plan, prefills)
        if alone and not plan.chunks:
            self._decode(plan, prefills)
        self._blocked_steps = self._blocked_steps + 1 if plan.blocked else 0
        return (self._seal(plan), plan) if plan.chunks else None

    def _decode(self, plan: StepPlan, prefills: list[Sequence]) -> None:
        """Decode the sequences whose turn it is. Where all of these are preempted the rest takes the turn: without
        anything in flight no commit would start the next plan."""
        while not self._decode_turn(plan, prefills) and not plan.chunks:
            prefills.clear()

    def _decode_turn(self, plan: StepPlan, prefills: list[Sequence]) -> bool:
        """One position for each sequence that needs one and, in a pipeline, whose turn it is. Where blocks run out, the
        last of the order goes; False if that ended the turn."""
        running, speculation = self.residency.running, self.speculation
        several = self.limits.microbatches > 1
        turn = self._turn() if several else frozenset()
        chunks, planned, left, complete = plan.chunks, plan.sequences, False, True
        spare, threshold = plan.budget - len(running), 0.0
        if speculation is not None:
            threshold = speculation.threshold(len(running))
            if len(self.waiting) or any(s.computed < s.prompt_len for s in running):
                spare = min(spare, plan.budget // 8)  # prompts come before guesses
        for sequence in running:
            at = sequence.computed
            inflight = sequence.inflight
            if at >= sequence.end:
                self.residency.vacate(sequence)
                sequence.state = "leaving"
                left = True
                continue
            if at < sequence.prompt_len or len(sequence.tokens) + inflight - at != 1:
                prefills.append(sequence)
                continue
            if (inflight and sequence.lockstep) or (several and sequence not in turn):
                continue
            drafts = 0
            if speculation is None:
                if at == sequence.room and not self._grow(plan, sequence):
                    complete = False
                    break
            else:
                if not self._reach(plan, sequence):
                    complete = False
                    break
                if spare > 0:
                    wanted = speculation.wanted(sequence.acceptance, threshold)
                    drafts = self._drafts(plan, sequence, min(spare, wanted))
                    spare -= drafts
                    plan.budget -= drafts
                    sequence.slack += drafts
            chunks.append(Chunk(sequence.slot, at, 1, True, False, drafts))
            planned.append(sequence)
            sequence.computed = at + 1
            sequence.inflight = inflight + 1
            sequence.planned = self.step
        if left:
            self.residency.running = [sequence for sequence in running if sequence.state == "running"]
        plan.budget -= len(chunks)
        return complete

    def _turn(self) -> frozenset[Sequence]:
        """An even share of the decoding sequences for each micro-batch: those that have waited for the most plans.
        One whose last token is less than a round of micro-batches away would be waited for: it is not ready. So each
        stays with those that it was planned with, and where some have ended or begun, shares are even again within a
        round."""
        batches, now = self.limits.microbatches, self.step
        decoding = [
            s
            for s in self.residency.running
            if s.prompt_len <= s.computed < s.end and len(s.tokens) + s.inflight - s.computed == 1
        ]
        ready = [s for s in decoding if not s.inflight or (now - s.planned >= batches and not s.lockstep)]
        ready.sort(key=lambda s: s.planned)
        # Those that are ready are divided among the plans of this round that are still to come.
        left = max(1, batches - len({s.planned for s in decoding} - {s.planned for s in ready}))
        return frozenset(ready[: min(-(-len(decoding) // batches), -(-len(ready) // left))])

    def _grow(self, plan: StepPlan, sequence: Sequence) -> bool:
        """One block more for a running sequence, at the price of the held prompts, then of those after it in the
        order, then of itself: False."""
        residency = self.residency
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

    def _reach(self, plan: StepPlan, sequence: Sequence) -> bool:
        """Blocks up to where the sequence's next position may be. False: it had to go."""
        while min(sequence.computed + sequence.slack, sequence.end - 1) >= sequence.room:
            if not self._grow(plan, sequence):
                return False
        return True

    def _drafts(self, plan: StepPlan, sequence: Sequence, wanted: int) -> int:
        """How many of so many drafts have room: blocks that others may need for themselves are not taken."""
        wanted = min(wanted, sequence.end - 1 - sequence.computed)
        furthest = sequence.computed + sequence.slack
        while wanted > 0 and min(furthest + wanted, sequence.end - 1) >= sequence.room:
            if self.residency.pool.available <= len(self.residency.running):
                return max(0, sequence.room - 1 - furthest)
            self._grow(plan, sequence)
        return max(0, wanted)

    def _preempt(self, plan: StepPlan, victim: Sequence) -> None:
        """The last in the order leaves its slot; what it has computed is to be computed again."""
        residency = self.residency
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
        self.parked.append(victim.group.request.request_id)
        self.waiting.push_back(victim)

    def _invite(self, plan: StepPlan, alone: bool) -> None:
        """Preempts running sequences of a lower rank where the next in line lacks a slot or blocks."""
        residency = self.residency
        running, pool = residency.running, residency.pool
        turn = self.waiting.peek(plan.now)
        if turn is None or not running or running[-1].rank <= turn.rank or turn.sequence.inflight:
            return
        head, rank = turn.sequence, turn.rank
        if head.group.request.priority != rank:
            return  # ageing gives turns, it evicts no sequence
        reuse = residency.reuse(head)
        if residency.slots and pool.available - residency.need(head, reuse) >= self._spare():
            return
        remaining = len(head.tokens) - reuse.start
        if any(other.rank <= rank and other.remaining > 1 for other in running):
            return  # its prompt would not be begun in this step
        if not self.limits.enable_chunked_prefill and not alone and remaining + len(running) > plan.budget:
            return
        lower = [other for other in running if other.rank > rank]
        matched = set(reuse.shared)
        gain = sum(pool.references(b) == 1 and b not in matched for other in lower for b in other.blocks)
        if pool.available + gain - residency.need(head, reuse) < len(running) - len(lower):
            return
        while running and running[-1].rank > rank:
            self._preempt(plan, running[-1])
            if pool.available - residency.need(head, reuse) >= len(running):
                plan.invited = turn
                return

    def _spare(self) -> int:
        """Blocks that admission leaves free: enough that a newcomer is not at once preempted by those who run."""
        running = len(self.residency.running)
        return max(self._reserve, running) if running else 0

    def _prefill(self, plan: StepPlan, prefills: list[Sequence]) -> None:
        """Gives the rest of the budget to prompts begun, then to those that wait, by rank."""
        for sequence in prefills:
            self._admit(plan, sequence.rank)
            if plan.budget == 0:
                return
            self._extend(plan, sequence)
        self._admit(plan, None)

    def _admit(self, plan: StepPlan, below: int | None) -> None:
        """Those whose turn it is, while there are slots, blocks and tokens; only ranks better than `below`."""
        residency = self.residency
        while plan.budget and residency.slots and plan.payload < MOST_PAYLOAD:
            invited = plan.invited is not None
            turn = plan.invited or self.waiting.peek(plan.now)
            if turn is None or (below is not None and turn.rank >= below):
                return
            sequence = turn.sequence
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
            self.waiting.pop(turn)
            plan.invited = None
            self._enter(plan, sequence, turn.rank, reuse)

    def _enter(self, plan: StepPlan, sequence: Sequence, rank: int, reuse: Reuse) -> None:
        residency, group = self.residency, sequence.group
        residency.enter(sequence, rank, reuse)
        slot, blocks = sequence.slot, tuple(sequence.blocks)
        plan.admitted.append(
            NewSequence(slot, sequence.choice, group.prompt_len, tuple(sequence.tokens), group.request.params)
        )
        params = group.request.params
        # UTF-8 takes up to four bytes a character
        plan.payload += 4 * (len(sequence.tokens) + len(params.grammar or "")) + 12 * len(params.logit_bias)
        plan.blocks.append((slot, blocks))
        if reuse.copied is not None:
            plan.copies.append((reuse.copied, blocks[len(reuse.shared)]))
        if reuse.cached and sequence.chain is not None and not sequence.fresh:
            self.counters.prefix_queries += len(sequence.tokens)
            self.counters.prefix_hits += reuse.start
        if sequence.fresh:
            sequence.fresh = False
            group.unforked -= 1
        if group.admitted is None:
            group.admitted = plan.now
            group.flow.served += group.prompt_len
            group.flow.owner.served += group.prompt_len
            if not group.request.emitted:  # else both were reported when it began
                group.cached_tokens = reuse.start
                self.counters.prompt_tokens += group.prompt_len
        self._extend(plan, sequence)

    def _extend(self, plan: StepPlan, sequence: Sequence) -> None:
        """The next chunk of what the sequence knows, as large as the budget allows."""
        start, known = sequence.computed, len(sequence.tokens)
        count = min(known - start, plan.budget)
        if self.limits.microbatches > 1 and self.limits.enable_chunked_prefill:
            # A prompt alone shall fill all stages, too: two chunks at least for each micro-batch.
            count = min(count, max(LEAST_CHUNK, -(-known // (2 * self.limits.microbatches))))
        scores = not sequence.prompt_scored and start < sequence.group.prompt_len - 1
        if scores and self.limits.enable_chunked_prefill:
            count = min(count, max(1, plan.scored))
            plan.scored -= count
        last = start + count == known
        plan.chunks.append(Chunk(sequence.slot, start, count, last and sequence.draws, scores))
        plan.sequences.append(sequence)
        plan.prefilled.append(sequence)
        plan.budget -= count
        sequence.computed = start + count
        if last and sequence.draws:
            sequence.inflight += 1
            sequence.planned = self.step

    def _seal(self, plan: StepPlan) -> Batch:
        """The plan as a Batch, and what holds only once it is made: blocks that it fills are known by content, prompts
        that it completes can be forked."""
        residency = self.residency
        for sequence in plan.prefilled:
            residency.register(sequence)
            group = sequence.group
            if group.unforked and not group.held and sequence.computed >= group.prompt_len:
                self._fork(sequence)
        for group in [group for group in residency.holders.values() if not group.unforked]:
            residency.unhold(group)
        batch = Batch(
            self.step,
            tuple(residency.released),
            tuple(plan.admitted),
            tuple(plan.blocks),
            tuple(plan.copies),
            tuple(plan.chunks),
        )
        residency.released.clear()
        self.step += 1
        return batch

    def _fork(self, sequence: Sequence) -> None:
        """The prompt is planned: hold it for the choices to come, and let them wait for their slots."""
        group = sequence.group
        self.residency.hold(sequence)
        self.spawn(group)

    def spawn(self, group: RequestGroup) -> None:
        """The choices after the first come to be, and wait before all new requests."""
        chain = group.sequences[0].chain
        for choice in range(len(group.sequences), group.request.params.n):
            forked = None if chain is None else chain.fork(group.prompt_len // self.limits.block_size)
            group.sequences.append(Sequence(group, choice, forked, self.limits.max_model_len))
            self.waiting.push_back(group.sequences[-1])
