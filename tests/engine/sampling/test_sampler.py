"""The sampler: the oracle's ids on every tp, the right distributions, bad rows and disagreeing ranks."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from itertools import count, pairwise
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
import torch
from laddertron.engine.request import PARAMS, SamplingParams, TokenLogprob
from laddertron.engine.sampling.sampler import DesyncError, Gather, Sampled
from laddertron.topology.transport import native
from sampling_ranks import Bytes, Ranks, cut, draw, edited, kept, make, noise, sequence

Rows = list[torch.Tensor]
EXCUSED = 1e-6  # scores or cumulative probabilities that lie closer may fall either way


def params(seed: int = 1, **fields: Any) -> SamplingParams:
    return SamplingParams(max_tokens=64, seed=seed, **fields)


def play(
    tp: int,
    requests: list[SamplingParams],
    steps: Rows,
    choices: list[int] | None = None,
    tamper: Callable[[int, int, Bytes], Bytes] | None = None,
) -> tuple[list[Sampled], Ranks]:
    """Every step's result, after all ranks were found to have the same."""
    ranks = Ranks(tp, tamper)

    def task(rank: int, gather: Gather) -> list[Sampled]:
        sampler = make(steps[0].shape[1], tp, rank, gather, len(requests))
        for slot, request in enumerate(requests):
            sampler.admit(sequence(slot, request, choice=choices[slot] if choices else 0))
        out = [sampler.sample(cut(step, tp, rank), range(len(requests))) for step in steps]
        sampler.flush()
        return out

    results = ranks.run(task)
    for other in results[1:]:
        for mine, theirs in zip(results[0], other, strict=True):
            assert (mine.ids == theirs.ids).all()
            assert (mine.nonfinite == theirs.nonfinite).all()
            assert mine.logprobs == theirs.logprobs
    return results[0], ranks


def _pairs(rng: np.random.Generator, vocab_size: int) -> tuple[tuple[int, ...], ...]:
    """Words of two and three ids, of few different ones so that some come about."""
    few = [int(i) for i in rng.integers(2, vocab_size, 3)]  # 1 is always allowed
    return (*[(a, b) for a in few for b in few], (few[0], few[1], few[2]))


def some_params(rng: np.random.Generator, vocab_size: int) -> SamplingParams:
    """A random mix of every parameter that changes what is drawn."""

    def maybe(chance: float, value: Any, default: Any) -> Any:
        return value if rng.random() < chance else default

    return params(
        seed=int(rng.integers(0, 2**64, dtype=np.uint64)),
        temperature=float(rng.choice([0.0, 0.2, 0.7, 1.0, 1.0, 3.0])),
        top_k=int(maybe(0.4, rng.choice([1, 2, 5, 40, vocab_size // 3, vocab_size - 1, vocab_size, 10**6]), 0)),
        top_p=float(maybe(0.5, rng.choice([1e-6, 0.1, 0.5, 0.9, 0.999]), 1.0)),
        min_p=float(maybe(0.3, rng.choice([1e-4, 0.02, 0.3, 1.0]), 0.0)),
        presence_penalty=float(maybe(0.3, rng.uniform(-2, 2), 0.0)),
        frequency_penalty=float(maybe(0.3, rng.uniform(-2, 2), 0.0)),
        repetition_penalty=float(maybe(0.3, rng.uniform(0.5, 2), 1.0)),
        logit_bias=maybe(0.3, ((5, 3.0), (vocab_size - 1, -100.0), (vocab_size // 2, 4.5)), ()),
        allowed_token_ids=maybe(0.3, tuple(range(1, vocab_size, int(rng.choice([2, 7])))), ()),
        bad_word_ids=maybe(0.5, ((5,), (int(rng.integers(vocab_size)), 4), *_pairs(rng, vocab_size)), ()),
        min_tokens=int(maybe(0.3, 2, 0)),
        stop_token_ids=(2, vocab_size // 2, 7),
        logprobs=maybe(0.3, int(rng.integers(0, 6)), None),
    )


@pytest.mark.parametrize("tp", [1, 2, 4, 8])
@pytest.mark.parametrize("fallback", [False, True])
def test_ids_are_the_oracles_on_every_tp(
    tp: int, fallback: bool, monkeypatch: pytest.MonkeyPatch, run_seed: int
) -> None:
    """Random requests of every mix, four steps over flat, usual, steep and tied logits, vocabularies that tp does not
    divide (some shards of 20 with 8 ranks are all padding): brute force over the whole vocabulary draws the same ids,
    whether C or torch works on the shards. Rows where the rule is a toss-up within 1e-6 are excused, and counted."""
    if fallback:
        monkeypatch.setattr(native, "load", lambda module: None)
    rng = np.random.default_rng(run_seed)
    excused = total = 0
    for vocab_size in (20, 509, 4099):
        requests = [some_params(rng, vocab_size) for _ in range(24)]
        choices = [int(c) for c in rng.integers(0, 4, len(requests))]
        steps = [
            torch.from_numpy(rng.standard_normal((len(requests), vocab_size)).astype(np.float32) * scale)
            for scale in (0.05, 2.0, 8.0)
        ]
        steps.append((steps[1] * 2).round())
        results, _ = play(tp, requests, steps, choices)
        for row, request in enumerate(requests):
            new = sequence(row, request, choice=choices[row])
            output: list[int] = []
            for step, result in zip(steps, results, strict=True):
                wanted, lead = draw(step[row].numpy(), new, output)
                got = int(result.ids[row])
                total += 1
                if got != wanted and lead < EXCUSED:
                    excused += 1
                else:
                    assert got == wanted, (request, len(output), lead)
                output.append(got)
    assert excused <= total // 100


def test_greedy_takes_the_lowest_id_of_equals() -> None:
    logits = torch.zeros(3, 40)
    logits[1, [39, 17, 18]] = 5.0
    logits[2, 39] = 1e-3
    for tp in (1, 2, 4, 8):
        results, _ = play(tp, [params(temperature=0.0)] * 3, [logits])
        assert results[0].ids.tolist() == [0, 17, 39]


def test_noise_goes_on_where_a_preempted_sequence_stopped() -> None:
    """1. A sequence draws four ids. 2. Another slot is admitted with its first two as known output. 3. It draws the
    other two: noise depends on seed, position and choice alone, not on slot, batch or history; a bad word that was
    begun before is not ended."""
    torch.manual_seed(0)
    steps = [torch.randn(1, 300) for _ in range(4)]
    request = params(seed=2**63 + 5, presence_penalty=0.7, repetition_penalty=1.2)
    free = [int(r.ids[0]) for r in play(1, [request], steps)[0]]
    request = replace(request, bad_word_ids=((free[1], free[2]),))
    whole = [int(r.ids[0]) for r in play(1, [request], steps)[0]]
    assert whole[:2] == free[:2]
    assert whole[2] != free[2]

    def resumed(rank: int, gather: Gather) -> list[int]:
        sampler = make(300, 2, rank, gather, 8)
        sampler.admit(sequence(3, params(seed=9)))
        sampler.admit(sequence(6, request, output=whole[:2]))
        rows = [torch.cat([torch.randn(1, 300), step]) for step in steps[2:]]
        return [int(sampler.sample(cut(both, 2, rank), [3, 6]).ids[1]) for both in rows]

    assert Ranks(2).run(resumed) == [whole[2:]] * 2


def test_slots_are_used_again_without_a_trace() -> None:
    """A released slot forgets penalties and position; a taken or an empty one is refused."""

    def task(rank: int, gather: Gather) -> tuple[int, int]:
        sampler = make(50, 1, rank, gather, 2)
        logits = torch.zeros(1, 50)
        logits[0, 4] = 1.0
        with pytest.raises(ValueError, match="slot 0 is empty"):
            sampler.sample(logits, [0])
        sampler.admit(sequence(0, params(temperature=0.0, frequency_penalty=2.0)))
        with pytest.raises(ValueError, match="slot 0 is taken"):
            sampler.admit(sequence(0, params()))
        with pytest.raises(ValueError, match="1 rows of logits for 2 slots"):
            sampler.sample(logits, [0, 1])
        first = [int(sampler.sample(logits, [0]).ids[0]) for _ in range(2)]
        assert first == [4, 0]
        sampler.release(0)
        sampler.admit(sequence(0, params(temperature=0.0, frequency_penalty=2.0)))
        return first[0], int(sampler.sample(logits, [0]).ids[0])

    assert Ranks(1).run(task) == [(4, 4)]


# ---- distributions ----

DISTRIBUTIONS = {
    "plain": params(temperature=1.3),
    "top_k": params(top_k=7),
    "top_p": params(top_p=0.8),
    "top_p of a wide row": params(top_p=0.97, temperature=20.0),
    "min_p": params(min_p=0.05),
    "all filters": params(top_k=30, top_p=0.9, min_p=0.01, temperature=1.5),
    "penalties": params(presence_penalty=0.5, frequency_penalty=0.3, repetition_penalty=1.3),
    "logit_bias": params(logit_bias=((3, 2.0), (90, -100.0))),
    "allowed_token_ids": params(allowed_token_ids=(1, 2, 3, 90, 199), logit_bias=((3, 2.0),)),
}


@pytest.mark.parametrize("name", DISTRIBUTIONS)
def test_frequencies_are_those_of_the_plain_softmax(name: str) -> None:
    """8,000 draws under as many seeds: chi-square against the exact softmax over the kept ids, within 5 standard
    deviations; and nothing is drawn that was filtered out. (Fixed seeds: the outcome is always the same.)"""
    request, n, vocab_size, batch = DISTRIBUTIONS[name], 8_000, 200, 500
    torch.manual_seed(7)
    row = torch.randn(1, vocab_size) * 2
    output = (8, 8, 11)
    new = sequence(0, request, output=output)
    x = edited(row[0].numpy(), new, output)
    ids = kept(x, request)
    weight = np.exp((x[ids].astype(np.float64) - x.max()) / request.temperature)

    def task(rank: int, gather: Gather) -> np.ndarray[Any, Any]:
        sampler = make(vocab_size, 2, rank, gather, batch)
        counts = np.zeros(vocab_size)
        for start in range(0, n, batch):
            for slot in range(batch):
                sampler.release(slot)
                sampler.admit(sequence(slot, replace(request, seed=start + slot), output=output))
            drawn = sampler.sample(cut(row.expand(batch, -1), 2, rank), range(batch))
            counts += np.bincount(drawn.ids, minlength=vocab_size)
        return counts

    counts, _ = Ranks(2).run(task)
    assert counts[ids].sum() == n
    expected = n * weight / weight.sum()
    common = expected >= 5
    observed = np.append(counts[ids][common], counts[ids][~common].sum())
    wanted = np.append(expected[common], expected[~common].sum())
    observed, wanted = observed[wanted > 0], wanted[wanted > 0]
    chi, freedom = float(((observed - wanted) ** 2 / wanted).sum()), len(wanted) - 1
    assert freedom >= 3
    assert abs(chi - freedom) < 5 * math.sqrt(2 * freedom), (chi, freedom)


# ---- what crosses the network ----


def test_payload_does_not_grow_with_the_vocabulary() -> None:
    """Plain rows: some 32 bytes a row, one gather a step, whatever the vocabulary; greedy the same."""
    for request in (params(temperature=0.0), params()):
        sizes = [play(2, [request] * 4, [torch.randn(4, v)])[1].gathers for v in (100, 10_000)]
        assert sizes[0] == sizes[1]
        assert sizes[0] == [8 + 4 * 32, 8]


def test_wide_rows_are_settled_by_further_small_gathers() -> None:
    """A flat row of 20,000 ids at top_p 0.5: the candidates show a hundredth of what is kept. More gathers follow, the
    id is the oracle's, and no rank ever sends more than a few kilobytes."""
    torch.manual_seed(3)
    row = torch.randn(1, 20_000) * 0.01
    used = []
    for seed in range(12):
        request = params(seed=seed, top_p=0.5)
        results, ranks = play(2, [request], [row])
        assert int(results[0].ids[0]) == draw(row[0].numpy(), sequence(0, request), [])[0]
        used.append(len(ranks.gathers) - 1)
        assert max(ranks.gathers) < 4096
    assert min(used) > 1
    assert max(used) > 3  # the best of all was not kept: the walk went on


def test_top_k_with_top_p_widens_until_the_kth_is_seen() -> None:
    """top_k 3,000 on a flat row, top_p 0.9 of its mass: candidates double past 1,024 until the total is known."""
    torch.manual_seed(3)
    row = torch.randn(1, 8_000) * 0.5
    request = params(seed=11, top_k=3_000, top_p=0.9)
    results, ranks = play(2, [request], [row])
    assert int(results[0].ids[0]) == draw(row[0].numpy(), sequence(0, request), [])[0]
    steps = ranks.gathers[:-1]
    assert len(steps) > 1
    assert all(after > before for before, after in pairwise(steps))


def test_narrow_rows_need_one_gather() -> None:
    torch.manual_seed(3)
    row = torch.randn(1, 20_000) * 4
    for request in (params(top_p=0.9), params(top_k=50), params(top_k=50, top_p=0.9), params(min_p=0.1)):
        assert len(play(2, [request], [row])[1].gathers) == 2


# ---- log-probabilities ----


@pytest.mark.parametrize("tp", [1, 4])
def test_logprobs_are_those_of_the_untouched_logits(tp: int) -> None:
    """Whatever penalties, temperature and filters do, in candidate rows and walked ones: log-softmax of the row as the
    model gave it, of the drawn id and of the likeliest (equals: lowest id first)."""
    torch.manual_seed(5)
    logits = torch.cat([torch.randn(4, 999) * 3, torch.randn(2, 999) * 0.01, (torch.randn(1, 999) * 2).round()])
    requests = [
        params(temperature=0.0, logprobs=3, repetition_penalty=1.5),
        params(temperature=0.3, logprobs=0),
        params(top_p=0.8, logprobs=20, logit_bias=((1, 8.0),)),
        params(top_k=4, logprobs=1),
        params(top_p=0.7, logprobs=2),
        params(seed=4),
        params(logprobs=5, min_tokens=4, stop_token_ids=(0, 1)),
    ]
    results, _ = play(tp, requests, [logits])
    exact = torch.log_softmax(logits.double(), 1).numpy()
    for row, (request, entry) in enumerate(zip(requests, results[0].logprobs, strict=True)):
        if request.logprobs is None:
            assert entry is None
            continue
        check(entry, int(results[0].ids[row]), exact[row], request.logprobs)


def check(entry: TokenLogprob | None, token: int, exact: np.ndarray[Any, Any], top: int) -> None:
    assert entry is not None
    assert entry.token == token
    assert entry.logprob == pytest.approx(exact[token], abs=1e-9)
    best = np.lexsort((np.arange(len(exact)), -exact))[:top]
    assert [i for i, _ in entry.top] == best.tolist()
    assert [p for _, p in entry.top] == pytest.approx(exact[best].tolist(), abs=1e-9)


def test_prompt_logprobs_in_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Scored in chunks of bounded memory: the same values, one gather a chunk; a NaN row yields NaN and harms nobody;
    a target outside the vocabulary is refused."""
    monkeypatch.setattr("laddertron.engine.sampling.logprobs.CHUNK_LOGITS", 4 * 203)
    torch.manual_seed(6)
    logits = torch.randn(10, 203)
    logits[7, 100] = torch.nan
    targets = torch.randint(0, 203, (10,))
    ranks = Ranks(4)

    def task(rank: int, gather: Gather) -> list[TokenLogprob]:
        sampler = make(203, 4, rank, gather, 1)
        with pytest.raises(ValueError, match="token id 203 is not in the vocabulary: ids are 0 to 202"):
            sampler.score(cut(logits, 4, rank)[:1], np.array([203]), 0)
        return sampler.score(cut(logits, 4, rank), targets.numpy(), 3)

    scored = ranks.run(task)[0]
    assert len(ranks.gathers) == 3
    exact = torch.log_softmax(logits.double(), 1).numpy()
    for row, entry in enumerate(scored):
        if row == 7:
            assert math.isnan(entry.logprob)
            assert entry.top == ()
        else:
            check(entry, int(targets[row]), exact[row], 3)


# ---- guards ----


@pytest.mark.parametrize("tp", [1, 2, 8])
@pytest.mark.parametrize("poison", [math.nan, math.inf, -math.inf])
def test_a_row_of_bad_logits_harms_only_itself(tp: int, poison: float) -> None:
    """One NaN or +inf in whichever shard, or a row that is -inf throughout, is reported for that row, also where a mask
    hides it; every other row draws what it would have drawn beside a healthy one."""
    torch.manual_seed(8)
    requests = [
        params(temperature=0.0),
        params(),
        params(top_p=0.9, logprobs=2),
        params(top_k=5, top_p=0.5),
        params(min_tokens=3, stop_token_ids=(60,), logprobs=0),
        params(top_p=0.99, temperature=50.0),
    ]
    healthy = [torch.randn(6, 64) for _ in range(2)]
    expected, _ = play(tp, requests, healthy)
    for row in range(6):
        sick = healthy[0].clone()
        sick[row, 60 if math.isnan(poison) or poison > 0 else slice(None)] = poison
        results, _ = play(tp, requests, [sick, healthy[1]])
        assert results[0].nonfinite.tolist() == [i == row for i in range(6)]
        assert results[0].ids[row] == 0
        assert results[0].logprobs[row] is None
        others = [i for i in range(6) if i != row]
        for step in (0, 1):
            assert (results[step].ids[others] == expected[step].ids[others]).all()
            assert [results[step].logprobs[i] for i in others] == [expected[step].logprobs[i] for i in others]


def wrong_digest(rank: int, gather: int) -> Callable[[int, int, Bytes], Bytes]:
    def tamper(who: int, number: int, payload: Bytes) -> Bytes:
        if who == rank and number == gather:
            payload[0] ^= 1
        return payload

    return tamper


def test_a_different_id_on_one_rank_is_a_desync_within_a_step() -> None:
    """1. Rank 2 of 4 draws another id in step 1 (its memory lies: it commits id + 1). 2. The gather of step 2 brings
    the digests together: every rank raises, naming rank 2 and step 1, before any id of step 2 exists; not the experts,
    which differ since step 2 alone, by the id that its row is of."""
    steps = [torch.randn(2, 64) for _ in range(4)]
    raised: dict[int, DesyncError] = {}
    drawn: dict[int, int] = {}

    def task(rank: int, gather: Gather) -> None:
        def lying(payload: Bytes) -> Bytes:
            return liar(gather(payload))

        sampler = make(64, 4, rank, gather, 2)
        for slot in (0, 1):
            sampler.admit(sequence(slot, params()))
        experts = [0]
        sampler.follow(lambda: experts[0].to_bytes(8, "little"), None, 1)
        for number, step in enumerate(steps):
            logits, experts[0] = cut(step, 4, rank), 7 * (rank == 2 and number >= 2)
            sampler.gather = lying if rank == 2 and number == 1 else gather
            try:
                sampler.sample(logits, [0, 1])
            except DesyncError as error:
                raised[rank] = error
                return
            drawn[rank] = number

    def liar(everyone: Bytes) -> Bytes:
        everyone = everyone.copy()
        everyone[:, 8:16] = np.frombuffer(np.float64(1e300).tobytes(), np.uint8)
        everyone[:, 8 + 24] ^= 1  # row 0: another id with a score nobody beats
        return everyone

    Ranks(4).run(task)
    assert sorted(raised) == [0, 1, 2, 3]
    assert {error.ranks for error in raised.values()} == {(2,)}
    assert {error.step for error in raised.values()} == {1}
    assert set(drawn.values()) == {1}
    assert "sampling step 1: rank 2 of 4 drew other ids than the majority" in str(raised[0])


def test_two_ranks_that_differ_are_both_named() -> None:
    steps = [torch.randn(1, 64)] * 2
    with pytest.raises(DesyncError, match="ranks 0, 1 disagree with one another") as caught:
        play(2, [params()], steps, tamper=wrong_digest(1, 1))
    assert caught.value.ranks == (0, 1)


def test_the_last_step_is_proved_by_the_empty_gather() -> None:
    """The ids of the only step differ on rank 0: `flush` raises."""
    with pytest.raises(DesyncError, match="step 0: rank 0 of 3") as caught:
        play(3, [params()], [torch.randn(1, 64)], tamper=wrong_digest(0, 1))
    assert caught.value.step == 0


def extremes() -> list[dict[str, Any]]:
    """Each number's least and greatest value that the API takes, and values beside them that no one would send."""
    found: list[dict[str, Any]] = []
    for name, param in PARAMS.items():
        if param.kind == "number":
            low, high = float(param.low), float(param.high)
            tiny = [1e-300, 5e-324] if low <= 0 else []
            found += [{name: v} for v in {low, high, *tiny, np.nextafter(low, high)} if v > low or not param.above_low]
    found += [{"logit_bias": tuple((i, sign * 100.0) for i in range(64))} for sign in (-1, 1)]
    return found


@pytest.mark.parametrize("scale", [1.0, 1e4])
def test_no_number_that_clients_may_send_makes_logits_nonfinite(scale: float) -> None:
    """Alone and two together, on logits up to some 10,000 times what models compute."""
    each = extremes()
    both = [{**a, **b} for a in each for b in each]
    torch.manual_seed(5)
    logits = scale * torch.randn(1, 64)

    def task(rank: int, gather: Gather) -> list[dict[str, Any]]:
        bad = []
        sampler = make(64, 1, rank, gather, 1)
        for fields in both:
            asked = SamplingParams(**{"max_tokens": 9, "seed": 1, **fields})
            sampler.admit(sequence(0, asked, output=(1, 2, 3)))
            drawn = sampler.sample(logits.clone(), [0])
            if drawn.nonfinite[0] or not 0 <= drawn.ids[0] < 64:
                bad.append(fields)
            sampler.release(0)
        return bad

    assert Ranks(1).run(task)[0] == []


def at_the_border(x: npt.NDArray[np.float32], rng: np.random.Generator) -> SamplingParams:
    """What draws the id at which the sum reaches top_p, if it is kept: rounding decides."""
    order = np.lexsort((np.arange(len(x)), -x))[: rng.integers(40, 60) + 1]
    weight = np.exp(x.astype(np.float64) - x.max())
    asked = (params(seed=seed, top_p=float(weight[order[:-1]].sum() / weight.sum()), logprobs=0) for seed in count())
    return next(p for p in asked if (x[order] + noise(p, 0, 0, order)).argmax() == len(order) - 1)


@pytest.mark.parametrize("without", [(), ("laddertron.engine.sampling._noise",)])
def test_in_sixteen_shares_every_size_reports_the_same_bits(
    run_seed: int, without: tuple[str, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Drawn ids, their log-probabilities, those of prompts and the borders of top_p and min_p, by C and by torch: one
    rank against 2, 4, 8 and 16. Of the rows some are masked almost whole, one is flat, one has a NaN, and the last ones
    draw the id at top_p's border."""
    load = native.load
    monkeypatch.setattr(native, "load", lambda name: None if name in without else load(name))
    rng = np.random.default_rng(run_seed)
    vocab, rows, steps = 1009, 18, 2
    logits = torch.from_numpy(rng.standard_normal((steps, rows, vocab)).astype(np.float32) * 3)
    logits[:, 1], logits[1:, 2, 700] = 0.0, torch.nan
    likely = rng.permutation(vocab)[:100]
    logits[:, 12:, likely] = logits[:, 12:, likely] / 30 + 12
    filters: tuple[dict[str, Any], ...]
    filters = ({}, {"top_p": 0.99}, {"top_p": 0.5}, {"min_p": 1e-3}, {"top_p": 0.9, "top_k": 700}, {"top_p": 0.999})
    asked = [params(seed=row, logprobs=row % 5, **filters[row % 6]) for row in range(12)]
    asked[7] = replace(asked[7], allowed_token_ids=(3, vocab - 1))
    asked += [at_the_border(x, rng) for x in logits[0, 12:].numpy()]

    def answers(tp: int) -> list[Any]:
        def task(rank: int, gather: Gather) -> list[Any]:
            sampler = make(vocab, tp, rank, gather, rows, shares=16 // tp)
            for row, one in enumerate(asked):
                sampler.admit(sequence(row, one))
            drawn = [sampler.sample(cut(step, tp, rank), range(rows)) for step in logits]
            scores = sampler.score(cut(logits[0], tp, rank), np.arange(rows) * 40, 3)
            return [[(step.ids.tolist(), step.logprobs, step.nonfinite.tolist()) for step in drawn], scores]

        found = Ranks(tp).run(task)
        assert all(other == found[0] for other in found)
        return found[0]

    alone = answers(1)
    assert [sum(bad) for _, _, bad in alone[0]] == [0, 1]
    for tp in (2, 4, 8, 16):
        assert answers(tp) == alone
