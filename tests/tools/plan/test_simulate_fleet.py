"""Fleets behind one queue: against sums done by hand, with and without failures."""

from __future__ import annotations

from dataclasses import replace

import pytest
from laddertron.tools.plan.fleet_simulator import Demand, Faults, Replica, simulate_fleet
from laddertron.tools.plan.simulations import FleetAsked, fleet

ONE = Replica([(1, 0.5)], prompt_s=2.0, slots=1)


def test_one_slot_serves_one_after_another() -> None:
    """Every request takes its prompt and its tokens; the last one's answer ends the run."""
    outcome = simulate_fleet(ONE, 1, Demand(10, 4))
    assert outcome.requests == 10
    assert outcome.span_s == pytest.approx(10 * 2.0 + 0.5 * outcome.tokens)
    assert outcome.busy == pytest.approx(1.0)
    assert outcome.took_s[1] == pytest.approx(outcome.span_s)
    assert outcome.tokens_per_s == pytest.approx(outcome.tokens / outcome.span_s)


def test_requests_go_to_the_least_loaded() -> None:
    """Ten requests over ten replicas of many slots: each takes one, and nobody waits."""
    outcome = simulate_fleet(replace(ONE, slots=8), 10, Demand(10, 100))
    assert outcome.wait_s == (0.0, 0.0)
    assert outcome.span_s <= 2.0 + 0.5 * 150 + 1e-9


def test_a_prompt_holds_up_those_that_run() -> None:
    """Four admitted at once to one replica: four prompts first, then tokens side by side."""
    outcome = simulate_fleet(Replica([(1, 1.0), (4, 1.0)], 3.0, 4), 1, Demand(4, 1))
    assert outcome.tokens == 4
    assert outcome.span_s == pytest.approx(4 * 3.0 + 1.0)


def test_steps_are_read_off_between_counts() -> None:
    """Straight lines between what was computed, the last value beyond."""
    replica = Replica([(1, 1.0), (5, 3.0)], 0.0, 8)
    assert [replica.step(n) for n in (1, 3, 5, 8)] == pytest.approx([1.0, 2.0, 3.0, 3.0])
    with pytest.raises(ValueError, match="rising"):
        Replica([(5, 1.0), (1, 1.0)], 0.0, 8)


def test_twice_the_replicas_finish_a_backlog_in_half_the_time() -> None:
    """Up to the last wave, which has fewer than there are slots."""
    replica = Replica([(1, 0.01), (8, 0.02)], 0.1, 8)
    spans = [simulate_fleet(replica, n, Demand(2000, 100)).span_s for n in (5, 10)]
    assert spans[0] / spans[1] == pytest.approx(2.0, rel=0.1)


def test_a_slow_trickle_leaves_the_fleet_idle() -> None:
    """Far fewer arrivals than capacity: the run is as long as the arrivals, and nothing queues."""
    outcome = simulate_fleet(Replica([(1, 0.01)], 0.0, 4), 10, Demand(200, 10, per_s=1.0))
    assert outcome.busy < 0.05
    assert outcome.wait_s == (0.0, 0.0)
    assert outcome.span_s == pytest.approx(200, rel=0.3)


def test_what_a_lost_replica_had_is_done_again() -> None:
    """Failures cost time and tokens, and no request: all are answered, the fleet only later."""
    replica = Replica([(1, 0.05), (16, 0.1)], 0.2, 16)
    whole = simulate_fleet(replica, 8, Demand(600, 200))
    broken = simulate_fleet(replica, 8, Demand(600, 200), Faults(mtbf_s=60.0, relaunch_s=10.0))
    assert broken.requests == whole.requests == 600
    assert broken.tokens == whole.tokens
    assert broken.losses > 0
    assert broken.lost_tokens > 0
    assert broken.span_s > whole.span_s


def test_the_same_seed_gives_the_same_fleet() -> None:
    """And another one another."""
    replica = Replica([(1, 0.05), (16, 0.1)], 0.2, 16)
    runs = [simulate_fleet(replica, 8, Demand(300, 200, 5.0, seed), Faults(50.0, 5.0)) for seed in (1, 1, 2)]
    assert runs[0] == runs[1] != runs[2]


def test_nobody_is_refused() -> None:
    """A fleet has a replica."""
    with pytest.raises(ValueError, match="replicas=0"):
        simulate_fleet(ONE, 0, Demand(1, 1))


def test_a_thousand_nodes_take_replicas_of_as_few_as_fit() -> None:
    """405B in bf16 needs two nodes of H100: 500 replicas; in fp8 one: 1000."""
    asked = FleetAsked("llama-3.1-405b", "1000x8xH100", 2000)
    assert fleet(asked)[0].replicas == 500
    assert fleet(replace(asked, fp8=True))[0].replicas == 1000
    with pytest.raises(ValueError, match="16x8xH100"):
        fleet(replace(asked, spec="8xH100"))
