"""Room for weights and caches, also where the kernel has no huge pages."""

from __future__ import annotations

import errno
import mmap
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
