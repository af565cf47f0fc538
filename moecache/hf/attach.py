"""Attach a cache to a transformers model, and take it off again."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from os import PathLike
from pathlib import Path
from typing import Any, Literal

import torch
import transformers
from torch import nn
from torch.nn.utils import parametrize
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel

from ..bank import ExpertBank
from ..cache import ExpertCache
from ..checkpoint import CheckpointIndex
from ..errors import AttachError, UnsupportedModelError
from .experts import NAME, ExpertsLayer, LayerState, discover
from .forms import Form, choose_form
from .needs import nbytes_to_come
from .requests import Requests

__all__ = ["Attachment", "attach", "detach", "load"]

BankChoice = Literal["disk", "ram"] | None


def attach(
    model: PreTrainedModel,
    capacity: int | float | str = 0.25,
    *,
    bank: BankChoice = None,
    context: int | None = None,
    **options: Any,
) -> ExpertCache:
    """Run a model's experts from a cache; ``model.generate()`` and the model's outputs do not change.

    Parameters
    ----------
    model : PreTrainedModel
        Loaded with ``experts_implementation="moecache"`` (the experts are still in the checkpoint), or as usual (the
        experts in memory become the bank, without a copy).
    capacity : int, float or str
        How many experts the cache holds; see :class:`moecache.ExpertCache`.
    bank : {"disk", "ram"}, optional
        Where the experts lie: in the checkpoint's files, or in host memory. By default the files if their bytes can
        be used as they are.
    context : int, optional
        Tokens, prompt and answer over all sequences at once, whose KV cache and activations ``capacity="auto"`` leaves room
        for; by default 4,096, or fewer where the model knows no more positions.
    **options
        Passed to :class:`moecache.ExpertCache`.

    Returns
    -------
    ExpertCache
        Also reachable as ``model.moecache``. ``detach(model)`` closes it.

    Raises
    ------
    UnsupportedModelError
        The model has no MoE layers, or experts of a form the library does not know.
    AttachError
        The model is attached already, or hooked or wrapped by another library.
    CheckpointError
        Experts are not found whole, or ``bank="disk"`` and the checkpoint's bytes are not the parameters' bytes.
    """
    layers = discover(model)
    _check_attachable(model, layers)
    expert_bank = _make_bank(model, layers, bank)
    try:
        device = _device(model)
        forms = _choose_forms(layers, expert_bank, device)
        for name, value in {"device": device, "top_k": _top_k(layers), "sentinel": _sentinel(layers)}.items():
            options.setdefault(name, value)
        if isinstance(capacity, str) and capacity == "auto":
            options.setdefault("reserve", nbytes_to_come(model, device, context))
        cache = ExpertCache(expert_bank, capacity, **options)
    except BaseException:
        expert_bank.close()
        raise
    Attachment(model, layers, forms, cache).install()
    return cache


def detach(model: PreTrainedModel) -> None:
    """Close a model's cache and give the model back its own parameters and experts implementation.

    Raises
    ------
    AttachError
        The model is not attached, or is a copy of the one that is.
    """
    attachment = model.__dict__.get("_moecache_attachment")
    if attachment is None:
        raise AttachError(f"this {type(model).__name__} is not attached")
    if attachment.model is not model:
        raise AttachError("this model is a copy that shares the cache of the one it was copied from; detach that one")
    attachment.remove()


def load(
    path: str | PathLike[str], *, capacity: int | float | str = 0.25, bank: BankChoice = None, **options: Any
) -> PreTrainedModel:
    """Load a model with its experts kept out, and attach a cache.

    Parameters
    ----------
    path : str or Path
        A folder or a name on the hub, as for ``from_pretrained``.
    capacity, bank
        See :func:`attach`.
    **options
        Options of :class:`moecache.ExpertCache` by name; all others go to ``from_pretrained``.

    Returns
    -------
    PreTrainedModel
        With the cache as ``model.moecache``.
    """
    cache_names = set(inspect.signature(ExpertCache.__init__).parameters) - {"self", "bank", "capacity"}
    cache_options = {name: options.pop(name) for name in list(options) if name in cache_names | {"context"}}
    if not options.keys() & {"variant", "subfolder"} and any(Path(path).glob("*.safetensors*")):
        CheckpointIndex(path)  # says what is missing or cut short before anything is built
    config_names = ("trust_remote_code", "revision", "token", "cache_dir", "subfolder")
    config = options.get("config") or AutoConfig.from_pretrained(
        path, **{name: options[name] for name in config_names if name in options}
    )
    architecture = (config.architectures or [""])[0]
    cls = getattr(transformers, architecture, AutoModelForCausalLM)
    model = cls.from_pretrained(path, experts_implementation=NAME, **options)
    attach(model, capacity, bank=bank, **cache_options)
    return model


class Attachment:
    """All that attaching changes on a model, so that detaching undoes it. Copies of the model share it."""

    def __init__(
        self, model: PreTrainedModel, layers: list[ExpertsLayer], forms: list[Form], cache: ExpertCache
    ) -> None:
        self.model, self.layers, self.forms, self.cache = model, layers, forms, cache
        self.requests = Requests(cache, model)
        self._handles: list[Any] = []
        self._guarded: list[nn.Module] = []
        self._implementations: list[tuple[Any, Any]] = []

    def install(self) -> None:
        for number, (layer, form) in enumerate(zip(self.layers, self.forms, strict=True)):
            for name, param in layer.params.items():
                if param.device.type != "meta":
                    layer.module._parameters[name] = nn.Parameter(param.detach().to("meta"), requires_grad=False)
            layer.module._moecache = LayerState(self, number, form)  # type: ignore[assignment]
            module: Any = layer.module
            self._handles += [
                module.register_state_dict_post_hook(_StreamBack(self, number)),
                module.register_load_state_dict_pre_hook(_refuse_load),
            ]
        self._switch_implementation()
        self._handles.append(self.model.register_forward_pre_hook(self._before_forward, with_kwargs=True))
        self._guard()
        self.model.__dict__["_moecache_attachment"] = self
        self.model.__dict__["moecache"] = self.cache

    def remove(self) -> None:
        self.requests.end()
        self.cache.close()
        self.cache.bank.close()
        for handle in self._handles:
            handle.remove()
        for layer in self.layers:
            layer.module._parameters.update(layer.params)
            layer.module.__dict__.pop("_moecache", None)
        for module in self._guarded:
            for name in ("_apply", "set_experts_implementation"):
                module.__dict__.pop(name, None)
        for config, implementation in self._implementations:
            config._experts_implementation_internal = implementation
        for name in ("_moecache_attachment", "moecache"):
            self.model.__dict__.pop(name, None)

    def __deepcopy__(self, memo: dict[int, Any]) -> Attachment:
        memo[id(self.cache)] = self.cache
        return self

    def __reduce__(self) -> Any:
        raise AttachError("an attached model cannot be pickled; use save_pretrained(), or moecache.detach(model) first")

    def _before_forward(self, model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        self.requests.before_forward(args, kwargs)

    def _switch_implementation(self) -> None:
        found: list[Any] = [self.model.config, *(layer.module.config for layer in self.layers)]
        for config in {id(config): config for config in found}.values():
            self._implementations.append((config, config._experts_implementation))
            config._experts_implementation_internal = NAME

    def _guard(self) -> None:
        """Refuse casts and moves wherever they would reach an experts module."""
        names = [layer.name for layer in self.layers]
        for path, module in self.model.named_modules():
            if path == "" or any(name == path or name.startswith(path + ".") for name in names):
                module.__dict__["_apply"] = _ApplyGuard(module, self.cache.device)
                self._guarded.append(module)
        self.model.__dict__["set_experts_implementation"] = _refuse_switch


class _ApplyGuard:
    """Stands in for ``Module._apply``, which ``.to()``, ``.half()``, ``.cuda()`` and the like all call."""

    def __init__(self, module: nn.Module, device: torch.device) -> None:
        self._module, self._device = module, device

    def __call__(self, fn: Callable[[torch.Tensor], torch.Tensor], recurse: bool = True) -> nn.Module:
        params = self._module.parameters()
        for dtype, device in {(p.dtype, self._device if p.device.type == "meta" else p.device) for p in params}:
            changed = fn(torch.empty(0, dtype=dtype, device=device))
            if changed.dtype != dtype or changed.device != device:
                raise AttachError(
                    f"an attached model cannot go from {dtype} on {device} to {changed.dtype} on {changed.device}: its "
                    "experts stay as the bank holds them; call moecache.detach(model) first, or load it with that "
                    "dtype and device"
                )
        return self._module

    def __deepcopy__(self, memo: dict[int, Any]) -> _ApplyGuard:
        return _ApplyGuard(memo.get(id(self._module), self._module), self._device)


class _StreamBack:
    """State-dict hook: the experts' entries hold the bank's bytes, not the meta parameters."""

    def __init__(self, attachment: Attachment, layer: int) -> None:
        self._attachment, self._layer = attachment, layer

    def __call__(self, module: nn.Module, state_dict: dict[str, Any], prefix: str, local_metadata: Any) -> None:
        layer = self._attachment.layers[self._layer]
        if all(param.device.type != "meta" for param in layer.params.values()):
            tensors: dict[str, torch.Tensor] = {name: param.detach() for name, param in layer.params.items()}
        else:
            tensors = self._attachment.cache.bank.layer(self._layer)
        state_dict.update({prefix + name: tensor for name, tensor in tensors.items()})


def _refuse_load(module: nn.Module, state_dict: dict[str, Any], prefix: str, *_: Any) -> None:
    if any(key.startswith(prefix) for key in state_dict):
        raise AttachError(
            f"load_state_dict() would not reach the experts in the bank ({prefix}*); call moecache.detach(model) first"
        )


def _refuse_switch(experts_implementation: Any) -> None:
    raise AttachError(
        f"the experts of an attached model are in a cache; call moecache.detach(model) before switching to "
        f"experts_implementation={experts_implementation!r}"
    )


def _check_attachable(model: PreTrainedModel, layers: list[ExpertsLayer]) -> None:
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
    for layer in layers:
        if id(layer.module) in wrapped or parametrize.is_parametrized(layer.module):
            raise UnsupportedModelError(
                f"{layer.name}: its parameters are wrapped (an adapter, a parametrization), which paging would drop; "
                "merge it into the weights first"
            )
        for key, param in layer.params.items():
            if type(param) is not nn.Parameter or type(param.data) is not torch.Tensor:
                raise UnsupportedModelError(
                    f"{layer.name}.{key} is a {type(param.data).__name__}, whose bytes are not a plain tensor's"
                )


def _make_bank(model: PreTrainedModel, layers: list[ExpertsLayer], choice: BankChoice) -> ExpertBank:
    if choice not in ("disk", "ram", None):
        raise AttachError(f"bank is {choice!r}; expected 'disk', 'ram' or None")
    pending = model.__dict__.get("_moecache_pending")
    if pending is not None and all(p.device.type == "meta" for layer in layers for p in layer.params.values()):
        location = choice or ("disk" if pending.why_not_disk() is None else "ram")
        return pending.make_bank(model, location)  # type: ignore[no-any-return]
    if choice == "disk":
        raise AttachError(
            "bank='disk' needs a model whose experts were kept out: load it with "
            f"from_pretrained(..., experts_implementation={NAME!r}) after `import moecache.hf`"
        )
    return ExpertBank.from_tensors(
        [{name: param.detach() for name, param in layer.params.items()} for layer in layers],
        names=[layer.name for layer in layers],
    )


def _device(model: PreTrainedModel) -> torch.device:
    return next((p.device for p in model.parameters() if p.device.type != "meta"), torch.device("cpu"))


def _choose_forms(layers: list[ExpertsLayer], bank: ExpertBank, device: torch.device) -> list[Form]:
    known: dict[tuple[type, int], Form] = {}
    for number, layer in enumerate(layers):
        key = type(layer.module), bank.layer_kind[number]
        if key not in known:
            known[key] = choose_form(layer.module, bank.kinds[bank.layer_kind[number]], device)
    return [known[type(layer.module), bank.layer_kind[number]] for number, layer in enumerate(layers)]


def _top_k(layers: list[ExpertsLayer]) -> int | None:
    values = {getattr(layer.module.config, "num_experts_per_tok", None) for layer in layers}
    value = values.pop() if len(values) == 1 else None
    return value if isinstance(value, int) else None


def _sentinel(layers: list[ExpertsLayer]) -> int | None:
    """transformers' eager forwards skip the id ``num_experts``."""
    counts = {layer.module.num_experts for layer in layers}
    return counts.pop() if len(counts) == 1 else None  # type: ignore[return-value]
