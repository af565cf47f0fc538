"""Traces as plain arrays: numpy files and archives, tensors as torch and safetensors keep them, one array for all layers, one for each
layer, or one for each request."""

from __future__ import annotations

import base64
import binascii
import io
import logging
import math
import pickle
import re
import zipfile
import zlib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from ..errors import TraceFormatError
from ..tensorfile import brief, read_tensors
from ..trace import Trace, name_of
from .fields import named
from .packed import MOST_PACKED, PACKED, open_bytes

__all__ = ["decoded_ids", "read_arrays", "trace_of"]

_LOG = logging.getLogger("moecache")
_OWN = ("request", "decode", "forward", "counted", "weights", "token", "request_group")
_LAYER = re.compile(r"(?:^|[^0-9a-z])(?:layers?|moe|mlp|router|block|blk)?[._\-\[/ ]*(\d+)(?![0-9])")
_MAGIC = b"\x93NUMPY"


def read_arrays(
    path: Path,
    num_experts: int | None = None,
    request_tokens: int | None = None,
    mapping: Mapping[str, str] | None = None,
) -> Trace:
    """Read ``.npy`` (perhaps packed), ``.npz``, ``.pt`` or ``.safetensors``. Nothing pickled is run.

    What the arrays are is told by their names and shapes: see :func:`trace_of`.

    Raises
    ------
    TraceFormatError, FileNotFoundError
    """
    if not path.is_file():
        raise FileNotFoundError(f"no routing trace at {path}")
    suffix = (Path(path.stem) if path.suffix.lower() in PACKED else path).suffix.lower()
    try:
        if suffix == ".npy":
            with open_bytes(path) as file:
                data = file.read()
            arrays = {"experts": _array(io.BytesIO(data), len(data), path.name)}
        elif suffix == ".npz":
            arrays = _archive(path)
        elif suffix == ".safetensors":
            arrays = read_tensors(path, "routing trace", TraceFormatError)[1]
        else:
            arrays = _tensors(path)
    except TraceFormatError:
        raise
    except (
        OSError,
        ValueError,
        EOFError,
        KeyError,
        NotImplementedError,
        RuntimeError,
        pickle.UnpicklingError,
        zipfile.BadZipFile,
        zlib.error,
    ) as error:
        raise TraceFormatError(f"{path} is no file of plain arrays ({brief(error, 200)})") from error
    return trace_of(path, arrays, num_experts, request_tokens, mapping)


def trace_of(
    path: Path,
    arrays: dict[str, np.ndarray],
    num_experts: int | None = None,
    request_tokens: int | None = None,
    mapping: Mapping[str, str] | None = None,
) -> Trace:
    """A trace of arrays by name.

    Parameters
    ----------
    path : path
        For messages, and for the trace's name.
    arrays : dict of str to array
        One of: ``experts`` (or another of its names) ``[tokens, layers, k]`` and perhaps ``request``, ``decode``, ``forward``, ``counted``,
        ``weights``, ``token``, ``request_group``, ``num_experts``; an array ``[tokens, k]`` (ids) or ``[tokens, experts]`` (bool: a routing
        map) for each layer, its number in the name; an array ``[tokens, layers, k]`` for each request.
    num_experts : int, optional
        Of a layer, where no array says.
    request_tokens : int, optional
        Where no request is named, begin one every so many tokens.
    mapping : mapping of str to str, optional
        Names by field (``experts``, ``request``, ``weights``), where they are others.

    Raises
    ------
    TraceFormatError
    """
    name = name_of(path)
    metadata = {"model": name}
    whole = [n for n in named("experts", list(arrays), mapping) if arrays[n].ndim == 3]
    fields: dict[str, Any] = {}
    if len(whole) == 1:
        experts = arrays.pop(whole[0])
        fields = _beside(path, arrays, mapping)
        stated = arrays.pop("num_experts", None)
        if arrays:
            raise TraceFormatError(
                f"{path}: its arrays {brief(', '.join(arrays))} are no part of a routing trace; leave them out"
            )
    elif arrays and all(a.ndim == 3 and a.shape[1:] == next(iter(arrays.values())).shape[1:] for a in arrays.values()):
        stated, experts = None, np.concatenate(list(arrays.values()))
        fields["request"] = np.repeat(np.arange(len(arrays)), [len(a) for a in arrays.values()])
    else:
        stated, (experts, layers) = None, _by_layer(path, arrays)
        if layers != list(range(len(layers))):
            metadata["moe_layers"] = str(layers)
    tokens = len(experts)
    fields.setdefault("request", np.arange(tokens) // (request_tokens or max(tokens, 1)))
    fields.setdefault("decode", np.ones(tokens, np.uint8))
    per_layer = _per_layer(path, stated, num_experts, experts)
    return Trace(name=name, experts=experts, num_experts=per_layer, metadata=metadata, **fields)


def decoded_ids(text: str, metadata: Mapping[str, str]) -> list[Any]:
    """Nested lists of a request's experts in base64: a ``.npy`` file, or int32 of ``num_layers`` and ``top_k`` as metadata say.

    Raises
    ------
    ValueError
    """
    try:
        data = base64.b64decode(text, validate=True)
    except binascii.Error as error:
        raise ValueError(f"experts {brief(text)} are neither a list nor base64") from error
    if data.startswith(_MAGIC):
        array = _array(io.BytesIO(data), len(data), "experts")
    else:
        try:
            shape = -1, int(metadata["num_layers"]), int(metadata["top_k"])
            array = np.frombuffer(data, "<i4").reshape(shape)
        except (KeyError, ValueError) as error:
            raise ValueError(
                "experts in base64 are no .npy file; a first line must say num_layers and top_k of their int32 numbers"
            ) from error
    if array.ndim != 3 or array.dtype.kind not in "iu":
        raise ValueError(f"experts in base64 are {array.dtype} {array.shape}; expected integers [tokens, layers, k]")
    found: list[Any] = array.tolist()
    return found


def _beside(path: Path, arrays: dict[str, np.ndarray], mapping: Mapping[str, str] | None) -> dict[str, Any]:
    # What else a trace holds, taken out of the arrays.
    fields: dict[str, Any] = {}
    for field in _OWN:
        known = {"forward": "pass", "token": "token_id"}.get(field, field)
        names = (
            [field]
            if field in arrays
            else named(known, list(arrays), mapping)
            if known in ("request", "weights", "pass", "token_id")
            else []
        )
        if len(names) > 1:
            raise TraceFormatError(f"{path}: the arrays {brief(', '.join(names))} all say the {field}")
        if names:
            fields[field] = arrays.pop(names[0])
    if "weights" in fields:
        fields["weights"] = np.asarray(fields["weights"], np.float32)
    return fields


def _by_layer(path: Path, arrays: Mapping[str, np.ndarray]) -> tuple[np.ndarray, list[int]]:
    # [tokens, layers, k] and the layers' numbers, from an array for each.
    found: dict[int, np.ndarray] = {}
    unread = []
    for name, array in arrays.items():
        number = _LAYER.search(name.lower())
        if number is None or array.ndim != 2 or array.dtype.kind not in "iub" or len(number[1]) > 6:
            unread.append(name)
        elif int(number[1]) in found:
            raise TraceFormatError(f"{path}: two arrays are of layer {number[1]}, one of them {brief(name)}")
        else:
            found[int(number[1])] = _ids_of_map(path, array) if array.dtype.kind == "b" else array
    shapes = ", ".join(f"{name} {array.dtype} {array.shape}" for name, array in arrays.items())
    if not found or len({len(array) for array in found.values()}) > 1:
        raise TraceFormatError(
            f"{path}: expected an array experts [tokens, layers, k], one [tokens, k] for each layer with its number in the name, or one "
            f"[tokens, layers, k] for each request; found {brief(shapes, 200)}"
        )
    if unread:
        _LOG.warning(
            "%s: %d arrays are no part of a routing trace and are not kept: %s",
            path,
            len(unread),
            brief(", ".join(unread)),
        )
    k = max(array.shape[1] for array in found.values())
    layers = sorted(found)
    experts = np.full((len(found[layers[0]]), len(layers), k), -1, np.int64)
    for place, layer in enumerate(layers):
        experts[:, place, : found[layer].shape[1]] = found[layer]
    return experts, layers


def _ids_of_map(path: Path, used: np.ndarray) -> np.ndarray:
    # [tokens, k] of a routing map [tokens, experts], the lowest ids first.
    width = used.sum(1)
    if not width.max(initial=0):
        raise TraceFormatError(f"{path}: a routing map without any expert")
    ids = np.full((len(used), int(width.max())), -1, np.int64)
    token, expert = np.nonzero(used)
    ids[token, np.arange(len(token)) - np.repeat(np.cumsum(width) - width, width)] = expert
    return ids


def _per_layer(path: Path, stated: np.ndarray | None, given: int | None, experts: np.ndarray) -> tuple[int, ...]:
    layers = int(experts.shape[1])
    if stated is None:
        return (given or max(int(experts.max(initial=0)) + 1, 1),) * layers
    if stated.dtype.kind not in "iu" or stated.size not in (1, layers):
        raise TraceFormatError(
            f"{path}: num_experts is {stated.dtype} {stated.shape}; expected 1 or {layers} whole numbers"
        )
    return tuple(map(int, np.broadcast_to(stated.reshape(-1), (layers,))))


def _tensors(path: Path) -> dict[str, np.ndarray]:
    # What torch.save wrote: a tensor, a list of one for each layer, or a dict of either. Only tensors are unpickled.
    import torch

    if path.stat().st_size == 0:
        raise ValueError("an empty file")
    return _named_tensors(torch.load(path, map_location="cpu", weights_only=True))


def _named_tensors(content: Any) -> dict[str, np.ndarray]:
    import torch

    if isinstance(content, torch.Tensor):
        return {"experts": content.numpy()}
    if isinstance(content, Sequence) and not isinstance(content, str):
        content = {f"layer.{n}": part for n, part in enumerate(content)}
    if not isinstance(content, Mapping):
        raise ValueError(f"a {type(content).__name__}; expected tensors")
    arrays = {}
    for name, part in content.items():
        if isinstance(part, (list, tuple)) and part and all(isinstance(x, torch.Tensor) for x in part):
            part = torch.cat(list(part))  # one tensor for each micro-batch
        if not isinstance(part, torch.Tensor):
            raise ValueError(f"{brief(name)} is a {type(part).__name__}; expected tensors")
        arrays[f"layer.{name}" if isinstance(name, int) else str(name)] = part.to(
            torch.float32 if part.is_floating_point() else part.dtype
        ).numpy()
    return arrays


def _archive(path: Path) -> dict[str, np.ndarray]:
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
