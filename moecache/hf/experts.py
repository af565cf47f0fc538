"""The forward of an attached experts module."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

import torch
from torch import nn
from torch.utils._pytree import tree_map_only
from transformers.integrations.moe import ExpertsInterface

from ..errors import AttachError
from .discovery import NAME
from .forms import stock_forward
from .guards import NOT_RECORDED, refuse_changed, refuse_recording

if TYPE_CHECKING:
    from ..cache import ExpertCache
    from ..lease import Lease
    from .discovery import ExpertsLayer
    from .implementations import Implementations
    from .requests import Requests
    from .trials import AnyForm

__all__ = ["LayerState", "register"]


class Attached(Protocol):
    """What the forward asks of an :class:`moecache.hf.attach.Attachment`."""

    cache: ExpertCache
    layers: list[ExpertsLayer]
    implementations: Implementations
    requests: Requests


class LayerState(NamedTuple):
    """What the forward of an attached experts module needs; stamped on the module."""

    attachment: Attached
    layer: int


def register() -> None:
    """Make ``experts_implementation="moecache"`` known to transformers; a second call changes nothing."""
    ExpertsInterface.register(NAME, experts_forward)


@torch.compiler.disable(reason=NOT_RECORDED)  # type: ignore[untyped-decorator,no-untyped-call]
def experts_forward(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
    """The forward of an attached experts module.

    Parameters
    ----------
    self : nn.Module
        The experts module.
    *args, **kwargs
        As its class is called: hidden states ``[T, H]``, integer ids ``[T, K]`` and gate weights ``[T, K]``, or what its
        adapter knows of.

    Returns
    -------
    Tensor [T, H], the dtype of the hidden states, or what the class returns

    Raises
    ------
    AttachError
        The module is not attached and its experts are not in memory, it is trained, or its parameters were changed.
    CaptureError
        The call is being traced, exported or transformed.
    ClosedError
        The cache was closed.
    """
    state: LayerState | None = self.__dict__.get("_moecache")
    if state is None:
        return _unattached(self, args, kwargs)
    refuse_recording(args[0] if args else next(iter(kwargs.values())))
    refuse_changed(self, state.attachment.layers[state.layer])
    form = state.attachment.implementations.forms[state.layer]
    if form.refuses:
        _check_way_of_running(self, form.refuses, state.attachment.cache.device.type)
    if not torch.is_grad_enabled():
        return _routed(self, state, form, args, kwargs)
    if self.training:
        raise AttachError(
            "moecache is for inference: an evicted expert has no gradient; call model.eval(), or moecache.detach(model)"
        )
    with torch.no_grad():
        result = _routed(self, state, form, args, kwargs)
    leaves = [value for value in (*args, *kwargs.values()) if isinstance(value, torch.Tensor) and value.requires_grad]
    if not leaves:
        return result
    return tree_map_only(torch.Tensor, lambda tensor: _without_gradient(tensor, leaves), result)


def _check_way_of_running(module: nn.Module, refuses: frozenset[str], device: str) -> None:
    if "training" in refuses and module.training:
        raise AttachError(
            f"{type(module).__name__} computes otherwise in training mode, which moecache cannot follow bit by bit; "
            "call model.eval(), or moecache.detach(model)"
        )
    if "autocast" in refuses and torch.is_autocast_enabled(device):
        raise AttachError(
            f"{type(module).__name__} under autocast cannot be computed with the bits of its own forward; load the model "
            "with the dtype it is to run in, or call moecache.detach(model)"
        )


def _routed(self: nn.Module, state: LayerState, form: AnyForm, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    def route(ids: torch.Tensor, values: torch.Tensor) -> Lease:
        return state.attachment.requests.route(state.layer, ids, values)

    return form.forward(self, route, *args, **kwargs)


class _InferenceOnly(torch.autograd.Function):
    """Passes values through and refuses gradients, which would silently lack the experts' part."""

    @staticmethod
    def forward(ctx: Any, result: torch.Tensor, *inputs: torch.Tensor) -> torch.Tensor:
        return result

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> None:
        raise AttachError("moecache is for inference: backward through experts is refused; use moecache.detach(model)")


def _without_gradient(tensor: torch.Tensor, leaves: list[torch.Tensor]) -> torch.Tensor:
    if not tensor.is_floating_point():
        return tensor
    return _InferenceOnly.apply(tensor, *leaves)  # type: ignore[no-any-return,no-untyped-call]


def _unattached(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    if any(param.is_meta for param in module.parameters()):
        raise AttachError(
            f"the experts of this {type(module).__name__} are not in memory; "
            "call moecache.attach(model) before running it"
        )
    return stock_forward(module)(module, *args, **kwargs)
