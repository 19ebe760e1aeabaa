"""Checks before MPI starts that this host's /dev/shm has room for it: Open MPI ends every rank otherwise."""

from __future__ import annotations

import os
from collections.abc import Mapping

from ...models.config.json_fields import Refusal
from ...topology.placement.identity import Identity

FOLDER = "/dev/shm"
SEGMENT = 16 << 20
"""Bytes that Open MPI 5 requests for each rank (btl_sm_segment_size); it compares them with the free ones."""
_SIZES = ("OMPI_MCA_btl_sm_segment_size", "OMPI_MCA_btl_vader_segment_size")


class SharedMemoryTooSmall(Refusal, RuntimeError):
    """/dev/shm of a host is too small for its ranks."""


def shared_memory_needed(identity: Identity, environ: Mapping[str, str]) -> int:
    """Bytes that must be free in /dev/shm; 0: none, since this rank is alone on its host or uses no shared memory."""
    listed = environ.get("OMPI_MCA_btl", "sm")  # a list, or with ^ one of those that are not used
    uses = bool({"sm", "vader"} & set(listed.lstrip("^").split(","))) != listed.startswith("^")
    if identity.local_size < 2 or "OMPI_COMM_WORLD_SIZE" not in environ or not uses:
        return 0
    sizes = [int(text) for name in _SIZES if (text := environ.get(name, "")).isdecimal()]
    return max(sizes, default=SEGMENT)


def require_shared_memory(identity: Identity, environ: Mapping[str, str], folder: str = FOLDER) -> None:
    """Raises SharedMemoryTooSmall. Where there is no such folder, Open MPI takes another."""
    need = shared_memory_needed(identity, environ)
    try:
        disk = os.statvfs(folder)
    except OSError:
        return
    free, size = disk.f_bavail * disk.f_frsize, disk.f_blocks * disk.f_frsize
    if free < need:
        raise SharedMemoryTooSmall(
            f"{identity.node}: {folder} has {free >> 10} KiB free of {size >> 10} KiB, Open MPI needs {need >> 10} KiB "
            f"for its {identity.local_size} ranks here: enlarge it (`mount -o remount,size=1g {folder}`; containers: "
            "--shm-size=1g), or remove files from it"
        )
