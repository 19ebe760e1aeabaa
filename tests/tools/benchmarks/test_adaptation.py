"""tools/benchmarks/adaptation.py: the runs that are missing, and the table of those that are there."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from laddertron.models.reference import Reference

sys.path.insert(0, str(Path(__file__).resolve().parents[3] / "tools" / "benchmarks"))
import adaptation
import quality


def test_runs_go_on_where_they_were_cut_off(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each run is kept as soon as it is done; another budget starts anew; a report runs nothing."""
    path, done = tmp_path / "results" / "found.json", list[str]()

    def prepare(tokens: int) -> Callable[[str], int]:
        def run(key: str) -> int:
            done.append(key)
            if done == ["a", "b", "c"]:
                raise KeyboardInterrupt
            return tokens

        return run

    def found(*argv: str) -> dict[str, int]:
        monkeypatch.setattr(sys, "argv", ["x", *argv])
        return dict(quality.go_on("x", path, 7, ["a", "b", "c"], prepare, draw)["runs"])

    def draw(axes: Any, results: dict[str, Any]) -> None:
        axes.plot(sorted(results["runs"].values()))

    assert found("--report") == {}
    with pytest.raises(KeyboardInterrupt):
        found()
    assert found() == {"a": 7, "b": 7, "c": 7}
    assert done == ["a", "b", "c", "c"]
    assert found("--tokens", "8", "--only", "b") == found("--report", "--plot", str(tmp_path / "a.svg")) == {"b": 8}
    assert (tmp_path / "a.svg").stat().st_size > 1000


def test_sizes_are_what_they_are_called() -> None:
    found = {
        size: Reference(quality.model("standard", *shape)).config.num_parameters
        for size, shape in adaptation.SIZES.items()
    }
    assert 0.5e6 < found["demo"] < 1.5e6
    assert 3e6 < found["4M"] < 5e6
    assert 8e6 < found["10M"] < 12e6


def test_table_has_means_and_the_last_points_spread() -> None:
    curve = [50.0, 40.0, 30.0, 25.0, 22.0, 20.0]
    results = {
        "runs": {"demo/all layers/hard/0": curve, "demo/all layers/hard/1": [value + 2 for value in curve]},
    }
    assert adaptation.size_table(results, "demo")[2:] == [
        "| all layers, hard | 2 | 51.00 | 41.00 | 31.00 | 26.00 | 23.00 | 21.00 ± 1.41 |"
    ]
    assert adaptation.size_table({"runs": {}}, "demo") == []
