"""Adapters: experts that do not lie, or are not called, as those of transformers' experts interface."""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from typing import Any

from torch import nn

from .base import CHANGED, Adapter, ExpertParam, Route, on_meta
from .embeddings import DogeCDMoE
from .every_row import Llama4TextExperts
from .modules import ModuleExperts, experts_within
from .single import DbrxExperts, LongcatFlashExperts
from .sorted_rows import JetMoeParallelExperts

__all__ = ["CHANGED", "Adapter", "ExpertParam", "Route", "adapter_of", "on_meta"]

_BY_CLASS: dict[str, Any] = {cls.__name__: cls for cls in (DbrxExperts, DogeCDMoE, Llama4TextExperts)}


def adapter_of(
    modules: Mapping[str, nn.Module], name: str, config: Any, top_k: int | None
) -> tuple[str, Adapter] | None:
    """The adapter for a module, and the name of the module whose forward it stands in for; None where there is none.

    Parameters
    ----------
    modules : mapping of str to nn.Module
        All of the model, by name.
    name : str
    config : object
        That the module has, or else the nearest module around it.
    top_k : int, optional
        Experts per token, as that configuration has it.
    """
    module: Any = modules[name]
    kind = type(module).__name__
    if kind in _BY_CLASS:
        return name, _BY_CLASS[kind](module)
    if kind == "LongcatFlashExperts" and module.gate_up_proj is not None:
        return name, LongcatFlashExperts(module)
    if kind == "JetMoeParallelExperts":
        return name, JetMoeParallelExperts(module, top_k or 1)
    experts = experts_within(name, module)
    if experts is None:
        return None
    parent, _, own = name.rpartition(".")
    has_forward = type(module).forward not in (nn.ModuleList.forward, nn.ModuleDict.forward, nn.Module.forward)
    owner, container = (name, "") if has_forward else (parent, own)
    scope = _scope(modules, owner)
    if scope is None:
        return None
    path = owner[len(scope) :].lstrip(".")
    width = getattr(config, "hidden_size", None)
    return owner, ModuleExperts(container, experts, modules[scope], path, width if isinstance(width, int) else None)


def _scope(modules: Mapping[str, nn.Module], name: str) -> str | None:
    """The module, or the nearest around it, whose forward needs one argument."""
    while name:
        parameters = list(inspect.signature(type(modules[name]).forward).parameters.values())[1:]
        needed = [p for p in parameters if p.default is p.empty and p.kind not in (p.VAR_POSITIONAL, p.VAR_KEYWORD)]
        if len(needed) == 1 or (not needed and parameters):
            return name
        name = name.rpartition(".")[0]
    return None
