"""What a machine has to spare: memory that a program may still take, and room on a disk.

A container's limit counts as well as the machine's memory, which most libraries report alone. Sources: the Linux kernel's
documentation, proc_meminfo, proc_pid_statm, cgroup-v1/memory and cgroup-v2.
"""

import os
import shutil
from collections.abc import Iterator
from pathlib import Path

import torch

V1 = ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file")       # control groups' files, by version
V2 = ("memory.max", "memory.current", "inactive_file")


def free_memory(device: torch.device, root: Path = Path("/")) -> int | None:
    """Bytes that can be had on `device`; None where the system does not tell. `root`: of the file system that says it."""
    if device.type == "cuda":
        return torch.cuda.mem_get_info(device)[0]
    found = [*_unused(root), *_left_by_groups(root)]
    return min(found) if found else _installed()


def resident_memory(root: Path = Path("/")) -> int:
    """Bytes of memory that this process takes by now, its programs included; 0 where the system does not tell."""
    for line in _lines(root / "proc/self/statm"):
        return int(line.split()[1]) * os.sysconf("SC_PAGE_SIZE")
    return 0


def free_disk(folder: Path) -> int:
    """Bytes that can be written into `folder`, which need not be there yet."""
    folder = folder.absolute()
    return shutil.disk_usage(next(path for path in (folder, *folder.parents) if path.exists())).free


def _unused(root: Path) -> Iterator[int]:
    """Linux's own estimate: what is free, and what caches would give up."""
    for line in _lines(root / "proc/meminfo"):
        if line.startswith("MemAvailable:"):
            yield 1024 * int(line.split()[1])


def _left_by_groups(root: Path) -> Iterator[int]:
    """Of the limit of each control group that this process is in, inside of one another."""
    for line in _lines(root / "proc/self/cgroup"):
        _, controllers, path = line.split(":", 2)
        if controllers in ("", "memory") or "memory" in controllers.split(","):
            mounts = ("sys/fs/cgroup", "sys/fs/cgroup/unified") if not controllers else ("sys/fs/cgroup/memory",)
            for mount in mounts:
                for folder in _upwards(root / mount, path):
                    yield from _left(folder, *(V1 if controllers else V2))


def _upwards(mount: Path, path: str) -> Iterator[Path]:
    """The group's folder, its parent's, ... and the mount; inside a container the first may be out of sight."""
    folder = mount / path.lstrip("/")
    yield from (parent for parent in (folder, *folder.parents) if parent.is_relative_to(mount))


def _left(folder: Path, limit: str, usage: str, cache: str) -> Iterator[int]:
    """Limit less use, where pages of files that nobody reads do not count."""
    limits, used = list(_lines(folder / limit)), list(_lines(folder / usage))
    if limits and used and limits[0].isdigit():
        reclaimable = sum(int(line.split()[1]) for line in _lines(folder / "memory.stat") if line.split()[0] == cache)
        yield max(0, int(limits[0]) - int(used[0]) + reclaimable)


def _installed() -> int | None:
    """Where there is no better answer: all the memory of the machine."""
    try:
        return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    except (AttributeError, ValueError, OSError):
        return None


def _lines(path: Path) -> list[str]:
    try:
        return path.read_text(encoding="utf-8").splitlines()
    except OSError:
        return []
