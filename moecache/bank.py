"""The bank: where every expert's bytes lie when they are not on the device.

Either tensors in host memory, adopted and not copied, or extents of a checkpoint's own safetensors files.
"""

from __future__ import annotations

import ctypes
import os
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Literal, NamedTuple

import numpy as np
import torch

from .checkpoint import PRESETS, CheckpointIndex, LayerSource, Layout, TensorExtent, element_count, read_exactly
from .errors import CheckpointError, ClosedError

if TYPE_CHECKING:
    from types import TracebackType

    from ._engine import Sources
    from .cuda import PageLock

__all__ = ["PRESETS", "ExpertBank", "Layout", "ParamSpec"]


class ParamSpec(NamedTuple):
    """Shape and dtype of one parameter of one expert."""

    shape: tuple[int, ...]
    dtype: torch.dtype

    @property
    def nbytes(self) -> int:
        return element_count(self.shape) * self.dtype.itemsize


class Piece(NamedTuple):
    """A contiguous run of bytes of one parameter, for all experts of a layer."""

    file: np.ndarray  # int32 [E]: number of the file, -1 for host memory
    source: np.ndarray  # uint64 [E]: byte offset in the file, or host address
    nbytes: int


class ExpertBank:
    """All experts of a model, off the device.

    Made by :meth:`from_tensors` or :meth:`from_safetensors`; a context manager.

    Attributes
    ----------
    num_experts : tuple of int
        Experts of each MoE layer; layers may differ.
    layer_names : tuple of str
    kinds : tuple of dict of str to ParamSpec
        The distinct sets of expert parameters; layers with equal ones share a kind.
    layer_kind : tuple of int
        Each layer's place in ``kinds``.
    location : {"ram", "disk"}
    copied_bytes : int
        Bytes that had to be copied once because a tensor was not contiguous or not in host memory.
    """

    def __init__(
        self,
        specs: Sequence[Mapping[str, ParamSpec]],
        pieces: Sequence[Mapping[str, Sequence[Piece]]],
        names: Sequence[str],
        *,
        location: Literal["ram", "disk"],
        index: CheckpointIndex | None = None,
        tensors: Sequence[torch.Tensor] = (),
        copied_bytes: int = 0,
    ) -> None:
        self.layer_names = tuple(names)
        self.num_experts = tuple(len(next(iter(layer.values()))[0].file) for layer in pieces)
        self.kinds, self.layer_kind = _kinds(specs)
        self.location = location
        self.copied_bytes = copied_bytes
        self._pieces = [{name: _merge_adjacent(runs) for name, runs in layer.items()} for layer in pieces]
        self._index = index
        self._tensors = list(tensors)
        self._closed = False
        self.page_lock: PageLock | None = None  # kept here because all caches over the bank share it

    @classmethod
    def from_tensors(
        cls,
        layers: Sequence[Mapping[str, torch.Tensor | Sequence[torch.Tensor]]],
        *,
        names: Sequence[str] | None = None,
    ) -> ExpertBank:
        """Adopt tensors that are already in memory; the bank holds references, not copies.

        Parameters
        ----------
        layers : sequence of mappings
            For each MoE layer its expert parameters: a tensor ``[E, *shape]``, or a list of E tensors ``[*shape]``.
            Any dtype: bytes are only moved. A tensor whose experts are not contiguous, or that is on another
            device, is copied once (``copied_bytes``).
        names : sequence of str, optional
            Names of the layers, for messages and fingerprints.

        Raises
        ------
        CheckpointError
            A parameter is on the meta device, has no plain storage, or differs between experts of a layer.
        """
        if not layers:
            raise CheckpointError("no layers; a bank needs at least one MoE layer")
        names = [f"layers.{i}" for i in range(len(layers))] if names is None else list(names)
        if len(names) != len(layers):
            raise CheckpointError(f"{len(names)} names for {len(layers)} layers")
        adopted = [_adopt_layer(layer, name) for layer, name in zip(layers, names, strict=True)]
        return cls(
            [{param: a.spec for param, a in layer.items()} for layer in adopted],
            [{param: [a.piece] for param, a in layer.items()} for layer in adopted],
            names,
            location="ram",
            tensors=[tensor for layer in adopted for a in layer.values() for tensor in a.tensors],
            copied_bytes=sum(a.copied_bytes for layer in adopted for a in layer.values()),
        )

    @classmethod
    def from_safetensors(
        cls,
        path: str | os.PathLike[str] | Sequence[str | os.PathLike[str]] | CheckpointIndex,
        layout: Layout | str | Mapping[str, str | Sequence[str]] | Sequence[LayerSource],
        *,
        location: Literal["disk", "ram"] = "disk",
        layers: Sequence[int] | None = None,
        names: Sequence[str] | None = None,
    ) -> ExpertBank:
        """Find the experts in a checkpoint's own files.

        Parameters
        ----------
        path : str, Path, list of them, or CheckpointIndex
            See :class:`moecache.checkpoint.CheckpointIndex`.
        layout : Layout, str, mapping, or sequence of layer sources
            A layout, the name of a preset, a mapping of templates, or one entry a layer that names its tensors.
        location : {"disk", "ram"}
            "disk" leaves the bytes where they are and reads only headers; "ram" reads each expert into memory once.
        layers : sequence of int, optional
            The model's numbers of the layers wanted, with a layout of templates; all that match when None.
        names : sequence of str, optional
            Names of the layers; by default made from the templates.

        Raises
        ------
        CheckpointError
            A shard is missing or cut short, an expert is missing, or experts of a layer differ in shape or dtype.
        """
        if location not in ("disk", "ram"):
            raise CheckpointError(f"location is {location!r}; expected 'disk' or 'ram'")
        index = path if isinstance(path, CheckpointIndex) else CheckpointIndex(path)
        if isinstance(layout, str):
            layout = Layout.preset(layout)
        elif isinstance(layout, Mapping):
            layout = Layout(layout)
        if isinstance(layout, Layout):
            sources, found_names = layout.resolve(index, layers)
        else:
            sources, found_names = list(layout), [f"layers.{i}" for i in range(len(layout))]
        names = found_names if names is None else list(names)
        if not sources or len(names) != len(sources):
            raise CheckpointError(f"{len(names)} names for {len(sources)} layers; at least one layer is needed")
        located = [_locate_layer(index, source, name) for source, name in zip(sources, names, strict=True)]
        specs = [{param: spec for param, (spec, _) in layer.items()} for layer in located]
        pieces = [{param: runs for param, (_, runs) in layer.items()} for layer in located]
        bank = cls(specs, pieces, names, location="disk", index=index)
        return bank if location == "disk" else bank._into_ram()

    @property
    def nbytes(self) -> int:
        """Bytes of all experts of all layers."""
        return sum(count * self.expert_nbytes(layer) for layer, count in enumerate(self.num_experts))

    def expert_nbytes(self, layer: int) -> int:
        """Bytes of one expert of this layer."""
        return sum(spec.nbytes for spec in self.kinds[self.layer_kind[layer]].values())

    def sources(self, region_of: Mapping[tuple[int, str], int]) -> Sources:
        """The bank as the engine reads it: for every expert, in gid order, its segments.

        Parameters
        ----------
        region_of : mapping of (kind, parameter name) to int
            The region number of each pool tensor.

        Raises
        ------
        ClosedError
        CheckpointError
            A file of the checkpoint has changed since its header was read.
        """
        from ._engine import Sources

        self._check_open()
        if self._index is not None:
            self._index.check_unchanged()
        file, source, nbytes, region, offset, counts = [], [], [], [], [], []
        for layer, params in enumerate(self._pieces):
            experts = self.num_experts[layer]
            columns = []
            for param, runs in params.items():
                position = 0
                for piece in runs:
                    columns.append((piece, region_of[self.layer_kind[layer], param], position))
                    position += piece.nbytes
            file.append(np.stack([piece.file for piece, _, _ in columns], axis=1).ravel())
            source.append(np.stack([piece.source for piece, _, _ in columns], axis=1).ravel())
            nbytes.append(np.tile(np.array([piece.nbytes for piece, _, _ in columns], dtype=np.int64), experts))
            region.append(np.tile(np.array([number for _, number, _ in columns], dtype=np.int32), experts))
            offset.append(np.tile(np.array([position for _, _, position in columns], dtype=np.int64), experts))
            counts.append(np.full(experts, len(columns), dtype=np.int64))
        return Sources(
            segment_start=np.concatenate([[0], np.cumsum(np.concatenate(counts))]).astype(np.int64),
            segment_file=np.concatenate(file),
            segment_source=np.concatenate(source),
            segment_nbytes=np.concatenate(nbytes),
            segment_region=np.concatenate(region),
            segment_offset=np.concatenate(offset),
            files=() if self._index is None else self._index.files,
        )

    def expert(self, layer: int, index: int) -> dict[str, torch.Tensor]:
        """A copy of one expert's tensors, in host memory.

        Raises
        ------
        ClosedError
        IndexError
            No such layer or expert.
        """
        self._check_open()
        if not (0 <= layer < len(self.num_experts) and 0 <= index < self.num_experts[layer]):
            raise IndexError(f"no expert {index} in layer {layer}; num_experts is {self.num_experts}")
        tensors = {}
        with _Files(self._index) as files:
            for param, spec in self.kinds[self.layer_kind[layer]].items():
                tensors[param] = torch.empty(spec.shape, dtype=spec.dtype, device="cpu")
                files.read(self._pieces[layer][param], index, tensors[param].data_ptr())
        return tensors

    def layer(self, layer: int) -> dict[str, torch.Tensor]:
        """A copy of all experts of one layer, stacked: ``[E, *shape]`` for each parameter, in host memory."""
        self._check_open()
        with _Files(self._index) as files:
            return self._stacked(files, layer)

    def close(self) -> None:
        """Let go of the tensors; a second call does nothing."""
        self._closed = True
        self._tensors.clear()

    @property
    def closed(self) -> bool:
        return self._closed

    def __enter__(self) -> ExpertBank:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def __repr__(self) -> str:
        experts = sum(self.num_experts)
        return f"ExpertBank({len(self.num_experts)} layers, {experts} experts, {self.nbytes} bytes, {self.location})"

    def _check_open(self) -> None:
        if self._closed:
            raise ClosedError("this bank is closed; build another one")

    def _into_ram(self) -> ExpertBank:
        with _Files(self._index, drop_cached=True) as files:
            layers = [self._stacked(files, layer) for layer in range(len(self.num_experts))]
        return ExpertBank.from_tensors(layers, names=self.layer_names)

    def _stacked(self, files: _Files, layer: int) -> dict[str, torch.Tensor]:
        tensors = {}
        for param, spec in self.kinds[self.layer_kind[layer]].items():
            stacked = torch.empty((self.num_experts[layer], *spec.shape), dtype=spec.dtype, device="cpu")
            for index in range(self.num_experts[layer]):
                files.read(self._pieces[layer][param], index, stacked.data_ptr() + index * spec.nbytes)
            tensors[param] = stacked
        return tensors


class _Files:
    """Reads pieces into memory; files are opened when first needed and closed together."""

    def __init__(self, index: CheckpointIndex | None, *, drop_cached: bool = False) -> None:
        self._paths = () if index is None else index.files
        self._drop_cached = drop_cached
        self._descriptors: dict[int, int] = {}

    def __enter__(self) -> _Files:
        return self

    def __exit__(self, *_: object) -> None:
        for descriptor in self._descriptors.values():
            # After a whole checkpoint was read into memory, its second copy in the page cache only takes room.
            if self._drop_cached and hasattr(os, "posix_fadvise"):
                os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
            os.close(descriptor)

    def read(self, pieces: Sequence[Piece], expert: int, address: int) -> None:
        for piece in pieces:
            file, source = int(piece.file[expert]), int(piece.source[expert])
            if file < 0:
                ctypes.memmove(address, source, piece.nbytes)
            else:
                self._read_file(file, source, piece.nbytes, address)
            address += piece.nbytes

    def _read_file(self, file: int, offset: int, nbytes: int, address: int) -> None:
        if file not in self._descriptors:
            self._descriptors[file] = os.open(self._paths[file], os.O_RDONLY)
        read_exactly(self._descriptors[file], offset, nbytes, address, self._paths[file])


class _Adopted(NamedTuple):
    spec: ParamSpec
    piece: Piece
    tensors: list[torch.Tensor]
    copied_bytes: int


def _adopt_layer(layer: Mapping[str, torch.Tensor | Sequence[torch.Tensor]], name: str) -> dict[str, _Adopted]:
    if not layer:
        raise CheckpointError(f"{name}: no expert parameters")
    adopted = {param: _adopt(value, f"{name}.{param}") for param, value in layer.items()}
    counts = {param: len(a.piece.file) for param, a in adopted.items()}
    if len(set(counts.values())) != 1 or not all(counts.values()):
        raise CheckpointError(f"{name}: every parameter must hold the same number of experts, one or more: {counts}")
    return adopted


def _adopt(value: torch.Tensor | Sequence[torch.Tensor], name: str) -> _Adopted:
    if isinstance(value, torch.Tensor):
        _check_adoptable(value, name)
        if value.dim() == 0 or value.shape[0] == 0:
            raise CheckpointError(
                f"{name}: expected a tensor [E, *shape] with at least one expert, found {tuple(value.shape)}"
            )
        tensor, copied = _host_contiguous(value.detach(), rows=True)
        spec = ParamSpec(tuple(tensor.shape[1:]), tensor.dtype)
        rows = np.arange(tensor.shape[0], dtype=np.uint64) * np.uint64(tensor.stride(0) * tensor.dtype.itemsize)
        return _Adopted(spec, _memory_piece(rows + np.uint64(tensor.data_ptr()), spec, name), [tensor], copied)
    tensors, copied_bytes = [], 0
    for number, item in enumerate(value):
        _check_adoptable(item, f"{name}[{number}]")
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
    return _Adopted(spec, _memory_piece(addresses, spec, name), tensors, copied_bytes)


def _check_adoptable(tensor: torch.Tensor, name: str) -> None:
    if not isinstance(tensor, torch.Tensor):
        raise CheckpointError(f"{name}: expected a tensor, found {type(tensor).__name__}")
    if tensor.device.type == "meta":
        raise CheckpointError(f"{name}: is on the meta device, it has no bytes; load it first, or use a disk bank")
    if type(tensor) not in (torch.Tensor, torch.nn.Parameter, torch.nn.Buffer) or tensor.layout != torch.strided:
        raise CheckpointError(
            f"{name}: a {type(tensor).__name__} of layout {tensor.layout} has no plain storage; expected a dense tensor"
        )


def _host_contiguous(tensor: torch.Tensor, *, rows: bool) -> tuple[torch.Tensor, int]:
    """The tensor itself if its bytes can be read as they lie, or a contiguous copy in host memory, and its bytes."""
    first = tensor[0] if rows else tensor
    # Conjugation and negation are bits on the tensor, not in its bytes.
    if tensor.device.type == "cpu" and first.is_contiguous() and not (tensor.is_conj() or tensor.is_neg()):
        return tensor, 0
    copy = tensor.cpu().contiguous().resolve_conj().resolve_neg()
    return copy, copy.nbytes


def _memory_piece(addresses: np.ndarray, spec: ParamSpec, name: str) -> Piece:
    if spec.nbytes == 0:
        raise CheckpointError(f"{name}: an expert of shape {spec.shape} has no bytes")
    return Piece(np.full(len(addresses), -1, dtype=np.int32), addresses, spec.nbytes)


def _locate_layer(
    index: CheckpointIndex, source: LayerSource, layer_name: str
) -> dict[str, tuple[ParamSpec, list[Piece]]]:
    located = {param: _locate(index, pieces, f"{layer_name}.{param}") for param, pieces in source.items()}
    counts = {param: len(pieces[0].file) for param, (_, pieces) in located.items()}
    if len(set(counts.values())) != 1:
        raise CheckpointError(f"{layer_name}: parameters hold different numbers of experts: {counts}")
    return located


def _locate(index: CheckpointIndex, names: Sequence[str | Sequence[str]], param: str) -> tuple[ParamSpec, list[Piece]]:
    """One parameter's spec and pieces; pieces are joined along dim 0 of the expert."""
    specs, pieces = [], []
    for piece in names:
        if isinstance(piece, str):
            extent = _lookup(index, piece, param)
            spec = ParamSpec(extent.shape[1:], _dtype(index, piece, extent))
            experts = extent.shape[0] if extent.shape else 0
            source = np.uint64(extent.offset) + np.arange(experts, dtype=np.uint64) * np.uint64(spec.nbytes)
            files = np.full(experts, extent.file, dtype=np.int32)
        else:
            extents = [_lookup(index, name, param) for name in piece]
            _check_equal(index, piece, extents)
            spec = ParamSpec(extents[0].shape, _dtype(index, piece[0], extents[0]))
            source = np.array([extent.offset for extent in extents], dtype=np.uint64)
            files = np.array([extent.file for extent in extents], dtype=np.int32)
        if len(files) == 0 or spec.nbytes == 0:
            raise CheckpointError(
                f"{param}: tensor {piece if isinstance(piece, str) else piece[0]!r} holds no expert bytes"
            )
        specs.append(spec)
        pieces.append(Piece(files, source, spec.nbytes))
    if len({len(piece.file) for piece in pieces}) != 1:
        raise CheckpointError(f"{param}: pieces of {[len(piece.file) for piece in pieces]} experts cannot be joined")
    return _joined_spec(specs, names, param), pieces


def _joined_spec(specs: Sequence[ParamSpec], names: Sequence[str | Sequence[str]], param: str) -> ParamSpec:
    first = specs[0]
    if len(specs) == 1:
        return first
    for spec, piece in zip(specs, names, strict=True):
        if not spec.shape or spec.shape[1:] != first.shape[1:] or spec.dtype != first.dtype:
            name = piece if isinstance(piece, str) else piece[0]
            raise CheckpointError(
                f"{param}: tensor {name!r} of {spec.shape}, {spec.dtype} cannot be joined along dim 0 to "
                f"{first.shape}, {first.dtype}"
            )
    return ParamSpec((sum(spec.shape[0] for spec in specs), *first.shape[1:]), first.dtype)


def _lookup(index: CheckpointIndex, name: str, param: str) -> TensorExtent:
    if name not in index.tensors:
        raise CheckpointError(f"{param}: tensor {name!r} is not in the checkpoint ({len(index.files)} files)")
    return index.tensors[name]


def _dtype(index: CheckpointIndex, name: str, extent: TensorExtent) -> torch.dtype:
    if extent.dtype is None:
        raise CheckpointError(
            f"{index.files[extent.file]}: tensor {name!r} has dtype {extent.dtype_name}, unknown to torch"
        )
    return extent.dtype


def _check_equal(index: CheckpointIndex, names: Sequence[str], extents: Sequence[TensorExtent]) -> None:
    first = extents[0]
    for name, extent in zip(names, extents, strict=True):
        if extent.shape != first.shape or extent.dtype_name != first.dtype_name:
            raise CheckpointError(
                f"{index.files[extent.file]}: tensor {name!r} has shape {extent.shape}, {extent.dtype_name}; expected "
                f"{first.shape}, {first.dtype_name} as {names[0]!r} of the same layer"
            )


def _merge_adjacent(pieces: Sequence[Piece]) -> list[Piece]:
    """Join pieces that follow each other in the file for every expert (gate and up often do): fewer, longer reads."""
    merged = [pieces[0]]
    for piece in pieces[1:]:
        last = merged[-1]
        follows = np.array_equal(last.file, piece.file) and (last.file >= 0).all()
        if follows and np.array_equal(last.source + np.uint64(last.nbytes), piece.source):
            merged[-1] = Piece(last.file, last.source, last.nbytes + piece.nbytes)
        else:
            merged.append(piece)
    return merged


def _kinds(
    specs: Sequence[Mapping[str, ParamSpec]],
) -> tuple[tuple[dict[str, ParamSpec], ...], tuple[int, ...]]:
    kinds: list[dict[str, ParamSpec]] = []
    layer_kind = []
    for layer in specs:
        spec = dict(layer)
        if spec not in kinds:
            kinds.append(spec)
        layer_kind.append(kinds.index(spec))
    return tuple(kinds), tuple(layer_kind)
