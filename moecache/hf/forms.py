"""How the experts of a class are computed one at a time, with the bits of the class's own eager forward.

A product of one token and one expert is computed with the same rows in the same order by the same operations, and
added to the result in ascending order of experts: the result does not depend on what was cached, nor on the order in
which experts arrive. Which way is right for a class is not assumed but tried, on random rows.
"""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any, Literal, NamedTuple

import torch
from torch import nn
from torch.nn.functional import linear

from ..bank import ParamSpec
from ..errors import UnsupportedModelError

__all__ = ["Form", "choose_form", "combine", "stock_forward"]

Weights = Mapping[str, torch.Tensor]


class Form(NamedTuple):
    """How a class computes: the scaled product of rows with one expert, and the dtype it sums products in."""

    product: Callable[[nn.Module, Weights, int, torch.Tensor, torch.Tensor], torch.Tensor]
    sum_dtype: Literal["input", "scale", "float32"]


def stock_forward(module: nn.Module) -> Callable[..., torch.Tensor]:
    """The class's own eager forward, below transformers' dispatch."""
    return type(module).forward.__wrapped__  # type: ignore[attr-defined,no-any-return]


def combine(
    module: nn.Module,
    form: Form,
    lease: Any,
    hidden_states: torch.Tensor,
    top_k_index: torch.Tensor,
    top_k_weights: torch.Tensor,
) -> torch.Tensor:
    """Compute each expert as the lease yields it; sum in ascending order of experts."""
    dtype = hidden_states.dtype
    if form.sum_dtype != "input":
        dtype = torch.float32 if form.sum_dtype == "float32" else top_k_weights.dtype
    result = torch.zeros_like(hidden_states, dtype=dtype)
    experts = lease.experts
    if top_k_index.shape[0] == 1 and len(experts) == top_k_index.shape[1]:
        _combine_one_token(module, form, lease, hidden_states, top_k_index, top_k_weights, result)
        return result.to(hidden_states.dtype)
    product, weights = form.product, lease.weights
    early: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}
    turn = 0
    on_host = result.device.type == "cpu"
    for expert, slot, tokens in lease.ready():
        positions = lease.positions
        if not on_host:
            tokens, positions = tokens.to(result.device), positions.to(result.device)
        scale = top_k_weights[tokens, positions, None]
        value = product(module, weights, slot, hidden_states[tokens], scale).to(dtype)
        if expert != experts[turn]:
            early[expert] = tokens, value
            continue
        result.index_add_(0, tokens, value)
        turn += 1
        while early and experts[turn] in early:
            result.index_add_(0, *early.pop(experts[turn]))
            turn += 1
    return result.to(hidden_states.dtype)


def _combine_one_token(
    module: nn.Module,
    form: Form,
    lease: Any,
    hidden_states: torch.Tensor,
    top_k_index: torch.Tensor,
    top_k_weights: torch.Tensor,
    result: torch.Tensor,
) -> None:
    """The same for one token with K distinct experts: no gather and no scatter is needed."""
    ids = top_k_index[0].tolist()
    product, weights, dtype = form.product, lease.weights, result.dtype
    experts = lease.experts
    early: dict[int, torch.Tensor] = {}
    turn = 0
    for expert, slot, _ in lease.ready():
        value = product(module, weights, slot, hidden_states, top_k_weights.narrow(1, ids.index(expert), 1))
        if value.dtype != dtype:
            value = value.to(dtype)
        if expert != experts[turn]:
            early[expert] = value
            continue
        result.add_(value)
        turn += 1
        while early and experts[turn] in early:
            result.add_(early.pop(experts[turn]))
            turn += 1


def _plain(module: nn.Module, weights: Weights, slot: int, rows: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
    """The commonest class: gated, without bias, weights ``[out, in]``."""
    gate_up = linear(rows, weights["gate_up_proj"].select(0, slot))
    return linear(module._apply_gate(gate_up), weights["down_proj"].select(0, slot)) * scale  # type: ignore[operator]


def _flag(module: Any, name: str, default: bool = False) -> bool:
    """What transformers' decorator says of a class; a version before the flag means its default."""
    return bool(getattr(module, name, default))


def _by_flags(module: Any, weights: Weights, slot: int, rows: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
    """A class described by the flags of transformers' decorator."""
    first = "gate_up_proj" if _flag(module, "has_gate", True) else "up_proj"
    inner = _project(module, weights, first, slot, rows)
    inner = module._apply_gate(inner) if _flag(module, "has_gate", True) else module.act_fn(inner)
    out = _project(module, weights, "down_proj", slot, inner)
    if _flag(module, "has_post_expert_norm"):
        out = module.post_expert_norm(out)
    return out * scale


def _project(module: Any, weights: Weights, name: str, slot: int, rows: torch.Tensor) -> torch.Tensor:
    weight = weights[name].select(0, slot)
    if _flag(module, "is_transposed"):
        out = rows @ weight
        return out + weights[name + "_bias"].select(0, slot) if _flag(module, "has_bias") else out
    return linear(rows, weight, weights[name + "_bias"].select(0, slot) if _flag(module, "has_bias") else None)


def _by_stock(module: nn.Module, weights: Weights, slot: int, rows: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
    """Any class: its own eager forward on a stand-in with this one expert."""
    one = _StandIn(module, {name: tensor[slot : slot + 1] for name, tensor in weights.items()}, 1)
    index = torch.zeros((rows.shape[0], 1), dtype=torch.long, device=rows.device)
    return stock_forward(module)(one, rows, index, scale)


def _by_stock_in_float32(
    module: nn.Module, weights: Weights, slot: int, rows: torch.Tensor, scale: torch.Tensor
) -> torch.Tensor:
    """The same for a class that computes and sums in float32 and rounds at the end: float32 rows, no rounding yet."""
    return _by_stock(module, weights, slot, rows.float(), scale)


class _StandIn:
    """An experts module with other expert parameters; all else is the module's."""

    def __init__(self, module: nn.Module, params: Mapping[str, torch.Tensor], num_experts: int) -> None:
        self.__dict__.update(params)
        self._module = module
        self.num_experts = num_experts

    def __getattr__(self, name: str) -> Any:
        member = inspect.getattr_static(type(self._module), name, None)
        if inspect.isfunction(member):
            return member.__get__(self)
        return getattr(self._module, name)


class _Shuffled:
    """A lease on a few experts that are all there, yielded in descending order, to check a form with."""

    def __init__(self, weights: Weights, ids: torch.Tensor) -> None:
        self.weights = weights
        self.experts = sorted(set(ids.flatten().tolist()))
        self._ids = ids
        self.positions: torch.Tensor

    def ready(self) -> Iterator[tuple[int, int, torch.Tensor]]:
        for expert in reversed(self.experts):
            self.positions, tokens = torch.where(self._ids.t() == expert)
            yield expert, expert, tokens


def choose_form(module: nn.Module, specs: Mapping[str, ParamSpec], device: torch.device) -> Form:
    """The cheapest way to compute this class that equals its own eager forward bit by bit on random rows.

    Raises
    ------
    UnsupportedModelError
        There is none.
    """
    quantised = {
        name: spec.dtype for name, spec in specs.items() if spec.dtype.itemsize < 2 or not spec.dtype.is_floating_point
    }
    if quantised:
        raise UnsupportedModelError(
            f"{type(module).__name__}: experts of {quantised} cannot be computed; expected floats"
        )
    reasons = []
    for shrink in (_common_factor(specs), 1):
        for form in _forms(module, specs):
            try:
                if _equals_stock(module, form, specs, shrink, device):
                    return form
            except (RuntimeError, AttributeError, KeyError, TypeError, IndexError, ValueError) as error:
                reasons.append(f"{form.product.__name__}: {error}")
        if shrink == 1:
            break
    detail = f" ({reasons[-1]})" if reasons else ""
    raise UnsupportedModelError(
        f"{type(module).__name__}: no way was found to compute one expert at a time with the bits of its own "
        f"forward{detail}"
    )


def _forms(module: Any, specs: Mapping[str, ParamSpec]) -> Iterable[Form]:
    plain_flags = _flag(module, "has_gate", True) and not (
        _flag(module, "has_bias") or _flag(module, "is_transposed") or _flag(module, "has_post_expert_norm")
    )
    if plain_flags and set(specs) == {"gate_up_proj", "down_proj"}:
        yield Form(_plain, "input")
    yield Form(_by_flags, "input")
    yield Form(_by_flags, "scale")
    yield Form(_by_stock, "input")
    yield Form(_by_stock_in_float32, "float32")


def _common_factor(specs: Mapping[str, ParamSpec]) -> int:
    """By how much all sizes can shrink and keep their ratios; multiples of 16 remain."""
    return max(1, math.gcd(*(size for spec in specs.values() for size in spec.shape)) // 16)


@torch.no_grad()
def _equals_stock(
    module: nn.Module, form: Form, specs: Mapping[str, ParamSpec], shrink: int, device: torch.device
) -> bool:
    generator = torch.Generator().manual_seed(0)
    experts = 3

    def random(*shape: int, dtype: torch.dtype) -> torch.Tensor:
        return torch.randn(shape, generator=generator).to(dtype=dtype, device=device)

    weights = {
        name: random(experts, *(size // shrink for size in spec.shape), dtype=spec.dtype)
        for name, spec in specs.items()
    }
    stand_in = _StandIn(module, weights, experts)
    dtype = next(iter(weights.values())).dtype
    hidden = weights["down_proj"].shape[-1 if _flag(module, "is_transposed") else 1]
    for tokens in (1, 3, 17):
        for top_k in (1, 2):
            rows = random(tokens, hidden, dtype=dtype)
            ids = torch.rand((tokens, experts), generator=generator).argsort(dim=1)[:, :top_k].to(device)
            for scale_dtype in {dtype, torch.float32}:
                scale = random(tokens, top_k, dtype=scale_dtype)
                expected = stock_forward(module)(stand_in, rows, ids, scale)
                found = combine(module, form, _Shuffled(weights, ids), rows, ids, scale)
                if found.dtype != expected.dtype or not torch.equal(found, expected):
                    return False
    return True
