"""Opens a store, stores files and closes it. Arguments: its folder, its export or "", its log, the files' names."""

from __future__ import annotations

import asyncio
import sys
from pathlib import Path

from laddertron.engine.daemon.store import records
from laddertron.engine.daemon.store.open import open_store
from laddertron.engine.daemon.store.rows import FileRow
from laddertron.engine.daemon.store.store import StoreOptions


async def start(folder: Path, export: Path | None, log: Path, names: list[str]) -> None:
    store = await open_store(folder, StoreOptions(export))
    for name in names:
        row = FileRow(name, "me", "batch", "a", 7, 1)
        await store.write(lambda rows, row=row: records.add_file(rows, row))  # type: ignore[misc]
        with log.open("a") as file:
            file.write(f"ack {name}\n")
    await store.close()


if __name__ == "__main__":
    asyncio.run(start(Path(sys.argv[1]), Path(sys.argv[2]) if sys.argv[2] else None, Path(sys.argv[3]), sys.argv[4:]))
