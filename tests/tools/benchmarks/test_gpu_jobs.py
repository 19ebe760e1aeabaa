"""The jobs of ranks that share a GPU: their deployments are valid, their lines differ, another answer is a fault."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest
from laddertron.engine.config.load import load

GPU = Path(__file__).resolve().parents[3] / "tools" / "benchmarks" / "gpu"


@pytest.fixture
def gpu_jobs(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.syspath_prepend(str(GPU))
    import gpu_jobs

    return gpu_jobs


def test_each_job_is_a_deployment_of_ranks_that_share_a_gpu(gpu_jobs: Any, tmp_path: Path) -> None:
    for number, (model, parallel, per_node) in enumerate(gpu_jobs.JOBS.values()):
        path = tmp_path / f"{number}.yaml"
        path.write_text(json.dumps(gpu_jobs.deployment(model, parallel, per_node, "cuda")))
        d = load(path)
        assert d.launch.share_gpu
        assert d.parallel.backend == "nccl"
        assert d.launch.hosts == (f"localhost:{d.parallel.world.size}",)
    sent = [json.loads(line) for line in gpu_jobs.lines().splitlines()]
    assert len({line["body"]["prompt"] for line in sent}) == len({line["custom_id"] for line in sent}) == len(sent)
    assert len(sent) * gpu_jobs.TOKENS >= 2000


@pytest.mark.parametrize("fault", ["", "another answer", "it fails"])
def test_answers_are_compared_with_one_rank_s(
    gpu_jobs: Any, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], fault: str
) -> None:
    def run(folder: Path, words: dict[str, Any], limit_s: float) -> tuple[dict[str, str], float]:
        alone = not words["launch"].get("share_gpu")
        if fault == "it fails" and not alone:
            raise RuntimeError("exit status 1: no NCCL")
        return {"a": "x", "b": "y" if alone or not fault else "z"}, 1.0

    monkeypatch.setattr(gpu_jobs, "run", run)
    monkeypatch.setattr(sys, "argv", ["gpu_jobs.py", "--tiny"])
    assert gpu_jobs.main() == bool(fault)
    said = json.loads(capsys.readouterr().out)
    assert said.get("fault", "") == ("exit status 1: no NCCL" if fault == "it fails" else "")
    assert said.get("different", 0) == (fault == "another answer")
