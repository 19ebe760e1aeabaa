"""Which request kills its rank: what deaths say of one that was in the step. No clocks, no jobs.

One death says nothing: ranks die of much else, so all that was in the step goes on at once, beside the others. What
kills does so again before it gets further. So a request that a second death finds where the first one did runs alone
from there, until it is past that place. Given up is what a rank dies of twice there with nothing else in the step.
"""

from __future__ import annotations

from dataclasses import dataclass

NEAR = 8
"""Tokens a choice: a request that has come no further is where it stood. The last ones before a death may not have been
reported, and what ends for lack of memory ends a little earlier in company than alone."""
APART_DEATHS = GUILTY_DEATHS = 2


@dataclass(slots=True)
class Suspicion:
    """Of one request: `deaths` in a row at about one place, `alone` of them with nothing else in the step, `stood`: the
    place, in tokens."""

    deaths: int = 0
    alone: int = 0
    stood: int = 0

    def died(self, place: int, near: int, alone: bool) -> None:
        """A rank died with it in the step."""
        if place > self.stood + near:
            self.deaths = self.alone = 0
        self.deaths, self.alone, self.stood = self.deaths + 1, self.alone + alone, place

    def apart(self, place: int, near: int) -> bool:
        """Whether it has to run alone."""
        return self.deaths >= APART_DEATHS and place <= self.stood + near

    @property
    def guilty(self) -> bool:
        return self.alone >= GUILTY_DEATHS
