"""tools/benchmarks/throughput.py on a few requests: each comparison writes a line a repeat and its median."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = Path(__file__).resolve().parents[3] / "tools" / "benchmarks" / "throughput.py"


@pytest.mark.slow
@pytest.mark.parametrize(("what", "figure"), [("run", "median_share"), ("daemon", "median_ratio")])
def test_a_few_requests_are_compared(what: str, figure: str) -> None:
    words = ["--requests", "4", "--prompt", "16", "--generate", "8", "--seats", "2", "--repeats", "1"]
    done = subprocess.run([sys.executable, str(SCRIPT), what, *words], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    lines = [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]
    assert lines[0]["repeat"] == 1
    assert lines[-1][figure] > 0
