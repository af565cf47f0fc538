"""JetMoE's experts: one projection each, called with rows that are sorted by expert and how many each has."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import nn

from ...bank import ParamSpec
from ..forms import stand_in, stock_forward
from .base import FEW, Adapter, ExpertParam, Route

__all__ = ["JetMoeParallelExperts"]


class JetMoeParallelExperts(Adapter):
    """Experts of one matrix; a decoder layer has four such modules, two of them for its attention.

    The rows do not say whose they are: with several tokens in a step, counts are right for the step, not by token.

    Parameters
    ----------
    module : nn.Module
    top_k : int
        Experts per token.
    """

    def __init__(self, module: Any, top_k: int) -> None:
        self.num_experts, self._top_k = int(module.num_experts), top_k
        self.experts = {"weight": ExpertParam(("weight",), True, tuple(module.weight.shape[1:]))}

    def forward(self, module: nn.Module, route: Route, *args: Any, **kwargs: Any) -> Any:
        inputs, expert_size = args
        used = {expert: rows for expert, rows in enumerate(inputs.split(expert_size, dim=0)) if len(rows)}
        if not used:
            return inputs.new_zeros((0, self.experts["weight"].shape[0]))
        ids = torch.tensor([expert for expert, rows in used.items() for _ in range(len(rows))], device="cpu")
        # Sorted ids in columns: no token has an expert twice.
        ids = ids.view(self._top_k, -1).t() if len(ids) % self._top_k == 0 else ids[:, None]
        found: dict[int, torch.Tensor] = {}
        with route(ids, inputs[: len(ids), :1]) as lease:
            for expert, slot, _ in lease.ready():
                twin = stand_in(module, {"weight": lease.weights["weight"].narrow(0, slot, 1)}, eager=False)
                twin.__dict__["num_experts"] = 1
                found[expert] = stock_forward(module)(twin, used[expert], [len(used[expert])])
        return torch.cat([found[expert] for expert in used])

    def smaller(self, module: nn.Module) -> tuple[int, dict[str, Any]]:
        count = min(FEW, self.num_experts)
        return count, {"num_experts": count}

    def trials(
        self, module: nn.Module, specs: Mapping[str, ParamSpec], generator: torch.Generator
    ) -> Iterator[tuple[Any, ...]]:
        spec = specs["weight"]
        for tokens in (1, 3, 40):
            order = torch.rand((tokens, self.num_experts), generator=generator, device="cpu").argsort(dim=1)
            sizes = (
                order[:, : min(self._top_k, self.num_experts)].flatten().bincount(minlength=self.num_experts).tolist()
            )
            rows = torch.randn((sum(sizes), spec.shape[1]), generator=generator, device="cpu")
            yield rows.to(spec.dtype), sizes
