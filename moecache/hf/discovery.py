"""Which experts modules a model has, and which of their parameters have one row an expert."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Mapping
from typing import Any, NamedTuple, NoReturn

import torch
from torch import nn
from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS

from ..errors import UnsupportedModelError
from .adapters import Adapter, ExpertParam, adapter_of

__all__ = ["NAME", "PENDING", "ExpertsLayer", "discover", "experts_per_token"]

NAME = "moecache"
# Under which an experts module says where its experts are that were kept out of it.
PENDING = "_moecache_pending"

# What the experts' forward of most classes is called with, after the module itself.
_ARGUMENTS = ["hidden_states", "top_k_index", "top_k_weights"]


class ExpertsLayer(NamedTuple):
    """One experts module of a model: the one whose forward asks for experts."""

    name: str
    module: nn.Module
    params: dict[str, nn.Parameter]  # that hold experts, by name below the module
    config: Any  # that the module has, or else the nearest module around it
    own: bool  # its class computes by itself, whatever implementation the configuration names
    experts: dict[str, ExpertParam]  # what each expert has, as a bank names it, and where that lies
    num_experts: int
    adapter: Adapter | None  # how its experts are computed, where not as transformers' interface has it

    def adopted(self, tensors: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor | list[torch.Tensor]]:
        """Tensors of the module's parameters, by name, as a bank takes them."""
        return {
            key: param.rows(tensors[param.names[0]], self.num_experts)
            if param.stacked
            else [tensors[name] for name in param.names]
            for key, param in self.experts.items()
        }

    def parameters_of(self, stacked: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        """Tensors of the module's parameters, by name, from every expert's ``[num_experts, *shape]``."""
        return dict(stacked) if self.adapter is None else self.adapter.parameters_of(stacked)

    def put(self, name: str, param: nn.Parameter) -> None:
        """Make it the module's parameter of that name, as it is."""
        owner, _, own = name.rpartition(".")
        self.module.get_submodule(owner)._parameters[own] = param


def discover(model: nn.Module) -> list[ExpertsLayer]:
    """All experts modules that can be paged, in the order of the model.

    They dispatch through transformers' experts interface; or have a ``forward(hidden_states, top_k_index, top_k_weights)``
    of their own beside ``num_experts`` and parameters with a row for each expert; or there is an adapter for them
    (``adapters``), as there is for experts that are modules of their own in a ``ModuleList``. The classes of the latter two
    are made to ask for a cache from then on; where there is none they compute as before.

    Raises
    ------
    UnsupportedModelError
        There is none, or one holds no parameters with a row for each expert.
    """
    layers: list[ExpertsLayer] = []
    modules = dict(model.named_modules())
    within: set[str] = set()  # what lies in a module that was found is its own
    for name, module in modules.items():
        if any(name == outer or name.startswith(outer + ".") for outer in within):
            continue
        dispatches = _dispatches(type(module))  # type: ignore[arg-type]
        config = _config(modules, name)
        if dispatches or _has_experts_forward(module):
            layer = _as_called_by_transformers(name, module, config, own=not dispatches)
        elif found := adapter_of(modules, name, config, experts_per_token(config)):
            layer = _adapted(modules, *found, config)
        else:
            continue
        if layer.own:
            _ask_for_cache(type(layer.module))
        within.add(name)
        layers.append(layer)
    if not layers:
        _refuse_model(model)
    return layers


def experts_per_token(config: Any) -> int | None:
    """As a configuration has it; the most of any layer where it differs, None where it does not say."""
    for name in ("num_experts_per_tok", "moe_topk", "moe_k", "moe_top_k", "top_k_experts", "num_experts_per_token"):
        value = getattr(config, name, None)
        found = [n for n in (value if isinstance(value, (list, tuple)) else [value]) if type(n) is int and n > 0]
        if found:
            return max(found)
    return None


def _as_called_by_transformers(name: str, module: Any, config: Any, *, own: bool) -> ExpertsLayer:
    params = _stacked(module)
    if not params:
        found = {key: tuple(param.shape) for key, param in module.named_parameters()}
        raise UnsupportedModelError(
            f"{name} ({type(module).__name__}): expected parameters with one row for each of {module.num_experts} "
            f"experts, found {found}"
        )
    experts = {key: ExpertParam((key,), True, tuple(param.shape[1:])) for key, param in params.items()}
    return ExpertsLayer(name, module, params, config, own, experts, int(module.num_experts), None)


def _adapted(modules: Mapping[str, nn.Module], name: str, adapter: Adapter, config: Any) -> ExpertsLayer:
    module = modules[name]
    names = [key for param in adapter.experts.values() for key in param.names]
    params = {key: module.get_parameter(key) for key in names}
    return ExpertsLayer(name, module, params, config, True, adapter.experts, adapter.num_experts, adapter)


def _refuse_model(model: nn.Module) -> NoReturn:
    similar = sorted({type(m).__name__ for m in model.modules() if "expert" in type(m).__name__.lower()})
    raise UnsupportedModelError(
        f"{type(model).__name__} has no MoE layers that moecache can page: no module uses transformers' experts "
        f"interface, has a forward({', '.join(_ARGUMENTS)}) over stacked parameters, or holds its experts in a ModuleList"
        + (f"; found {', '.join(similar)}, which do not" if similar else "")
    )


def _stacked(module: Any) -> dict[str, nn.Parameter]:
    return {
        key: param
        for key, param in module.named_parameters(recurse=False)
        if param.dim() > 0 and param.shape[0] == module.num_experts
    }


def _config(modules: dict[str, nn.Module], name: str) -> Any:
    while "config" not in modules[name].__dict__ and name:
        name = name.rpartition(".")[0]
    return modules[name].__dict__.get("config")


def _has_experts_forward(module: nn.Module) -> bool:
    if not isinstance(module.__dict__.get("num_experts"), int) or not module._parameters:
        return False
    return list(inspect.signature(type(module).forward).parameters)[1:] == _ARGUMENTS and bool(_stacked(module))


def _ask_for_cache(cls: Any) -> None:
    stock = cls.forward
    if hasattr(stock, "_asks_for_cache"):
        return

    @functools.wraps(stock)
    def forward(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        if "_moecache" in self.__dict__ or (PENDING in self.__dict__ and _kept_out(self, args)):
            return ALL_EXPERTS_FUNCTIONS[NAME](self, *args, **kwargs)
        return stock(self, *args, **kwargs)

    forward._asks_for_cache = True  # type: ignore[attr-defined]
    cls.forward = forward


def _kept_out(module: nn.Module, args: tuple[Any, ...]) -> bool:
    on_meta = any(isinstance(value, torch.Tensor) and value.is_meta for value in args)
    return not on_meta and any(param.is_meta for param in module.parameters())


@functools.cache
def _dispatches(cls: Any) -> bool:
    forward = cls.forward
    if not hasattr(forward, "__wrapped__") or not hasattr(cls, "_apply_gate") or hasattr(forward, "_asks_for_cache"):
        return False
    return inspect.getclosurevars(forward).nonlocals.get("experts_interface") is ALL_EXPERTS_FUNCTIONS
