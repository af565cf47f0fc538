"""Traces as text: JSON lines, CSV and TSV, one record for each (token, layer), each token, or each expert."""

from __future__ import annotations

import csv
import itertools
import json
import logging
from collections.abc import Mapping
from pathlib import Path
from typing import Any, TextIO

from ..errors import TraceFormatError
from ..tensorfile import brief, parse_json, whole_number
from .arrays import decoded_ids
from .fields import columns_of, other_names
from .packed import ending_of, open_text
from .records import NONE, Columns, Records

__all__ = ["LARGEST_ID", "flag", "read_colibri", "read_text"]

_LOG = logging.getLogger("moecache")
_HEAD = "layer, token, experts"
_MOST, _MOST_LAYER = 2**63 - 1, 2**31 - 1
LARGEST_ID = 32766
"""Of an expert: what the arrays of a trace hold."""

_DECODE = {"0": 0, "1": 1, "false": 0, "true": 1, "prompt": 0, "prefill": 0, "decode": 1, "answer": 1, "generate": 1}


def read_text(path: Path, mapping: Mapping[str, str] | None = None) -> Columns:
    """Read JSON lines (``{"layer": 0, "token": 0, "experts": [3, 17], "request": 0}``), a JSON list of such objects, or CSV
    (``layer,token,experts,request`` with the experts separated by spaces).

    Layers may bear any numbers (those of the MoE layers of a model with others between), requests any names. Columns may have the other
    names of :data:`moecache.lab.fields.FIELDS`, or those of `mapping`; ``expert`` stands for one of a token's experts, a record each. In
    JSON, ``experts`` may list all layers' experts of a token, or of all tokens of a request, without ``layer``. A first JSON line that
    routes nothing, or a first CSV line that begins with ``#``, is metadata as JSON; where it says ``tokens``, so many must follow.

    Raises
    ------
    TraceFormatError
        Naming the line that is wrong.
    FileNotFoundError
    """
    reader = _Reader(path, mapping)
    ending = ending_of(path)
    with open_text(path) as file:
        if ending == ".jsonl":
            reader.json_lines(file)
        elif ending == ".json":
            reader.json_list(file)
        else:
            reader.csv(file, "\t" if ending == ".tsv" else ",")
    reader.close()
    return reader.records.columns()


def read_colibri(path: Path) -> Columns:
    """Read colibri's ``ROUTE_TRACE``: lines of ``call row layer expert:gate expert:gate ...``, rows being the tokens of a forward pass.

    Raises
    ------
    TraceFormatError, FileNotFoundError
    """
    records = Records()
    request = records.request("run")
    step, before, call = -1, -1, None
    with open_text(path) as file:
        for number, line in enumerate(file, 1):
            fields = line.split()
            if not fields:
                continue
            try:
                now, row, layer = (whole_number(text, 0, _MOST) for text in fields[:3])
                pairs = [pair.split(":") for pair in fields[3:]]
                ids = [whole_number(pair[0], 0, LARGEST_ID) for pair in pairs]
                weights = [float(pair[1]) for pair in pairs if len(pair) == 2]
                if not ids or len(weights) != len(ids):
                    raise ValueError("expected expert:gate for each expert")
            except ValueError as error:
                raise TraceFormatError(
                    f"{path}, line {number}: {brief(error)}; expected call row layer expert:gate ..."
                ) from error
            # Calls are numbered through all layers: a pass begins where layers start over.
            step += layer < before or step < 0 or (layer == before and now != call)
            before, call = layer, now
            records.add((number, request, row, layer, step, NONE, NONE), ids, weights)
    return records.columns()


class _Reader:
    """Takes down the records of a file, whatever their fields are called."""

    def __init__(self, path: Path, mapping: Mapping[str, str] | None) -> None:
        self.path, self.mapping = path, mapping or {}
        self.records = Records()
        self._known: dict[tuple[object, ...], dict[str, str]] = {}
        self._unread: dict[str, int] = {}  # values of fields that no trace holds

    def json_lines(self, file: TextIO) -> None:
        for number, line in enumerate(file, 1):
            if not line.strip():
                continue
            where = f"{self.path}, line {number}"
            try:
                entry = parse_json(line)
            except ValueError as error:
                raise TraceFormatError(f"{where} is not JSON: {brief(error)}") from error
            self._entry(where, number, entry)

    def json_list(self, file: TextIO) -> None:
        try:
            entries = parse_json(file.read())
        except ValueError as error:
            raise TraceFormatError(f"{self.path} is not JSON: {brief(error)}") from error
        if not isinstance(entries, list):
            raise TraceFormatError(f"{self.path}: expected a list of objects with {_HEAD}")
        for number, entry in enumerate(entries, 1):
            self._entry(f"{self.path}, entry {number}", number, entry)

    def csv(self, file: TextIO, delimiter: str) -> None:
        line, comments = file.readline(), 0
        while line.startswith("#"):
            comments += 1
            if comments == 1 and line[1:].lstrip().startswith("{"):
                try:
                    self._describe(f"{self.path}, line 1", parse_json(line[1:]))
                except ValueError as error:
                    raise TraceFormatError(f"{self.path}, line 1 is not JSON: {brief(error)}") from error
            line = file.readline()
        rows = csv.reader(itertools.chain([line], file), delimiter=delimiter, strict=True)
        try:
            head = next(rows, [])
            found = self._columns(tuple(head), f"{self.path}, line {comments + 1}")
            if len(set(head)) < len(head) or "layer" not in found or not found.keys() & {"experts", "expert"}:
                raise TraceFormatError(
                    f"{self.path}, line {comments + 1}: expected the columns {_HEAD} and perhaps request, decode, pass, weights; "
                    f"found {brief(head)}. Say which is which with --map FIELD=NAME; other names that are read: {other_names()}"
                )
            for row in rows:
                number = rows.line_num + comments
                if len(row) == len(head):
                    self._add(f"{self.path}, line {number}", number, dict(zip(head, row, strict=True)))
                elif row:
                    raise TraceFormatError(f"{self.path}, line {number}: expected {len(head)} values, found {len(row)}")
        except csv.Error as error:
            raise TraceFormatError(f"{self.path}, line {rows.line_num + comments}: {brief(error)}") from error

    def close(self) -> None:
        """Say once what had no place."""
        if self._unread:
            told = ", ".join(f"{name} ({count:,})" for name, count in self._unread.items())
            _LOG.warning(
                "%s: %s are no part of a routing trace and are not kept (records that said them)",
                self.path,
                brief(told),
            )

    def _entry(self, where: str, number: int, entry: Any) -> None:
        if not isinstance(entry, dict):
            raise TraceFormatError(f"{where}: expected an object with {_HEAD}")
        routes = self._columns(tuple(entry), where).keys() & {"layer", "experts", "expert"}
        if number == 1 and not (routes - {"layer"}):
            if routes:
                raise TraceFormatError(f"{where} lacks experts")
            self._describe(where, entry)
        else:
            self._add(where, number, entry)

    def _describe(self, where: str, entry: Any) -> None:
        if not isinstance(entry, dict):
            raise TraceFormatError(f"{where}: expected metadata as a JSON object")
        self.records.metadata.update({k: v if isinstance(v, str) else json.dumps(v) for k, v in entry.items()})

    def _columns(self, names: tuple[object, ...], where: str) -> dict[str, str]:
        found = self._known.get(names)
        if found is None:
            found, _ = columns_of(names, where, self.mapping)
            if len(self._known) < 64:
                self._known[names] = found
        return found

    def _add(self, where: str, number: int, entry: Mapping[str, Any]) -> None:
        columns = self._columns(tuple(entry), where)
        if len(columns) < len(entry):
            for name in entry.keys() - columns.values() - {"type"}:
                if len(self._unread) < 64 or name in self._unread:
                    self._unread[name] = self._unread.get(name, 0) + 1
        found = {field: entry[name] for field, name in columns.items()}
        if "experts" not in found and "expert" not in found:
            raise TraceFormatError(f"{where} lacks experts")
        try:
            self._take(number, found)
        except TraceFormatError:
            raise
        except ValueError as error:
            raise TraceFormatError(f"{where}: {error}") from error

    def _take(self, number: int, found: Mapping[str, Any]) -> None:
        request = self.records.request(_name(found.get("request", 0)))
        token, step, token_id = (
            _whole(found[field], most) if field in found else NONE
            for field, most in (("token", _MOST), ("pass", _MOST), ("token_id", 2**31 - 1))
        )
        decode = (
            flag(found["decode"] if "decode" in found else found["phase"]) if {"decode", "phase"} & set(found) else NONE
        )
        listed = found.get("experts", found.get("expert"))
        weighed = found.get("weights", found.get("weight"))
        if "layer" in found:
            layer = _whole(found["layer"], _MOST_LAYER)
            self.records.single |= "expert" in found
            ids = _experts(listed)
            self.records.add((number, request, token, layer, step, decode, token_id), ids, _weights(weighed, len(ids)))
            return
        several, tokens = _by_layer(listed, self.records.metadata)
        if several and token != NONE:
            raise ValueError("a record that numbers its token lists the experts of several")
        for place, layers in enumerate(tokens):
            for layer, ids in enumerate(layers):
                row = (number, request, place if several else token, layer, step, decode, token_id)
                self.records.add(row, _experts(ids), None)


def _name(value: object) -> int | str:
    if isinstance(value, str):
        return int(value) if value.isascii() and value.isdigit() and len(value) < 19 else value
    if type(value) is not int or not 0 <= value <= _MOST:
        raise ValueError(f"request {brief(value)!r}; expected a name, or a whole number that is not negative")
    return value


def _whole(value: object, most: int) -> int:
    if isinstance(value, str):
        return whole_number(value.strip(), 0, most)
    if type(value) is not int or not 0 <= value <= most:
        raise ValueError(f"{brief(value)!r}; expected whole numbers that are not negative, at most {most}")
    return value


def _parts(value: str) -> list[str]:
    return value.strip(" []()").replace(",", " ").replace(";", " ").split()


def _experts(value: object) -> list[int]:
    listed: list[Any]
    if isinstance(value, str):
        listed = [whole_number(part, -1, LARGEST_ID) for part in _parts(value)]
    else:
        listed = value if isinstance(value, list) else [value]
    for e in listed:
        if type(e) is not int:
            raise ValueError(f"experts {brief(value)}; expected whole numbers")
        if not -1 <= e <= LARGEST_ID:
            raise ValueError(f"experts {brief(value)} are out of range; expected -1 (none) to {LARGEST_ID}")
    return listed


def _weights(value: object, count: int) -> list[float] | None:
    if value is None:
        return None
    listed: list[Any] = _parts(value) if isinstance(value, str) else value if isinstance(value, list) else [value]
    try:
        found = [float(x) for x in listed]
    except (TypeError, ValueError):
        raise ValueError(f"weights {brief(value)}; expected numbers") from None
    if len(found) != count:
        raise ValueError(f"{len(found)} weights for {count} experts")
    return found


def _by_layer(listed: object, metadata: Mapping[str, str]) -> tuple[bool, list[list[list[int]]]]:
    # Whether a record that lists all layers' experts does so for several tokens, and [tokens][layers][k].
    if isinstance(listed, str):
        listed = decoded_ids(listed, metadata)
    if not isinstance(listed, list) or not listed or not all(isinstance(part, list) for part in listed):
        raise ValueError("it lacks layer")
    deeper = [part and all(isinstance(ids, list) for ids in part) for part in listed]
    if any(deeper) and not all(deeper):
        raise ValueError("its experts are nested to different depths")
    return all(deeper), listed if all(deeper) else [listed]


def flag(value: object) -> int:
    """0 for prompt, 1 for completion, whatever it is called.

    Raises
    ------
    ValueError
    """
    found = _DECODE.get(str(value).strip().lower())
    if found is None:
        raise ValueError(f"{brief(value)!r} is neither prompt (0) nor decode (1)")
    return found
