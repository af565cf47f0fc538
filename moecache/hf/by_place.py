"""Implementations that keep a token's products apart and sum them over its top-k places, in the router's order.

transformers' ``grouped_mm`` and ``batched_mm`` do, so the sum does not depend on the order in which experts arrive. Where all
experts of a step are resident, the implementation itself can run over the pool's tensors, with slots for expert numbers; else
each expert is computed as it lands. Which way has an implementation's bits is tried, as for every form: see ``trials``.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.nn.functional import linear
from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS

from ..bank import ParamSpec
from .forms import KEPT_NBYTES, Weights, flag, stand_in

__all__ = ["PlaceForm", "place_forms"]

# torch's grouped product takes fewer groups than this on a CUDA device.
_MOST_GROUPS = 1024

_Product = Callable[[Any, Weights, int, torch.Tensor], torch.Tensor]


class PlaceForm(NamedTuple):
    """How an implementation that sums over the top-k places is computed.

    Attributes
    ----------
    name : str
        As transformers knows the implementation.
    over_slots : bool
        It runs itself over the pool where all experts of a step are resident.
    matrices : bool
        One matrix product a projection and expert has its bits; else it is called for each expert.
    refuses : frozenset of str
        "training", "autocast": where the bits were seen to be others.
    """

    name: str
    over_slots: bool
    matrices: bool
    refuses: frozenset[str] = frozenset()

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
        """Compute a step: hidden states ``[T, H]``, ids and gate weights ``[T, K]`` to ``[T, H]``."""
        tokens, top_k = top_k_index.shape
        if tokens == 0:
            return torch.zeros_like(hidden_states)
        resident = lease.missing == 0
        # Matrix products of our own would be cast by autocast, those of the implementation are not.
        matrices = self.matrices and not torch.is_autocast_enabled(hidden_states.device.type)
        # Several tensors of this size are alive at once where a step is computed whole, one where expert by expert.
        small = tokens * top_k * hidden_states.shape[1] * hidden_states.itemsize <= KEPT_NBYTES
        over_slots = self.over_slots and (
            self.name != "grouped_mm" or len(next(iter(lease.weights.values()))) < _MOST_GROUPS
        )
        if resident and small and (matrices or over_slots):
            slots = _slot_ids(lease, top_k_index, int(module.num_experts))  # type: ignore[arg-type]
            if slots is not None:
                # The cache counts time as computing from the first expert that is handed out.
                next(lease.ready(), None)
                if over_slots:
                    index = (
                        torch.tensor(slots, device=hidden_states.device).view_as(top_k_index)
                        if isinstance(slots, list)
                        else slots
                    )
                    return _call(self.name, module, lease.weights, hidden_states, index, top_k_weights)
                if isinstance(slots, list):
                    return _one_token(module, lease.weights, slots, hidden_states, top_k_weights)
                return _whole_step(module, lease, hidden_states, top_k_index, top_k_weights)
        several = self.name == "batched_mm" and tokens * top_k > 1
        product = _matrices if matrices else self._batched_product if several else self._stock_product
        return _as_they_land(module, product, lease, hidden_states, top_k_index, top_k_weights)

    def _stock_product(self, module: Any, weights: Weights, slot: int, rows: torch.Tensor) -> torch.Tensor:
        return _call_with_one(self.name, module, weights, slot, rows)

    def _batched_product(self, module: Any, weights: Weights, slot: int, rows: torch.Tensor) -> torch.Tensor:
        # Copies an expert's weights for each row. A batch of one row takes another way through BLAS than larger ones do.
        nbytes = sum(tensor[0].nbytes for tensor in weights.values())
        parts = [
            part if len(part) > 1 else part.expand(2, -1)
            for part in torch.split(rows, max(2, KEPT_NBYTES // max(nbytes, 1)))
        ]
        return torch.cat([_call_with_one(self.name, module, weights, slot, part) for part in parts])[: len(rows)]


def place_forms(module: Any, specs: Mapping[str, ParamSpec], name: str, device: torch.device) -> Iterator[PlaceForm]:
    """What to try for an implementation, the fastest first.

    On a CPU torch's grouped product is one matrix product a group, and costs about 3 microseconds for a group that has no
    rows. A pool has a group a slot: there, the products of the experts that are used are faster by themselves
    (``bench/bench_experts.py``). ``batched_mm`` costs the same over a pool as over the model's own parameters.
    """
    first = "gate_up_proj" if flag(module, "has_gate", True) else "up_proj"
    needed = {first, "down_proj"} | ({first + "_bias", "down_proj_bias"} if flag(module, "has_bias") else set())
    grouped = name == "grouped_mm"
    for over_slots in (False,) if grouped and device.type == "cpu" else (True, False):
        if grouped and needed == set(specs):
            yield PlaceForm(name, over_slots, matrices=True)
        yield PlaceForm(name, over_slots, matrices=False)


def _call(
    name: str, module: nn.Module, weights: Weights, rows: torch.Tensor, index: torch.Tensor, scale: torch.Tensor
) -> torch.Tensor:
    twin = stand_in(module, weights, eager=False)
    twin.__dict__["num_experts"] = len(next(iter(weights.values())))
    return ALL_EXPERTS_FUNCTIONS[name](twin, rows, index, scale)  # type: ignore[no-any-return]


def _call_with_one(name: str, module: nn.Module, weights: Weights, slot: int, rows: torch.Tensor) -> torch.Tensor:
    """The unscaled product of rows with one expert: with gate weights of 1 and one place a token, that is the sum."""
    expert = {key: tensor.narrow(0, slot, 1) for key, tensor in weights.items()}
    index = torch.zeros((rows.shape[0], 1), dtype=torch.int64, device=rows.device)
    return _call(name, module, expert, rows, index, torch.ones_like(index, dtype=rows.dtype))


def _slot_ids(lease: Any, ids: torch.Tensor, num_experts: int) -> list[int] | torch.Tensor | None:
    """The slot of each expert that was named, all of them resident; None where an id is padding.

    A list ``[K]`` for one token with K distinct experts, else an int64 Tensor like ``ids``.
    """
    experts, slots = lease.experts, lease.slots
    if ids.shape == (1, len(experts)):
        found = dict(zip(experts, slots, strict=True))
        return [found[expert] for expert in ids[0].tolist()]
    table = torch.full((num_experts + 1,), -1, dtype=torch.int64, device="cpu")
    table[experts] = torch.tensor(slots, dtype=torch.int64, device="cpu")
    named = table.to(ids.device)[ids.to(torch.int64).clamp(-1, num_experts)]
    return None if bool((named < 0).any()) else named


def _one_token(
    module: Any, pool: Weights, slots: list[int], hidden_states: torch.Tensor, top_k_weights: torch.Tensor
) -> torch.Tensor:
    """One token with K distinct experts, all resident: no sort, no gather and no scatter is needed."""
    rows = hidden_states.to(pool["down_proj"].dtype)
    first = _first(module)
    inner = _activate(module, torch.cat([_project(module, pool, first, slot, rows) for slot in slots]))
    places = zip(slots, torch.split(inner, 1), strict=True)
    out = torch.cat([_project(module, pool, "down_proj", slot, row) for slot, row in places])
    return _summed(_normed(module, out) * top_k_weights.reshape(-1, 1), hidden_states)


def _whole_step(
    module: Any, lease: Any, hidden_states: torch.Tensor, top_k_index: torch.Tensor, top_k_weights: torch.Tensor
) -> torch.Tensor:
    """All experts resident: rows sorted by expert as ``grouped_mm`` sorts them, each group's product into its place."""
    pool, top_k = lease.weights, top_k_index.shape[1]
    ids, order = torch.sort(top_k_index.reshape(-1))
    rows = hidden_states[order // top_k].to(pool["down_proj"].dtype)
    counts = torch.unique_consecutive(ids, return_counts=True)[1].tolist()
    slots = lease.slots  # both in ascending order of experts
    inner = _activate(module, _grouped(module, pool, _first(module), slots, counts, rows))
    out = _normed(module, _grouped(module, pool, "down_proj", slots, counts, inner))
    scale = top_k_weights.reshape(-1)[order, None]
    value = out.mul_(scale) if torch.result_type(out, scale) == out.dtype else out * scale
    return _summed(torch.empty_like(value).index_copy_(0, order, value), hidden_states)


def _as_they_land(
    module: Any,
    product: _Product,
    lease: Any,
    hidden_states: torch.Tensor,
    top_k_index: torch.Tensor,
    top_k_weights: torch.Tensor,
) -> torch.Tensor:
    """Each expert as the lease yields it; one product a token and place is kept until all are there."""
    top_k = top_k_index.shape[1]
    scale = top_k_weights.reshape(-1, 1)
    products: torch.Tensor | None = None
    for _, slot, tokens in lease.ready():
        # Within a group the implementations go by token first, then by place.
        places = (tokens * top_k + lease.positions).sort().values.to(hidden_states.device)
        value = product(module, lease.weights, slot, hidden_states[places // top_k]) * scale[places]
        if products is None:  # places of padding stay 0
            products = value.new_zeros((len(scale), value.shape[1]))
        products.index_copy_(0, places, value)
    return torch.zeros_like(hidden_states) if products is None else _summed(products, hidden_states)


def _summed(products: torch.Tensor, hidden_states: torch.Tensor) -> torch.Tensor:
    tokens = hidden_states.shape[0]
    return products.view(tokens, -1, products.shape[1]).sum(dim=1).to(hidden_states.dtype)


def _matrices(module: Any, weights: Weights, slot: int, rows: torch.Tensor) -> torch.Tensor:
    inner = _activate(module, _project(module, weights, _first(module), slot, rows.to(weights["down_proj"].dtype)))
    return _normed(module, _project(module, weights, "down_proj", slot, inner))


def _first(module: Any) -> str:
    return "gate_up_proj" if flag(module, "has_gate", True) else "up_proj"


def _activate(module: Any, inner: torch.Tensor) -> torch.Tensor:
    return module._apply_gate(inner) if flag(module, "has_gate", True) else module.act_fn(inner)  # type: ignore[no-any-return]


def _normed(module: Any, out: torch.Tensor) -> torch.Tensor:
    return module.post_expert_norm(out) if flag(module, "has_post_expert_norm") else out


def _project(module: Any, weights: Weights, name: str, slot: int, rows: torch.Tensor) -> torch.Tensor:
    weight = weights[name].select(0, slot)
    out = rows @ weight if flag(module, "is_transposed") else linear(rows, weight)
    return out.add_(weights[name + "_bias"].select(0, slot)) if flag(module, "has_bias") else out


def _grouped(
    module: Any, weights: Weights, name: str, slots: list[int], counts: list[int], rows: torch.Tensor
) -> torch.Tensor:
    stack = weights[name] if flag(module, "is_transposed") else weights[name].transpose(1, 2)
    bias = weights[name + "_bias"] if flag(module, "has_bias") else None
    out = rows.new_empty((len(rows), stack.shape[2]))
    for slot, part, target in zip(slots, torch.split(rows, counts), torch.split(out, counts), strict=True):
        torch.mm(part, stack.select(0, slot), out=target)
        if bias is not None:
            target.add_(bias.select(0, slot))
    return out
