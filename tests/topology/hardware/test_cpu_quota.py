"""CPU quotas of cgroups: version 1, version 2, nested, in containers; and one of this machine's kernel."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from laddertron.topology.hardware import cpu_quota as module
from laddertron.topology.hardware.cpu_quota import cpu_quota, memory_limit, usable_cpus
from laddertron.topology.hardware.sysfs import Sysfs

V2 = "30 23 0:26 {root} /sys/fs/cgroup rw - cgroup2 cgroup2 rw"
V1 = "31 23 0:27 {root} /sys/fs/cgroup/cpu,cpuacct rw shared:9 - cgroup cgroup rw,cpu,cpuacct"
MEMORY = "32 23 0:28 / /sys/fs/cgroup/memory rw - cgroup cgroup rw,memory"


def tree(root: Path, groups: str, mounts: str, **quotas: str) -> Sysfs:
    """`quotas`: by folder below /sys/fs/cgroup with __ for /, as "quota period"."""
    (root / "proc/self").mkdir(parents=True)
    (root / "proc/self/cgroup").write_text(groups)
    (root / "proc/self/mountinfo").write_text(mounts + "\n")
    for name, text in quotas.items():
        folder = root / "sys/fs/cgroup" / name.strip("_").replace("__", "/")
        folder.mkdir(parents=True, exist_ok=True)
        quota, period = text.split()
        if mounts.endswith("cgroup2 rw"):
            (folder / "cpu.max").write_text(text + "\n")
        else:
            (folder / "cpu.cfs_quota_us").write_text(quota + "\n")
            (folder / "cpu.cfs_period_us").write_text(period + "\n")
    return Sysfs(root)


@pytest.mark.parametrize(
    ("groups", "mounts", "quotas", "expected"),
    [
        ("0::/", V2.format(root="/"), {}, None),
        ("0::/a/b", V2.format(root="/"), {"a__b": "max 100000"}, None),
        ("0::/a/b", V2.format(root="/"), {"a__b": "50000 100000"}, 0.5),
        ("0::/a/b", V2.format(root="/"), {"a__b": "800000 100000", "a": "150000 100000"}, 1.5),  # an ancestor's
        ("0::/a/b", V2.format(root="/"), {"a__b": "max 100000", "_": "20000 10000"}, 2.0),
        ("0::/a/b", V2.format(root="/"), {"c": "50000 100000"}, None),  # another group's
        ("0::/", V2.format(root="/"), {"_": "300000 100000"}, 3.0),  # a container with a namespace of cgroups
        ("0::/docker/1/x", V2.format(root="/docker/1"), {"x": "50000 100000"}, 0.5),  # one without
        ("0::/../../y", V2.format(root="/"), {"_": "50000 100000"}, 0.5),  # joined from another namespace
        ("4:cpuacct,cpu:/a\n0::/", V1.format(root="/"), {"cpu,cpuacct__a": "50000 100000"}, 0.5),
        ("4:cpu,cpuacct:/a", V1.format(root="/"), {"cpu,cpuacct__a": "-1 100000"}, None),
        (
            "4:cpu,cpuacct:/a/b", V1.format(root="/"),
            {"cpu,cpuacct__a__b": "-1 100000", "cpu,cpuacct__a": "250000 100000"}, 2.5,
        ),
        ("4:cpu,cpuacct:/docker/1", V1.format(root="/docker/1"), {"cpu,cpuacct": "150000 100000"}, 1.5),
        ("4:memory:/a", MEMORY, {"memory__a": "50000 100000"}, None),
        ("", "", {}, None),
        ("4:cpu,cpuacct:/a", V1.format(root="/"), {"cpu,cpuacct__a": "50000 0"}, None),
        ("nonsense\n\n::", "nonsense - x\n\n1 2", {}, None),
    ],
)  # fmt: skip
def test_the_tightest_quota_counts(
    tmp_path: Path, groups: str, mounts: str, quotas: dict[str, str], expected: float | None
) -> None:
    assert cpu_quota(tree(tmp_path, groups, mounts, **quotas)) == expected


def test_the_tightest_memory_limit_counts(tmp_path: Path) -> None:
    """Version 1 writes a number also where there is no limit, version 2 a word."""
    fs = tree(tmp_path, "4:memory:/a/b\n0::/c", f"{MEMORY}\n{V2.format(root='/')}")
    limits = {"memory/a": str(2 << 30), "memory/a/b": str((1 << 63) - 4096)}
    for folder, limit in limits.items():
        (tmp_path / "sys/fs/cgroup" / folder).mkdir(parents=True)
        (tmp_path / "sys/fs/cgroup" / folder / "memory.limit_in_bytes").write_text(limit)
    assert memory_limit(fs) == 2 << 30
    (tmp_path / "sys/fs/cgroup/c").mkdir()
    for limit, tightest in (("max", 2 << 30), (str(1 << 30), 1 << 30)):
        (tmp_path / "sys/fs/cgroup/c/memory.max").write_text(limit)
        assert memory_limit(fs) == tightest
    assert memory_limit(Sysfs(tmp_path / "none")) is None


def test_both_versions_at_once(tmp_path: Path) -> None:
    """A hybrid host: the controller is in one hierarchy, and files of the other are absent."""
    fs = tree(tmp_path, "4:cpu,cpuacct:/a\n0::/b", f"{V2.format(root='/')}\n{V1.format(root='/')}", a="1 1")
    folder = tmp_path / "sys/fs/cgroup/cpu,cpuacct/a"
    folder.mkdir(parents=True)
    (folder / "cpu.cfs_quota_us").write_text("70000")
    (folder / "cpu.cfs_period_us").write_text("100000")
    assert cpu_quota(fs) == 0.7


@pytest.mark.parametrize(
    ("quota", "cores", "sharers", "cpus"),
    [(None, 4, 1, 4), (0.5, 4, 1, 1), (1.5, 4, 1, 1), (2.0, 4, 1, 2), (8.0, 4, 1, 4), (8.0, 4, 4, 2), (1.0, 4, 4, 1)],
)
def test_threads_that_a_quota_pays_for(
    monkeypatch: pytest.MonkeyPatch, quota: float | None, cores: int, sharers: int, cpus: int
) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: set(range(cores)))
    monkeypatch.setattr(module, "cpu_quota", lambda fs=None: quota)
    assert usable_cpus(sharers) == cpus


@pytest.fixture
def half_a_processor() -> Iterator[Path]:
    """A group of this kernel with a quota, in whichever version it can be made."""
    for parent, file, text in (
        ("/sys/fs/cgroup", "cpu.max", "50000 100000"),
        ("/sys/fs/cgroup/cpu", "cpu.cfs_quota_us", "50000"),
    ):
        group = Path(parent, f"laddertron-test-{os.getpid()}")
        try:
            group.mkdir()
        except OSError:
            continue
        try:
            if (group / file).exists():
                (group / file).write_text(text)
                yield group
                return
        except OSError:
            continue
        finally:
            group.rmdir()
    pytest.skip("no cgroup with a CPU quota can be made here")


def test_a_quota_of_this_kernel(half_a_processor: Path) -> None:
    """A process that joins the group reads it: one thread."""
    code = (
        "import os; from pathlib import Path; "
        f"Path({str(half_a_processor / 'cgroup.procs')!r}).write_text(str(os.getpid())); "
        "from laddertron.topology.hardware.cpu_quota import cpu_quota, usable_cpus; print(cpu_quota(), usable_cpus())"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.split() == ["0.5", "1"]
