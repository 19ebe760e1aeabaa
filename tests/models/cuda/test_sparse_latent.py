"""Sparse attention's Triton kernels, interpreted on a CPU against torch. `make gpu-dry` compiles them."""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from folders import FOLDERS

BOUNDS = {"torch.float32": 2e-6, "torch.float16": 2e-3}
"""Of a difference from torch's sums over the largest value: fp32's last bits, and fp16's own rounding."""

pytestmark = pytest.mark.skipif(
    importlib.util.find_spec("triton") is None, reason="Triton is not installed: make env ACCEL=cuda"
)


def test_interpreted_kernels_mean_what_torch_means(run_seed: int) -> None:
    """The same positions of many equal scores, the same digests, and near outputs: contexts below, at and above the
    choice, scored in pieces of rows, attended to in one part and several; index keys and queries that are rotated; and
    recorded steps with padding, with prompts or drafts, whose memory stays where it is. The check of a start finds
    kernels that choose, store or attend otherwise."""
    command = [sys.executable, "-W", "ignore", str(Path(__file__).with_name("interpret_sparse.py")), str(run_seed)]
    environment = os.environ | {"TRITON_INTERPRET": "1", "PYTHONPATH": os.pathsep.join(FOLDERS)}
    done = subprocess.run(command, capture_output=True, text=True, timeout=600, check=False, env=environment)
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    cases = found["cases"]
    assert len(cases) == 15
    for case in cases:
        kind = case["case"][1] if case["case"][0] == "eager" else "torch.float32"
        assert case["chosen"] == case["digests"] == 0.0, case
        assert case["distance"] < BOUNDS[kind], case
        assert case.get("keys", 0.0) < 1e-6, case
    right, *wrong = found["faults"]
    assert right is None
    assert wrong[:3] == ["positions chosen differ from torch's", "digests differ from torch's", wrong[0]]
    assert wrong[3].startswith("outputs differ by ")
