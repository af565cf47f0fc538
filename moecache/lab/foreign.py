"""What others call the columns of their routing records, and their numpy archives."""

from __future__ import annotations

import math
import zipfile
import zlib
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import numpy as np

from ..errors import TraceFormatError
from ..tensorfile import brief
from ..trace import Trace, name_of

__all__ = ["FIELDS", "MOST_PACKED", "columns_of", "other_names", "read_npz"]

FIELDS: dict[str, tuple[str, ...]] = {
    "layer": ("layer", "layer_id", "layer_idx", "layer_index", "moe_layer", "moe_layer_id"),
    "token": ("token", "token_idx", "token_index", "token_pos", "position", "pos"),
    "experts": ("experts", "expert_ids", "topk_ids", "topk_idx", "topk_indices", "selected_experts", "routed_experts"),
    "expert": ("expert", "expert_id", "expert_idx", "expert_index"),
    "request": ("request", "request_id", "req_id", "req", "rid", "request_idx", "sequence", "seq_id", "prompt_id"),
    "decode": ("decode", "is_decode"),
    "phase": ("phase", "stage"),
}
"""What a record says, and the names it goes by."""

_NAMES = {name: field for field, names in FIELDS.items() for name in names}

MOST_PACKED = 200
"""A packed file is accepted that unfolds to so many times its size, and a megabyte."""


def columns_of(names: Iterable[object], where: str) -> tuple[dict[str, str], list[str]]:
    """Which columns hold what, and those that say nothing a trace keeps.

    Parameters
    ----------
    names : iterable of str
        The columns' own names; capitals do not matter.
    where : str
        For messages.

    Raises
    ------
    TraceFormatError
        Two columns for the same, or one that holds counts instead of tokens.
    """
    found: dict[str, str] = {}
    ignored: list[str] = []
    for name in map(str, names):
        field = _NAMES.get(name.strip().lower())
        if field is None:
            ignored.append(name)
        elif field in found:
            raise TraceFormatError(f"{where}: the columns {brief(found[field])} and {brief(name)} both say the {field}")
        else:
            found[field] = name
    lowered = {name.strip().lower() for name in ignored}
    if "token" not in found and lowered & {"count", "counts", "frequency"}:
        raise TraceFormatError(
            f"{where}: a table of counts has no order of tokens to replay; as layer,expert,count it seeds a history "
            "(moecache replay TRACE --history COUNTS.csv)"
        )
    if "token" not in found and "token_id" in lowered:
        raise TraceFormatError(
            f"{where}: token_id may be a token's number in the text or in the vocabulary; name the column token if it is "
            "its place in the text, and leave it out if not"
        )
    if "experts" in found and "expert" in found:
        raise TraceFormatError(
            f"{where}: the columns {brief(found['experts'])} and {brief(found['expert'])} both name experts"
        )
    return found, ignored


def other_names() -> str:
    """For messages: what the columns of a record may be called besides."""
    return "; ".join(f"{field}: {', '.join(names[1:])}" for field, names in FIELDS.items() if len(names) > 1)


def read_npz(path: Path, num_experts: int | None = None) -> Trace:
    """A numpy archive: ``experts`` (or one of its other names) ``[tokens, layers, k]``, and perhaps ``request``, ``decode``, ``forward``,
    ``counted``, ``weights``, ``token``, ``request_group``, ``num_experts``. Nothing pickled is read.

    Raises
    ------
    TraceFormatError, FileNotFoundError
    """
    if not path.is_file():
        raise FileNotFoundError(f"no routing trace at {path}")
    try:
        arrays = _arrays(path)
    except (
        OSError,
        ValueError,
        EOFError,
        KeyError,
        NotImplementedError,
        RuntimeError,
        zipfile.BadZipFile,
        zlib.error,
    ) as error:
        raise TraceFormatError(f"{path} is no numpy archive of plain arrays ({brief(error, 200)})") from error
    names = [name for name in FIELDS["experts"] if name in arrays]
    if len(names) != 1 or arrays[names[0]].ndim != 3:
        shapes = ", ".join(f"{name} {array.dtype} {array.shape}" for name, array in arrays.items())
        raise TraceFormatError(f"{path}: expected an array experts [tokens, layers, k], found {brief(shapes, 200)}")
    experts = arrays.pop(names[0])
    tokens: int = len(experts)
    per_layer = _per_layer(path, arrays.pop("num_experts", None), num_experts, experts)
    fields: dict[str, Any] = {"request": np.zeros(tokens, np.int32), "decode": np.ones(tokens, np.uint8)}
    for name in ("request", "decode", "forward", "counted", "weights", "token", "request_group"):
        if name in arrays:
            fields[name] = arrays.pop(name)
    if arrays:
        raise TraceFormatError(
            f"{path}: its arrays {brief(', '.join(arrays))} are no part of a routing trace; leave them out"
        )
    name = name_of(path)
    return Trace(name=name, experts=experts, num_experts=per_layer, metadata={"model": name}, **fields)


def _per_layer(path: Path, stated: np.ndarray | None, given: int | None, experts: np.ndarray) -> tuple[int, ...]:
    layers = int(experts.shape[1])
    if stated is None:
        return (given or max(int(experts.max(initial=0)) + 1, 1),) * layers
    if stated.dtype.kind not in "iu" or stated.size not in (1, layers):
        raise TraceFormatError(
            f"{path}: num_experts is {stated.dtype} {stated.shape}; expected 1 or {layers} whole numbers"
        )
    return tuple(map(int, np.broadcast_to(stated.reshape(-1), (layers,))))


def _arrays(path: Path) -> dict[str, np.ndarray]:
    found: dict[str, np.ndarray] = {}
    with zipfile.ZipFile(path) as archive:
        limit = MOST_PACKED * path.stat().st_size + (1 << 20)
        if sum(info.file_size for info in archive.infolist()) > limit:
            raise ValueError(f"it unfolds to more than {MOST_PACKED} times its size")
        for info in archive.infolist():
            name = info.filename.removesuffix(".npy")
            if name in found:
                raise ValueError(f"two arrays {brief(name)}")
            with archive.open(info) as file:
                found[name] = _array(file, info.file_size, brief(name))
    return found


def _array(file: Any, size: int, name: str) -> np.ndarray:
    # As np.load would, but what the header promises is held against the bytes there are before memory is allocated.
    version = np.lib.format.read_magic(file)
    if version not in ((1, 0), (2, 0)):
        raise ValueError(f"{name} is of version {version}; expected 1.0 or 2.0")
    read_header = np.lib.format.read_array_header_1_0 if version == (1, 0) else np.lib.format.read_array_header_2_0
    try:
        shape, fortran, dtype = read_header(file)
    except (SyntaxError, TypeError, MemoryError, RecursionError) as error:
        raise ValueError(f"{name}: {error}") from error
    if dtype.hasobject or dtype.kind not in "iufb":
        raise ValueError(f"{name} holds {dtype}; expected plain numbers")
    data = file.read(size)
    if min(shape, default=0) < 0 or len(data) != math.prod(shape) * dtype.itemsize:
        raise ValueError(f"{name}: {len(data)} bytes for {dtype} {shape}")
    array = np.frombuffer(data, dtype).reshape(shape[::-1] if fortran else shape)
    return array.T if fortran else array
