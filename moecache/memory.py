"""How much memory there is: the device, the machine, memory cgroups of both versions, and the process's own limits."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch

__all__ = ["Bound", "available_memory", "bounds", "tightest", "untouched_nbytes"]

_PAGE = os.sysconf("SC_PAGE_SIZE")
# A version 1 cgroup without a limit has the largest multiple of a page that fits 63 bits.
_NO_LIMIT = 1 << 62
_PRESENT_OR_SWAPPED = np.uint64(3 << 62)


@dataclass(frozen=True)
class Bound:
    """One limit on what the process may still allocate.

    Attributes
    ----------
    name : str
        What limits, for messages.
    limit : int
        Bytes in all.
    used : int
        Bytes in use that the kernel cannot take back. The page cache is none of it.
    mapped : int
        Bytes of files that processes have mapped and touched: libraries, weights read through a mapping. The kernel does
        take them back, and whoever runs from them reads them again and again.
    """

    name: str
    limit: int
    used: int
    mapped: int = 0

    @property
    def free(self) -> int:
        """What can be allocated before the kernel refuses or ends the process."""
        return max(0, self.limit - self.used)

    @property
    def comfortable(self) -> int:
        """What can be allocated before processes lose the pages they run from."""
        return max(0, self.limit - self.used - self.mapped)


def available_memory(device: torch.device) -> int:
    """Bytes that can still be allocated on a device: for the CPU, under the tightest of all limits.

    Parameters
    ----------
    device : torch.device
    """
    return min(bound.free for bound in bounds(device))


def tightest(device: torch.device) -> Bound:
    """The limit that leaves the least beside what is mapped."""
    return min(bounds(device), key=lambda bound: bound.comfortable)


def bounds(device: torch.device) -> list[Bound]:
    """Every limit that applies to allocations on a device; never empty."""
    if device.type == "cuda":
        free, total = torch.cuda.mem_get_info(device)
        # What torch's allocator holds and has given to nobody it gives to us, or back to the driver when it runs short.
        kept = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
        return [Bound(str(device), int(total), int(total - free - kept))]
    return [_machine(), *_cgroups(), *_resource_limits()]


def untouched_nbytes(ranges: Iterable[tuple[int, int]], pagemap: str = "/proc/self/pagemap") -> int:
    """Bytes of some memory that have no page yet, and take one when they are first used.

    Parameters
    ----------
    ranges : iterable of (address, bytes)
    pagemap : str

    Returns
    -------
    int
        0 where the system does not say.
    """
    pages = 0
    spans = sorted((start // _PAGE, -(-(start + nbytes) // _PAGE)) for start, nbytes in ranges if nbytes > 0)
    try:
        with open(pagemap, "rb", buffering=0) as file:
            seen = 0
            for first, last in spans:
                for at in range(max(first, seen), last, 1 << 16):
                    file.seek(at * 8)
                    entries = np.frombuffer(file.read(8 * min(1 << 16, last - at)), np.uint64)
                    pages += int(np.count_nonzero((entries & _PRESENT_OR_SWAPPED) == 0))
                seen = max(seen, last)
    except OSError:
        return 0
    return pages * _PAGE


def _machine(path: str = "/proc/meminfo") -> Bound:
    fields = dict(_numbers(path))
    total = fields.get("MemTotal", 0) * 1024 or os.sysconf("SC_PHYS_PAGES") * _PAGE
    free = fields.get("MemAvailable", total // 1024) * 1024
    return Bound("the machine", total, max(0, total - free), fields.get("Mapped", 0) * 1024)


def _resource_limits(status: str = "/proc/self/status") -> Iterator[Bound]:
    # `ulimit -v` and `ulimit -d`: refused there, an allocation is an error that names no reason.
    try:
        import resource
    except ImportError:
        return
    fields = dict(_numbers(status))
    for number, name, field in (
        (resource.RLIMIT_AS, "RLIMIT_AS (ulimit -v)", "VmSize"),
        (resource.RLIMIT_DATA, "RLIMIT_DATA (ulimit -d)", "VmData"),
    ):
        limit = resource.getrlimit(number)[0]
        if limit != resource.RLIM_INFINITY:
            yield Bound(name, limit, fields.get(field, 0) * 1024)


def _cgroups(root: str = "/sys/fs/cgroup", proc: str = "/proc/self/cgroup") -> list[Bound]:
    """The limits of every memory cgroup the process is in, inner to outer."""
    found: list[Bound] = []
    try:
        lines = Path(proc).read_text().splitlines()
    except OSError:
        return found
    for line in lines:
        _, controllers, path = line.split(":", 2)
        if controllers == "":
            found += _groups_above(Path(root), path, _version_2)
        elif "memory" in controllers.split(","):
            found += _groups_above(Path(root, "memory"), path, _version_1)
    return found


def _groups_above(
    base: Path, path: str, read: Callable[[Path], tuple[int | None, int | None, dict[str, int]]]
) -> Iterator[Bound]:
    group = base / path.lstrip("/")
    for folder in [group, *group.parents]:
        if not folder.is_relative_to(base):
            return
        limit, used, stat = read(folder)
        if limit is None or used is None:
            continue
        # Files on tmpfs and shared memory are counted as cache, and nothing but swap takes them back.
        files = stat.get("inactive_file", 0) + stat.get("active_file", 0)
        mapped = min(stat.get("mapped", 0), files)
        yield Bound(f"the memory cgroup {folder}", limit, max(0, used - files - stat.get("slab", 0)), mapped)


def _version_2(folder: Path) -> tuple[int | None, int | None, dict[str, int]]:
    stat = dict(_numbers(folder / "memory.stat"))
    stat |= {"mapped": stat.get("file_mapped", 0), "slab": stat.get("slab_reclaimable", 0)}
    # Above memory.high a process is slowed down until it stands still.
    limits = [limit for name in ("memory.max", "memory.high") if (limit := _number(folder / name)) is not None]
    return min(limits, default=None), _number(folder / "memory.current"), stat


def _version_1(folder: Path) -> tuple[int | None, int | None, dict[str, int]]:
    stat = dict(_numbers(folder / "memory.stat"))
    # The limits of groups above that a container does not show are in it.
    limit = min(
        _number(folder / "memory.limit_in_bytes") or _NO_LIMIT, stat.get("hierarchical_memory_limit", _NO_LIMIT)
    )
    stat = {
        "inactive_file": stat.get("total_inactive_file", 0),
        "active_file": stat.get("total_active_file", 0),
        "mapped": stat.get("total_mapped_file", 0),
    }
    return limit if limit < _NO_LIMIT else None, _number(folder / "memory.usage_in_bytes"), stat


def _number(path: Path) -> int | None:
    try:
        return int(path.read_text())
    except (OSError, ValueError):
        return None


def _numbers(path: str | Path) -> Iterator[tuple[str, int]]:
    try:
        lines = Path(path).read_text().splitlines()
    except OSError:
        return
    for line in lines:
        words = line.split()
        if len(words) >= 2 and words[1].isdecimal():
            yield words[0].rstrip(":"), int(words[1])
