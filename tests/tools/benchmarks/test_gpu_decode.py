"""The GPU benchmark's arithmetic, and the whole of it on a CPU with a toy model."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from laddertron.models.config.known_models import known

BENCHMARKS = Path(__file__).resolve().parents[3] / "tools" / "benchmarks"


@pytest.fixture
def gpu_decode(monkeypatch: pytest.MonkeyPatch) -> Any:
    for folder in (BENCHMARKS, BENCHMARKS / "gpu"):
        monkeypatch.syspath_prepend(str(folder))
    import gpu_decode

    return gpu_decode


def test_bytes_of_an_8b_step(gpu_decode: Any) -> None:
    """Llama 3.1 8B in bf16: 8.03 billion parameters, of which the embedding's 0.53 are only looked up in; a position
    of keys and values is 128 KiB."""
    config = known("llama-3.1-8b")
    alone = gpu_decode.read_bytes(config, 1, 0)
    assert alone == pytest.approx(2 * (8.030e9 - 128256 * 4096), rel=1e-3)
    assert gpu_decode.read_bytes(config, 3, 100) - alone == 300 * 128 * 1024
    assert gpu_decode.read_bytes(config, 1, 0, fp8=True) == pytest.approx(8.030e9, rel=1e-3)


def test_a_step_is_predicted_as_plan_does(gpu_decode: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """8B on an H100: 6 to 7 ms alone, in fp8 less than two thirds; nothing on a GPU without known rates or a CPU."""
    cuda, load = gpu_decode.torch.device("cuda"), gpu_decode.Load(decodes=1, context=512)
    config = known("llama-3.1-8b")

    def ask(device: Any, fp8: bool) -> Any:
        return gpu_decode.predicted_ms(config, gpu_decode.ALONE, device, load, "standard", fp8)

    monkeypatch.setattr(gpu_decode.torch.cuda, "get_device_name", lambda device: "NVIDIA H100 80GB HBM3")
    assert 6 < ask(cuda, False) < 7
    assert 3 < ask(cuda, True) < ask(cuda, False) * 2 / 3
    assert ask(gpu_decode.torch.device("cpu"), False) is None
    monkeypatch.setattr(gpu_decode.torch.cuda, "get_device_name", lambda device: "another")
    assert ask(cuda, False) is None


def test_the_table_has_shares_and_ratios(gpu_decode: Any) -> None:
    """15 ms against 30 is 2.00x; 1.2 of 2 TB/s are 60%."""
    both = {"batch": 1, "prefill_tok_s": 1000.0, "decode_tok_s": 66.0, "draw": "greedy", "weights": "bf16"}
    both |= {"predicted_ms": 14.2, "model": "8B"}
    ours = {"engine": "laddertron", "attention": "flashinfer", "cuda_graphs": True, "step_ms": 15.0, "gb_s": 1200.0}
    theirs = {"engine": "transformers", "attention": "sdpa", "cuda_graphs": False, "step_ms": 30.0, "gb_s": 600.0}
    rows = gpu_decode.speed_table([both | ours, both | theirs], 2e12).splitlines()
    assert len({row.count("|") for row in rows}) == 1
    assert rows[2].endswith("| flashinfer | on | bf16 | greedy | 1 | 1,000 | 15.00 | 14.20 | 66 | 60% | 2.00x |")
    assert rows[3].endswith("| sdpa | off | bf16 | greedy | 1 | 1,000 | 30.00 |  | 66 | 30% | 1.00x |")


@pytest.mark.slow
@pytest.mark.parametrize("how", [["--fp8"], ["--top-p", "0.9", "--layers", "1"], ["--drafts", "3"]])
def test_it_runs_on_a_cpu(how: list[str]) -> None:
    """Head, a line a batch, the table; the same engine that a GPU would run. Without a GPU it says so."""
    command = [sys.executable, "-W", "ignore", str(BENCHMARKS / "gpu" / "gpu_decode.py"), "--engines", "ours"]
    words = ["--device", "cpu", "--tiny", "--batch", "1,3", "--prompt", "12", "--gen", "10", "--repeat", "1"]
    env = os.environ | {"PYTHONPATH": str(BENCHMARKS)}
    done = subprocess.run([*command, *words, *how], capture_output=True, text=True, timeout=600, check=False, env=env)
    assert done.returncode == 0, done.stderr
    head, *lines = [json.loads(text) for text in done.stdout.splitlines() if text.startswith("{")]
    assert head["copy_gb_s"] > 0
    assert "torch" in head["versions"]
    assert [line["batch"] for line in lines] == [1, 3]
    for line in lines:
        assert line["cuda_graphs"] is False
        assert min(line[name] for name in ("prefill_tok_s", "step_ms", "decode_tok_s", "gb_s", "share")) > 0
    # a newcomer has a seat beside one, not beside three
    assert ["mixed_ms" in line for line in lines] == ["--drafts" not in how, False]
    kind = f"{'fp8' if '--fp8' in how else 'bf16'} | {'top_p 0.9' if '--top-p' in how else 'greedy'}"
    kind += ", 3 wrong drafts" * ("--drafts" in how)
    assert f"| laddertron | cpu | off | {kind} | 3 |" in done.stdout
