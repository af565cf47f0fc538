"""What forms and adapters are tried with: random experts in slots, and a lease that yields them in an order that no one counts on."""

from __future__ import annotations

import math
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext

import torch

from .forms import Weights

__all__ = ["TRIAL_ERRORS", "ShuffledLease", "random_slots", "same_bits", "undisturbed"]

# What code that is tried may raise where it does not fit.
TRIAL_ERRORS = (RuntimeError, AttributeError, KeyError, TypeError, IndexError, ValueError, AssertionError)


class ShuffledLease:
    """A lease on experts that are all there, yielded in descending order, to try a form with; expert e in slot e + 1."""

    def __init__(self, weights: Weights, ids: torch.Tensor, missing: int) -> None:
        self.weights, self.missing = weights, missing
        self.experts = sorted(set(ids.flatten().tolist()) - {-1})
        self.slots = [expert + 1 for expert in self.experts]
        self.in_order = False
        self._ids = ids
        self.positions: torch.Tensor

    def ready(self) -> Iterator[tuple[int, int, torch.Tensor]]:
        for expert in reversed(self.experts):
            self.positions, tokens = torch.where(self._ids.t() == expert)
            yield expert, expert + 1, tokens


def random_slots(
    shape: Sequence[int], num_experts: int, dtype: torch.dtype, device: torch.device, generator: torch.Generator
) -> torch.Tensor:
    """Random ``[num_experts + 1, *shape]``; experts overlap in memory, each 64 elements after the one before.

    So all differ, and none is large.
    """
    strides = [math.prod(shape[i + 1 :]) for i in range(len(shape))]
    numel = math.prod(shape) + 64 * num_experts
    values = torch.randn(numel, generator=generator, dtype=torch.float32, device="cpu")
    stacked = values.to(dtype=dtype, device=device).as_strided((num_experts + 1, *shape), (64, *strides))
    return stacked.contiguous() if stacked.numel() < 1 << 24 else stacked


def same_bits(found: torch.Tensor, expected: torch.Tensor) -> bool:
    if found.dtype != expected.dtype or found.shape != expected.shape:
        return False
    return bool(((found == expected) | (found.isnan() & expected.isnan())).all())


@contextmanager
def undisturbed(device: torch.device) -> Iterator[None]:
    """Keep defaults of the caller's (device, autocast, inference mode) and his random state from what is tried on a device."""
    with (
        torch.random.fork_rng(devices=[]),
        warnings.catch_warnings(),
        torch.inference_mode(False),
        torch.no_grad(),
        nullcontext() if torch.get_default_device().type == device.type else device,
        torch.autocast(device.type, enabled=False),
    ):
        warnings.simplefilter("ignore")
        yield
