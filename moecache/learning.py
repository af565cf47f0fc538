"""Learning as it runs: a log of what was routed, and a process of low priority that fits the forecaster to it anew.

No thread: what a fit has left is taken up as requests begin and end.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import logging
import os
import subprocess
import sys
import threading
import weakref
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from .errors import LearnError, MoeCacheError
from .history import History

if TYPE_CHECKING:
    import torch

    from .cache import ExpertCache
    from .lab.record import Recorder
    from .request import Request

__all__ = ["LOG_TOKENS", "Learner"]

logger = logging.getLogger("moecache")

LOG_TOKENS = 50_000
"""Tokens that the log keeps, the newest; beside them at most as many are being recorded. A token takes ``layers * top_k``
bytes, twice that where a layer has more than 256 experts or rows are padded: 24 MB at 61 layers and 8 experts a token."""

_PART_TOKENS = 5_000  # a part of the log, the unit in which it forgets
_FIRST_TOKENS, _FIRST_REQUESTS = 1_250, 5  # the least that a fit accepts, which holds a request out
_MEASURED = 4_000  # tokens after each fit
_PATIENCE_S = 5.0  # for a killed process, which has to be given the processor once more to end
_SETTINGS: dict[str, Any] = {}  # of moecache.lab.Settings, where not the defaults


class Learner:
    """Keeps the log of one cache in a folder, and its history supplied with weights fitted to it.

    A part of the log is a trace that ends with the token its name says, counted since the folder was new; a fit's file says
    the same of the newest token it has seen.

    Parameters
    ----------
    folder : path
        Made if need be; used by one cache at a time.
    history : History
        Gets the weights. One that has none takes those of an earlier run in this folder.

    Raises
    ------
    LearnError
        The folder cannot be used, or another cache uses it.
    TraceFormatError, HistoryFormatError
        What lies there is damaged, or of another model.
    """

    def __init__(self, folder: Path, history: History) -> None:
        self.folder, self.history = folder, history
        self.fits = self.fits_failed = 0
        self._owner = os.getpid()
        self._turn = threading.Lock()  # of the log and the fit
        self._lock = threading.Lock()  # of the recorder, never held while something is written
        self._recorder: Recorder | None = None
        self._recording = True
        self._fit = _Fit()
        self._hold()
        try:
            for leftover in (*folder.glob("*.part"), *folder.glob("*.tmp")):
                leftover.unlink(missing_ok=True)
            self._parts = self._read_parts()
            # The log's end when the last fit was begun; a token count, like every name in the folder.
            self._tried = self._take_earlier()
        except BaseException:
            self._held.close()
            raise

    def _hold(self) -> None:
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            self._held = open(self.folder / "lock", "wb")  # noqa: SIM115
            fcntl.flock(self._held, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            raise LearnError(f"another cache learns in {self.folder}; give each a folder of its own") from error
        except OSError as error:
            raise LearnError(f"learning cannot keep its log in {self.folder}: {error}") from error

    def _read_parts(self) -> dict[Path, tuple[int, int]]:
        # Tokens and requests of each, the oldest first.
        from .lab.trace import check_same_model, read_trace

        parts = {}
        for path in sorted(self.folder.glob("log-*.safetensors")):
            trace = read_trace(path)
            check_same_model(trace, self.history.fingerprint, "the model of this cache", "the cache")
            parts[path] = trace.tokens, trace.requests
        return parts

    def _take_earlier(self) -> int:
        # Up to which token an earlier run has fitted.
        fitted = max(self.folder.glob("fitted-*.history"), default=None)
        if fitted is None:
            return 0
        forecaster = History.load(fitted, self.history.fingerprint).forecaster
        if self.history.forecaster is None:
            self.history.forecaster = forecaster
        return _number(fitted)

    def watch(self, cache: ExpertCache) -> None:
        """End the fit under way when the cache is collected, or the interpreter ends, without ``close()``."""
        weakref.finalize(cache, self._fit.kill)

    def step(self, request: Request, layer: int, ids: torch.Tensor, decode: bool, counted: torch.Tensor | None) -> None:
        """Take down one routed step, as :meth:`moecache.lab.record.Recorder.step` does."""
        if not self._recording or os.getpid() != self._owner:
            return
        with self._lock:
            recorder = self._recorder or self._open(request.cache)
            if recorder is not None and recorder.tokens < LOG_TOKENS:
                recorder.step(request, layer, ids, decode, counted)

    def between_requests(self) -> None:
        """Take up the weights of a fit that has ended, and begin another if the log has grown enough."""
        # Where another thread is at it, this one has nothing to do.
        if os.getpid() != self._owner or not self._turn.acquire(blocking=False):
            return
        try:
            self._take()
            recorder = self._recorder
            if recorder is not None:
                due = not self._fit.running and self._due(recorder)
                if due or recorder.tokens >= _PART_TOKENS:
                    self._end_part()
            if not self._fit.running:  # which reads the log
                self._forget()
                if self._due(None):
                    self._begin_fit()
        finally:
            self._turn.release()

    def close(self) -> None:
        """End the fit under way and keep what was recorded: the next run in this folder begins it again."""
        if os.getpid() != self._owner:
            return
        with self._turn:
            self._take()
            self._fit.kill()
            self._end_part(last=True)
            self._held.close()

    def _open(self, cache: ExpertCache) -> Recorder | None:
        from .lab.record import Recorder
    from .request import Request

        try:
            self._recorder = Recorder(cache, self.folder / "log.safetensors")
        except OSError as error:
            self._give_up(error)
        return self._recorder

    def _end(self) -> int:
        return max((_number(path) for path in self._parts), default=self._tried)

    def _due(self, recorder: Recorder | None) -> bool:
        # With what is being recorded, would there be enough, and twice as much as when it was last tried?
        new = (0, 0) if recorder is None else (recorder.tokens, recorder.requests)
        tokens, requests = (sum(n) for n in zip(new, *self._parts.values(), strict=True))
        grown = self._end() + new[0] - self._tried >= max(1, min(self._tried, LOG_TOKENS // 2))
        return grown and tokens >= _FIRST_TOKENS and requests >= _FIRST_REQUESTS

    def _end_part(self, last: bool = False) -> None:
        with self._lock:
            recorder = self._recorder
            self._recording = self._recording and not last
            # A forward pass goes into one part: another request may be in the middle of one.
            if recorder is None or (recorder.under_way and not last):
                return
            self._recorder = None
        try:
            recorder.close()
            if recorder.tokens:
                path = self.folder / f"log-{self._end() + recorder.tokens:012}.safetensors"
                os.replace(recorder.path, path)
                self._parts[path] = recorder.tokens, recorder.requests
        except OSError as error:
            self._give_up(error)

    def _give_up(self, error: OSError) -> None:
        self._recording = False
        logger.warning("learning ends, as its log cannot be written to %s: %s", self.folder, error)

    def _forget(self) -> None:
        while len(self._parts) > 1 and sum(tokens for tokens, _ in self._parts.values()) > LOG_TOKENS:
            oldest = next(iter(self._parts))
            oldest.unlink(missing_ok=True)
            del self._parts[oldest]

    def _begin_fit(self) -> None:
        self._tried = self._end()
        target = self.folder / f"fitted-{self._tried:012}.history"
        try:
            self._fit.start(target, list(self._parts), self.folder / "fit.log", _SETTINGS)
        except OSError as error:
            self._failed(str(error))

    def _take(self) -> None:
        code = self._fit.ended()
        if code is None:
            return
        target, said = self._fit.target, _last_line(self.folder / "fit.log")
        if code != 0:
            self._failed(said if code > 0 else f"ended by signal {-code}")
            return
        try:
            self.history.forecaster = History.load(target, self.history.fingerprint).forecaster
        except (MoeCacheError, OSError) as error:
            self._failed(str(error))
            return
        self.fits += 1
        logger.info("a new forecaster serves the requests from here on: %s", said)
        for path in self.folder.glob("fitted-*.history"):
            if path != target:
                path.unlink(missing_ok=True)

    def _failed(self, why: str) -> None:
        self.fits_failed += 1
        logger.warning("a fit in the background failed, the forecaster stays as it was (%s): %s", self.folder, why)


class _Fit:
    """The process that fits. Nothing of the cache hangs on it, so that a cache left without ``close()`` can end it."""

    def __init__(self) -> None:
        self._owner = os.getpid()
        self._process: subprocess.Popen[bytes] | None = None
        self.target = Path()

    @property
    def running(self) -> bool:
        return self._process is not None

    def start(self, target: Path, traces: list[Path], log: Path, settings: Mapping[str, Any]) -> None:
        command = [sys.executable, "-m", "moecache.lab.refit", str(os.getpid()), str(_MEASURED), json.dumps(settings)]
        threads = dict.fromkeys(("OMP_NUM_THREADS", "MKL_NUM_THREADS", "NUMBA_NUM_THREADS"), "1")
        # It finds the modules that this process has found, and no GPU.
        environment = {
            **os.environ,
            **threads,
            "CUDA_VISIBLE_DEVICES": "",
            "PYTHONPATH": os.pathsep.join(p for p in sys.path if p),
        }
        with open(log, "wb") as output:
            self._process = subprocess.Popen(
                [*command, str(target), *map(str, traces)],
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                start_new_session=True,  # Ctrl-C is for the owner, who ends it
                env=environment,
            )
        self.target = target
        _lower_priority(self._process.pid)

    def ended(self) -> int | None:
        """The exit code, once; None while it runs or where there is none."""
        code = None if self._process is None else self._process.poll()
        if code is not None:
            self._process = None
        return code

    def kill(self) -> None:
        # A forked copy of the owner leaves it alone.
        if self._process is None or os.getpid() != self._owner:
            return
        self._process.kill()
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(_PATIENCE_S)
        self._process = None


def _lower_priority(pid: int) -> None:
    # Idle scheduling makes its reads and writes idle, too. What a system does not offer or allow is done without.
    with contextlib.suppress(OSError):
        os.setpriority(os.PRIO_PROCESS, pid, 19)
    if sys.platform == "linux":
        with contextlib.suppress(OSError):
            os.sched_setscheduler(pid, os.SCHED_IDLE, os.sched_param(0))


def _number(path: Path) -> int:
    return int(path.stem.partition("-")[2])


def _last_line(path: Path) -> str:
    try:
        return (path.read_text(encoding="utf-8", errors="replace").strip().splitlines() or ["it said nothing"])[-1]
    except OSError as error:
        return str(error)


def open_learner(
    learn: bool | str | os.PathLike[str], history: History, history_path: Path | None, policy: str
) -> Learner | None:
    """What ``ExpertCache(learn=...)`` asks for.

    Raises
    ------
    LearnError
        No folder is named and no history file either, or the policy has no use for a forecaster.
    """
    if learn is False or learn is None:
        return None
    if policy != "expected-next-use":
        raise LearnError(f"learn is for the policy expected-next-use; {policy} has no use for a forecaster")
    if learn is not True:
        return Learner(Path(learn), history)
    if history_path is None:
        raise LearnError("learn=True keeps its log next to the history's file: give history=PATH, or learn=FOLDER")
    return Learner(history_path.with_name(f"{history_path.name}.learn"), history)
