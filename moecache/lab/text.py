"""Traces as text: JSON lines and CSV, one line for each (token, layer)."""

from __future__ import annotations

import csv
import io
import itertools
import json
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import numpy as np

from ..errors import TraceFormatError
from .trace import Trace

__all__ = ["format_trace", "parse_trace"]

_FIELDS = ("layer", "token", "experts", "request", "decode")


class _Line(NamedTuple):
    number: int
    request: int
    token: int
    layer: int
    experts: list[int]
    decode: int


def parse_trace(path: Path, num_experts: int | None = None) -> Trace:
    """Read JSON lines (``{"layer": 0, "token": 0, "experts": [3, 17], "request": 0}``) or CSV (``layer,token,experts,request`` with the
    experts separated by spaces). Every token has a line for every layer; ``request`` and ``decode`` may be left out. A first JSON line
    without ``layer`` is metadata.

    Raises
    ------
    TraceFormatError
        Naming the line that is wrong.
    FileNotFoundError
    """
    if not path.is_file():
        raise FileNotFoundError(f"no routing trace at {path}")
    try:
        text = path.read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        raise TraceFormatError(f"{path} is not UTF-8 text ({error})") from error
    metadata: dict[str, str] = {}
    lines = list(_json_lines(path, text, metadata) if path.suffix == ".jsonl" else _csv_lines(path, text))
    if not lines:
        raise TraceFormatError(f"{path}: no line routes anything")
    return _assemble(path, lines, metadata, num_experts)


def _json_lines(path: Path, text: str, metadata: dict[str, str]) -> Iterator[_Line]:
    for number, line in enumerate(text.splitlines(), 1):
        if not line.strip():
            continue
        try:
            entry = json.loads(line)
        except ValueError as error:
            raise TraceFormatError(f"{path}, line {number} is not JSON: {error}") from error
        if not isinstance(entry, dict):
            raise TraceFormatError(f"{path}, line {number}: expected an object with {', '.join(_FIELDS[:3])}")
        if number == 1 and "layer" not in entry:
            metadata.update(
                {key: value if isinstance(value, str) else json.dumps(value) for key, value in entry.items()}
            )
            continue
        yield _line(path, number, entry)


def _csv_lines(path: Path, text: str) -> Iterator[_Line]:
    reader = csv.DictReader(io.StringIO(text))
    if reader.fieldnames is None or not set(_FIELDS[:3]) <= set(reader.fieldnames):
        raise TraceFormatError(
            f"{path}, line 1: expected the columns {', '.join(_FIELDS[:3])} and perhaps request, decode"
        )
    for entry in reader:
        number = reader.line_num
        if None in entry or None in entry.values():
            raise TraceFormatError(f"{path}, line {number}: expected {len(reader.fieldnames)} values")
        try:
            values: dict[str, object] = {key: int(entry[key]) for key in _FIELDS if key in entry and key != "experts"}
            values["experts"] = [int(e) for e in entry["experts"].split()]
        except ValueError as error:
            raise TraceFormatError(f"{path}, line {number}: {error}") from error
        yield _line(path, number, values)


def _line(path: Path, number: int, entry: dict[str, object]) -> _Line:
    missing = [name for name in _FIELDS[:3] if name not in entry]
    if missing:
        raise TraceFormatError(f"{path}, line {number} lacks {', '.join(missing)}")
    experts = entry["experts"]
    whole = [entry.get("request", 0), entry["token"], entry["layer"], entry.get("decode", 1)]
    if not isinstance(experts, list) or not all(type(value) is int for value in [*whole, *experts]):
        raise TraceFormatError(
            f"{path}, line {number}: layer, token, request and the experts must be whole numbers, found {entry}"
        )
    request, token, layer, decode = (int(value) for value in whole)  # type: ignore[call-overload]
    if min(request, token, layer) < 0 or decode not in (0, 1):
        raise TraceFormatError(f"{path}, line {number}: negative numbers, or a decode that is neither 0 nor 1: {entry}")
    return _Line(number, request, token, layer, experts, decode)


def _assemble(path: Path, lines: list[_Line], metadata: dict[str, str], num_experts: int | None) -> Trace:
    falls = [line.number for before, line in itertools.pairwise(lines) if line.request < before.request]
    if falls:
        raise TraceFormatError(f"{path}, line {falls[0]} goes back to an earlier request; sort the lines by request")
    rows = {key: i for i, key in enumerate(dict.fromkeys((line.request, line.token) for line in lines))}
    layers, top_k = 1 + max(line.layer for line in lines), max(len(line.experts) for line in lines)
    if layers > 10_000 or top_k > 4096:
        raise TraceFormatError(
            f"{path}: {layers} layers of top-{top_k} are no routing; look at the largest layer number"
        )
    experts = np.full((len(rows), layers, top_k), -1, np.int16)
    decode = np.ones(len(rows), np.uint8)
    filled = np.zeros((len(rows), layers), bool)
    for line in lines:
        row = rows[line.request, line.token]
        if filled[row, line.layer]:
            raise TraceFormatError(
                f"{path}, line {line.number}: token {line.token} of request {line.request} has layer {line.layer} already"
            )
        if any(not -1 <= e < 32767 for e in line.experts):
            raise TraceFormatError(f"{path}, line {line.number}: experts {line.experts} are out of range")
        filled[row, line.layer] = True
        experts[row, line.layer, : len(line.experts)] = line.experts
        decode[row] = line.decode
    per_layer = _stated(path, metadata, layers) or (num_experts or int(experts.max()) + 1,) * layers
    if not filled.all():
        row, layer = (int(i) for i in np.argwhere(~filled)[0])
        request, token = list(rows)[row]
        raise TraceFormatError(
            f"{path}: token {token} of request {request} lacks layer {layer}; the file is cut short, or lines are missing"
        )
    if metadata.get("tokens", str(len(rows))) != str(len(rows)):
        raise TraceFormatError(f"{path}: its first line promises {metadata['tokens']} tokens, {len(rows)} are there")
    numbers = {request: i for i, request in enumerate(dict.fromkeys(request for request, _ in rows))}
    return Trace(
        name=path.stem,
        experts=experts,
        request=np.array([numbers[request] for request, _ in rows], np.int32),
        decode=decode,
        num_experts=per_layer,
        metadata={"model": path.stem, **{key: value for key, value in metadata.items() if key != "tokens"}},
    )


def _stated(path: Path, metadata: dict[str, str], layers: int) -> tuple[int, ...] | None:
    if "num_experts" not in metadata:
        return None
    try:
        found = json.loads(metadata["num_experts"])
        return (int(found),) * layers if isinstance(found, int) else tuple(int(n) for n in found)
    except (TypeError, ValueError) as error:
        raise TraceFormatError(f"{path}, line 1: num_experts is {metadata['num_experts']!r}") from error


def format_trace(trace: Trace, suffix: str) -> str:
    """A trace as JSON lines or CSV. Forward passes, weights and what was not counted have no place there.

    Raises
    ------
    TraceFormatError
        The trace's requests take turns, which lines sorted by request cannot say.
    """
    if (np.diff(trace.request) < 0).any():
        raise TraceFormatError(
            f"{trace.name}: its requests take turns; a text trace is sorted by request, so keep it as .safetensors"
        )
    out = io.StringIO()
    if suffix == ".jsonl":
        shape = {"num_experts": list(trace.num_experts), "top_k": trace.top_k, "tokens": trace.tokens}
        out.write(json.dumps({"model": trace.model, **shape}) + "\n")
    else:
        out.write(",".join(_FIELDS) + "\n")
    first = np.searchsorted(trace.request, np.arange(trace.requests))
    for row in range(trace.tokens):
        request, decode = int(trace.request[row]), int(trace.decode[row])
        token = row - int(first[request])
        for layer in range(trace.layers):
            experts = trace.experts[row, layer].tolist()
            if suffix == ".jsonl":
                entry = {"request": request, "token": token, "layer": layer, "experts": experts, "decode": decode}
                out.write(json.dumps(entry) + "\n")
            else:
                out.write(f"{layer},{token},{' '.join(map(str, experts))},{request},{decode}\n")
    return out.getvalue()
