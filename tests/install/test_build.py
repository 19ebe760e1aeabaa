"""The C extensions on other machines: no warning where they are compiled for aarch64, and torch in their place where
there is no compiler at all."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import sysconfig
import tomllib
from pathlib import Path

import checkpoints
import pytest
from answering import run_says

ROOT = Path(__file__).parents[2]
CROSS = "aarch64-linux-gnu-gcc"
EXTENSIONS = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["tool"]["setuptools"]["ext-modules"]
SOURCES = [(source, extension["extra-compile-args"]) for extension in EXTENSIONS for source in extension["sources"]]


@pytest.mark.slow
@pytest.mark.parametrize(("source", "arguments"), SOURCES, ids=[source for source, _ in SOURCES])
def test_compiles_for_aarch64_without_a_warning(source: str, arguments: list[str], tmp_path: Path) -> None:
    if shutil.which(CROSS) is None:
        pytest.skip(f"no {CROSS}: apt-get install gcc-aarch64-linux-gnu")
    # Debian's Python keeps its headers' machine-dependent part in a folder a machine; both are little-endian and LP64.
    triplet = sysconfig.get_config_var("MULTIARCH")
    if triplet and (Path("/usr/include") / triplet).is_dir():
        (tmp_path / "aarch64-linux-gnu").symlink_to(Path("/usr/include") / triplet)
    words = [CROSS, "-c", *arguments, "-Wall", "-Wextra", "-Werror", "-fPIC", "-o", str(tmp_path / "out.o")]
    python = ["-isystem", sysconfig.get_path("include"), "-isystem", str(tmp_path)]
    done = subprocess.run([*words, *python, source], cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


@pytest.mark.slow
def test_without_a_compiler_torch_takes_over(tmp_path: Path) -> None:
    """Installed by a build whose compiler fails: no library is there, and a run answers as one with them does, and as
    transformers."""
    copy, installed = tmp_path / "source", tmp_path / "installed"
    built = shutil.ignore_patterns(".*", "build", "dist", "*.so", "*.egg-info", "__pycache__")
    shutil.copytree(ROOT, copy, ignore=built)
    pip = [sys.executable, "-m", "pip", "--disable-pip-version-check", "install", "--quiet", "--no-deps"]
    words = [*pip, "--no-build-isolation", "--target", str(installed), str(copy)]
    done = subprocess.run(words, env={**os.environ, "CC": "false"}, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert not list(installed.rglob("*.so"))
    ours = {"PYTHONPATH": str(installed)}
    where = [sys.executable, "-c", "import laddertron; print(laddertron.__path__[0])"]
    found = subprocess.run(where, env={**os.environ, **ours}, cwd=tmp_path, capture_output=True, text=True, check=True)
    assert Path(found.stdout.strip()) == installed / "laddertron"
    checkpoints.save(tmp_path / "model")
    for environ in (ours, {}):
        furthest, _ = run_says(tmp_path, environ)
        assert furthest < 1e-4
        (tmp_path / "out.jsonl").unlink()
