"""Page-locked host memory: registered in pieces, within a limit, shared by the caches over a bank, and given back."""

from __future__ import annotations

import logging
import os
import platform
import threading
import time
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np
from numpy.typing import NDArray
from tqdm import tqdm

from .cuda_runtime import ALREADY_REGISTERED, INVALID_VALUE, NOT_REGISTERED, SUCCESS, UNLOADING, Runtime

if TYPE_CHECKING:
    from ._engine import Sources

__all__ = ["PageLock", "lock_pages", "lock_sources"]

logger = logging.getLogger("moecache")

PAGE = 4096
PIECE_NBYTES = 256 << 20
LIMIT_VARIABLE = "MOECACHE_PAGE_LOCK"
SHOWN_AFTER_S = 2.0  # what takes longer shows its progress
REGISTER_PORTABLE = 1  # cudaHostRegisterPortable: for all devices


class PageLock:
    """Host memory locked in pieces, so that copies from it are asynchronous and fast.

    Memory is locked whole pages at a time, piece after piece, until all is locked or the system refuses one. What is
    locked by then stays so (half a bank that copies fast is better than none); the rest stays pageable, which is slower
    and just as correct, and is counted and logged once. A piece that is refused for what it is (a read-only mapping, pages
    that somebody else locked) does not stop the others. An exception on the way unlocks everything.

    Parameters
    ----------
    ranges
        (address, bytes) of the memory. No copy may run across the ranges' borders.
    register, unregister
        ``register(address, nbytes)`` and ``unregister(address)`` return the runtime's error code, 0: done.
    clear_error
        Takes the runtime's last error away, so that a refusal is not reported by whatever is called next.
    is_locked
        Whether the page at an address is locked already. Ranges locked at both ends (pinned by torch, say) are used as
        they are and left to who locked them.
    piece_nbytes
        Most bytes of one registration, 256 MiB by default.
    limit_nbytes
        Lock no more than this. The variable ``MOECACHE_PAGE_LOCK`` (bytes, 0: nothing) goes before it.

    Attributes
    ----------
    locked_nbytes, pageable_nbytes : int
    locked : uint64[n, 2]
        Ascending [start, stop) of locked memory; no single copy may run across a border.

    Raises
    ------
    ValueError
        The variable holds no number of bytes.
    """

    def __init__(
        self,
        ranges: Iterable[tuple[int, int]],
        register: Callable[[int, int], int],
        unregister: Callable[[int], int],
        clear_error: Callable[[], object],
        *,
        is_locked: Callable[[int], bool] = lambda address: False,
        piece_nbytes: int | None = None,
        limit_nbytes: int | None = None,
    ) -> None:
        self._register = register
        self._unregister = unregister
        self._clear_error = clear_error
        self._pieces: list[int] = []
        self._users = 1
        self.memory: object = None  # who owns it: it must not be given to others while it is locked
        self._counting = threading.Lock()
        limit = _limit(limit_nbytes)
        self.pageable_nbytes = 0
        self._refusals: dict[int, int] = {}
        foreign: list[tuple[int, int]] = []
        own: list[tuple[int, int]] = []
        for address, nbytes in ranges:
            if nbytes:
                both = is_locked(address) and is_locked(address + nbytes - 1)
                (foreign if both else own).append((address, address + nbytes))
        intervals = _joined(foreign, touching=False)
        self.locked_nbytes = sum(stop - start for start, stop in intervals)
        self._limit = limit if limit < 0 else limit + self.locked_nbytes
        spans = _joined((start // PAGE * PAGE, -(-stop // PAGE) * PAGE) for start, stop in own)
        size = piece_nbytes or PIECE_NBYTES
        pieces = [(address, min(address + size, stop)) for start, stop in spans for address in range(start, stop, size)]
        try:
            with _Progress(sum(stop - start for start, stop in pieces)) as progress:
                for address, end in pieces:
                    if self._lock(address, end - address):
                        intervals.append((address, end))
                    progress.advance(end - address)
        except BaseException:
            self.close()
            raise
        self.locked: NDArray[np.uint64] = np.array(sorted(intervals), np.uint64).reshape(-1, 2)
        if self._refusals:
            self._log_refusals()

    def _lock(self, address: int, nbytes: int) -> bool:
        stopped = any(code not in (INVALID_VALUE, ALREADY_REGISTERED) for code in self._refusals)
        if not stopped and not 0 <= self._limit < self.locked_nbytes + nbytes:
            self._pieces.append(address)  # before, lest an interrupt leaves it locked and unknown
            code = self._register(address, nbytes)
            if code == SUCCESS:
                self.locked_nbytes += nbytes
                return True
            self._pieces.pop()
            self._clear_error()
            self._refusals[code] = self._refusals.get(code, 0) + 1
        self.pageable_nbytes += nbytes
        return False

    def _log_refusals(self) -> None:
        where = " (WSL limits it to a part of memory)" if "microsoft" in platform.release().lower() else ""
        logger.warning(
            "the system locked %.2f GiB of the experts' memory and refused the rest, %.2f GiB "
            "(cudaHostRegister: error %s)%s. Copies from there are slower; "
            "MOECACHE_PAGE_LOCK=<bytes> limits what is locked",
            self.locked_nbytes / 2**30,
            self.pageable_nbytes / 2**30,
            ", ".join(map(str, sorted(self._refusals))),
            where,
        )

    def share(self) -> bool:
        """Take part in the lock: it holds until every user has closed it. False when it holds no more."""
        with self._counting:
            if self._users:
                self._users += 1
            return self._users > 0

    def close(self) -> None:
        """End one use; the last user unlocks everything. More calls than users do nothing."""
        with self._counting:
            if self._users == 0:
                return
            self._users -= 1
            if self._users:
                return
        failed = []
        while self._pieces:
            code = self._unregister(self._pieces.pop())
            if code not in (SUCCESS, UNLOADING, NOT_REGISTERED):
                self._clear_error()
                failed.append(code)
        self.memory = None
        if failed:
            logger.warning(
                "%d pieces of host memory could not be unlocked (cudaHostUnregister: error %d)", len(failed), failed[0]
            )


class _Progress:
    """Shows that memory is being locked once that has taken a while: a bar on a terminal, one line in the log elsewhere."""

    def __init__(self, nbytes: int) -> None:
        self._nbytes, self._done, self._logged = nbytes, 0, False
        self._began = time.monotonic()
        # disable=None: no bar where stderr is no terminal
        self._bar: Any = tqdm(
            total=nbytes,
            desc="locking host memory",
            unit="B",
            unit_scale=True,
            disable=None,
            delay=SHOWN_AFTER_S,
            leave=False,
        )

    def advance(self, nbytes: int) -> None:
        self._done += nbytes
        self._bar.update(nbytes)
        spent = time.monotonic() - self._began
        if spent < SHOWN_AFTER_S or self._logged or self._done == self._nbytes:
            return
        self._logged = True
        if self._bar.disable:
            logger.warning(
                "locking host memory for fast copies: %.1f of %.1f GiB after %.0f s, about %.0f s to go. "
                "%s=<bytes> limits it, an interrupt gives it all back",
                self._done / 2**30,
                self._nbytes / 2**30,
                spent,
                spent / self._done * (self._nbytes - self._done),
                LIMIT_VARIABLE,
            )

    def __enter__(self) -> _Progress:
        return self

    def __exit__(self, *_: object) -> None:
        self._bar.close()


def _limit(limit_nbytes: int | None) -> int:
    text = os.environ.get(LIMIT_VARIABLE)
    if text is None:
        return -1 if limit_nbytes is None else limit_nbytes
    if not text.strip().isdigit():
        raise ValueError(f"{LIMIT_VARIABLE}={text!r} is no number of bytes: expected digits, 0 to lock nothing")
    return int(text)


def _joined(spans: Iterable[tuple[int, int]], touching: bool = True) -> list[tuple[int, int]]:
    """[start, stop) in ascending order, those that overlap (or touch) as one."""
    joined: list[tuple[int, int]] = []
    for start, stop in sorted(spans):
        if joined and (start < joined[-1][1] or (touching and start == joined[-1][1])):
            joined[-1] = (joined[-1][0], max(stop, joined[-1][1]))
        else:
            joined.append((start, stop))
    return joined


def lock_pages(runtime: Runtime, ranges: Iterable[tuple[int, int]], **options: Any) -> PageLock:
    """Lock (address, bytes) of host memory over a device's runtime; the options are `PageLock`'s."""
    return PageLock(
        ranges,
        lambda address, nbytes: runtime.code("cudaHostRegister", address, nbytes, REGISTER_PORTABLE),
        lambda address: runtime.code("cudaHostUnregister", address),
        lambda: runtime.code("cudaGetLastError"),
        is_locked=runtime.is_locked,
        **options,
    )


_locking = threading.Lock()


class Lockable(Protocol):
    """What keeps the lock on its memory for all who use it: an :class:`moecache.ExpertBank`."""

    page_lock: PageLock | None


def lock_sources(sources: Sources, runtime: Runtime, bank: Lockable | None = None) -> PageLock:
    """The lock on the memory of some sources; that of a bank is shared by all caches over it, also across a resize."""
    with _locking:
        held = None if bank is None else bank.page_lock
        if held is not None and held.share():
            return held
        began = time.perf_counter()
        in_memory = sources.segment_file < 0
        addresses, sizes = sources.segment_source[in_memory], sources.segment_nbytes[in_memory]
        made = lock_pages(runtime, zip(addresses.tolist(), sizes.tolist(), strict=True))
        made.memory = sources.tensors
        if bank is not None:
            bank.page_lock = made
        if made.locked_nbytes:
            took = time.perf_counter() - began
            logger.info("%.2f GiB of host memory locked in %.1f s", made.locked_nbytes / 2**30, took)
        return made
