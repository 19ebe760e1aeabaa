"""Who is found guilty of a rank's death, decided on flights that never fly."""

from __future__ import annotations

import random
from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import pytest
from door import LIMITS, ORIGIN, completion
from laddertron.engine.daemon.flight import Flight
from laddertron.engine.daemon.suspects import SuspectTracker
from laddertron.engine.openai.to_engine import to_requests
from laddertron.engine.request import Request


def suspect(stood: int) -> Flight:
    def make(of: Sequence[Request]) -> Any:
        return SimpleNamespace(place=0)

    owner: Any = None
    flight = Flight(tuple(to_requests(completion(), [(2,)], LIMITS, ORIGIN)), make, owner, deaths=1)
    flight.stood = stood
    return flight


def at(flight: Flight, place: int) -> None:
    answer: Any = flight.answer
    answer.place = place


@pytest.mark.parametrize(
    ("stood", "place", "guilty"), [(0, 0, True), (5, 4, True), (5, 6, True), (5, 2, False), (0, 2, False)]
)
def test_who_dies_where_it_stood_is_guilty(stood: int, place: int, guilty: bool) -> None:
    """One token either way is the same place: the last may not have been reported."""
    trials, one, other = SuspectTracker(), suspect(stood), suspect(0)
    trials.take(one)
    at(one, place)
    at(other, 0)  # in the step, but not on trial
    assert trials.end([other, one]) is (one if guilty else None)
    assert trials.end([one]) is None, "a trial ends with the launch"


def test_two_at_their_places_leave_a_doubt() -> None:
    trials, flights = SuspectTracker(), [suspect(0), suspect(3)]
    for flight in flights:
        trials.take(flight)
    at(flights[1], 3)
    assert trials.end(flights) is None


def test_past_its_place_nobody_is_a_suspect() -> None:
    trials, one = SuspectTracker(), suspect(3)
    trials.take(one)
    at(one, 4)
    assert not trials.passed(one)
    at(one, 5)
    assert trials.passed(one)
    assert one.cleared
    assert not trials.passed(one)
    assert trials.end([one]) is None


@pytest.mark.parametrize(("waits", "doubtful"), [([0], 0), ([0, 0, 0, 5], 0.1)])
def test_no_two_stand_at_their_places_in_the_same_step(waits: list[int], doubtful: float) -> None:
    """A whole step of suspects at random places, each started as soon as it may, all going on by a token a step once
    they have waited and been prefilled. Never do two of them stand within a token of their places; where some wait for
    steps that nobody could know of, in few steps. All are through in few steps more than the longest."""
    rng = random.Random(7)
    waiting = [suspect(rng.choice([0, 0, 1, rng.randrange(200)])) for _ in range(256)]
    trials, aboard, steps = SuspectTracker(), list[Flight](), 0
    delay: dict[Flight, int] = {}
    doubts = 0
    while waiting or aboard:
        for flight in waiting[:8]:
            if trials.can_take(flight):
                trials.take(flight)
                aboard.append(flight)
                delay[flight] = rng.choice(waits)
                waiting.remove(flight)
        assert sum(f.answer.place == 0 for f in aboard) <= 1
        doubts += sum(abs(f.answer.place - f.stood) <= 1 for f in aboard) > 1
        trials.stepped()
        steps += 1
        for flight in list(aboard):
            if delay[flight]:
                delay[flight] -= 1
                continue
            at(flight, flight.answer.place + 1)
            if trials.passed(flight):
                aboard.remove(flight)
    print(f"{steps} steps, {doubts} with a doubt")
    assert doubts <= doubtful * steps
    assert steps < 6 * 256 + 200
