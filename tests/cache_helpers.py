"""A small bank whose experts are told apart by their numbers, and steps that check every byte they are given."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from moecache import ExpertBank, ExpertCache, Request


def make_bank(num_experts: Sequence[int] = (8, 8), *, sizes: Sequence[int] | None = None, salt: int = 0) -> ExpertBank:
    """Every expert's tensors hold numbers that no other expert has."""
    layers = []
    for layer, experts in enumerate(num_experts):
        size = 5 if sizes is None else sizes[layer]
        code = torch.arange(experts, dtype=torch.float32).reshape(-1, 1, 1) + 1000 * (layer + 1) + 100_000 * salt
        layers.append(
            {
                "gate_up": code + torch.linspace(0, 0.5, 2 * size * 3).reshape(1, 2 * size, 3),
                "down": -code - torch.linspace(0, 0.5, 3 * size).reshape(1, 3, size),
            }
        )
    return ExpertBank.from_tensors(layers)


def run(request: Request, layer: int, ids: Any, **options: Any) -> list[int]:
    """One step, every expert's bytes checked; returns the experts in the order they came."""
    cache = request.cache
    order = []
    with request.route(layer, torch.as_tensor(ids), **options) as lease:
        for expert, slot, tokens in lease.ready():
            check(cache, lease, layer, expert, slot)
            assert len(tokens) == len(lease.positions)
            order.append(expert)
            assert len(cache.resident()) <= cache.capacity
    return order


def check(cache: ExpertCache, lease: Any, layer: int, expert: int, slot: int) -> None:
    for name, tensor in cache.bank.expert(layer, expert).items():
        assert torch.equal(lease.weights[name][slot], tensor), f"layer {layer} expert {expert}: {name} is another's"
