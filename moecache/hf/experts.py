"""The forward of an attached experts module."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

import torch
from torch import nn
from transformers.integrations.moe import ExpertsInterface

from ..errors import AttachError
from .discovery import NAME
from .forms import stock_forward
from .guards import NOT_RECORDED, refuse_changed, refuse_recording

if TYPE_CHECKING:
    from .discovery import ExpertsLayer
    from .implementations import Implementations
    from .requests import Requests
    from .trials import AnyForm

__all__ = ["LayerState", "register"]


class Attached(Protocol):
    """What the forward asks of an :class:`moecache.hf.attach.Attachment`."""

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
def experts_forward(
    self: nn.Module, hidden_states: torch.Tensor, top_k_index: torch.Tensor, top_k_weights: torch.Tensor
) -> torch.Tensor:
    """The forward of an attached experts module.

    Parameters
    ----------
    self : nn.Module
        The experts module.
    hidden_states : Tensor [T, H]
    top_k_index : integer Tensor [T, K]
    top_k_weights : Tensor [T, K]

    Returns
    -------
    Tensor [T, H], the dtype of ``hidden_states``

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
        return _unattached(self, hidden_states, top_k_index, top_k_weights)
    refuse_recording(hidden_states, top_k_index)
    refuse_changed(self, state.attachment.layers[state.layer])
    form = state.attachment.implementations.forms[state.layer]
    if form.refuses:
        _check_way_of_running(self, form.refuses, hidden_states.device.type)
    if not torch.is_grad_enabled():
        return _routed(self, state, form, hidden_states, top_k_index, top_k_weights)
    if self.training:
        raise AttachError(
            "moecache is for inference: an evicted expert has no gradient; call model.eval(), or moecache.detach(model)"
        )
    with torch.no_grad():
        result = _routed(self, state, form, hidden_states, top_k_index, top_k_weights)
    if hidden_states.requires_grad or top_k_weights.requires_grad:
        return _InferenceOnly.apply(result, hidden_states, top_k_weights)  # type: ignore[no-any-return,no-untyped-call]
    return result


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


def _routed(
    self: nn.Module,
    state: LayerState,
    form: AnyForm,
    hidden_states: torch.Tensor,
    top_k_index: torch.Tensor,
    top_k_weights: torch.Tensor,
) -> torch.Tensor:
    with state.attachment.requests.route(state.layer, top_k_index, top_k_weights) as lease:
        return form.run(self, lease, hidden_states, top_k_index, top_k_weights)


class _InferenceOnly(torch.autograd.Function):
    """Passes values through and refuses gradients, which would silently lack the experts' part."""

    @staticmethod
    def forward(ctx: Any, result: torch.Tensor, *inputs: torch.Tensor) -> torch.Tensor:
        return result

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> None:
        raise AttachError("moecache is for inference: backward through experts is refused; use moecache.detach(model)")


def _unattached(
    module: nn.Module, hidden_states: torch.Tensor, top_k_index: torch.Tensor, top_k_weights: torch.Tensor
) -> torch.Tensor:
    if any(param.device.type == "meta" for param in module.parameters(recurse=False)):
        raise AttachError(
            f"the experts of this {type(module).__name__} are not in memory; "
            "call moecache.attach(model) before running it"
        )
    return stock_forward(module)(module, hidden_states, top_k_index, top_k_weights)
