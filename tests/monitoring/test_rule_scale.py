"""The rules that the live test runs are the shipped ones but for their durations."""

from __future__ import annotations

import re
import shutil
import subprocess
from pathlib import Path

import pytest
import yaml
from rule_scale import SECONDS, divided, scaled, scaled_expression, seconds

SHIPPED = (Path(__file__).resolve().parents[2] / "configs/monitoring/alerts.yml").read_text()


def test_durations_are_divided_and_bounded_below() -> None:
    assert [seconds(text) for text in ("15s", "5m", "1h", "1d", "250ms")] == [15, 300, 3600, 86400, 0.25]
    assert [divided(text, 30, 5) for text in ("1m", "5m", "1d")] == ["5s", "10s", "2880s"]
    assert divided("10s", 3, 1) == "4s"
    with pytest.raises(ValueError, match="no duration"):
        seconds("1h30m")
    was = 'rate(x_total{le="5m"}[5m]) > 0.5 * avg_over_time(y:rate5m[1d] offset 10m)'
    now = 'rate(x_total{le="5m"}[10s]) > 0.5 * avg_over_time(y:rate5m[2880s] offset 20s)'
    assert scaled_expression(was, 30) == now


def test_nothing_but_durations_changes(tmp_path: Path) -> None:
    """With every duration blanked out the two files are the same, but for the named exceptions; promtool takes it."""
    text = scaled(SHIPPED, 30)
    shipped, fast = yaml.safe_load(SHIPPED), yaml.safe_load(text)
    blank = re.compile(r"\[\w+\]|offset \w+")
    for before, after in zip(shipped["groups"], fast["groups"], strict=True):
        for was, now in zip(before["rules"], after["rules"], strict=True):
            old, new = blank.sub("", was.pop("expr")).strip(), blank.sub("", now.pop("expr")).strip()
            if (name := was.get("alert")) in SECONDS:
                old = re.sub(*SECONDS[name], old)
            assert new == old
            assert ("for" in was) == ("for" in now)
            if "for" in was:
                assert seconds(now.pop("for")) == max(1, -(-seconds(was.pop("for")) // 30))
            assert now == was
    if (tool := shutil.which("promtool")) is not None:
        (tmp_path / "fast.yml").write_text(text)
        done = subprocess.run([tool, "check", "rules", str(tmp_path / "fast.yml")], capture_output=True, text=True)
        assert done.returncode == 0, done.stdout + done.stderr
