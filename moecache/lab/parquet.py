"""Traces as Parquet: a table of records, or a folder with a table for each layer."""

from __future__ import annotations

import importlib.util
import logging
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from ..errors import TraceFormatError
from ..tensorfile import brief
from .fields import columns_of
from .records import NONE, Columns
from .text import LARGEST_ID, flag

__all__ = ["read_layers", "read_parquet"]

_LOG = logging.getLogger("moecache")
_LAYER_FILE = re.compile(r"layer[_-]?(\d{1,6})\.parquet", re.IGNORECASE)


def read_parquet(path: Path, mapping: Mapping[str, str] | None = None) -> Columns:
    """Read a table whose columns are called as in text; ``experts`` and ``weights`` are lists, numbers or text.

    Raises
    ------
    TraceFormatError
        Damaged, or without pyarrow.
    FileNotFoundError
    """
    table = _table(path)
    found, ignored = columns_of(table.column_names, str(path), mapping)
    if not found.keys() & {"experts", "expert"}:
        raise TraceFormatError(f"{path} has the columns {brief(table.column_names)}, and none of them names experts")
    if "layer" not in found:
        return _one_layer(path, table, found, ignored)
    if ignored:
        _LOG.warning(
            "%s: the columns %s (%d values each) are no part of a routing trace and are not kept",
            path,
            brief(", ".join(ignored)),
            len(table),
        )
    return _columns(path, table, found)


def read_layers(folder: Path) -> tuple[dict[str, np.ndarray], np.ndarray | None]:
    """Read a folder with a table for each MoE layer, ``layer_02.parquet`` and so on, a row each token: its experts by layer, and their
    weights ``[tokens, layers, k]`` where all tables have them.

    Raises
    ------
    TraceFormatError
    """
    files = {m[1]: path for path in sorted(folder.iterdir()) if (m := _LAYER_FILE.fullmatch(path.name))}
    if not files:
        raise TraceFormatError(f"{folder} is a folder without files such as layer_02.parquet; expected a trace")
    arrays, weights = {}, []
    for layer, path in files.items():
        table = _table(path)
        found, _ = columns_of(table.column_names, str(path))
        if "experts" not in found:
            raise TraceFormatError(
                f"{path} has the columns {brief(table.column_names)}, and none of them names experts"
            )
        count, ids = _lists(path, table[found["experts"]], np.int64)
        arrays[f"layer.{int(layer)}"] = _even(path, count, ids)
        if "weights" in found:
            weights.append(_even(path, *_lists(path, table[found["weights"]], np.float32)))
    same = len(weights) == len(arrays) and len({w.shape for w in weights}) == 1
    if weights and not same:
        _LOG.warning("%s: %d of %d layers have weights of one shape; none is kept", folder, len(weights), len(arrays))
    return arrays, np.stack(
        [w for _, w in sorted(zip(map(int, files), weights, strict=True), key=lambda p: p[0])], 1
    ) if same else None


def _table(path: Path) -> Any:
    if not path.is_file():
        raise FileNotFoundError(f"no routing trace at {path}")
    if importlib.util.find_spec("pyarrow") is None:
        raise TraceFormatError(f"{path}: Parquet is read with pyarrow: pip install 'moecache[tables]'")
    import pyarrow
    from pyarrow import parquet

    try:
        return parquet.read_table(path, memory_map=False)
    except (pyarrow.ArrowException, OSError, ValueError) as error:
        raise TraceFormatError(f"{path} is no whole Parquet file ({brief(error, 200)})") from error


def _one_layer(path: Path, table: Any, found: Mapping[str, str], ignored: Sequence[str]) -> Columns:
    # A table of one layer, a row each token, as its file's name may say.
    if "experts" not in found:
        raise TraceFormatError(f"{path}: a record for each expert needs a column layer")
    import pyarrow

    number = _LAYER_FILE.fullmatch(path.name)
    layer = pyarrow.array(np.full(len(table), int(number[1]) if number else 0))
    token = pyarrow.array(np.arange(len(table)))
    if ignored:
        _LOG.warning(
            "%s: the columns %s are no part of a routing trace and are not kept", path, brief(", ".join(ignored))
        )
    table = table.append_column("\0layer", layer)
    more = {"layer": "\0layer"}
    if "token" not in found:
        table, more = table.append_column("\0token", token), {**more, "token": "\0token"}
    return _columns(path, table, {**found, **more})


def _columns(path: Path, table: Any, found: Mapping[str, str]) -> Columns:
    n = len(table)
    numbers = {
        field: _numbers(path, field, table[found[name]]) if name in found else np.full(n, NONE, np.int64)
        for field, name in (("token", "token"), ("layer", "layer"), ("step", "pass"), ("token_id", "token_id"))
    }
    names: list[str | int] = [0]
    request = np.zeros(n, np.int64)
    if "request" in found:
        request, names = _names(path, table[found["request"]])
    single = "expert" in found
    ids_of = table[found["expert" if single else "experts"]]
    count, ids = _lists(path, ids_of, np.int64)
    if ids.size and not -1 <= ids.min() <= ids.max() <= LARGEST_ID:
        raise TraceFormatError(
            f"{path}: experts {ids.min()}..{ids.max()} are out of range; expected -1 (none) to {LARGEST_ID}"
        )
    weighed = found.get("weight" if single else "weights")
    weights = None
    if weighed is not None:
        counts, weights = _lists(path, table[weighed], np.float32)
        if (counts != count).any():
            raise TraceFormatError(f"{path}, row {int(np.argmax(counts != count)) + 1}: not as many weights as experts")
    said = found.get("decode") or found.get("phase")
    return Columns(
        line=np.arange(1, n + 1),
        request=request,
        **numbers,
        decode=np.full(n, NONE, np.int64) if said is None else _flags(path, table[said]),
        count=count,
        ids=ids,
        weights=weights,
        names=names,
        single=single,
        metadata=_metadata(table),
    )


def _numbers(path: Path, field: str, column: Any) -> np.ndarray:
    if column.null_count:
        raise TraceFormatError(f"{path}: {column.null_count:,} records say no {field}")
    found = column.to_numpy()
    if found.dtype.kind not in "iu" or (found.size and int(found.min()) < 0):
        raise TraceFormatError(f"{path}: {field} is {column.type}; expected whole numbers that are not negative")
    return np.asarray(found, np.int64)


def _names(path: Path, column: Any) -> tuple[np.ndarray, list[str | int]]:
    # A number for each request in order of first appearance, and their names.
    if column.null_count:
        raise TraceFormatError(f"{path}: {column.null_count:,} records name no request")
    coded = column.combine_chunks().dictionary_encode()
    names = [name if isinstance(name, int) else str(name) for name in coded.dictionary.to_pylist()]
    return np.asarray(coded.indices.to_numpy(), np.int64), names


def _flags(path: Path, column: Any) -> np.ndarray:
    coded = column.combine_chunks().dictionary_encode()
    try:
        of_name = np.array([flag(value) for value in coded.dictionary.to_pylist()] or [0], np.int64)
    except ValueError as error:
        raise TraceFormatError(f"{path}: {error}") from error
    if column.null_count:
        raise TraceFormatError(f"{path}: {column.null_count:,} records do not say whether they are of a prompt")
    return np.asarray(of_name[coded.indices.to_numpy()])


def _lists(path: Path, column: Any, dtype: Any) -> tuple[np.ndarray, np.ndarray]:
    # How many values each row has, and all values.
    import pyarrow
    from pyarrow import compute

    kind = column.type
    if column.null_count:
        raise TraceFormatError(f"{path}: {column.null_count:,} records name no experts")
    if pyarrow.types.is_string(kind) or pyarrow.types.is_large_string(kind):
        plain = compute.utf8_trim(compute.replace_substring_regex(column, r"[\[\](),;]", " "), " ")
        column = compute.utf8_split_whitespace(plain)
        kind = column.type
    try:
        if not any(
            is_list(kind)
            for is_list in (pyarrow.types.is_list, pyarrow.types.is_large_list, pyarrow.types.is_fixed_size_list)
        ):
            return np.ones(len(column), np.int64), np.asarray(
                column.cast(pyarrow.from_numpy_dtype(dtype)).to_numpy(), dtype
            )
        count = compute.list_value_length(column).to_numpy()
        values = compute.list_flatten(column).cast(pyarrow.from_numpy_dtype(dtype))
    except (pyarrow.ArrowException, ValueError) as error:
        raise TraceFormatError(f"{path}: {brief(error)}; expected lists of numbers") from error
    if values.null_count:
        raise TraceFormatError(f"{path}: {values.null_count:,} experts of lists are missing")
    return np.asarray(count, np.int64), np.asarray(values.to_numpy(), dtype)


def _even(path: Path, count: np.ndarray, values: np.ndarray) -> np.ndarray:
    if not len(count) or (count != count[0]).any():
        raise TraceFormatError(
            f"{path}: rows of {count.min(initial=0)} to {count.max(initial=0)} experts; expected as many each"
        )
    return values.reshape(len(count), -1)


def _metadata(table: Any) -> dict[str, str]:
    # Strings of the table's schema, but for those of pandas and pyarrow.
    found = {}
    for key, value in (table.schema.metadata or {}).items():
        if key not in (b"pandas", b"ARROW:schema"):
            found[key.decode("utf-8", "backslashreplace")] = value.decode("utf-8", "backslashreplace")
    return found
