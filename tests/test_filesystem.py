"""Whether nodes mean the same bytes: what mount tables say, and what follows from what each node sees."""

from __future__ import annotations

import os
from dataclasses import replace
from pathlib import Path

import pytest
from laddertron.topology.filesystem import SEEN_BYTES, Seen, comes_by_net, filesystem_of, look, why_not_shared
from laddertron.topology.sysfs import Sysfs

MOUNTS = """\
22 1 259:2 / / rw,relatime shared:1 - ext4 /dev/nvme0n1p2 rw
31 22 0:45 / /models rw,relatime shared:9 - nfs4 server:/export rw,vers=4.2
32 31 0:46 / /models/fast rw,relatime shared:10 - tmpfs tmpfs rw
33 22 0:50 / /with\\040space rw - lustre 10.0.0.1@o2ib:/fs rw
34 22 0:51 / /stack rw - ext4 /dev/sdb1 rw
35 34 0:52 / /stack rw - fuse.juicefs JuiceFS:x rw
broken line
36 22 0:53 / /mo rw - xfs /dev/sdc rw"""


@pytest.mark.parametrize(
    ("path", "kind"),
    [
        ("/home/a/model", "ext4"),
        ("/models", "nfs4"),
        ("/models/llama", "nfs4"),
        ("/models/fast/llama", "tmpfs"),
        ("/modelsandmore", "ext4"),
        ("/with space/m", "lustre"),
        ("/stack/m", "fuse.juicefs"),
    ],
)
def test_a_path_lies_on_the_last_of_the_longest_mounts(path: str, kind: str) -> None:
    assert filesystem_of(Path(path), MOUNTS) == kind
    assert filesystem_of(Path(path), "") == ""


def test_which_filesystems_come_over_a_network() -> None:
    assert all(map(comes_by_net, ("nfs", "nfs4", "lustre", "gpfs", "ceph", "beegfs", "cifs", "fuse.gcsfuse", "wekafs")))
    assert not any(map(comes_by_net, ("ext4", "xfs", "tmpfs", "overlay", "zfs", "fuseblk", "fuse.fuse-overlayfs", "")))


def test_nodes_share_only_what_a_server_gives_all_of_them() -> None:
    """Two machines with the same files of a server do; one page cache, disks of their own, or another copy do not."""
    a, b = Seen(b"a" * 16, b"f" * 16, True), Seen(b"b" * 16, b"f" * 16, True)
    assert Seen.unpack(a.pack()) == a
    assert len(a.pack()) == SEEN_BYTES
    assert why_not_shared([a, b]) is None
    assert "one page cache" in str(why_not_shared([a, replace(b, kernel=a.kernel)]))
    assert "network filesystem" in str(why_not_shared([a, replace(b, network=False)]))
    assert "differ between nodes" in str(why_not_shared([a, replace(b, files=b"g" * 16)]))


def test_a_look_tells_copies_and_changes_apart(tmp_path: Path) -> None:
    """The same files looked at twice are the same; a copy with the same time, or a touched file, is not. A host whose
    mount table is a server's says so."""
    root = tmp_path / "root"
    (root / "proc/self").mkdir(parents=True)
    (root / "proc/sys/kernel/random").mkdir(parents=True)
    (root / "proc/sys/kernel/random/boot_id").write_text("a boot\n")
    (root / "proc/self/mountinfo").write_text(f"1 0 0:1 / {tmp_path.resolve()} rw - nfs4 s:/x rw\n")
    file, copy = tmp_path / "a" / "m.safetensors", tmp_path / "b" / "m.safetensors"
    for path in (file, copy):
        path.parent.mkdir()
        path.write_bytes(b"same")
        os.utime(path, ns=(1, 1))
    seen = look([file], Sysfs(root))
    assert seen == look([file], Sysfs(root))
    assert seen.network
    assert seen.files != look([copy], Sysfs(root)).files
    os.utime(file, ns=(1, 2))
    assert seen.files != look([file], Sysfs(root)).files
    assert not look([file], Sysfs(tmp_path / "nothing")).network
