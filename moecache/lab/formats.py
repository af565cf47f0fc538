"""Reading and writing traces in whatever format the ending of a file names."""

from __future__ import annotations

import logging
import os
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

import numpy as np
from safetensors import SafetensorError, safe_open

from ..errors import TraceFormatError
from ..trace import Trace
from .arrays import read_arrays, trace_of
from .fields import check_mapping
from .packed import PACKED, ending_of
from .parquet import read_layers, read_parquet
from .records import assemble
from .text import read_colibri, read_text
from .write import write_text

__all__ = ["READ", "read_trace", "write_trace"]

_LOG = logging.getLogger("moecache")
_TEXT = (".jsonl", ".json", ".csv", ".tsv")
_ARRAYS = (".npz", ".npy", ".pt", ".pth")
_COLIBRI = (".trace", ".txt")
READ = (".safetensors", ".parquet", *_TEXT, *_ARRAYS, *_COLIBRI)
"""Endings of files that are read as traces; text and .npy also packed."""

_NOT_READ = {
    ".feather": "convert it: python -c \"import pandas; pandas.read_feather('IN.feather').to_parquet('OUT.parquet')\"",
    **dict.fromkeys(
        (".pkl", ".pickle"),
        "a pickle may run code: save the arrays experts [tokens, layers, k], request and decode [tokens] with numpy.savez (.npz)",
    ),
    **dict.fromkeys((".zip", ".zst", ".tar", ".tgz", ".7z"), "unpack it; text is read packed with .gz, .bz2 or .xz"),
}


def read_trace(
    path: str | os.PathLike[str],
    num_experts: int | None = None,
    *,
    mapping: Mapping[str, str] | None = None,
    top_k: int | None = None,
    request_tokens: int | None = None,
) -> Trace:
    """Read a trace, whoever wrote it (``docs/guide/traces.md`` has the formats by name).

    Parameters
    ----------
    path : path
        ``.safetensors``, ``.jsonl``, ``.json``, ``.csv``, ``.tsv``, ``.parquet``, ``.npz``, ``.npy``, ``.pt``, colibri's ``.trace``, or
        a folder of ``layer_NN.parquet``.
    num_experts : int, optional
        Experts per layer, for files that do not say; by default the largest id and one.
    mapping : mapping of str to str, optional
        Names of columns or arrays by field (:data:`moecache.lab.fields.FIELDS`), where they are others than those known.
    top_k : int, optional
        Experts of a token, for records of one expert each whose tokens are not numbered.
    request_tokens : int, optional
        Begin a request every so many tokens, for files that name none.

    Raises
    ------
    TraceFormatError
        Damaged, of a format that is not read, or with numbers that cannot be. Tokens that lack layers are left out with a line in the
        log; apart from that nothing is read in part.
    FileNotFoundError
    """
    path = Path(path)
    check_mapping(mapping or {})
    for name, value in (("num_experts", num_experts), ("top_k", top_k), ("request_tokens", request_tokens)):
        if value is not None and value < 1:
            raise TraceFormatError(f"{name} {value} cannot be: expected at least 1")
    ending = ending_of(path)
    if ending in _NOT_READ or path.suffix.lower() in _NOT_READ:
        found = path.suffix.lower()
        raise TraceFormatError(
            f"{path}: {found} files are not read as traces; {_NOT_READ.get(found, _NOT_READ.get(ending))}"
        )
    if path.suffix.lower() in PACKED and ending not in (*_TEXT, *_COLIBRI, ".npy"):
        raise TraceFormatError(f"{path}: of packed files text and .npy are read; unpack it")
    if path.is_dir():
        return _folder(path, num_experts, request_tokens)
    if ending in _TEXT:
        return assemble(path, read_text(path, mapping), num_experts, top_k, request_tokens)
    if ending in _COLIBRI:
        return assemble(path, read_colibri(path), num_experts, top_k, request_tokens)
    if ending == ".parquet":
        return assemble(path, read_parquet(path, mapping), num_experts, top_k, request_tokens)
    if ending in _ARRAYS or (ending == ".safetensors" and not _is_own(path)):
        return read_arrays(path, num_experts, request_tokens, mapping)
    return Trace.load(path)


def _folder(path: Path, num_experts: int | None, request_tokens: int | None) -> Trace:
    arrays, weights = read_layers(path)
    trace = trace_of(path, arrays, num_experts, request_tokens)
    if weights is None or weights.shape != trace.experts.shape:
        return trace
    return replace(trace, weights=weights.astype(np.float16))


def _is_own(path: Path) -> bool:
    # Whether a safetensors file says that it is a trace of this library's format; what is damaged is told by who reads it.
    try:
        with safe_open(path, "np") as file:
            said = file.metadata() or {}
            return bool({"num_experts", "top_k", "num_layers"} & said.keys()) or {
                "experts",
                "request",
                "decode",
            } <= set(file.keys())
    except (SafetensorError, OSError):
        return True


def write_trace(trace: Trace, path: str | os.PathLike[str]) -> None:
    """Write a trace in the format of the file's ending, whole or not at all.

    ``.jsonl``, ``.csv`` and ``.tsv`` (also packed: ``.gz``, ``.bz2``, ``.xz``) are text, which has no place for everything: one line is
    logged about what is left out. ``.safetensors`` keeps all.

    Raises
    ------
    TraceFormatError
        An ending of a format that is not written (``.npz``, ``.parquet``, ...).
    """
    path = Path(path)
    if ending_of(path) in (".jsonl", ".csv", ".tsv"):
        write_text(trace, path)
    else:
        trace.save(path)
