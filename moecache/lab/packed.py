"""Files packed with gzip, bzip2 or xz, unpacked as they are read, within bounds."""

from __future__ import annotations

import bz2
import contextlib
import gzip
import io
import lzma
import zlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import IO, Any, TextIO

from ..errors import TraceFormatError
from ..tensorfile import brief

__all__ = ["MOST_PACKED", "PACKED", "ending_of", "open_bytes", "open_text"]

MOST_PACKED = 200
"""A packed file is accepted that unfolds to so many times its size, and a megabyte."""

PACKED: dict[str, Callable[[Any], Any]] = {
    ".gz": lambda raw: gzip.GzipFile(fileobj=raw),
    ".bz2": bz2.BZ2File,
    ".xz": lzma.LZMAFile,
}
_NAMES = {".gz": "gzip", ".bz2": "bzip2", ".xz": "xz"}


def ending_of(path: Path) -> str:
    """The ending that says what a file holds, without the one that says how it is packed."""
    return (Path(path.stem) if path.suffix.lower() in PACKED else path).suffix.lower()


@contextlib.contextmanager
def open_bytes(path: Path) -> Iterator[IO[bytes]]:
    """A file's bytes, unpacked.

    Raises
    ------
    TraceFormatError
        Cut short, or unfolding to far more than its size.
    FileNotFoundError
    """
    if not path.is_file():
        raise FileNotFoundError(f"no routing trace at {path}")
    try:
        with open(path, "rb") as raw:
            unpack = PACKED.get(path.suffix.lower())
            if unpack is None:
                yield raw
                return
            with unpack(raw) as packed:
                limit = MOST_PACKED * path.stat().st_size + (1 << 20)
                yield io.BufferedReader(_Unpacked(path, packed, limit))
    except (EOFError, zlib.error, gzip.BadGzipFile, lzma.LZMAError) as error:
        raise TraceFormatError(
            f"{path} is no whole {_NAMES[path.suffix.lower()]} file ({brief(error)}); copy it again"
        ) from error


@contextlib.contextmanager
def open_text(path: Path) -> Iterator[TextIO]:
    """A text file, packed or not, with or without a byte-order mark; lines end with line feed or carriage return alone.

    Raises
    ------
    TraceFormatError
        Not UTF-8, or as :func:`open_bytes`.
    FileNotFoundError
    """
    with open_bytes(path) as raw:
        try:
            yield io.TextIOWrapper(raw, encoding="utf-8-sig")
        except UnicodeDecodeError as error:
            raise TraceFormatError(f"{path} is not UTF-8 text ({brief(error)})") from error


class _Unpacked(io.RawIOBase):
    # What a packed file unfolds to, up to a limit.
    def __init__(self, path: Path, packed: IO[bytes], limit: int) -> None:
        super().__init__()
        self._path, self._packed, self._left = path, packed, limit

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        try:
            data = self._packed.read(min(len(buffer), 1 << 16))
        except OSError as error:  # bz2 has no error of its own
            raise EOFError(str(error)) from error
        self._left -= len(data)
        if self._left < 0:
            raise TraceFormatError(f"{self._path}: it unfolds to more than {MOST_PACKED} times its size; unpack it")
        buffer[: len(data)] = data
        return len(data)
