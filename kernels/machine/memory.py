"""Measures the memory available on this machine, within a container's limit, and the memory that this process uses.

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
    """Returns the bytes that programs can still allocate, or None if the number is unknown.

    `root` is the folder that contains proc and sys, which tests replace.
    """
    available = [1024 * int(line.split()[1]) for line in _lines(root / "proc/meminfo") if line.startswith("MemAvailable:")]
    return min([*available, *_free_in_cgroups(root)], default=_total_memory())


def resident_memory(root: Path = Path("/")) -> int:
    """Returns the bytes of memory that this process uses, including its code and libraries, or 0 if the number is unknown."""
    for line in _lines(root / "proc/self/statm"):
        return int(line.split()[1]) * mmap.PAGESIZE
    return 0


def peak_memory(root: Path = Path("/")) -> float:
    """Returns the largest number of bytes of memory that this process has used so far, or NaN on Windows."""
    if sys.platform == "win32":
        return float("nan")              # the standard library cannot measure the peak on Windows
    for line in _lines(root / "proc/self/status"):
        if line.startswith("VmHWM:"):    # some sandboxes lack this line
            return 1024 * int(line.split()[1])
    import resource

    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss        # on Linux includes the parent's peak from before exec
    return 1024 * peak if sys.platform == "linux" else peak          # macOS counts bytes


def _free_in_cgroups(root: Path) -> Iterator[int]:
    """Yields the bytes left in each control group with a limit, from this process's own group up to the mount point.

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
                    yield from _free_in_group(folder, *files)


def _free_in_group(folder: Path, limit: str, usage: str, cache: str) -> Iterator[int]:
    """Yields the limit minus the usage, if there is a limit. The cache of inactive files counts as free."""
    limits = _lines(folder / limit)
    usages = _lines(folder / usage)
    if limits and usages and limits[0].isdigit():
        reclaimable = sum(int(line.split()[1]) for line in _lines(folder / "memory.stat") if line.split()[0] == cache)
        yield max(0, int(limits[0]) - int(usages[0]) + reclaimable)


def _total_memory() -> int | None:
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
