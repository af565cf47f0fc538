"""What a router hands over, checked before anything changes: ids, gate weights, the token mask."""

from __future__ import annotations

import math
from typing import Any

import torch

from .errors import RoutingError

__all__ = ["check_token_mask", "check_topk_weights", "checked_ids"]

# Bytes of an id as _core reads them; -1 marks the unsigned byte.
_ID_SIZE = {torch.int64: 8, torch.int32: 4, torch.int16: 2, torch.int8: 1, torch.uint8: -1}
_UNSIGNED = (torch.uint16, torch.uint32, torch.uint64)


def checked_ids(ids: Any, device: torch.device, layer: int) -> tuple[torch.Tensor, int]:
    """Ids ``[tokens, k]`` on the CPU, and the bytes of one as `_core` reads them."""
    if type(ids) is not torch.Tensor or not ids.is_cpu:
        ids = _on_cpu(ids, device, layer)
    itemsize = _ID_SIZE.get(ids.dtype)
    if itemsize is None and ids.dtype in _UNSIGNED:
        ids, itemsize = _signed(ids), 8
    if itemsize is None:
        raise RoutingError(f"layer {layer}: ids are {ids.dtype}; expected integers such as torch.int64")
    if ids.dim() != 2:
        raise RoutingError(f"layer {layer}: ids have shape {tuple(ids.shape)}; expected [tokens, k]")
    return ids, itemsize


def _on_cpu(ids: Any, device: torch.device, layer: int) -> torch.Tensor:
    # Ids may come as anything array-like; on another device only if it is the cache's own.
    try:
        tensor: torch.Tensor = ids if isinstance(ids, torch.Tensor) else torch.as_tensor(ids, device="cpu")
    except (TypeError, ValueError, RuntimeError) as error:
        raise RoutingError(
            f"layer {layer}: ids cannot be made a tensor ({error}); expected integers [tokens, k]"
        ) from error
    if tensor.device.type not in ("cpu", device.type):
        raise RoutingError(
            f"layer {layer}: ids are on {tensor.device}; expected the cache's device {device} or the CPU"
        )
    return tensor.to("cpu")


def _signed(ids: torch.Tensor) -> torch.Tensor:
    # What does not fit stays out of range.
    wide = ids.to(torch.int64)
    return wide.where(wide >= 0, torch.iinfo(torch.int64).max)


def check_topk_weights(weights: torch.Tensor, ids: torch.Tensor, layer: int) -> None:
    if weights.shape != ids.shape or not weights.is_floating_point() or weights.is_meta:
        raise RoutingError(
            f"layer {layer}: gate weights are {weights.dtype} {tuple(weights.shape)} on {weights.device}; expected floats "
            f"of the ids' shape {tuple(ids.shape)}"
        )
    # A sum is NaN when a term is: one reduction instead of two.
    if weights.numel() and math.isnan(weights.sum().item()):
        raise RoutingError(f"layer {layer}: gate weights hold NaN; the router's logits or the layer's input are broken")


def check_token_mask(token_mask: torch.Tensor, tokens: int, layer: int) -> torch.Tensor:
    if token_mask.dtype is not torch.bool or token_mask.shape != (tokens,) or token_mask.is_meta:
        raise RoutingError(
            f"layer {layer}: `token_mask` is {token_mask.dtype} {tuple(token_mask.shape)} on {token_mask.device}; "
            f"expected torch.bool ({tokens},)"
        )
    return token_mask.to("cpu").contiguous()
