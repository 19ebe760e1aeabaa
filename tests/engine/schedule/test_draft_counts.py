"""How many drafts a decode gets: the price of a row from made-up steps, and a sequence's own hits. What becomes of the
schedule, tests/engine/schedule/test_scheduler.py plays by dice."""

from __future__ import annotations

import random
from math import inf

import pytest
from fake_model import VOCAB, FakeRunner, answer
from laddertron.engine.request import Request, SamplingParams
from laddertron.engine.schedule.scheduler import Scheduler, SchedulerLimits
from laddertron.engine.schedule.speculation import FIRST_ACCEPTANCE, MOST, Speculation, SpeculationRule, StepPrice


def measured(run_seed: int, fixed: float, row: float, sequences: int) -> Speculation:
    """Having seen steps of `fixed` + `row` seconds a row."""
    speculation, dice = Speculation(SpeculationRule()), random.Random(run_seed)
    for _ in range(200):
        rows = sequences + dice.randrange(1 + 4 * sequences)
        speculation.price.observe(rows, (fixed + row * rows) * dice.uniform(0.97, 1.03))
    return speculation


@pytest.mark.parametrize("sequences", [1, 8])
@pytest.mark.parametrize("acceptance", [0.3, 0.7, 0.95])
@pytest.mark.parametrize(("fixed", "row"), [(40.0, 0.2), (20.0, 1.0), (5.0, 2.0), (0.0, 1.0)])
def test_as_many_drafts_as_give_the_most_tokens_a_second(
    fixed: float, row: float, acceptance: float, sequences: int, run_seed: int
) -> None:
    """Against brute force over all k, with every sequence alike: never slower than without drafts by more than what is
    measured wrong, and where drafts pay at all, within a tenth of the best."""
    speculation = measured(run_seed, fixed, row, sequences)
    drafts = speculation.wanted(acceptance, speculation.threshold(sequences))

    def rate(k: int) -> float:
        tokens = sum(acceptance**j for j in range(k + 1))
        return sequences * tokens / (fixed + row * sequences * (k + 1))

    best = max(map(rate, range(MOST + 1)))
    assert rate(drafts) >= 0.98 * rate(0)
    assert rate(drafts) >= 0.85 * best, (drafts, [rate(k) for k in range(MOST + 1)])


@pytest.mark.parametrize("sequences", [1, 8, 32])
@pytest.mark.parametrize("truth", [0.0, 0.3, 0.7, 0.95])
@pytest.mark.parametrize("panel", [8, 1000])
def test_a_step_that_no_line_fits_is_found_out(panel: int, truth: float, sequences: int, run_seed: int) -> None:
    """Rows beyond a panel begin another pass: drafts that do not pay there end soon, and those that do go on. Against
    steps without drafts, over 4,000 steps on a clock of its own."""
    speculation, dice = Speculation(SpeculationRule()), random.Random(run_seed)

    def seconds(rows: int) -> float:
        return 10.0 * -(-rows // panel) + 0.05 * rows

    acceptance, tokens, clock = [FIRST_ACCEPTANCE] * sequences, 0, 0.0
    for _ in range(4000):
        threshold, drafts, came = speculation.threshold(sequences), 0, sequences
        for i in range(sequences):
            wanted, right = speculation.wanted(acceptance[i], threshold), 0
            while right < wanted and dice.random() < truth:
                right += 1
            acceptance[i] = speculation.observe_drafts(acceptance[i], wanted, right)
            drafts, came = drafts + wanted, came + right
        took = seconds(sequences + drafts) * dice.uniform(0.97, 1.03)
        speculation.observe_step(sequences, drafts, came, took)
        tokens, clock = tokens + came, clock + took
    plain = sequences / seconds(sequences)
    assert tokens / clock > 0.95 * plain
    if panel == 1000 and truth >= 0.7:
        assert tokens / clock > 1.5 * plain


@pytest.mark.parametrize("slower", [False, True])
def test_a_stall_is_no_measure_and_a_slower_link_is(slower: bool) -> None:
    """Of steps with drafts that lose by a tenth: one without them that took a hundred times as long changes nothing;
    where all without drafts take so long from then on, drafts win."""
    speculation = Speculation(SpeculationRule())
    for drafts, seconds in ((8, 1.1), (0, 1.0)) * 3:
        speculation.observe_step(8, drafts, 8, seconds)
    assert speculation.threshold(8) == inf
    for n in range(20):
        speculation.observe_step(8, 0, 8, 100.0 if slower or n == 0 else 1.0)
        assert (speculation.threshold(8) < inf) == (slower and n > 0)


def test_drafts_that_are_found_now_and_then_are_measured() -> None:
    """Each step with drafts stands between steps without and takes five times as long: that is its price, no stall."""
    speculation = Speculation(SpeculationRule())
    for drafts, tokens, seconds in ((0, 1, 1.0), (8, 2, 5.0)) * 4:
        speculation.observe_step(1, drafts, tokens, seconds)
    assert speculation.threshold(1) == inf


def test_one_unlucky_step_does_not_decide() -> None:
    """Of the first three with drafts one gave nothing: they win all the same, at the mean."""
    speculation = Speculation(SpeculationRule())
    for drafts, tokens in ((24, 8), (24, 22), (24, 24), (0, 8), (0, 8), (0, 8)):
        assert (speculation.threshold(8) < inf) == (drafts > 0)
        speculation.observe_step(8, drafts, tokens, 1.6 if drafts else 1.0)
    assert speculation.threshold(8) < inf


def test_tokens_that_differ_are_averaged_before_they_are_compared() -> None:
    """Nine tokens or one in turns: 2.5 seconds for five of them win against 1.0 for one, although the mean of each
    step's seconds a token is 1.4."""
    speculation = Speculation(SpeculationRule())
    for n in range(40):
        speculation.observe_step(1, 8, 9 if n % 2 else 1, 2.5)
        speculation.observe_step(1, 0, 1, 1.0)
    assert speculation.threshold(1) < inf


def test_a_new_sequence_begins_where_the_others_are(run_seed: int) -> None:
    """None of their drafts was right: it starts at nearly none. Some are right again: it starts near those."""
    speculation, dice = Speculation(SpeculationRule()), random.Random(run_seed)
    assert speculation.first == FIRST_ACCEPTANCE
    for _ in range(200):
        speculation.observe_drafts(0.5, 3, 0)
    assert speculation.first < 0.02
    found = []
    for n in range(600):
        speculation.observe_drafts(0.5, 1, int(dice.random() < 0.6))
        found += [speculation.first] * (n > 200)
    assert sum(found) / len(found) == pytest.approx(0.6, abs=0.1)


def test_without_a_price_every_draft_is_taken() -> None:
    speculation = Speculation(SpeculationRule(priced=False))
    assert speculation.wanted(0.01, speculation.threshold(64)) == MOST


def test_steps_of_one_size_say_nothing_of_a_row() -> None:
    price = StepPrice()
    first = price.row_share(8)
    for _ in range(50):
        price.observe(8, 0.04)
    assert price.row_share(8) == first


def test_a_sequence_gives_drafts_up_and_tries_again(run_seed: int) -> None:
    """Ten wrong drafts end it where a row costs something; steps later there is another one."""
    speculation = measured(run_seed, 20.0, 1.0, 8)
    threshold, acceptance = speculation.threshold(8), FIRST_ACCEPTANCE
    assert speculation.wanted(acceptance, threshold) > 0
    for _ in range(20):
        acceptance = speculation.observe_drafts(acceptance, 4, 0)
    assert speculation.wanted(acceptance, threshold) == 0
    assert speculation.counts == (20, 80, 0)
    steps = 0
    while not speculation.wanted(acceptance, threshold):
        acceptance = speculation.observe_drafts(acceptance, 0, 0)
        steps += 1
    assert 10 < steps < 500
    acceptance = speculation.observe_drafts(acceptance, 2, 2)
    assert speculation.counts == (21, 82, 2)


@pytest.mark.parametrize("truth", [0.2, 0.7, 1.0])
def test_acceptance_is_learned_draft_by_draft(truth: float, run_seed: int) -> None:
    """A wrong draft hides those behind it: they are no trials."""
    speculation, dice, acceptance, found = Speculation(SpeculationRule()), random.Random(run_seed), 0.5, []
    for _ in range(2000):
        right = 0
        while right < 5 and dice.random() < truth:
            right += 1
        acceptance = speculation.observe_drafts(acceptance, 5, right)
        found.append(acceptance)
    assert sum(found[100:]) / len(found[100:]) == pytest.approx(truth, abs=0.1)


def test_usage_counts_the_tokens_of_the_answer_alone(run_seed: int) -> None:
    """Ends by stop ids and by length amid drafts: what is reported, what usage is made of and the counter are the
    answer's tokens; wrong drafts and what was drawn behind an end are in none of them."""
    dice = random.Random(run_seed)
    limits = SchedulerLimits(8, 256, 200, 4, 400, speculation=SpeculationRule(priced=False))
    scheduler, runner = Scheduler(limits), FakeRunner(8, 256, 4, 400, max_model_len=200)
    requests = [
        Request(
            f"r{n}",
            tuple(dice.randrange(VOCAB) for _ in range(dice.randrange(1, 20))),
            SamplingParams(max_tokens=dice.randrange(1, 60), seed=n, stop_token_ids=(dice.randrange(VOCAB),)),
        )
        for n in range(40)
    ]
    for request in requests:
        scheduler.add(request, 0.0)
    told, now, ahead = dict.fromkeys((r.request_id for r in requests), 0), 0.0, scheduler.schedule(0.0)
    while ahead is not None:
        batch, now = ahead, now + 1.0
        result = runner.run(batch)
        ahead = scheduler.schedule(now)
        for event in scheduler.commit(batch, result, now):
            told[event.request_id] += len(event.tokens)
        ahead = ahead or scheduler.schedule(now)
    counted = scheduler.snapshot()
    assert 0 < counted["spec_decode_num_accepted_tokens_total"] < counted["spec_decode_num_draft_tokens_total"]
    assert counted["surplus_tokens_total"] > 0
    assert told == {r.request_id: len(answer(r, 0, 200).tokens) for r in requests}
    assert len(scheduler.take_ended()) == len(told)
    assert scheduler.counters.generation_tokens == sum(told.values())
