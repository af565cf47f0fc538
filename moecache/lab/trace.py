"""Routing traces: which experts each token was sent to, layer by layer.

A trace file is safetensors: ``experts`` ``[tokens, layers, k]`` (uint8 or int16, -1 is none), ``request`` ``[tokens]`` int32 and ``decode``
``[tokens]`` uint8; optionally ``weights`` (the gate's, float16, shaped as ``experts``), ``request_group`` ``[requests]`` int32, and in
recorded traces ``forward`` ``[tokens]`` int32 (the forward pass of each token; without it every token is a pass of its own) and
``counted`` ``[tokens]`` uint8 (0: computed but not counted, the padding of a batch). Metadata strings name the model.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np

from ..errors import TraceFormatError
from ..files import write_atomically
from ..history import Fingerprint, History

__all__ = ["Counts", "Trace", "merge", "read_trace"]

_REQUIRED = ("model", "num_layers", "num_experts", "top_k")
_SHAPED_BY_TOKENS = ("request", "decode", "forward", "counted")


@dataclass(frozen=True)
class Trace:
    """Routing of some requests of one model, checked.

    Attributes
    ----------
    name : str
        For tables and messages.
    experts : int16 array ``[tokens, layers, k]``
        -1 is none.
    request : int32 array ``[tokens]``
        0, 1, ... in order of first appearance.
    decode : uint8 array ``[tokens]``
        0 prompt, 1 answer.
    num_experts : tuple of int
        Experts of each layer.
    forward : int32 array ``[tokens]`` or None
        Tokens of one forward pass share a number, which never falls.
    counted : uint8 array ``[tokens]`` or None
    weights : float16 array ``[tokens, layers, k]`` or None
    request_group : int32 array ``[requests]`` or None
    metadata : mapping of str to str
    """

    name: str
    experts: np.ndarray
    request: np.ndarray
    decode: np.ndarray
    num_experts: tuple[int, ...]
    forward: np.ndarray | None = None
    counted: np.ndarray | None = None
    weights: np.ndarray | None = None
    request_group: np.ndarray | None = None
    metadata: Mapping[str, str] = field(default_factory=dict)

    def __post_init__(self) -> None:
        _check(self)

    @property
    def tokens(self) -> int:
        return int(self.experts.shape[0])

    @property
    def layers(self) -> int:
        return int(self.experts.shape[1])

    @property
    def top_k(self) -> int:
        return int(self.experts.shape[2])

    @property
    def requests(self) -> int:
        return int(self.request.max()) + 1

    @property
    def model(self) -> str:
        return self.metadata.get("model", self.name)

    @property
    def fingerprint(self) -> Fingerprint:
        """What a history must share with this trace; the digest is empty where the trace was not recorded by this library."""
        return Fingerprint(self.num_experts, self.top_k, self.metadata.get("digest", ""))

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write the trace, in the format of the file's ending (.safetensors, .jsonl, .csv), whole or not at all."""
        path = Path(path)
        if path.suffix in (".jsonl", ".csv"):
            from .text import format_trace

            write_atomically(path, format_trace(self, path.suffix).encode())
            return
        from safetensors.numpy import save

        write_atomically(path, save(tensors_of(self), metadata=metadata_of(self)))


def metadata_of(trace: Trace) -> dict[str, str]:
    """The strings of a trace file."""
    uniform = len(set(trace.num_experts)) == 1
    return {
        **trace.metadata,
        "model": trace.model,
        "num_layers": str(trace.layers),
        "num_experts": str(trace.num_experts[0]) if uniform else json.dumps(trace.num_experts),
        "top_k": str(trace.top_k),
    }


def tensors_of(trace: Trace) -> dict[str, np.ndarray]:
    """The arrays of a trace file; ids take a byte where they fit."""
    small = trace.experts.min() >= 0 and max(trace.num_experts) <= 256
    tensors = {
        "experts": trace.experts.astype(np.uint8) if small else trace.experts,
        "request": trace.request,
        "decode": trace.decode,
        "forward": trace.forward,
        "counted": trace.counted,
        "weights": trace.weights,
        "request_group": trace.request_group,
    }
    return {name: np.ascontiguousarray(tensor) for name, tensor in tensors.items() if tensor is not None}


def read_trace(path: str | os.PathLike[str], num_experts: int | None = None) -> Trace:
    """Read a trace: safetensors, JSON lines or CSV, by the file's ending.

    Parameters
    ----------
    path : path
    num_experts : int, optional
        Experts per layer, for text files, which do not say; by default the largest id and one.

    Raises
    ------
    TraceFormatError
        Cut short, damaged, or with numbers that cannot be. Nothing is read in part.
    FileNotFoundError
    """
    path = Path(path)
    if path.suffix in (".jsonl", ".csv"):
        from .text import parse_trace

        return parse_trace(path, num_experts)
    metadata, tensors = read_tensors(path)
    missing = [name for name in _REQUIRED if name not in metadata]
    if missing:
        raise TraceFormatError(f"{path}: its metadata lacks {', '.join(missing)}; convert the trace again with them")
    absent = [name for name in ("experts", "request", "decode") if name not in tensors]
    if absent:
        raise TraceFormatError(
            f"{path} has no tensor {', '.join(absent)}; a routing trace has experts, request and decode"
        )
    experts = tensors["experts"]
    if experts.ndim != 3 or experts.dtype not in (np.uint8, np.int16):
        raise TraceFormatError(
            f"{path}: experts are {experts.dtype} {experts.shape}; expected uint8 or int16 [tokens, layers, k]"
        )
    layers, top_k = _number(metadata, "num_layers", path), _number(metadata, "top_k", path)
    if (layers, top_k) != experts.shape[1:]:
        raise TraceFormatError(
            f"{path}: metadata says {layers} layers, top-{top_k}; experts have shape {experts.shape}"
        )
    for name in _SHAPED_BY_TOKENS:
        if name in tensors and (tensors[name].shape != experts.shape[:1] or tensors[name].dtype.kind not in "iu"):
            raise TraceFormatError(
                f"{path}: {name} is {tensors[name].dtype} {tensors[name].shape}; expected integers ({experts.shape[0]},)"
            )
    return Trace(
        name=path.stem,
        experts=np.ascontiguousarray(experts, np.int16),
        request=_integers(tensors["request"], np.int32, "request", path),
        decode=_integers(tensors["decode"], np.uint8, "decode", path),
        num_experts=_experts_per_layer(metadata, layers, path),
        forward=_integers(tensors["forward"], np.int32, "forward", path) if "forward" in tensors else None,
        counted=_integers(tensors["counted"], np.uint8, "counted", path) if "counted" in tensors else None,
        weights=tensors.get("weights"),
        request_group=tensors.get("request_group"),
        metadata=metadata,
    )


def read_tensors(path: Path) -> tuple[dict[str, str], dict[str, np.ndarray]]:
    """Metadata and arrays of a safetensors file.

    Raises
    ------
    TraceFormatError, FileNotFoundError
    """
    from safetensors import SafetensorError, safe_open

    if not path.is_file():
        raise FileNotFoundError(f"no routing trace at {path}")
    try:
        with safe_open(path, "np") as file:
            return file.metadata() or {}, {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
    except (SafetensorError, OSError, ValueError, TypeError) as error:
        raise TraceFormatError(f"{path} is not a whole safetensors file ({error}); copy or record it again") from error


def _number(metadata: Mapping[str, str], name: str, path: Path) -> int:
    try:
        return int(metadata[name])
    except ValueError as error:
        raise TraceFormatError(f"{path}: metadata {name} is {metadata[name]!r}; expected a whole number") from error


def _integers(values: np.ndarray, dtype: Any, name: str, path: Path) -> np.ndarray:
    limits = np.iinfo(dtype)
    if len(values) and (int(values.min()) < limits.min or int(values.max()) > limits.max):
        raise TraceFormatError(f"{path}: {name} holds {values.min()}..{values.max()}, beyond {np.dtype(dtype)}")
    return np.ascontiguousarray(values, dtype)


def _experts_per_layer(metadata: Mapping[str, str], layers: int, path: Path) -> tuple[int, ...]:
    try:
        found = json.loads(metadata["num_experts"])
    except ValueError:
        found = None
    per_layer = [found] * layers if isinstance(found, int) else found
    if (
        not isinstance(per_layer, list)
        or len(per_layer) != layers
        or not all(isinstance(n, int) and n > 0 for n in per_layer)
    ):
        raise TraceFormatError(
            f"{path}: metadata num_experts is {metadata['num_experts']!r}; expected a positive number or a list of {layers}"
        )
    return tuple(per_layer)


def _check(trace: Trace) -> None:
    # Everything a replay relies on, said before anything is computed.
    experts, where = trace.experts, trace.name
    if trace.tokens == 0 or trace.layers == 0 or trace.top_k == 0:
        raise TraceFormatError(f"{where}: a trace of {experts.shape} (tokens, layers, k) holds nothing to replay")
    if len(trace.num_experts) != trace.layers or min(trace.num_experts) < 1:
        raise TraceFormatError(f"{where}: {trace.layers} layers, but num_experts is {list(trace.num_experts)}")
    low, high = experts.min(axis=(0, 2)), experts.max(axis=(0, 2))
    for layer, n in enumerate(trace.num_experts):
        if low[layer] < -1 or high[layer] >= n:
            token = int(np.argmax((experts[:, layer] < -1).any(1) | (experts[:, layer] >= n).any(1)))
            raise TraceFormatError(
                f"{where}: token {token}, layer {layer} routes to experts {experts[token, layer].tolist()}; "
                f"expected 0..{n - 1}, or -1 for none"
            )
    if trace.request.min() < 0:
        raise TraceFormatError(f"{where}: request {trace.request.min()} is negative")
    _check_requests(trace)
    if trace.weights is not None and trace.weights.shape != experts.shape:
        raise TraceFormatError(
            f"{where}: weights have shape {trace.weights.shape}; expected that of the experts, {experts.shape}"
        )
    for name in ("decode", "counted"):
        flags = getattr(trace, name)
        if flags is not None and flags.max() > 1:
            raise TraceFormatError(f"{where}: {name} holds {flags.max()}; expected 0 or 1")


def _check_requests(trace: Trace) -> None:
    request, where = trace.request, trace.name
    used = np.bincount(request) if request.max() < 4 * len(request) + 1024 else np.zeros(1)
    if not used.all():
        empty = int(np.argmin(used))
        raise TraceFormatError(f"{where}: request {empty} has no tokens; requests are numbered 0, 1, ... without gaps")
    if trace.request_group is not None and trace.request_group.shape != used.shape:
        raise TraceFormatError(
            f"{where}: request_group has shape {trace.request_group.shape}; {len(used)} requests have tokens"
        )
    if trace.forward is None:
        falls = np.flatnonzero(np.diff(request) < 0)
        if len(falls):
            raise TraceFormatError(
                f"{where}: token {falls[0] + 1} goes back to request {request[falls[0] + 1]}; requests must be sorted unless a tensor "
                f"`forward` gives the order of the forward passes"
            )
        return
    step = np.diff(trace.forward)
    if (step < 0).any():
        raise TraceFormatError(f"{where}: forward passes are not sorted at token {int(np.argmax(step < 0)) + 1}")
    mixed = (step == 0) & ((np.diff(request) != 0) | (np.diff(trace.decode.astype(np.int8)) != 0))
    if mixed.any():
        raise TraceFormatError(
            f"{where}: forward pass {trace.forward[np.argmax(mixed)]} belongs to two requests, or to prompt and answer"
        )


def merge(traces: Sequence[Trace], name: str = "merged") -> Trace:
    """One trace of several of the same model, one after another.

    Raises
    ------
    TraceFormatError
        They are of different models.
    """
    first = traces[0]
    for other in traces[1:]:
        check_same_model(first, other.fingerprint, other.model, other.name)
    requests = np.cumsum([0] + [trace.requests for trace in traces])
    recorded = any(trace.forward is not None for trace in traces)
    passes = [
        trace.forward if trace.forward is not None else np.arange(trace.tokens, dtype=np.int32) for trace in traces
    ]
    offsets = np.cumsum([0] + [int(x.max()) + 1 for x in passes])
    some_uncounted = any(trace.counted is not None for trace in traces)
    counted = [np.ones(trace.tokens, np.uint8) if trace.counted is None else trace.counted for trace in traces]
    return replace(
        first,
        name=name,
        experts=np.concatenate([trace.experts for trace in traces]),
        request=np.concatenate([trace.request + n for trace, n in zip(traces, requests, strict=False)]).astype(
            np.int32
        ),
        decode=np.concatenate([trace.decode for trace in traces]),
        forward=np.concatenate([x + n for x, n in zip(passes, offsets, strict=False)]).astype(np.int32)
        if recorded
        else None,
        counted=np.concatenate(counted) if some_uncounted else None,
        weights=np.concatenate([t.weights for t in traces if t.weights is not None])
        if all(t.weights is not None for t in traces)
        else None,
        request_group=None,
        metadata={key: value for key, value in first.metadata.items() if key not in ("groups", "source")},
    )


def check_same_model(trace: Trace, other: Fingerprint, model: str, name: str) -> None:
    """Refuse what belongs to another model.

    Raises
    ------
    TraceFormatError
    """
    mine = trace.fingerprint
    same_k = other.top_k in (0, mine.top_k)
    same_digest = not (mine.digest and other.digest) or mine.digest == other.digest
    if mine.num_experts != other.num_experts or not same_k or not same_digest:
        raise TraceFormatError(
            f"{name} is of another model: expected {trace.model} ({mine}) as in {trace.name}; found {model} ({other})"
        )


@dataclass(frozen=True)
class Counts:
    """Activation counts without token order: enough to seed a history.

    Attributes
    ----------
    counts : integer array ``[entries, layers, experts]``
    tokens : int64 array ``[entries]``
    top_k : int
    model : str
    """

    counts: np.ndarray
    tokens: np.ndarray
    top_k: int
    model: str

    @classmethod
    def read(cls, path: str | os.PathLike[str]) -> Counts:
        """Read a safetensors file with ``counts`` and ``tokens``.

        Raises
        ------
        TraceFormatError, FileNotFoundError
        """
        path = Path(path)
        metadata, tensors = read_tensors(path)
        counts, tokens = tensors.get("counts"), tensors.get("tokens")
        if counts is None or tokens is None or counts.ndim != 3 or tokens.shape != counts.shape[:1]:
            raise TraceFormatError(
                f"{path} is no file of activation counts: expected counts [entries, layers, experts] and tokens [entries]"
            )
        if counts.size == 0 or counts.min() < 0 or tokens.min() < 0:
            raise TraceFormatError(f"{path}: nothing counted, or negative counts")
        return cls(
            counts,
            tokens.astype(np.int64),
            _number({"top_k": "0", **metadata}, "top_k", path),
            metadata.get("model", path.stem),
        )

    def history(self, capacity: int = 1000) -> History:
        """A history with one entry for each of these, as answers; large counts are scaled down to what an entry holds."""
        layers, experts = self.counts.shape[1:]
        history = History(Fingerprint((experts,) * layers, self.top_k, ""), capacity)
        for counts, tokens in zip(
            self.counts.reshape(len(self.counts), -1).astype(np.int64), self.tokens.tolist(), strict=True
        ):
            scale = max(1.0, counts.max() / 65535)
            scaled = np.floor(counts / scale).astype(np.int64)
            history.add(np.zeros_like(scaled), scaled, int(tokens / scale))
        return history
