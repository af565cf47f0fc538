"""Reading and writing traces in whatever format the ending of a file names."""

from __future__ import annotations

import os
from pathlib import Path

from ..errors import TraceFormatError
from ..trace import Trace
from .foreign import read_npz
from .text import read_text, write_text

__all__ = ["read_trace", "write_trace"]

_NOT_READ = {
    ".parquet": "convert it: python -c \"import pandas; pandas.read_parquet('IN.parquet').to_csv('OUT.csv', index=False)\"",
    ".feather": "convert it: python -c \"import pandas; pandas.read_feather('IN.feather').to_csv('OUT.csv', index=False)\"",
    ".json": "write its entries one a line (.jsonl): python -c \"import json; [print(json.dumps(x)) for x in json.load(open('IN.json'))]\"",
    **dict.fromkeys(
        (".pt", ".pth", ".pkl", ".pickle", ".npy"),
        "a pickle may run code and a single array lacks the requests: save the arrays experts [tokens, layers, k], request and decode "
        "[tokens] with numpy.savez (.npz)",
    ),
    **dict.fromkeys(
        (".gz", ".zip", ".zst", ".xz", ".bz2", ".tar"),
        "unpack it; of packed files .jsonl.gz, .csv.gz and .tsv.gz are read",
    ),
}


def _format_of(path: Path) -> str | None:
    """``"text"``, ``"npz"``, an ending that is not read, or None for safetensors."""
    suffix = path.suffix.lower()
    inner = Path(path.stem).suffix.lower() if suffix == ".gz" else suffix
    if inner in (".jsonl", ".csv", ".tsv"):
        return "text"
    if suffix == ".npz":
        return "npz"
    return suffix if suffix in _NOT_READ else None


def read_trace(path: str | os.PathLike[str], num_experts: int | None = None) -> Trace:
    """Read a trace: text (JSON lines, CSV, TSV, also packed with gzip) or npz by the file's ending, else safetensors.

    Parameters
    ----------
    path : path
    num_experts : int, optional
        Experts per layer, for files that do not say; by default the largest id and one.

    Raises
    ------
    TraceFormatError
        Cut short, damaged, of a format that is not read, or with numbers that cannot be. Nothing is read in part.
    FileNotFoundError
    """
    path = Path(path)
    found = _format_of(path)
    if found in _NOT_READ:
        raise TraceFormatError(f"{path}: {found} files are not read as traces; {_NOT_READ[found]}")
    if found == "text":
        return read_text(path, num_experts)
    if found == "npz":
        return read_npz(path, num_experts)
    return Trace.load(path)


def write_trace(trace: Trace, path: str | os.PathLike[str]) -> None:
    """Write a trace in the format of the file's ending, whole or not at all.

    ``.jsonl``, ``.csv`` and ``.tsv`` (and the same with ``.gz``) are text, which has no place for everything: one line is logged about
    what is left out. ``.safetensors`` keeps all.

    Raises
    ------
    TraceFormatError
        An ending of a format that is not written (``.npz``, ``.parquet``, ...), or requests that take turns in a text.
    """
    path = Path(path)
    if _format_of(path) == "text":
        write_text(trace, path)
    else:
        trace.save(path)
