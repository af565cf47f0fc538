"""Experts that were left out of a model: where the checkpoint has them, and the bank made of that."""

from __future__ import annotations

import logging
import re
from collections.abc import Callable, Mapping, Sequence
from copy import copy, deepcopy
from dataclasses import dataclass, field, replace
from typing import Any, Literal

import torch
from torch import nn
from transformers.core_model_loading import (
    Concatenate,
    MergeModulelist,
    WeightConverter,
    WeightRenaming,
)

from ..bank import ExpertBank
from ..checkpoint import CheckpointIndex
from ..errors import CheckpointError
from ..layout import LayerSource, PackedSource
from .discovery import ExpertsLayer
from .packed import decodes, packed_format, packed_pieces, warn_of_other_blocks

__all__ = ["Conversion", "PendingExperts", "check_complete"]

_log = logging.getLogger("moecache")


@dataclass
class Conversion:
    """How some tensors of the checkpoint become one or more parameters of the model."""

    renamed: str  # the first target's full name, by which transformers calls it
    transform: WeightConverter | None
    targets: list[str]
    sources: dict[str, list[str]] = field(default_factory=dict)  # by pattern, in transformers' order

    @property
    def names(self) -> list[str]:
        return [name for names in self.sources.values() for name in names]


@dataclass
class PendingExperts:
    """Experts that were left out of a model: where they are, until a cache is attached."""

    index: CheckpointIndex
    layers: list[tuple[str, dict[str, tuple[torch.Size, torch.dtype]]]]  # module name; each parameter's shape, dtype
    conversions: dict[str, Conversion]  # by the parameter's full name
    quantizer: Any
    cast_to: Mapping[str, torch.dtype] = field(default_factory=dict)  # of parameters that were cast after loading
    tied: Mapping[str, str] = field(default_factory=dict)  # parameters that are another's: that other's name
    found: Mapping[str, ExpertsLayer] = field(default_factory=dict)  # by module name: what each expert has of those

    def __deepcopy__(self, memo: dict[int, Any]) -> PendingExperts:
        return self  # it only says where bytes are

    def why_not_disk(self) -> str | None:
        """Why the checkpoint's bytes are not the parameters' bytes, nor decoded to them, or None if they are."""
        if self.quantizer is not None and not decodes(self.quantizer):
            method = self.quantizer.quantization_config.quant_method
            return (
                f"the checkpoint is quantised ({getattr(method, 'value', method)}) and is converted when it is loaded"
            )
        modules = any(not param.stacked for layer in self.found.values() for param in layer.experts.values())
        if modules and self._packed():
            return "packed experts that are modules of their own are converted when they are loaded"
        for name, params in self.layers:
            for param, (shape, dtype) in params.items():
                reason = self._why_not_plain(f"{name}.{param}", shape, dtype)
                if reason is not None:
                    return reason
        return None

    def _why_not_plain(self, full_name: str, shape: torch.Size, dtype: torch.dtype) -> str | None:
        conversion = self.conversions[full_name]
        if full_name in self.cast_to:
            return f"{full_name} was loaded as {dtype} and then cast to {self.cast_to[full_name]}"
        packed, steps = packed_format([] if conversion.transform is None else conversion.transform.operations)
        merges = [isinstance(step, MergeModulelist) and step.dim == 0 for step in steps]
        joins = [isinstance(step, Concatenate) and step.dim == 1 for step in steps]
        if any(not (merge or join) for merge, join in zip(merges, joins, strict=True)) or len(conversion.targets) > 1:
            return f"{full_name} is made from the checkpoint by {', '.join(map(repr, steps))}, not by plain joining"
        if packed is not None:
            return None  # what its tensors must be is checked with their format
        found = {self.index.tensors[name].dtype for name in conversion.names}
        if found != {dtype}:
            return f"{full_name} is to be {dtype}, the checkpoint holds {', '.join(map(str, found))}"
        stacked = True not in merges
        if stacked and any(self.index.tensors[name].shape[:1] != shape[:1] for name in conversion.names):
            return f"{full_name} is one tensor {tuple(shape)}, the checkpoint's is of another shape"
        return None

    def _packed(self) -> bool:
        return any(
            conversion.transform is not None and packed_format(conversion.transform.operations)[0] is not None
            for conversion in self.conversions.values()
        )

    def _why_not_decoded(self, model: nn.Module) -> str | None:
        device = next((param.device for param in model.parameters() if not param.is_meta), None)
        if not self._packed() or device is None or device.type == "cpu":
            return None
        return f"packed experts are decoded into host memory only, and the model is on {device}"

    def make_bank(self, model: nn.Module, location: Literal["disk", "ram"] | None) -> ExpertBank:
        """A bank on the checkpoint's files, or of experts read (and converted if need be) into memory."""
        reason = self.why_not_disk() or self._why_not_decoded(model)
        if reason is None:
            return self._stored_bank(location or "disk")
        if location == "disk":
            raise CheckpointError(f"bank='disk' is not possible: {reason}; use bank='ram'")
        names = [name for name, _ in self.layers]
        wanted = {f"{name}.{param}" for name, params in self.layers for param in params}
        used = {id(self.conversions[name]): self.conversions[name] for name in sorted(wanted)}
        stored = {name for conversion in used.values() for name in conversion.names}
        _log.warning(
            "all experts are converted into RAM, %s bytes (%s bytes in the checkpoint): %s",
            f"{self._nbytes():,}",
            f"{sum(self.index.tensors[name].nbytes for name in stored):,}",
            reason,
        )
        as_loaded = replace(self, cast_to={})
        if as_loaded.why_not_disk() is None:
            with as_loaded._stored_bank("disk") as bank:
                return ExpertBank.from_tensors([self._cast(bank, number) for number in range(len(names))], names=names)
        converted: dict[str, torch.Tensor] = {}
        for conversion in used.values():
            made = self._convert(conversion, model)
            converted.update((name, tensor) for name, tensor in made.items() if name in wanted)
        return ExpertBank.from_tensors(
            [
                self.found[name].adopted({param: converted[self._source(f"{name}.{param}")] for param in params})
                for name, params in self.layers
            ],
            names=names,
        )

    def _stored_bank(self, location: Literal["disk", "ram"]) -> ExpertBank:
        index, layers = self._sources()
        names = [name for name, _ in self.layers]
        bank = ExpertBank.from_safetensors(index, layers, location=location, names=names)
        self._check_shapes(bank)
        return bank

    def _cast(self, bank: ExpertBank, layer: int) -> dict[str, torch.Tensor]:
        """A layer's experts as a bank of what was loaded has them, with the casts since."""
        name = self.layers[layer][0]
        experts = self.found[name].experts
        return {
            key: value.to(self.cast_to.get(f"{name}.{experts[key].names[0]}"))
            for key, value in bank.layer(layer).items()
        }

    def _nbytes(self) -> int:
        return sum(
            shape.numel() * self.cast_to.get(f"{name}.{param}", dtype).itemsize
            for name, params in self.layers
            for param, (shape, dtype) in params.items()
        )

    def _pieces(self, full_name: str, dtype: torch.dtype) -> list[str | Sequence[str] | PackedSource]:
        conversion = self.conversions[full_name]
        if conversion.transform is None:
            return list(conversion.names)
        packed, steps = packed_format(conversion.transform.operations)
        merged = any(isinstance(step, MergeModulelist) for step in steps)
        if packed is not None:
            patterns = conversion.transform.source_patterns
            return packed_pieces(self.index, patterns, conversion.sources, packed, dtype, merged=merged)
        ordered = [conversion.sources[p] for p in conversion.transform.source_patterns if p in conversion.sources]
        return [list(names) if merged else names[0] for names in ordered]

    def _source(self, full_name: str) -> str:
        return self.tied.get(full_name, full_name)

    def _sources(self) -> tuple[CheckpointIndex, list[LayerSource]]:
        """Where each expert's bytes lie, and the index with tensors of all experts in the shape that has a row for each."""
        index = copy(self.index)
        index.tensors = dict(self.index.tensors)
        layers: list[LayerSource] = []
        for name, params in self.layers:
            source: dict[str, list[str | Sequence[str] | PackedSource]] = {}
            for key, param in self.found[name].experts.items():
                count = self.found[name].num_experts
                pieces = [self._pieces(f"{name}.{part}", params[part][1]) for part in param.names]
                if not param.stacked:
                    source[key] = [[str(piece[0]) for piece in pieces]]
                    continue
                source[key] = [
                    piece if isinstance(piece, (str, PackedSource)) else piece[:count] for piece in pieces[0]
                ]
                if len(pieces[0]) == 1 and isinstance(pieces[0][0], str):
                    extent = index.tensors[pieces[0][0]]
                    if extent.shape[1:] != param.shape and extent.shape[0] == count * param.shape[0]:
                        index.tensors[pieces[0][0]] = extent._replace(shape=(count, *param.shape))
            layers.append(source)
        return index, layers

    def warn_of_other_blocks(self) -> None:
        """Log once if transformers reads scales otherwise than the configuration says."""
        config = None if self.quantizer is None else self.quantizer.quantization_config
        params = ((f"{name}.{param}", dtype) for name, params in self.layers for param, (_, dtype) in params.items())
        any(warn_of_other_blocks(self.index, self._pieces(name, dtype), config) for name, dtype in params)

    def _check_shapes(self, bank: ExpertBank) -> None:
        for layer, (name, params) in enumerate(self.layers):
            for key, param in self.found[name].experts.items():
                shape, dtype = param.shape, params[param.names[0]][1]
                spec = bank.shape_groups[bank.layer_group[layer]][key]
                count = self.found[name].num_experts
                if bank.num_experts[layer] != count or spec != (shape, dtype):
                    source = self.conversions[f"{name}.{param.names[0]}"].names[0]
                    raise CheckpointError(
                        f"{name}.{param.names[0]}: the checkpoint's tensors ({source!r} and others) make "
                        f"{(bank.num_experts[layer], *spec.shape)}, {spec.dtype}; "
                        f"the model expects {(count, *shape)}, {dtype}"
                    )

    def _convert(self, conversion: Conversion, model: nn.Module) -> dict[str, torch.Tensor]:
        dtypes = {f"{name}.{param}": dtype for name, params in self.layers for param, (_, dtype) in params.items()}
        shapes = {f"{name}.{param}": shape for name, params in self.layers for param, (shape, _) in params.items()}
        mapping: Any
        if conversion.transform is None:
            mapping = WeightRenaming(conversion.names[0], conversion.renamed)
        else:
            mapping = deepcopy(conversion.transform)
        for pattern, names in conversion.sources.items():
            for name in names:
                mapping.add_tensor(conversion.renamed, name, pattern, self._reader(name, conversion, mapping, dtypes))
        made = mapping.convert(conversion.renamed, model=model, config=model.config, hf_quantizer=self.quantizer)
        result = {}
        for target, value in made.items():
            tensor = value[0] if isinstance(value, list) else value
            if target in dtypes and (tensor.shape != shapes[target] or tensor.dtype != dtypes[target]):
                raise CheckpointError(
                    f"{target}: converting {conversion.names[0]!r} and others made "
                    f"{tuple(tensor.shape)}, {tensor.dtype}; "
                    f"the model expects {tuple(shapes[target])}, {dtypes[target]}"
                )
            result[target] = tensor.detach().to(self.cast_to.get(target)).contiguous()
        return result

    def _reader(
        self, name: str, conversion: Conversion, mapping: Any, dtypes: Mapping[str, torch.dtype]
    ) -> Callable[[], torch.Tensor]:
        dtype = dtypes.get(conversion.renamed)
        if self.quantizer is not None and self.quantizer.pre_quantized:
            stored = torch.empty(0, dtype=self.index.tensors[name].dtype, device="cpu")
            if hasattr(self.quantizer, "get_new_dtype"):
                dtype = self.quantizer.get_new_dtype(mapping, stored, dtype)
            elif not stored.is_floating_point() or stored.element_size() == 1:
                dtype = None  # before transformers 5.21: packed numbers are left to the converter
        return lambda: self.index.read(name).to(dtype) if dtype is not None else self.index.read(name)


def check_complete(pending: PendingExperts) -> None:
    for name, params in pending.layers:
        for param, (shape, _) in params.items():
            full_name = f"{name}.{param}"
            if full_name not in pending.conversions:
                raise CheckpointError(
                    f"no tensor of the checkpoint ({pending.index.files[0]} and others) becomes {full_name}; "
                    "it cannot be run without its experts"
                )
            conversion = pending.conversions[full_name]
            packed, steps = packed_format([] if conversion.transform is None else conversion.transform.operations)
            if conversion.transform is None or not (steps and isinstance(steps[0], MergeModulelist)):
                continue
            for pattern in conversion.transform.source_patterns:
                names = conversion.sources.get(pattern, [])
                expected = pending.quantizer is None or (packed is not None and bool(names))
                if len(names) != shape[0] and expected:
                    raise CheckpointError(
                        f"{full_name}: {_first_missing(names, shape[0], pattern)} is not in the checkpoint; "
                        f"found {len(names)} of {shape[0]} experts"
                    )


def _first_missing(names: list[str], count: int, pattern: str) -> str:
    """The name that is absent from a run of names that differ in one number."""
    split = [re.split(r"(\d+)", name) for name in names]
    if len(split) > 1 and len({len(parts) for parts in split}) == 1:
        places = [i for i in range(1, len(split[0]), 2) if len({parts[i] for parts in split}) > 1]
        if len(places) == 1:
            present = {int(parts[places[0]]) for parts in split}
            absent = next((n for n in range(count) if n not in present), None)
            if absent is not None:
                return "tensor " + repr("".join([*split[0][: places[0]], str(absent), *split[0][places[0] + 1 :]]))
    return f"a tensor like {pattern!r}"
