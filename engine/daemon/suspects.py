"""Decides which request kills its rank, from the deaths of steps that contained it. No clocks, no jobs.
After one death all requests of the step resume together. A request that a second death finds at the same place runs
alone until it is past it; one that dies there twice alone is given up.
"""

from __future__ import annotations

from dataclasses import dataclass

NEAR = 8
"""Tokens a choice: a request that has come no further is at the same place. The last ones before a death may not have
been reported, and what ends for lack of memory ends a little earlier when batched."""
APART_DEATHS = GUILTY_DEATHS = 2


@dataclass(slots=True)
class Suspicion:
    """A request's deaths: `deaths` in a row at about one place, `alone` of them with nothing else in the step, `stood`:
    the place, in tokens."""

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
