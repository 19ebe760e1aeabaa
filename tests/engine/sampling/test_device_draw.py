"""Ids drawn on the device: those that the host would have drawn, without the host having looked at anything."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pytest
import torch
from laddertron.engine.request import SamplingParams
from laddertron.engine.sampling import device_rule
from laddertron.engine.sampling.device_sampler import fed_by, feed
from laddertron.engine.sampling.sampler import DesyncError, Gather, OnDevice, Sampled, Sampler
from laddertron.models.transfer import carry, download, stage, upload
from laddertron.topology.transport import native
from overlapped import READ, START, Remote, device_gather, here, noted
from sampling_ranks import Bytes, Ranks, cut, sequence, width

CPU, CUDA = torch.device("cpu"), torch.device("cuda")


def params(seed: int = 1, **fields: Any) -> SamplingParams:
    return SamplingParams(max_tokens=64, seed=seed, **fields)


def make(vocab: int, tp: int, rank: int, gather: Gather, slots: int, notes: list[str]) -> Sampler:
    shard = range(rank * width(vocab, tp), (rank + 1) * width(vocab, tp))
    return Sampler(vocab, shard, slots, gather, CPU, None, OnDevice(device_gather(gather), noted(notes)))


@pytest.fixture(autouse=True)
def no_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    """A device's shard is torch's."""
    monkeypatch.setattr(native, "load", lambda module: None)


def drawn(
    tp: int, requests: Sequence[SamplingParams], steps: Sequence[torch.Tensor], there: bool, recorded: bool = False
) -> tuple[list[Sampled], list[str]]:
    """Every step's result, the same on all ranks; there: drawn on the device, from logits that the host may not see;
    recorded: as steps with more rows are."""
    notes: list[str] = []

    def task(rank: int, gather: Gather) -> list[Sampled]:
        own = notes if rank == 0 else []
        sampler = make(steps[0].shape[1], tp, rank, gather, len(requests) + 2, own)
        # Slots in another order than rows, some of the requests not at their first position.
        slots = [(3 * row) % len(requests) for row in range(len(requests))]
        for row, request in enumerate(requests):
            sampler.admit(sequence(slots[row], request, output=[5] * (row % 3), choice=row % 2))
        out, replayed = [], list[int]()
        rows = torch.full((16, width(steps[0].shape[1], tp)), math.nan)

        def counted(compute: Callable[[], Any]) -> Callable[[], Any]:
            def replay() -> Any:
                replayed.append(1)
                return compute()

            return replay

        if recorded:
            sampler.record(rows, (4, 16), counted)
        for step in steps:
            logits = cut(step, tp, rank)
            if there:
                if recorded:
                    rows[: len(slots)] = logits
                assert sampler.start(logits.as_subclass(Remote), slots, recorded)
                assert own.count(READ) == own.count(START) - 1 or rank
                out.append(sampler.finish())
                assert sampler.latest is not None
                assert here(sampler.latest)[slots].tolist() == out[-1].ids.tolist()
            else:
                out.append(sampler.sample(logits, slots))
        sampler.flush()
        assert len(replayed) == len(steps) * recorded
        return out

    results = Ranks(tp).run(task)
    for other in results[1:]:
        for mine, theirs in zip(results[0], other, strict=True):
            assert mine.ids.tolist() == theirs.ids.tolist()
            assert mine.nonfinite.tolist() == theirs.nonfinite.tolist()
    return results[0], notes


@pytest.mark.parametrize("tp", [1, 2, 8])
@pytest.mark.parametrize("kinds", ["greedy", "noisy", "both"])
@pytest.mark.parametrize("recorded", [False, True])
def test_the_ids_are_those_that_the_host_draws(tp: int, kinds: str, recorded: bool) -> None:
    """Greedy rows, rows of plain temperature, both mixed, on vocabularies that tp does not divide (with 8 ranks some
    shards of 20 are all padding), over usual, tied and poisoned logits. Neither the draw nor the gather lets the host
    look; one result is set off and one read for each step."""
    dice = np.random.default_rng(7)
    for vocab in (20, 509):
        steps = [torch.from_numpy(dice.standard_normal((11, vocab)).astype(np.float32)) * scale for scale in (2, 8)]
        steps.append((steps[0] * 2).round())
        steps.append(steps[1].clone())
        for row, (column, value) in enumerate([(3, math.nan), (vocab - 1, math.inf), (7, -math.inf)]):
            steps[3][row, column] = value
        steps[3][4] = -math.inf
        steps[3][5], steps[3][5, vocab - 2] = -math.inf, 1.0
        heat = {"greedy": [0.0], "noisy": [0.7, 1.0, 3.0], "both": [0.0, 1.0, 0.8]}[kinds]
        requests = [params(2**64 - 1 - row, temperature=heat[row % len(heat)]) for row in range(11)]
        wanted, _ = drawn(tp, requests, steps, there=False)
        got, notes = drawn(tp, requests, steps, there=True, recorded=recorded)
        assert notes == [START, READ] * len(steps)
        for mine, theirs in zip(got, wanted, strict=True):
            assert mine.ids.dtype == theirs.ids.dtype
            assert mine.ids.tolist() == theirs.ids.tolist()
            assert mine.nonfinite.tolist() == theirs.nonfinite.tolist()
            assert mine.logprobs == theirs.logprobs
        assert got[3].nonfinite[[0, 1, 4]].all()
        assert not got[3].nonfinite[[2, 3, 5]].any()
        assert got[3].ids[5] == vocab - 2


FIELDS: list[dict[str, Any]] = [
    {"top_p": 0.5},
    {"top_k": 4},
    {"min_p": 0.2},
    {"top_k": 6, "top_p": 0.7, "min_p": 0.05, "temperature": 1.7},
    {"top_k": 300, "top_p": 0.9, "temperature": 0.3},
    {"top_p": 0.01},
    {"presence_penalty": 1.5},
    {"frequency_penalty": -0.7, "repetition_penalty": 1.3, "temperature": 0.0},
    {"repetition_penalty": 0.8, "top_p": 0.8, "logprobs": 2},
    {"logit_bias": ((3, 2.0), (19, -100.0)), "top_k": 5},
    {"allowed_token_ids": (1, 3, 18)},
    {"allowed_token_ids": (3,), "logit_bias": ((3, 5.0),), "logprobs": 0},
    {"min_tokens": 3, "stop_token_ids": (2, 5, 7), "temperature": 0.0},
    {"logprobs": 5},
    {"logprobs": 20, "temperature": 0.0, "top_k": 3},
    {},
    {"temperature": 0.0},
]


@pytest.mark.parametrize("tp", [1, 2, 8])
def test_filters_edits_and_log_probabilities_too(tp: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every field alone and with others, mixed with plain rows, over five steps whose ids the penalties count; usual,
    tied and poisoned logits. Ids, what failed and why are the host's to the last bit, log-probabilities to 1e-9."""
    dice = np.random.default_rng(11)
    rows = len(FIELDS)
    monkeypatch.setattr(device_rule, "SORTED_LOGITS", 3 * 509)  # a few rows at a time
    for vocab in (20, 509):
        steps = [torch.from_numpy(dice.standard_normal((rows, vocab)).astype(np.float32)) * scale for scale in (2, 5)]
        steps += [(steps[0] * 2).round(), steps[1].clone(), steps[0].flip(0)]
        for row, value in ((0, math.nan), (3, math.inf), (8, math.nan), (13, -math.inf)):
            steps[3][row, 7] = value
        steps[3][10, [1, 3, 18]] = -math.inf  # all that it is allowed
        requests = [params(77 + row, **{"temperature": 0.9} | fields) for row, fields in enumerate(FIELDS)]
        wanted, _ = drawn(tp, requests, steps, there=False)
        got, notes = drawn(tp, requests, steps, there=True)
        assert notes == [START, READ] * len(steps)
        for mine, theirs in zip(got, wanted, strict=True):
            assert mine.ids.tolist() == theirs.ids.tolist()
            assert mine.nonfinite.tolist() == theirs.nonfinite.tolist()
            assert mine.failures == theirs.failures
            for own, other in zip(mine.logprobs, theirs.logprobs, strict=True):
                assert (own is None) == (other is None)
                if own is not None and other is not None:
                    assert own.token == other.token
                    assert own.logprob == pytest.approx(other.logprob, abs=1e-9)
                    assert [i for i, _ in own.top] == [i for i, _ in other.top]
                    assert [p for _, p in own.top] == pytest.approx([p for _, p in other.top], abs=1e-9)
        assert list(got[3].failures) == [10]
        assert got[3].nonfinite[[0, 3, 8, 10]].all()


def test_penalties_go_on_from_device_to_host_and_back() -> None:
    """A grammarless batch, a row with bad words that sends it through the host, and the batch again: every step counts
    the ids of all before it."""
    torch.manual_seed(4)
    steps = [torch.randn(2, 30) for _ in range(8)]

    def task(rank: int, gather: Gather) -> None:
        sampler, host = make(30, 1, rank, gather, 2, []), Sampler(30, range(30), 2, gather, CPU)
        for each in (sampler, host):
            each.admit(sequence(0, params(seed=3, frequency_penalty=1.9, temperature=0.6)))
        for number, step in enumerate(steps):
            words = number in (3, 4)
            if number in (3, 5):
                for each in (sampler, host):
                    each.release(1)
                    if words:
                        each.admit(sequence(1, params(seed=5, bad_word_ids=((1, 2),))))
            slots = [0, 1] if words else [0]
            want = host.sample(step[: len(slots)].clone(), slots).ids.tolist()
            started = sampler.start(step[: len(slots)], slots)
            assert started == (not words)
            got = sampler.finish() if started else sampler.sample(step[: len(slots)], slots)
            assert got.ids.tolist() == want, number

    Ranks(1).run(task)


@pytest.mark.parametrize("tp", [1, 2])
@pytest.mark.parametrize("plain", [False, True])
def test_drafts_are_accepted_as_the_host_accepts_them(tp: int, plain: bool, run_seed: int) -> None:
    """Random numbers of drafts for each slot in steps with and without drafts, drawn by the host in between: the same
    ids, acceptance and scores as on the host, where penalties count the drafts before a row and positions move on by
    what was accepted. Plain rows are drawn in recordings."""
    vocab, slots = 24, len(FIELDS)
    steps = 24
    torch.manual_seed(run_seed % 10_000)
    logits = [torch.randn(4 * slots, vocab) * 6 for _ in range(steps)]
    if not plain:
        logits[5][3, 2] = logits[9][7, 1] = math.nan

    def task(rank: int, gather: Gather) -> tuple[int, int]:
        dice = np.random.default_rng(run_seed)
        there, host = (make(vocab, tp, rank, gather, slots, []) for _ in range(2))
        rows = torch.full((4 * slots, width(vocab, tp)), math.nan)
        replays: list[int] = []

        def record(compute: Callable[[], Any]) -> Callable[[], Any]:
            def replay() -> Any:
                replays.append(1)
                return compute()

            return replay

        there.record(rows, (8, 4 * slots), record)
        for slot, fields in enumerate(FIELDS):
            chosen = {"temperature": fields.get("temperature", 1.0)} if plain else fields
            for each in (there, host):
                each.admit(sequence(slot, params(slot + 1, **chosen)))
        accepted = rejected = 0
        for number, step in enumerate(logits):
            counts = dice.integers(0, 4, slots) if number % 3 else np.zeros(slots, np.int64)
            at = np.repeat(np.arange(slots), 1 + counts).tolist()
            own = cut(step[: len(at)], tp, rank)
            fed = np.array([int(dice.integers(vocab)) for _ in at], np.int32)
            best = step[: len(at)].nan_to_num().argmax(1).tolist()
            for row in range(1, len(at)):
                if at[row] == at[row - 1] and dice.random() < 0.8:
                    fed[row] = best[row - 1]
            drafted = fed if number % 3 else None
            want = host.sample(own.clone(), at, drafted)
            if number % 4 == 3:
                got = there.sample(own.clone(), at, drafted)
            else:
                rows[: len(at)] = own
                assert there.start(rows.as_subclass(Remote)[: len(at)], at, True, drafted)
                got = there.finish()
            assert got.ids.tolist() == want.ids.tolist(), number
            assert got.nonfinite.tolist() == want.nonfinite.tolist()
            assert (got.taken is None) == (want.taken is None)
            if want.taken is not None and got.taken is not None:
                assert got.taken.tolist() == want.taken.tolist()
                accepted += int(want.taken.sum()) - slots
                rejected += int((~want.taken).sum())
            for mine, theirs in zip(got.logprobs, want.logprobs, strict=True):
                assert (mine is None) == (theirs is None)
                if mine is not None and theirs is not None:
                    assert mine.token == theirs.token
                    assert mine.logprob == pytest.approx(theirs.logprob, abs=1e-6)
        assert len(replays) == (18 if plain else 0)
        return accepted, rejected

    accepted, rejected = Ranks(tp).run(task)[0]
    assert accepted > 20
    assert rejected > 20


def test_what_needs_the_host_is_left_to_it() -> None:
    """Bad words and digests: nothing is set off. A draw under way must be finished before another."""

    def task(rank: int, gather: Gather) -> None:
        logits, sampler = torch.randn(2, 50), make(50, 1, 0, gather, 10, [])
        sampler.admit(sequence(0, params()))
        wanting: list[dict[str, Any]] = [{"bad_word_ids": ((3, 4),)}, {"return_digest": True}]
        for slot, fields in enumerate(wanting, 1):
            sampler.admit(sequence(slot, params(**fields)))
            assert not sampler.start(logits, [0, slot]), fields
            assert len(sampler.sample(logits, [0, slot]).ids) == 2
        with pytest.raises(RuntimeError, match="no draw is under way"):
            sampler.finish()
        assert sampler.start(logits[:1], [0])
        assert not sampler.start(logits[:1], [0])
        with pytest.raises(RuntimeError, match="finish it first"):
            sampler.flush()
        sampler.finish()
        sampler.flush()
        plain = Sampler(50, range(50), 1, gather, CPU)
        plain.admit(sequence(0, params()))
        assert plain.latest is None
        assert not plain.start(logits[:1], [0])

    Ranks(1).run(task)


def test_both_kinds_of_steps_share_one_state() -> None:
    """Positions, and with them the noise, and digests go on from one kind to the other."""
    torch.manual_seed(1)
    steps = [torch.randn(1, 300) for _ in range(6)]

    def task(rank: int, gather: Gather) -> list[int]:
        sampler, alone = make(300, 2, rank, gather, 2, []), make(300, 2, rank, gather, 1, [])
        sampler.admit(sequence(1, params(seed=9)))
        alone.admit(sequence(0, params(seed=9)))
        out, wanted = [], []
        for number, step in enumerate(steps):
            logits = cut(step, 2, rank)
            there = number % 3 != 1
            assert not there or sampler.start(logits, [1])
            out.append(int((sampler.finish() if there else sampler.sample(logits, [1])).ids[0]))
            wanted.append(int(alone.sample(logits, [0]).ids[0]))
        sampler.flush()
        assert out == wanted
        return out

    first, second = Ranks(2).run(task)
    assert first == second


@pytest.mark.parametrize("after", ["start", "sample", "flush"])
def test_ranks_that_disagree_are_found_by_the_next_gather(after: str) -> None:
    """Rank 1 brings another digest to the third gather, whatever kind it is: every rank names the step before, and
    gets nothing of its own."""

    def tamper(rank: int, number: int, payload: Bytes) -> Bytes:
        if rank == 1 and number == 2:
            payload[0] ^= 1
        return payload

    def task(rank: int, gather: Gather) -> tuple[int, tuple[int, ...]]:
        sampler = make(40, 3, rank, gather, 1, [])
        sampler.admit(sequence(0, params()))
        logits = cut(torch.randn(1, 40, generator=torch.Generator().manual_seed(3)), 3, rank)
        for _ in range(2):
            assert sampler.start(logits, [0])
            sampler.finish()
        if after == "start":
            sampler.start(logits, [0])
        third: dict[str, Callable[[], Any]] = {
            "start": sampler.finish,
            "sample": lambda: sampler.sample(logits, [0]),
            "flush": sampler.flush,
        }
        with pytest.raises(DesyncError) as caught:
            third[after]()
        return caught.value.step, caught.value.ranks

    assert Ranks(3, tamper).run(task) == [(1, (1,))] * 3


@pytest.mark.parametrize("first", ["ids", "experts"])
def test_experts_that_differ_are_named_unless_an_id_did_before(first: str) -> None:
    """From the third step on rank 1 routes otherwise: its node is to blame, in that step; where its digest of the ids
    before differs too, these are."""

    def tamper(rank: int, number: int, payload: Bytes) -> Bytes:
        if (rank, number, first) == (1, 2, "ids"):
            payload[0] ^= 1
        return payload

    def task(rank: int, gather: Gather) -> str:
        sampler, routing = make(40, 3, rank, gather, 1, []), torch.zeros(1, dtype=torch.int64)
        sampler.follow(bytes, routing, 1)
        sampler.admit(sequence(0, params()))
        logits = cut(torch.randn(1, 40, generator=torch.Generator().manual_seed(3)), 3, rank)
        for step in range(3):
            routing += 1 + (rank == 1 and step == 2)
            assert sampler.start(logits, [0])
            if step < 2:
                sampler.finish()
        with pytest.raises(DesyncError) as caught:
            sampler.finish()
        return str(caught.value)

    wanted = {
        "ids": "sampling step 1: rank 1 of 3 drew other ids",
        "experts": "sampling step 2: node 1 (rank 1 of 3) chose other experts",
    }
    assert all(said.startswith(wanted[first]) for said in Ranks(3, tamper).run(task))


def test_ids_are_fed_by_slot() -> None:
    """What is not negative is an id; the rest names the slot whose last one it is."""
    latest = torch.tensor([70, 71, 72, 73])
    names = torch.from_numpy(fed_by(np.array([3, 0])))
    assert feed(torch.cat([torch.tensor([5, 0]), names]), latest).tolist() == [5, 0, 73, 70]


def test_copies_are_of_the_moment() -> None:
    """What was set off to the host does not change with what the device does next; what was staged may be used anew."""
    x = torch.arange(3)
    arriving = download(x)
    x += 10
    assert arriving().tolist() == [0, 1, 2]
    target, source = torch.zeros(3, dtype=torch.int64), torch.arange(3)
    stage(target, source)
    source += 10
    assert target.tolist() == [0, 1, 2]
    assert carry(x, CPU) is x
    assert upload(np.arange(2), CPU).tolist() == [0, 1]


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
def test_on_a_gpu_the_host_does_not_wait() -> None:
    """While the device is busy for some tenth of a second, arrays go up, a draw is set off and its result is asked for;
    only reading it waits, and it is the CPU's."""
    x = torch.randn(4, 4096, generator=torch.Generator().manual_seed(1))
    requests = [params(seed, temperature=0.0 if seed % 2 else 1.0) for seed in range(4)]

    def task(rank: int, gather: Gather) -> None:
        wanted = make(4096, 1, 0, gather, 4, [])
        sampler = Sampler(4096, range(4096), 4, gather, CUDA, None, OnDevice(lambda part: part[None]))
        for slot, request in enumerate(requests):
            for each in (wanted, sampler):
                each.admit(sequence(slot, request))
        logits = x.cuda()
        assert sampler.start(logits, range(4))  # compiles what is to be compiled
        sampler.finish()
        wanted.sample(x, range(4))
        torch.cuda.synchronize()
        torch.cuda._sleep(200_000_000)  # type: ignore[no-untyped-call]
        event: Any = torch.cuda.Event
        busy = event()
        busy.record()
        upload(np.arange(100_000), torch.device("cuda", 0))
        assert sampler.start(logits, range(4))
        assert not busy.query()
        assert sampler.finish().ids.tolist() == wanted.sample(x, range(4)).ids.tolist()
        assert busy.query()

    Ranks(1).run(task)
