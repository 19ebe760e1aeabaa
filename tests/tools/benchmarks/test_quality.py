"""tools/benchmarks/quality.py resumes."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

sys.path.insert(0, str(Path(__file__).resolve().parents[3] / "tools" / "benchmarks"))
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
