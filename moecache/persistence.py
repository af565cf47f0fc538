"""Saving what a cache owes to files: its history, a recording, the log it learns from.

Written while it runs, when it is closed or collected, when the interpreter ends and before a signal ends it.
"""

from __future__ import annotations

import _thread
import contextlib
import logging
import os
import signal
import threading
import weakref
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

# Work on files is done where nothing may be imported (files.Apart).
import safetensors.numpy  # noqa: F401

from ._core import OnlineWeights
from .errors import HistoryFormatError
from .files import Apart, FileLock, clear_leftovers, probe_folder, write_atomically
from .fingerprint import Fingerprint
from .history import History, Snapshot
from .history_file import LEARNED
from .learning import open_learner
from .recorder import RecordedModel, Recorder, rescue

if TYPE_CHECKING:
    import torch

    from ._core import RequestState
    from .options import CacheOptions
    from .recorder import Routed

__all__ = ["CacheFiles", "HistoryFile"]

logger = logging.getLogger("moecache")


class HistoryFile:
    """A history and the file that it is kept in, which other caches and processes may keep theirs in, too.

    What is saved is what this history has gained since it was read or last saved: requests, and counts of what followed what. It is
    added, under a lock, to what the file holds by then. Weights learned online become means weighted by how sure each side is, and
    no surer than the surer one, as both began with the same; a forecaster replaces the file's if it came since. What others have
    added serves the caches that are made from then on.

    Parameters
    ----------
    path : path
        Of a file that may not exist yet.
    fingerprint : Fingerprint
    capacity : int
        Requests kept, where there is no file.

    Raises
    ------
    HistoryFormatError
        The file is damaged or of another model, or nothing can be written there.
    """

    def __init__(self, path: str | os.PathLike[str], fingerprint: Fingerprint, capacity: int) -> None:
        # The file that is meant now, wherever the process goes, and not a link to it, which writing would replace.
        self.path = Path(os.path.realpath(path))
        if not self.path.parent.is_dir():
            raise HistoryFormatError(f"no folder {self.path.parent} to keep the history {self.path.name} in")
        exists = self.path.exists()
        self._seen = _identity(self.path)
        self.history = (
            History.load(self.path, fingerprint, expected_capacity=capacity)
            if exists
            else History(fingerprint, capacity)
        )
        fault = probe_folder(self.path.parent)
        if fault is not None:
            raise HistoryFormatError(
                f"the history {self.path} could be read but not be written ({fault.strerror}): expected a folder that can be written; "
                "give history=moecache.History.load(PATH) to read one and keep nothing"
            ) from fault
        with contextlib.suppress(OSError), FileLock(self.path, timeout=0):
            clear_leftovers(self.path)  # not those of who is saving now
        self._saved = Snapshot.of(self.history)
        self._alone = True  # nothing in the file that is not in this history
        self._warned_unlocked = False

    def save(self) -> str | None:
        """Add what is new to the file; returns a warning about it, or None. Not to be interrupted.

        Raises
        ------
        HistoryFormatError
            The file is of another model now.
        OSError
            It cannot be written, or is locked by another process all the time.
        """
        now = Snapshot.of(self.history)
        warning = None
        with FileLock(self.path) as lock:
            if not lock.locked and not self._warned_unlocked:
                self._warned_unlocked = True
                warning = f"the file system of {self.path} has no locks: a process that saves at the same moment may be overruled"
            found = _identity(self.path)
            if found is not None and found == self._seen and not _gained(self._saved, now):
                return warning
            data = now.format()
            if found is not None and not (self._alone and found == self._seen):
                try:
                    data = _joined(self.path, self._saved, now).format()
                    self._alone = False
                except HistoryFormatError as error:
                    if "another model" in str(error):
                        raise
                    aside = _set_aside(self.path)
                    warning = f"{error}; it is {aside} now, and the history as this cache knows it takes its place"
                    self._alone = True
            elif found is None:
                self._alone = True
            write_atomically(self.path, data)
            self._seen, self._saved = _identity(self.path), now
        return warning


def _identity(path: Path) -> tuple[int, int, int] | None:
    try:
        found = path.stat()
    except FileNotFoundError:
        return None
    return found.st_ino, found.st_mtime_ns, found.st_size


def _set_aside(path: Path) -> Path:
    n = 0
    while (aside := path.with_name(f"{path.name}.damaged{f'-{n}' if n else ''}")).exists():
        n += 1
    os.replace(path, aside)
    return aside


def _gained(before: Snapshot, now: Snapshot) -> bool:
    return (
        now.finished != before.finished
        or now.forecaster is not before.forecaster
        or now.tokens != before.tokens
        or any(not np.array_equal(now.learned[name], before.learned[name]) for name in LEARNED)
    )


def _joined(path: Path, before: Snapshot, now: Snapshot) -> Snapshot:
    # What the file holds, and what `now` has more than `before`.
    disk = History.load(path, now.fingerprint, expected_capacity=now.capacity)
    found = Snapshot.of(disk)
    for n in np.flatnonzero(now.written >= before.finished).tolist():
        disk.add(now.prompt[n], now.decode[n], 0)
    # A table whose counts were halved since has less: what it gained is not known then, and nothing is added for it.
    learned = {
        name: found.learned[name].astype(np.int64)
        + np.maximum(now.learned[name].astype(np.int64) - before.learned[name], 0)
        for name in LEARNED
    }
    total = found.total + now.total - before.total
    tokens = found.tokens + now.tokens - before.tokens
    disk.store.restore(total, tokens, *(learned[name] for name in LEARNED))
    _join_online(disk.store.weights, before.online, now.online)
    if now.forecaster is not before.forecaster:
        disk.forecaster = now.forecaster
    return Snapshot.of(disk)


def _join_online(weights: OnlineWeights, before: dict[str, np.ndarray], now: dict[str, np.ndarray]) -> None:
    found = {name: value.copy() for name, value in weights.arrays().items()}
    if all(np.array_equal(found[name], before[name]) for name in found):
        for name, value in weights.arrays().items():
            value[:] = now[name]
        return
    mine = OnlineWeights()
    for name, value in mine.arrays().items():
        value[:] = now[name]
    weights.join([mine])
    for name, value in weights.arrays().items():
        if name.endswith("_curvature"):
            surer = max(np.abs(found[name]).max(), np.abs(now[name]).max())
            value *= min(1.0, surer / max(np.abs(value).max(), 1e-300))


class CacheFiles:
    """The files of one cache. Does not hold the cache, so that it can finish them when that is collected.

    Parameters
    ----------
    history : History, path or None
    model : RecordedModel
        The cache's.
    learn : bool or path
    policy : str
        The cache's, for `learn`.
    options : CacheOptions
        The history's capacity, and when files are saved.

    Attributes
    ----------
    history : History
    learner : Learner or None
    recorder : Recorder or None

    Raises
    ------
    HistoryFormatError, LearnError, TraceFormatError
    """

    def __init__(
        self,
        history: History | str | os.PathLike[str] | None,
        model: RecordedModel,
        learn: bool | str | os.PathLike[str],
        policy: str,
        options: CacheOptions,
    ) -> None:
        self._model, fingerprint = model, model.fingerprint
        self._file: HistoryFile | None = None
        beside: Path | None = None
        if history is None:
            self.history = History(fingerprint, options.history_capacity)
        elif isinstance(history, History):
            history._check(fingerprint, "this history", expected=fingerprint)
            self.history = history
        else:
            self._file = HistoryFile(history, fingerprint, options.history_capacity)
            self.history, beside = self._file.history, Path(os.path.abspath(history))
        self.learner = open_learner(learn, self.history, beside, policy, model)
        self.recorder: Recorder | None = None
        self._pause = None if options.autosave is None else min(float(options.autosave), threading.TIMEOUT_MAX)
        self._on_signals = options.save_on_signals
        self._apart = Apart()
        self._open: dict[int, RequestState] = {}
        self._over = self._owes = False
        self._due = False  # a thread waits to save
        self._wake = _thread.allocate_lock()
        self._wake.acquire()
        self._failing = ""
        self._finalizer: weakref.finalize[Any, Any] | None = None

    def watch(self, cache: object) -> None:
        """Finish the files when the cache is collected, the interpreter ends or a signal ends it, without ``close()``."""
        self._finalizer = weakref.finalize(cache, self.finish)
        if self._file is not None or self.learner is not None:
            self._register()

    def _register(self) -> None:
        if not self._owes:
            self._owes = True
            _LIVE.add(self)
            if self._on_signals:
                _take_signals()

    def record(self, path: str | os.PathLike[str], name: str | None) -> Recorder:
        """Finish a recording under way and begin another."""
        if self.recorder is not None:
            self.recorder.close()
        recorder = Recorder(self._model, path, name)
        rescue(recorder.path)
        self.recorder = recorder
        self._register()
        return recorder

    @property
    def taking_down(self) -> bool:
        """Whether anything wants to know what is routed."""
        return self.recorder is not None or self.learner is not None

    def routed(
        self, request: Routed, layer: int, ids: torch.Tensor, decode: bool, token_mask: torch.Tensor | None
    ) -> None:
        """A request has routed a step: into the recording and the log, where there are any."""
        if self.recorder is not None:
            self.recorder.step(request, layer, ids, decode, token_mask)
        if self.learner is not None:
            self.learner.step(request, layer, ids, decode, token_mask)

    def begun(self, state: RequestState) -> None:
        """A request is open: if nobody ends it, what it has counted is kept when the files are finished."""
        self._open[id(state)] = state

    def ending(self, state: RequestState | None = None) -> None:
        """An open request, or all of them, is about to be ended: it is kept or not by who ends it.

        Before, not after: a signal that comes while it enters the history is handled when it is there.
        """
        if state is None:
            self._open.clear()
        else:
            self._open.pop(id(state), None)

    def ended(self) -> None:
        """A request was closed."""
        if self._over:
            return
        if self.learner is not None:
            self.learner.between_requests()
        if self._file is not None and self._pause is not None and not self._due:
            self._due = True
            try:
                # It ends with the interpreter, which finishes the files itself.
                _thread.start_new_thread(_save_later, (weakref.ref(self), self._wake, self._pause))
            except RuntimeError:  # the interpreter ends
                self._due = False

    def _save_now(self) -> None:
        self._due = False
        if self._over or self._file is None:
            return
        try:
            warning = self._apart.run(self._save_unless_over)
        except Exception as error:
            if self._failing != str(error) and not self._over:
                self._failing = str(error)
                logger.warning("the history cannot be saved now, the next request tries again: %s", error)
            return
        self._failing = ""
        if warning:
            logger.warning("%s", warning)

    def _save_unless_over(self) -> str | None:
        # Looked at where no other piece of work is under way: `close` may have written the file for the last time meanwhile.
        file = self._file
        return None if self._over or file is None else file.save()

    def finish(self) -> None:
        """:meth:`close` for an end that nobody asked for: open requests are kept, and errors are logged."""
        for state in list(self._open.values()):
            if self._open.pop(id(state), None) is not None:
                match = state.match
                self.history.add(match.prompt_counts, match.decode_counts, state.prompt_tokens + state.decode_tokens)
        try:
            self.close()
        except Exception as error:
            logger.error("%s", error)

    def close(self) -> None:
        """Finish each file, whatever becomes of the others. A second call tries again what has failed.

        Raises
        ------
        OSError, MoeCacheError
            The first error; others are logged.
        """
        self._over = True
        self._open.clear()
        with contextlib.suppress(RuntimeError):  # nothing to wake
            self._wake.release()
        errors: list[Exception] = []
        for piece in (self._close_recorder, self._close_learner, self._close_history):
            try:
                piece()
            except Exception as error:
                errors.append(error)
        if not errors:
            self._release()
            return
        for other in errors[1:]:
            logger.error("%s", other)
        raise errors[0]

    def _close_recorder(self) -> None:
        if self.recorder is not None:
            self.recorder.close()

    def _close_learner(self) -> None:
        if self.learner is not None:
            self.learner.close()

    def _close_history(self) -> None:
        if self._file is not None:
            warning = self._apart.run(self._file.save)
            self._file = None
            if warning:
                logger.warning("%s", warning)

    def abandon(self) -> None:
        """The cache could not be made: write nothing."""
        self._file = None
        self.close()

    def _release(self) -> None:
        if self._finalizer is not None:
            self._finalizer.detach()
        _LIVE.discard(self)
        if not _LIVE:
            _give_signals_back()

    def disown(self) -> None:
        """In a forked child: the files are the parent's."""
        self._over, self._file = True, None
        self._open.clear()
        if self._finalizer is not None:
            self._finalizer.detach()
        if self.recorder is not None:
            self.recorder.disown()
        if self.learner is not None:
            self.learner.disown()


def _save_later(files: weakref.ref[CacheFiles], wake: _thread.LockType, seconds: float) -> None:
    # Holds nothing of the cache while it waits; woken where there is nothing to wait for any more.
    if wake.acquire(timeout=seconds):
        return
    found = files()
    if found is not None:
        found._save_now()


_LIVE: weakref.WeakSet[CacheFiles] = weakref.WeakSet()
_SIGNALS = (signal.SIGTERM, signal.SIGHUP)


def _take_signals() -> None:
    # Nobody's handler is replaced, and only the main thread may set one.
    if threading.get_ident() != threading.main_thread().ident:
        return
    for number in _SIGNALS:
        if signal.getsignal(number) is signal.SIG_DFL:
            signal.signal(number, _end_by_signal)


def _give_signals_back() -> None:
    if threading.get_ident() != threading.main_thread().ident:
        return
    for number in _SIGNALS:
        if signal.getsignal(number) is _end_by_signal:
            signal.signal(number, signal.SIG_DFL)


def _end_by_signal(number: int, frame: Any) -> None:
    for files in list(_LIVE):
        files.finish()
    signal.signal(number, signal.SIG_DFL)
    signal.raise_signal(number)


def _disown_all() -> None:
    for files in list(_LIVE):
        files.disown()
    _LIVE.clear()
    _give_signals_back()


os.register_at_fork(after_in_child=_disown_all)
