"""Loading with the experts kept out: everything else is loaded by transformers, experts are only located.

transformers describes how a checkpoint's tensors become a model's parameters by renamings and converters. The same
description, applied to the names alone, says where each expert's bytes lie. Where those bytes are the parameter's own
(experts stacked, gate and up joined) they can be read from the checkpoint at any time; where they are not (another
dtype, a transposition, a quantised format) transformers' converters make them, one group of tensors at a time.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from copy import deepcopy
from dataclasses import dataclass, field
from typing import Any

import torch
from safetensors import safe_open
from torch import nn
from transformers import PreTrainedModel
from transformers.core_model_loading import (
    Concatenate,
    MergeModulelist,
    WeightConverter,
    WeightRenaming,
    dot_natural_key,
    rename_source_key,
)

from ..bank import ExpertBank
from ..checkpoint import CheckpointIndex
from ..errors import CheckpointError, UnsupportedModelError
from .experts import NAME, ExpertsLayer, discover

__all__ = ["PendingExperts", "keep_experts_out"]


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

    def why_not_disk(self) -> str | None:
        """Why the checkpoint's bytes are not the parameters' bytes, or None if they are."""
        if self.quantizer is not None:
            method = self.quantizer.quantization_config.quant_method
            return (
                f"the checkpoint is quantised ({getattr(method, 'value', method)}) and is converted when it is loaded"
            )
        for name, params in self.layers:
            for param, (shape, dtype) in params.items():
                reason = self._why_not_plain(f"{name}.{param}", shape, dtype)
                if reason is not None:
                    return reason
        return None

    def _why_not_plain(self, full_name: str, shape: torch.Size, dtype: torch.dtype) -> str | None:
        conversion = self.conversions[full_name]
        steps = [] if conversion.transform is None else conversion.transform.operations
        merges = [isinstance(step, MergeModulelist) and step.dim == 0 for step in steps]
        joins = [isinstance(step, Concatenate) and step.dim == 1 for step in steps]
        if any(not (merge or join) for merge, join in zip(merges, joins, strict=True)) or len(conversion.targets) > 1:
            return f"{full_name} is made from the checkpoint by {', '.join(map(repr, steps))}, not by plain joining"
        found = {self.index.tensors[name].dtype for name in conversion.names}
        if found != {dtype}:
            return f"{full_name} is to be {dtype}, the checkpoint holds {', '.join(map(str, found))}"
        stacked = True not in merges
        if stacked and any(self.index.tensors[name].shape[:1] != shape[:1] for name in conversion.names):
            return f"{full_name} is one tensor {tuple(shape)}, the checkpoint's is of another shape"
        return None

    def make_bank(self, model: nn.Module, location: str) -> ExpertBank:
        """A bank on the checkpoint's files, or of experts read (and converted if need be) into memory."""
        names = [name for name, _ in self.layers]
        reason = self.why_not_disk()
        if reason is None:
            layers = [{param: self._pieces(f"{name}.{param}") for param in params} for name, params in self.layers]
            bank = ExpertBank.from_safetensors(self.index, layers, location=location, names=names)  # type: ignore[arg-type]
            self._check_shapes(bank)
            return bank
        if location == "disk":
            raise CheckpointError(f"bank='disk' is not possible: {reason}; use bank='ram'")
        converted: dict[str, torch.Tensor] = {}
        for conversion in self.conversions.values():
            if conversion.renamed not in converted:
                converted.update(self._convert(conversion, model))
        return ExpertBank.from_tensors(
            [{param: converted[f"{name}.{param}"] for param in params} for name, params in self.layers], names=names
        )

    def _pieces(self, full_name: str) -> list[str | list[str]]:
        conversion = self.conversions[full_name]
        if conversion.transform is None:
            return list(conversion.names)
        merged = any(isinstance(step, MergeModulelist) for step in conversion.transform.operations)
        ordered = [conversion.sources[p] for p in conversion.transform.source_patterns if p in conversion.sources]
        return [list(names) if merged else names[0] for names in ordered]

    def _check_shapes(self, bank: ExpertBank) -> None:
        for layer, (name, params) in enumerate(self.layers):
            for param, (shape, dtype) in params.items():
                spec = bank.kinds[bank.layer_kind[layer]][param]
                if (bank.num_experts[layer], *spec.shape) != tuple(shape) or spec.dtype != dtype:
                    source = self.conversions[f"{name}.{param}"].names[0]
                    raise CheckpointError(
                        f"{name}.{param}: the checkpoint's tensors ({source!r} and others) make "
                        f"{(bank.num_experts[layer], *spec.shape)}, {spec.dtype}; "
                        f"the model expects {tuple(shape)}, {dtype}"
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
            result[target] = tensor.detach().contiguous()
        return result

    def _reader(
        self, name: str, conversion: Conversion, mapping: Any, dtypes: Mapping[str, torch.dtype]
    ) -> Callable[[], torch.Tensor]:
        dtype = dtypes.get(conversion.renamed)
        if self.quantizer is not None and self.quantizer.pre_quantized:
            stored = torch.empty(0, dtype=self.index.tensors[name].dtype)
            if hasattr(self.quantizer, "get_new_dtype"):
                dtype = self.quantizer.get_new_dtype(mapping, stored, dtype)
            elif not stored.is_floating_point() or stored.element_size() == 1:
                dtype = None  # before transformers 5.21: packed numbers are left to the converter
        return lambda: self.index.read(name).to(dtype) if dtype is not None else self.index.read(name)


def keep_experts_out() -> None:
    """Wrap transformers' loader; it behaves as before for models that do not ask for moecache."""
    stock = PreTrainedModel._load_pretrained_model
    if getattr(stock, "_keeps_experts_out", False):
        return

    @functools.wraps(stock)
    def load(
        model: PreTrainedModel,
        state_dict: dict[str, Any] | None,
        checkpoint_files: list[str] | None,
        load_config: Any,
        expected_keys: list[str] | None = None,
    ) -> tuple[Any, Any]:
        layers = _requested(model)
        readable = checkpoint_files and all(str(file).endswith(".safetensors") for file in checkpoint_files)
        quantises = load_config.hf_quantizer is not None and not load_config.hf_quantizer.pre_quantized
        if not layers or state_dict is not None or not readable or quantises:
            return stock(model, state_dict, checkpoint_files, load_config, expected_keys)
        pending = _locate(model, layers, CheckpointIndex(checkpoint_files), load_config)  # type: ignore[arg-type]
        kept_out = {name for conversion in pending.conversions.values() for name in conversion.names}
        expected = [key for key in model.state_dict() if key not in pending.conversions]
        with ExitStack() as stack:
            rest: dict[str, Any] = {}
            for file in pending.index.files:
                handle = stack.enter_context(safe_open(file, framework="pt", device="cpu"))
                names = set(handle.keys()) - kept_out
                rest.update({name: handle.get_slice(name) for name in names})
            info, offload_index = stock(model, rest, checkpoint_files, load_config, expected)
        info.missing_keys.difference_update(pending.conversions)
        for layer in layers:
            for param in layer.params.values():
                param._is_hf_initialized = True  # type: ignore[attr-defined]  # or transformers would fill them
        model.__dict__["_moecache_pending"] = pending
        return info, offload_index

    load._keeps_experts_out = True  # type: ignore[attr-defined]
    setattr(PreTrainedModel, "_load_pretrained_model", staticmethod(load))  # noqa: B010


def _requested(model: PreTrainedModel) -> list[ExpertsLayer]:
    """The experts modules whose configuration asks for moecache and that are still without bytes."""
    try:
        layers = discover(model)
    except UnsupportedModelError:
        return []  # attach() says why; loading as usual harms nothing
    return [
        layer
        for layer in layers
        if getattr(layer.module.config, "_experts_implementation", None) == NAME
        and all(param.device.type == "meta" for param in layer.params.values())
    ]


def _locate(
    model: PreTrainedModel, layers: list[ExpertsLayer], index: CheckpointIndex, load_config: Any
) -> PendingExperts:
    """Apply transformers' renamings and converters to the checkpoint's names, as its loader does; keep the experts'."""
    mapping = load_config.weight_mapping or []
    trial = deepcopy(mapping)  # matching changes a transform's state
    renamings = [entry for entry in trial if isinstance(entry, WeightRenaming)]
    converters = [entry for entry in trial if isinstance(entry, WeightConverter)]
    by_pattern = {pattern: converter for converter in converters for pattern in converter.source_patterns}
    parameters = model.state_dict()
    wanted = {f"{layer.name}.{param}" for layer in layers for param in layer.params}
    prefix = model.base_model_prefix
    conversions: dict[str, Conversion] = {}
    for key in sorted(index.tensors, key=dot_natural_key):
        renamed, pattern = rename_source_key(key, renamings, converters, prefix, parameters)
        if renamed not in parameters and key in parameters:
            renamed, pattern = rename_source_key(key, [], [], prefix, parameters)
        transform = None if pattern is None else by_pattern[pattern]
        targets = [renamed]
        if transform is not None:
            targets = [renamed.replace(transform.target_patterns[0], other) for other in transform.target_patterns]
        if wanted.isdisjoint(targets):
            continue
        conversion = conversions.get(targets[0]) or Conversion(renamed, transform, targets)
        conversion.sources.setdefault(pattern or key, []).append(key)
        conversions.update(dict.fromkeys(targets, conversion))
    for entry, tried in zip(mapping, trial, strict=True):
        entry._was_used = entry._was_used or tried._was_used
    pending = PendingExperts(
        index,
        [
            (
                layer.name,
                {key: (p.shape, _dtype(p, f"{layer.name}.{key}", load_config)) for key, p in layer.params.items()},
            )
            for layer in layers
        ],
        conversions,
        load_config.hf_quantizer,
    )
    _check_complete(pending)
    if pending.why_not_disk() is None:
        pending.make_bank(model, "disk").close()
    return pending


def _dtype(param: torch.Tensor, name: str, load_config: Any) -> torch.dtype:
    for pattern, dtype in (load_config.dtype_plan or {}).items():
        if re.search(pattern.replace("*", ".*"), name):
            return dtype  # type: ignore[no-any-return]
    return param.dtype


def _check_complete(pending: PendingExperts) -> None:
    for name, params in pending.layers:
        for param, (shape, _) in params.items():
            full_name = f"{name}.{param}"
            if full_name not in pending.conversions:
                raise CheckpointError(
                    f"no tensor of the checkpoint ({pending.index.files[0]} and others) becomes {full_name}; "
                    "it cannot be run without its experts"
                )
            conversion = pending.conversions[full_name]
            if conversion.transform is None or not isinstance(conversion.transform.operations[0], MergeModulelist):
                continue
            patterns = conversion.transform.source_patterns
            for pattern in patterns:
                names = conversion.sources.get(pattern, [])
                if len(names) != shape[0] and pending.quantizer is None:
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
