"""Which experts modules a model has, and which of their parameters have one row an expert."""

from __future__ import annotations

import functools
import inspect
from typing import Any, NamedTuple

from torch import nn
from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS

from ..errors import UnsupportedModelError

__all__ = ["NAME", "ExpertsLayer", "discover"]

NAME = "moecache"


class ExpertsLayer(NamedTuple):
    """One experts module of a model."""

    name: str
    module: nn.Module
    params: dict[str, nn.Parameter]  # those with one row an expert


def discover(model: nn.Module) -> list[ExpertsLayer]:
    """All experts modules that dispatch through transformers' experts interface, in the order of the model.

    Raises
    ------
    UnsupportedModelError
        There is none, or one holds no parameters with a row for each expert.
    """
    layers = []
    for name, module in model.named_modules():
        if not _dispatches(type(module)):  # type: ignore[arg-type]
            continue
        count = module.num_experts
        params = {
            key: param
            for key, param in module.named_parameters(recurse=False)
            if param.dim() > 0 and param.shape[0] == count
        }
        if not params:
            found = {key: tuple(param.shape) for key, param in module.named_parameters()}
            raise UnsupportedModelError(
                f"{name} ({type(module).__name__}): expected parameters with one row for each of {count} experts, "
                f"found {found}"
            )
        layers.append(ExpertsLayer(name, module, params))
    if not layers:
        similar = sorted({type(m).__name__ for m in model.modules() if "expert" in type(m).__name__.lower()})
        raise UnsupportedModelError(
            f"{type(model).__name__} has no MoE layers that moecache can page: no module uses transformers' experts "
            f"interface" + (f"; found {', '.join(similar)}, which do not" if similar else "")
        )
    return layers


@functools.cache
def _dispatches(cls: Any) -> bool:
    forward = cls.forward
    if not hasattr(forward, "__wrapped__") or not hasattr(cls, "_apply_gate"):
        return False
    return inspect.getclosurevars(forward).nonlocals.get("experts_interface") is ALL_EXPERTS_FUNCTIONS
