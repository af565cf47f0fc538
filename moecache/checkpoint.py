"""Where tensors lie in safetensors files, and how checkpoints name their experts: no tensor byte is read.

The format (https://github.com/huggingface/safetensors): eight bytes with the length of a JSON header, the header,
then the tensors' bytes; the header gives every tensor's dtype, shape and byte range.
"""

from __future__ import annotations

import ctypes
import itertools
import json
import os
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import torch

from .errors import CheckpointError

__all__ = ["PRESETS", "CheckpointIndex", "LayerSource", "Layout", "TensorExtent", "element_count", "read_exactly"]

_MAX_HEADER_BYTES = 100_000_000  # the limit of the format's own library

_DTYPES = {
    "BOOL": torch.bool,
    "U8": torch.uint8,
    "I8": torch.int8,
    "U16": torch.uint16,
    "I16": torch.int16,
    "U32": torch.uint32,
    "I32": torch.int32,
    "U64": torch.uint64,
    "I64": torch.int64,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2": torch.float8_e5m2,
    "F8_E8M0": torch.float8_e8m0fnu,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "F32": torch.float32,
    "F64": torch.float64,
    "C64": torch.complex64,
}


class TensorExtent(NamedTuple):
    """One tensor of a checkpoint: which file, where in it, and what its bytes mean."""

    file: int
    offset: int
    nbytes: int
    shape: tuple[int, ...]
    dtype_name: str

    @property
    def dtype(self) -> torch.dtype | None:
        """The torch dtype, or None where torch has no such type."""
        return _DTYPES.get(self.dtype_name)


def element_count(shape: Sequence[int]) -> int:
    """Number of elements of a tensor of this shape."""
    count = 1
    for size in shape:
        count *= size
    return count


def read_exactly(descriptor: int, offset: int, nbytes: int, address: int, file: str) -> None:
    """Read bytes of an open file to a host address; CheckpointError if the file ends early."""
    view = memoryview((ctypes.c_ubyte * nbytes).from_address(address)).cast("B")
    done = 0
    while done < nbytes:
        count = os.preadv(descriptor, [view[done:]], offset + done)
        if count == 0:
            raise CheckpointError(f"{file}: ends {nbytes - done} bytes before a tensor does")
        done += count


class CheckpointIndex:
    """All tensors of a checkpoint of one or more safetensors files.

    Parameters
    ----------
    path : str, Path or sequence of them
        A folder (with ``model.safetensors.index.json``, ``model.safetensors`` or other ``.safetensors`` files),
        one file, or a list of files.

    Attributes
    ----------
    files : tuple of str
        Absolute paths; ``TensorExtent.file`` counts in them.
    tensors : dict of str to TensorExtent
        Every tensor by its name in the checkpoint.

    Raises
    ------
    CheckpointError
        A file is missing, cut short or damaged, or the index names a tensor that its shard does not hold.
    """

    def __init__(self, path: str | os.PathLike[str] | Sequence[str | os.PathLike[str]]) -> None:
        weight_map, files = _resolve_files(path)
        self.files: tuple[str, ...] = tuple(str(file.absolute()) for file in files)
        self.tensors: dict[str, TensorExtent] = {}
        self._stamps: list[tuple[int, int, int]] = []
        for number, file in enumerate(files):
            for name, extent in _read_header(file, number).items():
                if name in self.tensors:
                    other = self.files[self.tensors[name].file]
                    raise CheckpointError(
                        f"{file}: tensor {name!r} is also in {other}; every tensor must be stored once"
                    )
                self.tensors[name] = extent
            self._stamps.append(_stamp(file))
        for name, file_name in weight_map.items():
            if name not in self.tensors:
                raise CheckpointError(
                    f"{file_name}: the index says it holds tensor {name!r}, but its header does not; "
                    "fetch the shard again"
                )

    def read(self, name: str) -> torch.Tensor:
        """Read one tensor into host memory.

        Raises
        ------
        CheckpointError
            No such tensor, a dtype unknown to torch, or the file ends early.
        """
        if name not in self.tensors:
            raise CheckpointError(f"tensor {name!r} is not in the checkpoint ({len(self.files)} files)")
        extent = self.tensors[name]
        if extent.dtype is None:
            raise CheckpointError(f"{self.files[extent.file]}: tensor {name!r} has dtype {extent.dtype_name}")
        raw = torch.empty(extent.nbytes, dtype=torch.uint8, device="cpu")
        if extent.nbytes:
            with open(self.files[extent.file], "rb", buffering=0) as stream:
                read_exactly(stream.fileno(), extent.offset, extent.nbytes, raw.data_ptr(), self.files[extent.file])
        return raw.view(extent.dtype).reshape(extent.shape)

    def check_unchanged(self) -> None:
        """Raise CheckpointError if a file has been replaced or written since its header was read."""
        for file, stamp in zip(self.files, self._stamps, strict=True):
            if not os.path.exists(file) or _stamp(Path(file)) != stamp:
                raise CheckpointError(f"{file}: changed since its header was read; build the bank again")


def _stamp(file: Path) -> tuple[int, int, int]:
    status = file.stat()
    return status.st_ino, status.st_size, status.st_mtime_ns


def _resolve_files(
    path: str | os.PathLike[str] | Sequence[str | os.PathLike[str]],
) -> tuple[dict[str, str], list[Path]]:
    """The index's weight map (may be empty) and the files, all of which exist."""
    if not isinstance(path, (str, os.PathLike)):
        return {}, _existing(Path(file) for file in path)
    root = Path(path)
    if root.is_file() and root.name.endswith(".index.json"):
        return _read_index(root)
    if not root.is_dir():
        return {}, _existing([root])
    index = root / "model.safetensors.index.json"
    if index.exists():
        return _read_index(index)
    if (root / "model.safetensors").exists():
        return {}, [root / "model.safetensors"]
    files = sorted(root.glob("*.safetensors"))
    if not files:
        raise CheckpointError(f"{root}: no safetensors file in this folder; expected model.safetensors or its index")
    return {}, files


def _read_index(index: Path) -> tuple[dict[str, str], list[Path]]:
    try:
        weight_map = json.loads(index.read_bytes())["weight_map"]
        names = sorted(set(weight_map.values()))
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise CheckpointError(f"{index}: not a safetensors index (a JSON object with 'weight_map'): {error}") from error
    return weight_map, _existing(index.parent / name for name in names)


def _existing(files: Iterable[Path]) -> list[Path]:
    found = list(files)
    if not found:
        raise CheckpointError("an empty list of files; expected at least one safetensors file")
    for file in found:
        if not file.is_file():
            raise CheckpointError(f"{file}: missing shard of the checkpoint ({len(found)} expected)")
    return found


def _read_header(file: Path, number: int) -> dict[str, TensorExtent]:
    size = file.stat().st_size
    with file.open("rb") as stream:
        prefix = stream.read(8)
        header_nbytes = int.from_bytes(prefix, "little")
        if len(prefix) < 8 or header_nbytes > _MAX_HEADER_BYTES or 8 + header_nbytes > size:
            raise CheckpointError(
                f"{file}: not a safetensors file, or cut short: {size} bytes, header of {header_nbytes} bytes expected"
            )
        raw = stream.read(header_nbytes)
    try:
        header = json.loads(raw)
    except ValueError as error:
        raise CheckpointError(f"{file}: the header is not JSON: {error}") from error
    if not isinstance(header, dict):
        raise CheckpointError(f"{file}: the header is a JSON {type(header).__name__}, an object was expected")
    header.pop("__metadata__", None)
    data_start = 8 + header_nbytes
    return {name: _extent(file, number, name, entry, data_start, size) for name, entry in header.items()}


def _extent(file: Path, number: int, name: str, entry: object, data_start: int, size: int) -> TensorExtent:
    try:
        dtype_name, shape = entry["dtype"], tuple(entry["shape"])  # type: ignore[index]
        begin, end = entry["data_offsets"]  # type: ignore[index]
        sound = all(isinstance(n, int) and n >= 0 for n in (*shape, begin, end)) and begin <= end
    except (KeyError, TypeError, ValueError) as error:
        raise CheckpointError(f"{file}: tensor {name!r} has no dtype, shape and data_offsets in the header") from error
    if not sound:
        raise CheckpointError(f"{file}: tensor {name!r} has impossible numbers: shape {shape}, bytes {begin} to {end}")
    if data_start + end > size:
        raise CheckpointError(
            f"{file}: truncated: tensor {name!r} ends at byte {data_start + end}, the file has {size}; fetch it again"
        )
    extent = TensorExtent(number, data_start + begin, end - begin, shape, dtype_name)
    if extent.dtype is not None and element_count(shape) * extent.dtype.itemsize != extent.nbytes:
        raise CheckpointError(
            f"{file}: tensor {name!r} of shape {shape}, {dtype_name} needs "
            f"{element_count(shape) * extent.dtype.itemsize} bytes, the header gives it {extent.nbytes}"
        )
    return extent


# One layer of a checkpoint: for each expert parameter the pieces that make it up, joined along dim 0. A piece is a list
# of tensor names, one an expert, or the name of one stacked tensor whose rows are the experts.
LayerSource = Mapping[str, Sequence["str | Sequence[str]"]]


@dataclass(frozen=True)
class Layout:
    """How a checkpoint names its experts.

    Parameters
    ----------
    params : mapping of str to sequence of str
        For each expert parameter, as the compute code names it, one or more name templates with ``{layer}`` and
        ``{expert}``. Several templates are joined along dim 0 (gate, then up). A template without ``{expert}`` names
        a stacked tensor whose rows are the experts.

    Examples
    --------
    >>> Layout({"w": ["layers.{layer}.experts.{expert}.w"]}).params["w"]
    ('layers.{layer}.experts.{expert}.w',)
    """

    params: Mapping[str, Sequence[str]]

    def __post_init__(self) -> None:
        params = {name: (t,) if isinstance(t, str) else tuple(t) for name, t in self.params.items()}
        if not params or not all(params.values()):
            raise CheckpointError(f"a layout needs at least one parameter, each with a name template: {params}")
        for name, templates in params.items():
            for template in templates:
                if template.count("{layer}") != 1 or template.count("{expert}") > 1:
                    raise CheckpointError(
                        f"layout, parameter {name!r}: {template!r} must hold {{layer}} once and {{expert}} at most once"
                    )
        object.__setattr__(self, "params", params)

    @classmethod
    def preset(cls, name: str) -> Layout:
        """The layout of a known model family; see ``moecache.checkpoint.PRESETS`` for the names."""
        if name not in PRESETS:
            raise CheckpointError(f"unknown layout {name!r}; known: {', '.join(sorted(PRESETS))}, or pass a Layout")
        return cls(PRESETS[name])

    def resolve(
        self, index: CheckpointIndex, layers: Sequence[int] | None = None
    ) -> tuple[list[LayerSource], list[str]]:
        """Find the tensors of every MoE layer.

        Parameters
        ----------
        index : CheckpointIndex
        layers : sequence of int, optional
            The model's own numbers of the layers wanted; all that match when None, but for layers that only predict
            further tokens (multi-token prediction).

        Returns
        -------
        sources : list of LayerSource, in ascending layer number
        names : list of str
            One name a layer, the common beginning of its tensors.

        Raises
        ------
        CheckpointError
            No layer matches, a wanted layer is absent, or an expert of a layer is missing.
        """
        found = {template: _match(template, index) for templates in self.params.values() for template in templates}
        present = sorted(set().union(*(by_layer.keys() for by_layer in found.values())))
        wanted = _decoder_layers(index, present) if layers is None else list(layers)
        if not wanted:
            raise CheckpointError(
                f"no tensor matches {', '.join(map(repr, found))}; "
                f"the checkpoint holds e.g. {sorted(index.tensors)[:3]}"
            )
        return [self._layer(found, layer) for layer in wanted], [self._layer_name(layer) for layer in wanted]

    def _layer(self, found: Mapping[str, Mapping[int, Mapping[int, str]]], layer: int) -> LayerSource:
        source: dict[str, list[str | list[str]]] = {}
        templates = [template for templates in self.params.values() for template in templates]
        count = 1 + max((max(found[t].get(layer, {}), default=-1) for t in templates), default=-1)
        for param, param_templates in self.params.items():
            pieces: list[str | list[str]] = []
            for template in param_templates:
                names = found[template].get(layer, {})
                if "{expert}" not in template:
                    if not names:
                        raise CheckpointError(
                            f"layer {layer}: tensor {_fill(template, layer)!r} is not in the checkpoint"
                        )
                    pieces.append(names[-1])
                    continue
                missing = [expert for expert in range(count) if expert not in names]
                if missing or not names:
                    name = _fill(template, layer, missing[0] if missing else 0)
                    raise CheckpointError(
                        f"layer {layer}: tensor {name!r} is not in the checkpoint; "
                        f"found {len(names)} of {count} experts"
                    )
                pieces.append([names[expert] for expert in range(count)])
            source[param] = pieces
        return source

    def _layer_name(self, layer: int) -> str:
        filled = [_fill(t, layer).split("{expert}")[0] for templates in self.params.values() for t in templates]
        common = itertools.takewhile(lambda column: len(set(column)) == 1, zip(*filled, strict=False))
        return "".join(column[0] for column in common).rpartition(".")[0]


def _decoder_layers(index: CheckpointIndex, present: Sequence[int]) -> list[int]:
    """Those of the layers that a model decodes with: some checkpoints hold one more, to predict further tokens with.

    Such a layer lies behind the ``num_hidden_layers`` of the configuration beside the files, and has an ``eh_proj``.
    """
    config = Path(index.files[0]).with_name("config.json")
    try:
        described = json.loads(config.read_bytes())
        count = described.get("text_config", described).get("num_hidden_layers")
    except (OSError, ValueError, AttributeError):
        count = None
    if isinstance(count, int) and count > 0 and present and present[0] < count:
        return [layer for layer in present if layer < count]
    further = {int(match[1]) for name in index.tensors if (match := re.search(r"layers\.(\d+)\.eh_proj\.", name))}
    return [layer for layer in present if layer not in further] if further < set(present) else list(present)


def _fill(template: str, layer: int, expert: int | str = "{expert}") -> str:
    return template.replace("{layer}", str(layer)).replace("{expert}", str(expert))


def _match(template: str, index: CheckpointIndex) -> dict[int, dict[int, str]]:
    """Tensor names by layer and expert number; expert -1 where the template is of a stacked tensor."""
    pattern = re.escape(template).replace(r"\{layer\}", r"(?P<layer>\d+)").replace(r"\{expert\}", r"(?P<expert>\d+)")
    matcher = re.compile(pattern)
    stacked = "{expert}" not in template
    names: dict[int, dict[int, str]] = {}
    for name in index.tensors:
        if match := matcher.fullmatch(name):
            names.setdefault(int(match["layer"]), {})[-1 if stacked else int(match["expert"])] = name
    return names


_GATE_UP_DOWN = {
    "gate_up_proj": [
        "model.layers.{layer}.mlp.experts.{expert}.gate_proj.weight",
        "model.layers.{layer}.mlp.experts.{expert}.up_proj.weight",
    ],
    "down_proj": ["model.layers.{layer}.mlp.experts.{expert}.down_proj.weight"],
}

#: Known layouts by family name.
PRESETS: Mapping[str, Mapping[str, Sequence[str]]] = {
    **dict.fromkeys(
        ("qwen2_moe", "qwen3_moe", "olmoe", "deepseek_v2", "deepseek_v3", "glm4_moe", "ernie4_5_moe"), _GATE_UP_DOWN
    ),
    "mixtral": {
        "gate_up_proj": [
            "model.layers.{layer}.block_sparse_moe.experts.{expert}.w1.weight",
            "model.layers.{layer}.block_sparse_moe.experts.{expert}.w3.weight",
        ],
        "down_proj": ["model.layers.{layer}.block_sparse_moe.experts.{expert}.w2.weight"],
    },
    "gpt_oss": {
        name: [f"model.layers.{{layer}}.mlp.experts.{name}"]
        for name in ("gate_up_proj", "gate_up_proj_bias", "down_proj", "down_proj_bias")
    },
    "fused": {name: [f"model.layers.{{layer}}.mlp.experts.{name}"] for name in ("gate_up_proj", "down_proj")},
}
