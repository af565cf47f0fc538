"""An adapter is not assumed to have the bits of a module's own forward, but tried against it."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from contextlib import AbstractContextManager, nullcontext
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.utils._pytree import tree_leaves, tree_map_only

from ...bank import ParamSpec
from ...errors import UnsupportedModelError
from ..forms import deep_stand_in, without_hooks
from ..shuffled import TRIAL_ERRORS, ShuffledLease, random_slots, same_bits, undisturbed
from .base import Adapter, Route

__all__ = ["AdapterForm", "try_adapter"]


class AdapterForm(NamedTuple):
    """An adapter that was found to have a module's bits.

    Attributes
    ----------
    adapter : Adapter
    refuses : frozenset of str
        "training", "autocast": where the bits were seen to be others.
    """

    adapter: Adapter
    refuses: frozenset[str]

    def forward(self, module: nn.Module, route: Route, *args: Any, **kwargs: Any) -> Any:
        """What the module's own forward returns, with its experts from the lease that `route` opens."""
        return self.adapter.forward(module, route, *args, **kwargs)


def try_adapter(
    adapter: Adapter, module: nn.Module, specs: Mapping[str, ParamSpec], device: torch.device
) -> AdapterForm:
    """Run a module's own forward over random experts, and the adapter over the same experts in slots.

    Raises
    ------
    UnsupportedModelError
        The results differ, or the forward cannot be run.
    """
    with undisturbed(device):
        trial = _Trial(adapter, module, specs, device)
        reason = None
        try:
            equal = bool(trial.calls) and all(trial.equal(args) for args in trial.calls)
        except (*TRIAL_ERRORS, UnsupportedModelError) as error:
            equal, reason = False, str(error)[:300]
        if not equal:
            raise UnsupportedModelError(
                f"{type(module).__name__}: no way was found to compute its experts one at a time with the bits of its own "
                f"forward ({reason or trial.failure or 'those tried differ'}); run it without a cache"
            )
        return AdapterForm(adapter, trial.refused())


class _Trial:
    """A module with random experts, and the same experts in slots: expert e lies in slot e + 1."""

    def __init__(
        self, adapter: Adapter, module: nn.Module, specs: Mapping[str, ParamSpec], device: torch.device
    ) -> None:
        generator = torch.Generator("cpu").manual_seed(0)
        self._device = device
        count, attributes = adapter.smaller(module)
        self._adapter = copy.copy(adapter)
        self._adapter.num_experts = count
        self._slots = {
            name: random_slots(spec.shape, count, spec.dtype, device, generator).mul_(0.3)
            for name, spec in specs.items()
        }
        module = without_hooks(module)
        stacked = {name: tensor[1:] for name, tensor in self._slots.items()}
        self._stock = deep_stand_in(module, self._adapter.parameters_of(stacked))
        self._subject = deep_stand_in(module, {})
        self._modules = (self._stock, self._subject)
        for twin in self._modules:
            twin.__dict__.update(attributes)
            twin.__dict__.pop("_moecache", None)
            twin.eval()
        self.failure: str | None = None
        calls = self._adapter.trials(self._subject, specs, generator)
        moved = [tree_map_only(torch.Tensor, lambda tensor: tensor.to(device), args) for args in calls]
        self.calls = [args for args in moved if self._runs(args)]

    def equal(self, args: tuple[Any, ...]) -> bool:
        expected = tree_leaves(self._adapter.own_forward(self._stock)(*args))
        for missing in (1, 0):
            found = tree_leaves(self._adapter.tried_forward(self._subject, self._route(missing))(*args))
            if len(found) != len(expected) or not all(map(_equal, found, expected)):
                return False
        return True

    def _runs(self, args: tuple[Any, ...]) -> bool:
        # What the module's own forward refuses (gate weights of another dtype, say), no model calls it with.
        try:
            self._adapter.own_forward(self._stock)(*args)
        except TRIAL_ERRORS as error:
            self.failure = str(error)[:300]
            return False
        return True

    def refused(self) -> frozenset[str]:
        found = set()
        for twin in self._modules:
            twin.train()
        if not self._all_equal():
            found.add("training")
        for twin in self._modules:
            twin.eval()
        with torch.autocast(self._device.type, torch.bfloat16):
            if not self._all_equal():
                found.add("autocast")
        return frozenset(found)

    def _all_equal(self) -> bool:
        try:
            return all(self.equal(args) for args in self.calls)
        except (*TRIAL_ERRORS, UnsupportedModelError):
            return False

    def _route(self, missing: int) -> Route:
        def route(ids: torch.Tensor, rows: torch.Tensor) -> AbstractContextManager[Any]:
            return nullcontext(ShuffledLease(self._slots, ids.cpu(), missing))

        return route


def _equal(found: Any, expected: Any) -> bool:
    if isinstance(found, torch.Tensor) and isinstance(expected, torch.Tensor):
        return same_bits(found, expected)
    return bool(found == expected)
