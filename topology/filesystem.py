"""Whether nodes that name the same files mean the same bytes: what each of them sees, and what follows from it.

Wrong only towards "no" on purpose: a filesystem of one's own (a disk, memory, an overlay) never counts as shared, even
where cloned images make files look alike to the last bit.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from pathlib import Path

from .sysfs import Sysfs

_NETWORK = frozenset(
    {"9p", "afs", "beegfs", "ceph", "cifs", "daos", "glusterfs", "gfs2", "gpfs", "lustre", "nfs", "nfs4"}
)
_NETWORK |= {"ocfs2", "orangefs", "panfs", "pvfs2", "smb3", "virtiofs", "wekafs"}
_OWN_FUSE = frozenset({"fuse.fuse-overlayfs", "fuse.gocryptfs", "fuse.lxcfs", "fuse.ntfs-3g", "fuse.squashfuse"})
_DIGEST = 16
SEEN_BYTES = 2 * _DIGEST + 1


@dataclass(frozen=True, slots=True)
class Seen:
    """Some files from one node: digests of the running kernel and of the files' names, sizes, times and inode numbers;
    whether all of them lie on filesystems that come over a network."""

    kernel: bytes
    files: bytes
    network: bool

    def pack(self) -> bytes:
        """SEEN_BYTES, the same number everywhere."""
        return self.kernel + self.files + bytes([self.network])

    @classmethod
    def unpack(cls, data: bytes) -> Seen:
        return cls(data[:_DIGEST], data[_DIGEST : 2 * _DIGEST], data[2 * _DIGEST] == 1)


def look(files: Collection[Path], sysfs: Sysfs) -> Seen:
    """What this node sees of files that are there. Raises OSError."""
    digest = hashlib.blake2b(digest_size=_DIGEST)
    for file in sorted(files, key=lambda f: f.name):
        stat = os.stat(file)
        digest.update(f"{file.name} {stat.st_size} {stat.st_mtime_ns} {stat.st_ino}\n".encode())
    kernel = sysfs.text("proc/sys/kernel/random/boot_id").encode()
    mounts = sysfs.text("proc/self/mountinfo")
    kinds = {filesystem_of(folder, mounts) for folder in {file.resolve().parent for file in files}}
    return Seen(hashlib.blake2b(kernel, digest_size=_DIGEST).digest(), digest.digest(), all(map(comes_by_net, kinds)))


def filesystem_of(path: Path, mountinfo: str) -> str:
    """The type of the filesystem that holds a resolved path, by /proc/self/mountinfo; empty if that does not say."""
    best, kind = -1, ""
    for line in mountinfo.splitlines():
        before, dash, after = line.partition(" - ")
        fields = before.split()
        if not dash or len(fields) < 5 or not after:
            continue
        place = fields[4].replace("\\040", " ").replace("\\011", "\t").replace("\\012", "\n").replace("\\134", "\\")
        # The last of two mounts on one place hides the other.
        if path.is_relative_to(place) and len(place) >= best:
            best, kind = len(place), after.split()[0]
    return kind


def comes_by_net(kind: str) -> bool:
    return kind in _NETWORK or (kind.startswith("fuse.") and kind not in _OWN_FUSE)


def why_not_shared(seen: Sequence[Seen]) -> str | None:
    """None where the nodes, one Seen each, read the same files from a server; else the reason in words."""
    if len({one.kernel for one in seen}) < len(seen):
        return "some of its nodes are one machine with one page cache"
    if not all(one.network for one in seen):
        return "not every node has the model folder on a network filesystem"
    if len({one.files for one in seen}) > 1:
        return "sizes, times or inode numbers of the files differ between nodes"
    return None
