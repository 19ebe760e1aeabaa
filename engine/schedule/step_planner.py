"""Plans one step: which sequences decode, prefill, are admitted and are preempted. Updates the scheduler's state
(waiting_queue.py, kv_manager.py) as if the plan had run. scheduler.py is its only caller.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from math import inf

from ..batch import Batch, Chunk, NewSequence
from .kv_manager import Residency, Reuse
from .limits import SchedulerLimits
from .sequence import RequestGroup, Sequence
from .speculation import Speculation
from .waiting_queue import NextSequence, WaitingQueues

LEAST_CHUNK = 256
"""Tokens of the smallest chunk that a prompt is cut into to fill a pipeline: a stage reads its weights for each."""
MOST_PAYLOAD = 8 << 20
"""Bytes of prompts, biases and grammars in one plan, which is one frame; the sequence that exceeds it is the last."""


@dataclass(slots=True)
class Counters:
    """Counts since the start. Prefix queries and hits are in tokens; `surplus` tokens were computed and discarded."""

    prompt_tokens: int = 0
    generation_tokens: int = 0
    prefix_queries: int = 0
    prefix_hits: int = 0
    preemptions: int = 0
    surplus_tokens: int = 0


@dataclass(slots=True)
class StepPlan:
    """A Batch under construction. `sequences` is aligned with `chunks`."""

    now: float
    budget: int
    scored: int
    """Prompt positions that may still be scored in this step."""
    threshold: float = inf
    """The least probability to be accepted with which a draft pays in the next step."""
    chunks: list[Chunk] = field(default_factory=list)
    sequences: list[Sequence] = field(default_factory=list)
    admitted: list[NewSequence] = field(default_factory=list)
    blocks: list[tuple[int, tuple[int, ...]]] = field(default_factory=list)
    copies: list[tuple[int, int]] = field(default_factory=list)
    prefilled: list[Sequence] = field(default_factory=list)
    payload: int = 0
    preempted: bool = False
    invited: NextSequence | None = None
    """The sequence for which others were preempted: it is admitted next, without regard to the watermark."""


class Planner:
    """Makes plans. `spawn` is also called for choices that end before they were planned."""

    def __init__(
        self, limits: SchedulerLimits, waiting: WaitingQueues, residency: Residency, counters: Counters
    ) -> None:
        self.limits, self.waiting, self.residency, self.counters = limits, waiting, residency, counters
        settling = limits.microbatches if limits.microbatches > 1 else int(limits.runs_ahead)
        self.speculation = None if limits.speculation is None else Speculation(limits.speculation, settling)
        self.step = 0
        self.parked: list[str] = []
        """Ids of the requests of which the last plan preempted a choice."""
        self._reserve = int(limits.watermark * limits.num_blocks)

    def plan(self, now: float) -> tuple[Batch, StepPlan] | None:
        """Plans the next step; None if nothing can be planned."""
        plan = StepPlan(now, self.limits.max_num_batched_tokens, self.limits.max_scored_positions)
        self.parked = []
        self._invite(plan)
        prefills: list[Sequence] = []
        self._decode(plan, prefills)
        self._prefill(plan, prefills)
        return (self._seal(plan), plan) if plan.chunks else None

    def _decode(self, plan: StepPlan, prefills: list[Sequence]) -> None:
        """Plans the sequences whose turn it is to decode. If all of these are preempted, the others decode instead:
        with no step in flight, no commit would start the next plan."""
        while not self._decode_turn(plan, prefills) and not plan.chunks:
            prefills.clear()

    def _decode_turn(self, plan: StepPlan, prefills: list[Sequence]) -> bool:
        """Plans one position of each sequence that needs one and, in a pipeline, whose turn it is. Without free blocks
        the last sequence of the order is preempted; False if that ended the turn."""
        running, speculation = self.residency.running, self.speculation
        several = self.limits.microbatches > 1
        turn = self._turn() if several else frozenset()
        chunks, planned, left, complete = plan.chunks, plan.sequences, False, True
        spare = plan.budget - len(running)
        if speculation is not None:
            share = len(turn) or -(-len(running) // self.limits.microbatches)
            plan.threshold = speculation.threshold(max(1, share))
            alone, mixed = self.limits.most_rows
            spare = min(spare, alone - len(running))
            enters = self.residency.slots or any(s.computed >= s.end for s in running)
            if (len(self.waiting) and enters) or any(s.computed < s.prompt_len for s in running):
                spare = min(spare, plan.budget // 8, mixed - len(running))  # prompts take precedence over drafts
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
            if at + sequence.slack >= sequence.room and not self._reach(plan, sequence):
                complete = False
                break
            drafts = max(0, min(spare, sequence.proposals))
            spare -= drafts
            plan.budget -= drafts
            sequence.slack += drafts
            self._set_proposals(plan, sequence, at + 1)
            sequence.computed = at + 1
            sequence.inflight = inflight + 1
            sequence.planned = self.step
            chunks.append(Chunk(sequence.slot, at, 1, True, False, drafts, sequence.proposals))
            planned.append(sequence)
        if left:
            self.residency.running = [sequence for sequence in running if sequence.state == "running"]
        plan.budget -= len(chunks)
        return complete

    def _turn(self) -> frozenset[Sequence]:
        """The decoding sequences of this micro-batch: an even share, those planned longest ago. A sequence planned less
        than `microbatches` plans ago is not ready: the step would wait for its token. So sequences keep their
        micro-batch, and when some have ended or started, shares are even again after one round."""
        batches, now = self.limits.microbatches, self.step
        decoding = [
            s
            for s in self.residency.running
            if s.prompt_len <= s.computed < s.end and len(s.tokens) + s.inflight - s.computed == 1
        ]
        ready = [s for s in decoding if not s.inflight or (now - s.planned >= batches and not s.lockstep)]
        ready.sort(key=lambda s: s.planned)
        # The ready sequences are divided among the remaining plans of this round.
        left = max(1, batches - len({s.planned for s in decoding} - {s.planned for s in ready}))
        return frozenset(ready[: min(-(-len(decoding) // batches), -(-len(ready) // left))])

    def _grow(self, plan: StepPlan, sequence: Sequence) -> bool:
        """Allocates one more block for a running sequence. If none is free it releases held prompts, then preempts
        sequences from the end of the order; False if the sequence itself was preempted."""
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
        """Allocates blocks up to the sequence's furthest possible next position; False if it was preempted."""
        while min(sequence.computed + sequence.slack, sequence.end - 1) >= sequence.room:
            if not self._grow(plan, sequence):
                return False
        return True

    def _set_proposals(self, plan: StepPlan, sequence: Sequence, computed: int) -> None:
        """Sets how many drafts this step, after which `computed` positions are planned, proposes for the next one: as
        many as pay and have blocks. It leaves one available block for each running sequence."""
        if self.speculation is None:
            return
        requested = self.speculation.wanted(sequence.acceptance, plan.threshold)
        requested = max(0, min(requested, sequence.end - 1 - computed))
        furthest = computed + sequence.slack
        while requested and min(furthest + requested, sequence.end - 1) >= sequence.room:
            if self.residency.pool.available <= len(self.residency.running):
                requested = max(0, min(requested, sequence.room - 1 - furthest))
                break
            self._grow(plan, sequence)
        sequence.proposals = requested

    def _preempt(self, plan: StepPlan, victim: Sequence) -> None:
        """Preempts the last sequence of the order: it leaves its slot and is recomputed later."""
        residency = self.residency
        assert residency.running[-1] is victim
        residency.running.pop()
        if victim.state != "running":
            return
        residency.vacate(victim)
        if victim.computed >= victim.end:
            victim.state = "leaving"
            return
        victim.state = "waiting"
        victim.computed = 0
        plan.preempted = True
        self.counters.preemptions += 1
        self.parked.append(victim.group.request.request_id)
        self.waiting.push_back(victim)

    def _invite(self, plan: StepPlan) -> None:
        """Preempts running sequences of a worse rank if the next waiting sequence lacks a slot or blocks."""
        residency = self.residency
        running, pool = residency.running, residency.pool
        if not running or running[-1].rank <= self.waiting.best_rank:
            return
        turn = self._next(plan)
        if turn is None or running[-1].rank <= turn.rank or turn.sequence.inflight:
            return
        head, rank = turn.sequence, turn.rank
        if head.group.request.priority != rank:
            return  # ageing changes the order of admission; it does not preempt
        reuse = residency.reuse(head)
        if residency.slots and pool.available - residency.need(head, reuse) >= self._spare():
            return
        if any(other.rank <= rank and other.remaining > 1 for other in running):
            return  # its prompt would not start in this step
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

    def _next(self, plan: StepPlan) -> NextSequence | None:
        """The next waiting sequence, but none whose next blocks another one is about to compute: these are deferred
        until the blocks are planned, because no step reads what another sequence writes in it."""
        residency, waiting = self.residency, self.waiting
        for sequence in residency.pending.ready:
            waiting.resume(sequence)
        residency.pending.ready.clear()
        while (turn := waiting.peek(plan.now)) is not None:
            sequence = turn.sequence
            if sequence.inflight or not residency.defer(sequence, turn.rank):
                break
            sequence.deferred = True
        return turn

    def _spare(self) -> int:
        """Blocks that admission leaves free, so that running sequences do not preempt the new one at once."""
        running = len(self.residency.running)
        return max(self._reserve, running) if running else 0

    def _prefill(self, plan: StepPlan, prefills: list[Sequence]) -> None:
        """Gives the rest of the budget to started prompts, then to waiting ones, by rank."""
        for sequence in prefills:
            self._admit(plan, sequence.rank)
            if plan.budget == 0:
                return
            self._extend(plan, sequence)
        self._admit(plan, None)

    def _admit(self, plan: StepPlan, below: int | None) -> None:
        """Admits waiting sequences in order while slots, blocks and budget last; only ranks better than `below`."""
        residency = self.residency
        while plan.budget and residency.slots and plan.payload < MOST_PAYLOAD:
            invited = plan.invited is not None
            turn = plan.invited or self._next(plan)
            if turn is None or (below is not None and turn.rank >= below):
                return
            sequence = turn.sequence
            # A sequence that was preempted with a token in flight cannot be admitted before that token is known.
            if sequence.inflight or (plan.preempted and not invited):
                return
            reuse = residency.reuse(sequence)
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
        # UTF-8: up to four bytes per character
        plan.payload += 4 * (len(sequence.tokens) + len(params.grammar or "")) + 12 * len(params.logit_bias)
        plan.blocks.append((slot, blocks))
        if reuse.copied is not None:
            plan.copies.append((reuse.copied, blocks[len(reuse.shared)]))
        if reuse.cached and sequence.chain is not None and not sequence.fresh:
            self.counters.prefix_queries += len(sequence.tokens)
            self.counters.prefix_hits += reuse.start
        if self.speculation is not None and not sequence.outputs:
            sequence.acceptance = self.speculation.first
        if sequence.fresh:
            sequence.fresh = False
            group.unforked -= 1
        if group.admitted is None:
            group.admitted = plan.now
            group.queue.served += group.prompt_len
            group.queue.owner.served += group.prompt_len
            if not group.request.emitted:  # a resumed request was counted when it started
                group.cached_tokens = reuse.start
                self.counters.prompt_tokens += group.prompt_len
        self._extend(plan, sequence)

    def _extend(self, plan: StepPlan, sequence: Sequence) -> None:
        """Plans the next chunk of the sequence's known tokens, as large as the budget allows."""
        start, length = sequence.computed, len(sequence.tokens)
        count = min(length - start, plan.budget)
        if self.limits.microbatches > 1:
            # A single prompt must fill all stages too: at least two chunks for each micro-batch.
            count = min(count, max(LEAST_CHUNK, -(-length // (2 * self.limits.microbatches))))
        scores = not sequence.prompt_scored and start < sequence.group.prompt_len - 1
        if scores:
            count = min(count, max(1, plan.scored))
            plan.scored -= count
        last = start + count == length
        sequence.proposals = 0
        if last and sequence.draws:
            sequence.inflight += 1
            sequence.planned = self.step
            self._set_proposals(plan, sequence, start + count)
        sequence.computed = start + count
        draws = last and sequence.draws
        plan.chunks.append(Chunk(sequence.slot, start, count, draws, scores, 0, sequence.proposals))
        plan.sequences.append(sequence)
        plan.prefilled.append(sequence)
        plan.budget -= count

    def _seal(self, plan: StepPlan) -> Batch:
        """Makes the Batch; then registers the blocks that it fills in the prefix cache and forks the prompts that it
        completes."""
        residency = self.residency
        for sequence in plan.prefilled:
            residency.register(sequence)
            group = sequence.group
            if group.unforked and not group.prompt_blocks and sequence.computed >= group.prompt_len:
                residency.hold(sequence)
                self.spawn(group)
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

    def spawn(self, group: RequestGroup) -> None:
        """Makes the choices after the first and queues them before all new requests."""
        chain = group.sequences[0].chain
        for choice in range(len(group.sequences), group.request.params.n):
            forked = None if chain is None else chain.fork(chain.full(group.prompt_len))
            group.sequences.append(Sequence(group, choice, forked, self.limits.max_model_len))
            self.waiting.push_back(group.sequences[-1])
