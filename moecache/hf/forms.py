"""How the experts of a class are computed one at a time, with the bits of the class's own eager forward.

A product of one token and one expert is computed with the same rows in the same order by the same operations, and
added to the result in ascending order of experts: the result does not depend on what was cached, nor on the order in
which experts arrive. Which way is right for a class is not assumed but tried: see ``trials``.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping
from typing import Any, Literal, NamedTuple

import torch
from torch import nn
from torch.nn.functional import linear

__all__ = [
    "KEPT_NBYTES",
    "Form",
    "Weights",
    "by_flags",
    "by_stock",
    "by_stock_in_float32",
    "deep_stand_in",
    "flag",
    "plain",
    "stand_in",
    "stock_forward",
    "without_hooks",
]

Weights = Mapping[str, torch.Tensor]

# Products that wait for their turn are kept up to this many bytes; beyond, experts are asked for in order.
KEPT_NBYTES = 64 << 20


class Form(NamedTuple):
    """How a class's eager forward computes: the scaled product of rows with one expert, and the dtype it sums products in."""

    product: Callable[[nn.Module, Weights, int, int, torch.Tensor, torch.Tensor], torch.Tensor]
    sum_dtype: Literal["input", "scale", "float32"]
    refuses: frozenset[str] = frozenset()  # "training", "autocast": where its bits were seen to be others

    def forward(
        self,
        module: nn.Module,
        route: Callable[[torch.Tensor, torch.Tensor], Any],
        hidden_states: torch.Tensor,
        top_k_index: torch.Tensor,
        top_k_weights: torch.Tensor,
    ) -> torch.Tensor:
        """The experts' forward, with what it needs from the lease that `route` opens."""
        with route(top_k_index, top_k_weights) as lease:
            return self.run(module, lease, hidden_states, top_k_index, top_k_weights)

    def run(
        self,
        module: nn.Module,
        lease: Any,
        hidden_states: torch.Tensor,
        top_k_index: torch.Tensor,
        top_k_weights: torch.Tensor,
    ) -> torch.Tensor:
        """Compute each expert as the lease yields it; sum in ascending order of experts.

        Parameters
        ----------
        module : nn.Module
        lease : Lease
        hidden_states : Tensor ``[T, H]``
        top_k_index : integer Tensor ``[T, K]``
        top_k_weights : Tensor ``[T, K]``

        Returns
        -------
        Tensor ``[T, H]``
        """
        return _combine(module, self, lease, hidden_states, top_k_index, top_k_weights)


def stock_forward(module: nn.Module) -> Callable[..., torch.Tensor]:
    """The class's own eager forward, below transformers' dispatch."""
    return type(module).forward.__wrapped__  # type: ignore[attr-defined,no-any-return]


def _combine(
    module: nn.Module,
    form: Form,
    lease: Any,
    hidden_states: torch.Tensor,
    top_k_index: torch.Tensor,
    top_k_weights: torch.Tensor,
) -> torch.Tensor:
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
    turn = kept = 0
    on_host = result.device.type == "cpu"
    for expert, slot, tokens in lease.ready():
        positions = lease.positions
        if not on_host:
            tokens, positions = tokens.to(result.device), positions.to(result.device)
        scale = top_k_weights[tokens, positions, None]
        value = product(module, weights, slot, expert, hidden_states[tokens], scale).to(dtype)
        if expert != experts[turn]:
            early[expert] = tokens, value
            kept += value.nbytes
            lease.in_order = kept > KEPT_NBYTES
            continue
        result.index_add_(0, tokens, value)
        turn += 1
        while early and experts[turn] in early:
            tokens, value = early.pop(experts[turn])
            kept -= value.nbytes
            result.index_add_(0, tokens, value)
            turn += 1
        lease.in_order = kept > KEPT_NBYTES
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
        value = product(module, weights, slot, expert, hidden_states, top_k_weights.narrow(1, ids.index(expert), 1))
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


def plain(
    module: nn.Module, weights: Weights, slot: int, expert: int, rows: torch.Tensor, scale: torch.Tensor
) -> torch.Tensor:
    """The commonest class: gated, without bias, weights ``[out, in]``."""
    gate_up = linear(rows, weights["gate_up_proj"].select(0, slot))
    return linear(module._apply_gate(gate_up), weights["down_proj"].select(0, slot)) * scale  # type: ignore[operator]


def flag(module: Any, name: str, default: bool = False) -> bool:
    """What transformers' decorator says of a class; a version before the flag means its default."""
    return bool(getattr(module, name, default))


def by_flags(
    module: Any, weights: Weights, slot: int, expert: int, rows: torch.Tensor, scale: torch.Tensor
) -> torch.Tensor:
    """A class described by the flags of transformers' decorator."""
    first = "gate_up_proj" if flag(module, "has_gate", True) else "up_proj"
    inner = _project(module, weights, first, slot, rows)
    inner = module._apply_gate(inner) if flag(module, "has_gate", True) else module.act_fn(inner)
    out = _project(module, weights, "down_proj", slot, inner)
    if flag(module, "has_post_expert_norm"):
        out = module.post_expert_norm(out)
    return out * scale


def _project(module: Any, weights: Weights, name: str, slot: int, rows: torch.Tensor) -> torch.Tensor:
    weight = weights[name].select(0, slot)
    if flag(module, "is_transposed"):
        out = rows @ weight
        return out + weights[name + "_bias"].select(0, slot) if flag(module, "has_bias") else out
    return linear(rows, weight, weights[name + "_bias"].select(0, slot) if flag(module, "has_bias") else None)


def by_stock(
    module: Any, weights: Weights, slot: int, expert: int, rows: torch.Tensor, scale: torch.Tensor
) -> torch.Tensor:
    """Any class: its own eager forward, told the expert's own number, with this expert's weights wherever it looks.

    What a class holds by expert number beside its parameters (a buffer, a list, a branch) is found by that number.
    """
    count = int(module.num_experts)
    params = {name: tensor[slot].expand(count, *tensor.shape[1:]) for name, tensor in weights.items()}
    index = torch.full((rows.shape[0], 1), expert, dtype=torch.int64, device=rows.device)
    return stock_forward(module)(stand_in(module, params), rows, index, scale)


def by_stock_in_float32(
    module: nn.Module, weights: Weights, slot: int, expert: int, rows: torch.Tensor, scale: torch.Tensor
) -> torch.Tensor:
    """The same for a class that computes and sums in float32 and rounds at the end: float32 rows, no rounding yet."""
    return by_stock(module, weights, slot, expert, rows.float(), scale)


def stand_in(module: nn.Module, params: Mapping[str, torch.Tensor], *, eager: bool = True) -> nn.Module:
    """The experts module with other parameters, unattached; all else is shared with the module.

    With ``eager`` its configuration is a copy that says so, which takes tens of microseconds.
    """
    twin: nn.Module = object.__new__(type(module))
    twin.__dict__.update(module.__dict__)
    twin.__dict__.pop("_moecache", None)
    twin.__dict__["_parameters"] = {**module._parameters, **params}
    if eager and "config" in module.__dict__:
        config: Any = copy.copy(module.config)
        config._experts_implementation_internal = "eager"
        twin.__dict__["config"] = config
    return twin


def deep_stand_in(
    module: nn.Module, params: Mapping[str, torch.Tensor], modules: Mapping[str, Any] | None = None
) -> nn.Module:
    """The same with parameters, and modules, replaced anywhere below it, each by its dotted name."""
    below: dict[str, tuple[dict[str, torch.Tensor], dict[str, Any]]] = {}
    here: tuple[dict[str, torch.Tensor], dict[str, Any]] = ({}, {})
    for part, given in enumerate((params, modules or {})):
        for name, value in given.items():
            child, _, rest = name.partition(".")
            (below.setdefault(child, ({}, {})) if rest else here)[part][rest or child] = value
    twin = stand_in(module, here[0], eager=False)
    children: dict[str, Any] = {**module._modules, **here[1]}
    for name, (child_params, child_modules) in below.items():
        children[name] = deep_stand_in(children[name], child_params, child_modules)
    twin.__dict__["_modules"] = children
    return twin


def without_hooks(module: nn.Module) -> nn.Module:
    """A stand-in, as are all modules below it, whose hooks are not called and whose buffers may be written to."""
    twin = stand_in(module, {}, eager=False)
    twin.__dict__.update({name: type(hooks)() for name, hooks in twin.__dict__.items() if name.endswith("_hooks")})
    twin.__dict__["_buffers"] = {
        name: None if buffer is None else buffer.detach().clone() for name, buffer in module._buffers.items()
    }
    twin.__dict__["_modules"] = {
        name: None if child is None else without_hooks(child) for name, child in module._modules.items()
    }
    return twin
