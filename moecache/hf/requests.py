"""Where requests begin and end: read from the calls of the model, so ``generate()`` needs no change."""

from __future__ import annotations

import inspect
import sys
import threading
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

if TYPE_CHECKING:
    from ..cache import ExpertCache, Request

__all__ = ["Requests"]

_CACHE_NAMES = ("past_key_values", "cache", "cache_params")


class _Open:
    """A request that ends at the latest with the thread whose it is."""

    def __init__(self, cache: ExpertCache) -> None:
        self._cache = cache
        self.request: Request = cache.request()

    def end(self) -> None:
        if not self._cache.closed:
            self.request.close()

    def __del__(self, is_finalizing: Callable[[], bool] = sys.is_finalizing) -> None:
        if not is_finalizing():
            self.end()


class _Current(threading.local):
    """The request that this thread's forward passes of one model belong to."""

    open: _Open | None = None
    decode: bool | None = None
    counted: torch.Tensor | None = None
    last_layer: int = -1
    from_forward: bool = False


class Requests:
    """The current request of each thread.

    A forward pass without a key-value cache, or with an empty one, begins a request and ends the thread's previous
    one; any other continues it. Prompt tokens that the attention mask leaves out are computed but not counted.
    """

    def __init__(self, cache: ExpertCache, model: nn.Module) -> None:
        self._cache = cache
        self._current = _Current()
        self._argument_names = list(inspect.signature(model.forward).parameters)

    def before_forward(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Take note of a forward pass of the top model, from its arguments."""
        if args:
            kwargs = {**dict(zip(self._argument_names, args, strict=False)), **kwargs}
        tokens = kwargs.get("input_ids")
        if tokens is None:
            tokens = kwargs.get("inputs_embeds")
        length = tokens.shape[1] if isinstance(tokens, torch.Tensor) and tokens.dim() > 1 else None
        current = self._current
        past = next((kwargs[name] for name in _CACHE_NAMES if kwargs.get(name) is not None), None)
        continues = _holds_tokens(past)
        if not continues or current.open is None or not current.from_forward:
            self._begin(from_forward=True)
        current.decode = None if length is None else continues and length == 1
        current.counted = None if length == 1 else _counted(kwargs.get("attention_mask"), length)

    def current(self, layer: int, tokens: int) -> tuple[Request, bool | None, torch.Tensor | None]:
        """The request, whether this is a decode step, and which rows count, for a call of one experts module.

        A module that is called outside a forward pass of the top model opens a request on its own; it ends when the
        next one begins, or when a layer that is not deeper than the last one is called with several tokens.
        """
        current = self._current
        if current.open is None or (not current.from_forward and layer <= current.last_layer and tokens > 1):
            self._begin(from_forward=False)
        current.last_layer = layer
        counted = current.counted
        if counted is not None and counted.shape[0] != tokens:
            counted = None
        assert current.open is not None
        return current.open.request, current.decode, counted

    def end(self) -> None:
        """End this thread's request, if there is one."""
        if self._current.open is not None:
            self._current.open.end()
            self._current.open = None

    def _begin(self, *, from_forward: bool) -> None:
        self.end()
        current = self._current
        current.open = _Open(self._cache)
        current.decode, current.counted, current.last_layer = None, None, -1
        current.from_forward = from_forward


def _holds_tokens(past: Any) -> bool:
    if past is None:
        return False
    try:
        return int(past.get_seq_length()) > 0
    except ValueError:  # a cache of linear-attention layers only
        return bool(past.has_previous_state())
    except AttributeError:  # a tuple of tensors
        return len(past) > 0


def _counted(mask: Any, length: int | None) -> torch.Tensor | None:
    """Rows of a prompt that a 2-D attention mask keeps, flattened as the experts see them; None for all."""
    if not isinstance(mask, torch.Tensor) or mask.dim() != 2 or length is None or mask.shape[1] < length:
        return None
    kept = mask[:, -length:].reshape(-1).bool().cpu()
    return None if bool(kept.all()) else kept
