"""The comparison with measured steps: right on steps made up by known constants, and able to fail."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest

sys.path.insert(0, str(Path(__file__).resolve().parents[3] / "tools" / "benchmarks"))

import simulate_check as check

MADE_WITH = check.Constants(0.25, 0.2, 0.1)


def made_up(factor: float = 1.0) -> list[dict[str, Any]]:
    """Lines as cross_node.py prints them, from the simulator itself; `factor` spoils ladder's at 1 ms."""
    lines = []
    for batch, silent in ((1, 0.02), (8, 0.03)):
        for delay in (0.0, 1e-4, 5e-4, 1e-3, 2e-3):
            rest, reduce = 8e-5, 8e-5 + delay
            common = {
                "model": "m",
                "delay_s": delay,
                "batch": batch,
                "all_reduce_s": reduce,
                "sub_blocks": 32,
                "run": 1,
            }
            lines.append({**common, "wiring": check.SILENT, "step_s": silent})
            lines.append({**common, "wiring": "carried", "step_s": silent})
            for wiring in ("standard", "parallel", "ladder"):
                case = check.Case("m", delay, batch, wiring, 1.0, silent, reduce, rest, 32, 0.65)
                spoilt = factor if wiring == "ladder" and delay == 1e-3 else 1.0
                apart = [0.35, 0.65] if wiring == "standard" else None
                lines.append(
                    {
                        **common,
                        "wiring": wiring,
                        "sub_blocks_s": apart,
                        "step_s": check.predicted(case, MADE_WITH) * spoilt,
                    }
                )
    return lines


def test_constants_are_found_again() -> None:
    """Fitted on every other delay, the made-up constants come out, and the other delays are met."""
    listed = check.cases(made_up())
    known, tested = check.halves(listed)
    assert {c.delay_s for c in known}.isdisjoint({c.delay_s for c in tested})
    assert check.fit(known) == MADE_WITH
    lines, missed = check.report(listed)
    assert missed == 0
    assert "worst 0.0%" in lines[-1]


@pytest.mark.parametrize(("factor", "status"), [(1.0, 0), (1.3, 1)])
def test_a_step_that_is_missed_ends_with_one(factor: float, status: int, tmp_path: Path) -> None:
    results = tmp_path / "results.json"
    results.write_text(json.dumps({"wirings": {"lines": made_up(factor)}, "reduce": {"lines": [{"op": "x"}]}}))
    assert check.main([str(results)]) == status


def test_nothing_to_compare_says_what_to_run(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A missing file, and one without steps."""
    assert check.main([str(tmp_path / "none.json")]) == 2
    assert "run tools/benchmarks/cross_node/cross_node.py first" in capsys.readouterr().err
    empty = tmp_path / "empty.json"
    empty.write_text("")
    assert check.main([str(empty)]) == 2


def test_the_share_of_the_larger_sub_block() -> None:
    """Of what a standard step showed; a half where a step was too short to show any."""
    assert check.mlp_share([1e-3, 3e-3]) == 0.75
    assert check.mlp_share([0.0, 0.0]) == 0.5
