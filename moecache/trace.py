"""Routing traces: which experts each token was sent to, layer by layer.

A trace file is safetensors: ``experts`` ``[tokens, layers, k]`` (uint8 or int16, -1 is none), ``request`` ``[tokens]`` int32 and
``decode`` ``[tokens]`` uint8; optionally ``weights`` (the gate's, float16, shaped as ``experts``), ``token`` ``[tokens]`` int32 (an
anonymous number of the token's text), ``request_group`` ``[requests]`` int32, and in recorded traces ``forward`` ``[tokens]`` int32 (the
forward pass of each token; without it every token is a pass of its own) and ``counted`` ``[tokens]`` uint8 (0: computed but not counted,
the padding of a batch). Metadata strings name the model.
"""

from __future__ import annotations

import json
import logging
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np

from .errors import TraceFormatError
from .files import write_atomically
from .fingerprint import Fingerprint
from .tensorfile import MOST_LAYERS, MOST_TOP_K, brief, parse_json, read_tensors, shape_fault, whole_number

__all__ = ["Trace", "check_same_model", "merge"]

_LOG = logging.getLogger("moecache")
_REQUIRED = ("model", "num_layers", "num_experts", "top_k")
# Of each array: its type in memory and in files. All but the first three may be missing.
_ARRAYS: dict[str, type[np.generic]] = {
    "experts": np.int16,
    "request": np.int32,
    "decode": np.uint8,
    "forward": np.int32,
    "counted": np.uint8,
    "weights": np.float16,
    "token": np.int32,
    "request_group": np.int32,
}
_BY_TOKENS = ("request", "decode", "forward", "counted", "token")
_MOST_METADATA = 10_000_000  # characters: safetensors reads headers of up to 100 MB


@dataclass(frozen=True)
class Trace:
    """Routing of some requests of one model, checked. Whatever can be made can be saved, read back and replayed.

    Arrays of another type than below are converted where no number changes (weights are rounded to float16).

    Attributes
    ----------
    name : str
        For tables and messages.
    experts : int16 array ``[tokens, layers, k]``
        -1 is none.
    request : int32 array ``[tokens]``
        0, 1, ... without gaps.
    decode : uint8 array ``[tokens]``
        0 prompt, 1 completion.
    num_experts : tuple of int
        Experts of each layer.
    forward : int32 array ``[tokens]`` or None
        Tokens of one forward pass share a number, which never falls.
    counted : uint8 array ``[tokens]`` or None
    weights : float16 array ``[tokens, layers, k]`` or None
    request_group : int32 array ``[requests]`` or None
    metadata : mapping of str to str
    token : int32 array ``[tokens]`` or None
        A number of the text of the token whose experts a row holds.

    Raises
    ------
    TraceFormatError
        Arrays that do not fit together, or numbers that cannot be.
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
    token: np.ndarray | None = None

    def __post_init__(self) -> None:
        for name, dtype in _ARRAYS.items():
            array = getattr(self, name)
            if array is not None:
                object.__setattr__(self, name, _as(dtype, array, f"{self.name}: {name}"))
        try:
            object.__setattr__(self, "num_experts", tuple(_integer(n) for n in self.num_experts))
        except TypeError:
            raise TraceFormatError(
                f"{self.name}: num_experts is {brief(self.num_experts)}; expected a whole number for each layer"
            ) from None
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
        """Write the trace as safetensors, whole or not at all. :func:`moecache.lab.write_trace` writes text, too.

        Raises
        ------
        TraceFormatError
            The file's name does not end in .safetensors.
        """
        from safetensors.numpy import save

        path = Path(path)
        if path.suffix.lower() != ".safetensors":
            raise TraceFormatError(
                f"{path}: traces are not saved as {path.suffix or 'files without an ending'}; use .safetensors, or "
                "moecache.lab.write_trace for .jsonl, .csv and .tsv"
            )
        write_atomically(path, save(tensors_of(self), metadata=metadata_of(self)))

    @classmethod
    def load(cls, path: str | os.PathLike[str]) -> Trace:
        """Read a trace file (safetensors). :func:`moecache.lab.read_trace` reads other formats, too.

        Raises
        ------
        TraceFormatError
            Cut short, damaged, or with numbers that cannot be. Nothing is read in part.
        FileNotFoundError
        """
        path = Path(path)
        metadata, tensors = read_tensors(path, "routing trace", TraceFormatError)
        _check_file(path, metadata, tensors)
        return cls(
            name=name_of(path),
            num_experts=experts_per_layer(metadata["num_experts"], tensors["experts"].shape[1], str(path)),
            metadata=metadata,
            **{name: tensors.get(name) for name in _ARRAYS},  # type: ignore[arg-type]
        )


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
    tensors = {name: getattr(trace, name) for name in _ARRAYS}
    if small:
        tensors["experts"] = trace.experts.astype(np.uint8)
    return {name: np.ascontiguousarray(tensor) for name, tensor in tensors.items() if tensor is not None}


def name_of(path: Path) -> str:
    """A file's name without its endings, as text that any file can hold."""
    stem = path.name
    for suffix in (".gz", *path.suffixes[-2:]) if path.suffix.lower() == ".gz" else path.suffixes[-1:]:
        stem = stem.removesuffix(suffix)
    return stem.encode("utf-8", "backslashreplace").decode()


def _check_file(path: Path, metadata: Mapping[str, str], tensors: Mapping[str, np.ndarray]) -> None:
    # What a trace file has to say before its arrays are looked at.
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
    layers, top_k = (
        _number(metadata, name, most, path) for name, most in (("num_layers", MOST_LAYERS), ("top_k", MOST_TOP_K))
    )
    if (layers, top_k) != experts.shape[1:]:
        raise TraceFormatError(
            f"{path}: metadata says {layers} layers, top-{top_k}; experts have shape {experts.shape}"
        )
    unknown = sorted(set(tensors) - set(_ARRAYS))
    if unknown:
        _LOG.warning(
            "%s: its tensors %s are no part of a routing trace and are not kept", path, brief(", ".join(unknown))
        )


def _number(metadata: Mapping[str, str], name: str, most: int, path: Path) -> int:
    try:
        return whole_number(metadata[name], 0, most)
    except ValueError as error:
        raise TraceFormatError(f"{path}: metadata {name} is {error}") from error


def _integer(value: Any) -> int:
    if isinstance(value, (bool, np.bool_)) or not isinstance(value, (int, np.integer)):
        raise TypeError
    return int(value)


def _as(dtype: type[np.generic], values: Any, where: str) -> np.ndarray:
    # As `dtype`, if that changes no number.
    try:
        found = np.asarray(values)
    except ValueError as error:
        raise TraceFormatError(f"{where} is no array ({brief(error)})") from error
    if issubclass(dtype, np.floating):
        if found.dtype.kind != "f" or (found.size and not np.abs(found).max() <= np.finfo(np.float16).max):
            raise TraceFormatError(f"{where} is {found.dtype} {found.shape}; expected finite float16")
    elif found.dtype.kind not in "iub":
        raise TraceFormatError(f"{where} is {found.dtype} {found.shape}; expected integers")
    elif found.size:
        low, high, limits = int(found.min()), int(found.max()), np.iinfo(dtype)  # type: ignore[type-var]
        if low < limits.min or high > limits.max:
            raise TraceFormatError(f"{where} holds {low}..{high}, beyond {np.dtype(dtype)}")
    return np.ascontiguousarray(found, dtype) if found.ndim else found.astype(dtype)


def experts_per_layer(text: str, layers: int, where: str) -> tuple[int, ...]:
    """``num_experts`` of metadata: a number for all layers, or one for each.

    Raises
    ------
    TraceFormatError
    """
    try:
        found = parse_json(text)
    except ValueError:
        found = None
    per_layer = [found] * layers if type(found) is int else found
    if (
        not isinstance(per_layer, list)
        or len(per_layer) != layers
        or not all(type(n) is int and n > 0 for n in per_layer)
    ):
        raise TraceFormatError(
            f"{where}: metadata num_experts is {brief(text)!r}; expected a positive number or a list of {layers}"
        )
    return tuple(per_layer)


def _check(trace: Trace) -> None:
    # Everything a file and a replay rely on, said before anything is computed.
    experts, where = trace.experts, trace.name
    if experts.ndim != 3 or 0 in experts.shape:
        raise TraceFormatError(f"{where}: a trace of {experts.shape} (tokens, layers, k) holds nothing to replay")
    if len(trace.num_experts) != trace.layers or min(trace.num_experts) < 1:
        raise TraceFormatError(f"{where}: {trace.layers} layers, but num_experts is {brief(list(trace.num_experts))}")
    fault = shape_fault(trace.num_experts, trace.top_k)
    if fault is not None:
        raise TraceFormatError(f"{where}: {fault}")
    for name in _BY_TOKENS:
        array = getattr(trace, name)
        if array is not None and array.shape != experts.shape[:1]:
            raise TraceFormatError(
                f"{where}: {name} is {array.dtype} {array.shape}; expected integers ({experts.shape[0]},)"
            )
    low, high = experts.min(axis=(0, 2)), experts.max(axis=(0, 2))
    for layer, n in enumerate(trace.num_experts):
        if low[layer] < -1 or high[layer] >= n:
            token = int(np.argmax((experts[:, layer] < -1).any(1) | (experts[:, layer] >= n).any(1)))
            raise TraceFormatError(
                f"{where}: token {token}, layer {layer} routes to experts {brief(experts[token, layer].tolist())}; "
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
    _check_metadata(trace)


def _check_metadata(trace: Trace) -> None:
    try:
        size = sum(len(text.encode()) for pair in trace.metadata.items() for text in pair)
    except (AttributeError, UnicodeEncodeError):
        raise TraceFormatError(f"{trace.name}: metadata must be text by text, encodable as UTF-8") from None
    if size > _MOST_METADATA:
        raise TraceFormatError(f"{trace.name}: {size:,} bytes of metadata; expected at most {_MOST_METADATA:,}")


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
    if trace.forward[0] < 0:
        raise TraceFormatError(f"{where}: forward pass {trace.forward[0]} is negative")
    step = np.diff(trace.forward.astype(np.int64))
    if (step < 0).any():
        raise TraceFormatError(f"{where}: forward passes are not sorted at token {int(np.argmax(step < 0)) + 1}")
    mixed = (step == 0) & ((np.diff(request) != 0) | (np.diff(trace.decode.astype(np.int8)) != 0))
    if mixed.any():
        raise TraceFormatError(
            f"{where}: forward pass {trace.forward[np.argmax(mixed)]} belongs to two requests, or to prompt and completion"
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
    passes = [_passes(trace) for trace in traces]
    offsets = np.cumsum([0] + [int(x[-1]) + 1 for x in passes])
    some_uncounted = any(trace.counted is not None for trace in traces)
    counted = [np.ones(trace.tokens, np.uint8) if trace.counted is None else trace.counted for trace in traces]
    weights = [trace.weights for trace in traces if trace.weights is not None]
    lost = [name for name in ("token", "request_group") if any(getattr(trace, name) is not None for trace in traces)]
    lost += ["weights"] if 0 < len(weights) < len(traces) else []
    if lost:
        _LOG.warning(
            "%s: %s are left out, whose numbers differ from trace to trace or which some lack", name, ", ".join(lost)
        )
    return replace(
        first,
        name=name,
        experts=np.concatenate([trace.experts for trace in traces]),
        request=np.concatenate([trace.request + n for trace, n in zip(traces, requests, strict=False)]),
        decode=np.concatenate([trace.decode for trace in traces]),
        forward=np.concatenate([x + n for x, n in zip(passes, offsets, strict=False)]) if recorded else None,
        counted=np.concatenate(counted) if some_uncounted else None,
        weights=np.concatenate(weights) if len(weights) == len(traces) else None,
        token=None,
        request_group=None,
        metadata={key: value for key, value in first.metadata.items() if key not in ("groups", "source", "token")},
    )


def _passes(trace: Trace) -> np.ndarray:
    # Forward passes numbered without gaps.
    return np.arange(trace.tokens) if trace.forward is None else np.cumsum(np.diff(trace.forward, prepend=-1) != 0) - 1


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
