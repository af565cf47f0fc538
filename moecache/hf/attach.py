"""Attach a cache to a transformers model, and take it off again."""

from __future__ import annotations

import inspect
from dataclasses import fields, replace
from os import PathLike
from pathlib import Path
from typing import Any, Literal

import torch
import transformers
from torch import nn
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel

from ..bank import ExpertBank
from ..cache import ExpertCache
from ..checkpoint import CheckpointIndex
from ..errors import AttachError
from ..options import CacheOptions
from .discovery import NAME, ExpertsLayer, discover, experts_per_token
from .experts import LayerState
from .generation import GenerateWatch
from .guards import NOT_RECORDED, check_attachable, guard, refuse_load, refuse_recording, unguard
from .implementations import Implementations, implementations_of
from .loading import kept_out, loaded_whole
from .needs import nbytes_to_come
from .requests import Requests
from .trials import choose_forms

__all__ = ["Attachment", "attach", "detach", "load"]

BankChoice = Literal["disk", "ram"] | None


def attach(
    model: PreTrainedModel,
    capacity: int | float | str = 0.25,
    *,
    bank: BankChoice = None,
    context: int | None = None,
    experts_implementation: str | None = None,
    options: CacheOptions | None = None,
    **arguments: Any,
) -> ExpertCache:
    """Run a model's experts from a cache; ``model.generate()`` is called as before.

    Outputs equal, bit by bit, those of the model before, whatever experts implementation it was loaded with
    (transformers takes ``grouped_mm`` by itself). A model whose experts were kept out equals what ``from_pretrained``
    would have made without that. ``model.set_experts_implementation()`` changes what the outputs equal, as it does for
    a model without a cache.

    Parameters
    ----------
    model : PreTrainedModel
        Loaded with ``experts_implementation="moecache"`` (the experts are still in the checkpoint), or as usual (the
        experts in memory become the bank, without a copy). A module around such a model (of PEFT, of ``torch.compile``)
        or the base model inside one will do.
    capacity : int, float or str
        How many experts the cache holds; see :class:`moecache.ExpertCache`.
    bank : {"disk", "ram"}, optional
        Where the experts lie: in the checkpoint's files, or in host memory. By default the files if their bytes can
        be used as they are.
    context : int, optional
        Tokens, prompt and answer over all sequences at once, whose KV cache and activations ``capacity="auto"`` leaves room
        for; by default 4,096, or fewer where the model knows no more positions.
    experts_implementation : str, optional
        ``"eager"``, ``"grouped_mm"``, ``"batched_mm"`` or another that transformers knows: whose bits the outputs are to
        have, where not those of the model's own.
    options : CacheOptions, optional
        What most users never set. `padding_id` and `reserve` are the model's where they are None.
    **arguments
        Passed to :class:`moecache.ExpertCache`.

    Returns
    -------
    ExpertCache
        Also reachable as ``model.moecache``. ``detach(model)`` closes it.

    Raises
    ------
    UnsupportedModelError
        The model has no MoE layers, or no way was found to give the bits of its experts implementation.
    AttachError
        The model is attached already, or hooked or wrapped by another library, or ``bank="disk"`` and its experts were
        not kept out, or the implementation is unknown.
    CheckpointError
        Experts are not found whole, or ``bank="disk"`` and the checkpoint's bytes are not the parameters' bytes.
    """
    model = _inner(model)
    layers = discover(model)
    check_attachable(model, layers)
    names = implementations_of(model, layers, experts_implementation)
    # What is made here outlives the caller's inference mode and is used outside of it.
    with torch.inference_mode(False), torch.no_grad():
        expert_bank = _make_bank(model, layers, bank)
        try:
            device, top_k = _device(model), _top_k(layers)
            implementations = Implementations(
                model, layers, names, lambda wanted: choose_forms(layers, expert_bank, top_k, device, wanted)
            )
            options = options or CacheOptions()
            if options.padding_id is None:
                options = replace(options, padding_id=_padding_id(layers))
            if options.reserve is None and isinstance(capacity, str) and capacity == "auto":
                options = replace(options, reserve=nbytes_to_come(model, device, context))
            arguments = {"device": device, "top_k": top_k, **arguments}
            cache = ExpertCache(expert_bank, capacity, options=options, **arguments)
        except BaseException:
            expert_bank.close()
            raise
        attachment = Attachment(model, layers, implementations, cache)
        try:
            attachment.install()
        except BaseException:
            attachment.remove()
            raise
    return cache


def detach(model: PreTrainedModel) -> None:
    """Close a model's cache and give the model back its own parameters and experts implementation.

    Raises
    ------
    AttachError
        The model is not attached, or is a copy of the one that is.
    """
    model = _inner(model)
    attachment = model.__dict__.get("_moecache_attachment")
    if attachment is None:
        raise AttachError(f"this {type(model).__name__} is not attached")
    if attachment.model is not model:
        raise AttachError("this model is a copy that shares the cache of the one it was copied from; detach that one")
    attachment.remove()


def load(
    path: str | PathLike[str],
    *,
    capacity: int | float | str = 0.25,
    bank: BankChoice = None,
    experts_implementation: str | None = None,
    **arguments: Any,
) -> PreTrainedModel:
    """Load a model with its experts kept out, and attach a cache.

    Parameters
    ----------
    path : str or Path
        A folder or a name on the hub, as for ``from_pretrained``.
    capacity, bank, experts_implementation
        See :func:`attach`.
    **arguments
        Those of :class:`moecache.ExpertCache` and :func:`attach` by name; all others go to ``from_pretrained``.

    Returns
    -------
    PreTrainedModel
        With the cache as ``model.moecache``.

    Raises
    ------
    AttachError
        An argument belongs into :class:`moecache.CacheOptions`.
    UnsupportedModelError, CheckpointError
        See :func:`attach`.
    """
    misplaced = arguments.keys() & {field.name for field in fields(CacheOptions)}
    if misplaced:
        name = min(misplaced)
        raise AttachError(f"{name!r} is a rare option: expected options=moecache.CacheOptions({name}=...)")
    cache_names = set(inspect.signature(ExpertCache.__init__).parameters) - {"self", "bank", "capacity"} | {"context"}
    cache_arguments = {name: arguments.pop(name) for name in list(arguments) if name in cache_names}
    if not arguments.keys() & {"variant", "subfolder", "gguf_file"} and any(Path(path).glob("*.safetensors*")):
        CheckpointIndex(path)  # says what is missing or cut short before anything is built
    config_names = ("trust_remote_code", "revision", "token", "cache_dir", "subfolder", "gguf_file")
    config = arguments.get("config") or AutoConfig.from_pretrained(
        path, **{name: arguments[name] for name in config_names if name in arguments}
    )
    architecture = (config.architectures or [""])[0]
    cls = getattr(transformers, architecture, AutoModelForCausalLM)
    model = cls.from_pretrained(path, experts_implementation=NAME, **arguments)
    attach(model, capacity, bank=bank, experts_implementation=experts_implementation, **cache_arguments)
    return model


class Attachment:
    """All that attaching changes on a model, so that detaching undoes it. Copies of the model share it."""

    def __init__(
        self, model: PreTrainedModel, layers: list[ExpertsLayer], implementations: Implementations, cache: ExpertCache
    ) -> None:
        self.model, self.layers, self.implementations, self.cache = model, layers, implementations, cache
        self.requests = Requests(cache, model)
        self._handles: list[Any] = []
        self._guarded: list[nn.Module] = []

    def install(self) -> None:
        for number, layer in enumerate(self.layers):
            for name, param in layer.params.items():
                if param.device.type != "meta":
                    layer.put(name, nn.Parameter(param.detach().to("meta"), requires_grad=False))
            layer.module._moecache = LayerState(self, number)  # type: ignore[assignment]
            module: Any = layer.module
            self._handles += [
                module.register_state_dict_post_hook(_StreamBack(self, number)),
                module.register_load_state_dict_pre_hook(refuse_load),
            ]
        self.implementations.install()
        self._handles += [
            self.model.register_forward_pre_hook(self._before_forward, with_kwargs=True),
            self.model.register_forward_hook(self._after_forward, always_call=True),
        ]
        if hasattr(self.model, "generate"):
            generate: Any = self.model.generate
            self.model.__dict__["generate"] = GenerateWatch(self.model, generate, self.requests.generating)
        if hasattr(self.model, "init_continuous_batching"):
            self.model.__dict__["init_continuous_batching"] = self.requests.continuous
        self._guarded = guard(self.model, self.layers, self.cache.device)
        self.model.__dict__["_moecache_attachment"] = self
        self.model.__dict__["moecache"] = self.cache

    def remove(self) -> None:
        try:
            self.requests.end()
            self.cache.close()
        finally:  # a history that cannot be written must not leave a model half attached
            self._restore()

    def _restore(self) -> None:
        self.cache.bank.close()
        for handle in self._handles:
            handle.remove()
        for layer in self.layers:
            for name, param in layer.params.items():
                layer.put(name, param)
            layer.module.__dict__.pop("_moecache", None)
        unguard(self._guarded)
        self.implementations.remove()
        for name in ("_moecache_attachment", "moecache", "generate", "init_continuous_batching"):
            self.model.__dict__.pop(name, None)

    def __deepcopy__(self, memo: dict[int, Any]) -> Attachment:
        memo[id(self.cache)] = self.cache
        return self

    def __reduce__(self) -> Any:
        raise AttachError("an attached model cannot be pickled; use save_pretrained(), or moecache.detach(model) first")

    @torch.compiler.disable(reason=NOT_RECORDED)  # type: ignore[untyped-decorator,no-untyped-call]
    def _before_forward(self, model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        refuse_recording()
        self.implementations.check()
        self.requests.before_forward(args, kwargs)

    @torch.compiler.disable(reason=NOT_RECORDED)  # type: ignore[untyped-decorator,no-untyped-call]
    def _after_forward(self, model: nn.Module, args: tuple[Any, ...], output: Any) -> None:
        self.requests.after_forward(output)


class _StreamBack:
    """State-dict hook: the experts' entries hold the bank's bytes, not the meta parameters."""

    def __init__(self, attachment: Attachment, layer: int) -> None:
        self._attachment, self._layer = attachment, layer

    def __call__(self, module: nn.Module, state_dict: dict[str, Any], prefix: str, local_metadata: Any) -> None:
        layer = self._attachment.layers[self._layer]
        if all(param.device.type != "meta" for param in layer.params.values()):
            tensors: dict[str, torch.Tensor] = {name: param.detach() for name, param in layer.params.items()}
        else:
            tensors = layer.parameters_of(self._attachment.cache.bank.layer(self._layer))
        state_dict.update({prefix + name: tensor for name, tensor in tensors.items()})


def _inner(model: nn.Module) -> Any:
    """The transformers model itself, where a wrapper (of PEFT, of torch.compile) is handed over."""
    if isinstance(model, PreTrainedModel):
        return model
    return next((module for module in model.modules() if isinstance(module, PreTrainedModel)), model)


def _make_bank(model: nn.Module, layers: list[ExpertsLayer], choice: BankChoice) -> ExpertBank:
    if choice not in ("disk", "ram", None):
        raise AttachError(f"bank is {choice!r}; expected 'disk', 'ram' or None")
    pending = kept_out(layers)
    if pending is not None:
        return pending.make_bank(model, choice)
    if choice == "disk":
        raise AttachError(
            loaded_whole(layers)
            or "bank='disk' needs a model whose experts were kept out: load it with "
            f"from_pretrained(..., experts_implementation={NAME!r}) after `import moecache.hf`"
        )
    return ExpertBank.from_tensors(
        [layer.adopted({name: param.detach() for name, param in layer.params.items()}) for layer in layers],
        names=[layer.name for layer in layers],
    )


def _device(model: nn.Module) -> torch.device:
    return next((p.device for p in model.parameters() if p.device.type != "meta"), torch.device("cpu"))


def _top_k(layers: list[ExpertsLayer]) -> int | None:
    """Experts per token as the configuration has it; the most of any layer where it differs."""
    values = [value for layer in layers if (value := experts_per_token(layer.config)) is not None]
    return max(values) if len(values) == len(layers) else None


def _padding_id(layers: list[ExpertsLayer]) -> int | None:
    """transformers' eager forwards skip the id ``num_experts``."""
    counts = {layer.num_experts for layer in layers}
    return counts.pop() if len(counts) == 1 else None
