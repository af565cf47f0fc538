"""Recording a routing trace while a model runs."""

from __future__ import annotations

import contextlib
import json
import os
import struct
import tempfile
import threading
import weakref
from collections.abc import Iterator
from pathlib import Path
from types import TracebackType
from typing import IO, TYPE_CHECKING, Any, NamedTuple

import numpy as np
import torch

from ..history import Fingerprint, whole_file

if TYPE_CHECKING:
    from ..cache import ExpertCache
    from ..request import Request

__all__ = ["Recorder"]


class _Pass:
    """One forward pass of one request, as far as it has come."""

    def __init__(self, request: Request, shape: tuple[int, int, int], decode: bool, counted: np.ndarray | None) -> None:
        self.request, self.decode, self.counted = request, decode, counted
        self.experts = np.full(shape, -1, np.int16)
        self.layer = -1


class _Head(NamedTuple):
    # Of a pass in the spill file; its ids and its counted flags follow.
    request: int
    decode: int
    tokens: int
    k: int


_HEAD = struct.Struct("<iiii")


class Recorder:
    """Writes what a cache routes into a trace file, which appears whole when the recorder or the cache is closed.

    Finished forward passes go to a temporary file beside it, so memory holds only the running ones. The ids are those that
    :meth:`moecache.Request.route` has on the CPU anyway: nothing is waited for. A disk that fills up ends the recording, not the
    model; ``close()`` then raises the error.

    Made by :meth:`moecache.ExpertCache.record`. A context manager.
    """

    def __init__(self, cache: ExpertCache, path: str | os.PathLike[str], model: str | None = None) -> None:
        self.path = Path(path)
        bank = cache.bank
        nbytes = {bank.expert_nbytes(layer) for layer in range(cache.layers)}
        self._layers, self._sentinel, self._top_k = cache.layers, cache._sentinel, cache.top_k or 0
        self._num_experts = cache.num_experts
        self._metadata = {
            "model": model or self.path.stem,
            "digest": Fingerprint.of(bank, cache.top_k).digest,
            "source": "recorded by moecache",
            **({"expert_nbytes": str(nbytes.pop())} if len(nbytes) == 1 else {}),
        }
        self.closed = False
        self.tokens = 0
        self.requests = self._passes = self._uncounted = self._padding = 0
        self._running: dict[int, _Pass] = {}
        self._numbers: weakref.WeakKeyDictionary[Request, int] = weakref.WeakKeyDictionary()
        self._error: OSError | None = None
        self._lock = threading.Lock()
        handle, self._spill_path = tempfile.mkstemp(dir=self.path.parent, prefix=self.path.name, suffix=".part")
        self._spill: IO[bytes] = os.fdopen(handle, "w+b")

    def step(self, request: Request, layer: int, ids: torch.Tensor, decode: bool, counted: torch.Tensor | None) -> None:
        """Take down one routed step. `ids` are on the CPU and checked."""
        key = id(request)
        with self._lock:
            if self.closed or self._error is not None:
                return
            current = self._running.get(key)
            if current is not None and (layer <= current.layer or ids.shape[0] != len(current.experts)):
                self._finish(key)
                current = None
            if current is None:
                for other in [key for key, running in self._running.items() if running.request.closed]:
                    self._finish(other)
                mask = None if counted is None else counted.cpu().numpy().astype(np.uint8)
                current = self._running[key] = _Pass(request, (ids.shape[0], self._layers, ids.shape[1]), decode, mask)
            if ids.shape[1] > current.experts.shape[2]:
                wider = ((0, 0), (0, 0), (0, ids.shape[1] - current.experts.shape[2]))
                current.experts = np.pad(current.experts, wider, constant_values=-1)
            found = ids.numpy()
            current.experts[:, layer, : ids.shape[1]] = np.where(found == self._sentinel, -1, found)
            current.layer = layer
            if layer == self._layers - 1:
                self._finish(key)

    @property
    def under_way(self) -> bool:
        """Whether an open request is in the middle of a forward pass."""
        with self._lock:
            return any(not running.request.closed for running in self._running.values())

    def _finish(self, key: int) -> None:
        # The lock is held. A pass goes to the spill file.
        done = self._running.pop(key)
        tokens, _, k = done.experts.shape
        if not tokens:
            return
        number = self._numbers.get(done.request)
        if number is None:
            number = self._numbers[done.request] = self.requests
            self.requests += 1
        counted = np.ones(tokens, np.uint8) if done.counted is None else done.counted
        try:
            self._spill.write(_HEAD.pack(number, int(done.decode), tokens, k))
            self._spill.write(done.experts.tobytes())
            self._spill.write(counted.tobytes())
        except OSError as error:
            self._error = error
            return
        self._top_k = max(self._top_k, k)
        self._uncounted += int(tokens - counted.sum())
        self._padding += int((done.experts < 0).sum())
        self.tokens += tokens
        self._passes += 1

    def close(self) -> None:
        """Write the trace. A second call does nothing.

        Raises
        ------
        OSError
            The disk filled up, now or while recording; there is no trace then.
        """
        with self._lock:
            if self.closed:
                return
            for key in list(self._running):
                self._finish(key)
            self.closed = True
        try:
            if self._error is not None:
                raise self._error
            self._spill.flush()
            if self.tokens:
                self._assemble()
        finally:
            self._spill.close()
            with contextlib.suppress(OSError):
                os.unlink(self._spill_path)

    def _assemble(self) -> None:
        # The safetensors layout: a header that says where each array lies, then the arrays, each by one walk over the passes.
        small = not self._padding and max(self._num_experts) <= 256
        kinds: dict[str, tuple[str, Any, tuple[int, ...]]] = {
            "experts": ("U8", np.uint8, (self.tokens, self._layers, self._top_k))
            if small
            else ("I16", np.int16, (self.tokens, self._layers, self._top_k)),
            "request": ("I32", np.int32, (self.tokens,)),
            "forward": ("I32", np.int32, (self.tokens,)),
            "decode": ("U8", np.uint8, (self.tokens,)),
        }
        if self._uncounted:
            kinds["counted"] = ("U8", np.uint8, (self.tokens,))
        with whole_file(self.path) as file:
            file.write(self._header(kinds))
            for name, (_, dtype, _) in kinds.items():
                for part in self._parts(name):
                    file.write(np.ascontiguousarray(part, dtype).tobytes())

    def _header(self, kinds: dict[str, tuple[str, Any, tuple[int, ...]]]) -> bytes:
        uniform = len(set(self._num_experts)) == 1
        metadata = {
            **self._metadata,
            "num_layers": str(self._layers),
            "num_experts": str(self._num_experts[0]) if uniform else json.dumps(self._num_experts),
            "top_k": str(self._top_k),
        }
        header: dict[str, Any] = {"__metadata__": metadata}
        offset = 0
        for name, (code, dtype, shape) in kinds.items():
            nbytes = int(np.prod(shape)) * np.dtype(dtype).itemsize
            header[name] = {"dtype": code, "shape": list(shape), "data_offsets": [offset, offset + nbytes]}
            offset += nbytes
        text = json.dumps(header).encode()
        text += b" " * (-len(text) % 8)
        return struct.pack("<Q", len(text)) + text

    def _parts(self, name: str) -> Iterator[np.ndarray]:
        self._spill.seek(0)
        for number in range(self._passes):
            head = _Head(*_HEAD.unpack(self._spill.read(_HEAD.size)))
            nbytes = head.tokens * self._layers * head.k * 2
            if name == "experts":
                shape = (head.tokens, self._layers, head.k)
                ids = np.frombuffer(self._spill.read(nbytes), np.int16).reshape(shape)
                yield np.pad(ids, ((0, 0), (0, 0), (0, self._top_k - head.k)), constant_values=-1)
                self._spill.seek(head.tokens, os.SEEK_CUR)
                continue
            self._spill.seek(nbytes, os.SEEK_CUR)
            counted = np.frombuffer(self._spill.read(head.tokens), np.uint8)
            value = {"request": head.request, "decode": head.decode, "forward": number}.get(name)
            yield counted if value is None else np.full(head.tokens, value)

    def __enter__(self) -> Recorder:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()
