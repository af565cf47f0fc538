"""Which experts modules a model has, and which of their parameters have one row an expert."""

from __future__ import annotations

import functools
import inspect
from typing import Any, NamedTuple

import torch
from torch import nn
from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS

from ..errors import UnsupportedModelError

__all__ = ["NAME", "REFUSED", "ExpertsLayer", "discover"]

NAME = "moecache"


# What the experts' forward of most classes is called with, after the module itself.
_ARGUMENTS = ["hidden_states", "top_k_index", "top_k_weights"]

# Families whose experts cannot be paged one at a time, by the class that holds them.
REFUSED = {
    "Llama4TextExperts": "computes every expert for every token, so that all of them are needed in each step",
    "DbrxExpertGLU": "holds all experts of a layer in matrices without a dimension for experts",
    "JetMoeParallelExperts": "is called with rows that are sorted already, once for each of two projections",
    "DogeCDMoE": "has experts of one row each, which it looks up as embeddings",
    "LongcatFlashExperts": "has identity experts among the routed ones, and parameters of different numbers of rows",
    "SwitchTransformersExperts": "holds each expert as a module of its own",
    "NllbMoeExperts": "holds each expert as a module of its own",
}


class ExpertsLayer(NamedTuple):
    """One experts module of a model."""

    name: str
    module: nn.Module
    params: dict[str, nn.Parameter]  # those with one row an expert
    config: Any  # that the module has, or else the nearest module around it
    own: bool  # its class computes by itself, whatever implementation the configuration names


def discover(model: nn.Module) -> list[ExpertsLayer]:
    """All experts modules that can be paged, in the order of the model.

    They dispatch through transformers' experts interface, or have a ``forward(hidden_states, top_k_index, top_k_weights)``
    of their own beside ``num_experts`` and parameters with a row for each expert. The classes of the latter are made to
    ask for a cache from then on; where there is none they compute as before.

    Raises
    ------
    UnsupportedModelError
        There is none, one holds no parameters with a row for each expert, or others are beside it that cannot be paged.
    """
    layers = []
    modules = dict(model.named_modules())
    for name, module in modules.items():
        dispatches = _dispatches(type(module))  # type: ignore[arg-type]
        if not dispatches and not _has_experts_forward(module):
            continue
        params = _stacked(module)
        if not params:
            found = {key: tuple(param.shape) for key, param in module.named_parameters()}
            raise UnsupportedModelError(
                f"{name} ({type(module).__name__}): expected parameters with one row for each of {module.num_experts} "
                f"experts, found {found}"
            )
        if not dispatches:
            _ask_for_cache(type(module))
        layers.append(ExpertsLayer(name, module, params, _config(modules, name), own=not dispatches))
    _check_others(model, layers)
    return layers


def _check_others(model: nn.Module, layers: list[ExpertsLayer]) -> None:
    others = {type(m).__name__ for m in model.modules()} - {type(layer.module).__name__ for layer in layers}
    refused = [f"{name} {REFUSED[name]}" for name in sorted(others & REFUSED.keys())]
    if refused:
        raise UnsupportedModelError(
            f"{type(model).__name__} has experts that moecache cannot page: {'; '.join(refused)}; run it without a cache"
        )
    if not layers:
        similar = sorted(name for name in others if "expert" in name.lower())
        raise UnsupportedModelError(
            f"{type(model).__name__} has no MoE layers that moecache can page: no module uses transformers' experts "
            f"interface or has a forward({', '.join(_ARGUMENTS)}) over stacked parameters"
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
    forward: Any = type(module).forward
    if hasattr(forward, "_asks_for_cache"):
        return True
    return list(inspect.signature(forward).parameters)[1:] == _ARGUMENTS and bool(_stacked(module))


def _ask_for_cache(cls: Any) -> None:
    stock = cls.forward
    if hasattr(stock, "_asks_for_cache"):
        return

    @functools.wraps(stock)
    def forward(
        self: nn.Module, hidden_states: torch.Tensor, top_k_index: torch.Tensor, top_k_weights: torch.Tensor
    ) -> torch.Tensor:
        kept_out = any(param.is_meta for param in self._parameters.values() if param is not None)
        if "_moecache" in self.__dict__ or (kept_out and not hidden_states.is_meta):
            return ALL_EXPERTS_FUNCTIONS[NAME](self, hidden_states, top_k_index, top_k_weights)  # type: ignore[no-any-return]
        return stock(self, hidden_states, top_k_index, top_k_weights)  # type: ignore[no-any-return]

    forward._asks_for_cache = True  # type: ignore[attr-defined]
    cls.forward = forward


@functools.cache
def _dispatches(cls: Any) -> bool:
    forward = cls.forward
    if not hasattr(forward, "__wrapped__") or not hasattr(cls, "_apply_gate") or hasattr(forward, "_asks_for_cache"):
        return False
    return inspect.getclosurevars(forward).nonlocals.get("experts_interface") is ALL_EXPERTS_FUNCTIONS
