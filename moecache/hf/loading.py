"""Loading with the experts kept out: everything else is loaded by transformers, experts are only located.

transformers describes how a checkpoint's tensors become a model's parameters by renamings and converters. The same
description, applied to the names alone, says where each expert's bytes lie. Where those bytes are the parameter's own
(experts stacked, gate and up joined), or packed in a format that is decoded on arrival, they can be read from the checkpoint
at any time; where they are not (another dtype, a transposition, another quantised format) transformers' converters make
them, one group of tensors at a time. Where experts cannot be kept out, one line says why and what it costs.
"""

from __future__ import annotations

import functools
import logging
import re
from collections.abc import Sequence
from copy import deepcopy
from dataclasses import replace
from typing import Any, NoReturn

import torch
from torch import nn
from transformers import PreTrainedModel
from transformers.core_model_loading import (
    WeightConverter,
    WeightRenaming,
    dot_natural_key,
    rename_source_key,
)

from ..checkpoint import CheckpointIndex
from ..errors import AttachError, UnsupportedModelError
from .discovery import NAME, PENDING, ExpertsLayer, discover
from .guards import check_decompressed
from .implementations import implementations_of
from .mapped import mapped_tensors
from .packed import refuse_other_format
from .pending import Conversion, PendingExperts, check_complete

__all__ = ["keep_experts_out", "kept_out", "loaded_whole"]

_log = logging.getLogger("moecache")
_WHOLE = "_moecache_whole"


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
    check_complete(pending)
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
