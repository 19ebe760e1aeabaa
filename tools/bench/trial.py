"""A trial of two servers: rounds of the same requests in turns, what they come to, and when to keep the other.

Servers are callables that answer a request; knows no HTTP. All but `play` is data in, data out.
"""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from math import nan
from statistics import median
from typing import Any, Literal

from ..slo import SHARE, percentile

Request = tuple[str, dict[str, Any]]
"""The path below /v1, and the body."""
Winner = Literal["ours", "theirs", "none"]
NOTICEABLE = 1.05
"""A ratio nearer to 1 than this, in any round, decides nothing: no one moves a service for less."""
FEWEST = 5
"""Rounds below which nothing is decided: with five, chance alone puts all on one side once in sixteen times."""
_LENGTHS = 1.1
_WORDS = (
    "river engine paper window winter garden music letter market bridge doctor silver island orange pocket ladder "
    "forest number planet camera summer candle valley copper harbour mirror basket thunder carpet station violin"
)


@dataclass(frozen=True, slots=True)
class Reply:
    """One streamed answer. Seconds since it was asked for; `first`: until its first text. `error`: why there is no
    answer."""

    seconds: float
    first: float = 0.0
    tokens: int = 0
    text: str = ""
    error: str | None = None

    @property
    def between(self) -> float:
        """Mean seconds a token after the first."""
        return (self.seconds - self.first) / max(1, self.tokens - 1)


Ask = Callable[[Request], Reply]


@dataclass(frozen=True, slots=True)
class Round:
    """One server's turn: its replies in the order of the requests, and the seconds for all of them."""

    seconds: float
    replies: tuple[Reply, ...]

    @property
    def rate(self) -> float:
        """Tokens of answers a second."""
        return sum(reply.tokens for reply in self.replies) / self.seconds

    @property
    def first(self) -> float:
        """Median seconds until the first text."""
        return median(reply.first for reply in self.replies)

    @property
    def between(self) -> float:
        """Median seconds a token after the first."""
        return median(r.between for r in self.replies)


@dataclass(frozen=True, slots=True)
class Spread:
    middle: float
    low: float
    high: float

    @classmethod
    def of(cls, values: Sequence[float]) -> Spread:
        return cls(median(values), min(values), max(values))


@dataclass(frozen=True, slots=True)
class Trial:
    """Rounds of both, pair by pair. `prices`: of an hour of ours and of theirs, in any currency; None: as dear."""

    ours: tuple[Round, ...]
    theirs: tuple[Round, ...]
    prices: tuple[float, float] | None = None

    def ratios(self, figure: Callable[[Round], float]) -> Spread:
        pairs = zip(self.ours, self.theirs, strict=True)
        return Spread.of([figure(mine) / max(figure(its), 1e-9) for mine, its in pairs])

    @property
    def thrift(self) -> Spread:
        """How many tokens ours gives for the price of one of theirs."""
        found, (mine, its) = self.ratios(lambda r: r.rate), self.prices or (1.0, 1.0)
        return Spread(*(value * its / mine for value in (found.middle, found.low, found.high)))

    @property
    def same_text(self) -> float:
        """The share of requests that both answered alike."""
        texts = ([reply.text for found in rounds for reply in found.replies] for rounds in (self.ours, self.theirs))
        alike = [mine == its for mine, its in zip(*texts, strict=True)]
        return alike.count(True) / len(alike)


def percentiles(rounds: Sequence[Round]) -> tuple[float, float]:
    """99th percentiles of all replies: seconds until the first text, and a token after it. NaN where one failed."""
    replies = [reply for found in rounds for reply in found.replies]
    if any(reply.error for reply in replies):
        return nan, nan
    return percentile([r.first for r in replies], SHARE), percentile([r.between for r in replies], SHARE)


def cost(rates: Spread, price: float) -> float:
    """The cost of a million tokens, at a price an hour."""
    return price / 3600 / rates.middle * 1e6


def mix(rounds: int, requests: int, words: int, tokens: int, seed: int) -> list[list[Request]]:
    """Chats of about `words` tokens that ask for `tokens`; no two begin alike, so that no prefix cache helps."""
    source, words_known = random.Random(seed), _WORDS.split()

    def chat() -> Request:
        text = " ".join(source.choices(words_known, k=max(1, words - 12)))
        content = f"{source.getrandbits(40):x}: continue this list of words, one after another: {text}"
        messages = [{"role": "user", "content": content}]
        return "/chat/completions", {"messages": messages, "max_tokens": tokens, "temperature": 0}

    return [[chat() for _ in range(requests)] for _ in range(rounds)]


def deal(requests: Sequence[Request], rounds: int) -> list[list[Request]]:
    """A file's requests, each in one round: what was asked before would come from a cache. Raises ValueError."""
    share = len(requests) // rounds
    if not share:
        raise ValueError(f"{len(requests)} requests are too few for {rounds} rounds: at least one a round")
    return [list(requests[n * share : (n + 1) * share]) for n in range(rounds)]


def play(sets: Sequence[Sequence[Request]], ours: Ask, theirs: Ask, at_once: int) -> Iterator[tuple[Round, Round]]:
    """Each set of requests to one server and then to the other, who is first in turns; `at_once` of them at a time."""

    def turn(ask: Ask, bodies: Sequence[Request]) -> Round:
        began = time.perf_counter()
        with ThreadPoolExecutor(at_once) as pool:
            replies = tuple(pool.map(ask, bodies))
        return Round(time.perf_counter() - began, replies)

    for number, bodies in enumerate(sets):
        if number % 2:
            its = turn(theirs, bodies)
            yield turn(ours, bodies), its
        else:
            yield turn(ours, bodies), turn(theirs, bodies)


def winner(ratios: Spread) -> Winner:
    """The server that is noticeably better in every round; larger ratios are better for ours."""
    return "ours" if ratios.low > NOTICEABLE else "theirs" if ratios.high < 1 / NOTICEABLE else "none"


def verdict(trial: Trial, other: str) -> list[str]:
    """The result of the rounds as lines, with when to keep the other server; the first line is the answer."""
    for name, rounds in (("this deployment", trial.ours), (other, trial.theirs)):
        failed = [reply.error for found in rounds for reply in found.replies if reply.error is not None]
        if failed:
            return [f"no verdict: {len(failed)} requests failed at {name}, first: {failed[0]}"]
    if len(trial.ours) < FEWEST:
        return [f"no verdict from {len(trial.ours)} rounds: at least {FEWEST} are needed"]
    thrift, first = trial.thrift, trial.ratios(lambda r: r.first)
    sooner = Spread(1 / first.middle, 1 / first.high, 1 / first.low)
    lines = [_ANSWERS[winner(thrift), winner(sooner)].format(other=other)]
    what = "tokens a second" if trial.prices is None else "tokens for the same money"
    lines.append(f"{what}: {_times(thrift)} {other}'s; the first token after {_times(first)} its time")
    tokens = trial.ratios(lambda r: sum(reply.tokens for reply in r.replies))
    if not 1 / _LENGTHS < tokens.middle < _LENGTHS:
        lines.append(
            f"answers have {tokens.middle:.2f} times {other}'s tokens: the two did not do the same work; name requests "
            f"that end at max_tokens"
        )
    lines.append("this holds for these requests, this many at once: try your own file, and fewer and more at once")
    return lines


def _times(ratios: Spread) -> str:
    return f"{ratios.middle:.2f} ({ratios.low:.2f} to {ratios.high:.2f}) times"


_KEEP_COST = "keep {other}: it gives more for the money"
_ANSWERS: dict[tuple[Winner, Winner], str] = {
    ("ours", "ours"): "take this deployment: more for the money, and an earlier first token",
    ("ours", "none"): "take this deployment: more for the money, and the first token comes as early",
    ("ours", "theirs"): "take this deployment for batches; keep {other} for chat: its first token comes earlier",
    ("none", "ours"): "take this deployment for chat: its first token comes earlier; for batches {other} is as good",
    ("none", "none"): "keep {other} unless you need what it lacks: no difference was shown",
    ("none", "theirs"): "keep {other}: its first token comes earlier, and batches cost as much",
    ("theirs", "ours"): "keep {other} for batches; this deployment's first token comes earlier: take it for chat",
    ("theirs", "none"): _KEEP_COST,
    ("theirs", "theirs"): _KEEP_COST + ", and the first token comes earlier",
}
