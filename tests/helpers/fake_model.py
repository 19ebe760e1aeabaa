"""A model of ten lines and a runner that believes nothing: it obeys a Batch and raises where the Batch breaks a rule.

KV is (position, token) by block and offset, so a sequence that reads through a wrong, stale or shared block is found
out; the next token is a hash of the whole prefix as read through the blocks. NaN in KV spreads to who reads it, and is
healed to zeros as ranks do it, which make every later token of who reads those another one.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from laddertron.engine.batch import Batch, Chunk, NewSequence, StepResult
from laddertron.engine.request import Request, SamplingParams, TokenLogprob

VOCAB = 50
FINE, WRONG, NAN = range(3)
"""What a key may be: a number, one that was computed from zeros in place of NaN (or that zero), NaN."""


def next_token(prefix: Sequence[int], params: SamplingParams, choice: int) -> int:
    """The fake model: everything that may matter goes in, in order."""
    return hash((tuple(prefix), params.seed, choice)) % VOCAB


def logprob(prefix: Sequence[int], token: int) -> TokenLogprob:
    return TokenLogprob(token, -1.0 - hash((tuple(prefix), token)) % 1000 / 100)


@dataclass(frozen=True)
class Answer:
    """What a request must give, computed from the prompt alone."""

    tokens: tuple[int, ...]
    finish: str
    stop_token: int | None


def answer(request: Request, choice: int, max_model_len: int) -> Answer:
    params, prefix = request.params, list(request.prompt)
    limit = min(params.max_tokens, max_model_len - len(prefix))
    for count in range(limit):
        token = next_token(prefix, params, choice)
        if token in params.stop_token_ids and (count >= params.min_tokens or params.grammar is not None):
            return Answer(tuple(prefix[len(request.prompt) :]), "stop", token)
        prefix.append(token)
    return Answer(tuple(prefix[len(request.prompt) :]), "length", None)


def is_poisoned(tokens: Sequence[int], prompt: Sequence[int]) -> bool:
    """Whether tokens begin as the prompt does, as far as they go."""
    cut = min(len(tokens), len(prompt))
    return tuple(tokens[:cut]) == tuple(prompt[:cut])


class RuleBroken(AssertionError):
    """A Batch asked for what no rank can do."""


def rule(holds: bool, text: str) -> None:
    if not holds:
        raise RuleBroken(text)


@dataclass
class _Slot:
    sequence: NewSequence
    tokens: list[int]
    table: list[int] = field(default_factory=list)
    computed: int | None = None
    unseen: bool = False
    """Its last chunk drew nothing."""
    proposals: int = 0


class FakeRunner:
    """Obeys batches as a rank does. `poison` names (prompt, position) pairs: NaN in what begins as that prompt does.
    max_model_len: where drafts may be asked for; some are right and some are not."""

    def __init__(
        self,
        max_num_seqs: int,
        max_num_batched_tokens: int,
        block_size: int,
        num_blocks: int,
        vocab: int = VOCAB,
        max_model_len: int | None = None,
    ) -> None:
        self.max_model_len = max_model_len
        self.slots: dict[int, _Slot] = {}
        self.max_num_seqs, self.budget = max_num_seqs, max_num_batched_tokens
        self.block_size, self.num_blocks = block_size, num_blocks
        self.kv: dict[int, list[tuple[int, int] | None]] = {b: [None] * block_size for b in range(num_blocks)}
        self.kinds = {b: [FINE] * block_size for b in range(num_blocks)}
        self.poison: set[tuple[tuple[int, ...], int]] = set()
        self.computed_tokens = 0
        self.step = 0

    def run(self, batch: Batch) -> StepResult:
        rule(batch.step == self.step, f"step {batch.step} after {self.step - 1}")
        self.step += 1
        self._enter_and_leave(batch)
        self._copy(batch.copies)
        rule(batch.num_tokens <= self.budget, f"{batch.num_tokens} tokens, budget {self.budget}")
        rule(len({c.slot for c in batch.chunks}) == len(batch.chunks), "two chunks for one slot")
        if self.max_model_len is not None and any(chunk.samples and chunk.count == 1 for chunk in batch.chunks):
            result = self._with_drafts(batch)
            self._check_proposals(batch)
            return result
        for chunk in batch.chunks:
            self._check_chunk(chunk)
        for chunk in batch.chunks:
            self._write(chunk)
        result = self._sample(batch.chunks)
        self._check_proposals(batch)
        return result

    def _check_proposals(self, batch: Batch) -> None:
        """Drafts are computed at the end of a step: their positions have blocks by then."""
        for chunk in batch.chunks:
            slot = self.slots[chunk.slot]
            slot.proposals = chunk.proposals
            if chunk.proposals:
                rule(chunk.samples and self.max_model_len is not None, f"{chunk}: proposals behind no token")
                length = len(slot.tokens)
                furthest = length - 1 + min(chunk.proposals, max(0, self._end(slot.sequence) - length))
                rule(furthest <= len(slot.table) * self.block_size, f"{chunk}: proposals beyond its blocks")

    def _with_drafts(self, batch: Batch) -> StepResult:
        """Decodes go on from what is known, and verify drafts; the others as ever."""
        plain, drafts = [], {}
        for chunk in batch.chunks:
            slot = self.slots[chunk.slot]
            known, sequence = slot.tokens, slot.sequence
            if chunk.count > 1 or not chunk.samples:
                rule(chunk.drafts == 0, f"{chunk}: drafts behind a prompt")
                plain.append(chunk)
                continue
            end = self._end(sequence)
            start = min(len(known), end) - 1
            rule(chunk.start <= start, f"{chunk} begins behind the {len(known)} known tokens")
            rule(chunk.drafts <= slot.proposals, f"{chunk} has drafts, {slot.proposals} were proposed")
            guesses: list[int] = []
            while len(guesses) < min(chunk.drafts, end - len(known)) and hash((*known, *guesses)) % 5:
                right = next_token([*known, *guesses], sequence.params, sequence.choice)
                guesses.append(right if hash((*guesses, *known)) % 3 else (right + 1) % VOCAB)
            drafts[chunk.slot] = guesses
            slot.computed, length = start, len(known)
            known += guesses
            # Seen with its drafts, one after the other: rows of one sequence attend to those before.
            self._check_chunk(chunk._replace(start=start, count=1 + len(guesses), samples=False))
            self._write(chunk._replace(start=start, count=1 + len(guesses)))
            del known[length:]
            plain.append(chunk._replace(start=start, drafts=0))
        for chunk in plain:
            if chunk.slot not in drafts:
                self._check_chunk(chunk)
                self._write(chunk)
        return self._sample(plain, drafts)

    def _end(self, sequence: NewSequence) -> int:
        """Positions that it computes at most."""
        assert self.max_model_len is not None
        return min(sequence.prompt_len + max(sequence.params.max_tokens, 1), self.max_model_len) - 1

    def _enter_and_leave(self, batch: Batch) -> None:
        for slot in batch.released:
            rule(slot in self.slots, f"slot {slot} released, but empty")
            left = self.slots.pop(slot)
            if left.unseen:
                self._zero_blocks(set(left.table).difference(*(other.table for other in self.slots.values())))
        for sequence in batch.admitted:
            rule(0 <= sequence.slot < self.max_num_seqs, f"slot {sequence.slot} does not exist")
            rule(sequence.slot not in self.slots, f"slot {sequence.slot} is taken")
            rule(1 <= sequence.prompt_len <= len(sequence.tokens), "prompt longer than what is known")
            self.slots[sequence.slot] = _Slot(sequence, list(sequence.tokens))
        for slot, blocks in batch.blocks:
            rule(slot in self.slots, f"blocks for the empty slot {slot}")
            rule(all(0 <= b < self.num_blocks for b in blocks), f"blocks {blocks} do not exist")
            self.slots[slot].table.extend(blocks)

    def _copy(self, copies: Iterable[tuple[int, int]]) -> None:
        sources, targets = {s for s, _ in copies}, [t for _, t in copies]
        rule(len(set(targets)) == len(targets) and not sources & set(targets), f"copies {copies} depend on their order")
        for source, target in copies:
            self.kv[target], self.kinds[target] = list(self.kv[source]), list(self.kinds[source])

    def _check_chunk(self, chunk: Chunk) -> None:
        rule(chunk.slot in self.slots, f"chunk for the empty slot {chunk.slot}")
        slot, end = self.slots[chunk.slot], chunk.start + chunk.count
        rule(chunk.count >= 1 and end <= len(slot.tokens), f"{chunk} beyond the {len(slot.tokens)} known tokens")
        rule(end <= len(slot.table) * self.block_size, f"{chunk} beyond its {len(slot.table)} blocks")
        rule(slot.computed in (None, chunk.start), f"{chunk} does not go on from {slot.computed}")
        rule(not chunk.samples or end == len(slot.tokens), f"{chunk} samples before its last known token")
        rule(len(set(slot.table)) == len(slot.table), f"slot {chunk.slot} has a block twice")
        # Read before anything of this step is written: nobody may lean on what another sequence computes now.
        self._read(slot, chunk.start)
        written = set(slot.table[chunk.start // self.block_size : -(-end // self.block_size)])
        for other in self.slots.values():
            rule(other is slot or not written & set(other.table), f"{chunk} writes a block of another slot")

    def _read(self, slot: _Slot, end: int) -> None:
        for at in range(end):
            held = self.kv[slot.table[at // self.block_size]][at % self.block_size]
            rule(held == (at, slot.tokens[at]), f"position {at} reads {held}, not {slot.tokens[at]}")

    def _write(self, chunk: Chunk) -> None:
        slot, size = self.slots[chunk.slot], self.block_size
        kind = self._kind(slot, chunk.start)
        for at in range(chunk.start, chunk.start + chunk.count):
            kind = max(kind, NAN if self._poisoned(slot.tokens, at) else FINE)
            self.kv[slot.table[at // size]][at % size] = (at, slot.tokens[at])
            self.kinds[slot.table[at // size]][at % size] = kind
        last = slot.table[(chunk.start + chunk.count - 1) // size]
        masked = self.kinds[last][(chunk.start + chunk.count - 1) % size + 1 :]
        rule(kind == NAN or NAN not in masked, f"{chunk}: NaN behind its end in block {last}, times a weight of zero")
        slot.unseen = not chunk.samples
        slot.computed = chunk.start + chunk.count
        self.computed_tokens += chunk.count

    def _poisoned(self, tokens: Sequence[int], at: int) -> bool:
        return any(position == at and is_poisoned(tokens[: at + 1], prompt) for prompt, position in self.poison)

    def _kind(self, slot: _Slot, end: int) -> int:
        """The worst that is read of positions [0, end)."""
        size = self.block_size
        return max((self.kinds[slot.table[at // size]][at % size] for at in range(end)), default=FINE)

    def _zero_blocks(self, blocks: Iterable[int]) -> None:
        for block in blocks:
            self.kinds[block] = [WRONG if kind == NAN else kind for kind in self.kinds[block]]

    def _sample(self, chunks: Iterable[Chunk], drafts: Mapping[int, Sequence[int]] | None = None) -> StepResult:
        tokens, bad, chosen, prompts = [], [], {}, {}
        more: dict[int, list[tuple[int, TokenLogprob | None]]] = {}
        for chunk in chunks:
            slot, end = self.slots[chunk.slot], chunk.start + chunk.count
            sequence, known = slot.sequence, slot.tokens
            kind = self._kind(slot, end)
            if kind == NAN and (chunk.samples or chunk.prompt_logprobs):
                bad.append(chunk.slot)
            if chunk.prompt_logprobs:
                last = min(end, sequence.prompt_len - 1)
                prompts[chunk.slot] = [logprob(known[: p + 1], known[p + 1]) for p in range(chunk.start, last)]
            if chunk.samples:
                self._read(slot, end)
                token = next_token(known, sequence.params, sequence.choice)
                token = (token + (kind != FINE)) % VOCAB
                if sequence.params.logprobs is not None:
                    chosen[chunk.slot] = logprob(known, token)
                tokens.append(token)
                if drafts is None or chunk.slot not in drafts:
                    known.append(token)
                    continue
                if len(known) > self._end(sequence):
                    continue  # it has ended meanwhile
                known.append(token)
                for guess in drafts[chunk.slot]:
                    if guess != token or self._kind(slot, len(known)) != FINE:
                        break
                    self._read(slot, len(known))
                    token = next_token(known, sequence.params, sequence.choice)
                    score = logprob(known, token) if sequence.params.logprobs is not None else None
                    more.setdefault(chunk.slot, []).append((token, score))
                    known.append(token)
                if kind != NAN:
                    self._zero_blocks(slot.table)  # of drafts that were not taken
        for number in bad:
            self._zero_blocks(self.slots[number].table)
        drafted = {slot: len(guesses) for slot, guesses in (drafts or {}).items() if guesses}
        return StepResult(tokens, bad, chosen, prompts, more=more, drafted=drafted)
