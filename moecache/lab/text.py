"""Traces as text: JSON lines, CSV and TSV, one record for each (token, layer), each token, or each expert."""

from __future__ import annotations

import contextlib
import csv
import gzip
import io
import itertools
import json
import logging
import zlib
from array import array
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, TextIO

import numpy as np

from ..errors import TraceFormatError
from ..files import whole_file
from ..tensorfile import MOST_LAYERS, MOST_TOP_K, brief, parse_json, whole_number
from ..trace import Trace, experts_per_layer, metadata_of, name_of
from .foreign import MOST_PACKED, columns_of, other_names

__all__ = ["open_text", "read_text", "write_text"]

_LOG = logging.getLogger("moecache")
_COLUMNS = ("layer", "token", "experts", "request", "decode")
_MOST, _MOST_LAYER = 2**63 - 1, 2**31 - 1
_LARGEST_ID = 32766  # of an expert: what the arrays of a trace hold
_DECODE = {"0": 0, "1": 1, "false": 0, "true": 1, "prompt": 0, "prefill": 0, "decode": 1, "answer": 1, "generate": 1}


def read_text(path: Path, num_experts: int | None = None) -> Trace:
    """Read JSON lines (``{"layer": 0, "token": 0, "experts": [3, 17], "request": 0}``) or CSV (``layer,token,experts,request`` with the
    experts separated by spaces).

    Layers may bear any numbers (those of the MoE layers of a model with others between), requests any names. ``request`` and ``decode``
    may be left out, ``token`` where each request's records go through all layers once a token. Columns may have the other names of
    :data:`moecache.lab.foreign.FIELDS`; ``expert`` stands for one of a token's experts, a record each. In JSON, ``experts`` may list all
    layers' experts of a token, without ``layer``. A first JSON line that routes nothing, or a first CSV line that begins with ``#``, is
    metadata as JSON; where it says ``tokens``, so many must follow.

    Raises
    ------
    TraceFormatError
        Naming the line that is wrong.
    FileNotFoundError
    """
    records = _Records(path)
    with open_text(path) as file:
        if _ending(path) == ".jsonl":
            _read_json(file, records)
        else:
            _read_csv(file, records, "\t" if _ending(path) == ".tsv" else ",")
    return records.trace(num_experts)


@contextlib.contextmanager
def open_text(path: Path) -> Iterator[TextIO]:
    """A text file, packed with gzip or not, with or without a byte-order mark; lines end with line feed or carriage return alone.

    Raises
    ------
    TraceFormatError
        Not UTF-8, cut short, or unfolding to far more than its size.
    FileNotFoundError
    """
    if not path.is_file():
        raise FileNotFoundError(f"no routing trace at {path}")
    try:
        with contextlib.ExitStack() as stack:
            raw: Any = stack.enter_context(open(path, "rb"))
            if path.suffix.lower() == ".gz":
                packed = stack.enter_context(gzip.GzipFile(fileobj=raw))
                raw = io.BufferedReader(_Unpacked(packed, MOST_PACKED * path.stat().st_size + (1 << 20)))
            yield stack.enter_context(io.TextIOWrapper(raw, encoding="utf-8-sig"))
    except UnicodeDecodeError as error:
        raise TraceFormatError(f"{path} is not UTF-8 text ({brief(error)})") from error
    except (EOFError, zlib.error, gzip.BadGzipFile) as error:
        raise TraceFormatError(f"{path} is no whole gzip file ({brief(error)}); copy it again") from error


class _Unpacked(io.RawIOBase):
    # What a packed file unfolds to, up to a limit.
    def __init__(self, packed: gzip.GzipFile, limit: int) -> None:
        super().__init__()
        self._packed, self._left = packed, limit

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        data = self._packed.read(min(len(buffer), 1 << 16))
        self._left -= len(data)
        if self._left < 0:
            raise TraceFormatError(
                f"{self._packed.name}: it unfolds to more than {MOST_PACKED} times its size; unpack it"
            )
        buffer[: len(data)] = data
        return len(data)


def _ending(path: Path) -> str:
    return (Path(path.stem) if path.suffix.lower() == ".gz" else path).suffix.lower()


def _read_json(file: TextIO, records: _Records) -> None:
    for number, line in enumerate(file, 1):
        if not line.strip():
            continue
        where = f"{records.path}, line {number}"
        try:
            entry = parse_json(line)
        except ValueError as error:
            raise TraceFormatError(f"{where} is not JSON: {brief(error)}") from error
        if not isinstance(entry, dict):
            raise TraceFormatError(f"{where}: expected an object with {', '.join(_COLUMNS[:3])}")
        if number == 1 and not records.columns(tuple(entry), where).keys() & {"layer", "experts", "expert"}:
            records.describe(entry)
        else:
            records.add(where, number, entry)


def _read_csv(file: TextIO, records: _Records, delimiter: str) -> None:
    line, comments = file.readline(), 0
    while line.startswith("#"):
        comments += 1
        if comments == 1 and line[1:].lstrip().startswith("{"):
            try:
                records.describe(parse_json(line[1:]))
            except ValueError as error:
                raise TraceFormatError(f"{records.path}, line 1 is not JSON: {brief(error)}") from error
        line = file.readline()
    rows = csv.reader(itertools.chain([line], file), delimiter=delimiter, strict=True)
    try:
        head = next(rows, [])
        found = records.columns(tuple(head), f"{records.path}, line {comments + 1}")
        if len(set(head)) < len(head) or "layer" not in found or not found.keys() & {"experts", "expert"}:
            raise TraceFormatError(
                f"{records.path}, line {comments + 1}: expected the columns {', '.join(_COLUMNS[:3])} and perhaps request, decode; "
                f"found {brief(head)}. Other names that are read: {other_names()}"
            )
        for row in rows:
            number = rows.line_num + comments
            if len(row) == len(head):
                records.add(f"{records.path}, line {number}", number, dict(zip(head, row, strict=True)))
            elif row:
                raise TraceFormatError(f"{records.path}, line {number}: expected {len(head)} values, found {len(row)}")
    except csv.Error as error:
        raise TraceFormatError(f"{records.path}, line {rows.line_num + comments}: {brief(error)}") from error


class _Records:
    """What the lines of a file say, in arrays, until the last one is read."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.metadata: dict[str, str] = {}
        self._numbers: dict[int | str, int] = {}  # of requests by their name, in order of first appearance
        self._known: dict[tuple[object, ...], dict[str, str]] = {}
        self._line, self._request, self._token, self._layer, self._decode, self._count = (array("q") for _ in range(6))
        self._ids = array("h")
        self._single = self._derived = False  # a record for each expert; tokens counted by layers that start over
        self._at: dict[
            int, tuple[int, int]
        ] = {}  # the layer and the token that each request is at, where they are counted

    def describe(self, entry: Any) -> None:
        """Take down metadata."""
        if not isinstance(entry, dict):
            raise TraceFormatError(f"{self.path}, line 1: expected metadata as a JSON object")
        self.metadata.update({k: v if isinstance(v, str) else json.dumps(v) for k, v in entry.items()})

    def columns(self, names: tuple[object, ...], where: str) -> dict[str, str]:
        """Which of the names say what; what says nothing is named once."""
        found = self._known.get(names)
        if found is None:
            found, ignored = columns_of(names, where)
            if len(self._known) < 64:
                if ignored and not self._known and found:
                    _LOG.warning(
                        "%s: %s are no part of a routing trace and are not kept", self.path, brief(", ".join(ignored))
                    )
                self._known[names] = found
        return found

    def add(self, where: str, number: int, entry: Mapping[str, Any]) -> None:
        """Take down a record.

        Raises
        ------
        TraceFormatError
        """
        found = {field: entry[name] for field, name in self.columns(tuple(entry), where).items()}
        listed = found.get("experts", found.get("expert"))
        if listed is None:
            raise TraceFormatError(f"{where} lacks experts")
        try:
            request = self._number_of(found.get("request", 0))
            decode = _flag(found.get("decode", found.get("phase", 1)))
            if "layer" in found:
                ids = _experts(listed)
                layer = _whole(found["layer"], _MOST_LAYER)
                self._single |= "expert" in found
                self._put(number, request, self._token_of(found, request, layer), layer, decode, ids)
            elif isinstance(listed, list) and all(isinstance(ids, list) for ids in listed):
                token = self._token_of(found, request, 0)
                for layer, ids in enumerate(listed):
                    self._put(number, request, token, layer, decode, _experts(ids))
            else:
                raise TraceFormatError(f"{where} lacks layer")
        except TraceFormatError:
            raise
        except ValueError as error:
            raise TraceFormatError(f"{where}: {error}") from error

    def _put(self, line: int, request: int, token: int, layer: int, decode: int, ids: list[int]) -> None:
        columns = (self._line, self._request, self._token, self._layer, self._decode, self._count)
        for column, value in zip(columns, (line, request, token, layer, decode, len(ids)), strict=True):
            column.append(value)
        self._ids.extend(ids)

    def _number_of(self, name: object) -> int:
        if isinstance(name, str):
            name = int(name) if name.isascii() and name.isdigit() and len(name) < 19 else name
        elif type(name) is not int or not 0 <= name <= _MOST:
            raise ValueError(f"request {brief(name)!r}; expected a name, or a whole number that is not negative")
        return self._numbers.setdefault(name, len(self._numbers))

    def _token_of(self, found: Mapping[str, Any], request: int, layer: int) -> int:
        if "token" in found:
            return _whole(found["token"], _MOST)
        self._derived = True
        before, token = self._at.get(request, (-1, 0))
        token += layer < before or (layer == before and not self._single)
        self._at[request] = layer, token
        return token

    def trace(self, num_experts: int | None) -> Trace:
        """All of it.

        Raises
        ------
        TraceFormatError
        """
        if not self._line:
            raise TraceFormatError(f"{self.path}: no line routes anything")
        request, token, number = (np.array(x) for x in (self._request, self._token, self._layer))
        # Rows: requests in order of first appearance, tokens in order of their numbers.
        order = np.lexsort((token, request))
        begins = np.ones(len(order), bool)
        begins[1:] = (np.diff(request[order]) != 0) | (np.diff(token[order]) != 0)
        row = np.empty(len(order), np.int64)
        row[order] = np.cumsum(begins) - 1
        first = order[begins]
        layers, layer = np.unique(number, return_inverse=True)
        if len(layers) > MOST_LAYERS:
            raise TraceFormatError(f"{self.path}: {len(layers):,} layers; expected at most {MOST_LAYERS:,}")
        place = row * len(layers) + layer.reshape(-1)
        self._check_whole(place, first, layers)
        experts = self._experts(place, len(first), len(layers))
        decode = np.array(self._decode, np.uint8)
        mixed = np.flatnonzero(decode != decode[first][row])
        if len(mixed):
            raise TraceFormatError(f"{self.path}, line {self._line[mixed[0]]}: a token of prompt and completion both")
        if (np.diff(request) < 0).any():
            _LOG.warning(
                "%s: its requests take turns; they are put one after another (replay --concurrency plays turns)",
                self.path,
            )
        if self._derived:
            _LOG.warning("%s names no tokens: each time that a request's layers start over is taken for one", self.path)
        return self._made(request[first], decode[first], layers, experts, num_experts)

    def _check_whole(self, place: np.ndarray, first: np.ndarray, layers: np.ndarray) -> None:
        # Every token has a record for every layer, and one only.
        sorted_ = np.sort(place, kind="stable")
        if not self._single and (np.diff(sorted_) == 0).any():
            order = np.argsort(place, kind="stable")
            n = int(order[1:][np.diff(sorted_) == 0].min())
            raise TraceFormatError(
                f"{self.path}, line {self._line[n]}: {self._named(n)} has layer {self._layer[n]} already; name requests in a "
                "column request where token numbers start over"
            )
        there = np.unique(place)
        if len(there) < len(first) * len(layers):
            gap = int(np.argmax(np.append(there, -1) != np.arange(len(there) + 1)))
            n = int(first[gap // len(layers)])
            raise TraceFormatError(
                f"{self.path}: {self._named(n)} lacks layer {layers[gap % len(layers)]}; the file is cut short, or lines are missing"
            )

    def _named(self, n: int) -> str:
        name = next(name for name, number in self._numbers.items() if number == self._request[n])
        return f"token {self._token[n]} of request {brief(name)}"

    def _experts(self, place: np.ndarray, tokens: int, layers: int) -> np.ndarray:
        # int16 [tokens, layers, k], each layer's experts in the order of the file.
        count, ids = np.array(self._count), np.array(self._ids)
        owner = np.repeat(place, count)
        order = np.argsort(owner, kind="stable")
        owner, ids = owner[order], ids[order]
        width = np.bincount(owner, minlength=tokens * layers)
        top_k = int(width.max(initial=0))
        stated = self.metadata.get("top_k", "")
        if stated.isascii() and stated.isdigit() and len(stated) < 6:
            top_k = max(top_k, int(stated))
        if top_k > MOST_TOP_K or tokens * layers * top_k > max(1 << 20, 64 * len(ids)):
            raise TraceFormatError(
                f"{self.path}: a token goes to {top_k} experts of a layer, and most to far fewer: this is no routing"
            )
        if self._derived and (width != top_k).any():
            raise TraceFormatError(
                f"{self.path} names no tokens, and its records name {width.min()} to {top_k} experts: number the tokens in a column token"
            )
        experts = np.full((tokens, layers, top_k), -1, np.int16)
        experts.reshape(-1)[owner * top_k + np.arange(len(ids)) - np.repeat(np.cumsum(width) - width, width)] = ids
        return experts

    def _made(
        self, request: np.ndarray, decode: np.ndarray, layers: np.ndarray, experts: np.ndarray, num_experts: int | None
    ) -> Trace:
        name, tokens, metadata = name_of(self.path), len(experts), self.metadata
        if metadata.get("tokens", str(tokens)) != str(tokens):
            raise TraceFormatError(
                f"{self.path}: its first line promises {brief(metadata['tokens'])} tokens, {tokens} are there; the file is cut short"
            )
        if "num_experts" in metadata:
            per_layer = experts_per_layer(metadata["num_experts"], len(layers), f"{self.path}, line 1")
        else:
            per_layer = (num_experts or max(int(experts.max(initial=0)) + 1, 1),) * len(layers)
        other_numbers = {} if layers[-1] == len(layers) - 1 else {"moe_layers": json.dumps(layers.tolist())}
        return Trace(
            name=name,
            experts=experts,
            request=request,
            decode=decode,
            num_experts=per_layer,
            metadata={"model": name, **other_numbers, **{k: v for k, v in metadata.items() if k != "tokens"}},
        )


def _whole(value: object, most: int) -> int:
    if isinstance(value, str):
        return whole_number(value.strip(), 0, most)
    if type(value) is not int or not 0 <= value <= most:
        raise ValueError(f"{brief(value)!r}; expected whole numbers that are not negative, at most {most}")
    return value


def _experts(value: object) -> list[int]:
    listed: list[Any]
    if isinstance(value, str):
        listed = [
            whole_number(part, -1, _LARGEST_ID)
            for part in value.strip(" []()").replace(",", " ").replace(";", " ").split()
        ]
    else:
        listed = value if isinstance(value, list) else [value]
    for e in listed:
        if type(e) is not int:
            raise ValueError(f"experts {brief(value)}; expected whole numbers")
        if not -1 <= e <= _LARGEST_ID:
            raise ValueError(f"experts {brief(value)} are out of range; expected -1 (none) to {_LARGEST_ID}")
    return listed


def _flag(value: object) -> int:
    found = _DECODE.get(str(value).strip().lower())
    if found is None:
        raise ValueError(f"{brief(value)!r} is neither prompt (0) nor decode (1)")
    return found


def write_text(trace: Trace, path: Path) -> None:
    """Write a trace as JSON lines, CSV or TSV; the first line is metadata that says how many tokens follow.

    Forward passes, gate weights, groups and token numbers have no place there, and what was not counted is left out: one line is logged.

    Raises
    ------
    TraceFormatError
        The trace's requests take turns, which lines sorted by request cannot say; or nothing was counted.
    """
    if (np.diff(trace.request) < 0).any():
        raise TraceFormatError(
            f"{trace.name}: its requests take turns; a text trace is sorted by request, so keep it as .safetensors"
        )
    rows = np.arange(trace.tokens) if trace.counted is None else np.flatnonzero(trace.counted)
    if not len(rows):
        raise TraceFormatError(f"{trace.name}: no token was counted, so that nothing is left to write as text")
    lost = [name for name in ("forward", "weights", "token", "request_group") if getattr(trace, name) is not None]
    lost += [f"{trace.tokens - len(rows):,} tokens that were not counted"] if len(rows) < trace.tokens else []
    lost += ["metadata tokens"] if "tokens" in trace.metadata else []
    if lost:
        _LOG.warning("%s: text has no place for %s; .safetensors keeps all", path, ", ".join(lost))
    with whole_file(path) as file, contextlib.ExitStack() as stack:
        packed: Any = file
        if path.suffix.lower() == ".gz":
            packed = stack.enter_context(gzip.GzipFile(fileobj=file, mode="wb", filename="", mtime=0))
        for part in _lines(trace, rows, _ending(path)):
            packed.write(part.encode())


def _lines(trace: Trace, rows: np.ndarray, ending: str) -> Iterator[str]:
    head = json.dumps({**metadata_of(trace), "num_experts": list(trace.num_experts), "tokens": len(rows)})
    separator = "\t" if ending == ".tsv" else ","
    yield f"{head}\n" if ending == ".jsonl" else f"# {head}\n{separator.join(_COLUMNS)}\n"
    place: dict[int, int] = {}
    for row in rows.tolist():
        request, decode = int(trace.request[row]), int(trace.decode[row])
        token = place[request] = place.get(request, -1) + 1
        for layer, experts in enumerate(trace.experts[row].tolist()):
            if ending == ".jsonl":
                yield (
                    json.dumps(
                        {"request": request, "token": token, "layer": layer, "experts": experts, "decode": decode}
                    )
                    + "\n"
                )
            else:
                yield separator.join(map(str, (layer, token, " ".join(map(str, experts)), request, decode))) + "\n"
