"""Files that many clients read at once: each of them gets the whole file, made once."""

from __future__ import annotations

import os
import stat
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import openai
import pytest
from daemon_tools import Served, deployment, line, served, submit, wait_batch
from laddertron.engine.config.schema import LimitsConfig
from laddertron.engine.daemon.store.disk import Files
from laddertron.engine.daemon.store.store import StoreOptions
from tiny_text import write_folder

READERS = 150


class SlowFiles(Files):
    """A slow disk that takes half of each write, and counts the files that were finished."""

    made = 0

    def fsync(self, descriptor: int, /) -> None:
        self.made += stat.S_ISREG(os.fstat(descriptor).st_mode)
        os.fsync(descriptor)

    def write(self, descriptor: int, data: memoryview, /) -> int:
        time.sleep(0.01)
        return os.write(descriptor, data[: max(1, len(data) // 2)])


def finished(daemon: Served) -> Any:
    lines = b"".join(line(f"r-{n}", f"say {n}", max_tokens=40) for n in range(400))
    batch = wait_batch(daemon.client(), submit(daemon.client(), lines).id)
    assert (batch.status, batch.request_counts.completed) == ("completed", 400)
    return batch


@pytest.mark.parametrize("damage", ["removed", pytest.param("truncated", marks=pytest.mark.slow)])
def test_150_clients_read_a_file_that_has_to_be_made_again(tmp_path: Path, damage: str) -> None:
    files = SlowFiles()
    limits = LimitsConfig(max_connections_per_address=400)
    config = deployment(tmp_path, limits)
    with served(config, write_folder(tmp_path / "tiny"), store=StoreOptions(files=files)) as daemon:
        batch = finished(daemon)
        whole = daemon.client().files.content(batch.output_file_id).read()
        assert whole.count(b"\n") == 400
        path = tmp_path / "data" / "files" / batch.output_file_id
        path.unlink() if damage == "removed" else os.truncate(path, len(whole) // 2)
        together, before = threading.Barrier(READERS), files.made

        def read(_: int) -> bytes:
            client = daemon.client()
            together.wait()
            return client.files.content(batch.output_file_id).read()

        with ThreadPoolExecutor(READERS) as pool:
            found = list(pool.map(read, range(READERS)))
        assert [part == whole for part in found] == [True] * READERS
        assert files.made == before + 1
        assert [p.name for p in (tmp_path / "data" / "files").iterdir() if p.name.startswith(".")] == []


def test_a_truncated_upload_is_not_served_as_if_it_were_whole(tmp_path: Path) -> None:
    with served(deployment(tmp_path), write_folder(tmp_path / "tiny")) as daemon:
        file = daemon.client().files.create(file=("in.jsonl", line("a")), purpose="batch")
        os.truncate(tmp_path / "data" / "files" / file.id, 5)
        with pytest.raises(openai.InternalServerError, match="has 5 bytes on the disk"):
            daemon.client().files.content(file.id)
