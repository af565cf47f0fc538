"""Tensors of a checkpoint mapped into memory, those that are wanted and no others: the experts lie between them."""

from __future__ import annotations

import errno
import logging
import mmap
import os
from collections.abc import Iterable

import torch

from ..checkpoint import CheckpointIndex, TensorExtent
from ..errors import CheckpointError

__all__ = ["mapped_tensors"]

_log = logging.getLogger("moecache")
_GAP = 1 << 20  # bytes between two tensors up to which one mapping spans both


def mapped_tensors(index: CheckpointIndex, names: Iterable[str], *, read: bool = False) -> dict[str, torch.Tensor]:
    """The named tensors, whose pages are read when they are first used; they lie as in the file, at its alignment.

    Parameters
    ----------
    index : CheckpointIndex
    names : iterable of str
    read : bool
        Read them into memory of their own instead.

    Raises
    ------
    CheckpointError
        A dtype is unknown to torch, or the process may not map as many bytes.
    """
    wanted = list(names)
    if read:
        return {name: index.read(name) for name in wanted}
    by_file: dict[int, list[str]] = {}
    for name in wanted:
        by_file.setdefault(index.tensors[name].file, []).append(name)
    tensors: dict[str, torch.Tensor] = {}
    for file, members in by_file.items():
        path = index.files[file]
        with open(path, "rb", buffering=0) as stream:
            for run in _runs(index, members):
                try:
                    tensors.update(_map(index, stream.fileno(), path, run))
                except OSError as error:
                    if error.errno != errno.ENODEV:
                        raise _no_room(index, path, run, error) from error
                    nbytes = sum(index.tensors[name].nbytes for name in run)
                    _log.warning("%s: cannot be mapped (%s); %s bytes are read into memory", path, error, f"{nbytes:,}")
                    tensors.update((name, index.read(name)) for name in run)
    return tensors


def _runs(index: CheckpointIndex, names: list[str]) -> list[list[str]]:
    runs: list[list[str]] = []
    end = 0
    for name in sorted(names, key=lambda name: index.tensors[name].offset):
        extent = index.tensors[name]
        if not runs or extent.offset > end + _GAP:
            runs.append([])
        runs[-1].append(name)
        end = max(end, extent.offset + extent.nbytes)
    return runs


def _map(index: CheckpointIndex, descriptor: int, path: str, run: list[str]) -> dict[str, torch.Tensor]:
    extents = [index.tensors[name] for name in run]
    begin = extents[0].offset // mmap.ALLOCATIONGRANULARITY * mmap.ALLOCATIONGRANULARITY
    end = max(extent.offset + extent.nbytes for extent in extents)
    # Private and writable, as the format's own library maps: what is written stays in this process.
    memory = mmap.mmap(descriptor, max(end - begin, 1), access=mmap.ACCESS_COPY, offset=begin) if end > begin else None
    return {name: _view(memory, extent, begin, path, name) for name, extent in zip(run, extents, strict=True)}


def _view(memory: mmap.mmap | None, extent: TensorExtent, begin: int, path: str, name: str) -> torch.Tensor:
    if extent.dtype is None:
        raise CheckpointError(f"{path}: tensor {name!r} has dtype {extent.dtype_name}, which torch does not have")
    if memory is None or extent.nbytes == 0:
        return torch.empty(extent.shape, dtype=extent.dtype, device="cpu")
    count = extent.nbytes // extent.dtype.itemsize
    flat = torch.frombuffer(memory, dtype=extent.dtype, count=count, offset=extent.offset - begin)
    return flat.reshape(extent.shape)


def _no_room(index: CheckpointIndex, path: str, run: list[str], error: OSError) -> CheckpointError:
    nbytes = sum(index.tensors[name].nbytes for name in run)
    return CheckpointError(
        f"{path}: mapping {nbytes:,} bytes of tensors outside the experts failed ({error}){_limit()}; "
        "raise the limit, or load on a machine with more memory"
    )


def _limit() -> str:
    try:
        import resource

        limit, _ = resource.getrlimit(resource.RLIMIT_AS)
        with open(f"/proc/{os.getpid()}/statm") as statm:
            used = int(statm.read().split()[0]) * mmap.PAGESIZE
    except (ImportError, OSError, ValueError):
        return ""
    return "" if limit < 0 else f": the address space is limited to {limit:,} bytes (ulimit -v), {used:,} are in use"
