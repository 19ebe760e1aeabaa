"""The one command for a GPU: resumed where it was cut off, pages from what there is, and a part that really runs."""

from __future__ import annotations

import itertools
import json
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch

BENCHMARKS = Path(__file__).resolve().parents[3] / "tools" / "benchmarks"


@pytest.fixture
def gpu_day(monkeypatch: pytest.MonkeyPatch) -> Any:
    for folder in (BENCHMARKS, BENCHMARKS / "gpu"):
        monkeypatch.syspath_prepend(str(folder))
    monkeypatch.setattr(sys, "path", list(sys.path))  # main adds to it
    import gpu_day

    return gpu_day


def result(ok: bool = True, *lines: dict[str, Any]) -> dict[str, Any]:
    return {"ok": ok, "code": 0 if ok else 124, "seconds": 1.5, "lines": list(lines), "said": ["3 passed"]}


def call(gpu_day: Any, monkeypatch: pytest.MonkeyPatch, *words: str) -> int:
    monkeypatch.setattr(sys, "argv", ["gpu_day.py", "--device", "cpu", "--tiny", *words])
    code: int = gpu_day.main()
    return code


def test_it_goes_on_where_it_was_cut_off(gpu_day: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Interrupted in its seventh part: the file has six. The next call runs the seventh and all after it, a last one
    nothing; --again runs what it names; a part that failed is tried again; another machine's figures go."""
    out, ran, cut = tmp_path / "day.json", list[str](), ["decode"]

    def run(part: Any, limit_s: float, environment: Mapping[str, str]) -> dict[str, Any]:
        assert 0 < limit_s <= part.limit_s
        if part.name in cut:
            raise KeyboardInterrupt
        ran.append(part.name)
        return result(part.name != "transformers" or "fixed" in cut)

    monkeypatch.setattr(gpu_day, "run", run)
    names = [part.name for part in gpu_day.parts("cpu", True)]
    with pytest.raises(KeyboardInterrupt):
        call(gpu_day, monkeypatch, "--out", str(out))
    assert list(json.loads(out.read_text())["parts"]) == ran == names[:6]
    cut.clear()
    assert call(gpu_day, monkeypatch, "--out", str(out)) == 1
    assert ran == names
    cut.append("fixed")
    assert call(gpu_day, monkeypatch, "--out", str(out)) == 0
    assert ran == [*names, "transformers"]
    assert call(gpu_day, monkeypatch, "--out", str(out), "--only", "shard", "--again") == 0
    assert ran[-3:] == ["compile shard 70b", "shard 70b", "shard 405b"]
    found = json.loads(out.read_text())
    out.write_text(json.dumps(found | {"environment": found["environment"] | {"device": "another"}}))
    ran.clear()
    assert call(gpu_day, monkeypatch, "--out", str(out)) == 0
    assert ran == names
    assert (tmp_path / "day.md").read_text().startswith("## One GPU")


def test_nothing_begins_when_time_is_over(
    gpu_day: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(gpu_day, "run", lambda *_: pytest.fail("it began"))
    assert call(gpu_day, monkeypatch, "--out", str(tmp_path / "day.json"), "--minutes", "0", "--only", "decode") == 0
    assert "decode: left for the next call" in capsys.readouterr().err


def test_compiling_comes_first_and_is_not_counted(
    gpu_day: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Every measured part on a GPU that compiles has one before all of them that compiles the same; its time is given
    back. What never ran comes first: ranks that share a GPU, which compile little."""
    first, parts = gpu_day.parts("cuda", False)[:3], gpu_day.parts("cuda", False)[3:]
    assert [part.name for part in first] == ["ranks", "one_shot", "jobs of ranks"]
    compiled = [part for part in parts if part.apart]
    assert parts[: len(compiled)] == compiled
    assert [part.name.removeprefix("compile ") for part in compiled] == [p.name for p in parts[len(compiled) :]][
        : len(compiled)
    ]
    assert {"decode fp8", "decode top_p"} <= {part.name for part in parts}
    clock, limits = [0.0], dict[str, float]()

    def run(part: Any, limit_s: float, environment: Mapping[str, str]) -> dict[str, Any]:
        limits[part.name], took = limit_s, 399.0 if part.apart else 1.0
        clock[0] += took
        return result() | {"seconds": took}

    monkeypatch.setattr(gpu_day, "run", run)
    monkeypatch.setattr(gpu_day.time, "monotonic", lambda: clock[0])
    assert call(gpu_day, monkeypatch, "--out", str(tmp_path / "day.json"), "--minutes", "1") == 0
    assert limits["compile shard 70b"] == 400
    assert limits["launches"] == 57


def test_the_page(gpu_day: Any) -> None:
    """What was measured, what failed, what is not installed, and each bar with its verdict."""
    both = {"batch": 1, "prefill_tok_s": 1000.0, "decode_tok_s": 66.0, "prompt": 512, "model": "8B-shaped"}
    both |= {"weights": "bf16", "draw": "greedy", "predicted_ms": 6.4}
    ours = both | {"engine": "laddertron", "attention": "flashinfer", "cuda_graphs": True, "step_ms": 15.0}
    decode = ours | {"gb_s": 1800.0, "share": 0.9, "mixed_ms": 40.0}
    shard = {"model": "70B", "interconnect": "p2p", "batch": 1, "k": 0}
    shards = [shard | {"wiring": "ladder", "step_ms": 10.0}, shard | {"wiring": "no-communication", "step_ms": 9.0}]
    environment = dict.fromkeys(gpu_day.PACKAGES, "1.0") | {"flashinfer-python": None, "device": "a GPU"}
    times = {"host_us": 9.5, "most_us": 12.0, "whole_us": 10.5}
    kinds = {"part": "launches", "kind": "event", **times}, {"part": "launches", "kind": "gate", "skipped": "no Triton"}
    parts = {
        "launches": result(True, *kinds),
        "tests": result(),
        "decode": result(True, {"copy_gb_s": 2000.0}, decode),
        "transformers": result(False),
    }
    page = gpu_day.markdown({"environment": environment, "parts": parts})
    assert "Not installed: flashinfer-python." in page
    assert "| event | 9.5 | 12.0 | 10.5 |" in page
    assert "| gate | no Triton | no Triton | no Triton |" in page
    assert "| tests | yes | 1.5 | 3 passed |" in page
    assert "| transformers | 124 | 1.5 | 3 passed |" in page
    assert "| 1 decodes and a prompt of 512 | 40.00 |" in page
    assert "| flashinfer | on | bf16 | greedy | 1 | 1,000 | 15.00 | 6.40 | 66 | 90% |" in page
    assert "90% of the copy bandwidth (bar 85%): reached." in page
    (bar,) = gpu_day.bars([], shards)
    assert bar.startswith("- Ladder's shard of 70B, p2p, batch 1, no multiprocessor held: 0.90 of no-communication")
    assert bar.endswith("(bar 0.95): **missed**.")
    assert gpu_day.bars([], []) == []


def test_a_part_that_hangs_or_fails_keeps_what_it_said(gpu_day: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    def hangs(*_: Any, timeout: float, **__: Any) -> Any:
        raise subprocess.TimeoutExpired("part", timeout, b'{"a": 1}\n', b"half a word")

    with monkeypatch.context() as patch:
        patch.setattr(gpu_day.subprocess, "run", hangs)
        cut = gpu_day.run(gpu_day.Part("hangs", (), 9.0), 1.0, {})
    assert (cut["ok"], cut["code"], cut["lines"], cut["said"]) == (False, 124, [{"a": 1}], ["half a word"])
    failed = gpu_day.run(gpu_day.Part("fails", ("-c", "raise ValueError('why')"), 9.0), 60.0, {})
    assert (failed["ok"], failed["code"]) == (False, 1)
    assert failed["said"][-1] == "ValueError: why"


def test_launches_of_every_kind_are_timed(gpu_day: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """What needs no GPU, in bursts between waits for the device; the rest says why it is not measured."""
    import gpu_launches

    waits, calls, clock = list[int](), list[None](), itertools.count()
    monkeypatch.setattr(gpu_launches, "wait_for", lambda device: waits.append(len(calls)))
    monkeypatch.setattr("gpu_launches.time.perf_counter", lambda: next(clock) * 1e-3)
    found = gpu_launches.time_of(lambda: calls.append(None), 300, torch.device("cpu"))
    assert waits == [20, 120, 120, 220, 220, 320]
    assert found == {"host_us": 10.0, "most_us": 10.0, "whole_us": 20.0}
    monkeypatch.undo()
    part = next(part for part in gpu_day.parts("cpu", True) if part.name == "launches")
    done = gpu_day.run(part, part.limit_s, gpu_day.child_environment(tmp_path))
    assert done["ok"], done["said"]
    kinds = {line["kind"]: line for line in done["lines"]}
    assert {"entries of the page table", "matrix product", "all-reduce of a group of one"} < kinds.keys()
    assert all(line["whole_us"] >= line["host_us"] > 0 for line in kinds.values() if "skipped" not in line)
    assert kinds["graph of one kernel"]["skipped"] == "the device is a CPU"


@pytest.mark.slow
def test_a_part_runs_on_a_cpu(tmp_path: Path) -> None:
    """As `make gpu` would: a process a part, laddertron from this folder, its figures in the page."""
    words = "--device cpu --tiny --only shard --out"
    command = [
        sys.executable,
        "-W",
        "ignore",
        str(BENCHMARKS / "gpu_day.py"),
        *words.split(),
        str(tmp_path / "day.json"),
    ]
    done = subprocess.run(command, capture_output=True, text=True, timeout=600, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    found = json.loads((tmp_path / "day.json").read_text())["parts"]
    assert [len(part["lines"]) for part in found.values()] == [4, 4, 4]
    assert "| tiny | emulated 2x8xH100, 16 ranks, pure delay | 1 |" in (tmp_path / "day.md").read_text()
