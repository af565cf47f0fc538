"""Writing traces as JSON lines, CSV and TSV."""

from __future__ import annotations

import bz2
import contextlib
import gzip
import json
import logging
import lzma
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

from ..errors import TraceFormatError
from ..files import whole_file
from ..trace import Trace, metadata_of
from .packed import ending_of

__all__ = ["write_text"]

_LOG = logging.getLogger("moecache")


def write_text(trace: Trace, path: Path) -> None:
    """Write a trace as JSON lines, CSV or TSV; the first line is metadata that says how many tokens follow.

    Groups have no place there, and what was not counted is left out: one line is logged.

    Raises
    ------
    TraceFormatError
        Nothing was counted.
    """
    rows = np.arange(trace.tokens) if trace.counted is None else np.flatnonzero(trace.counted)
    if not len(rows):
        raise TraceFormatError(f"{trace.name}: no token was counted, so that nothing is left to write as text")
    lost = ["request_group"] if trace.request_group is not None else []
    lost += [f"{trace.tokens - len(rows):,} tokens that were not counted"] if len(rows) < trace.tokens else []
    lost += ["metadata tokens"] if "tokens" in trace.metadata else []
    if trace.token is not None and (trace.token[rows] < 0).any():
        lost.append("negative numbers of token")
    if lost:
        _LOG.warning("%s: text has no place for %s; .safetensors keeps all", path, ", ".join(lost))
    with whole_file(path) as file, contextlib.ExitStack() as stack:
        packed = _packer(path.suffix.lower(), file)
        if packed is not file:
            stack.enter_context(packed)
        for part in _lines(trace, rows, ending_of(path)):
            packed.write(part.encode())


def _packer(suffix: str, file: Any) -> Any:
    if suffix == ".gz":
        return gzip.GzipFile(fileobj=file, mode="wb", filename="", mtime=0)
    return {".bz2": bz2.BZ2File, ".xz": lzma.LZMAFile}.get(suffix, lambda raw, _: raw)(file, "wb")


def _lines(trace: Trace, rows: np.ndarray, ending: str) -> Iterator[str]:
    head = json.dumps({**metadata_of(trace), "num_experts": list(trace.num_experts), "tokens": len(rows)})
    columns = ["layer", "token", "experts", "request", "decode"]
    columns += [] if trace.forward is None else ["pass"]
    columns += [] if trace.token is None or (trace.token[rows] < 0).any() else ["token_id"]
    columns += [] if trace.weights is None else ["weights"]
    separator = "\t" if ending == ".tsv" else ","
    yield f"{head}\n" if ending == ".jsonl" else f"# {head}\n{separator.join(columns)}\n"
    place: dict[int, int] = {}
    for row in rows.tolist():
        request = int(trace.request[row])
        token = place[request] = place.get(request, -1) + 1
        values: dict[str, Any] = {"token": token, "request": request, "decode": int(trace.decode[row])}
        if trace.forward is not None:
            values["pass"] = int(trace.forward[row])
        if "token_id" in columns and trace.token is not None:
            values["token_id"] = int(trace.token[row])
        for layer in range(trace.layers):
            values["layer"], values["experts"] = layer, trace.experts[row, layer].tolist()
            if trace.weights is not None:
                values["weights"] = trace.weights[row, layer].tolist()
            if ending == ".jsonl":
                yield json.dumps({name: values[name] for name in columns}) + "\n"
            else:
                yield separator.join(_cell(values[name]) for name in columns) + "\n"


def _cell(value: Any) -> str:
    return " ".join(map(str, value)) if isinstance(value, list) else str(value)
