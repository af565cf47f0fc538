"""Device slots: for each shape group one tensor ``[slots, *shape]`` per expert parameter, its slots aligned."""

from __future__ import annotations

import ctypes
import math
import mmap
from collections.abc import Mapping, Sequence

import numpy as np
import torch

from .bank import ParamSpec
from .errors import CapacityError
from .memory import available_memory

__all__ = ["Pool", "slot_nbytes"]

# Where every slot of every parameter begins. Matrix products of some processors sum in an order that depends on where
# the weights lie within a cache line: in slots all equally aligned, an expert gives the same bits in each.
ALIGNMENT = 64

_MADVISE = ctypes.CDLL(None).madvise


class Pool:
    """The memory experts are computed from.

    Parameters
    ----------
    shape_groups : sequence of mappings of parameter name to ParamSpec
    slots : sequence of int
        Slots of each shape group. Slot numbers run through the groups in order.
    device : torch.device

    Attributes
    ----------
    tensors : tuple of dict of str to Tensor ``[slots, *shape]``
        By shape group and parameter, indexed by the slot's number within its group. A slot is contiguous and begins at a multiple
        of 64 bytes; between slots there may be a gap.
    nbytes : int
        Bytes of all slots, gaps included.
    first_slot : tuple of int
        Number of each group's first slot.

    Raises
    ------
    CapacityError
        The device has less free memory than the slots need, or is of another type. Nothing has been allocated.
    """

    def __init__(
        self, shape_groups: Sequence[Mapping[str, ParamSpec]], slots: Sequence[int], device: torch.device
    ) -> None:
        if device.type not in ("cpu", "cuda"):
            raise CapacityError(f"no slots can be made on {device}: expected the CPU or a CUDA device")
        self.shape_groups, self.device, self.slots = shape_groups, device, tuple(slots)
        free = available_memory(device)
        if self.nbytes > free:
            raise CapacityError(
                f"a cache of {sum(slots)} experts needs {self.nbytes:,} bytes and {device} has {free:,} free; ask for a "
                "smaller capacity"
            )
        self.first_slot = _first_slots(self.slots)
        self.tensors = tuple(
            {name: _aligned_rows(n, spec, device) for name, spec in group.items()}
            for group, n in zip(shape_groups, slots, strict=True)
        )

    @property
    def nbytes(self) -> int:
        return sum(n * slot_nbytes(group) for group, n in zip(self.shape_groups, self.slots, strict=True))

    def narrowed(self, slots: Sequence[int]) -> Pool:
        """A pool of the first slots of each shape group, over the same memory."""
        pool = object.__new__(Pool)
        pool.shape_groups, pool.device, pool.slots = self.shape_groups, self.device, tuple(slots)
        pool.first_slot = _first_slots(pool.slots)
        pool.tensors = tuple(
            {name: tensor[:n] for name, tensor in tensors.items()}
            for n, tensors in zip(slots, self.tensors, strict=True)
        )
        return pool

    def release_beyond(self, wider: Pool) -> None:
        """Give the pages of a wider pool over the same memory that no slot of this one lies in back to the system (CPU)."""
        # A pool that was closed meanwhile has none.
        for narrow, wide in zip(self.tensors, wider.tensors, strict=False):
            for name, tensor in narrow.items():
                stride = tensor.stride(0) * tensor.element_size()
                start, end = (tensor.data_ptr() + n * stride for n in (len(tensor), len(wide[name])))
                start, end = -(-start // mmap.PAGESIZE) * mmap.PAGESIZE, end // mmap.PAGESIZE * mmap.PAGESIZE
                if start < end:
                    _MADVISE(ctypes.c_void_p(start), ctypes.c_size_t(end - start), mmap.MADV_DONTNEED)

    def copy_of(self, group: int, name: str) -> tuple[torch.Tensor, int]:
        """A parameter's slots in memory of their own, and where slot 0 of the whole pool would lie there."""
        copy = _aligned_rows(self.slots[group], self.shape_groups[group][name], self.device)
        copy.copy_(self.tensors[group][name])
        return copy, self._origin(group, copy)

    def _origin(self, group: int, tensor: torch.Tensor) -> int:
        return (tensor.data_ptr() - self.first_slot[group] * tensor.stride(0) * tensor.element_size()) % 2**64

    def regions(self) -> tuple[dict[tuple[int, str], int], np.ndarray, np.ndarray]:
        """Where the engine writes: number of each (shape group, parameter), uint64 address and stride of each number.

        Addresses are those of slot 0 of the whole pool, so that one slot number serves all regions; for later groups that
        lies before the tensor and may wrap around zero.
        """
        numbers: dict[tuple[int, str], int] = {}
        addresses: list[int] = []
        strides: list[int] = []
        for group, tensors in enumerate(self.tensors):
            for name, tensor in tensors.items():
                stride = tensor.stride(0) * tensor.element_size()
                numbers[group, name] = len(addresses)
                addresses.append(self._origin(group, tensor))
                strides.append(stride)
        return numbers, np.array(addresses, np.uint64), np.array(strides, np.uint64)


def _first_slots(slots: Sequence[int]) -> tuple[int, ...]:
    return tuple(int(n) for n in np.concatenate([[0], np.cumsum(slots)])[:-1])


def slot_nbytes(group: Mapping[str, ParamSpec]) -> int:
    """Bytes that one more slot of a shape group takes, the gaps that align it included."""
    return sum(_aligned(spec.nbytes) for spec in group.values())


def _aligned(nbytes: int) -> int:
    return -(-nbytes // ALIGNMENT) * ALIGNMENT


def _aligned_rows(rows: int, spec: ParamSpec, device: torch.device) -> torch.Tensor:
    stride = _aligned(spec.nbytes) // spec.dtype.itemsize
    # Torch's allocators align to ALIGNMENT on the host and to more on a device.
    storage = torch.empty((rows, stride), dtype=spec.dtype, device=device)
    return storage[:, : math.prod(spec.shape)].view(rows, *spec.shape)
