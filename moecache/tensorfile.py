"""Safetensors files from anywhere: read whole or refused by name, their numbers within stated limits.

A file's own bytes bound what its tensors take. What its metadata claim (experts, capacity, tokens so far) is accepted up to
the limits below, so that a few kilobytes cannot make a program take gigabytes.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from .errors import MoeCacheError

__all__ = ["Strings", "brief", "parse_json", "read_tensors", "shape_fault", "whole_number"]

MOST_LAYERS, MOST_EXPERTS = 10_000, 1 << 20
"""MoE layers of a model, and experts of all of them together."""

MOST_TOP_K = 4096
"""Experts of one token in one layer."""

MOST_PAIR_BYTES = 1 << 30
"""Of the tables that count which expert followed which: 8 bytes for each pair of a layer's experts."""

MOST_TOKENS = 1 << 53
"""Of all requests together, and routed to one expert; more is counted as that many."""

# What numpy has; the others (BF16, F8_E4M3, ...) have no place in routing data.
_DTYPES = frozenset(("BOOL", "U8", "I8", "U16", "I16", "U32", "I32", "U64", "I64", "F16", "F32", "F64"))

Strings = Mapping[str, str]


def read_tensors(path: Path, what: str, error: type[MoeCacheError]) -> tuple[dict[str, str], dict[str, np.ndarray]]:
    """Metadata and arrays of a safetensors file.

    Parameters
    ----------
    path : path
    what : str
        What it should be, for messages: "history".
    error : class
        Raised for a file that is none.

    Raises
    ------
    MoeCacheError
        Of class `error`: cut short, damaged, or with arrays of a type that numpy lacks.
    FileNotFoundError
    """
    from safetensors import SafetensorError, safe_open

    if not path.exists():
        raise FileNotFoundError(f"no {what} at {path}")
    if path.is_dir():
        raise error(f"{path} is a folder; expected a {what} file")
    try:
        with safe_open(path, "np") as file:
            names = list(file.keys())
            dtypes = {name: str(file.get_slice(name).get_dtype()) for name in names}
            foreign = [name for name, dtype in dtypes.items() if dtype not in _DTYPES]
            if foreign:
                raise error(f"{path}: tensor {brief(foreign[0])} is {dtypes[foreign[0]]}, which no {what} holds")
            return dict(file.metadata() or {}), {name: file.get_tensor(name) for name in names}
    except (SafetensorError, OSError, ValueError, TypeError, AttributeError, OverflowError, MemoryError) as fault:
        if isinstance(fault, error):
            raise
        raise error(
            f"{path} is not a whole {what} file ({brief(fault, 200)}); expected safetensors: copy it or make it again"
        ) from fault


def brief(value: object, most: int = 80) -> str:
    """A value for a message: its text, shortened in the middle."""
    text = value if isinstance(value, str) else str(value)
    text = text.encode("utf-8", "backslashreplace").decode()
    return text if len(text) <= most else f"{text[: most // 2]}...{text[-most // 3 :]}"


def parse_json(text: str) -> Any:
    """As :func:`json.loads`, but nesting that is too deep is a ValueError too."""
    try:
        return json.loads(text)
    except RecursionError:
        raise ValueError("nested too deeply") from None


def whole_number(text: str, low: int, high: int) -> int:
    """A number of metadata: ASCII digits alone.

    Raises
    ------
    ValueError
        Something else, or out of range.
    """
    digits = text.removeprefix("-")
    number = int(text) if digits.isascii() and digits.isdigit() and len(digits) < 20 else None
    if number is None or not low <= number <= high:
        raise ValueError(f"{brief(text)!r}; expected a whole number from {low} to {high}")
    return number


def shape_fault(num_experts: Sequence[int], top_k: int = 0) -> str | None:
    """What is wrong with a model of so many experts in each layer and for each token; None if nothing is."""
    if not 0 < len(num_experts) <= MOST_LAYERS:
        return f"{len(num_experts)} MoE layers; expected 1 to {MOST_LAYERS:,}"
    if not all(type(n) is int and n > 0 for n in num_experts):
        return f"layers of {brief(list(num_experts))} experts; expected whole numbers above 0"
    if sum(num_experts) > MOST_EXPERTS:
        return f"{sum(num_experts):,} experts in {len(num_experts)} layers; at most {MOST_EXPERTS:,} are supported"
    pairs = sum(n * (n + after) for n, after in zip(num_experts, (*num_experts[1:], num_experts[0]), strict=True))
    if 4 * pairs > MOST_PAIR_BYTES:
        return (
            f"layers of up to {max(num_experts):,} experts; which of them follows which takes {4e-9 * pairs:.1f} GB, "
            f"and {MOST_PAIR_BYTES / 1e9:.1f} GB are supported (11,585 experts in a single layer)"
        )
    if not 0 <= top_k <= MOST_TOP_K:
        return f"top-{top_k}; expected at most {MOST_TOP_K}"
    return None
