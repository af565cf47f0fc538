"""The file that a recording grows in, and the trace that is made of it at the end or, after a kill, at the next start.

A header that says what is recorded, then one record a forward pass, each written at once: a file that ends anywhere holds
every pass before that.
"""

from __future__ import annotations

import contextlib
import errno
import glob
import json
import os
import struct
import zlib
from collections.abc import Iterator
from itertools import islice
from pathlib import Path
from typing import IO, Any, NamedTuple

import numpy as np

from .errors import TraceFormatError
from .files import create_temporary, whole_file

__all__ = ["Recording", "assemble", "create_spill", "pack", "recover", "spills_of"]

SUFFIX = ".part"
_START = struct.Struct("<8sI")
_MAGIC = b"moespill"
_LARGEST_HEADER = 1 << 24


class Recording(NamedTuple):
    """What all passes of a recording have in common."""

    target: str  # the trace's file name
    num_experts: tuple[int, ...]
    top_k: int  # 0: not known
    metadata: dict[str, str]


class _Head(NamedTuple):
    # Of a record; ids int16 [tokens, layers, k] and counted flags uint8 [tokens] follow.
    check: int  # CRC-32 of all that comes after it
    request: int
    decode: int
    tokens: int
    k: int
    padding: int  # ids below 0
    uncounted: int


_HEAD = struct.Struct("<Iiiiiqi")


def create_spill(path: Path, recording: Recording) -> tuple[IO[bytes], Path]:
    """A new file beside `path`, unbuffered: a forked child has no copy of anything unwritten.

    It has its name only with its header: a kill before that leaves a temporary file, which the next start removes.
    """
    file, temporary = create_temporary(path, buffering=0)
    try:
        header = json.dumps(recording._asdict()).encode()
        write_all(file, _START.pack(_MAGIC, len(header)) + header)
        return file, temporary.rename(temporary.with_suffix(SUFFIX))
    except BaseException:
        file.close()
        with contextlib.suppress(OSError):
            temporary.unlink()
        raise


def write_all(file: IO[bytes], data: bytes) -> None:
    """One write, or an error where the disk takes only a part."""
    written = file.write(data)
    if written != len(data):
        raise OSError(errno.ENOSPC, f"No space left on device after {written} of {len(data)} bytes")


def pack(request: int, decode: bool, experts: np.ndarray, counted: np.ndarray) -> bytes:
    """One forward pass: int16 ids ``[tokens, layers, k]`` and uint8 flags ``[tokens]``."""
    tokens, _, k = experts.shape
    head = _Head(0, request, int(decode), tokens, k, int((experts < 0).sum()), int(tokens - counted.sum()))
    data = _HEAD.pack(*head) + experts.tobytes() + counted.tobytes()
    return struct.pack("<I", zlib.crc32(data[4:])) + data[4:]


def assemble(spill: Path, target: Path) -> tuple[int, int]:
    """Make a trace of all whole passes of a spill file; returns its tokens and requests, 0 where there is nothing.

    Raises
    ------
    TraceFormatError
        Not a spill file.
    OSError
        The trace cannot be written; the spill file is as it was.
    """
    with open(spill, "rb") as file:
        recording, begin = _read_recording(file, spill)
        heads = [head for head, _ in _passes(file, begin, recording, check=True)]
        tokens = sum(head.tokens for head in heads)
        if not tokens:
            return 0, 0
        # Numbered in the order in which they come: a request whose first pass was lost has left its number out.
        numbers = {n: i for i, n in enumerate(dict.fromkeys(head.request for head in heads))}
        top_k = max(recording.top_k, *(head.k for head in heads))
        arrays = _arrays(heads, tokens, top_k, recording)
        with whole_file(target) as out:
            out.write(_header(arrays, top_k, recording))
            part: np.ndarray
            for name, (_, dtype, _) in arrays.items():
                for n, (head, body) in enumerate(islice(_passes(file, begin, recording), len(heads))):
                    if name == "experts":
                        ids = np.frombuffer(body, np.int16, head.tokens * len(recording.num_experts) * head.k)
                        ids = ids.reshape(head.tokens, len(recording.num_experts), head.k)
                        part = np.pad(ids, ((0, 0), (0, 0), (0, top_k - head.k)), constant_values=-1)
                    elif name == "counted":
                        part = np.frombuffer(body, np.uint8)[-head.tokens :]
                    else:
                        value = {"request": numbers[head.request], "decode": head.decode, "forward": n}[name]
                        part = np.full(head.tokens, value)
                    out.write(np.ascontiguousarray(part, dtype).tobytes())
    return tokens, len(numbers)


def _arrays(
    heads: list[_Head], tokens: int, top_k: int, recording: Recording
) -> dict[str, tuple[str, Any, tuple[int, ...]]]:
    padded = any(head.padding or head.k < top_k for head in heads)
    small = not padded and max(recording.num_experts) <= 256
    shape = (tokens, len(recording.num_experts), top_k)
    arrays: dict[str, tuple[str, Any, tuple[int, ...]]] = {
        "experts": ("U8", np.uint8, shape) if small else ("I16", np.int16, shape),
        "request": ("I32", np.int32, (tokens,)),
        "forward": ("I32", np.int32, (tokens,)),
        "decode": ("U8", np.uint8, (tokens,)),
    }
    if any(head.uncounted for head in heads):
        arrays["counted"] = ("U8", np.uint8, (tokens,))
    return arrays


def _header(arrays: dict[str, tuple[str, Any, tuple[int, ...]]], top_k: int, recording: Recording) -> bytes:
    # The safetensors layout: a header that says where each array lies, then the arrays, each by one walk over the passes.
    experts = recording.num_experts
    metadata = {
        **recording.metadata,
        "num_layers": str(len(experts)),
        "num_experts": str(experts[0]) if len(set(experts)) == 1 else json.dumps(experts),
        "top_k": str(top_k),
    }
    header: dict[str, Any] = {"__metadata__": metadata}
    offset = 0
    for name, (code, dtype, shape) in arrays.items():
        nbytes = int(np.prod(shape)) * np.dtype(dtype).itemsize
        header[name] = {"dtype": code, "shape": list(shape), "data_offsets": [offset, offset + nbytes]}
        offset += nbytes
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    return struct.pack("<Q", len(text)) + text


def _read_recording(file: IO[bytes], path: Path) -> tuple[Recording, int]:
    start = file.read(_START.size)
    try:
        magic, size = _START.unpack(start)
        if magic != _MAGIC or size > _LARGEST_HEADER:
            raise ValueError("its first bytes are not those of one")
        fields = json.loads(file.read(size))
        recording = Recording(
            str(fields["target"]),
            tuple(int(n) for n in fields["num_experts"]),
            int(fields["top_k"]),
            {str(key): str(value) for key, value in fields["metadata"].items()},
        )
        if not recording.num_experts or min(recording.num_experts) < 1:
            raise ValueError(f"layers of {recording.num_experts} experts")
    except (struct.error, ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise TraceFormatError(f"{path} is no unfinished recording ({error}); remove it") from error
    return recording, _START.size + size


def _passes(file: IO[bytes], begin: int, recording: Recording, check: bool = False) -> Iterator[tuple[_Head, bytes]]:
    # Up to the first that is not whole. What `check` has passed once is not checked again.
    file.seek(begin)
    end = os.fstat(file.fileno()).st_size
    while len(raw := file.read(_HEAD.size)) == _HEAD.size:
        head = _Head(*_HEAD.unpack(raw))
        nbytes = (2 * len(recording.num_experts) * head.k + 1) * head.tokens
        if head.tokens < 1 or head.k < 0 or head.request < 0 or nbytes > end - file.tell():
            return
        body = file.read(nbytes)
        if check and zlib.crc32(body, zlib.crc32(raw[4:])) != head.check:
            return
        yield head, body


def spills_of(path: Path) -> list[Path]:
    """Spill files beside `path`, of living and of dead processes."""
    return sorted(path.parent.glob(f"{glob.escape(path.name)}.*{SUFFIX}"))


def recover(spill: Path, target: Path) -> tuple[int, int]:
    """:func:`assemble`, and remove the spill file."""
    kept = assemble(spill, target)
    with contextlib.suppress(OSError):
        spill.unlink()
    return kept
