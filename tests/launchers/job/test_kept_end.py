"""`kept.end` when it is interrupted itself."""

from __future__ import annotations

import os
import select
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import pytest
from laddertron.launchers.control.processes import descendants
from laddertron.launchers.job import supervised_process as kept

STUBBORN = "import signal; signal.signal(signal.SIGTERM, signal.SIG_IGN); print('here', flush=True); signal.pause()"


def test_an_interrupted_end_leaves_neither_process_nor_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """^C while the command is given its time."""
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    keeper = kept.start([sys.executable, "-c", STUBBORN], {}, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL)
    assert keeper.stdout is not None
    assert keeper.stdout.readline() == "here\n"
    assert len(list(tmp_path.iterdir())) == 1
    (command,) = descendants(keeper.pid)
    ended, wait = os.pidfd_open(command.pid), keeper.wait

    def interrupted(timeout: float | None = None) -> Any:
        monkeypatch.setattr(keeper, "wait", wait)
        raise KeyboardInterrupt

    monkeypatch.setattr(keeper, "wait", interrupted)
    try:
        with pytest.raises(KeyboardInterrupt):
            kept.end(keeper, 5.0)
        assert select.select([ended], [], [], 10.0)[0], "the command outlives its keeper"
    finally:
        os.close(ended)
        keeper.stdout.close()
    assert list(tmp_path.iterdir()) == []
