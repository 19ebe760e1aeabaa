"""A Replica under a real Dispatcher, in any order of events: launches that were started first, as a standby, by a
reload or after a failure, and wait, serve, drain and end; late and repeated tokens; requests that clients drop."""

from __future__ import annotations

import asyncio
import logging
from collections import Counter
from dataclasses import dataclass, field
from random import Random
from types import SimpleNamespace
from typing import Any

import pytest
from fake_launch import LIMITS, FakeLaunch
from job_tools import bounded
from laddertron.engine.daemon.dispatch import Dispatcher
from laddertron.engine.daemon.flight import Flight, FlightOwner
from laddertron.engine.metrics.observer import Observer
from laddertron.engine.request import BATCH, MAX_NAME, Request, SamplingParams, TokensEvent
from laddertron.launchers.control.messages import Cancel, Ready, Submit, Tokens
from laddertron.launchers.job import replica
from laddertron.launchers.job.options import JobOptions
from laddertron.launchers.job.replica import JobHooks, Replica, ReplicaSpec
from laddertron.topology.placement.world import World

LENGTH = 3
IDS = ("a", "a#1", "a#2", "a.1", "#1", "", "x" * MAX_NAME, "x" * (MAX_NAME - 2) + "#1")
FAILURES = ("rank_error", "rank_lost", "silent", "launcher_exit", "shortage")


def token(prompt: int, choice: int, at: int) -> int:
    return 100 * prompt + 10 * choice + at


@dataclass(eq=False)
class Work:
    """What a launch has of a request: how many tokens each open choice has."""

    request: Request
    at: dict[int, int]
    cancelled: bool = False


class Launch(FakeLaunch):
    """Computes the tokens of its requests when the test says so."""

    dice: Random

    def __init__(self, owner: Any, name: str, config: str, options: JobOptions, **made_for: Any) -> None:
        super().__init__(owner, name, config, options, **made_for)
        self.work: dict[str, Work] = {}
        self.sent: list[TokensEvent] = []
        self.stood = self.answers = self.gone = False

    def send(self, message: Any, rank: int | None = None) -> None:
        super().send(message, rank)
        match message:
            case Submit(request):
                assert self.answers, "a request for a launch that is not ready"
                assert request.request_id not in self.work
                assert len(request.request_id) <= MAX_NAME
                emitted = request.emitted or ((),) * request.params.n
                at = {choice: len(ids) for choice, ids in enumerate(emitted) if ids is not None}
                self.work[request.request_id] = Work(request, at)
            case Cancel(name) if name in self.work:
                self.work[name].cancelled = True

    async def end(self, *, orderly: bool) -> None:
        for _ in range(self.dice.randrange(4)):
            await asyncio.sleep(0)
        await super().end(orderly=orderly)
        self.gone = True

    def move(self) -> None:
        """Goes one step towards answering."""
        if self.standby and not self.stood:
            self.stood = True
            self.room = self.dice.random() < 0.7
            self.stand()
        elif not self.answers and (not self.standby or "load" in self.done):
            self.answers = not self.failing
            self.owner.on_launch_output(Ready(LIMITS), None)

    def compute(self) -> None:
        """Puts out the next token of one choice of each request, some of them with others in one message."""
        events = []
        for name, work in list(self.work.items()):
            choice = self.dice.choice(list(work.at))
            start = work.at[choice]
            ids = () if work.cancelled else (token(work.request.prompt[0], choice, start),)
            finish: Any = "cancelled" if work.cancelled else "length" if start + 1 == LENGTH else None
            events.append(TokensEvent(name, choice, start, ids, finish))
            work.at[choice] += 1
            if finish:
                del work.at[choice]
            if not work.at:
                del self.work[name]
        self._put_out(events)

    def repeat(self) -> None:
        """Puts out what it has put out before, of requests that it has no more; once gone, of all."""
        late = [event for event in self.sent if self.gone or event.request_id not in self.work]
        self._put_out(self.dice.sample(late, min(len(late), 3)))
        if self.gone:  # what was on its way
            work, self.work = self.work, {}
            ids = [(name, choice, at) for name, one in work.items() for choice, at in one.at.items()]
            self._put_out([TokensEvent(name, choice, at, (0,), "length") for name, choice, at in ids])

    def _put_out(self, events: list[TokensEvent]) -> None:
        self.sent += events
        if events:
            self.owner.on_launch_output(Tokens(tuple(events)), None)


@dataclass(eq=False)
class Client(FlightOwner):
    """The owner of one flight, and its answer: tokens by prompt and choice."""

    prompts: int
    choices: int
    raises: bool
    got: dict[tuple[int, int], list[int]] = field(default_factory=dict)
    ended: Counter[tuple[int, int]] = field(default_factory=Counter)
    finishes: int = 0
    dropped: bool = False
    error: Any = None

    @property
    def done(self) -> bool:
        return len(self.ended) == self.prompts * self.choices

    @property
    def place(self) -> int:
        return self.completion_tokens

    @property
    def completion_tokens(self) -> int:
        return sum(map(len, self.got.values()))

    def emitted(self, prompt: int) -> tuple[tuple[int, ...] | None, ...]:
        of = [(prompt, choice) for choice in range(self.choices)]
        return tuple(None if key in self.ended else tuple(self.got.get(key, ())) for key in of)

    def take(self, event: TokensEvent, prompt: int) -> Any:
        key = prompt, event.choice
        tokens = self.got.setdefault(key, [])
        assert key not in self.ended, "answered twice"
        assert event.start == len(tokens), "a token is lost or duplicated"
        tokens.extend(event.tokens)
        if event.finish is not None:
            self.ended[key] += 1
        return SimpleNamespace(stop_after=None)

    def finished(self, flight: Flight) -> None:
        self.finishes += 1
        if self.raises:
            raise OSError("the owner's disk is full")


class Story:
    """One replica, what its clients want, and everything that may happen next."""

    def __init__(self, dice: Random) -> None:
        self.dice, self.clients = dice, list[tuple[Client, Flight]]()
        Launch.dice = dice
        self.options = JobOptions(World(2), max_failures=10**6, longest_backoff_s=0.0, standby=dice.random() < 0.7)
        self.job = Replica(self.spec("first"))
        self.dispatcher = Dispatcher([self.job], Observer())
        self.reload: asyncio.Task[str | None] | None = None

    def spec(self, name: str) -> ReplicaSpec:
        command: Any = lambda excluded: name  # noqa: E731
        return ReplicaSpec(command, "{}", self.options, JobHooks())

    @property
    def launches(self) -> list[Any]:
        return FakeLaunch.made

    @property
    def alive(self) -> list[Any]:
        return [launch for launch in self.launches if launch.healthy and not launch.gone]

    def ask(self) -> None:
        prompts, choices = self.dice.choice((1, 1, 2)), self.dice.choice((1, 1, 3))
        client = Client(prompts, choices, raises=self.dice.random() < 0.2)
        number, name = len(self.clients), self.dice.choice(IDS)
        params = SamplingParams(LENGTH, 0, n=choices)
        requests = tuple(
            Request(name, (2 * number + prompt,), params, BATCH * self.dice.randrange(2)) for prompt in range(prompts)
        )
        answer: Any = client
        flight = Flight(requests, answer, client)
        self.clients.append((client, flight))
        self.dispatcher.submit(flight)

    def drop(self) -> None:
        running = [(client, flight) for client, flight in self.clients if not client.finishes and not client.dropped]
        if running:
            client, flight = self.dice.choice(running)
            client.dropped = True
            self.dispatcher.drop(flight)

    def fail(self) -> None:
        if launches := [launch for launch in self.alive if not launch.failing]:
            self.dice.choice(launches).fail("it fails", self.dice.choice(FAILURES))

    def replace(self) -> None:
        if self.reload is None or self.reload.done():
            self.reload = asyncio.create_task(self.job.replace(self.spec(f"reload {len(self.launches)}")))

    def any_launch(self, do: str) -> None:
        launches = self.launches if do == "repeat" else self.alive
        if launches:
            getattr(self.dice.choice(launches), do)()

    async def turns(self, most: int) -> None:
        for _ in range(self.dice.randrange(most)):
            await asyncio.sleep(0)

    async def tell(self) -> None:
        await self.dispatcher.start()
        acts: dict[Any, int] = {
            self.ask: 4, self.drop: 1, self.fail: 2, self.replace: 1,
            (lambda: self.any_launch("move")): 6, (lambda: self.any_launch("compute")): 6,
            (lambda: self.any_launch("repeat")): 3,
        }  # fmt: skip
        for act in self.dice.choices(list(acts), list(acts.values()), k=60):
            act()
            await self.turns(12)
        for _ in range(400):  # from here on nothing fails
            for launch in self.alive:
                launch.move()
                launch.compute()
            self.any_launch("repeat")
            await self.turns(40)
            if not self.dispatcher.in_flight and not any(launch.work for launch in self.alive):
                break

    def judge(self) -> None:
        for number, (client, flight) in enumerate(self.clients):
            if client.dropped:
                continue
            assert client.finishes == 1, f"request {number} {flight.requests[0].request_id[:9]!r}, {self.job.state}"
            assert client.error is None
            keys = [(prompt, choice) for prompt in range(client.prompts) for choice in range(client.choices)]
            right = {(p, c): [token(2 * number + p, c, at) for at in range(LENGTH)] for p, c in keys}
            assert client.got == right
            assert set(client.ended.values()) == {1}
        assert self.dispatcher.in_flight == 0


@pytest.mark.parametrize("seeds", [range(first, first + 40) for first in (0, 40, 80)], ids=lambda s: f"{s[0]}")
def test_every_request_is_answered_once_whatever_happens(seeds: range, monkeypatch: pytest.MonkeyPatch) -> None:
    """No request is lost, none answered twice, no token of a former launch counts, whatever ids the clients chose."""
    monkeypatch.setattr(replica, "Launch", Launch)
    monkeypatch.setattr(replica, "FIRST_WAIT_S", 0.0)
    monkeypatch.setattr(replica, "_SHORTAGE_S", 0.0)
    logging.disable()
    reasons = Counter[str]()

    async def run(seed: int) -> None:
        monkeypatch.setattr(FakeLaunch, "made", [])
        story = Story(Random(seed))
        await story.tell()
        try:
            story.judge()
            assert await story.dispatcher.drain(10.0)
        except AssertionError as error:
            raise AssertionError(f"seed {seed}: {error}") from error
        finally:
            await story.dispatcher.close()
        if story.reload is not None:
            await story.reload
        assert all(launch.gone for launch in story.launches), f"seed {seed}"
        reasons.update(launch.owner.reason for launch in story.launches)

    try:
        for seed in seeds:
            bounded(lambda seed=seed: run(seed))  # type: ignore[misc]
    finally:
        logging.disable(logging.NOTSET)
    assert set(reasons) == {"first", "relaunch", "standby", "reload"}
