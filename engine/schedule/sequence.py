"""The scheduler's record of a request (`RequestGroup`) and of each choice of it (`Sequence`): mutable, on rank 0 only.
It contains no policy: scheduler.py changes it, waiting_queue.py orders it.
"""

from __future__ import annotations

import heapq
from array import array
from dataclasses import InitVar, dataclass, field
from hashlib import blake2b
from typing import Literal, NamedTuple

from ..request import Request, TokenLogprob
from .speculation import FIRST_ACCEPTANCE

# 32 bytes: a tenant who could find a collision could read another tenant's cache.
_SIZE = 32


class DigestChain:
    """Digests of a growing sequence's full blocks, each over the previous digest and the block's ids: two sequences
    share KV only if all tokens that it depends on and the salt are equal. `upto` computes missing digests on demand."""

    __slots__ = ("ahead", "block_size", "digests", "root")

    def __init__(self, salt: str, block_size: int, ahead: int = 0) -> None:
        """ahead: SchedulerLimits.tokens_ahead; a block is full once so many tokens after it are known."""
        self.root = blake2b(salt.encode(), digest_size=_SIZE).digest()
        self.block_size, self.ahead = block_size, ahead
        self.digests: list[bytes] = []

    def full(self, tokens: int) -> int:
        """The number of full blocks of a sequence of so many tokens."""
        return max(0, tokens - self.ahead) // self.block_size

    def upto(self, count: int, tokens: list[int]) -> list[bytes]:
        """The digests of at least the first `count` blocks; `tokens` must have `count` full blocks or more."""
        digests, size, ahead = self.digests, self.block_size, self.ahead
        for i in range(len(digests), count):
            ids = array("I", tokens[i * size + ahead * (i > 0) : (i + 1) * size + ahead]).tobytes()
            digests.append(blake2b((digests[-1] if digests else self.root) + ids, digest_size=_SIZE).digest())
        return digests

    def fork(self, count: int) -> DigestChain:
        """A new chain that starts with the first `count` digests of this one."""
        other = DigestChain.__new__(DigestChain)
        other.root, other.block_size, other.ahead = self.root, self.block_size, self.ahead
        other.digests = self.digests[:count]
        return other


State = Literal["waiting", "running", "leaving", "ended"]
"""leaving: the last token is planned but not known yet; slot and blocks are already freed."""


class RequestTimes(NamedTuple):
    """Times of an ended request, for the histograms: unix seconds, None for events that did not happen."""

    arrival: float
    admitted: float | None
    first_token: float | None
    finished: float


@dataclass(slots=True, eq=False, repr=False)
class RequestGroup:
    """One request. `number` counts arrivals; `arrival`, `admitted`, `first_token` are unix seconds (None: not yet)."""

    request: Request
    number: int
    arrival: float
    # Plain attributes, because every step reads these for every sequence.
    prompt_len: int = field(init=False)
    stops: frozenset[int] = field(init=False)
    min_tokens: int = field(init=False)
    logprobs: bool = field(init=False)
    admitted: float | None = None
    first_token: float | None = None
    queue: RequestQueue = field(init=False)
    sequences: list[Sequence] = field(default_factory=list)
    open: int = field(init=False)
    cached_tokens: int = 0
    unforked: int = field(init=False)
    """Choices that have neither shared nor computed the prompt yet."""
    prompt_blocks: list[int] = field(default_factory=list)
    """The prompt's blocks, referenced for the choices that are still to be forked from them."""

    def __post_init__(self) -> None:
        request, params = self.request, self.request.params
        self.prompt_len, self.stops = len(request.prompt), frozenset(params.stop_token_ids)
        # with a grammar the sampler draws a stop id earlier only where the grammar allows nothing else
        self.min_tokens = params.min_tokens if params.grammar is None else 0
        self.logprobs = params.logprobs is not None
        self.open = len(request.open_choices)
        self.unforked = 0 if request.emitted else params.n - 1

    def count(self, now: float) -> None:
        """Counts a token of one of its choices as served to its queue and its owner."""
        self.queue.served += 1
        self.queue.owner.served += 1
        if self.first_token is None:
            self.first_token = now


@dataclass(slots=True, eq=False, repr=False)
class Sequence:
    """One choice. All counts are in tokens: `len(tokens)` are known, `inflight` are planned but not known yet.
    Positions [0, computed) are planned; the next plan continues there, up to `end`. If plans in flight have drafts,
    `inflight` and `computed` are lower bounds, and the next plan may start up to `slack` positions later."""

    group: RequestGroup
    choice: int
    chain: DigestChain | None
    max_model_len: InitVar[int]
    number: int = field(init=False)
    prompt_len: int = field(init=False)
    state: State = field(init=False)
    rank: int = field(init=False)
    tokens: list[int] = field(init=False)
    inflight: int = 0
    planned: int = -1
    """Number of the last plan that samples a token of it."""
    computed: int = 0
    slack: int = 0
    proposals: int = 0
    """The most drafts that its last plan proposes for the next one; they have blocks."""
    acceptance: float = FIRST_ACCEPTANCE
    end: int = field(init=False)
    draws: bool = field(init=False)
    """False for max_tokens=0: the prompt is computed, no token is sampled."""
    fresh: bool = field(init=False)
    """True for a choice after the first that is not admitted yet and waits for the prompt's blocks."""
    lockstep: bool = field(init=False)
    """True if the sequence is never planned ahead, because the grammar's next mask depends on the unknown token."""
    slot: int = -1
    blocks: list[int] = field(default_factory=list)
    room: int = 0
    """Positions that fit in `blocks`: len(blocks) * block_size."""
    registered: int = 0
    deferrals: int = 0
    """How often it waited for blocks that another sequence was about to fill."""
    deferred: bool = False
    key: float = 0.0
    """Its place in its queue."""
    failed: bool = False
    """Whether its logits were non-finite, or its constraints allowed no token."""
    proven: bool = False
    """Whether a token sampled since its admission is known, from finite logits."""
    prompt_scored: bool = field(init=False)
    """False while prompt logprobs are still to be computed."""
    prompt_logprobs: list[TokenLogprob | None] | None = None

    def __post_init__(self, max_model_len: int) -> None:
        group, request, params = self.group, self.group.request, self.group.request.params
        emitted = request.emitted[self.choice] if request.emitted else ()
        self.number, self.prompt_len, self.rank = group.number, group.prompt_len, request.priority
        self.state = "waiting" if emitted is not None else "ended"
        self.tokens = [*request.prompt, *(emitted or ())]
        self.end = end_position(group.prompt_len, params.max_tokens, max_model_len)
        self.draws, self.lockstep = params.max_tokens > 0, params.grammar is not None
        self.fresh = self.choice > 0 and not request.emitted
        # Prompt logprobs are reported with the first token.
        self.prompt_scored = params.prompt_logprobs is None or self.choice > 0 or bool(emitted)
        if not self.prompt_scored:
            self.prompt_logprobs = [None] * group.prompt_len

    @property
    def outputs(self) -> int:
        return len(self.tokens) - self.group.prompt_len

    def digests(self) -> list[bytes]:
        """Digests of the full blocks of its known tokens; empty without a prefix cache."""
        if self.chain is None:
            return []
        full = self.chain.full(len(self.tokens))
        return self.chain.upto(full, self.tokens)[:full]

    @property
    def remaining(self) -> int:
        """Positions to compute before the next token can be sampled."""
        return len(self.tokens) + self.inflight - self.computed

    def age(self) -> tuple[int, int]:
        """Sort key by arrival."""
        return self.number, self.choice

    def order(self) -> tuple[int, int, int]:
        """Sort key of running sequences: the last one is preempted first."""
        return self.rank, self.number, self.choice


def end_position(prompt_len: int, max_tokens: int, max_model_len: int) -> int:
    """The most positions that a choice computes. The last sampled token is never an input; with max_tokens=0 the whole
    prompt is computed, for its logprobs."""
    return prompt_len + max(min(max_tokens, max_model_len - prompt_len), 1) - 1


class FairShare:
    """A queue or an owner of queues, ordered by the tokens that it was served; `listed` while it waits."""

    __slots__ = ("listed", "name", "number", "served")

    def __init__(self, name: str, number: int) -> None:
        self.name, self.number = name, number
        self.served = 0
        self.listed = False


class RequestQueue(FairShare):
    """One queue of one owner within one priority: its waiting sequences in order."""

    __slots__ = ("_latest", "groups", "heap", "items", "owner")

    def __init__(self, name: str, number: int, owner: FairShare) -> None:
        super().__init__(name, number)
        self.owner = owner
        self.groups = 0
        self.items: dict[int, Sequence] = {}
        self.heap: list[tuple[float, int]] = []
        self._latest = 0.0

    def push(self, sequence: Sequence, ageing_s: float) -> None:
        """Queues a sequence by `order` and arrival; `ageing_s` seconds of waiting outweigh one step of `order`."""
        group = sequence.group
        if len(self.heap) > 2 * len(self.items) + 64:  # most entries are of sequences that left before their turn
            self.heap = [entry for entry in self.heap if entry[1] in self.items]
            heapq.heapify(self.heap)
        self.items[sequence.number] = sequence
        self._latest = max(self._latest, group.arrival)  # a clock set back must not reorder requests
        sequence.key = self._latest + ageing_s * group.request.order
        self.resume(sequence)

    def resume(self, sequence: Sequence) -> None:
        """Returns a sequence that was deferred to its place."""
        heapq.heappush(self.heap, (sequence.key, sequence.number))

    def first(self) -> Sequence | None:
        """The first waiting sequence that is not deferred; None if there is none."""
        while self.heap:
            sequence = self.items.get(self.heap[0][1])
            if sequence is not None and not sequence.deferred:
                return sequence
            heapq.heappop(self.heap)
        return None
