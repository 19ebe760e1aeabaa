"""Chooses the number of drafts of each decode from its acceptance rate and from the cost of one more row. Pure.

If a sequence's drafts are accepted with probability a, its j-th draft yields a^j tokens. Its row takes t1 seconds, in
which N t1 / T tokens would be generated without drafts (N sequences, T seconds a step): it pays while a^j is greater.
With slow links t1 is small compared with T, so more drafts pay. The linear fit of step times misses the sizes at which
one more row starts another pass of the matrix products. Whether to draft at all is therefore measured, for each number
of sequences: seconds a token with and without drafts.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from math import inf, log

MOST = 8
"""The most drafts of a sequence in one step."""
FIRST_ACCEPTANCE = 0.7
"""The acceptance rate of sequences before there are drafts."""
LIKELY = 0.3
"""The draft model stops at drafts whose probability to be accepted is less than this."""
MEMORY = 0.9
"""The decay of the acceptance rate's moving average: the weight of one draft's outcome relative to the next one's."""
COMMON = 0.98
"""The same decay for the rate of all sequences, at which a new one begins."""
RECOVERY = 0.01
"""In a step without drafts the acceptance rate rises by this share of its distance to FIRST_ACCEPTANCE, so that drafts
are tried again."""
TRIAL, FIRST_PAUSE, LONGEST_PAUSE = 3, 32, 4096
"""TRIAL: measured steps of each kind before one is chosen, and steps of the slower kind whenever it is tried again.
Pauses: steps between such trials, doubled while the same kind wins."""
STALL = 4.0
"""A step that takes this many times the previous one of its kind is not measured."""
_FORGET, _LEAST = 0.98, 1e-9
_NEWEST = 0.1
"""The least weight of the newest step in its kind's mean."""
_FIRST_PRICE = 0.3
"""The assumed price of a row until one is measured; high, so that the first steps are not much slower if drafts do not
pay."""
_SPREAD = 0.01
"""The least relative variance of the numbers of rows: a row's price cannot be fitted to steps of similar size."""


@dataclass(frozen=True, slots=True)
class SpeculationRule:
    """priced: make drafts only if they pay according to measured steps; else make every draft whose probability to be
    accepted is at least `likely`."""

    priced: bool = True
    likely: float = 0.0


def speculation_rule(kind: str | bool) -> SpeculationRule | None:
    """The rule for a value of `engine.speculation`; None: no drafts. `ngram` uses all drafts that it finds, because
    looking one up costs nothing; each draft of a model costs a forward pass. `mtp` drafts while that pays, as `auto`:
    a draft costs a pass of one layer and a row."""
    return {
        "ngram": SpeculationRule(priced=False),
        "model": SpeculationRule(priced=False, likely=LIKELY),
        "auto": SpeculationRule(),
        "mtp": SpeculationRule(),
    }.get(str(kind))


@dataclass(slots=True)
class StepPrice:
    """Linear fit t0 + t1 rows of the seconds of decode steps, over about the last hundred. `row`: t1, None until it can
    be fitted."""

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
        """The price of one row in tokens, N t1 / T: tokens that a step of N rows generates in the row's seconds."""
        if self.row is None:
            return _FIRST_PRICE
        step = (self.seconds + self.row * (self.weight * sequences - self.rows)) / self.weight
        return min(1.0, self.row * sequences / max(_LEAST, step))


@dataclass(slots=True)
class _Kinds:
    """Steps of one number of sequences, with drafts (True) and without: moving averages of their seconds and tokens.
    The average of each step's seconds a token would be too high, since with drafts the numbers of tokens differ."""

    seconds: dict[bool, float] = field(default_factory=dict)
    tokens: dict[bool, float] = field(default_factory=dict)
    settle: int = 0
    """Steps after a change of kind that are not measured."""
    steps: dict[bool, int] = field(default_factory=lambda: {True: 0, False: 0})
    """Measured steps of each kind."""
    since: int = 0
    pause: int = FIRST_PAUSE
    last: dict[bool, float] = field(default_factory=dict)
    """Seconds of the newest step of each kind."""

    @property
    def known(self) -> bool:
        return min(self.steps.values()) >= TRIAL

    @property
    def wins(self) -> bool:
        return self.seconds[True] * self.tokens[False] < self.seconds[False] * self.tokens[True]

    def next(self) -> bool:
        if not self.known:
            return self.steps[True] < TRIAL
        self.since += 1
        if self.since <= self.pause:
            return self.wins
        if self.since >= self.pause + self.settle + TRIAL:
            self.since, self.pause = 0, min(2 * self.pause, LONGEST_PAUSE)
        return not self.wins

    def stalled(self, drafted: bool, seconds: float) -> bool:
        """True if a step took STALL times its kind's previous one (for a kind's first step: the other kind's), so that
        something else delayed it. If the kind is now slower, its next step no longer counts as stalled."""
        last = self.last.get(drafted, self.last.get(not drafted, inf))
        self.last[drafted] = seconds
        return seconds > STALL * last

    def observe(self, drafted: bool, tokens: int, seconds: float) -> None:
        both = self.known
        before = both and self.wins
        self.steps[drafted] += 1
        share = max(_NEWEST, 1.0 / self.steps[drafted])
        for mean, value in ((self.seconds, seconds), (self.tokens, tokens)):
            mean[drafted] = (1.0 - share) * mean.get(drafted, 0.0) + share * value
        if both and self.wins != before:
            self.since, self.pause = 0, FIRST_PAUSE


class Speculation:
    """The planner reads thresholds and numbers of drafts; commit reports the outcomes."""

    def __init__(self, rule: SpeculationRule, settling: int = 0) -> None:
        """With several micro-batches a step's time also depends on those before it, which are in other stages, and on a
        GPU whether it was started before their ids were known: after a change between steps with and without drafts
        `settling` steps are not measured."""
        self._rule = rule
        self._settle = settling
        self._drafted, self._alike = False, 0
        self.price = StepPrice()
        self._kinds: dict[int, _Kinds] = {}
        self._drafts = self._tokens = 0
        self.first = FIRST_ACCEPTANCE
        """The acceptance rate at which a new sequence begins."""
        self.accepted = [0] * MOST
        """Accepted drafts by their position after the last known token."""

    @property
    def counts(self) -> tuple[int, int, int]:
        """Decodes with drafts, their drafts, and the accepted ones."""
        return self._drafts, self._tokens, sum(self.accepted)

    def threshold(self, sequences: int) -> float:
        """The least probability to be accepted with which a draft pays in the next step, of `sequences` sequences."""
        if not self._rule.priced:
            return self._rule.likely
        return self.price.row_share(sequences) if self._kinds_of(sequences).next() else inf

    def _kinds_of(self, sequences: int) -> _Kinds:
        return self._kinds.setdefault(sequences, _Kinds(settle=self._settle))

    def wanted(self, acceptance: float, threshold: float) -> int:
        """The number of drafts of one sequence."""
        if threshold <= 0.0 or (acceptance >= 1.0 and threshold <= 1.0):
            return MOST
        if acceptance <= threshold:
            return 0
        return min(MOST, int(log(threshold) / log(acceptance)))

    def observe_step(self, sequences: int, drafts: int, tokens: int, seconds: float) -> None:
        """Records a decode-only step: its rows of sequences and of drafts, and the tokens that it generated."""
        kinds, drafted = self._kinds_of(sequences), drafts > 0
        self._alike = self._alike + 1 if drafted == self._drafted else 0
        self._drafted = drafted
        if self._alike < self._settle and kinds.known:
            return
        if not kinds.stalled(drafted, seconds):
            self.price.observe(sequences + drafts, seconds)
            kinds.observe(drafted, tokens, seconds)

    def observe_drafts(self, acceptance: float, drafted: int, right: int) -> float:
        """Counts the drafts of one sequence, of which the first `right` were accepted; returns its new acceptance
        rate."""
        if not drafted:
            return acceptance + RECOVERY * max(0.0, FIRST_ACCEPTANCE - acceptance)
        self._drafts += 1
        self._tokens += drafted
        for place in range(right):
            self.accepted[place] += 1
        trials = right + (right < drafted)
        rate, decay, common = right / trials, MEMORY**trials, COMMON**trials
        self.first = common * self.first + (1.0 - common) * rate
        return decay * acceptance + (1.0 - decay) * rate
