"""What an adapter says of experts that do not lie, or are not called, as transformers' experts interface has them."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager
from typing import Any, NamedTuple

import torch
from torch import nn

from ...bank import ParamSpec
from ..forms import stock_forward

__all__ = ["CHANGED", "FEW", "Adapter", "ExpertParam", "Route", "on_meta", "token_ids"]

# Said of a parameter that was given values since its model was attached.
CHANGED = (
    "was replaced or wrapped after the model was attached; the cache would go on using the experts of its bank: call "
    "moecache.detach(model), change it, and attach again"
)

# Opens a lease on the experts of integer ids [tokens, k], -1 for none; a column of the tokens' values shows which are NaN.
Route = Callable[[torch.Tensor, torch.Tensor], AbstractContextManager[Any]]


# Experts that a class is tried with where all of a layer would take gigabytes, and none is treated by its number.
FEW = 4


class ExpertParam(NamedTuple):
    """One parameter of each expert, by where it lies in the module.

    Attributes
    ----------
    names : tuple of str
        Parameters below the module: one that holds every expert, or one an expert.
    stacked : bool
        Whether it is one for all, whose bytes are the experts' in order.
    shape : tuple of int
        Of one expert's.
    """

    names: tuple[str, ...]
    stacked: bool
    shape: tuple[int, ...]

    def rows(self, tensor: torch.Tensor, count: int) -> torch.Tensor:
        """The first experts ``[count, *shape]`` of a tensor that holds every one."""
        return tensor.reshape(-1, *self.shape)[:count]


class Adapter(ABC):
    """How the experts of one module lie in it and are computed.

    Attributes
    ----------
    num_experts : int
    experts : dict of str to ExpertParam
        By the name under which a bank holds them.
    """

    num_experts: int
    experts: dict[str, ExpertParam]

    @abstractmethod
    def forward(self, module: nn.Module, route: Route, *args: Any, **kwargs: Any) -> Any:
        """What the module's own forward returns, with its experts from the lease that `route` opens."""

    @abstractmethod
    def trials(
        self, module: nn.Module, specs: Mapping[str, ParamSpec], generator: torch.Generator
    ) -> Iterator[tuple[Any, ...]]:
        """Arguments of the module's forward to try it with."""

    def smaller(self, module: nn.Module) -> tuple[int, dict[str, Any]]:
        """How many experts to try it with, and the attributes of the module that say so."""
        return self.num_experts, {}

    def own_forward(self, module: nn.Module) -> Callable[..., Any]:
        """What is tried: the module's own forward, or that of the module around it which calls it."""
        return lambda *args: stock_forward(module)(module, *args)

    def tried_forward(self, module: nn.Module, route: Route) -> Callable[..., Any]:
        """The same with this adapter in place of the module's own forward."""
        return lambda *args: self.forward(module, route, *args)

    def parameters_of(self, stacked: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        """The module's parameters by name, from every expert's ``[num_experts, *shape]``."""
        found: dict[str, torch.Tensor] = {}
        for key, param in self.experts.items():
            if param.stacked:
                found[param.names[0]] = stacked[key]
            else:
                found.update(zip(param.names, stacked[key], strict=True))
        return found


def token_ids(tokens: torch.Tensor, experts: torch.Tensor, count: int) -> torch.Tensor:
    """Ids ``[count, k]``, -1 where a token has fewer, from int64 pairs ``[n]`` of a token and its expert."""
    pairs = torch.unique(torch.stack([tokens, experts], dim=1), dim=0)
    per_token = torch.bincount(pairs[:, 0], minlength=count)
    places = torch.arange(len(pairs)) - (per_token.cumsum(0) - per_token)[pairs[:, 0]]
    ids = torch.full((count, max(1, int(per_token.max()) if count else 1)), -1, dtype=torch.int64)
    ids[pairs[:, 0], places] = pairs[:, 1]
    return ids


def on_meta(module: nn.Module, name: str) -> bool:
    """Whether a module still has a parameter of that name, without bytes."""
    owner: Any = module
    *path, own = name.split(".")
    for part in path:
        owner = owner._modules.get(part)
        if owner is None:
            return False
    param = owner._parameters.get(own)
    return param is not None and bool(param.is_meta)
