"""The engine's loop over a runner that gives its results a step late, at random: the same answers, shown no sooner than
the next step's result has come; and its progress."""

from __future__ import annotations

import random
from collections import deque
from collections.abc import Callable, Sequence

import pytest
from fake_model import FakeRunner, answer
from hypothesis import given, settings
from hypothesis import strategies as st
from laddertron.engine.batch import Batch, StepResult, decode
from laddertron.engine.request import Request, SamplingParams
from laddertron.engine.schedule.scheduler import Scheduler, SchedulerLimits
from laddertron.engine.step.engine import Engine, StepProgress, _timed, follow

Ahead = Callable[[Sequence[StepResult]], None]


class LateRunner:
    """The fake model. `handed`: tokens of each result that was given out, in order; `pending`: the one that was not."""

    def __init__(self, limits: SchedulerLimits, dice: random.Random, chance: float) -> None:
        self._fake = FakeRunner(
            limits.max_num_seqs, limits.max_num_batched_tokens, limits.block_size, limits.num_blocks
        )
        self._dice, self._chance = dice, chance
        self.pending: StepResult | None = None
        self.handed: list[int] = []
        self.late = self.runs = 0

    def run(self, batch: Batch, ahead: Ahead | None = None) -> StepResult | None:
        self.runs += 1
        result = self._fake.run(batch) if batch.chunks else StepResult(())
        known = self.wait_result()
        if batch.chunks and self._dice.random() < self._chance:
            self.pending = result
            self.late += 1
        if ahead is not None:
            ahead([] if known is None else [known])
        if self.pending is None:
            self.handed.append(len(result.tokens))
            return result
        return None

    def wait_result(self) -> StepResult | None:
        known, self.pending = self.pending, None
        if known is not None:
            self.handed.append(len(known.tokens))
        return known

    def send(self, frame: bytes) -> None: ...


def _requests(dice: random.Random, count: int) -> list[Request]:
    out = []
    for number in range(count):
        prompt = tuple(dice.randrange(50) for _ in range(dice.randint(1, 12)))
        stops = tuple(dice.sample(range(50), 3))
        params = SamplingParams(
            max_tokens=dice.randint(1, 14), seed=number, stop_token_ids=stops, n=dice.choice([1, 1, 2])
        )
        out.append(Request(f"r{number}", prompt, params, priority=dice.choice([0, 1])))
    return out


@settings(max_examples=150, deadline=None)
@given(st.integers(0, 2**32), st.sampled_from([0.0, 0.5, 1.0]), st.integers(10, 40))
def test_late_results_change_no_answer(seed: int, chance: float, blocks: int) -> None:
    """Few blocks, so that sequences are preempted with a token pending; requests that come and are cancelled at any
    moment. Whatever was not cancelled is answered as the model says; no token is shown before the result of the step
    after its own, which is what proves it; at the end nothing is pending and nothing under way."""
    dice = random.Random(seed)
    limits = SchedulerLimits(
        max_num_seqs=4, max_num_batched_tokens=16, max_model_len=32, block_size=4, num_blocks=blocks, watermark=0.0
    )
    runner, progress = LateRunner(limits, dice, chance), StepProgress()
    engine = Engine(Scheduler(limits), runner, runner, progress)
    waiting = deque(_requests(dice, 12))
    asked = {request.request_id: request for request in waiting}
    tokens: dict[tuple[str, int], list[int]] = {}
    ends: dict[tuple[str, int], tuple[str, int | None]] = {}
    upset: set[str] = set()
    shown = 0
    while waiting or engine.has_work:
        if waiting and (dice.random() < 0.5 or not engine.has_work):
            engine.add(waiting.popleft())
        if dice.random() < 0.05:
            upset.add(victim := f"r{dice.randrange(12)}")
            engine.scheduler.cancel(victim)
        for event in engine.step():
            key = event.request_id, event.choice
            assert event.start == len(tokens.setdefault(key, []))
            tokens[key].extend(event.tokens)
            shown += len(event.tokens)
            if event.finish is not None:
                assert key not in ends
                ends[key] = event.finish, event.stop_token
        assert shown <= sum(runner.handed[:-1])
    engine.close()
    assert runner.pending is None
    assert (runner.late > 0) == (chance > 0)
    assert progress.step == runner.runs == len(runner.handed)
    assert progress.busy_since is None
    assert not progress.behind
    for name, request in asked.items():
        for choice in range(request.params.n):
            wanted = answer(request, choice, limits.max_model_len)
            if name not in upset:
                assert tuple(tokens[name, choice]) == wanted.tokens
                assert ends[name, choice] == (wanted.finish, wanted.stop_token)
            elif (name, choice) in tokens:
                assert tuple(tokens[name, choice]) == wanted.tokens[: len(tokens[name, choice])]


class _Follower:
    """Another rank, all of whose results are late: it obeys a plan, and waits for the next one."""

    def __init__(self, limits: SchedulerLimits) -> None:
        self._runner, self.progress = LateRunner(limits, random.Random(0), 1.0), StepProgress()

    def send(self, frame: bytes) -> None:
        if frame:
            _timed(self._runner, decode(frame), self.progress)


@pytest.mark.parametrize("end", ["length", "stop", "cancelled"])
def test_without_work_no_rank_seems_to_be_in_a_step(end: str) -> None:
    """However the last request ends: a rank that waits for the next plan with a result pending would be taken for one
    that hangs, and the launch be ended."""
    limits = SchedulerLimits(
        max_num_seqs=4, max_num_batched_tokens=16, max_model_len=32, block_size=4, num_blocks=9, watermark=0.0
    )
    follower = _Follower(limits)
    engine = Engine(Scheduler(limits), LateRunner(limits, random.Random(0), 1.0), follower, StepProgress())
    stops = tuple(range(50)) if end == "stop" else ()
    engine.add(Request("a", (1, 2, 3), SamplingParams(max_tokens=9, min_tokens=4, seed=0, stop_token_ids=stops)))
    finish: list[str | None] = []
    while engine.has_work:
        if follower.progress.step == 5 and end == "cancelled":
            engine.scheduler.cancel("a")
        finish += [event.finish for event in engine.step()]
    assert finish[-1] == end
    assert follower.progress.step > 4
    assert follower.progress.busy_since is None


class _Broken(LateRunner):
    def run(self, batch: Batch, ahead: Ahead | None = None) -> StepResult | None:
        if self.runs == 3:
            raise OSError("the device is gone")
        return super().run(batch, ahead)


def test_a_broken_step_shows_nothing_of_what_was_owed() -> None:
    """Three steps are set off, the third one's result and the second one's proof never come: the first one's token is
    all that was told. Then nothing is waited for, and no step seems to be under way."""
    limits = SchedulerLimits(
        max_num_seqs=4, max_num_batched_tokens=16, max_model_len=32, block_size=4, num_blocks=9, watermark=0.0
    )
    runner, progress = _Broken(limits, random.Random(0), 1.0), StepProgress()
    engine = Engine(Scheduler(limits), runner, runner, progress)
    engine.add(Request("a", (1, 2, 3), SamplingParams(max_tokens=20, seed=0)))
    told = [event for _ in range(3) for event in engine.step()]
    assert sum(len(event.tokens) for event in told) == 1
    with pytest.raises(OSError, match="the device is gone"):
        engine.step()
    assert runner.pending is not None
    runner.wait_result = lambda: pytest.fail("waited for a broken group")  # type: ignore[method-assign]
    engine.close()
    assert progress.busy_since is None


def test_two_steps_under_way_take_their_own_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """A prompt of 64 tokens from 5 s on, a decode of 4 set off at 5.1 s; known at 6 s and at 6.2 s: 1 s and 0.2 s."""
    now = [5.0]
    monkeypatch.setattr("laddertron.engine.step.engine.time.monotonic", lambda: now[0])
    progress = StepProgress()
    progress.start(64)
    now[0] = 5.1
    progress.start(4)
    assert (progress.busy_since, progress.step_tokens) == (5.0, 64)
    now[0] = 6.0
    progress.finish()
    assert progress.last_tokens == 64
    assert progress.last_seconds == pytest.approx(1.0)
    assert (progress.busy_since, progress.step_tokens, progress.step) == (6.0, 4, 1)
    now[0] = 6.2
    progress.finish()
    assert progress.last_tokens == 4
    assert progress.last_seconds == pytest.approx(0.2)
    assert progress.busy_since is None
    assert progress.durations.total == pytest.approx(1.2)


def test_a_follower_ends_with_nothing_under_way() -> None:
    """Its last step's result is pending when rank 0's plans end."""
    limits = SchedulerLimits(
        max_num_seqs=4, max_num_batched_tokens=16, max_model_len=32, block_size=4, num_blocks=9, watermark=0.0
    )
    runner, frames = LateRunner(limits, random.Random(0), 1.0), list[bytes]()

    class Plans:
        def send(self, frame: bytes) -> None:
            frames.append(frame)

        def receive(self) -> bytes:
            return frames.pop(0)

    engine = Engine(Scheduler(limits), LateRunner(limits, random.Random(0), 1.0), Plans(), StepProgress())
    engine.add(Request("a", (1, 2, 3), SamplingParams(max_tokens=9, seed=0)))
    for _ in range(3):
        engine.step()
    engine.close()
    progress = StepProgress()
    follow(runner, Plans(), progress)
    assert not frames
    assert runner.pending is None
    assert (progress.step, progress.busy_since) == (runner.runs, None)
