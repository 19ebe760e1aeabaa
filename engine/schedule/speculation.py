"""How many drafts a decode gets, from how often its own were right and from what a further row costs a step. Pure.

The j-th draft of a sequence whose drafts are right with probability a counts with a^j; its row takes t1 seconds, in
which N t1 / T tokens would have come without drafts, and pays while a^j is more. Slow links make t1 small, so they
draft further. A line through steps of all sizes misses where one more row begins another pass of the products, so
whether to draft at all is measured: seconds a token with and without drafts among as many sequences.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from math import inf, log

MOST = 8
"""Drafts of a sequence in one step."""
FIRST_ACCEPTANCE = 0.7
"""Assumed of a sequence that had no draft yet."""
LIKELY = 0.3
"""To count: a model's draft less likely than this is not made."""
MEMORY = 0.75
"""The weight of a draft's outcome against the next one's."""
RECOVERY = 0.01
"""The share of what is missing by which acceptance rises in a step without drafts: drafts are tried again."""
TRIAL, FIRST_PAUSE, LONGEST_PAUSE = 3, 32, 4096
"""Steps of each kind before one is chosen, of the slower one whenever it is tried again, and those before that: more
while the same kind wins."""
STALL = 4.0
"""A step that takes so many times the one of its kind before it is no measure."""
_FORGET, _LEAST = 0.98, 1e-9
_NEWEST = 0.2
"""The least weight of the newest step of a kind in its mean."""
_FIRST_PRICE = 0.3
"""Until one is measured: high, so that the first steps are not much slower where drafts do not pay."""
_SPREAD = 0.01
"""The least spread of the rows' squares: from steps of like size a row's price cannot be fitted."""


@dataclass(frozen=True, slots=True)
class SpeculationRule:
    """priced: drafts are given where they pay, by measured steps; else all that are at least so `likely` to count."""

    priced: bool = True
    likely: float = 0.0


def speculation_rule(kind: str | bool) -> SpeculationRule | None:
    """As `engine.speculation` says. Looking a draft up costs nothing, so `ngram` takes all that are found; each draft
    of a model costs a pass of it."""
    return {
        "ngram": SpeculationRule(priced=False),
        "model": SpeculationRule(priced=False, likely=LIKELY),
        "auto": SpeculationRule(),
    }.get(str(kind))


@dataclass(slots=True)
class StepPrice:
    """Seconds of decode steps as t0 + t1 rows, fitted to the last hundred or so. `row`: t1, once it can be fitted."""

    weight: float = 0.0
    rows: float = 0.0
    seconds: float = 0.0
    squares: float = 0.0
    products: float = 0.0
    row: float | None = None

    def observe(self, rows: int, seconds: float) -> None:
        self.weight = _FORGET * self.weight + 1.0
        self.rows = _FORGET * self.rows + rows
        self.seconds = _FORGET * self.seconds + seconds
        self.squares = _FORGET * self.squares + rows * rows
        self.products = _FORGET * self.products + rows * seconds
        spread = self.squares - self.rows**2 / self.weight
        if self.weight > 4 and spread > _SPREAD * self.squares:
            self.row = max(0.0, (self.products - self.rows / self.weight * self.seconds) / spread)

    def row_share(self, sequences: int) -> float:
        """A row's seconds in tokens that come meanwhile: N t1 / T of a step of N rows."""
        if self.row is None:
            return _FIRST_PRICE
        step = (self.seconds + self.row * (self.weight * sequences - self.rows)) / self.weight
        return min(1.0, self.row * sequences / max(_LEAST, step))


@dataclass(slots=True)
class _Kinds:
    """Steps among as many sequences, with drafts (True) and without: seconds a token, the newest counting most."""

    seconds: dict[bool, float] = field(default_factory=dict)
    steps: dict[bool, int] = field(default_factory=lambda: {True: 0, False: 0})
    """That were measured."""
    since: int = 0
    pause: int = FIRST_PAUSE
    last: dict[bool, float] = field(default_factory=dict)
    """Seconds of the newest step of each kind."""

    @property
    def known(self) -> bool:
        return min(self.steps.values()) >= TRIAL

    @property
    def wins(self) -> bool:
        return self.seconds[True] < self.seconds[False]

    def next(self) -> bool:
        if not self.known:
            return self.steps[True] < TRIAL
        self.since += 1
        if self.since <= self.pause:
            return self.wins
        if self.since >= self.pause + TRIAL:
            self.since, self.pause = 0, min(2 * self.pause, LONGEST_PAUSE)
        return not self.wins

    def stalled(self, drafted: bool, seconds: float) -> bool:
        """Whether a step took far longer than the one of its kind before it, or a kind's first one than the other's:
        something else held it up. Where steps of this kind are slower, the next one does not."""
        last = self.last.get(drafted, self.last.get(not drafted, inf))
        self.last[drafted] = seconds
        return seconds > STALL * last

    def observe(self, drafted: bool, seconds: float) -> None:
        both = self.known
        before = both and self.wins
        self.steps[drafted] += 1
        share = max(_NEWEST, 1.0 / self.steps[drafted])
        self.seconds[drafted] = (1.0 - share) * self.seconds.get(drafted, 0.0) + share * seconds
        if both and self.wins != before:
            self.since, self.pause = 0, FIRST_PAUSE


class Speculation:
    """The planner asks it, commit reports to it."""

    def __init__(self, rule: SpeculationRule) -> None:
        self._rule = rule
        self._price = StepPrice()
        self._kinds: dict[int, _Kinds] = {}
        self._drafts = self._tokens = 0
        self.accepted = [0] * MOST
        """Drafts that were right, by their place behind the last known token."""

    @property
    def counts(self) -> tuple[int, int, int]:
        """Decodes that had drafts, these drafts, and those of them that were right."""
        return self._drafts, self._tokens, sum(self.accepted)

    def threshold(self, sequences: int) -> float:
        """The least probability to count with which a draft of the next step, of so many sequences, pays."""
        if not self._rule.priced:
            return self._rule.likely
        return self._price.row_share(sequences) if self._kinds.setdefault(sequences, _Kinds()).next() else inf

    def wanted(self, acceptance: float, threshold: float) -> int:
        """Drafts of one sequence."""
        if threshold <= 0.0 or (acceptance >= 1.0 and threshold <= 1.0):
            return MOST
        if acceptance <= threshold:
            return 0
        return min(MOST, int(log(threshold) / log(acceptance)))

    def observe_step(self, sequences: int, drafts: int, tokens: int, seconds: float) -> None:
        """A step without prompts: rows of sequences and of drafts, and the tokens that came of them."""
        kinds = self._kinds.setdefault(sequences, _Kinds())
        if not kinds.stalled(drafts > 0, seconds):
            self._price.observe(sequences + drafts, seconds)
            kinds.observe(drafts > 0, seconds / max(1, tokens))

    def observe_drafts(self, acceptance: float, drafted: int, right: int) -> float:
        """The sequence's acceptance after a step in which the first `right` of its drafts were; counts them."""
        if not drafted:
            return acceptance + RECOVERY * max(0.0, FIRST_ACCEPTANCE - acceptance)
        self._drafts += 1
        self._tokens += drafted
        for place in range(right):
            self.accepted[place] += 1
        trials = right + (right < drafted)
        kept = MEMORY**trials
        return kept * acceptance + (1.0 - kept) * right / trials
