"""How host memory is copied fastest here: measured once, kept for the machine, or fixed by a variable.

``MOECACHE_COPY`` fixes the way (:data:`WAYS`), ``MOECACHE_CHUNK`` the bytes of a chunk. Which is taken never changes a byte
of what arrives.
"""

from __future__ import annotations

import json
import logging
import os
import platform
import tempfile
import threading
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

__all__ = ["CHUNK_VARIABLE", "WAYS", "WAY_VARIABLE", "Choice", "cache_file", "choose", "settle"]

logger = logging.getLogger("moecache")

# Through the caches by memcpy(); past them line after line; past them on several pages in turns. As numbered in _copy.h.
WAYS = ("plain", "streaming", "pages")
WAY_VARIABLE, CHUNK_VARIABLE = "MOECACHE_COPY", "MOECACHE_CHUNK"
CHUNK_NBYTES = 2 << 20
# What of a plain copy stays in the cache of the core that makes it.
SMALL_CHUNK_NBYTES = 256 << 10
_CHUNKS = range(4096, (64 << 20) + 1)
# Large chunks have less to do around them: small ones must be better by more than the noise.
_MARGIN = 1.1
_ROUNDS = 7
_FILE_NBYTES = 1 << 16
_MACHINES = 32

_settling = threading.Lock()
_settled: list[Choice] = []


class Choice(NamedTuple):
    """How to copy.

    Attributes
    ----------
    way : str
        One of :data:`WAYS`.
    chunk_nbytes : int
    """

    way: str
    chunk_nbytes: int


def settle(measure: Callable[[int, int], Sequence[float]]) -> Choice:
    """The choice for this process: from the variables, the machine's file, or a measurement of about 20 ms.

    Parameters
    ----------
    measure
        ``measure(nbytes, rounds)`` returns seconds of one copy, by way.

    Raises
    ------
    ValueError
        A variable names no way, or no size.
    """
    way, chunk = _fixed()
    if way is None or chunk is None:
        with _settling:
            if not _settled:
                _settled.append(_of_this_machine(measure))
        found = _settled[0]
        # A chunk goes with its way.
        default = found.chunk_nbytes if way in (None, found.way) else CHUNK_NBYTES
        way, chunk = way or found.way, chunk or default
    return Choice(way, chunk)


def choose(measure: Callable[[int, int], Sequence[float]]) -> Choice:
    """The fastest of all ways with large chunks, or plain copies of small ones where those are faster still."""
    seconds = measure(CHUNK_NBYTES, _ROUNDS)
    if len(seconds) == 1:
        return Choice(WAYS[0], CHUNK_NBYTES)
    best = min(range(len(seconds)), key=seconds.__getitem__)
    small = measure(SMALL_CHUNK_NBYTES, _ROUNDS)[0] * (CHUNK_NBYTES / SMALL_CHUNK_NBYTES)
    if small * _MARGIN < seconds[best]:
        return Choice(WAYS[0], SMALL_CHUNK_NBYTES)
    return Choice(WAYS[best], CHUNK_NBYTES)


def cache_file() -> Path | None:
    """Where choices are kept, by machine; None where the user has no folder for such things."""
    folder = os.environ.get("XDG_CACHE_HOME", "")
    if os.path.isabs(folder):
        return Path(folder, "moecache", "copies.json")
    home = os.path.expanduser("~")
    return Path(home, ".cache", "moecache", "copies.json") if os.path.isabs(home) else None


_MEASUREMENT = (
    1  # goes up when what is measured, or chosen from it, changes: what older versions have kept does not count
)


def _fixed() -> tuple[str | None, int | None]:
    way, chunk = os.environ.get(WAY_VARIABLE) or None, os.environ.get(CHUNK_VARIABLE) or None
    if way is not None and way not in WAYS:
        raise ValueError(f"{WAY_VARIABLE}={way[:40]!r} is no way of copying: expected one of {', '.join(WAYS)}")
    if chunk is not None and not (chunk.isdecimal() and len(chunk) < 12 and int(chunk) in _CHUNKS):
        raise ValueError(
            f"{CHUNK_VARIABLE}={chunk[:40]!r} is no size of a chunk: expected {_CHUNKS[0]:,} to {_CHUNKS[-1]:,} bytes"
        )
    return way, None if chunk is None else int(chunk)


def _of_this_machine(measure: Callable[[int, int], Sequence[float]]) -> Choice:
    machine, path = f"{_processor()}, measurement {_MEASUREMENT}", cache_file()
    known = {} if path is None else _load(path)
    if machine in known:
        return known[machine]
    made = choose(measure)
    if path is not None:
        known = dict(list(known.items())[1 - _MACHINES :])
        try:
            _save(path, known | {machine: made})
        except OSError as error:
            logger.info("the way of copying is measured in every process (about 20 ms): %s", error)
    return made


def _load(path: Path) -> dict[str, Choice]:
    """What the file holds, less what could not have been written by :func:`_save`."""
    try:
        with path.open("rb") as file:
            text = file.read(_FILE_NBYTES + 1)
        entries = json.loads(text) if len(text) <= _FILE_NBYTES else None
    except (OSError, ValueError, RecursionError):
        return {}
    known: dict[str, Choice] = {}
    for machine, entry in entries.items() if isinstance(entries, dict) else ():
        match entry:
            case [str(way), int(chunk)] if way in WAYS and chunk in _CHUNKS and not isinstance(chunk, bool):
                known[machine] = Choice(way, chunk)
    return known


def _save(path: Path, known: dict[str, Choice]) -> None:
    # Not files.write_atomically: this one is for its owner alone, as what it says decides how memory is copied.
    path.parent.mkdir(parents=True, exist_ok=True)
    descriptor, name = tempfile.mkstemp(dir=path.parent, prefix=path.name)
    try:
        with open(descriptor, "w", encoding="utf-8") as file:
            json.dump(known, file)
        os.replace(name, path)
    except BaseException:
        with suppress(OSError):
            os.unlink(name)
        raise


def _processor(path: str = "/proc/cpuinfo") -> str:
    """The processor's model, as exactly as the system says it."""
    wanted = ("vendor_id", "cpu family", "model", "model name", "stepping", "cache size")
    found: dict[str, str] = {}
    with suppress(OSError, ValueError), open(path, encoding="utf-8") as file:
        for line in file:
            name, _, value = line.partition(":")
            if name.strip() in wanted:
                found.setdefault(name.strip(), value.strip()[:80])
            elif not line.strip() and found:
                break
    return ", ".join([platform.machine(), *(found[name] for name in wanted if name in found)])
