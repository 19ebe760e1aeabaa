"""Where the dispatcher puts requests that must run alone, on replicas that do what the test says."""

from __future__ import annotations

import asyncio
import dataclasses
from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import pytest
from door import LIMITS, ORIGIN, completion
from laddertron.engine.daemon.dispatch import ALONE_DEATHS, Dispatcher
from laddertron.engine.daemon.flight import Flight
from laddertron.engine.job import JobState
from laddertron.engine.openai.to_engine import to_requests
from laddertron.engine.request import BATCH, INTERACTIVE, Request, TokensEvent


class Job:
    """Takes requests and never steps."""

    def __init__(self) -> None:
        self.state = JobState("ready", limits=LIMITS)
        self.aboard: list[str] = []
        self.listener: Any = None

    async def start(self, listener: Any) -> None:
        self.listener = listener
        listener.on_state(self.state)

    def submit(self, request: Request) -> None:
        self.aboard.append(request.request_id)

    def cancel(self, request_id: str) -> None:
        self.aboard.remove(request_id)

    async def drain(self, timeout_s: float) -> bool:
        self.to("draining")
        return True

    def to(self, phase: Any) -> None:
        self.state = JobState(phase, "as the test says", limits=LIMITS)
        self.listener.on_state(self.state)

    def lose(self) -> None:
        ids, self.aboard = self.aboard, []
        self.listener.on_lost(ids, "as the test says", len(ids))


class Owner:
    def __init__(self) -> None:
        self.fault: str | None = None

    def landed(self, flight: Flight) -> None:
        fault: Any = flight.answer.fault
        self.fault = fault.code


def flight(name: str, deaths: int = 0, priority: int = INTERACTIVE) -> Flight:
    def make(of: Sequence[Request]) -> Any:
        return SimpleNamespace(place=0, fault=None)

    owner: Any = Owner()
    origin = dataclasses.replace(ORIGIN, request_id=name, priority=priority)
    return Flight(tuple(to_requests(completion(), [(2,)], LIMITS, origin)), make, owner, deaths=deaths)


async def two_replicas(*flights: Flight) -> tuple[Dispatcher, Job, Job]:
    """The first one boards `flights`, the second is not ready yet."""
    first, second = Job(), Job()
    jobs: Any = [first, second]
    dispatcher = Dispatcher(jobs)
    await dispatcher.start()
    second.to("restarting")
    for one in flights:
        dispatcher.submit(one)
    assert (first.aboard, second.aboard) == (["other"], [])
    return dispatcher, first, second


@pytest.mark.parametrize("priority", [INTERACTIVE, BATCH])
def test_a_loner_does_not_wait_for_a_replica_that_has_failed(priority: int) -> None:
    """It waits until the first replica is empty; that one fails for good; so it waits for the second."""

    async def scene() -> None:
        other, loner, third = flight("other"), flight("loner", ALONE_DEATHS, priority), flight("third")
        dispatcher, first, second = await two_replicas(other)
        second.to("ready")
        dispatcher.submit(third)
        assert second.aboard == ["third"]
        dispatcher.submit(loner)
        first.to("failed")
        first.lose()
        assert second.aboard == ["third"]
        assert dispatcher.in_flight == 3
        dispatcher.drop(third)
        assert second.aboard == ["loner"]
        dispatcher.drop(loner)
        assert second.aboard == ["other"]

    asyncio.run(scene())


def test_a_loner_takes_an_empty_replica_before_it_waits_for_one() -> None:
    async def scene() -> None:
        dispatcher, first, second = await two_replicas(flight("other"), flight("loner", ALONE_DEATHS))
        second.to("ready")
        assert second.aboard == ["loner"]
        dispatcher.submit(flight("next"))
        assert first.aboard == ["other", "next"]

    asyncio.run(scene())


def test_a_loner_that_nobody_wants_any_more_never_runs() -> None:
    async def scene() -> None:
        other, loner = flight("other"), flight("loner", ALONE_DEATHS)
        dispatcher, first, _ = await two_replicas(other, loner)
        assert dispatcher.waiting == 1
        dispatcher.drop(loner)
        assert dispatcher.waiting == 0
        dispatcher.drop(other)
        assert first.aboard == []
        dispatcher.submit(flight("next"))
        assert first.aboard == ["next"], "the replica is open to others again"

    asyncio.run(scene())


def test_a_loner_that_waits_when_the_daemon_stops_is_told() -> None:
    async def scene() -> None:
        loner = flight("loner", ALONE_DEATHS)
        dispatcher, _, _ = await two_replicas(flight("other"), loner)
        await dispatcher.drain(1.0)
        owner: Any = loner.owner
        assert owner.fault == "engine_failed"

    asyncio.run(scene())


class Shown:
    """An answer of one piece an event."""

    completion_tokens, place, fault = 0, 0, None

    def take(self, event: TokensEvent) -> Any:
        return "a piece", None

    @property
    def done(self) -> bool:
        return self.fault is not None


class Shower(Owner):
    """Shows pieces, or cannot."""

    def __init__(self, fails: bool) -> None:
        super().__init__()
        self.fails, self.shown = fails, 0

    def progressed(self, flight: Flight, delta: Any) -> None:
        if self.fails:
            raise UnicodeEncodeError("utf-8", "", 0, 1, "surrogates not allowed")
        self.shown += 1


def test_an_answer_that_cannot_be_shown_ends_alone() -> None:
    """Its owner raises: it fails, and the events behind it in the same step reach theirs."""

    async def scene() -> None:
        dispatcher, first, _ = await two_replicas(flight("other"))
        owners = Shower(True), Shower(False)
        for name, owner in zip(("bad", "good"), owners, strict=True):
            made: Any = flight(name)
            made.answer, made.owner = Shown(), owner
            dispatcher.submit(made)
        first.listener.on_tokens([TokensEvent(name, 0, 0, (5,)) for name in ("bad", "good")])
        assert (owners[0].fault, owners[1].fault, owners[1].shown) == ("engine_error", None, 1)
        assert first.aboard == ["other", "good"]

    asyncio.run(scene())
