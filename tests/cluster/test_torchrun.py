"""Ranks on nodes that torchrun's variables alone describe, without MPI: preflight over the link."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest

from cluster.nodes import Cluster, kill

pytestmark = pytest.mark.cluster

ROOT = Path(__file__).resolve().parents[2]


@pytest.mark.slow
def test_preflight_measures_the_link_without_mpi(link: Cluster, tmp_path: Path) -> None:
    """One rank a node; rank 0 keeps the store that MASTER_ADDR names. The report has the rail between the two nodes,
    with the link's own delay, and the tuning file says two nodes."""
    delay_us, tuning = 5000, tmp_path / "tuning.json"
    link.control.link(delay_s=delay_us * 1e-6)
    config = tmp_path / "deploy.yaml"
    parts = {
        "model": {"path": str(ROOT / "configs/demo/demo-ladder"), "served_model_name": "demo", "dtype": "float32"},
        "parallel": {"tensor_parallel_size": 2},
        "launch": {"interface": "eth0"},
        "engine": {"device": "cpu", "threads": 1},
        "daemon": {"data_dir": str(tmp_path / "data")},
    }
    config.write_text(json.dumps(parts))  # YAML holds JSON
    words = [sys.executable, "-W", "ignore", "-m", "laddertron.launchers.cli"]
    words += ["preflight", str(config), "--save", str(tuning)]
    common = {
        "WORLD_SIZE": "2",
        "LOCAL_RANK": "0",
        "LOCAL_WORLD_SIZE": "1",
        "MASTER_ADDR": link.addresses[0],
        "MASTER_PORT": "29511",
        "TORCH_CPP_LOG_LEVEL": "ERROR",
        "OMP_NUM_THREADS": "1",
    }
    started = [
        link.start(node, words, {**common, "RANK": str(node)}, stdout=subprocess.PIPE, stderr=subprocess.STDOUT)
        for node in (0, 1)
    ]
    try:
        out, _ = started[0].communicate(timeout=300)
        statuses = [process.wait(60) for process in started]
    finally:
        for process in started:
            kill(process)
    found = re.search(r"n0 rank 0 - n1 rank 1\W+0\W+([0-9.]+) us\W+[0-9.]+ GB/s", out)
    assert found is not None, out
    assert delay_us <= float(found[1]) < 2 * delay_us
    assert "Links, gloo, point to point" in out
    # Preflight compares speeds, and its two ranks share their cores with whatever else runs here.
    errors = [row for row in out.splitlines() if row.startswith("error:")]
    assert all("a matmul takes" in row for row in errors), out
    assert statuses == [int(bool(errors))] * 2
    if not errors:
        assert json.loads(tuning.read_text())["shape"]["nodes"] == 2
