"""What the experts of one layer are made of: runs of bytes, in tensors in memory or in the files of a checkpoint."""

from __future__ import annotations

import bisect
import math
import os
import re
import sys
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch

from .checkpoint import CheckpointIndex, TensorExtent, short
from .errors import CheckpointError
from .layout import LayerSource, PackedSource
from .packed.format import Part
from .packed.recipe import Recipe
from .stamp import Stamp

__all__ = [
    "Adopted",
    "PackedPiece",
    "ParamSpec",
    "Piece",
    "adopt_layer",
    "locate_layer",
    "mapped_files",
    "merge_adjacent",
]

# Their elements are parts of a byte, and torch does not say how they are packed.
_PARTS_OF_A_BYTE = re.compile(r"torch\.(u?int[1-7]|bits\d.*)")


class ParamSpec(NamedTuple):
    """Shape and dtype of one parameter of one expert."""

    shape: tuple[int, ...]
    dtype: torch.dtype

    @property
    def nbytes(self) -> int:
        return math.prod(self.shape) * self.dtype.itemsize


class Piece(NamedTuple):
    """A contiguous run of bytes of one parameter, for all experts of a layer."""

    file: np.ndarray  # int32 [E]: number of the file, -1 for host memory
    source: np.ndarray  # uint64 [E]: byte offset in the file, or host address
    owner: np.ndarray  # int32 [E]: number of the tensor whose memory it is, -1 for a file
    nbytes: int


class PackedPiece(NamedTuple):
    """A matrix of one parameter that is decoded, for all experts of a layer."""

    recipe: Recipe
    streams: tuple[Piece, ...]  # in the recipe's order
    nbytes: int  # decoded


class Adopted(NamedTuple):
    """One parameter of all experts of a layer, as it lies in memory."""

    spec: ParamSpec
    piece: Piece
    tensors: list[torch.Tensor]  # who own the memory: one for all experts, or one an expert
    copied_bytes: int


def adopt_layer(layer: Mapping[str, torch.Tensor | Sequence[torch.Tensor]], name: str) -> dict[str, Adopted]:
    """The parameters of a layer's experts, from tensors.

    Raises
    ------
    CheckpointError
        A tensor without plain bytes, experts that differ, parameters of different numbers of experts.
    """
    if not layer:
        raise CheckpointError(f"{name}: no expert parameters")
    adopted = {param: _adopt(value, f"{name}.{param}") for param, value in layer.items()}
    counts = {param: len(a.piece.file) for param, a in adopted.items()}
    if len(set(counts.values())) != 1 or not all(counts.values()):
        raise CheckpointError(f"{name}: every parameter must hold the same number of experts, one or more: {counts}")
    return adopted


def _adopt(value: torch.Tensor | Sequence[torch.Tensor], name: str) -> Adopted:
    if isinstance(value, torch.Tensor):
        _check_plain(value, name)
        if value.dim() == 0 or value.shape[0] == 0:
            raise CheckpointError(
                f"{name}: expected a tensor [E, *shape] with at least one expert, found {tuple(value.shape)}"
            )
        tensor, copied = _host_contiguous(value.detach(), rows=True)
        spec = ParamSpec(tuple(tensor.shape[1:]), tensor.dtype)
        rows = np.arange(tensor.shape[0], dtype=np.uint64) * np.uint64(tensor.stride(0) * tensor.dtype.itemsize)
        return Adopted(spec, _memory_piece(rows + np.uint64(tensor.data_ptr()), 1, spec, name), [tensor], copied)
    tensors, copied_bytes = [], 0
    for number, item in enumerate(value):
        _check_plain(item, f"{name}[{number}]")
        first = value[0]
        if item.shape != first.shape or item.dtype != first.dtype:
            raise CheckpointError(
                f"{name}[{number}]: shape {tuple(item.shape)}, {item.dtype}; "
                f"expected {tuple(first.shape)}, {first.dtype} as expert 0 of this layer"
            )
        tensor, copied = _host_contiguous(item.detach(), rows=False)
        tensors.append(tensor)
        copied_bytes += copied
    if not tensors:
        raise CheckpointError(f"{name}: an empty list of experts")
    spec = ParamSpec(tuple(tensors[0].shape), tensors[0].dtype)
    addresses = np.array([tensor.data_ptr() for tensor in tensors], dtype=np.uint64)
    return Adopted(spec, _memory_piece(addresses, len(tensors), spec, name), tensors, copied_bytes)


def mapped_files(tensors: Sequence[torch.Tensor]) -> dict[str, Stamp]:
    """The files whose private mappings the tensors lie in, as loaders leave them: memory that changes when they do."""
    spans: list[tuple[int, int, str, int]] = []
    try:
        lines = Path("/proc/self/maps").read_bytes().splitlines()
    except OSError:
        return {}
    for line in lines:
        fields = line.split(maxsplit=5)
        if len(fields) == 6 and fields[1].endswith(b"p") and fields[5].startswith(b"/"):
            start, stop = fields[0].split(b"-")
            spans.append((int(start, 16), int(stop, 16), os.fsdecode(fields[5]), int(fields[4])))
    spans.sort()
    found: dict[str, Stamp] = {}
    for tensor in tensors:
        at = bisect.bisect_right(spans, (tensor.data_ptr(), sys.maxsize)) - 1
        if at >= 0 and tensor.data_ptr() < spans[at][1]:
            _, _, path, inode = spans[at]
            with suppress(OSError):  # removed or replaced: the mapping keeps the bytes of the file that was
                stamp = Stamp.of(os.stat(path))
                if stamp.inode == inode:
                    found[path] = stamp
    return found


def _check_plain(tensor: torch.Tensor, name: str) -> None:
    """Refuse what is not elements of whole bytes that lie, as shape and strides say, inside a storage."""
    if not isinstance(tensor, torch.Tensor):
        raise CheckpointError(f"{name}: expected a tensor, found {type(tensor).__name__}")
    if tensor.device.type == "meta":
        raise CheckpointError(f"{name}: is on the meta device, it has no bytes; load it first, or use a disk bank")
    plain = type(tensor) in (torch.Tensor, torch.nn.Parameter, torch.nn.Buffer) and tensor.layout == torch.strided
    if not plain or tensor.is_nested or torch._C._functorch.is_functorch_wrapped_tensor(tensor):
        what = "nested tensor" if tensor.is_nested else type(tensor).__name__
        raise CheckpointError(
            f"{name}: a {what} of layout {tensor.layout} has no plain storage; expected a dense tensor"
        )
    if tensor.is_quantized or _PARTS_OF_A_BYTE.fullmatch(str(tensor.dtype)):
        raise CheckpointError(
            f"{name}: {tensor.dtype} is not elements of whole bytes; give its packed bytes as torch.uint8, and its scales as "
            "further parameters"
        )
    if tensor.numel() and tensor.device.type == "cpu":
        # What the storage holds decides, not what the tensor says: storages are resized, also under their tensors.
        last = tensor.storage_offset() + sum(
            (n - 1) * step for n, step in zip(tensor.shape, tensor.stride(), strict=True)
        )
        expected, held = (last + 1) * tensor.element_size(), tensor.untyped_storage().nbytes()
        if expected > held:
            raise CheckpointError(
                f"{name}: its storage holds {held} bytes, and shape {tuple(tensor.shape)} of {tensor.dtype} needs {expected}"
            )


def _host_contiguous(tensor: torch.Tensor, *, rows: bool) -> tuple[torch.Tensor, int]:
    """The tensor itself if its bytes can be read as they lie, or a contiguous copy in host memory, and its bytes."""
    first = tensor[0] if rows else tensor
    # Conjugation and negation are bits on the tensor, not in its bytes.
    if tensor.device.type == "cpu" and first.is_contiguous() and not (tensor.is_conj() or tensor.is_neg()):
        _fix_in_place(tensor)
        return tensor, 0
    copy = tensor.cpu().contiguous().resolve_conj().resolve_neg()
    return copy, copy.nbytes


def _fix_in_place(tensor: torch.Tensor) -> None:
    """Let nobody resize the storage any more: its address is what the bank knows of it."""
    # torch has no other way to say so than to hand the memory to numpy.
    torch.empty(0, dtype=torch.uint8, device="cpu").set_(tensor.untyped_storage()).numpy()


def _memory_piece(addresses: np.ndarray, owners: int, spec: ParamSpec, name: str) -> Piece:
    if spec.nbytes == 0:
        raise CheckpointError(f"{name}: an expert of shape {spec.shape} has no bytes")
    experts = len(addresses)
    owner = np.arange(experts, dtype=np.int32) if owners > 1 else np.zeros(experts, np.int32)
    return Piece(np.full(experts, -1, np.int32), addresses, owner, spec.nbytes)


def locate_layer(
    index: CheckpointIndex, source: LayerSource, layer_name: str
) -> dict[str, tuple[ParamSpec, list[Piece | PackedPiece]]]:
    """The parameters of a layer's experts, from the files of a checkpoint.

    Raises
    ------
    CheckpointError
        A tensor is missing or of a dtype that torch lacks, experts differ, pieces cannot be joined.
    """
    located = {param: _locate(index, pieces, f"{layer_name}.{param}") for param, pieces in source.items()}
    counts = {param: experts_of(pieces[0]) for param, (_, pieces) in located.items()}
    if len(set(counts.values())) != 1:
        raise CheckpointError(f"{layer_name}: parameters hold different numbers of experts: {counts}")
    return located


def experts_of(piece: Piece | PackedPiece) -> int:
    """How many experts have it."""
    return len(piece.streams[0].file if isinstance(piece, PackedPiece) else piece.file)


def _locate(
    index: CheckpointIndex, source: Sequence[str | Sequence[str] | PackedSource], param: str
) -> tuple[ParamSpec, list[Piece | PackedPiece]]:
    """One parameter's spec and pieces; pieces are joined along dim 0 of the expert."""
    specs: list[ParamSpec] = []
    pieces: list[Piece | PackedPiece] = []
    for names in source:
        spec, piece = (
            _locate_packed(index, names, param, alone=len(source) == 1)
            if isinstance(names, PackedSource)
            else _locate_plain(index, names, param)
        )
        specs.append(spec)
        pieces.append(piece)
    if len({experts_of(piece) for piece in pieces}) != 1:
        raise CheckpointError(f"{param}: pieces of {[experts_of(piece) for piece in pieces]} experts cannot be joined")
    return _joined_spec(specs, source, param), pieces


def _locate_plain(index: CheckpointIndex, names: str | Sequence[str], param: str) -> tuple[ParamSpec, Piece]:
    shape, piece = _run(index, names, param)
    return ParamSpec(shape, index.dtype_of(_first(names))), piece


def _locate_packed(
    index: CheckpointIndex, source: PackedSource, param: str, *, alone: bool
) -> tuple[ParamSpec, PackedPiece]:
    suffixes = [suffix for suffix in source.format.suffixes if suffix in source.streams]
    runs = {suffix: _run(index, source.streams[suffix], param) for suffix in suffixes}
    experts = [len(piece.file) for _, piece in runs.values()]
    values = short(_first(source.streams[suffixes[0]]))
    missing = [s for s in source.format.suffixes if s not in source.streams and s not in source.format.optional]
    if missing or len(set(experts)) != 1:
        lacks = f"have no tensors ending in {', '.join(missing)}" if missing else f"are of {experts} experts"
        raise CheckpointError(f"{param}: the {source.format.name} streams of {values} {lacks}")
    parts = {
        suffix: Part(shape, index.lookup(_first(source.streams[suffix])).dtype_name)
        for suffix, (shape, _) in runs.items()
    }
    try:
        made = source.format.decoded(parts, source.dtype)
    except CheckpointError as error:
        raise CheckpointError(f"{param}: {values}: {error}") from error
    spec, recipe = ParamSpec(made.shape, source.dtype), made.recipe
    streams = tuple(piece for _, piece in runs.values())
    found, expected = [s.nbytes for s in streams], [recipe.nbytes(k) for k in range(len(recipe.streams))]
    if found != expected or (made.by_columns and not alone):
        what = f"streams of {found} bytes; expected {expected}" if alone else "decoded by columns, it cannot be joined"
        raise CheckpointError(f"{param}: {values}, packed as {source.format.name}: {what}")
    return spec, PackedPiece(recipe, streams, spec.nbytes)


def _first(names: str | Sequence[str]) -> str:
    return names if isinstance(names, str) else next(iter(names), "")


def _run(index: CheckpointIndex, names: str | Sequence[str], param: str) -> tuple[tuple[int, ...], Piece]:
    """Shape of one expert's tensor, and where it lies for each expert."""
    stacked = isinstance(names, str)
    names_of = [names] if isinstance(names, str) else list(names)
    extents = [index.lookup(name) for name in names_of]
    if not extents or extents[0].nbytes == 0 or (stacked and not extents[0].shape):
        raise CheckpointError(f"{param}: tensor {short(names_of[0]) if names_of else ''} holds no expert bytes")
    first = extents[0]
    if stacked:
        nbytes = first.nbytes // first.shape[0]
        source = np.uint64(first.offset) + np.arange(first.shape[0], dtype=np.uint64) * np.uint64(nbytes)
        files = np.full(first.shape[0], first.file, np.int32)
    else:
        nbytes = first.nbytes
        _check_equal(index, names_of, extents)
        source = np.array([extent.offset for extent in extents], np.uint64)
        files = np.array([extent.file for extent in extents], np.int32)
    shape = first.shape[1:] if stacked else first.shape
    return shape, Piece(files, source, np.full(len(files), -1, np.int32), nbytes)


def _joined_spec(
    specs: Sequence[ParamSpec], source: Sequence[str | Sequence[str] | PackedSource], param: str
) -> ParamSpec:
    first = specs[0]
    if len(specs) == 1:
        return first
    for spec, piece in zip(specs, source, strict=True):
        if not spec.shape or spec.shape[1:] != first.shape[1:] or spec.dtype != first.dtype:
            name = _first(next(iter(piece.streams.values())) if isinstance(piece, PackedSource) else piece)
            raise CheckpointError(
                f"{param}: tensor {short(name)} of {spec.shape}, {spec.dtype} cannot be joined along dim 0 to "
                f"{first.shape}, {first.dtype}"
            )
    return ParamSpec((sum(spec.shape[0] for spec in specs), *first.shape[1:]), first.dtype)


def _check_equal(index: CheckpointIndex, names: Sequence[str], extents: Sequence[TensorExtent]) -> None:
    first = extents[0]
    for name, extent in zip(names, extents, strict=True):
        if extent.shape != first.shape or extent.dtype_name != first.dtype_name:
            raise CheckpointError(
                f"{index.files[extent.file]}: tensor {short(name)} has shape {extent.shape}, {extent.dtype_name}; expected "
                f"{first.shape}, {first.dtype_name} as {short(names[0])} of the same layer"
            )


def merge_adjacent(pieces: Sequence[Piece | PackedPiece]) -> list[Piece | PackedPiece]:
    """Join pieces that follow each other in the file for every expert (gate and up often do): fewer, longer reads."""
    merged = [pieces[0]]
    for piece in pieces[1:]:
        last = merged[-1]
        if isinstance(last, Piece) and isinstance(piece, Piece) and _follows(last, piece):
            merged[-1] = last._replace(nbytes=last.nbytes + piece.nbytes)
        else:
            merged.append(piece)
    return merged


def _follows(last: Piece, piece: Piece) -> bool:
    if not np.array_equal(last.file, piece.file) or not (last.file >= 0).all():
        return False
    return np.array_equal(last.source + np.uint64(last.nbytes), piece.source)


def segments_of(
    layers: Sequence[Mapping[str, Sequence[Piece | PackedPiece]]], regions: Sequence[Mapping[str, int]]
) -> dict[str, Any]:
    """The fields of :class:`moecache._engine.Sources` that say of every expert, layer after layer, what it consists of.

    Parameters
    ----------
    layers : sequence of mappings of parameter name to its pieces
    regions : sequence of mappings of parameter name to int
        Where in a slot the engine writes each parameter.
    """
    recipes: dict[Recipe, int] = {}
    columns: list[list[np.ndarray]] = []
    counts = []
    for params, region in zip(layers, regions, strict=True):
        runs: list[Piece] = []
        rows: list[tuple[int, int, int, int]] = []  # of each run: bytes, region, place there, recipe
        for param, pieces in params.items():
            position = 0
            for piece in pieces:
                if isinstance(piece, PackedPiece):
                    first = recipes.setdefault(piece.recipe, len(recipes))
                    rows += [
                        (run.nbytes, region[param], position, -2 if k else first) for k, run in enumerate(piece.streams)
                    ]
                    runs += piece.streams
                else:
                    rows.append((piece.nbytes, region[param], position, -1))
                    runs.append(piece)
                position += piece.nbytes
        experts = len(runs[0].file)
        each = [np.stack([run[field] for run in runs], axis=1).ravel() for field in range(3)]  # file, source, owner
        columns.append([*each, *np.tile(np.array(rows, np.int64), (experts, 1)).T])
        counts.append(np.full(experts, len(rows), dtype=np.int64))
    names = ("file", "source", "tensor", "nbytes", "region", "offset", "recipe")
    types = (np.int32, np.uint64, np.int32, np.int64, np.int32, np.int64, np.int32)
    joined = [np.concatenate(column) for column in zip(*columns, strict=True)]
    fields = {f"segment_{name}": a.astype(t) for name, a, t in zip(names, joined, types, strict=True)}
    start = np.concatenate([[0], np.cumsum(np.concatenate(counts))]).astype(np.int64)
    return {"segment_start": start, "recipes": tuple(recipes), **fields}
