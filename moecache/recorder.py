"""Recording a routing trace while a model runs."""

from __future__ import annotations

import contextlib
import itertools
import logging
import os
import threading
import weakref
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, NamedTuple, Protocol

import numpy as np
import torch

from .errors import TraceFormatError
from .files import Apart, clear_leftovers, left_behind
from .fingerprint import Fingerprint
from .spill import Recording, create_spill, pack, recover, spills_of, write_all

if TYPE_CHECKING:
    from .bank import ExpertBank

__all__ = ["RecordedModel", "Recorder", "Routed", "rescue"]

logger = logging.getLogger("moecache")

_MOST_EXPERTS = 32767  # an id is an int16


class Routed(Protocol):
    """Whose steps they are: a :class:`moecache.Request`."""

    closed: bool


class RecordedModel(NamedTuple):
    """What a recording says of its model."""

    fingerprint: Fingerprint
    expert_nbytes: int | None  # bytes of an expert; None where layers differ
    padding_id: int  # the id that stands for no expert, besides -1

    @classmethod
    def of(cls, bank: ExpertBank, top_k: int | None, padding_id: int) -> RecordedModel:
        nbytes = {bank.expert_nbytes(layer) for layer in range(len(bank.num_experts))}
        return cls(Fingerprint.of(bank, top_k), nbytes.pop() if len(nbytes) == 1 else None, padding_id)


class _Recorded:
    """What a recording keeps of a request."""

    __slots__ = ("number", "written")

    def __init__(self, number: int) -> None:
        self.number, self.written = number, False


class _Pass:
    """One forward pass of one request, as far as it has come."""

    def __init__(
        self,
        request: Routed,
        of: _Recorded,
        shape: tuple[int, int, int],
        decode: bool,
        counted: np.ndarray | None,
    ) -> None:
        # Weak: a cache that nobody closes is collected, and its recording then finished.
        self.request, self.of, self.decode, self.counted = weakref.ref(request), of, decode, counted
        self.experts = np.full(shape, -1, np.int16)
        self.layer = -1

    @property
    def over(self) -> bool:
        request = self.request()
        return request is None or request.closed


class Recorder:
    """Writes what a cache routes into a trace file, which appears whole when the recorder or the cache is closed.

    Finished forward passes go to a temporary file beside it (``.part``), so memory holds only the running ones. The ids are
    those that :meth:`moecache.Request.route` has on the CPU anyway: nothing is waited for. A disk that fills up ends the
    recording, not the model; ``close()`` then raises the error, the temporary file stays, and a second ``close()`` makes the
    trace of what is in it. What a killed process leaves becomes a trace of its own when the next one records to this path.

    A signal handler may call ``close()`` at any point. In a forked child the recording is the parent's: nothing is taken
    down and ``close()`` does nothing.

    Made by :meth:`moecache.ExpertCache.record`. A context manager.

    Parameters
    ----------
    model : RecordedModel
    path : path
        Of a .safetensors file.
    name : str, optional
        The model's name, for the file; by default that of the file.

    Raises
    ------
    TraceFormatError
        The path does not end in .safetensors, or the ids do not fit a trace.
    OSError
        Nothing can be written there.
    """

    def __init__(self, model: RecordedModel, path: str | os.PathLike[str], name: str | None = None) -> None:
        self.path = Path(os.path.abspath(path))
        if self.path.suffix != ".safetensors" or self.path.is_dir():
            raise TraceFormatError(
                f"a recording to {os.fspath(path)!r}: expected a file name that ends in .safetensors"
            )
        num_experts, top_k, digest = model.fingerprint
        if max(num_experts) > _MOST_EXPERTS:
            raise TraceFormatError(
                f"a trace holds at most {_MOST_EXPERTS} experts a layer; this model has {max(num_experts)}"
            )
        self._layers, self._padding_id = len(num_experts), model.padding_id
        self.closed = False
        self.tokens = self.requests = 0
        self._running: dict[int, _Pass] = {}
        # By id, with a reference that has no callback: an interrupt that came in one would be lost.
        self._known: dict[int, tuple[weakref.ref[Routed], _Recorded]] = {}
        self._numbers = itertools.count()
        self.error: OSError | None = None  # what has ended the recording early
        # Of steps and `seal`. A signal handler comes back to it, so that all in here holds after each statement.
        self._lock = threading.RLock()
        self._apart = Apart()
        self._finished = False
        self._spill, self._spill_path = create_spill(
            self.path,
            Recording(
                self.path.name,
                num_experts,
                top_k,
                {
                    "model": name or self.path.stem,
                    "digest": digest,
                    "source": "recorded by moecache",
                    **({} if model.expert_nbytes is None else {"expert_nbytes": str(model.expert_nbytes)}),
                },
            ),
        )

    def step(
        self, request: Routed, layer: int, ids: torch.Tensor, decode: bool, token_mask: torch.Tensor | None
    ) -> bool:
        """Take down one routed step, unless the recording is over. `ids` are on the CPU and checked."""
        if self._finished:  # in a forked child, where the lock may be another thread's for good
            return False
        key = id(request)
        with self._lock:
            if self.closed or self.error is not None:
                return False
            current = self._running.get(key)
            if current is not None and (
                current.request() is not request or layer <= current.layer or ids.shape[0] != len(current.experts)
            ):
                self._finish(key)
                current = None
            if current is None:
                for other in [key for key, running in self._running.items() if running.over]:
                    self._finish(other)
                of = self._recorded(request)
                mask = None if token_mask is None else token_mask.cpu().numpy().astype(np.uint8)
                shape = ids.shape[0], self._layers, ids.shape[1]
                current = self._running[key] = _Pass(request, of, shape, decode, mask)
            if ids.shape[1] > current.experts.shape[2]:
                wider = ((0, 0), (0, 0), (0, ids.shape[1] - current.experts.shape[2]))
                current.experts = np.pad(current.experts, wider, constant_values=-1)
            found = ids.numpy()
            current.experts[:, layer, : ids.shape[1]] = np.where(found == self._padding_id, -1, found)
            current.layer = layer
            if layer == self._layers - 1:
                self._finish(key)
        return True

    def _recorded(self, request: Routed) -> _Recorded:
        # The lock is held.
        found = self._known.get(id(request))
        if found is not None and found[0]() is request:
            return found[1]
        for key in [key for key, (known, _) in self._known.items() if known() is None]:
            del self._known[key]
        made = _Recorded(next(self._numbers))
        self._known[id(request)] = weakref.ref(request), made
        return made

    @property
    def under_way(self) -> bool:
        """Whether an open request is in the middle of a forward pass."""
        with self._lock:
            return any(not running.over for running in self._running.values())

    def _finish(self, key: int) -> None:
        # The lock is held. A pass goes to the spill file.
        done = self._running.pop(key, None)
        if done is None or not len(done.experts):
            return
        counted = np.ones(len(done.experts), np.uint8) if done.counted is None else done.counted
        try:
            write_all(self._spill, pack(done.of.number, done.decode, done.experts, counted))
        except OSError as error:
            self.error = error
            return
        except ValueError:  # a signal handler has closed it
            return
        self.requests += not done.of.written
        done.of.written = True
        self.tokens += len(done.experts)

    def seal(self) -> None:
        """Take nothing down any more; what there is, is in the spill file. :meth:`close` makes the trace."""
        if self.closed:
            return
        with self._lock:
            for key in list(self._running):
                self._finish(key)
            self.closed = True
            self._spill.close()

    def close(self) -> None:
        """Write the trace. A second call does nothing, or tries again what has failed.

        Raises
        ------
        OSError
            The disk filled up, now or while recording; there is no trace then, and the next call makes one of what could be
            recorded.
        """
        if self._finished:
            return
        self.seal()
        error, self.error = self.error, None
        if error is not None and not self.tokens:
            self.discard()
            raise error
        if error is not None:
            raise OSError(
                error.errno,
                f"{error.strerror}: the recording to {self.path} ended after {self.tokens} tokens; close() again, with "
                f"space on the disk, makes a trace of those",
                str(self._spill_path),
            ) from error
        self._apart.run(self.finish)

    def finish(self) -> None:
        """What :meth:`close` does after :meth:`seal`; not to be interrupted."""
        if not self._finished:
            recover(self._spill_path, self.path)
            self._finished = True

    def discard(self) -> None:
        """After :meth:`seal`: leave nothing."""
        self._finished = True
        with contextlib.suppress(OSError):
            self._spill_path.unlink()

    def disown(self) -> None:
        """In a forked child: the recording is the parent's."""
        self.closed = self._finished = True
        self._spill.close()

    def __enter__(self) -> Recorder:
        return self

    def __exit__(
        self, error_type: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


def rescue(path: Path) -> None:
    """Make traces of the recordings to `path` that killed processes have left, and say so."""
    clear_leftovers(path)
    for part in spills_of(path):
        with left_behind(part) as dead:
            if not dead:
                continue
            target = _free(path)
            clear_leftovers(target)
            try:
                tokens, requests = recover(part, target)
            except (TraceFormatError, OSError) as error:
                logger.warning("an unfinished recording cannot be recovered: %s", error)
                continue
        if tokens:
            logger.warning(
                "a recording to %s was not closed: its %d tokens of %d requests are in %s now",
                path,
                tokens,
                requests,
                target,
            )


def _free(path: Path) -> Path:
    n = 1
    while (target := path.with_name(f"{path.stem}.recovered-{n}{path.suffix}")).exists():
        n += 1
    return target
