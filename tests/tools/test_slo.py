"""Service level objectives: what is read, what is kept, and the rates that a plan finds, against sums done by hand."""

from __future__ import annotations

import json
from dataclasses import replace
from math import inf, nan
from typing import Any

import pytest
from click.testing import CliRunner
from laddertron.launchers.cli.__main__ import group
from laddertron.tools.plan.estimate import make_plan
from laddertron.tools.plan.fleet_simulator import Demand, Replica, simulate_fleet
from laddertron.tools.plan.layouts import Work
from laddertron.tools.plan.plan_source import Asked, from_names
from laddertron.tools.plan.rates import held_rates
from laddertron.tools.slo import NAMED, Slo, read_slo
from laddertron.topology.hardware.presets import preset


def test_limits_are_read() -> None:
    assert read_slo("ttft=6s,tpot=175ms") == Slo(6.0, 0.175)
    assert read_slo("tpot=80ms") == Slo(inf, 0.08)
    assert [read_slo(name) for name in NAMED] == [Slo(6.0, 0.175), Slo(4.5, 0.08)]


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("ttft=6s,ttft=7s", "named twice"),
        ("ttft=6", "expected ttft=6s"),
        ("e2e=6s", "expected ttft=6s"),
        ("ttft=0s", "expected ttft=6s"),
        ("", "expected ttft=6s"),
        ("mlperf", "mlperf-405b-server"),
    ],
)
def test_bad_limits_are_refused(text: str, said: str) -> None:
    with pytest.raises(ValueError, match=said):
        read_slo(text)


def test_percentiles_that_are_not_there_keep_nothing() -> None:
    slo = Slo(1.0, 0.1)
    assert slo.holds(1.0, 0.1)
    assert not slo.holds(1.001, 0.1)
    assert not slo.holds(nan, nan)
    assert slo.verdict(0.5, 0.2) == "ttft 1 s, tpot 100 ms: missed (99th percentiles 500 ms and 200 ms)"


def test_the_simulator_times_first_and_later_tokens() -> None:
    """Two at once to one replica: prompts of 3 s one after the other, then a step a second; a pipeline adds 2 s."""
    replica = Replica([(1, 1.0), (2, 1.0)], 3.0, 2)
    outcome = simulate_fleet(replica, 1, Demand(2, 1))
    assert outcome.first_s == (6.0, 6.0)
    assert simulate_fleet(replace(replica, later_s=2.0), 1, Demand(2, 1)).first_s == (8.0, 8.0)
    lone = simulate_fleet(replica, 1, Demand(1, 9))
    assert lone.each_s[1] == pytest.approx((lone.took_s[1] - lone.first_s[1]) / (lone.tokens - 1))


def plan(slo: str, *more: str) -> Any:
    return CliRunner().invoke(group, ["plan", "--model", "llama-3.1-70b", "--nodes", "1x8xH100", "--slo", slo, *more])


def test_a_plans_rate_holds_and_a_higher_one_does_not() -> None:
    work = Work(1024, 128)
    layouts = make_plan(from_names("llama-3.1-70b", Asked(preset("1x8xH100"), work))).layouts[:3]
    slo = Slo(2.0, 0.05)
    held = held_rates(layouts, slo, work)
    assert [x.per_s for x in held] == sorted((x.per_s for x in held), reverse=True)
    assert slo.holds(held[0].outcome.first_s[1], held[0].outcome.each_s[1])
    assert held_rates(layouts, Slo(4.0, 0.1), work)[0].per_s > held[0].per_s > 0
    assert held[0].per_s * work.output < max(s.output_per_s for s in held[0].layout.speeds)


def test_plan_names_limits_that_nothing_holds() -> None:
    refused = plan("ttft=1ms,tpot=1ms")
    assert refused.exit_code != 0
    assert "no layout of these devices holds it at any rate" in str(refused.exception or refused.output)
    lone = CliRunner().invoke(group, ["plan", "--model", "llama-3.1-8b", "--nodes", "1x1xH100", "--slo", "ttft=1s"])
    assert lone.exit_code != 0
    found = json.loads(plan("mlperf-405b-server", "--json").output)["held_rates"]
    assert found[0]["per_s"] > 0
