"""History files as they are read: checked whole, before anything of the sizes they name is allocated."""

from __future__ import annotations

from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from ._core import OnlineWeights
from .errors import HistoryFormatError
from .tensorfile import MOST_TOKENS, MOST_TOP_K, brief, parse_json, read_tensors, shape_fault, whole_number

__all__ = ["FORECASTER", "FORMAT", "LEARNED", "VERSION", "HistoryFile", "read_history"]

FORMAT, VERSION = "moecache.history", "3"

LEARNED = ("transitions", "origins", "successions", "followed")
"""Counts of what followed what, in the order of ``HistoryStore.restore``."""

FORECASTER = "forecaster."
"""Before the names of its arrays."""

# Memory that a file may ask for, in bytes: so much anyway, or so many times its own size.
_MOST_NBYTES, _MOST_PER_FILE_BYTE = 1 << 30, 64


class HistoryFile(NamedTuple):
    """What a history file holds.

    Attributes
    ----------
    num_experts, top_k, digest
        Of the model's fingerprint.
    tokens, capacity : int
    tensors : dict of str to array
        Without the forecaster's.
    forecaster : dict of str to array
        Empty without one.
    """

    num_experts: tuple[int, ...]
    top_k: int
    digest: str
    tokens: int
    capacity: int
    tensors: dict[str, np.ndarray]
    forecaster: dict[str, np.ndarray]


def read_history(path: Path) -> HistoryFile:
    """Read and check a history file.

    Raises
    ------
    HistoryFormatError
        Not a history, cut short, or with numbers that cannot be.
    FileNotFoundError
    """
    metadata, tensors = read_tensors(path, "history", HistoryFormatError)
    if metadata.get("format") != FORMAT or metadata.get("version") != VERSION:
        raise HistoryFormatError(
            f"{path}: expected format {FORMAT} version {VERSION}, found {brief(metadata.get('format'))} version "
            f"{brief(metadata.get('version'))}"
        )
    try:
        num_experts, top_k, digest = _fingerprint(metadata["fingerprint"])
        tokens = whole_number(metadata["tokens"], 0, MOST_TOKENS)
        capacity = whole_number(metadata["capacity"], 1, 2**31 - 1)
    except (KeyError, ValueError) as error:
        raise HistoryFormatError(f"{path}: damaged metadata ({brief(error, 200)}); make the history again") from error
    forecaster = {
        name.removeprefix(FORECASTER): tensors.pop(name) for name in list(tensors) if name.startswith(FORECASTER)
    }
    _check(path, num_experts, tensors)
    return HistoryFile(num_experts, top_k, digest, tokens, capacity, tensors, forecaster)


def check_capacity(path: Path, capacity: int, experts: int) -> None:
    """Refuse a file whose capacity is far beyond what it holds.

    Raises
    ------
    HistoryFormatError
    """
    needed, limit = 5 * capacity * experts, max(_MOST_NBYTES, _MOST_PER_FILE_BYTE * path.stat().st_size)
    if needed > limit:
        raise HistoryFormatError(
            f"{path}: a capacity of {capacity:,} requests takes {needed / 1e9:.1f} GB, and of a file of this size at most "
            f"{limit / 1e9:.1f} GB are accepted; pass the capacity that you want when you load it"
        )


def _fingerprint(text: str) -> tuple[tuple[int, ...], int, str]:
    found = parse_json(text)
    if not isinstance(found, list) or len(found) != 3 or not isinstance(found[0], list):
        raise ValueError(f"fingerprint {brief(text)}; expected experts of each layer, top-k and a digest")
    experts, top_k, digest = found
    fault = shape_fault(experts)
    if fault is not None:
        raise ValueError(fault)
    if type(top_k) is not int or not 0 <= top_k <= MOST_TOP_K or not isinstance(digest, str) or len(digest) > 256:
        raise ValueError(
            f"top-k {brief(top_k)}, digest {brief(digest)}; expected at most {MOST_TOP_K}, and a short string"
        )
    return tuple(experts), top_k, digest


def _check(path: Path, num_experts: tuple[int, ...], tensors: dict[str, Any]) -> None:
    requests, experts = np.shape(tensors.get("prompt", ()))[:1], sum(num_experts)
    following = (*num_experts[1:], num_experts[0])
    online = OnlineWeights().arrays()
    expected: dict[str, tuple[tuple[int, ...], Any]] = {
        "prompt": ((*requests, experts), np.uint16),
        "decode": ((*requests, experts), np.uint16),
        "total": ((experts,), np.int64),
        "transitions": ((sum(a * b for a, b in zip(num_experts, following, strict=True)),), np.uint32),
        "origins": ((experts,), np.uint32),
        "successions": ((sum(n * n for n in num_experts),), np.uint32),
        "followed": ((experts,), np.uint32),
        **{f"online.{name}": (value.shape, value.dtype) for name, value in online.items()},
    }
    for name, (shape, dtype) in expected.items():
        tensor = tensors.get(name)
        if tensor is None or tensor.shape != shape or tensor.dtype != dtype:
            got = "nothing" if tensor is None else f"{tensor.dtype} {tensor.shape}"
            raise HistoryFormatError(
                f"{path}: expected {name} of {np.dtype(dtype)} {shape}, found {got}; make the history again"
            )
    unknown = sorted(set(tensors) - set(expected))
    if unknown:
        raise HistoryFormatError(f"{path} holds {brief(unknown)}, which no history has; make the history again")
    fault = OnlineWeights.faults({name: tensors[f"online.{name}"] for name in online})
    if fault is not None:
        raise HistoryFormatError(f"{path}: weights learned online: {fault}; make the history again")
    counts = tensors["prompt"].astype(np.int64) + tensors["decode"]
    total = tensors["total"]
    if not counts.any(1).all() or (total < counts.sum(0)).any() or (total > MOST_TOKENS).any():
        raise HistoryFormatError(
            f"{path}: empty requests, or fewer tokens over all requests than in those kept, or more than {MOST_TOKENS:,}; "
            "make the history again"
        )
