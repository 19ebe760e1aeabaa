"""The processors that this process may use: its affinity and the CPU quotas of its cgroups, versions 1 and 2; and their
limits of memory. Every thread's time counts against a quota, also of threads that wait by looking.
"""

from __future__ import annotations

import os
from pathlib import PurePosixPath

from .sysfs import Sysfs, host_memory_bytes

_NO_LIMIT = 1 << 60
"""Version 1 writes about the largest number where memory has no limit."""


def cpu_quota(fs: Sysfs | None = None) -> float | None:
    """Processors by the tightest quota of this process's cgroups and their ancestors; None without one."""
    fs = fs or Sysfs()
    quotas = (_quota(fs, folder) for mount, inner in _cgroups(fs, "cpu") for folder in _upwards(mount, inner))
    return min((quota for quota in quotas if quota is not None), default=None)


def usable_cpus(sharers: int = 1, fs: Sysfs | None = None) -> int:
    """The number of threads that can compute at once without being throttled, at least 1. `sharers`: processes that
    divide the quota evenly; the affinity is this process's own."""
    cores, quota = len(os.sched_getaffinity(0)), cpu_quota(fs)
    return cores if quota is None else max(1, min(cores, int(quota / sharers)))


def memory_limit(fs: Sysfs | None = None) -> int | None:
    """Bytes by the tightest limit of this process's cgroups and their ancestors; None without one."""
    fs = fs or Sysfs()
    folders = (folder for mount, inner in _cgroups(fs, "memory") for folder in _upwards(mount, inner))
    limits = (fs.number(f"{folder}/{name}") for folder in folders for name in ("memory.max", "memory.limit_in_bytes"))
    return min((limit for limit in limits if limit is not None and limit < _NO_LIMIT), default=None)


def memory_bytes(fs: Sysfs | None = None) -> int:
    """Memory of the host, or what this process's cgroups have of it if that is less."""
    fs = fs or Sysfs()
    return min(host_memory_bytes(fs), memory_limit(fs) or _NO_LIMIT)


def _cgroups(fs: Sysfs, limiting: str) -> list[tuple[str, PurePosixPath]]:
    """The mounts of hierarchies with the controller `limiting`, and this process's group below each."""
    groups = dict[str, str]()
    for line in fs.text("proc/self/cgroup").splitlines():
        _, controllers, path = (*line.split(":", 2), "", "")[:3]
        groups |= dict.fromkeys(controllers.split(","), path)
    hierarchies = []
    for line in fs.text("proc/self/mountinfo").splitlines():
        fields, _, rest = (part.split() for part in line.partition(" - "))
        kind, options = (rest[0], rest[-1].split(",")) if rest else ("", [])
        controller = "" if kind == "cgroup2" else limiting if kind == "cgroup" and limiting in options else None
        if controller is None or controller not in groups or len(fields) < 5:
            continue
        root, mount = fields[3], fields[4]
        try:
            inner = PurePosixPath(groups[controller]).relative_to(root)
        except ValueError:  # the group is seen from another namespace: what is mounted is this container's
            inner = PurePosixPath()
        hierarchies.append((mount.lstrip("/"), PurePosixPath() if ".." in inner.parts else inner))
    return hierarchies


def _upwards(mount: str, inner: PurePosixPath) -> list[str]:
    return [f"{mount}/{part}" for part in (inner, *inner.parents)]


def _quota(fs: Sysfs, folder: str) -> float | None:
    words = fs.text(f"{folder}/cpu.max").split() or [
        fs.text(f"{folder}/cpu.cfs_quota_us"), fs.text(f"{folder}/cpu.cfs_period_us")
    ]  # fmt: skip
    if len(words) != 2 or not all(word.isdecimal() and int(word) for word in words):
        return None  # "max", and -1 of version 1: no quota here
    return int(words[0]) / int(words[1])
