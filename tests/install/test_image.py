"""The container image, built and run as its own user without an engine of containers; and the systemd unit."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
BUILD_S = 1800


def run(*words: str | Path, seconds: float = BUILD_S) -> str:
    done = subprocess.run(list(map(str, words)), capture_output=True, text=True, timeout=seconds, check=False)
    assert done.returncode == 0, f"{words}: {done.stdout[-4000:]}{done.stderr[-4000:]}"
    return done.stdout


@pytest.fixture
def buildah(tmp_path: Path) -> Iterator[list[str]]:
    """The command, on a storage of its own that goes with the test."""
    for tool, package in (("buildah", "buildah"), ("debootstrap", "debootstrap")):
        if shutil.which(tool) is None or os.geteuid():
            pytest.skip(f"needs root and {tool} (Debian: {package})")
    store = tmp_path / "store"
    yield ["buildah", "--storage-driver", "vfs", "--root", str(store), "--runroot", str(tmp_path / "run")]
    shutil.rmtree(store, ignore_errors=True)


def base_image(buildah: list[str], folder: Path) -> str:
    """Debian from the mirror that this machine installs from, so that no registry is needed."""
    uris = run("apt-get", "indextargets", "--format", "$(SITE) $(RELEASE)", "Created-By: Packages").split("\n")
    mirror, release = next(line.split() for line in uris if "bookworm" in line and "security" not in line)
    run("debootstrap", "--variant=minbase", "bookworm" if "bookworm" in release else release, folder, mirror)
    for path in ("/etc/apt/apt.conf.d", "/etc/apt/sources.list.d", "/etc/apt/sources.list", "/etc/apt/keyrings"):
        if Path(path).is_dir():
            shutil.copytree(path, f"{folder}{path}", dirs_exist_ok=True)
        elif Path(path).exists():
            shutil.copy(path, f"{folder}{path}")
    container = run(*buildah, "from", "scratch").strip()
    run(*buildah, "copy", container, folder, "/")
    run(*buildah, "commit", "--rm", container, "base")
    shutil.rmtree(folder)
    return "localhost/base"


def pip_mounts(folder: Path) -> list[str]:
    """This machine's pip configuration, certificates and the folders that it names, for the build alone."""
    said = run(sys.executable, "-m", "pip", "config", "list")
    settings = {
        line.partition("=")[0].rpartition(".")[2]: line.partition("=")[2].strip("'") for line in said.splitlines()
    }
    named = (Path(path).parts[:3] for path in re.findall(r"(?:file://|[' ])(/[\w/.-]+)", said))
    folders = {str(Path(*parts)) for parts in named if parts[1] != "etc"}
    mounts = [f"{folder}/pip.conf:/etc/pip.conf:ro", *(f"{path}:{path}:ro" for path in sorted(folders))]
    if "cert" in settings:
        shutil.copy(settings["cert"], folder / "ca.crt")
        settings["cert"] = "/etc/pip-ca.crt"
        mounts.append(f"{folder}/ca.crt:/etc/pip-ca.crt:ro")
    lines = [f"{name} = {value}".replace("\\n", " ") for name, value in settings.items()]
    (folder / "pip.conf").write_text("\n".join(("[global]", *lines, "")))
    return [word for mount in mounts for word in ("-v", mount)]


@pytest.mark.slow
def test_the_image_answers_as_a_user_without_rights(buildah: list[str], tmp_path: Path) -> None:
    """Built for CPUs: no compiler and no test tool in it, uid 10001, a health check; `run` of the demo answers."""
    base = base_image(buildah, tmp_path / "rootfs")
    build = [
        *buildah,
        "bud",
        "--format",
        "docker",
        "--isolation",
        "chroot",
        "--network",
        "host",
        "-t",
        "laddertron:cpu",
    ]
    run(*build, *pip_mounts(tmp_path), "--build-arg", f"BASE={base}", "-f", ROOT / "Containerfile", ROOT)
    config = json.loads(run(*buildah, "inspect", "laddertron:cpu"))["Docker"]["config"]
    assert config["User"] == "10001"
    assert config["Healthcheck"]["Test"][0] == "CMD"
    assert config["Entrypoint"] == ["laddertron"]
    container = run(*buildah, "from", "laddertron:cpu").strip()
    inside = [*buildah, "run", "--isolation", "chroot", "--network", "host", "--user", "10001", container, "--"]
    assert run(*inside, "id", "-u").strip() == "10001"
    for absent in ("gcc", "pytest", "mypy"):
        assert subprocess.run([*inside, "which", absent], capture_output=True, check=False).returncode != 0
    run(*buildah, "copy", container, ROOT / "configs", "/configs")  # in no volume: each run has its own
    words = ["run", "/configs/demo.yaml", "-i", "/configs/demo/prompts.jsonl", "-o", "/tmp/out.jsonl"]
    run(*inside, "laddertron", *words, "--set", "daemon.data_dir=/var/lib/laddertron")
    answers = run(*inside, "cat", "/tmp/out.jsonl").splitlines()
    assert len(answers) == len((ROOT / "configs/demo/prompts.jsonl").read_text().splitlines())
    assert all(json.loads(line)["error"] is None for line in answers)


def test_systemd_takes_the_unit(tmp_path: Path) -> None:
    tool = shutil.which("systemd-analyze")
    if tool is None:
        pytest.skip("systemd-analyze is not installed")
    unit = (
        (ROOT / "configs/systemd/laddertron.service").read_text().replace("/opt/laddertron/bin/laddertron", "/bin/true")
    )
    unit = unit.replace("User=laddertron\nGroup=laddertron\n", "")
    (tmp_path / "laddertron.service").write_text(unit)
    done = subprocess.run(
        [tool, "verify", "--man=no", tmp_path / "laddertron.service"], capture_output=True, text=True, check=False
    )
    assert "laddertron.service" not in done.stderr, done.stderr
    assert done.returncode == 0, done.stderr
