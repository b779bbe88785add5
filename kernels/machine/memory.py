"""The memory available on this machine, within the limit of a container, and the memory that this process uses.

Sources: the Linux kernel's documentation, proc_meminfo, proc_pid_statm, cgroup-v1/memory and cgroup-v2.
"""

import mmap
import os
import sys
from collections.abc import Iterator
from pathlib import Path

CGROUP_V1 = ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file")      # limit, usage; memory.stat key
CGROUP_V2 = ("memory.max", "memory.current", "inactive_file")


def available_memory(root: Path = Path("/")) -> int | None:
    """The bytes that programs can still allocate; None if unknown. root: the folder that contains proc and sys, for tests."""
    available = [1024 * int(line.split()[1]) for line in _lines(root / "proc/meminfo") if line.startswith("MemAvailable:")]
    return min([*available, *_left_in_cgroups(root)], default=_installed())


def resident_memory(root: Path = Path("/")) -> int:
    """The bytes of memory that this process uses, including its code and libraries; 0 if unknown."""
    for line in _lines(root / "proc/self/statm"):
        return int(line.split()[1]) * mmap.PAGESIZE
    return 0


def _left_in_cgroups(root: Path) -> Iterator[int]:
    """The bytes left in each control group with a limit: this process's own group and its parents, up to the mount point.

    Inside a container, /proc may show the path on the host, so folders that do not exist are skipped.
    """
    for line in _lines(root / "proc/self/cgroup"):
        _, controllers, path = line.split(":", 2)
        if controllers == "":
            mounts = ["sys/fs/cgroup", "sys/fs/cgroup/unified"]
            files = CGROUP_V2
        elif "memory" in controllers.split(","):
            mounts = ["sys/fs/cgroup/memory"]
            files = CGROUP_V1
        else:
            continue
        for mount in (root / mount for mount in mounts):
            group = mount / path.lstrip("/")
            for folder in (group, *group.parents):
                if folder.is_relative_to(mount):
                    yield from _left(folder, *files)


def _left(folder: Path, limit: str, usage: str, cache: str) -> Iterator[int]:
    """Yields the limit minus the usage, if there is a limit. The reclaimable cache of inactive files counts as free."""
    limits = _lines(folder / limit)
    usages = _lines(folder / usage)
    if limits and usages and limits[0].isdigit():
        reclaimable = sum(int(line.split()[1]) for line in _lines(folder / "memory.stat") if line.split()[0] == cache)
        yield max(0, int(limits[0]) - int(usages[0]) + reclaimable)


def _installed() -> int | None:
    """The machine's total memory in bytes, for systems without /proc; None if unknown."""
    if sys.platform == "win32":
        return None
    try:
        return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    except (ValueError, OSError):
        return None


def _lines(path: Path) -> list[str]:
    try:
        return path.read_text(encoding="utf-8").splitlines()
    except OSError:
        return []
