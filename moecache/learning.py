"""Learning as it runs: a log of what was routed, and a process of low priority that fits the forecaster to it anew.

Nothing runs beside the requests here: what a fit has left is taken up as they begin and end.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import logging
import os
import shutil
import subprocess
import sys
import threading
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from .errors import HistoryFormatError, LearnError, MoeCacheError, TraceFormatError
from .files import Apart
from .history import History
from .recorder import RecordedModel, Recorder, Routed
from .spill import SUFFIX, recover
from .trace import Trace, check_same_model

if TYPE_CHECKING:
    import torch


__all__ = ["LOG_TOKENS", "Learner"]

logger = logging.getLogger("moecache")

LOG_TOKENS = 50_000
"""Tokens that the log keeps, the newest; beside them at most as many are being recorded. A token takes ``layers * top_k``
bytes, twice that where a layer has more than 256 experts or rows are padded: 24 MB at 61 layers and 8 experts a token."""

_PART_TOKENS = 5_000  # a part of the log, the unit in which it forgets
_FIRST_TOKENS, _FIRST_REQUESTS = 1_250, 5  # the least that a fit accepts, which holds a request out
_MEASURED = 4_000  # tokens after each fit
_PATIENCE_S = 5.0  # for a killed process, which has to be given the processor once more to end
_INPUT = "input-"  # before the names of what a fit reads
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
    model : RecordedModel
        Whose routing it is.

    Raises
    ------
    LearnError
        The folder cannot be used, or another cache uses it.
    TraceFormatError, HistoryFormatError
        What lies there is of another model. What is damaged is set aside.
    """

    def __init__(self, folder: Path, history: History, model: RecordedModel) -> None:
        self.folder, self.history, self._model = Path(os.path.abspath(folder)), history, model
        self.fits = self.fits_failed = 0
        self.closed = False
        self._apart = Apart()  # of the folder: the log's parts and the fit
        self._lock = threading.RLock()  # of the recorder that steps go to
        self._recorder: Recorder | None = None
        self._sealed: list[Recorder] = []  # not parts of the log yet
        self._recording = True
        self._fit = _Fit()
        self._log_ended = False
        self._pending_logs: list[tuple[Any, ...]] = []  # of work during which nothing may be logged
        self._hold()
        try:
            self._parts = self._read_parts()
            # The log's end when the last fit was begun; a token count, like every name in the folder.
            self._tried = self._take_earlier()
            self._rescue()
        except BaseException:
            self._held.close()
            raise
        finally:
            self._log_pending()

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
        parts = {}
        for path in sorted(self.folder.glob("log-*.safetensors")):
            try:
                trace = Trace.load(path)
            except TraceFormatError as error:
                self._set_aside(path, error)
                continue
            check_same_model(trace, self.history.fingerprint, "the model of this cache", "the cache")
            parts[path] = trace.tokens, trace.requests
        return parts

    def _rescue(self) -> None:
        # What a killed process has left: nobody else writes here.
        self._clear_inputs()
        for leftover in self.folder.glob("*.tmp"):
            leftover.unlink(missing_ok=True)
        for spill in sorted(self.folder.glob(f"*{SUFFIX}")):
            rescued = self.folder / "log.safetensors"
            try:
                tokens, requests = recover(spill, rescued)
            except (TraceFormatError, OSError) as error:
                self._set_aside(spill, error)
                continue
            if tokens:
                self._append(rescued, tokens, requests)
                self._later(
                    logging.INFO, "%d tokens of a run that was killed are in the log of %s", tokens, self.folder
                )

    def _set_aside(self, path: Path, error: Exception) -> None:
        aside = path.with_name(f"{path.name}.damaged")
        with contextlib.suppress(OSError):
            os.replace(path, aside)
        self._later(logging.WARNING, "damaged, set aside as %s, and learning goes on without it: %s", aside, error)

    def _later(self, level: int, message: str, *arguments: object) -> None:
        self._pending_logs.append((level, message, *arguments))

    def _log_pending(self) -> None:
        while self._pending_logs:
            logger.log(*self._pending_logs.pop(0))

    def _take_earlier(self) -> int:
        # Up to which token an earlier run has fitted.
        while (fitted := max(self.folder.glob("fitted-*.history"), default=None)) is not None:
            try:
                forecaster = History.load(fitted).forecaster
            except HistoryFormatError as error:
                self._set_aside(fitted, error)
                continue
            History.load(fitted, self.history.fingerprint)
            if self.history.forecaster is None:
                self.history.forecaster = forecaster
            return _number(fitted)
        return 0

    def step(
        self, request: Routed, layer: int, ids: torch.Tensor, decode: bool, token_mask: torch.Tensor | None
    ) -> None:
        """Take down one routed step, as :meth:`moecache.recorder.Recorder.step` does."""
        if not self._recording:
            return
        error = None
        with self._lock:
            recorder = self._recorder
            if recorder is None:
                recorder, error = self._open()
                if self.closed and recorder is not None:  # by a signal handler, just now
                    recorder.seal()
                    recorder.discard()
            if recorder is not None and recorder.tokens < LOG_TOKENS:
                recorder.step(request, layer, ids, decode, token_mask)
        if error is not None:
            self._end_log(error)
            self._log_pending()

    def between_requests(self) -> None:
        """Take up the weights of a fit that has ended, and begin another if the log has grown enough."""
        if self.closed:
            return
        recorder, running = self._recorder, self._fit.running
        due = not running and self._due(recorder)
        if recorder is not None and (due or recorder.tokens >= _PART_TOKENS or recorder.error is not None):
            self._seal()
        if running or due or self._sealed:
            self._apart.run(self._advance)
            self._log_pending()

    def close(self) -> None:
        """End the fit under way and keep what was recorded: the next run in this folder begins it again.

        A signal handler may call it at any point.
        """
        if self.closed:
            return
        self._recording = False
        self._seal(last=True)
        self._apart.run(self._end_all)
        self._log_pending()

    def disown(self) -> None:
        """In a forked child: the folder is the parent's."""
        self.closed, self._recording = True, False
        for recorder in (self._recorder, *self._sealed):
            if recorder is not None:
                recorder.disown()
        self._held.close()
        self._fit.disown()

    def _open(self) -> tuple[Recorder | None, OSError | None]:
        try:
            self._recorder = Recorder(self._model, self.folder / "log.safetensors")
        except OSError as error:
            return None, error
        return self._recorder, None

    def _seal(self, last: bool = False) -> None:
        # Steps go into another part from here on. No work on the folder waits for this lock: its holder may be waiting for
        # such work, in a signal handler.
        with self._lock:
            recorder = self._recorder
            # A forward pass goes into one part: another request may be in the middle of one.
            if recorder is not None and (last or not recorder.under_way):
                if recorder not in self._sealed:
                    self._sealed.append(recorder)
                self._recorder = None
            for sealed in list(self._sealed):
                sealed.seal()

    # The rest is done apart, a piece at a time.

    def _advance(self) -> None:
        if self.closed:
            return
        self._take()
        self._keep_sealed()
        self._forget()
        if not self._fit.running and self._due(None):
            self._begin_fit()

    def _end_all(self) -> None:
        if self.closed:
            return
        self._take()
        self._fit.kill()
        self._clear_inputs()
        self._keep_sealed()
        self._held.close()
        self.closed = True

    def _end(self) -> int:
        return max((_number(path) for path in self._parts), default=self._tried)

    def _due(self, recorder: Recorder | None) -> bool:
        # With what is being recorded, would there be enough, and twice as much as when it was last tried?
        new = (0, 0) if recorder is None else (recorder.tokens, recorder.requests)
        tokens, requests = (sum(n) for n in zip(new, *self._parts.values(), strict=True))
        grown = self._end() + new[0] - self._tried >= max(1, min(self._tried, LOG_TOKENS // 2))
        return grown and tokens >= _FIRST_TOKENS and requests >= _FIRST_REQUESTS

    def _keep_sealed(self) -> None:
        # One that `_seal` is at has its turn next time.
        for recorder in [recorder for recorder in self._sealed if recorder.closed]:
            try:
                recorder.finish()
                if recorder.tokens:
                    self._append(recorder.path, recorder.tokens, recorder.requests)
                if recorder.error is not None:
                    raise recorder.error
            except OSError as error:
                recorder.discard()
                self._end_log(error)
            self._sealed.remove(recorder)

    def _append(self, written: Path, tokens: int, requests: int) -> None:
        path = self.folder / f"log-{self._end() + tokens:012}.safetensors"
        os.replace(written, path)
        # Other threads look at it meanwhile.
        self._parts = {**self._parts, path: (tokens, requests)}

    def _end_log(self, error: OSError) -> None:
        if not self._log_ended:
            self._later(logging.WARNING, "learning ends, as its log cannot be written to %s: %s", self.folder, error)
        self._log_ended, self._recording = True, False

    def _forget(self) -> None:
        while len(self._parts) > 1 and sum(tokens for tokens, _ in self._parts.values()) > LOG_TOKENS:
            oldest, *others = self._parts
            oldest.unlink(missing_ok=True)
            self._parts = {path: self._parts[path] for path in others}

    def _begin_fit(self) -> None:
        self._tried = self._end()
        target = self.folder / f"fitted-{self._tried:012}.history"
        try:
            # Links of its own: the log goes on forgetting however long the fit takes to read it.
            inputs = [_link(path, self.folder / f"{_INPUT}{path.name}") for path in self._parts]
            self._fit.start(target, inputs, self.folder / "fit.log", _SETTINGS)
        except OSError as error:
            self._failed(str(error))

    def _clear_inputs(self) -> None:
        for path in self.folder.glob(f"{_INPUT}*"):
            path.unlink(missing_ok=True)

    def _take(self) -> None:
        code = self._fit.ended()
        if code is None:
            return
        target, said = self._fit.target, _last_line(self.folder / "fit.log")
        self._clear_inputs()
        if code != 0:
            self._failed(said if code > 0 else f"ended by signal {-code}")
            return
        try:
            self.history.forecaster = History.load(target, self.history.fingerprint).forecaster
        except (MoeCacheError, OSError) as error:
            self._failed(str(error))
            return
        self.fits += 1
        self._later(logging.INFO, "a new forecaster serves the requests from here on: %s", said)
        for path in self.folder.glob("fitted-*.history"):
            if path != target:
                path.unlink(missing_ok=True)

    def _failed(self, why: str) -> None:
        self.fits_failed += 1
        self._later(
            logging.WARNING, "a fit in the background failed, the forecaster stays as it was (%s): %s", self.folder, why
        )


class _Fit:
    """The process that fits. Nothing of the cache hangs on it, so that a cache left without ``close()`` can end it."""

    def __init__(self) -> None:
        self._process: subprocess.Popen[bytes] | None = None
        self.target = Path()

    @property
    def running(self) -> bool:
        return self._process is not None

    def start(self, target: Path, traces: list[Path], log: Path, settings: Mapping[str, Any]) -> None:
        # It starts with the standard library alone (-I -S), then finds what this process has found: never a module that
        # lies in the folder it happens to run in.
        package = sys.modules[__package__]
        found = json.dumps({"path": _search_path(), "file": package.__file__, "folders": list(package.__path__)})
        command = [sys.executable, "-I", "-S", "-c", _CHILD, found]
        arguments = [str(os.getpid()), str(_MEASURED), json.dumps(settings), str(target), *map(str, traces)]
        threads = dict.fromkeys(("OMP_NUM_THREADS", "MKL_NUM_THREADS", "NUMBA_NUM_THREADS"), "1")
        with open(log, "wb") as output:
            self._process = subprocess.Popen(
                [*command, *arguments],
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                start_new_session=True,  # Ctrl-C is for the owner, who ends it
                env={**os.environ, **threads, "CUDA_VISIBLE_DEVICES": ""},
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
        if self._process is None:
            return
        self._process.kill()
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(_PATIENCE_S)
        self._process = None

    def disown(self) -> None:
        """In a forked child: the process is the parent's."""
        process, self._process = self._process, None
        if process is not None:
            process.returncode = 0  # or it would be said to run still


_CHILD = """
import importlib.util, json, sys
found = json.loads(sys.argv[1])
sys.path += found["path"]
spec = importlib.util.spec_from_file_location("moecache", found["file"], submodule_search_locations=found["folders"])
package = sys.modules["moecache"] = importlib.util.module_from_spec(spec)
spec.loader.exec_module(package)
from moecache.lab.refit import main
main(sys.argv[2:])
"""


def _search_path() -> list[str]:
    try:
        here = os.path.realpath(os.getcwd())
    except FileNotFoundError:
        here = ""
    return [path for path in sys.path if os.path.isabs(path) and os.path.realpath(path) != here]


def _link(path: Path, to: Path) -> Path:
    try:
        os.link(path, to)
    except OSError:  # no links in this file system
        shutil.copyfile(path, to)
    return to


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
    learn: object, history: History, history_path: Path | None, policy: str, model: RecordedModel
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
        if not isinstance(learn, (str, os.PathLike)) or not os.fspath(learn):
            raise LearnError(f"learn is {learn!r}: expected True, or the name of a folder for the log")
        return Learner(Path(learn), history, model)
    if history_path is None:
        raise LearnError("learn=True keeps its log next to the history's file: give history=PATH, or learn=FOLDER")
    return Learner(history_path.with_name(f"{history_path.name}.learn"), history, model)
