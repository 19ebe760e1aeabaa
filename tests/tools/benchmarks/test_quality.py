"""tools/benchmarks/quality.py resumes."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

sys.path.insert(0, str(Path(__file__).resolve().parents[3] / "tools" / "benchmarks"))
import quality


def test_runs_go_on_where_they_were_cut_off(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Each run is kept as soon as it is done; another budget discards them; a report runs nothing."""
    path, done = tmp_path / "results" / "found.json", list[str]()

    def prepare(tokens: int) -> Callable[[str], float]:
        def run(key: str) -> float:
            done.append(key)
            if len(done) == 3:
                raise KeyboardInterrupt
            return tokens / 2

        return run

    monkeypatch.setattr(quality, "prepare", prepare)

    def main(*words: str) -> dict[str, Any]:
        monkeypatch.setattr(sys, "argv", ["quality.py", *words])
        quality.main(path)
        return dict(json.loads(path.read_text())["runs"]) if path.exists() else {}

    keys = [f"ladder/{seed}" for seed in quality.SEEDS]
    words = ("--only", "ladder", "--tokens", "40")
    assert main("--report") == {}
    with pytest.raises(KeyboardInterrupt):
        main(*words)
    assert main(*words) == dict.fromkeys(keys, 20.0)
    assert done == [*keys, keys[2]]
    assert main("--only", "ladder/1", "--tokens", "8") == main("--report")
    assert main("--report") == {"ladder/1": 4.0}
    assert "| ladder |  | 4.00 |  | 4.00 |  |" in capsys.readouterr().out
