"""How many slots: capacities as people write them, and the one that fits what is free."""

from __future__ import annotations

import logging
import re
from collections.abc import Mapping, Sequence
from typing import NamedTuple

import numpy as np
import torch

from .bank import ParamSpec
from .errors import CapacityError
from .memory import Bound, bounds
from .pool import slot_nbytes

__all__ = ["FreeMemory", "free_memory", "nbytes_of", "slots_for"]

logger = logging.getLogger("moecache")

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
# Of each limit, what "auto" leaves to libraries and code that are not in memory yet, to allocators and to everybody else.
_HEADROOM = 1 / 32


def slots_for(
    capacity: int | float | str,
    shape_groups: Sequence[Mapping[str, ParamSpec]],
    experts_of_group: Sequence[int],
    device: torch.device,
    top_k: int | None,
    *,
    reserve: int = 0,
    held: int = 0,
) -> tuple[int, ...]:
    """Slots of each shape group for a capacity as users write it.

    Parameters
    ----------
    capacity : int, float or str
        A number of experts; a fraction in (0, 1] of all experts; bytes as "8GiB", "512MB"; or "auto", what :func:`free_memory`
        finds.
    shape_groups, experts_of_group
        Specs and number of experts of each shape group. They share the capacity in proportion.
    top_k : int, optional
        Experts of one token, which every shape group must hold at once.
    reserve, held : int
        Bytes, for "auto": see :func:`free_memory`.

    Raises
    ------
    CapacityError
    """
    if top_k is not None and top_k < 1:
        raise CapacityError(f"top_k {top_k} is no number of experts per token: expected at least 1, or None")
    total = sum(experts_of_group)
    nbytes = sum(n * slot_nbytes(group) for group, n in zip(shape_groups, experts_of_group, strict=True))
    free = free_memory(device, reserve, held) if isinstance(capacity, str) and capacity == "auto" else None
    share = _share(capacity, total, nbytes) if free is None else min(1.0, free.nbytes / nbytes)
    # Largest remainders first, so that a number of experts is met exactly.
    exact = [share * n for n in experts_of_group]
    slots = [int(x + 1e-9) for x in exact]
    if isinstance(capacity, (int, np.integer)):
        for group in sorted(range(len(slots)), key=lambda i: slots[i] - exact[i])[: int(capacity) - sum(slots)]:
            slots[group] += 1
    counted = isinstance(capacity, (int, np.integer))
    cost = [1 if counted else slot_nbytes(group) for group in shape_groups]
    least = [min(top_k or 1, n) for n in experts_of_group]
    if not _raise_to(least, slots, cost, share * (total if counted else nbytes)):
        needed = sum(n * slot_nbytes(group) for group, n in zip(shape_groups, least, strict=True))
        raise CapacityError(
            f"capacity {capacity!r} is too small, one token needs {max(least)} at once: ask for at least {sum(least)} "
            f"experts or {needed:,} bytes (of {total}, {nbytes:,} bytes)"
            + ("" if free is None else f". {free.account}")
        )
    if free is not None:
        logger.info("capacity 'auto' is %d of %d experts. %s", sum(slots), total, free.account)
    return tuple(slots)


class FreeMemory(NamedTuple):
    """What "auto" may fill.

    Attributes
    ----------
    nbytes : int
    account : str
        How that comes about, for people.
    """

    nbytes: int
    account: str


def free_memory(device: torch.device, reserve: int = 0, held: int = 0) -> FreeMemory:
    """What experts may take of a device without anything else being pushed out.

    Of every limit that applies (the device, the machine, memory cgroups, RLIMIT_AS and RLIMIT_DATA) there goes what is in
    use, the pages of files that processes run from, a thirty-second as headroom, and the reserve. The least that remains counts.
    Swap is no memory here.

    Parameters
    ----------
    device : torch.device
    reserve : int
        Bytes that are still to come: a KV cache, activations, weights that have not been read yet.
    held : int
        Bytes of slots that the new ones replace. More than that is offered only as far as both fit at once, as they
        must when a cache grows.
    """

    def left(bound: Bound) -> int:
        beside = max(0, bound.comfortable - int(_HEADROOM * bound.limit) - reserve)
        return max(beside, min(held, bound.comfortable + held - int(_HEADROOM * bound.limit) - reserve))

    bound = min(bounds(device), key=left)
    return FreeMemory(
        left(bound),
        f"{bound.name} limits memory to {bound.limit:,} bytes: {max(0, bound.used - held):,} are in use, {bound.mapped:,} "
        f"are mapped files, {int(_HEADROOM * bound.limit):,} headroom, {reserve:,} still to come, which leaves "
        f"{left(bound):,} for experts",
    )


def nbytes_of(size: int | str) -> int:
    """Bytes of a size as users write it: a number of bytes, or "2GiB".

    Raises
    ------
    CapacityError
    """
    if isinstance(size, (int, np.integer)) and not isinstance(size, bool) and size >= 0:
        return int(size)
    nbytes = _parsed(size) if isinstance(size, str) else None
    if nbytes is None:
        raise CapacityError(
            f'reserve {size!r} is no size: expected a number of bytes from 0 on, or such as "2GiB" (no space)'
        )
    return int(nbytes)


def _parsed(text: str) -> float | None:
    match = re.fullmatch(r"(\d+(?:\.\d+)?)([A-Za-z]+)", text)
    unit = _UNITS.get(match[2].upper()) if match else None
    return None if match is None or unit is None else float(match[1]) * unit


def _raise_to(least: Sequence[int], slots: list[int], cost: Sequence[int], budget: float) -> bool:
    # A group of few layers gets what a token needs at the expense of those with many; False when that cannot be.
    slots[:] = [max(n, m) for n, m in zip(slots, least, strict=True)]
    while sum(n * c for n, c in zip(slots, cost, strict=True)) > budget * (1 + 1e-9):
        spare = [group for group, n in enumerate(slots) if n > least[group]]
        if not spare:
            return False
        slots[max(spare, key=lambda group: slots[group] - least[group])] -= 1
    return True


def _share(capacity: int | float | str, total: int, nbytes: int) -> float:
    # The fraction of all experts that a capacity stands for.
    expected = f'a number of experts up to {total}, a fraction in (0, 1], bytes such as "8GiB" (no space), or "auto"'
    if isinstance(capacity, bool) or not isinstance(capacity, (int, float, str, np.integer, np.floating)):
        raise CapacityError(f"capacity {capacity!r} is not a size: expected {expected}")
    if isinstance(capacity, str):
        asked = _parsed(capacity)
        if asked is None:
            raise CapacityError(f"capacity {capacity!r} is not understood: expected {expected}")
        return min(1.0, asked / nbytes)
    if isinstance(capacity, (int, np.integer)):
        if not 0 < capacity <= total:
            raise CapacityError(f"capacity {capacity} is out of range: expected {expected}")
        return int(capacity) / total
    if not 0.0 < capacity <= 1.0:
        raise CapacityError(f"capacity {capacity} is out of range: expected {expected}")
    return float(capacity)
