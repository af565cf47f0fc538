"""What an attached model refuses, by name and before anything changes: moves, casts, switches, recordings."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.nn.utils import parametrize

from ..errors import AttachError, CaptureError, UnsupportedModelError
from .adapters import CHANGED, on_meta
from .discovery import ExpertsLayer

__all__ = [
    "NOT_RECORDED",
    "check_attachable",
    "check_decompressed",
    "guard",
    "refuse_changed",
    "refuse_load",
    "refuse_recording",
    "unguard",
]

NOT_RECORDED = (
    "an attached model takes its experts from a cache while it runs, which no graph holds: run it as it is, let "
    "torch.compile break the graph there (fullgraph=False), or call moecache.detach(model) first"
)
_GUARDED = ("_apply", "_replicate_for_data_parallel")


def refuse_recording(*inputs: Any) -> None:
    """Raise CaptureError if the call is traced, exported or transformed, where it would be recorded wrongly."""
    how = None
    if torch._C._get_tracing_state() is not None:
        how = "torch.jit.trace"
    elif torch._C._functorch.peek_interpreter_stack() is not None:
        how = "a torch.func transform (vmap, grad)"
    elif not all(isinstance(value, torch.Tensor) for value in inputs):
        how = "torch.fx.symbolic_trace"
    elif torch._C._len_torch_dispatch_stack():
        how = _recording_mode()
    if how is not None:
        raise CaptureError(f"{how} cannot record this model: {NOT_RECORDED}")


def _recording_mode() -> str | None:
    # Other dispatch modes, such as those that count or log operations, only look on.
    from torch._guards import detect_fake_mode
    from torch.fx.experimental.proxy_tensor import get_proxy_mode

    if get_proxy_mode() is None and detect_fake_mode() is None:
        return None
    return "torch.export" if torch.compiler.is_exporting() else "tracing with proxy or fake tensors"


def refuse_changed(module: nn.Module, layer: ExpertsLayer) -> None:
    """Raise AttachError if the module's expert parameters were given values since it was attached: none would be used."""
    for param in layer.experts.values():
        if param.stacked and not on_meta(module, param.names[0]):
            raise AttachError(f"{layer.name}.{param.names[0]} {CHANGED}")


def guard(model: nn.Module, layers: list[ExpertsLayer], device: torch.device) -> list[nn.Module]:
    """Refuse casts, moves and copies wherever they would reach an experts module; returns what is guarded."""
    guarded = []
    names = {f"{layer.name}.{name}" for layer in layers for name in layer.params}
    for path, module in model.named_modules():
        around = path == "" or any(layer.name == path or layer.name.startswith(path + ".") for layer in layers)
        if around or any(name.startswith(path + ".") for name in names):
            module.__dict__["_apply"] = _ApplyGuard(module, device)
            module.__dict__["_replicate_for_data_parallel"] = _refuse_replicas
            guarded.append(module)
    return guarded


def unguard(modules: list[nn.Module]) -> None:
    for module in modules:
        for name in _GUARDED:
            module.__dict__.pop(name, None)


class _ApplyGuard:
    """Stands in for ``Module._apply``, which ``.to()``, ``.half()``, ``.cuda()``, ``.share_memory()`` and the like call.

    What changes neither dtype nor device is applied to all but the experts, which have no bytes here.
    """

    def __init__(self, module: nn.Module, device: torch.device) -> None:
        self._module, self._device = module, device

    def __call__(self, fn: Callable[[torch.Tensor], torch.Tensor], recurse: bool = True) -> nn.Module:
        for dtype, device in {(p.dtype, self._device if p.is_meta else p.device) for p in self._module.parameters()}:
            changed = fn(torch.empty(0, dtype=dtype, device=device))
            if changed.dtype != dtype or changed.device != device:
                raise AttachError(
                    f"an attached model cannot go from {dtype} on {device} to {changed.dtype} on {changed.device}: its "
                    "experts stay as the bank holds them; call moecache.detach(model) first, or load it with that "
                    "dtype and device"
                )
        return type(self._module)._apply(self._module, lambda t: t if t.is_meta else fn(t), recurse)  # type: ignore[no-any-return,no-untyped-call]

    def __deepcopy__(self, memo: dict[int, Any]) -> _ApplyGuard:
        return _ApplyGuard(memo.get(id(self._module), self._module), self._device)


def _refuse_replicas() -> nn.Module:
    raise AttachError(
        "an attached model cannot be replicated over devices (DataParallel): its cache is on one of them; use one process "
        "and one model a device"
    )


def refuse_load(module: nn.Module, state_dict: dict[str, Any], prefix: str, *_: Any) -> None:
    """State-dict hook: values for the experts would be lost."""
    if any(key.startswith(prefix) for key in state_dict):
        raise AttachError(
            f"load_state_dict() would not reach the experts in the bank ({prefix}*); call moecache.detach(model) first"
        )


def check_attachable(model: nn.Module, layers: list[ExpertsLayer]) -> None:
    """Raise if the model is attached already, or if something else holds or moves its experts."""
    if "_moecache_attachment" in model.__dict__ or any("_moecache" in layer.module.__dict__ for layer in layers):
        raise AttachError(f"this {type(model).__name__} is attached already; call moecache.detach(model) first")
    wrapped = {
        id(base) for module in model.modules() if isinstance(base := getattr(module, "base_layer", None), nn.Module)
    }
    for name, module in model.named_modules():
        if hasattr(module, "_hf_hook"):
            raise AttachError(
                f"accelerate has hooks on {name or 'the model'} (device_map offloading), which would move what the "
                "cache moves; load without offloading, or call accelerate.hooks.remove_hook_from_submodules(model)"
            )
    check_decompressed(model)
    for layer in layers:
        if id(layer.module) in wrapped or parametrize.is_parametrized(layer.module):
            raise UnsupportedModelError(
                f"{layer.name}: its parameters are wrapped (an adapter, a parametrization), which paging would drop; "
                "merge it into the weights first"
            )
        _check_own_forward(layer)
        for key, param in layer.params.items():
            if type(param) is not nn.Parameter or type(param.data) is not torch.Tensor:
                raise UnsupportedModelError(
                    f"{layer.name}.{key} is a {type(param.data).__name__}, whose bytes are not a plain tensor's"
                )


def check_decompressed(model: nn.Module) -> None:
    """Raise AttachError where compressed-tensors would rebuild the experts in memory at the first forward."""
    if any(hasattr(module, "ct_decompress_hook") for module in model.modules()):
        raise AttachError(
            "compressed-tensors decompresses this model inside its first forward, experts included; load it with "
            "quantization_config=CompressedTensorsConfig(dequantize=True), which does so while loading"
        )


def _check_own_forward(layer: ExpertsLayer) -> None:
    module = layer.module
    replaced = module.__dict__.get("forward")
    if replaced is not None and getattr(replaced, "__func__", None) is not type(module).forward:
        raise UnsupportedModelError(
            f"{layer.name}: the forward of this instance was replaced ({replaced!r:.120}), so that nothing would ask the "
            "cache for experts; delete that attribute first"
        )
