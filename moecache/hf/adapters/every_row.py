"""Llama 4's experts: each is called with a row for every token, which is zero where the token is not its own."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import nn

from ...bank import ParamSpec
from ..forms import stand_in, stock_forward
from .base import FEW, Adapter, ExpertParam, Route, token_ids

__all__ = ["Llama4TextExperts"]


class Llama4TextExperts(Adapter):
    """Experts that compute every token, of which those with zero rows alone are left out: they would give zeros.

    An expert whose weights are infinite or NaN gives NaN for zero rows; such a model is not followed.
    """

    def __init__(self, module: Any) -> None:
        self.num_experts = int(module.num_experts)
        self.experts = {
            name: ExpertParam((name,), True, tuple(getattr(module, name).shape[1:]))
            for name in ("gate_up_proj", "down_proj")
        }

    def forward(self, module: nn.Module, route: Route, *args: Any, **kwargs: Any) -> Any:
        (hidden_states,) = args
        rows = hidden_states.view(self.num_experts, -1, hidden_states.shape[-1])
        experts, tokens = torch.where((rows != 0).any(dim=-1).cpu())
        result: torch.Tensor | None = None
        with route(token_ids(tokens, experts, rows.shape[1]), rows.sum(dim=0)[:, :1]) as lease:
            for expert, slot, _ in lease.ready():
                own = {name: lease.weights[name].narrow(0, slot, 1) for name in self.experts}
                value = stock_forward(module)(stand_in(module, own, eager=False), rows[expert])
                if result is None:
                    result = value.new_zeros(rows.shape)
                result[expert] = value
        return (torch.zeros_like(rows) if result is None else result).view(-1, rows.shape[-1])

    def smaller(self, module: nn.Module) -> tuple[int, dict[str, Any]]:
        count = min(FEW, self.num_experts)
        return count, {"num_experts": count}

    def trials(
        self, module: nn.Module, specs: Mapping[str, ParamSpec], generator: torch.Generator
    ) -> Iterator[tuple[Any, ...]]:
        spec = specs["gate_up_proj"]
        for tokens, top_k in ((1, 1), (1, 2), (3, 1), (17, 2), (130, 1)):
            chances = torch.rand((tokens, self.num_experts), generator=generator, device="cpu")
            chosen = chances.topk(min(top_k, self.num_experts), dim=1).indices
            scale = torch.zeros_like(chances).scatter_(1, chosen, chances.gather(1, chosen)).to(spec.dtype)
            rows = torch.randn((tokens, spec.shape[0]), generator=generator, device="cpu").to(spec.dtype)
            yield (rows.repeat(self.num_experts, 1) * scale.t().reshape(-1, 1),)
