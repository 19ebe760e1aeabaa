"""The scheduler on the law's clock: what drafts cost and gain, without ranks."""

from __future__ import annotations

import sys
from pathlib import Path
from random import Random

import pytest

sys.path.insert(0, str(Path(__file__).resolve().parents[3] / "tools" / "benchmarks" / "cross_node"))

import draft_law
from draft_law import LAYOUTS, Layout, simulate
from laddertron.engine.schedule.speculation import MOST, speculation_rule

STAGED = LAYOUTS[1]


def tokens_a_round(accepted: float, drafts: int) -> float:
    """Of one sequence."""
    return sum(accepted**j for j in range(drafts + 1))


def round_s(layout: Layout, sequences: int, drafts: int, delay_s: float) -> float:
    """Seconds of a round of all sequences: alone in the stages, or as two micro-batches, which fill them in turns."""
    micro = min(sequences, layout.stages)
    one = layout.compute_s(-(-sequences // micro) * (1 + drafts))
    return max(layout.stages * one + layout.crossings * delay_s, micro * one)


def best_rate(layout: Layout, sequences: int, accepted: float, delay_s: float) -> float:
    """The law's most tokens a second with any number of drafts."""
    drafts = range(MOST + 1)
    return max(sequences * tokens_a_round(accepted, k) / round_s(layout, sequences, k, delay_s) for k in drafts)


@pytest.mark.draws
@pytest.mark.parametrize("layout", LAYOUTS, ids=lambda layout: layout.name)
@pytest.mark.parametrize("sequences", [1, 8])
@pytest.mark.parametrize("answer", [50, 900])
def test_auto_is_not_slower_than_the_better_of_on_and_off(
    layout: Layout, sequences: int, answer: int, run_seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """At a random delay and acceptance, once it has learned; the trials of the slower kind are in it. Short answers end
    before a sequence has learned its acceptance, which those after it know."""
    monkeypatch.setattr(draft_law, "TOKENS", 900)
    dice = Random(run_seed)
    delay_s, accepted = dice.choice(draft_law.DELAYS_S), dice.choice(draft_law.ACCEPTED)
    counts = {
        name: simulate(layout, rule, sequences, accepted, delay_s, run_seed, answer)
        for name, rule in (("off", None), ("on", speculation_rule("ngram")), ("auto", speculation_rule("auto")))
    }
    better = max(counts["off"].rate, counts["on"].rate)
    assert counts["auto"].rate > 0.85 * better, (delay_s, accepted, counts)


def test_a_staged_round_carries_the_laws_tokens() -> None:
    """All drafts, two of three accepted: tokens a round, rows and crossings are the law's, whatever the link takes."""
    drafts = 8
    counts = simulate(STAGED, speculation_rule("ngram"), 1, 2 / 3, 2e-3, 1)
    tokens = tokens_a_round(2 / 3, drafts)
    assert counts.rounds == pytest.approx(1 / tokens, rel=0.15)
    assert counts.rows == pytest.approx((1 + drafts) / tokens, rel=0.15)
    assert counts.crossings == 2 * counts.rounds
    assert counts.rate == pytest.approx(tokens / round_s(STAGED, 1, drafts, 2e-3), rel=0.15)


def test_without_drafts_micro_batches_fill_the_stages() -> None:
    for sequences in (1, 8, 32):
        counts = simulate(STAGED, None, sequences, 0.0, 0.5e-3)
        assert counts.rate == pytest.approx(best_rate(STAGED, sequences, 0.0, 0.5e-3), rel=0.02)
        assert (counts.rounds, counts.rows) == pytest.approx((1, 1))
