"""Classes whose forward is called as transformers' are, with experts that lie otherwise: DBRX, LongCat-Flash."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import nn
from torch.nn.functional import linear

from ...bank import ParamSpec
from ...errors import RoutingError
from ..forms import Form, Weights, deep_stand_in, stock_forward
from .base import FEW, Adapter, ExpertParam, Route

__all__ = ["DbrxExperts", "LongcatFlashExperts"]


class _Single(Adapter):
    """Experts of ids ``[T, K]`` and gate weights ``[T, K]``, with some ids behind them that stand for no parameters."""

    identities = 0  # ids behind the experts' that return the hidden states

    def forward(self, module: nn.Module, route: Route, *args: Any, **kwargs: Any) -> Any:
        hidden_states, ids, scale = args
        rows = hidden_states.reshape(-1, hidden_states.shape[-1])
        if bool((ids >= self.num_experts + self.identities).any()):
            raise RoutingError(
                f"{type(module).__name__}: the router named expert {int(ids.max())}; expected 0 to "
                f"{self.num_experts + self.identities - 1}"
            )
        with route(ids.masked_fill(ids >= self.num_experts, -1), scale) as lease:
            result = Form(self._product, "input").run(module, lease, rows, ids, scale)
        for identity in range(self.num_experts, self.num_experts + self.identities):
            places, tokens = torch.where(ids.t() == identity)
            if len(tokens):
                value = rows[tokens] * scale[tokens, places, None]
                result.index_add_(0, tokens, value.to(result.dtype))
        return self.shaped(result, hidden_states)

    def shaped(self, result: torch.Tensor, hidden_states: torch.Tensor) -> torch.Tensor:
        """Rows ``[T, H]`` as the class returns them."""
        return result

    def trials(
        self, module: nn.Module, specs: Mapping[str, ParamSpec], generator: torch.Generator
    ) -> Iterator[tuple[Any, ...]]:
        dtype = next(iter(specs.values())).dtype
        count = self.num_experts + self.identities
        for scale_dtype in dict.fromkeys((dtype, torch.float32)):
            for tokens, top_k in ((1, 1), (1, min(2, count)), (17, min(4, count)), (count, 1)):
                order = torch.rand((tokens, count), generator=generator, device="cpu").argsort(dim=1)
                ids = order[:, :top_k] if tokens < count else torch.randperm(count, generator=generator)[:, None]
                rows = torch.randn((len(ids), self.hidden_size(module)), generator=generator, device="cpu")
                scale = torch.rand(ids.shape, generator=generator, device="cpu")
                yield rows.to(dtype), ids.contiguous(), scale.to(scale_dtype)

    def hidden_size(self, module: Any) -> int:
        return int(module.hidden_size)

    @abstractmethod
    def _product(
        self, module: Any, weights: Weights, slot: int, expert: int, rows: torch.Tensor, scale: torch.Tensor
    ) -> torch.Tensor:
        """Rows through one expert, times their gate weights."""


class DbrxExperts(_Single):
    """Matrices ``[num_experts * inner, hidden]`` of a module below, which hold the experts one after another."""

    def __init__(self, module: Any) -> None:
        self.num_experts = int(module.num_experts)
        shape = (int(module.ffn_hidden_size), int(module.hidden_size))
        self.experts = {name: ExpertParam((name,), True, shape) for name in ("mlp.w1", "mlp.v1", "mlp.w2")}

    def smaller(self, module: nn.Module) -> tuple[int, dict[str, Any]]:
        count = min(FEW, self.num_experts)
        return count, {"num_experts": count}

    def parameters_of(self, stacked: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        return {name: tensor.flatten(0, 1) for name, tensor in stacked.items()}

    def shaped(self, result: torch.Tensor, hidden_states: torch.Tensor) -> torch.Tensor:
        return result.view(hidden_states.shape[0], -1, result.shape[-1])

    def _product(
        self, module: Any, weights: Weights, slot: int, expert: int, rows: torch.Tensor, scale: torch.Tensor
    ) -> torch.Tensor:
        # Its own forward, over matrices that hold this expert alone, as number 0.
        ids = torch.zeros((len(rows), 1), dtype=torch.int64, device=rows.device)
        own = deep_stand_in(module, {name: weights[name].select(0, slot) for name in self.experts})
        out: torch.Tensor = stock_forward(module)(own, rows, ids, scale)
        return out.reshape(len(rows), -1)


class LongcatFlashExperts(_Single):
    """Experts of which the last have no parameters of their own: they return what they are given.

    Those have rows in one of the two parameters all the same, which nothing reads; they are not kept.
    """

    def __init__(self, module: Any) -> None:
        self.num_experts = int(module.num_routed_experts)
        self.identities = int(module.zero_expert_num)
        self.experts = {
            name: ExpertParam((name,), True, tuple(getattr(module, name).shape[1:]))
            for name in ("gate_up_proj", "down_proj")
        }

    def smaller(self, module: nn.Module) -> tuple[int, dict[str, Any]]:
        count = min(FEW, self.num_experts)
        return count, {"num_routed_experts": count, "total_experts": count + self.identities}

    def parameters_of(self, stacked: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        gate_up = stacked["gate_up_proj"]
        unread = gate_up.new_zeros((self.identities, *gate_up.shape[1:]))
        return {"gate_up_proj": torch.cat([gate_up, unread]), "down_proj": stacked["down_proj"]}

    def _product(
        self, module: Any, weights: Weights, slot: int, expert: int, rows: torch.Tensor, scale: torch.Tensor
    ) -> torch.Tensor:
        gate, up = linear(rows, weights["gate_up_proj"].select(0, slot)).chunk(2, dim=-1)
        return linear(module.act_fn(gate) * up, weights["down_proj"].select(0, slot)) * scale
