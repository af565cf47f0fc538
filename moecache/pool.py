"""Device slots: for each kind of layer one tensor ``[slots, *shape]`` per expert parameter, its slots aligned."""

from __future__ import annotations

import math
import os
import re
from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np
import torch

from .bank import ParamSpec
from .errors import CapacityError

__all__ = ["Pool", "available_memory", "slots_for"]

_UNITS = {
    "B": 1,
    "KB": 10**3,
    "MB": 10**6,
    "GB": 10**9,
    "TB": 10**12,
    "KIB": 2**10,
    "MIB": 2**20,
    "GIB": 2**30,
    "TIB": 2**40,
}
# Left to activations, the KV cache and everybody else when the capacity is "auto".
_AUTO_SHARE = 0.5
# Where every slot of every parameter begins. Matrix products of some processors sum in an order that depends on where
# the weights lie within a cache line: in slots all equally aligned, an expert gives the same bits in each.
ALIGNMENT = 64


class Pool:
    """The memory experts are computed from.

    Parameters
    ----------
    kinds : sequence of mappings of parameter name to ParamSpec
    slots : sequence of int
        Slots of each kind. Slot numbers run through the kinds in order.
    device : torch.device

    Attributes
    ----------
    tensors : tuple of dict of str to Tensor ``[slots, *shape]``
        By kind and parameter, indexed by the slot's number within its kind. A slot is contiguous and begins at a multiple
        of 64 bytes; between slots there may be a gap.
    nbytes : int
        Bytes of all slots, gaps included.
    first_slot : tuple of int
        Number of each kind's first slot.

    Raises
    ------
    CapacityError
        The device has less free memory than the slots need, or is of another type. Nothing has been allocated.
    """

    def __init__(self, kinds: Sequence[Mapping[str, ParamSpec]], slots: Sequence[int], device: torch.device) -> None:
        if device.type not in ("cpu", "cuda"):
            raise CapacityError(f"no slots can be made on {device}: expected the CPU or a CUDA device")
        self.nbytes = sum(n * slot_nbytes(kind) for kind, n in zip(kinds, slots, strict=True))
        free = available_memory(device)
        if self.nbytes > free:
            raise CapacityError(
                f"a cache of {sum(slots)} experts needs {self.nbytes:,} bytes and {device} has {free:,} free; ask for a "
                "smaller capacity"
            )
        self.device = device
        self.slots = tuple(slots)
        self.first_slot = tuple(int(n) for n in np.concatenate([[0], np.cumsum(self.slots)])[:-1])
        self.tensors = tuple(
            {name: _aligned_rows(n, spec, device) for name, spec in kind.items()}
            for kind, n in zip(kinds, slots, strict=True)
        )

    def regions(self) -> tuple[dict[tuple[int, str], int], np.ndarray, np.ndarray]:
        """Where the engine writes: number of each (kind, parameter), uint64 address and stride of each number.

        Addresses are those of slot 0 of the whole pool, so that one slot number serves all regions; for later kinds that
        lies before the tensor and may wrap around zero.
        """
        numbers: dict[tuple[int, str], int] = {}
        addresses: list[int] = []
        strides: list[int] = []
        for kind, tensors in enumerate(self.tensors):
            for name, tensor in tensors.items():
                stride = tensor.stride(0) * tensor.element_size()
                numbers[kind, name] = len(addresses)
                addresses.append((tensor.data_ptr() - self.first_slot[kind] * stride) % 2**64)
                strides.append(stride)
        return numbers, np.array(addresses, np.uint64), np.array(strides, np.uint64)


def slot_nbytes(kind: Mapping[str, ParamSpec]) -> int:
    """Bytes that one more slot of a kind takes, the gaps that align it included."""
    return sum(_aligned(spec.nbytes) for spec in kind.values())


def _aligned(nbytes: int) -> int:
    return -(-nbytes // ALIGNMENT) * ALIGNMENT


def _aligned_rows(rows: int, spec: ParamSpec, device: torch.device) -> torch.Tensor:
    stride = _aligned(spec.nbytes) // spec.dtype.itemsize
    # Torch's allocators align to ALIGNMENT on the host and to more on a device.
    storage = torch.empty((rows, stride), dtype=spec.dtype, device=device)
    return storage[:, : math.prod(spec.shape)].unflatten(1, spec.shape) if spec.shape else storage[:, 0]


def slots_for(
    capacity: int | float | str,
    kinds: Sequence[Mapping[str, ParamSpec]],
    experts_of_kind: Sequence[int],
    device: torch.device,
    top_k: int | None,
) -> tuple[int, ...]:
    """Slots of each kind for a capacity as users write it.

    Parameters
    ----------
    capacity : int, float or str
        A number of experts; a fraction in (0, 1] of all experts; bytes as "8GiB", "512MB"; or "auto", half of what the
        device has free.
    kinds, experts_of_kind
        Specs and number of experts of each kind. They share the capacity in proportion.
    top_k : int, optional
        Experts of one token, which every kind must hold at once.

    Raises
    ------
    CapacityError
    """
    if top_k is not None and top_k < 1:
        raise CapacityError(f"top_k {top_k} is no number of experts per token: expected at least 1, or None")
    total = sum(experts_of_kind)
    nbytes = sum(n * slot_nbytes(kind) for kind, n in zip(kinds, experts_of_kind, strict=True))
    share = _share(capacity, total, nbytes, device)
    # Largest remainders first, so that a number of experts is met exactly.
    exact = [share * n for n in experts_of_kind]
    slots = [int(x + 1e-9) for x in exact]
    if isinstance(capacity, (int, np.integer)):
        for kind in sorted(range(len(slots)), key=lambda i: slots[i] - exact[i])[: int(capacity) - sum(slots)]:
            slots[kind] += 1
    counted = isinstance(capacity, (int, np.integer))
    cost = [1 if counted else slot_nbytes(kind) for kind in kinds]
    least = [min(top_k or 1, n) for n in experts_of_kind]
    if not _raise_to(least, slots, cost, share * (total if counted else nbytes)):
        needed = sum(n * slot_nbytes(kind) for kind, n in zip(kinds, least, strict=True))
        raise CapacityError(
            f"capacity {capacity!r} is too small, one token needs {max(least)} at once: ask for at least {sum(least)} "
            f"experts or {needed:,} bytes (of {total}, {nbytes:,} bytes)"
        )
    return tuple(slots)


def _raise_to(least: Sequence[int], slots: list[int], cost: Sequence[int], budget: float) -> bool:
    # A kind of few layers gets what a token needs at the expense of those with many; False when that cannot be.
    slots[:] = [max(n, m) for n, m in zip(slots, least, strict=True)]
    while sum(n * c for n, c in zip(slots, cost, strict=True)) > budget * (1 + 1e-9):
        spare = [kind for kind, n in enumerate(slots) if n > least[kind]]
        if not spare:
            return False
        slots[max(spare, key=lambda kind: slots[kind] - least[kind])] -= 1
    return True


def _share(capacity: int | float | str, total: int, nbytes: int, device: torch.device) -> float:
    # The fraction of all experts that a capacity stands for.
    expected = f'a number of experts up to {total}, a fraction in (0, 1], bytes such as "8GiB" (no space), or "auto"'
    if isinstance(capacity, bool) or not isinstance(capacity, (int, float, str, np.integer, np.floating)):
        raise CapacityError(f"capacity {capacity!r} is not a size: expected {expected}")
    if isinstance(capacity, str):
        if capacity == "auto":
            return min(1.0, _AUTO_SHARE * available_memory(device) / nbytes)
        match = re.fullmatch(r"(\d+(?:\.\d+)?)([A-Za-z]+)", capacity)
        unit = _UNITS.get(match[2].upper()) if match else None
        if match is None or unit is None:
            raise CapacityError(f"capacity {capacity!r} is not understood: expected {expected}")
        return min(1.0, float(match[1]) * unit / nbytes)
    if isinstance(capacity, (int, np.integer)):
        if not 0 < capacity <= total:
            raise CapacityError(f"capacity {capacity} is out of range: expected {expected}")
        return int(capacity) / total
    if not 0.0 < capacity <= 1.0:
        raise CapacityError(f"capacity {capacity} is out of range: expected {expected}")
    return float(capacity)


def available_memory(device: torch.device) -> int:
    """Bytes that can still be allocated on a device; for the CPU the tighter of free RAM and the cgroup's limit."""
    if device.type == "cuda":
        return int(torch.cuda.mem_get_info(device)[0])
    free = _meminfo_available()
    for limit, used in _cgroup_limits():
        free = min(free, max(0, limit - used))
    return free


def _meminfo_available() -> int:
    try:
        for line in Path("/proc/meminfo").read_text().splitlines():
            if line.startswith("MemAvailable:"):
                return int(line.split()[1]) * 1024
    except OSError:
        pass
    return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")


def _cgroup_limits(root: str = "/sys/fs/cgroup", proc: str = "/proc/self/cgroup") -> list[tuple[int, int]]:
    """(limit, bytes in use beyond reclaimable file cache) of every memory cgroup the process is in, inner to outer."""
    found: list[tuple[int, int]] = []
    try:
        lines = Path(proc).read_text().splitlines()
    except OSError:
        return found
    for line in lines:
        _, controllers, path = line.split(":", 2)
        if controllers == "":
            base, limit_name, usage_name, cache_key = Path(root), "memory.max", "memory.current", "file"
        elif "memory" in controllers.split(","):
            base, limit_name, usage_name, cache_key = (
                Path(root, "memory"),
                "memory.limit_in_bytes",
                "memory.usage_in_bytes",
                "total_cache",
            )
        else:
            continue
        group = base / path.lstrip("/")
        for folder in [group, *group.parents]:
            if not folder.is_relative_to(base):
                break
            try:
                limit = (folder / limit_name).read_text().strip()
                used = int((folder / usage_name).read_text())
            except (OSError, ValueError):
                continue
            if limit != "max":
                found.append((int(limit), max(0, used - _reclaimable(folder, cache_key))))
    return found


def _reclaimable(folder: Path, key: str) -> int:
    try:
        stat = dict(row.split() for row in (folder / "memory.stat").read_text().splitlines())
        return int(stat.get(key, 0))
    except (OSError, ValueError):
        return 0
