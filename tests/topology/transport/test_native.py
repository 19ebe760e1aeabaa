"""C libraries that were built from other sources than those next to them."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
from laddertron.launchers.cli.errors import USAGE, report
from laddertron.topology.transport.native import StaleLibraryError, load, locate

ROOT = Path(__file__).parents[3]
FOLDERS = {
    "topology/transport": "_transport",
    "launchers/compose": "_listen",
    "launchers/control": "_pulse",
    "engine/sampling": "_noise",
    "models/cpu": "_kernels",
}


def copied(tmp_path: Path, folder: str, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A package with a copy of the folder's library and its C sources."""
    if locate(f"laddertron.{folder.replace('/', '.')}.{FOLDERS[folder]}") is None:
        pytest.skip("the extension was not built")
    package = tmp_path / f"stale_{tmp_path.name}"  # modules of the same name would be cached
    package.mkdir()
    for file in (ROOT / folder).glob("*.*"):
        if file.suffix in (".c", ".h", ".so"):
            shutil.copy(file, package)
    (package / "__init__.py").touch()
    monkeypatch.syspath_prepend(str(tmp_path))
    return package


def replaced(library: Path, data: bytes) -> None:
    """As another file: this process has the first one mapped, and would end with a bus error."""
    library.unlink()
    library.write_bytes(data)


CHANGES: dict[str, Callable[[Path], object]] = {
    "a source": lambda package: next(package.glob("*.c")).write_text("/* changed */"),
    "a new header": lambda package: (package / "a.h").touch(),
    "a lost source": lambda package: next(package.glob("*.c")).rename(package / "other.c"),
    "an older library": lambda package: replaced(next(package.glob("*.so")), b"built before there were digests"),
}


@pytest.mark.parametrize("change", CHANGES)
@pytest.mark.parametrize("folder", FOLDERS)
def test_a_library_of_other_sources_is_refused(
    tmp_path: Path, folder: str, change: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """What it would compute is not what Python expects. Commands show it as an error, without a traceback."""
    package = copied(tmp_path, folder, monkeypatch)
    module = f"{package.name}.{FOLDERS[folder]}"
    assert load(module) is not None
    CHANGES[change](package)
    for look in (load, locate):
        with pytest.raises(
            StaleLibraryError, match=r"_\w+\.\S+ was built from other C sources .* pip install"
        ) as caught:
            look(module)
    assert report(caught.value) == USAGE
    assert capsys.readouterr().err == f"error: {caught.value}\n"


def test_an_installed_library_has_no_sources_to_differ_from(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    package = copied(tmp_path, "engine/sampling", monkeypatch)
    for source in package.glob("*.[ch]"):
        source.unlink()
    assert load(f"{package.name}._noise") is not None
