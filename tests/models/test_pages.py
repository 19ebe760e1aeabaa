"""Room for weights and caches, also where the kernel has no huge pages."""

from __future__ import annotations

import errno
import mmap
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from laddertron.models import pages


def test_a_kernel_without_huge_pages_gives_small_ones(monkeypatch: pytest.MonkeyPatch) -> None:
    """One built without them refuses the advice with EINVAL."""

    class Small(mmap.mmap):
        def madvise(self, *_: Any) -> None:
            raise OSError(errno.EINVAL, "Invalid argument")

    monkeypatch.setattr(mmap, "mmap", Small)
    room = pages.HugePages()
    one, other = room.take(100), room.take(1)
    assert (len(one), len(other), int(one.sum())) == (100, 1, 0)
    assert other.data_ptr() - one.data_ptr() == 128


def test_held_pages_outlive_who_filled_them(monkeypatch: pytest.MonkeyPatch) -> None:
    """Taken again in the same order they hold what they held, as another's private copy, in no more memory."""
    monkeypatch.setattr(pages.HeldPages, "CHUNK", 4 << 20)
    first = pages.HeldPages()
    pieces = [first.take(size).fill_(number) for number, size in enumerate((100, pages.HeldPages.CHUNK + 1, 7), 1)]
    first.label = "what they are"
    first.seal([1, 0])
    assert 4 << 20 < first.nbytes < 8 << 20
    file = os.open(f"/proc/self/fd/{first.file}", os.O_RDONLY)
    del first, pieces
    for _ in range(2):
        second = pages.HeldPages(os.dup(file))
        assert (second.filled, second.label, second.order) == (True, "what they are", [1, 0])
        again = [second.take(size) for size in (100, pages.HeldPages.CHUNK + 1, 7)]
        assert [(int(piece[0]), int(piece[-1])) for piece in again] == [(1, 1), (2, 2), (3, 3)]
        again[0].fill_(9)
    os.close(file)


def test_pages_close_no_file_that_is_not_theirs(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """A descriptor that is not open becomes the next file's, which must outlive the pages that were refused it."""
    other: list[int] = []

    def unreadable(file: int, size: int, at: int) -> bytes:
        other.append(os.open(tmp_path / "other", os.O_CREAT | os.O_RDWR))
        raise OSError(errno.EBADF, "Bad file descriptor")

    monkeypatch.setattr(os, "pread", unreadable)
    closed = os.open(os.devnull, os.O_RDONLY)
    os.close(closed)
    with pytest.raises(OSError, match="Bad file"):
        pages.HeldPages(closed)
    assert other == [closed]
    os.close(closed)


def test_a_stray_write_to_held_pages_ends_its_process() -> None:
    code = "from laddertron.models.pages import HeldPages\np = HeldPages()\nt = p.take(8)\np.seal([])\nt.fill_(1)"
    done = subprocess.run([sys.executable, "-c", code], check=False, capture_output=True)
    assert done.returncode == -signal.SIGSEGV
