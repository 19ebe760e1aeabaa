"""A power cut at any moment of a first start: the next start accepts the folder, with all that was acknowledged."""

from __future__ import annotations

import shutil
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

import first_start
import pytest
from disk_log import DiskLog, write_folder
from laddertron.engine.daemon.keys import read_keys
from laddertron.engine.daemon.store.store import StoreOptions
from test_store import with_store
from test_store_folder import known
from waiting import HANG_S


@pytest.fixture
def root() -> Iterator[Path]:
    """A folder in memory: the folders of a thousand cuts are opened, each with its fsyncs."""
    with tempfile.TemporaryDirectory(dir="/dev/shm") as folder:
        yield Path(folder).resolve() / "root"


@pytest.mark.parametrize("exported", [False, True])
def test_a_power_cut_in_the_first_start_is_accepted_by_the_next(tmp_path: Path, root: Path, exported: bool) -> None:
    """And in the second one."""
    root.mkdir()
    data, export = root / "data", root / "export" if exported else None
    log = DiskLog(tmp_path, root)
    command = [sys.executable, first_start.__file__, str(data), str(export or ""), str(log.path)]
    log.run([*command, "file-1", "file-2"], HANG_S)
    log.run([*command, "file-3"], HANG_S)
    assert tried_after_cuts(log, root, lambda: set(with_store(data, known, StoreOptions(export)))) > 100


def tried_after_cuts(log: DiskLog, root: Path, names: Callable[[], set[str]]) -> int:
    """The number of different folders that a cut may leave; asserts that `names` has what was acknowledged in each."""
    tried, refused = 0, list[str]()
    for cut, files, acknowledged in log.cuts():
        shutil.rmtree(root)
        write_folder(root, files)
        tried += 1
        try:
            if lost := acknowledged - names():
                refused.append(f"{cut}: lost {lost}")
        except Exception as error:
            refused.append(f"{cut}: {error!r}")
    assert not refused, f"{len(refused)} of {tried}:\n" + "\n".join(refused)
    return tried


def test_a_power_cut_while_a_key_is_added_loses_no_key_that_was_shown(tmp_path: Path, root: Path) -> None:
    root.mkdir()
    log, path = DiskLog(tmp_path, root), root / "etc" / "keys.json"
    code = "import pathlib, sys; from laddertron.engine.daemon.keys import add_key\nfor name in 'ab': "
    code += "add_key(pathlib.Path(sys.argv[1]), name); open(sys.argv[2], 'a').write(f'ack {name}\\n')"
    log.run([sys.executable, "-c", code, str(path), str(log.path)], HANG_S)
    assert tried_after_cuts(log, root, lambda: {key.name for key in read_keys(path)} if path.exists() else set()) > 10
