"""A /dev/shm that is too small for MPI is named before MPI starts, with its host, size, need and fix."""

from __future__ import annotations

import os
from pathlib import Path
from types import SimpleNamespace

import pytest
from laddertron.launchers.rank.shared_memory import (
    SEGMENT,
    SharedMemoryTooSmall,
    require_shared_memory,
    shared_memory_needed,
)
from laddertron.topology.placement.identity import Identity

OMPI = {"OMPI_COMM_WORLD_SIZE": "4"}


def rank(local_size: int = 2) -> Identity:
    return Identity(0, 4, 0, local_size, "n1", "openmpi")


@pytest.mark.parametrize(
    ("environ", "local_size", "need"),
    [
        (OMPI, 2, SEGMENT),
        (OMPI, 1, 0),
        ({}, 2, 0),
        ({**OMPI, "OMPI_MCA_btl": "self,tcp"}, 2, 0),
        ({**OMPI, "OMPI_MCA_btl": "self,sm,tcp"}, 2, SEGMENT),
        ({**OMPI, "OMPI_MCA_btl": "^sm"}, 2, 0),
        ({**OMPI, "OMPI_MCA_btl": "^openib"}, 2, SEGMENT),
        ({**OMPI, "OMPI_MCA_btl_vader_segment_size": "4194304"}, 8, 4 << 20),
    ],
)
def test_what_mpi_needs(environ: dict[str, str], local_size: int, need: int) -> None:
    assert shared_memory_needed(rank(local_size), environ) == need


def test_too_little_is_refused_with_host_size_need_and_fix(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    disk = SimpleNamespace(f_bavail=15, f_frsize=4096, f_blocks=16)
    monkeypatch.setattr(os, "statvfs", lambda folder: disk)
    with pytest.raises(SharedMemoryTooSmall) as refused:
        require_shared_memory(rank(), OMPI, str(tmp_path))
    words = ("n1: ", "60 KiB free of 64 KiB", "needs 16384 KiB for its 2 ranks", "--shm-size=1g")
    assert all(word in str(refused.value) for word in words), refused.value
    require_shared_memory(rank(1), OMPI, str(tmp_path))
    disk.f_bavail = SEGMENT // 4096
    require_shared_memory(rank(), OMPI, str(tmp_path))


def test_without_such_a_folder_mpi_takes_another(tmp_path: Path) -> None:
    require_shared_memory(rank(), OMPI, str(tmp_path / "none"))
