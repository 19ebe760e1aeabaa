"""Which request kills its rank: decisions about those that were in a step that a rank died in. No clocks, no jobs.

What kills does so at the same place again: in its prefill, or after as many tokens. So the suspects of a kill run again
in whatever company there is, but no two of them stand where they stood in the same step. If a rank dies then, the one
that stands there is guilty, at its second kill; once past that place a suspect is none. Nobody waits but the suspects,
a few steps each.
"""

from __future__ import annotations

from collections.abc import Iterable

from .flight import Flight

SAME_PLACE = 1
"""Tokens: the last ones before a rank's death may not have been reported."""
_APART = 2 * SAME_PLACE + 1


class SuspectTracker:
    """The suspects aboard one replica."""

    def __init__(self) -> None:
        self._aboard: dict[Flight, int | None] = {}
        """With the step in which each will stand at its place; None until its first token."""
        self._steps = 0

    @property
    def open(self) -> bool:
        """Whether anybody is on trial."""
        return bool(self._aboard)

    def stepped(self) -> None:
        """A step's tokens came."""
        self._steps += 1

    def can_take(self, flight: Flight) -> bool:
        """Whether no other will stand at its place when this one does, if it starts now. One that has not shown a token
        yet may be anywhere: in the engine's queue, in a long prefill."""
        due = self._steps + flight.stood
        return all(other is not None and abs(due - other) > _APART for other in self._aboard.values())

    def take(self, flight: Flight) -> None:
        """It starts now."""
        self._aboard[flight] = None

    def passed(self, flight: Flight) -> bool:
        """To be asked when it has shown tokens: whether it is a suspect that has just left its place alive, and so is
        none any more."""
        if flight not in self._aboard:
            return False
        place = flight.answer.place
        if place <= flight.stood + SAME_PLACE:
            if self._aboard[flight] is None and place:
                self._aboard[flight] = self._steps + flight.stood - place
            return False
        del self._aboard[flight]
        flight.cleared = True
        return True

    def leave(self, flight: Flight) -> None:
        """It is not aboard any more."""
        self._aboard.pop(flight, None)

    def end(self, in_step: Iterable[Flight]) -> Flight | None:
        """A rank died with these in the step: who is guilty, if there is no doubt. Nobody is on trial afterwards."""
        found = [f for f in in_step if f in self._aboard and abs(f.answer.place - f.stood) <= SAME_PLACE]
        self._aboard.clear()
        return found[0] if len(found) == 1 else None
