"""The bank: where every expert's bytes lie when they are not on the device.

Either tensors in host memory, adopted and not copied, or extents of a checkpoint's own safetensors files.
"""

from __future__ import annotations

import bisect
import ctypes
import itertools
import logging
import operator
import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import nullcontext, suppress
from typing import TYPE_CHECKING, Any, Literal

import numpy as np
import torch

from ._engine import Sources
from .checkpoint import CheckpointIndex, TensorFiles
from .errors import CheckpointError, ClosedError, CopyError, RoutingError
from .layout import PRESETS, LayerSource, Layout
from .packed import Format, format_named
from .packed._loops import decode
from .pieces import (
    PackedPiece,
    ParamSpec,
    Piece,
    adopt_layer,
    experts_of,
    locate_layer,
    mapped_files,
    merge_adjacent,
    segments_of,
)
from .stamp import check_unchanged

if TYPE_CHECKING:
    from types import TracebackType

    from .page_lock import PageLock

__all__ = ["PRESETS", "ExpertBank", "Layout", "ParamSpec"]

logger = logging.getLogger("moecache")


class ExpertBank:
    """All experts of a model, off the device.

    Made by :meth:`from_tensors` or :meth:`from_safetensors`; a context manager. A cache keeps what it reads, tensors
    and files, for as long as it is open: closing the bank under it only keeps further caches from being made.

    A bank on disk can be pickled and copied: the copy reads the same files, which must be what they were. A bank in
    memory cannot.

    Attributes
    ----------
    num_experts : tuple of int
        Experts of each MoE layer; layers may differ.
    layer_names : tuple of str
    shape_groups : tuple of dict of str to ParamSpec
        The distinct sets of expert parameters; layers with equal ones are a shape group.
    layer_group : tuple of int
        Each layer's place in ``shape_groups``.
    location : {"ram", "disk"}
    is_packed : bool
        Some experts are decoded from fewer bytes than they have (``stored_nbytes`` against ``nbytes``).
    copied_bytes : int
        Bytes that had to be copied once because a tensor was not contiguous or not in host memory.
    """

    def __init__(
        self,
        specs: Sequence[Mapping[str, ParamSpec]],
        pieces: Sequence[Mapping[str, Sequence[Piece | PackedPiece]]],
        names: Sequence[str],
        *,
        location: Literal["ram", "disk"],
        index: CheckpointIndex | None = None,
        tensors: Sequence[torch.Tensor] = (),
        copied_bytes: int = 0,
    ) -> None:
        self.layer_names = tuple(names)
        self.num_experts = tuple(experts_of(next(iter(layer.values()))[0]) for layer in pieces)
        self.shape_groups, self.layer_group = _shape_groups(specs)
        self._expert_nbytes = [
            sum(spec.nbytes for spec in self.shape_groups[group].values()) for group in self.layer_group
        ]
        self._nbytes: int = sum(map(operator.mul, self.num_experts, self._expert_nbytes))
        self.location = location
        self.copied_bytes = copied_bytes
        self._pieces = [{name: merge_adjacent(runs) for name, runs in layer.items()} for layer in pieces]
        self.is_packed = any(
            isinstance(p, PackedPiece) for layer in self._pieces for runs in layer.values() for p in runs
        )
        self._index = index
        self._tensors = tuple(tensors)
        self._addresses = np.array([tensor.data_ptr() for tensor in tensors], np.uint64)
        self._mapped = mapped_files(tensors)
        self._closed = False
        self.page_lock: PageLock | None = None  # kept here because all caches over the bank share it
        places = [
            np.stack([run.file.astype(np.uint64), run.source, np.full_like(run.source, run.nbytes)], axis=1)
            for run in self._runs()
        ]
        self._stored_nbytes = int(np.unique(np.concatenate(places), axis=0)[:, 2].sum())
        shared = sum(len(place) * int(place[0, 2]) for place in places) - self._stored_nbytes
        if shared:
            logger.warning(
                "%s bytes of experts lie at the same place as others' (tied weights): each expert has a slot and copies of "
                "its own all the same",
                f"{shared:,}",
            )

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
            Any dtype of whole bytes: bytes are only moved. A tensor whose experts are not contiguous, or that is on
            another device, is copied once (``copied_bytes``). The storage of the others can no longer be resized, and
            must not be put into shared memory later, which moves it: copies from it fail from then on.
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
        adopted = [adopt_layer(params, name) for params, name in zip(layers, names, strict=True)]
        tensors: list[torch.Tensor] = []
        pieces: list[dict[str, list[Piece | PackedPiece]]] = []
        for layer in adopted:
            pieces.append({})
            for param, a in layer.items():
                pieces[-1][param] = [a.piece._replace(owner=a.piece.owner + np.int32(len(tensors)))]
                tensors += a.tensors
        return cls(
            [{param: a.spec for param, a in layer.items()} for layer in adopted],
            pieces,
            names,
            location="ram",
            tensors=tensors,
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
        packed: str | Format | None = None,
        dtype: torch.dtype = torch.bfloat16,
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
        packed : str or Format, optional
            How the tensors that the templates name are packed: "fp8", "fp8-128", "mxfp4", or a format of your own
            (:func:`moecache.packed.register_format`). Files and memory then hold what the checkpoint holds, and an expert is
            decoded as it arrives in a slot. Layers whose tensors are not packed stay as they are.
        dtype : torch.dtype
            What packed experts are decoded to.

        Raises
        ------
        CheckpointError
            A shard is missing or cut short, an expert is missing, or experts of a layer differ in shape or dtype; packed
            values have no scales, or others than their format has.
        """
        if location not in ("disk", "ram"):
            raise CheckpointError(f"location is {location!r}; expected 'disk' or 'ram'")
        index = path if isinstance(path, CheckpointIndex) else CheckpointIndex(path)
        if isinstance(layout, str):
            layout = Layout.preset(layout)
        elif isinstance(layout, Mapping):
            layout = Layout(layout)
        if isinstance(layout, Layout):
            how = format_named(packed) if isinstance(packed, str) else packed
            sources, found_names = layout.resolve(index, layers, packed=how, dtype=dtype)
        elif packed is not None:
            raise CheckpointError(
                "packed= goes with templates; say it of each tensor with moecache.layout.PackedSource"
            )
        else:
            sources, found_names = list(layout), [f"layers.{i}" for i in range(len(layout))]
        names = found_names if names is None else list(names)
        if not sources or len(names) != len(sources):
            raise CheckpointError(f"{len(names)} names for {len(sources)} layers; at least one layer is needed")
        located = [locate_layer(index, source, name) for source, name in zip(sources, names, strict=True)]
        specs = [{param: spec for param, (spec, _) in layer.items()} for layer in located]
        pieces = [{param: runs for param, (_, runs) in layer.items()} for layer in located]
        bank = cls(specs, pieces, names, location="disk", index=index)
        return bank if location == "disk" else bank._into_ram()

    @property
    def nbytes(self) -> int:
        """Bytes of all experts of all layers, decoded."""
        return self._nbytes

    @property
    def stored_nbytes(self) -> int:
        """Bytes that the experts take where they lie: those that share their memory, or their place in a file, count once."""
        return self._stored_nbytes

    def _runs(self) -> Iterator[Piece]:
        for layer in self._pieces:
            for pieces in layer.values():
                for piece in pieces:
                    yield from piece.streams if isinstance(piece, PackedPiece) else (piece,)

    def expert_nbytes(self, layer: int) -> int:
        """Bytes of one expert of this layer, decoded."""
        return self._expert_nbytes[self._layer(layer)]

    def sources(self, region_of: Mapping[tuple[int, str], int]) -> Sources:
        """The bank as the engine reads it: for every expert, in gid order, its segments.

        Parameters
        ----------
        region_of : mapping of (shape group, parameter name) to int
            The region number of each pool tensor.

        Raises
        ------
        ClosedError
        CheckpointError
            A file of the checkpoint has changed since its header was read.
        """
        self.check_unchanged()
        regions = [
            {param: region_of[group, param] for param in layer}
            for group, layer in zip(self.layer_group, self._pieces, strict=True)
        ]
        return Sources(
            **segments_of(self._pieces, regions),
            files=() if self._index is None else self._index.files,
            stamps=() if self._index is None else self._index.stamps,
            tensors=self._tensors,
            tensor_address=self._addresses,
            name_of=_Names(self.num_experts, self.layer_names),
        )

    def check_unchanged(self) -> None:
        """See that the files are what they were when the bank was built: one ``stat`` each.

        The copies of a cache check what they read by themselves. Tensors that a loader has mapped from a file are memory,
        which nobody can check without reading it: their files are looked at here.

        Raises
        ------
        ClosedError
        CheckpointError
            A file has been replaced, removed or written to.
        """
        self._check_mapped()
        if self._index is not None:
            self._index.check_unchanged()

    def expert(self, layer: int, index: int) -> dict[str, torch.Tensor]:
        """A copy of one expert's tensors, in host memory.

        Raises
        ------
        ClosedError
        RoutingError
            No such layer or expert.
        CheckpointError
            A file of the checkpoint has changed since its header was read, or a tensor's memory has moved.
        """
        self._check_mapped()
        layer, index = self._layer(layer), _integer(index, "expert")
        if not 0 <= index < self.num_experts[layer]:
            raise RoutingError(f"no expert {index} in layer {layer}: expected 0 to {self.num_experts[layer] - 1}")
        tensors = {}
        with self._files() as files:
            for param, spec in self.shape_groups[self.layer_group[layer]].items():
                tensors[param] = torch.empty(spec.shape, dtype=spec.dtype, device="cpu")
                self._decode(files, self._pieces[layer][param], index, tensors[param].data_ptr())
        return tensors

    def layer(self, layer: int) -> dict[str, torch.Tensor]:
        """A copy of all experts of one layer, stacked: ``[E, *shape]`` for each parameter, in host memory.

        Raises
        ------
        ClosedError, RoutingError, CheckpointError
            As :meth:`expert`.
        """
        self._check_mapped()
        layer = self._layer(layer)
        with self._files() as files:
            return self._stacked(files, layer)

    def close(self) -> None:
        """Give tensors and files back, as soon as the caches that read them are closed too; a second call does nothing."""
        self._closed = True
        self._tensors = ()

    @property
    def closed(self) -> bool:
        return self._closed

    def __enter__(self) -> ExpertBank:
        return self

    def __exit__(
        self, error_type: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def __repr__(self) -> str:
        experts = sum(self.num_experts)
        packed = f" ({self.stored_nbytes} packed)" if self.is_packed else ""
        return f"ExpertBank({len(self.num_experts)} layers, {experts} experts, {self.nbytes} bytes{packed}, {self.location})"

    def __getstate__(self) -> dict[str, Any]:
        self._check_open()
        if self.location == "ram":
            raise CopyError(
                "a bank in memory holds addresses and cannot be pickled or copied; use the same bank from several caches, "
                "or build one with ExpertBank.from_tensors where it is needed (tensors in shared memory reach other "
                "processes)"
            )
        return {**self.__dict__, "page_lock": None}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        if self._index is not None:
            self._index.check_unchanged()

    def _check_open(self) -> None:
        if self._closed:
            raise ClosedError("this bank is closed; build another one")

    def _check_mapped(self) -> None:
        self._check_open()
        self.check_mapped()

    def check_mapped(self) -> None:
        """See that files which a loader has mapped into the bank's tensors were not written to: one ``stat`` each.

        Raises
        ------
        CheckpointError
        """
        for path, stamp in self._mapped.items():
            # One that was removed or replaced lives on in its mapping.
            with suppress(OSError):
                if os.stat(path).st_ino == stamp.inode:
                    check_unchanged(path, stamp)

    def _layer(self, layer: int) -> int:
        layer = _integer(layer, "layer")
        if not 0 <= layer < len(self.num_experts):
            raise RoutingError(f"no expert of layer {layer}: expected a layer from 0 to {len(self.num_experts) - 1}")
        return layer

    def _into_ram(self) -> ExpertBank:
        """The same experts, their bytes as the files have them, in memory."""
        tensors: list[torch.Tensor] = []
        with self._files(drop_cached=True) as files:
            pieces = [
                {param: [self._held(files, piece, tensors) for piece in runs] for param, runs in layer.items()}
                for layer in self._pieces
            ]
        specs = [self.shape_groups[group] for group in self.layer_group]
        return ExpertBank(specs, pieces, self.layer_names, location="ram", tensors=tensors)

    def _held(
        self, files: TensorFiles | None, piece: Piece | PackedPiece, tensors: list[torch.Tensor]
    ) -> Piece | PackedPiece:
        if isinstance(piece, PackedPiece):
            streams = [self._held(files, run, tensors) for run in piece.streams]
            return piece._replace(streams=tuple(run for run in streams if isinstance(run, Piece)))
        experts = len(piece.file)
        held = torch.empty((experts, piece.nbytes), dtype=torch.uint8, device="cpu")
        for expert in range(experts):
            self._read(files, piece, expert, held[expert].data_ptr())
        tensors.append(held)
        return Piece(
            file=np.full(experts, -1, np.int32),
            source=np.uint64(held.data_ptr()) + np.arange(experts, dtype=np.uint64) * np.uint64(piece.nbytes),
            owner=np.full(experts, len(tensors) - 1, np.int32),
            nbytes=piece.nbytes,
        )

    def _stacked(self, files: TensorFiles | None, layer: int) -> dict[str, torch.Tensor]:
        tensors = {}
        for param, spec in self.shape_groups[self.layer_group[layer]].items():
            stacked = torch.empty((self.num_experts[layer], *spec.shape), dtype=spec.dtype, device="cpu")
            for index in range(self.num_experts[layer]):
                self._decode(files, self._pieces[layer][param], index, stacked.data_ptr() + index * spec.nbytes)
            tensors[param] = stacked
        return tensors

    def _files(self, *, drop_cached: bool = False) -> TensorFiles | nullcontext[None]:
        return nullcontext() if self._index is None else TensorFiles(self._index, drop_cached=drop_cached)

    def _decode(
        self, files: TensorFiles | None, pieces: Sequence[Piece | PackedPiece], expert: int, address: int
    ) -> None:
        """One parameter of an expert, decoded, to an address."""
        for piece in pieces:
            if isinstance(piece, PackedPiece):
                streams = [torch.empty(run.nbytes, dtype=torch.uint8, device="cpu") for run in piece.streams]
                for run, stream in zip(piece.streams, streams, strict=True):
                    self._read(files, run, expert, stream.data_ptr())
                decode(piece.recipe, [stream.data_ptr() for stream in streams], address)
            else:
                self._read(files, piece, expert, address)
            address += piece.nbytes

    def _read(self, files: TensorFiles | None, piece: Piece, expert: int, address: int) -> None:
        file, source, owner = int(piece.file[expert]), int(piece.source[expert]), int(piece.owner[expert])
        if files is not None:
            files.read(file, source, piece.nbytes, address)
        elif self._tensors[owner].data_ptr() != self._addresses[owner]:
            raise CheckpointError(
                f"the memory of a tensor of shape {tuple(self._tensors[owner].shape)} has moved since the bank was built "
                "(put into shared memory?); build the bank after that"
            )
        else:
            ctypes.memmove(address, source, piece.nbytes)


def _integer(number: int, what: str) -> int:
    try:
        return operator.index(number)
    except TypeError:
        raise RoutingError(f"no {what} {number!r}: expected an integer") from None


class _Names:
    """What messages call an expert; kept apart from the bank, whose end it outlives."""

    def __init__(self, num_experts: Sequence[int], layer_names: Sequence[str]) -> None:
        self._first = [0, *itertools.accumulate(num_experts)]
        self._layer_names = tuple(layer_names)

    def __call__(self, gid: int) -> str:
        layer = bisect.bisect_right(self._first, gid) - 1
        return f"layer {layer}, expert {gid - self._first[layer]} of {self._layer_names[layer]}"


def _shape_groups(
    specs: Sequence[Mapping[str, ParamSpec]],
) -> tuple[tuple[dict[str, ParamSpec], ...], tuple[int, ...]]:
    groups: list[dict[str, ParamSpec]] = []
    layer_group = []
    for layer in specs:
        spec = dict(layer)
        if spec not in groups:
            groups.append(spec)
        layer_group.append(groups.index(spec))
    return tuple(groups), tuple(layer_group)
