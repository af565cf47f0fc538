"""Where tensors lie in the safetensors files of a checkpoint, and reading them while the files stay what they were.

The format (https://github.com/huggingface/safetensors): eight bytes with the length of a JSON header, the header,
then the tensors' bytes; the header gives every tensor's dtype, shape and byte range.
"""

from __future__ import annotations

import ctypes
import errno
import json
import logging
import os
import re
import stat
import time
from collections import OrderedDict
from collections.abc import Iterable, Mapping, Sequence
from functools import cache
from pathlib import Path, PurePosixPath
from types import TracebackType
from typing import Any, NamedTuple

import torch
from safetensors import SafetensorError, deserialize

from .errors import CheckpointError
from .stamp import Stamp, changed, check_unchanged

__all__ = ["CheckpointIndex", "TensorExtent", "TensorFiles", "short"]

logger = logging.getLogger("moecache")

_MAX_HEADER_NBYTES = 100_000_000  # the limit of the format's own library
_MAX_OPEN_FILES = 64
# A clock tick of the kernel is up to 10 ms long: a file written twice within one has the same time of modification.
_TICK_NS = 20_000_000

_DTYPES = {
    "BOOL": torch.bool,
    "U8": torch.uint8,
    "I8": torch.int8,
    "U16": torch.uint16,
    "I16": torch.int16,
    "U32": torch.uint32,
    "I32": torch.int32,
    "U64": torch.uint64,
    "I64": torch.int64,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E4M3FNUZ": torch.float8_e4m3fnuz,
    "F8_E5M2": torch.float8_e5m2,
    "F8_E5M2FNUZ": torch.float8_e5m2fnuz,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "F32": torch.float32,
    "F64": torch.float64,
    "C64": torch.complex64,
}
if hasattr(torch, "float8_e8m0fnu"):  # from torch 2.7 on
    _DTYPES["F8_E8M0"] = torch.float8_e8m0fnu


class TensorExtent(NamedTuple):
    """One tensor of a checkpoint: which file, where in it, and what its bytes mean."""

    file: int
    offset: int
    nbytes: int
    shape: tuple[int, ...]
    dtype_name: str

    @property
    def dtype(self) -> torch.dtype | None:
        """The torch dtype, or None where torch has none whose elements are whole bytes."""
        return _DTYPES.get(self.dtype_name)


class CheckpointIndex:
    """All tensors of a checkpoint of one or more safetensors files.

    Which files make up a checkpoint is decided as transformers does: ``model.safetensors``, else the files that
    ``model.safetensors.index.json`` names. A tensor that is in several of them is taken from the last one. A tensor that
    only the index names is no error before it is wanted.

    Parameters
    ----------
    path : str, Path or sequence of them
        A folder (one without ``model.safetensors`` and index too: its ``model*.safetensors``, or else all its
        ``.safetensors`` files), one file, an index, or a list of files.

    Attributes
    ----------
    files : tuple of str
        Absolute paths; ``TensorExtent.file`` counts in them.
    stamps : tuple of Stamp
        Of each file when its header was read.
    tensors : dict of str to TensorExtent
        Every tensor by its name in the checkpoint.

    Raises
    ------
    CheckpointError
        A file is missing, cut short or damaged, or the index names a file outside its own folder.
    """

    def __init__(self, path: str | os.PathLike[str] | Sequence[str | os.PathLike[str]]) -> None:
        self._promised, files = _resolve_files(path)
        self.files: tuple[str, ...] = tuple(os.path.abspath(file) for file in files)
        self.tensors: dict[str, TensorExtent] = {}
        stamps: list[Stamp] = []
        copies: list[str] = []
        for number, file in enumerate(self.files):
            stamp, found = _read_header(file, number)
            copies += found.keys() & self.tensors.keys()
            self.tensors.update(found)
            stamps.append(stamp)
        self.stamps = tuple(stamps)
        if copies:
            name = min(copies)
            logger.warning(
                "%d tensors are in more than one file of the checkpoint, such as %r; that of the last file is taken (%s)",
                len(copies),
                name,
                self.files[self.tensors[name].file],
            )

    def lookup(self, name: str) -> TensorExtent:
        """Where a tensor lies.

        Raises
        ------
        CheckpointError
            The files do not hold it.
        """
        if name not in self.tensors:
            raise self.absent(name)
        return self.tensors[name]

    def absent(self, name: str, layer: int | None = None, found: str = "") -> CheckpointError:
        """The error that says that a tensor is not there, and where the index says that it should be."""
        place = self._promised.get(name)
        return CheckpointError(
            ("" if layer is None else f"layer {layer}: ")
            + f"tensor {short(name)} is not in the checkpoint"
            + ("" if not found else f"; {found}")
            + ("" if place is None else f"; the index says that {_clipped(place)} holds it: fetch that file again")
            + f" ({self.files[0]}, {len(self.files)} files)"
        )

    def dtype_of(self, name: str) -> torch.dtype:
        """The torch dtype of a tensor.

        Raises
        ------
        CheckpointError
            The files do not hold it, or torch has no dtype of that name whose elements are whole bytes.
        """
        extent = self.lookup(name)
        if extent.dtype is None:
            raise CheckpointError(
                f"{self.files[extent.file]}: tensor {short(name)} has dtype {extent.dtype_name}, which torch does not have as "
                f"a dtype of whole bytes; expected one of {', '.join(sorted(_DTYPES))}"
            )
        return extent.dtype

    def read(self, name: str) -> torch.Tensor:
        """Read one tensor into host memory.

        Raises
        ------
        CheckpointError
            No such tensor, a dtype unknown to torch, or the file has changed since its header was read.
        """
        dtype, extent = self.dtype_of(name), self.tensors[name]
        raw = torch.empty(extent.nbytes, dtype=torch.uint8, device="cpu")
        with TensorFiles(self) as files:
            files.read(extent.file, extent.offset, extent.nbytes, raw.data_ptr())
        return raw.view(dtype).reshape(extent.shape)

    def check_unchanged(self) -> None:
        """Raise CheckpointError if a file has been replaced, removed or written since its header was read."""
        for file, stamp in zip(self.files, self.stamps, strict=True):
            check_unchanged(file, stamp)


class TensorFiles:
    """Reads parts of a checkpoint's files into memory; a context manager that closes what it has opened.

    Parameters
    ----------
    index : CheckpointIndex
    drop_cached : bool
        Give the pages that were read back to the system: after a whole checkpoint was read into memory, its second copy
        in the page cache only takes memory.
    """

    def __init__(self, index: CheckpointIndex, *, drop_cached: bool = False) -> None:
        self._index = index
        self._drop_cached = drop_cached
        self._descriptors: OrderedDict[int, int] = OrderedDict()  # by file, the one used last at the end

    def __enter__(self) -> TensorFiles:
        return self

    def __exit__(
        self, error_type: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        while self._descriptors:
            self._close_oldest()

    def read(self, file: int, offset: int, nbytes: int, address: int) -> None:
        """Read bytes of a file to a host address.

        Raises
        ------
        CheckpointError
            The file cannot be opened, or is not what it was when its header was read.
        """
        if nbytes == 0:
            return
        path, stamp = self._index.files[file], self._index.stamps[file]
        descriptor = self._open(file)
        view = memoryview((ctypes.c_ubyte * nbytes).from_address(address)).cast("B")
        done = 0
        try:
            while done < nbytes:
                count = os.preadv(descriptor, [view[done:]], offset + done)
                if count == 0:
                    break
                done += count
        except OSError as error:
            raise CheckpointError(f"{path}: byte {offset + done} cannot be read: {error.strerror}") from error
        # After reading: a write sets the time of modification before it changes the first byte.
        now = Stamp.of(os.fstat(descriptor))
        if now != stamp:
            raise changed(path, stamp, now)
        if done < nbytes:
            raise CheckpointError(
                f"{path}: holds {offset + done} bytes, bytes {offset} to {offset + nbytes} were expected"
            )

    def _open(self, file: int) -> int:
        if file in self._descriptors:
            self._descriptors.move_to_end(file)
            return self._descriptors[file]
        path = self._index.files[file]
        check_unchanged(path, self._index.stamps[file])
        if len(self._descriptors) >= _MAX_OPEN_FILES:
            self._close_oldest()
        while True:
            try:
                self._descriptors[file] = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
                return self._descriptors[file]
            except OSError as error:
                if error.errno not in (errno.EMFILE, errno.ENFILE) or not self._descriptors:
                    raise CheckpointError(f"{path}: cannot be opened: {error.strerror}{_advice(error)}") from error
                self._close_oldest()

    def _close_oldest(self) -> None:
        _, descriptor = self._descriptors.popitem(last=False)
        if self._drop_cached and hasattr(os, "posix_fadvise"):
            os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
        os.close(descriptor)


def _advice(error: OSError) -> str:
    return "; close files, or raise the limit (ulimit -n)" if error.errno in (errno.EMFILE, errno.ENFILE) else ""


def _resolve_files(
    path: str | os.PathLike[str] | Sequence[str | os.PathLike[str]],
) -> tuple[Mapping[str, str], list[Path]]:
    """The index's weight map (may be empty) and the files, all of which exist."""
    if not isinstance(path, (str, os.PathLike)):
        return {}, _existing(Path(file) for file in path)
    root = Path(path)
    if _is_file(root) and root.name.endswith(".index.json"):
        return _read_index(root)
    if not root.is_dir():
        return {}, _existing([root])
    if _is_file(root / "model.safetensors"):
        return {}, [root / "model.safetensors"]
    if _is_file(root / "model.safetensors.index.json"):
        return _read_index(root / "model.safetensors.index.json")
    # Beside the shards may lie the same weights under other names (consolidated.safetensors), adapters, copies.
    files = sorted(root.glob("model*.safetensors")) or sorted(root.glob("*.safetensors"))
    if not files:
        raise CheckpointError(f"{root}: no safetensors file in this folder; expected model.safetensors or its index")
    _check_numbered(files)
    return {}, _existing(files)


def _check_numbered(files: Sequence[Path]) -> None:
    """Shards say how many they are: without an index that is the only way to see that one is missing."""
    matches = [re.fullmatch(r"(.*-)([0-9]{5})(-of-)([0-9]{5})(\.safetensors)", file.name) for file in files]
    present = {match.group() for match in matches if match}
    for match in matches:
        if match is None:
            continue
        before, _, of, count, end = match.groups()
        for number in range(1, min(int(count), len(files) + 1) + 1):
            name = f"{before}{number:05d}{of}{count}{end}"
            if name not in present:
                raise CheckpointError(f"{files[0].parent / name}: missing shard of the checkpoint ({count} expected)")


def _read_index(index: Path) -> tuple[Mapping[str, str], list[Path]]:
    try:
        weight_map = json.loads(index.read_bytes().decode())["weight_map"]
        if not isinstance(weight_map, dict) or not weight_map:
            raise TypeError("'weight_map' is not an object that names tensors")
    except (OSError, ValueError, KeyError, TypeError, RecursionError) as error:
        raise CheckpointError(
            f"{index}: not a safetensors index (a JSON object with 'weight_map'): {_clipped(str(error))}"
        ) from error
    for name, file in weight_map.items():
        parts = PurePosixPath(file).parts if isinstance(file, str) else ()
        if not parts or ".." in parts or os.path.isabs(file) or "\0" in file:
            raise CheckpointError(
                f"{index}: the file of tensor {short(name)} is {short(file)}; expected a file's name inside the folder"
            )
    return weight_map, _existing(index.parent / name for name in sorted(set(weight_map.values())))


def short(value: object) -> str:
    """How a message shows what a file says: quoted, and not at whatever length it has."""
    return _clipped(repr(value))


def _clipped(text: str) -> str:
    return text if len(text) <= 300 else f"{text[:200]}... ({len(text)} characters)"


def _is_file(path: Path) -> bool:
    try:
        return path.is_file()
    except OSError:  # a name that is too long, a folder that may not be entered
        return False


def _existing(files: Iterable[Path]) -> list[Path]:
    found = list(files)
    if not found:
        raise CheckpointError("an empty list of files; expected at least one safetensors file")
    for file in found:
        if not _is_file(file):
            raise CheckpointError(f"{_clipped(str(file))}: missing shard of the checkpoint ({len(found)} expected)")
    return found


def _read_header(file: str, number: int) -> tuple[Stamp, dict[str, TensorExtent]]:
    """The stamp of a file and what its header says, which must be what safetensors itself would accept."""
    try:
        with open(file, "rb", buffering=0) as stream:
            status = os.fstat(stream.fileno())
            if not stat.S_ISREG(status.st_mode):
                raise CheckpointError(f"{file}: is not a regular file")
            if 0 <= time.time_ns() - status.st_mtime_ns < _TICK_NS:
                time.sleep(_TICK_NS / 1e9)
                status = os.fstat(stream.fileno())
            stamp = Stamp.of(status)
            prefix = stream.read(8)
            header_nbytes = int.from_bytes(prefix, "little")
            if len(prefix) < 8 or header_nbytes > min(_MAX_HEADER_NBYTES, stamp.nbytes - 8):
                raise CheckpointError(
                    f"{file}: not a safetensors file, or cut short: {stamp.nbytes} bytes, a header of "
                    f"{header_nbytes} bytes (at most {_MAX_HEADER_NBYTES}) was expected"
                )
            raw = stream.read(header_nbytes)
    except OSError as error:
        raise CheckpointError(f"{file}: cannot be read: {error.strerror}{_advice(error)}") from error
    refusal = _refusal(prefix + raw)
    if refusal is not None:
        raise CheckpointError(f"{file}: not a sound safetensors file: {refusal}")
    try:
        header = json.loads(raw.decode(), object_pairs_hook=_each_once)
        header.pop("__metadata__", None)
        extents = {name: _extent(number, entry, 8 + header_nbytes) for name, entry in header.items()}
    except (ValueError, TypeError, KeyError, AttributeError, RecursionError) as error:
        raise CheckpointError(f"{file}: not a sound safetensors file: {_clipped(str(error))}") from error
    end = max((extent.offset + extent.nbytes for extent in extents.values()), default=8 + header_nbytes)
    if end > stamp.nbytes:
        last = max(extents, key=lambda name: extents[name].offset + extents[name].nbytes)
        raise CheckpointError(
            f"{file}: truncated: holds {stamp.nbytes} bytes, and its tensors (the last is {short(last)}) need {end}; "
            "fetch it again"
        )
    if end < stamp.nbytes:
        raise CheckpointError(
            f"{file}: not a sound safetensors file: {stamp.nbytes - end} bytes follow its last tensor; fetch it again"
        )
    return stamp, extents


def _refusal(head: bytes) -> str | None:
    """Why safetensors refuses this header; None where all it misses are the tensors' bytes, which are not read here."""
    try:
        deserialize(head)  # type: ignore[no-untyped-call]
    except SafetensorError as error:
        return None if str(error) == _only_bytes_missing() else _clipped(str(error))
    return None


@cache
def _only_bytes_missing() -> str:
    """What safetensors says of a sound header without the bytes behind it."""
    header = b'{"a":{"dtype":"U8","shape":[1],"data_offsets":[0,1]}}'
    try:
        deserialize(len(header).to_bytes(8, "little") + header)  # type: ignore[no-untyped-call]
    except SafetensorError as error:
        return str(error)
    raise AssertionError("safetensors takes a file without its tensors' bytes")


def _each_once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    made: dict[str, Any] = {}
    for name, value in pairs:
        if name in made:
            raise ValueError(f"{short(name)} is named twice in the header")
        made[name] = value
    return made


def _extent(file: int, entry: Mapping[str, Any], data_start: int) -> TensorExtent:
    begin, end = entry["data_offsets"]
    return TensorExtent(file, data_start + begin, end - begin, tuple(entry["shape"]), entry["dtype"])
