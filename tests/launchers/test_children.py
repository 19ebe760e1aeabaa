"""Python processes that laddertron starts: nothing in the working directory, and nothing that a library prints, changes
what they do."""

from __future__ import annotations

import json
import os
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest
from laddertron.engine import child
from laddertron.engine.config.load import load
from laddertron.launchers.measure.answers import answer_in
from laddertron.launchers.measure.rank_job import BenchJob
from waiting import HANG_S

ROOT = Path(__file__).parents[2]
DEMO = ROOT / "configs" / "demo.yaml"
MODULES, PACKAGES = (
    ("random", "json", "asyncio", "numpy"),
    ("torch", "laddertron", "mpi4py", "tokenizers", "prometheus_client"),
)


@pytest.fixture
def planted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A working directory whose modules have the names of libraries; afterwards none was imported."""
    folder, imported = tmp_path / "work", tmp_path / "imported"
    folder.mkdir()
    text = f"open({str(imported)!r}, 'a').write(__name__ + ' ')\nraise ImportError('of the working directory')\n"
    for name in MODULES:
        (folder / f"{name}.py").write_text(text)
    for name in PACKAGES:
        (folder / name).mkdir()
        (folder / name / "__init__.py").write_text(text)
    monkeypatch.chdir(folder)
    yield folder
    assert not imported.exists(), imported.read_text()


def laddertron(*words: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(child.laddertron(*words), capture_output=True, text=True, timeout=2 * HANG_S, check=False)


@pytest.mark.parametrize(("launch", "launcher"), [(False, "openmpi"), (True, "openmpi"), (False, "torchrun")])
def test_ranks_import_nothing_of_the_working_directory(planted: Path, launch: bool, launcher: str) -> None:
    """Modules and packages there have the names of the standard library's, of torch and of laddertron itself."""
    body = {"model": "demo", "prompt": "Once", "max_tokens": 2}
    line = {"custom_id": "a", "method": "POST", "url": "/v1/completions", "body": body}
    (planted / "in.jsonl").write_text(json.dumps(line) + "\n")
    words = ["-i", "in.jsonl", "-o", "out.jsonl", "--set", f"launch.launcher={launcher}"]
    words += ["--set", f"daemon.data_dir={planted / 'data'}", "--set", "parallel.emulated_delay=0s"]
    done = laddertron(*(("launch", str(DEMO), "run") if launch else ("run", str(DEMO))), *words)
    assert done.returncode == 0, done.stderr
    assert json.loads((planted / "out.jsonl").read_text())["response"]["status_code"] == 200


def test_preflight_imports_nothing_of_the_working_directory(planted: Path) -> None:
    done = laddertron("preflight", str(DEMO), "--set", "parallel.emulated_delay=0s")
    assert done.returncode == 0, done.stdout + done.stderr


def test_what_measuring_ranks_print_is_no_answer(
    planted: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A sitecustomize prints what looks like an answer, and a line without an end."""
    hook = tmp_path / "hook"
    hook.mkdir()
    (hook / "sitecustomize.py").write_text("print('{\"refused\": \"printed\"}')\nprint('{', end='', flush=True)\n")
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(["", str(hook), ""]))
    with BenchJob(load(DEMO, ["parallel.emulated_delay=0s"]), "printing") as job:
        assert job.about["nodes"] == 1
        assert "decode_s" in job.ask("case", batch=1, prompt=4, generate=2)


def test_answers_are_those_with_the_mark() -> None:
    assert answer_in('tag: f00d {"a": 1}\n', "f00d ") == {"a": 1}
    assert answer_in('{"a": 1}\n', "f00d ") is None


def test_the_environment_of_a_child(monkeypatch: pytest.MonkeyPatch) -> None:
    """PYTHONPATH keeps its entries, but for empty ones; none is added."""
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(["", "/a", "", "/b", ""]))
    assert child.environment({"X": "1"}).items() >= {"PYTHONSAFEPATH": "1", "PYTHONPATH": "/a:/b", "X": "1"}.items()
    assert child.environment()["SSH_ASKPASS_REQUIRE"] == "never"
    monkeypatch.delenv("PYTHONPATH")
    assert "PYTHONPATH" not in child.environment()


def test_no_other_module_makes_a_pythons_command_line() -> None:
    """Else a child is started with the working directory on its import path."""
    folders = [ROOT / name for name in ("engine", "launchers", "models", "topology", "tools")]
    apart = (ROOT / "engine" / "child.py", ROOT / "tools" / "benchmarks", ROOT / "tools" / "gpu_dry")
    files = [f for folder in folders for f in folder.rglob("*.py") if not any(f.is_relative_to(a) for a in apart)]
    assert [str(file) for file in files if '"-m"' in file.read_text()] == []
