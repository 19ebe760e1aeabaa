"""The store through which ranks find one another listens where it was told to, and nowhere else."""

from __future__ import annotations

import os
from pathlib import Path

from laddertron.topology.comm.bootstrap import open_store


def _listening() -> set[str]:
    """Addresses, as the kernel writes them, on which this process listens."""
    links = [Path("/proc/self/fd", name) for name in os.listdir("/proc/self/fd")]
    mine = {os.readlink(link).removeprefix("socket:[").removesuffix("]") for link in links if link.is_symlink()}
    rows = [
        row.split() for name in ("tcp", "tcp6") for row in Path("/proc/self/net", name).read_text().splitlines()[1:]
    ]
    return {row[1].partition(":")[0] for row in rows if row[3] == "0A" and row[9] in mine}


def test_the_store_listens_on_its_address_alone() -> None:
    """torch's own would listen on every interface, without any password."""
    before = _listening()
    store = open_store("127.0.0.1", 0, True, 10.0)
    assert _listening() - before <= {"0100007F"}
    assert "0100007F" in _listening()
    other = open_store("127.0.0.1", store.port, False, 10.0)
    other.set("key", "value")
    assert store.get("key") == b"value"
