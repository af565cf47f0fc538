"""Files that appear whole or not at all, that several processes may write, and that no signal handler finds half done."""

from __future__ import annotations

import _thread
import contextlib
import errno
import fcntl
import glob
import os
import secrets
import tempfile
import threading
import time
import weakref
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import IO, Any, TypeVar

__all__ = [
    "Apart",
    "FileLock",
    "clear_leftovers",
    "create_temporary",
    "left_behind",
    "probe_folder",
    "whole_file",
    "write_atomically",
]

_Result = TypeVar("_Result")

LOCK_TIMEOUT_S = 20.0
_NO_LOCKS = {errno.ENOLCK, errno.ENOTSUP, errno.EOPNOTSUPP, errno.ENOSYS, errno.EINVAL}


def write_atomically(path: Path, data: bytes) -> None:
    """Write a whole file or leave what was there."""
    with whole_file(path) as file:
        file.write(data)


@contextlib.contextmanager
def whole_file(path: Path) -> Iterator[IO[bytes]]:
    """A new file that takes its name only when all of it is written; what was there stays until then."""
    file, temporary = create_temporary(path)
    try:
        with file:
            yield file
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, path)
    except BaseException:
        with contextlib.suppress(OSError):
            os.unlink(temporary)
        raise


def create_temporary(path: Path, buffering: int = -1) -> tuple[IO[bytes], Path]:
    """A new file beside `path`, locked as a living process's: :func:`clear_leftovers` leaves it."""
    while True:
        # Not mkstemp: its files are for their owner alone.
        temporary = path.with_name(f"{path.name}.{secrets.token_hex(4)}.tmp")
        file = open(temporary, "xb", buffering=buffering)  # noqa: SIM115
        try:
            with contextlib.suppress(OSError):
                fcntl.flock(file, fcntl.LOCK_EX)
            # Another process that found it before the lock took it for one left behind.
            if os.path.exists(temporary):
                return file, temporary
        except BaseException:
            file.close()
            with contextlib.suppress(OSError):
                os.unlink(temporary)
            raise
        file.close()


@contextlib.contextmanager
def left_behind(path: Path) -> Iterator[bool]:
    """Whether no living process has a file locked, as after SIGKILL; inside the block this one has."""
    with contextlib.ExitStack() as stack:
        try:
            file = stack.enter_context(open(path, "rb"))
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            yield False
            return
        try:
            yield True
        finally:
            fcntl.flock(file, fcntl.LOCK_UN)


def clear_leftovers(path: Path) -> None:
    """Remove the temporary files that killed processes have left beside a file while they wrote it."""
    for temporary in path.parent.glob(f"{glob.escape(path.name)}.????????.tmp"):
        with left_behind(temporary) as dead, contextlib.suppress(OSError):
            if dead:
                temporary.unlink()


def probe_folder(folder: Path) -> OSError | None:
    """Why no file can be made in a folder; None where one can."""
    try:
        with tempfile.TemporaryFile(dir=folder):  # without a name, which a kill would leave
            return None
    except OSError as error:
        return error


class FileLock:
    """Lets one process at a time, and one thread of it, change a file; a context manager.

    The lock lies on a side file with the ending ``.lock``, which is gone again when nobody holds it: the file itself is
    replaced as it is written. Where a file system has no locks, the caller goes on without (`locked` is False).

    Raises
    ------
    TimeoutError
        Another process has held the lock all the time.
    """

    def __init__(self, path: Path, timeout: float | None = None) -> None:
        self.path = path.with_name(f"{path.name}.lock")
        self.timeout = LOCK_TIMEOUT_S if timeout is None else timeout
        self.locked = False
        self._file: IO[bytes] | None = None

    def __enter__(self) -> FileLock:
        deadline = time.monotonic() + self.timeout
        while not self._try():
            if time.monotonic() > deadline:
                raise TimeoutError(
                    errno.ETIMEDOUT, f"another process has held this lock for {self.timeout:g} s", str(self.path)
                )
            time.sleep(0.01)
        return self

    def _try(self) -> bool:
        # Whether there is nothing to wait for.
        file = open(self.path, "ab")  # noqa: SIM115
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            mine, now = os.fstat(file.fileno()), os.stat(self.path)
        except OSError as error:
            file.close()
            return error.errno in _NO_LOCKS
        if (mine.st_dev, mine.st_ino) != (now.st_dev, now.st_ino):  # its holder has removed it
            file.close()
            return False
        self._file, self.locked = file, True
        _HELD.add(self)
        return True

    def __exit__(self, *_: object) -> None:
        file, self._file = self._file, None
        _HELD.discard(self)
        self.locked = False
        if file is None:
            with contextlib.suppress(OSError):
                os.unlink(self.path)
            return
        with file, contextlib.suppress(OSError):
            # In this order: who opens the file before it is gone sees that it is.
            os.unlink(self.path)
            fcntl.flock(file, fcntl.LOCK_UN)  # a forked child has a copy of the descriptor

    def disown(self) -> None:
        """In a forked child: close the copy of the parent's descriptor, which would hold the lock on."""
        if self._file is not None:
            self._file.close()
            self._file = None


_HELD: weakref.WeakSet[FileLock] = weakref.WeakSet()


def _disown_locks() -> None:
    for lock in list(_HELD):
        lock.disown()
    _HELD.clear()


os.register_at_fork(after_in_child=_disown_locks)


class Apart:
    """Runs work on files one piece at a time, where no signal handler or Ctrl-C can interrupt it.

    Python runs both in the main thread, between any two instructions: what they found there could be half done, and a lock
    that it held would stay held while they wait for it. Work asked for in the main thread is done by a thread of its own
    for which the main thread waits; a handler that runs meanwhile and asks for work waits behind it.

    The work must not log nor import: the main thread may have been interrupted while it held the locks that these take.
    It must not wait for a lock under which the main thread asks for work.
    """

    def __init__(self) -> None:
        self._lock = threading.RLock()
        self._busy = False

    def run(self, work: Callable[[], _Result]) -> _Result | None:
        """Do a piece of work; what it raises is raised here.

        None without doing it where this thread is at a piece already: only an interpreter that ends does work in its
        main thread, and the handler that interrupts it there leaves it to that.
        """
        if threading.get_ident() != threading.main_thread().ident:
            return self._serially(work)
        outcome: list[Any] = []
        done = _thread.allocate_lock()
        done.acquire()

        def apart() -> None:
            try:
                outcome.append(self._serially(work))
            except BaseException as error:
                outcome.extend((None, error))
            finally:
                done.release()

        try:
            # Not threading.Thread: an interrupt in its start() can leave the new thread waiting for ever.
            _thread.start_new_thread(apart, ())
        except RuntimeError:  # the interpreter ends
            return self._serially(work)
        done.acquire()
        if len(outcome) == 2:
            raise outcome[1]
        return outcome[0]  # type: ignore[no-any-return]

    def _serially(self, work: Callable[[], _Result]) -> _Result | None:
        with self._lock:
            if self._busy:
                return None
            self._busy = True
            try:
                return work()
            finally:
                self._busy = False
