"""The requests of a model's forward passes, while they are open: one for each sequence."""

from __future__ import annotations

import sys
import weakref
from collections.abc import Callable, Collection, Hashable, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

if TYPE_CHECKING:
    from ..cache import ExpertCache
    from ..lease import Lease
    from ..request import Request
    from ..request_batch import RequestBatch

__all__ = ["OpenRequests", "Sequences"]


class Sequences(NamedTuple):
    """Whose the rows of a forward pass are.

    Attributes
    ----------
    places : int
        Sequences that share them.
    lengths : list of int, optional
        Rows of each where they differ, in their order; what is left over is padding.
    names : list, optional
        Who they are, where sequences come and go.
    decodes : list of bool, optional
        For each whether its rows belong to its completion, where that differs.
    running : collection, optional
        The names of all that have not ended, in this pass or not.
    """

    places: int = 1
    lengths: list[int] | None = None
    names: list[Hashable] | None = None
    decodes: list[bool] | None = None
    running: Collection[Hashable] = ()

    def rows(self, tokens: int) -> list[int] | None:
        """Rows of each sequence among so many; None where these are others than the model was called with."""
        if self.lengths is None:
            return None if tokens % self.places else [tokens // self.places] * self.places
        return self.lengths if sum(self.lengths) <= tokens else None


class OpenRequests:
    """Requests that share forward passes, and by what a pass is known to be theirs.

    They end at the latest when nobody holds this.
    """

    def __init__(self, cache: ExpertCache) -> None:
        self._cache = cache
        self._requests: list[Request | None] = []  # by place; None: its answer has ended
        self._named: dict[Hashable, Request] = {}
        self._batch: RequestBatch | None = None
        self._over = False
        # Tokens of a row so far, and by row whether its completion has ended.
        self.length = 0
        self.ended: list[bool] = []
        # The key-value cache whose passes these are; the last pass's ids where there is none.
        self.key: weakref.ref[Any] | None = None
        self.ids: torch.Tensor | None = None

    @property
    def usable(self) -> bool:
        return not self._over and not any(request is not None and request.closed for request in self._requests)

    def route(
        self,
        sequences: Sequences,
        layer: int,
        topk_ids: torch.Tensor,
        decode: bool | None,
        token_mask: torch.Tensor | None,
    ) -> Lease:
        """A step of these sequences: a request's own where there is one, a batch's otherwise."""
        tokens = topk_ids.shape[0]
        names = sequences.names
        requests = self._at_places(sequences.places) if names is None else self._of(names, sequences.running)
        rows, decodes = sequences.rows(tokens), sequences.decodes or decode
        if rows is None:  # one of them stands for all
            requests, rows, decodes = [next(filter(None, requests), None)], [tokens], decode
        if len(requests) == 1 and requests[0] is not None and rows[0] == tokens and names is None:
            return requests[0].route(layer, topk_ids, decode=decode, token_mask=token_mask)
        if self._batch is None:
            self._batch = self._cache.batch()
        left_over = tokens - sum(rows)
        if left_over:
            requests, rows = [*requests, None], [*rows, left_over]
            decodes = [*decodes, True] if isinstance(decodes, list) else decodes
        return self._batch.route(
            layer, topk_ids, requests=requests, lengths=rows, decode=decodes, token_mask=token_mask
        )

    def _at_places(self, count: int) -> list[Request | None]:
        # Rows may become others than they were: some were dropped, or each was multiplied. Nobody says which.
        if len(self._requests) != count:
            self._close(True)
            self._requests = [self._cache.request() for _ in range(count)]
        return self._requests

    def _of(self, names: Sequence[Hashable], running: Collection[Hashable]) -> list[Request | None]:
        for name in self._named.keys() - running - set(names):
            self._named.pop(name).close()
        for name in names:
            if name not in self._named:
                self._named[name] = self._cache.request()
        return [self._named[name] for name in names]

    def begin_turn(self) -> None:
        """Sequences whose answers have ended are prompted again."""
        self.ended.clear()
        if None in self._requests:
            self._requests = [self._cache.request() if request is None else request for request in self._requests]

    def end_rows(self) -> None:
        """End the requests of the rows that :attr:`ended` says have ended for good."""
        if len(self.ended) == len(self._requests):
            for place, ended in enumerate(self.ended):
                request = self._requests[place]
                if ended and request is not None:
                    self._requests[place] = None
                    request.close()

    def _close(self, keep: bool) -> None:
        for request in [*self._requests, *self._named.values()]:
            if request is not None:
                request.close(keep)
        self._requests, self._named = [], {}

    def end(self, keep: bool = True) -> None:
        self._over = True
        if self._cache.closed:
            return
        self._close(keep)
        if self._batch is not None:
            self._batch.close()

    def __del__(self, is_finalizing: Callable[[], bool] = sys.is_finalizing) -> None:
        if hasattr(self, "_over") and not is_finalizing():
            self.end()
