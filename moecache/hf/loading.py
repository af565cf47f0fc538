"""Loading with the experts kept out: everything else is loaded by transformers, experts are only located.

transformers describes how a checkpoint's tensors become a model's parameters by renamings and converters. The same
description, applied to the names alone, says where each expert's bytes lie. Where those bytes are the parameter's own
(experts stacked, gate and up joined), or packed in a format that is decoded on arrival, they can be read from the checkpoint
at any time; where they are not (another dtype, a transposition, another quantised format) transformers' converters make
them, one group of tensors at a time. Where
experts cannot be kept out, one line says why and what it costs.
"""

from __future__ import annotations

import functools
import logging
import re
from collections.abc import Callable, Mapping, Sequence
from copy import copy, deepcopy
from dataclasses import dataclass, field, replace
from typing import Any, Literal, NoReturn

import torch
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
from ..errors import AttachError, CheckpointError, UnsupportedModelError
from ..layout import LayerSource, PackedSource
from .discovery import NAME, PENDING, ExpertsLayer, discover
from .guards import check_decompressed
from .implementations import implementations_of
from .mapped import mapped_tensors
from .packed import decodes, packed_format, packed_pieces, refuse_other_format, warn_of_other_blocks

__all__ = ["PendingExperts", "keep_experts_out", "kept_out", "loaded_whole"]

_log = logging.getLogger("moecache")
_WHOLE = "_moecache_whole"


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
        # The files of an adapter come with the keys that are expected of them; they hold no model.
        if expected_keys is not None or not _asked_for(model):
            return stock(model, state_dict, checkpoint_files, load_config, expected_keys)
        _refuse_placement(load_config)
        check_decompressed(model)
        layers, reason = _layers_to_keep_out(model, state_dict, checkpoint_files, load_config)
        if reason is not None:
            _tell_whole(model, layers, reason)
            return stock(model, state_dict, checkpoint_files, load_config, expected_keys)
        pending, ignored = _locate(model, layers, CheckpointIndex(checkpoint_files), load_config)  # type: ignore[arg-type]
        kept_out = {name for conversion in pending.conversions.values() for name in conversion.names}
        needed = [name for name in pending.index.tensors if name not in kept_out and name not in ignored]
        rest: dict[str, Any] = mapped_tensors(
            pending.index, needed, read=bool(getattr(load_config, "disable_mmap", False))
        )
        rest.update((name, torch.empty(pending.index.tensors[name].shape, device="meta")) for name in ignored)
        expected = [key for key in model.state_dict() if key not in pending.conversions]
        info, offload_index = stock(model, rest, checkpoint_files, load_config, expected)
        info.missing_keys.difference_update(pending.conversions)
        for layer in layers:
            for param in layer.params.values():
                param._is_hf_initialized = True  # type: ignore[attr-defined]  # or transformers would fill them
            layer.module.__dict__[PENDING] = pending, layer.name
        return info, offload_index

    load._keeps_experts_out = True  # type: ignore[attr-defined]
    setattr(PreTrainedModel, "_load_pretrained_model", staticmethod(load))  # noqa: B010
    _refuse_distributed_checkpoints()


def _refuse_distributed_checkpoints() -> None:
    """The loader of checkpoints that were saved by several ranks is another one, which knows nothing of keeping out."""
    name = "_load_and_finalize_distributed_pretrained_model"
    stock = getattr(PreTrainedModel, name, None)
    if stock is None:
        return  # before transformers had one

    @functools.wraps(stock)
    def load(self: PreTrainedModel, *args: Any, **kwargs: Any) -> Any:
        if _asked_for(self):
            _refuse("a checkpoint saved by several ranks")
        return stock(self, *args, **kwargs)

    setattr(PreTrainedModel, name, load)


def kept_out(layers: Sequence[ExpertsLayer]) -> PendingExperts | None:
    """Where the experts of these layers are, if they were kept out of the model and have no bytes yet."""
    stamps = [layer.module.__dict__.get(PENDING) for layer in layers]
    if None in stamps or any(not param.is_meta for layer in layers for param in layer.params.values()):
        return None
    pendings = {id(pending): pending for pending, _ in stamps}  # type: ignore[misc]
    if len(pendings) > 1:
        raise AttachError("these experts were kept out of several models; attach each model by itself")
    pending: PendingExperts = stamps[0][0]  # type: ignore[index]
    described = dict(pending.layers)
    cast_to = {}
    for layer, (_, name) in zip(layers, stamps, strict=True):  # type: ignore[misc]
        for key, param in layer.params.items():
            if key not in described[name] or described[name][key][0] != param.shape:
                raise AttachError(
                    f"{name}.{key} is of shape {tuple(param.shape)} and was another when the model was loaded; load it again"
                )
            if param.dtype != described[name][key][1]:
                cast_to[f"{name}.{key}"] = param.dtype
    names = [name for _, name in stamps]  # type: ignore[misc]
    return replace(pending, layers=[(name, described[name]) for name in names], cast_to=cast_to)


def loaded_whole(layers: Sequence[ExpertsLayer]) -> str | None:
    """Why experts that were to be kept out are in memory all the same; None where nobody asked for that."""
    reason = next((layer.module.__dict__[_WHOLE] for layer in layers if _WHOLE in layer.module.__dict__), None)
    return None if reason is None else f"bank='disk' is not possible: {reason}; use bank='ram'"


def _asked_for(model: nn.Module) -> bool:
    configs = (module.__dict__.get("config") for module in model.modules())
    return any(getattr(config, "_experts_implementation", None) == NAME for config in configs)


def _refuse(what: str) -> NoReturn:
    raise AttachError(
        f"experts_implementation={NAME!r} does not go with {what}: its cache feeds one device of one process; load "
        "without it, or with another experts_implementation"
    )


def _refuse_placement(load_config: Any) -> None:
    if getattr(load_config, "device_mesh", None) is not None:
        _refuse("distributed_config or tp_plan over several ranks")
    places = {str(place) for place in (load_config.device_map or {}).values()}
    if len(places) > 1 or "disk" in places:
        _refuse(
            f"a device_map over {', '.join(sorted(places))} (the experts need no place of their own: name one device, such "
            "as device_map='cuda')"
        )


def _layers_to_keep_out(
    model: PreTrainedModel, state_dict: Any, checkpoint_files: list[str] | None, load_config: Any
) -> tuple[list[ExpertsLayer], str | None]:
    """The layers, and why their experts cannot be kept out, or None."""
    try:
        layers = discover(model)
    except UnsupportedModelError as error:
        return [], str(error)
    quantizer = load_config.hf_quantizer
    files = [str(file) for file in checkpoint_files or ()]
    others = sorted({file.rpartition(".")[2] for file in files if not file.endswith(".safetensors")})
    if others:
        return layers, f"they are read from .{', .'.join(others)} files; experts stay in safetensors files only"
    if state_dict is not None or not files:
        return layers, "they came as a state_dict"
    if quantizer is not None and not quantizer.pre_quantized:
        method = quantizer.quantization_config.quant_method
        return layers, f"they are quantised while loading ({getattr(method, 'value', method)})"
    ready = [layer.name for layer in layers if any(not param.is_meta for param in layer.params.values())]
    if ready:
        return layers, f"{ready[0]} was made in memory before loading"
    return layers, None


def _tell_whole(model: nn.Module, layers: Sequence[ExpertsLayer], reason: str) -> None:
    params = [param for layer in layers for param in layer.params.values()] or list(model.parameters())
    nbytes = sum(param.numel() * param.dtype.itemsize for param in params)
    _log.warning("experts are not kept out but loaded into memory, %s bytes: %s", f"{nbytes:,}", reason)
    for layer, name in zip(layers, implementations_of(model, layers, own=True), strict=True):
        layer.module.__dict__[_WHOLE] = reason
        layer.config._experts_implementation_internal = name


def _locate(
    model: PreTrainedModel, layers: list[ExpertsLayer], index: CheckpointIndex, load_config: Any
) -> tuple[PendingExperts, set[str]]:
    """Apply transformers' renamings and converters to the checkpoint's names, as its loader does.

    Returns where the experts are, and the names of tensors that are nobody's (such as a further layer to predict with).
    """
    mapping = load_config.weight_mapping or []
    trial = deepcopy(mapping)  # matching changes a transform's state
    renamings = [entry for entry in trial if isinstance(entry, WeightRenaming)]
    converters = [entry for entry in trial if isinstance(entry, WeightConverter)]
    by_pattern = {pattern: converter for converter in converters for pattern in converter.source_patterns}
    parameters = model.state_dict()
    wanted = {f"{layer.name}.{param}" for layer in layers for param in layer.params}
    prefix = model.base_model_prefix
    conversions: dict[str, Conversion] = {}
    ignored: set[str] = set()
    for key in sorted(index.tensors, key=dot_natural_key):
        renamed, pattern = rename_source_key(key, renamings, converters, prefix, parameters)
        if renamed not in parameters and key in parameters:
            renamed, pattern = rename_source_key(key, [], [], prefix, parameters)
        transform = None if pattern is None else by_pattern[pattern]
        targets = [renamed]
        if transform is not None:
            targets = [renamed.replace(transform.target_patterns[0], other) for other in transform.target_patterns]
        if wanted.isdisjoint(targets):
            if renamed not in parameters:
                ignored.add(key)
            continue
        conversion = conversions.get(targets[0]) or Conversion(renamed, transform, targets)
        conversion.sources.setdefault(pattern or key, []).append(key)
        conversions.update(dict.fromkeys(targets, conversion))
    tied = {
        name: source
        for name, source in _tied(model).items()
        if name in wanted and name not in conversions and source in conversions
    }
    conversions.update((name, conversions[source]) for name, source in tied.items())
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
        tied=tied,
        found={layer.name: layer for layer in layers},
    )
    kept = (name for conversion in conversions.values() for name in conversion.names)
    refuse_other_format(index, kept, ignored, load_config.hf_quantizer)
    _check_complete(pending)
    if pending.why_not_disk() is None:
        pending.make_bank(model, "disk").close()
        pending.warn_of_other_blocks()
    return pending, ignored


def _tied(model: PreTrainedModel) -> dict[str, str]:
    """Parameters that are others', as transformers ties them after loading."""
    return dict(getattr(model, "all_tied_weights_keys", None) or {})


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
