"""The scheduler on the law's clock: what drafts cost and gain, without ranks."""

from __future__ import annotations

import sys
from pathlib import Path
from random import Random

import pytest

sys.path.insert(0, str(Path(__file__).resolve().parents[3] / "tools" / "benchmarks" / "cross_node"))

import draft_law
from draft_law import LAYOUTS, best_rate, round_s, simulate, tokens_a_round
from laddertron.engine.schedule.speculation import speculation_rule

STAGED = LAYOUTS[1]


@pytest.mark.draws
@pytest.mark.parametrize("layout", LAYOUTS, ids=lambda layout: layout.name)
@pytest.mark.parametrize("sequences", [1, 8])
def test_auto_is_not_slower_than_the_better_of_on_and_off(
    layout: draft_law.Layout, sequences: int, run_seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """At a random delay and acceptance, once it has learned; the trials of the slower kind are in it."""
    monkeypatch.setattr(draft_law, "TOKENS", 900)
    dice = Random(run_seed)
    delay_s, accepted = dice.choice(draft_law.DELAYS_S), dice.choice(draft_law.ACCEPTED)
    counts = {
        name: simulate(layout, rule, sequences, accepted, delay_s, run_seed)
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
        assert counts.rate == pytest.approx(best_rate(STAGED, sequences, 0.0, 0.5e-3)[0], rel=0.02)
        assert (counts.rounds, counts.rows) == pytest.approx((1, 1))
