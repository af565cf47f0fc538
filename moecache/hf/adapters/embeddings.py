"""Doge's experts: a row in each of two embeddings, looked up by number."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from torch import nn

from ...bank import ParamSpec
from ..forms import deep_stand_in, stock_forward
from .base import Adapter, ExpertParam, Route

__all__ = ["DogeCDMoE"]


class DogeCDMoE(Adapter):
    """Experts of two rows; the layer's own forward runs over rows that were looked up before."""

    def __init__(self, module: Any) -> None:
        self.num_experts = int(module.num_experts)
        self._names = ("down_embed", "up_embed")
        self.experts = {
            f"{name}.weight": ExpertParam((f"{name}.weight",), True, (int(module.hidden_size),)) for name in self._names
        }

    def forward(self, module: nn.Module, route: Route, *args: Any, **kwargs: Any) -> Any:
        hidden = (args[0] if args else kwargs["hidden_states"]).reshape(-1, self.experts["down_embed.weight"].shape[0])
        rows: dict[str, torch.Tensor] = {}

        def lookup(name: str) -> Callable[[torch.Tensor], torch.Tensor]:
            def of(indices: torch.Tensor) -> torch.Tensor:
                if not rows:
                    rows.update(self._looked_up(route, indices, hidden))
                return rows[name]

            return of

        twin = deep_stand_in(module, {}, {name: lookup(name) for name in self._names})
        return stock_forward(module)(twin, *args, **kwargs)

    def _looked_up(self, route: Route, indices: torch.Tensor, hidden: torch.Tensor) -> dict[str, torch.Tensor]:
        found: dict[str, torch.Tensor] = {}
        with route(indices, hidden[:, :1]) as lease:
            for name in self._names:
                pool = lease.weights[f"{name}.weight"]
                found[name] = pool.new_empty((*indices.shape, pool.shape[-1]))
            for _, slot, tokens in lease.ready():
                for name, out in found.items():
                    out[tokens, lease.positions] = lease.weights[f"{name}.weight"][slot]
        return found

    def trials(
        self, module: nn.Module, specs: Mapping[str, ParamSpec], generator: torch.Generator
    ) -> Iterator[tuple[Any, ...]]:
        spec = specs["down_embed.weight"]
        for shape in ((1, 1), (2, 9)):
            yield (torch.randn((*shape, *spec.shape), generator=generator, device="cpu").to(spec.dtype),)
