"""Service level objectives: what is read, and what is kept."""

from __future__ import annotations

from math import inf, nan

import pytest
from laddertron.tools.bench.slo import NAMED, Slo, read_slo


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
