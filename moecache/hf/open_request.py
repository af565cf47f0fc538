"""One request of a model's forward passes, while it is open."""

from __future__ import annotations

import sys
import weakref
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch

if TYPE_CHECKING:
    from ..cache import ExpertCache
    from ..request import Request

__all__ = ["OpenRequest"]


class OpenRequest:
    """A request, and by what a forward pass is known to belong to it. It ends at the latest when nobody holds it."""

    def __init__(self, cache: ExpertCache) -> None:
        self._cache = cache
        self.request: Request = cache.request()
        # Tokens of a row so far, and by row whether its completion has ended.
        self.length = 0
        self.ended: list[bool] = []
        # The key-value cache whose passes these are; the last pass's ids where there is none.
        self.key: weakref.ref[Any] | None = None
        self.ids: torch.Tensor | None = None

    @property
    def usable(self) -> bool:
        return not self.request.closed

    def end(self, keep: bool = True) -> None:
        if not self._cache.closed:
            self.request.close(keep)

    def __del__(self, is_finalizing: Callable[[], bool] = sys.is_finalizing) -> None:
        if hasattr(self, "request") and not is_finalizing():
            self.end()
