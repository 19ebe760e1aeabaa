"""Where the dispatcher puts requests that must run alone, on replicas that do what the test says."""

from __future__ import annotations

import asyncio
import dataclasses
from types import SimpleNamespace
from typing import Any

import pytest
from door import LIMITS, ORIGIN, completion
from laddertron.engine.daemon import dispatch
from laddertron.engine.daemon.dispatch import Dispatcher
from laddertron.engine.daemon.flight import ISOLATION_DEATHS, SUSPECT_TOKENS, Flight, FlightOwner, Suspicion
from laddertron.engine.job import JobState
from laddertron.engine.metrics.observer import Observer
from laddertron.engine.openai.to_engine import to_requests
from laddertron.engine.request import BATCH, INTERACTIVE, Request, TokensEvent


class Job:
    """Takes requests and never steps. `aboard`: names of the requests in its serving launch; `former`: in launch 1,
    after a reload."""

    def __init__(self) -> None:
        self.state = JobState("ready", limits=LIMITS)
        self.launch = 1
        self.aboard: list[str] = []
        self.former: list[str] = []
        self.ids: dict[str, str] = {}
        self.listener: Any = None

    async def start(self, listener: Any) -> None:
        self.listener = listener
        listener.on_state(self.state)

    def submit(self, request: Request) -> None:
        name = request.request_id.partition("#")[0]
        self.aboard.append(name)
        self.ids[name] = request.request_id

    def cancel(self, request_id: str) -> None:
        self.aboard.remove(request_id.partition("#")[0])
        self.listener.on_tokens([TokensEvent(request_id, 0, 0, (), "cancelled")])

    async def drain(self, timeout_s: float) -> bool:
        self.to("draining")
        return True

    def to(self, phase: Any) -> None:
        self.state = JobState(phase, "as the test says", limits=LIMITS)
        self.listener.on_state(self.state)

    def lose(self, suspects: int = 0) -> None:
        """The serving launch dies with the first `suspects` in the step, the last to enter first."""
        lost, self.aboard = [self.ids[name] for name in self.aboard], []
        self.listener.on_running(lost[:suspects][::-1], lost[suspects:])
        self.listener.on_lost(self.launch, "as the test says", suspects > 0)


class Owner(FlightOwner):
    def __init__(self) -> None:
        self.error: str | None = None
        self.deaths = 0

    def died(self, flight: Flight) -> None:
        self.deaths = flight.suspicion.deaths

    def finished(self, flight: Flight) -> None:
        error: Any = flight.answer.error
        self.error = error.code


def flight(name: str, deaths: int = 0, priority: int = INTERACTIVE, prompts: int = 1) -> Flight:
    answer: Any = SimpleNamespace(
        place=0,
        completion_tokens=0,
        error=None,
        done=False,
        emitted=lambda prompt: (),
        take=lambda event, prompt: None,
    )
    owner: Any = Owner()
    origin = dataclasses.replace(ORIGIN, request_id=name, priority=priority)
    requests = tuple(to_requests(completion(), [(2,) * 20] * prompts, LIMITS, origin))
    return Flight(requests, answer, owner, Suspicion(deaths))


async def two_replicas(*flights: Flight) -> tuple[Dispatcher, Job, Job]:
    """The first one boards `flights`, the second is not ready yet."""
    first, second = Job(), Job()
    jobs: Any = [first, second]
    dispatcher = Dispatcher(jobs, Observer())
    await dispatcher.start()
    second.to("restarting")
    for one in flights:
        dispatcher.submit(one)
    assert (first.aboard, second.aboard) == (["other"], [])
    return dispatcher, first, second


@pytest.mark.parametrize("priority", [INTERACTIVE, BATCH])
def test_a_request_apart_does_not_wait_for_a_replica_that_has_failed(priority: int) -> None:
    """It waits until the first replica is empty; that one fails for good; so it waits for the second."""

    async def scene() -> None:
        other, apart, third = flight("other"), flight("apart", ISOLATION_DEATHS, priority), flight("third")
        dispatcher, first, second = await two_replicas(other)
        second.to("ready")
        dispatcher.submit(third)
        assert second.aboard == ["third"]
        dispatcher.submit(apart)
        first.to("failed")
        first.lose()
        assert second.aboard == ["third"]
        assert dispatcher.in_flight == 3
        dispatcher.drop(third)
        assert second.aboard == ["apart"]
        dispatcher.drop(apart)
        assert second.aboard == ["other"]

    asyncio.run(scene())


def test_a_request_apart_takes_an_empty_replica_before_it_waits_for_one() -> None:
    async def scene() -> None:
        dispatcher, first, second = await two_replicas(flight("other"), flight("apart", ISOLATION_DEATHS))
        second.to("ready")
        assert second.aboard == ["apart"]
        dispatcher.submit(flight("next"))
        assert first.aboard == ["other", "next"]

    asyncio.run(scene())


def test_a_request_apart_that_nobody_wants_any_more_never_runs() -> None:
    async def scene() -> None:
        other, apart = flight("other"), flight("apart", ISOLATION_DEATHS)
        dispatcher, first, _ = await two_replicas(other, apart)
        assert dispatcher.waiting == 1
        dispatcher.drop(apart)
        assert dispatcher.waiting == 0
        dispatcher.drop(other)
        assert first.aboard == []
        dispatcher.submit(flight("next"))
        assert first.aboard == ["next"], "the replica is open to others again"

    asyncio.run(scene())


def test_a_request_apart_that_waits_when_the_daemon_stops_has_an_error() -> None:
    async def scene() -> None:
        apart = flight("apart", ISOLATION_DEATHS)
        dispatcher, _, _ = await two_replicas(flight("other"), apart)
        await dispatcher.drain(1.0)
        owner: Any = apart.owner
        assert owner.error == "engine_failed"

    asyncio.run(scene())


def test_at_the_end_interactive_requests_have_an_error_and_lines_are_not_submitted_again() -> None:
    """Whether they run or wait; a job that closes first, and reports what it lost, finds no other that takes it."""

    async def scene() -> None:
        other, row, waiting = flight("other"), flight("line", priority=BATCH), flight("apart", ISOLATION_DEATHS)
        dispatcher, first, second = await two_replicas(other)
        dispatcher.submit(row)
        dispatcher.submit(waiting)
        second.to("ready")
        assert (first.aboard, second.aboard) == (["other", "line"], ["apart"])
        dispatcher.submit(one := flight("next"))
        dispatcher.end("the disk is gone")
        owners: Any = [each.owner for each in (other, waiting, one)]
        assert [owner.error for owner in owners] == ["engine_lost"] * 3
        assert (first.aboard, second.aboard) == (["line"], [])
        assert not dispatcher.ready
        first.lose()
        assert second.aboard == []
        line_owner: Any = row.owner
        assert line_owner.error is None

    asyncio.run(scene())


async def one_replica(*names: str) -> tuple[Job, dict[str, Flight]]:
    job, flights = Job(), {name: flight(name, priority=BATCH) for name in names}
    jobs: Any = [job]
    dispatcher = Dispatcher(jobs, Observer())
    await dispatcher.start()
    for one in flights.values():
        dispatcher.submit(one)
    return job, flights


def advance(job: Job, one: Flight, tokens: int) -> None:
    """It shows so many tokens more."""
    answer: Any = one.answer
    answer.place += tokens
    request = one.requests[0]
    job.listener.on_tokens([TokensEvent(job.ids[request.request_id], 0, 0, (5,))])


def test_suspects_run_one_after_the_other_past_their_place() -> None:
    """After a second death at one place: each alone, until it has come further, when it makes room for the next; the
    last one is joined by all. Nobody is given up."""

    async def scene() -> None:
        job, flights = await one_replica("a", "b", "c")
        for _ in range(2):
            job.lose(suspects=2)
            job.to("ready")
        assert job.aboard == ["b"], "c only waited, and waits for those that run alone"
        advance(job, flights["b"], SUSPECT_TOKENS)
        assert job.aboard == ["b"], "it is where it stood, still"
        advance(job, flights["b"], 1)
        assert job.aboard == ["a"]
        advance(job, flights["a"], SUSPECT_TOKENS + 1)
        assert sorted(job.aboard) == ["a", "b", "c"]
        assert [one.owner.deaths for one in flights.values()] == [2, 2, 0]  # type: ignore[attr-defined]

    asyncio.run(scene())


class Late(Job):
    """What is cancelled has not ended yet."""

    def cancel(self, request_id: str) -> None:
        pass

    def reload(self) -> None:
        self.launch, self.former, self.aboard = 2, self.aboard, []


def test_what_resumed_in_a_new_launch_is_not_queued_again_when_the_old_one_dies() -> None:
    """b makes room for a on the old launch, and both run on the new one by the time the old one dies."""

    async def scene() -> None:
        job = Late()
        flights = {name: flight(name, priority=BATCH) for name in "ab"}
        jobs: Any = [job]
        dispatcher = Dispatcher(jobs, Observer())
        await dispatcher.start()
        for one in flights.values():
            dispatcher.submit(one)
        for _ in range(2):
            job.lose(suspects=2)
        assert job.aboard == ["b"]
        first = job.ids["b"]
        job.reload()
        advance(job, flights["b"], SUSPECT_TOKENS + 1)
        assert job.aboard == ["a"]
        advance(job, flights["a"], SUSPECT_TOKENS + 1)
        assert (job.former, job.aboard) == (["b"], ["a", "b"])
        job.listener.on_running([first], [])
        job.listener.on_lost(1, "as the test says", True)
        assert job.aboard == ["a", "b"]
        assert flights["b"].suspicion.alone == 0
        job.lose(suspects=1)
        assert job.aboard == ["a", "b"], "its own are"

    asyncio.run(scene())


def test_late_tokens_of_a_former_attempt_are_ignored() -> None:
    async def scene() -> None:
        job, flights = await one_replica("a")
        taken: list[TokensEvent] = []
        answer: Any = flights["a"].answer
        answer.take = lambda event, prompt: taken.append(event)
        former = job.ids["a"]
        job.lose()
        for name in (former, job.ids["a"]):
            job.listener.on_tokens([TokensEvent(name, 0, 0, (5,))])
        assert [event.request_id for event in taken] == [job.ids["a"]] != [former]

    asyncio.run(scene())


def test_a_launch_is_idle_once_its_last_request_has_ended_there() -> None:
    """A cancelled one counts until the engine has ended it, as do those of a body with several choices."""

    async def scene() -> None:
        job = Late()
        jobs: Any = [job]
        dispatcher = Dispatcher(jobs, Observer())
        await dispatcher.start()
        other, gone = flight("other"), flight("gone")
        dispatcher.submit(other)
        dispatcher.submit(gone)
        dispatcher.drop(gone)
        idle = asyncio.create_task(job.listener.idle(1))
        await job.listener.idle(2)
        for name in ("other", "gone"):
            await asyncio.sleep(0)
            assert not idle.done()
            job.listener.on_tokens([TokensEvent(job.ids[name], 0, 0, (), "cancelled")])
        await idle

    asyncio.run(scene())


def test_who_kills_alone_twice_is_given_up_and_the_others_are_cleared() -> None:
    """The one that a rank has died of alone does not go first again: another makes progress before it."""

    async def scene() -> None:
        job, flights = await one_replica("a", "b", "c")
        for _ in range(2):
            job.lose(suspects=3)
        assert job.aboard == ["c"]
        advance(job, flights["c"], SUSPECT_TOKENS + 1)
        assert job.aboard == ["a"]
        job.lose(suspects=1)
        assert job.aboard == ["b"]
        advance(job, flights["b"], SUSPECT_TOKENS + 1)
        assert job.aboard == ["a"]
        job.lose(suspects=1)
        assert [one.owner.error for one in flights.values()] == ["quarantined", None, None]  # type: ignore[attr-defined]
        assert sorted(job.aboard) == ["b", "c"]

    asyncio.run(scene())


def test_a_conviction_clears_those_who_wait_to_run_alone() -> None:
    async def scene() -> None:
        job, flights = await one_replica("a", "b", "c")
        for _ in range(2):
            job.lose(suspects=3)
        job.lose(suspects=1)  # c, before any other has run alone
        assert job.aboard == ["b"]
        advance(job, flights["b"], SUSPECT_TOKENS + 1)
        assert job.aboard == ["c"]
        job.lose(suspects=1)
        assert flights["c"].owner.error == "quarantined"  # type: ignore[attr-defined]
        assert sorted(job.aboard) == ["a", "b"], "a never ran alone"

    asyncio.run(scene())


def test_a_request_in_a_step_with_a_cancelled_one_was_not_alone() -> None:
    """The cancelled one has left, its end has not come to the engine yet."""

    async def scene() -> None:
        job, suspect, other = Late(), flight("a", ISOLATION_DEATHS), flight("other")
        jobs: Any = [job]
        dispatcher = Dispatcher(jobs, Observer())
        await dispatcher.start()
        dispatcher.submit(other)
        dispatcher.submit(suspect)
        dispatcher.drop(other)
        assert job.aboard == ["other", "a"]
        job.lose(suspects=2)
        assert job.aboard == ["a"]
        assert (suspect.suspicion.deaths, suspect.suspicion.alone) == (ISOLATION_DEATHS + 1, 0)

    asyncio.run(scene())


def test_a_death_of_another_cause_makes_no_suspects() -> None:
    async def scene() -> None:
        job, flights = await one_replica("a")
        for _ in range(5):
            job.lose()
        assert (job.aboard, flights["a"].suspicion) == (["a"], Suspicion())

    asyncio.run(scene())


class Shown:
    """An answer of one piece an event."""

    completion_tokens, place, error = 0, 0, None

    def take(self, event: TokensEvent, prompt: int) -> Any:
        return SimpleNamespace(stop_after=None)

    @property
    def done(self) -> bool:
        return self.error is not None


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
        first.listener.on_tokens([TokensEvent(first.ids[name], 0, 0, (5,)) for name in ("bad", "good")])
        assert (owners[0].error, owners[1].error, owners[1].shown) == ("engine_error", None, 1)
        assert first.aboard == ["other", "good"]

    asyncio.run(scene())


def test_rooms_count_from_the_time_they_are_given() -> None:
    """Not from the time their waiters resume: a line that comes between the two waits. One that is cancelled between
    the two gives its room to the next."""

    async def scene() -> None:
        job, most = Job(), LIMITS.max_num_seqs
        jobs: Any = [job]
        dispatcher = Dispatcher(jobs, Observer())
        await dispatcher.start()
        job.to("loading")
        waiting = [asyncio.create_task(dispatcher.room("a")) for _ in range(most)]
        await asyncio.sleep(0)
        job.to("ready")
        late = dispatcher.room("a")
        assert late.send(None) is not None
        late.close()
        waiting[0].cancel()
        next_one = asyncio.create_task(dispatcher.room("a"))
        await asyncio.gather(*waiting, return_exceptions=True)
        await next_one
        assert not any(dispatcher.given.values())

    asyncio.run(scene())


def test_requests_of_many_ids_are_submitted_in_several_turns(monkeypatch: pytest.MonkeyPatch) -> None:
    """1. Two bodies' prompts of 20 ids; 50 ids a turn are taken, and what a turn began is ended. 2. A third is boarding
    when the replica stops accepting: it waits again, whole, and is submitted elsewhere. 3. A fourth is dropped, and a
    fifth refused with an error as the daemon stops, before all of them are submitted."""
    monkeypatch.setattr(dispatch, "_TURN_IDS", 50)

    async def turn(count: int = 1) -> None:
        for _ in range(count):
            await asyncio.sleep(0)

    async def scene() -> None:
        jobs: Any = [job := Job()]
        dispatcher = Dispatcher(jobs, Observer())
        await dispatcher.start()
        dispatcher.submit(flight("a", prompts=4))
        dispatcher.submit(flight("b", prompts=3))
        assert job.aboard == ["a", "a.1", "a.2"]
        await turn()
        assert job.aboard == ["a", "a.1", "a.2", "a.3", "b", "b.1"]
        await turn()
        assert job.aboard[-3:] == ["b", "b.1", "b.2"]
        job.aboard.clear()
        third = flight("c", prompts=9)
        dispatcher.submit(third)
        sent = len(job.aboard)
        assert 0 < sent < 9
        job.to("reloading")
        assert (job.aboard, dispatcher.waiting) == ([], 1)
        await turn(9)
        assert job.aboard == []
        job.to("ready")
        await turn(9)
        assert job.aboard == ["c", *(f"c.{n}" for n in range(1, 9))]
        job.aboard.clear()
        dispatcher.submit(dropped := flight("d", prompts=9))
        dispatcher.drop(dropped)
        await turn(9)
        assert job.aboard == []
        dispatcher.submit(last := flight("e", prompts=9))
        await dispatcher.drain(1.0)
        await turn(9)
        owner: Any = last.owner
        assert (job.aboard, owner.error) == ([], "engine_lost")

    asyncio.run(scene())
