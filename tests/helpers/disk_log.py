"""The folders that a power cut may leave: a process's changes of files (disk_log.c), replayed up to each of them."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

Loss = Literal["nothing", "contents", "tails", "names"]
LOSSES: tuple[Loss, ...] = ("nothing", "contents", "tails", "names")
"""Unsynced state that is lost: none; contents (a new file is empty); half of each appended tail; names and contents."""


@dataclass(slots=True)
class _Inode:
    data: bytes = b""
    synced: bytes = b""


@dataclass(slots=True)
class Disk:
    """Files and folders of `root` after some changes; `durable` has the names of each folder at its last fsync."""

    root: str
    names: dict[str, _Inode | None] = field(default_factory=dict)
    durable: dict[str, _Inode | None] = field(default_factory=dict)

    def apply(self, verb: str, number: int, path: str, rest: str) -> None:
        node = self.names.get(path)
        match verb:
            case "create":
                self.names[path] = _Inode()
            case "mkdir":
                self.names[path] = None
            case "unlink":
                self.names.pop(path, None)
            case "rename":
                self.names[rest] = self.names.pop(path)
            case "write" if node is not None:
                data = bytes.fromhex(rest)
                node.data = node.data[:number].ljust(number, b"\0") + data + node.data[number + len(data) :]
            case "truncate" if node is not None:
                node.data = node.data[:number].ljust(number, b"\0")
            case "sync" if node is not None:
                node.synced = node.data
            case "sync":
                self.durable = {name: of for name, of in self.durable.items() if os.path.dirname(name) != path}
                self.durable |= {name: of for name, of in self.names.items() if os.path.dirname(name) == path}

    def left(self, loss: Loss) -> dict[str, bytes | None]:
        """Path below `root` to content (None: a folder) after a power cut."""
        names = self.durable if loss == "names" else self.names
        there = {
            name for name in names if all(str(up) in names or str(up) == self.root for up in _above(name, self.root))
        }
        return {name.removeprefix(self.root + "/"): _content(names[name], loss) for name in sorted(there)}


def _above(name: str, root: str) -> list[Path]:
    return [up for up in Path(name).parents if str(up).startswith(root)]


def _content(node: _Inode | None, loss: Loss) -> bytes | None:
    if node is None or loss == "nothing":
        return None if node is None else node.data
    tail = node.data[len(node.synced) :] if loss == "tails" and node.data.startswith(node.synced) else b""
    return node.synced + tail[: len(tail) // 2]


class DiskLog:
    """Runs a process and has the changes that it makes below `root`."""

    def __init__(self, folder: Path, root: Path) -> None:
        library, source = folder / "disk_log.so", Path(__file__).with_name("disk_log.c")
        subprocess.run(["cc", "-shared", "-fPIC", "-O1", "-Wall", "-Werror", "-o", library, source, "-ldl"], check=True)
        self._root, self.path = root, folder / "disk.log"
        self._environment = {"LD_PRELOAD": str(library), "DISK_LOG_ROOT": str(root), "DISK_LOG": str(self.path)}

    def run(self, command: Sequence[str], timeout: float) -> None:
        """The process may append lines `ack NAME` to `path`."""
        subprocess.run(command, env=os.environ | self._environment, check=True, timeout=timeout)

    def cuts(self) -> Iterator[tuple[str, dict[str, bytes | None], set[str]]]:
        """Each different folder that a cut may leave: after which change, its files, what was acknowledged before."""
        disk, acknowledged, seen = Disk(str(self._root)), set[str](), set[int]()
        for at, line in enumerate(self.path.read_text().splitlines()):
            if line.startswith("ack "):
                acknowledged.add(line[4:])
            else:
                verb, number, path, rest = line.split("\t")
                disk.apply(verb, int(number), path, rest)
            for loss in LOSSES:
                files = disk.left(loss)
                if (key := hash((tuple(files.items()), len(acknowledged)))) not in seen:
                    seen.add(key)
                    yield f"{at}: {line[:160]}, lost: {loss}", files, set(acknowledged)


def write_folder(root: Path, files: dict[str, bytes | None]) -> None:
    root.mkdir(parents=True)
    for name, content in files.items():
        if content is None:
            (root / name).mkdir()
        else:
            (root / name).write_bytes(content)
