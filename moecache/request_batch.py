"""Several requests whose tokens run through a model together."""

from __future__ import annotations

import time
from collections.abc import Sequence
from types import TracebackType
from typing import Any, NamedTuple, NoReturn

import torch

from ._core import BatchState, Step
from .errors import ClosedError, RoutingError, refuse_copy
from .lease import DeviceLease, Lease
from .request import Request, StepClock, stats_of
from .router_output import check_token_mask, check_topk_weights, checked_ids
from .runtime import Runtime
from .state import CacheState
from .stats import RequestStats

__all__ = ["RequestBatch"]


class _Rows(NamedTuple):
    """Whose the rows of a step are, checked."""

    requests: Sequence[Request | None]
    lengths: list[int]
    decodes: list[bool]
    mask: torch.Tensor | None


class RequestBatch:
    """Steps whose rows belong to several requests, as a batch of prompts makes them.

    Each request counts, matches and forecasts from its own rows, and enters the history on its own; the experts of a step
    are fetched and computed once for all of them. Made by :meth:`ExpertCache.batch`. Used by one thread at a time.

    Attributes
    ----------
    cache : ExpertCache
        The cache that it was made by.
    closed : bool
    """

    def __init__(self, cache: Any, shared: CacheState) -> None:
        self.cache, self._shared = cache, shared
        began = time.monotonic()
        while (state := shared.runtime.core.begin_batch()) is None:
            shared.follow(began)
        self._state: BatchState = state
        self._clock = StepClock(state.account)
        self.closed = False

    def stats(self) -> RequestStats:
        """What the steps of this batch have asked of the cache so far: each of their experts once."""
        return stats_of(self._state)

    def route(
        self,
        layer: int,
        topk_ids: torch.Tensor,
        topk_weights: torch.Tensor | None = None,
        *,
        requests: Sequence[Request | None],
        lengths: Sequence[int] | None = None,
        decode: bool | Sequence[bool] | None = None,
        token_mask: torch.Tensor | None = None,
    ) -> Lease:
        """Take the router's choice for one step of all requests; returns a lease on the experts' slots.

        Parameters
        ----------
        layer : int
            Which MoE layer, counting only those, from 0.
        topk_ids : integer Tensor ``[tokens, k]``
            The rows of the first request, then those of the second, and so on; -1 is padding.
        topk_weights : float Tensor ``[tokens, k]``, optional
            The gate weights, only looked at for NaN.
        requests : sequence of Request or None
            Whose the rows are. None: rows that are computed but not counted, such as those of an answer that has ended.
            It may be another one at each step: requests come and go.
        lengths : sequence of int, optional
            Rows of each request, 0 included; by default all have as many.
        decode : bool or sequence of bool, optional
            Whether the rows (of each request) belong to the completion; by default where there is one.
        token_mask : bool Tensor ``[tokens]``, optional
            False rows are computed but not counted.

        Raises
        ------
        RoutingError
            Ids out of range, of a wrong dtype, shape or device, NaN weights, lengths that are not the rows'; a request of
            another cache, named twice, or that another thread is routing. Nothing has changed.
        LeaseError
            A resize held the step up until the timeout.
        ClosedError
            The batch, one of its requests or the cache is closed.
        CaptureError
            The current stream captures a CUDA graph.
        """
        shared, runtime = self._shared, self._shared.runtime
        if self.closed or shared.closed:
            raise ClosedError("this batch is closed" if self.closed else "this cache is closed; make a new one")
        if runtime.copies is not None:
            runtime.copies.check(f"layer {layer}: experts were asked for")
        ids, itemsize = checked_ids(topk_ids, runtime.setup.device, layer)
        if topk_weights is not None:
            check_topk_weights(topk_weights, ids, layer)
        rows = self._check(layer, ids.shape[0], requests, lengths, decode, token_mask)
        self._clock.step(all(rows.decodes), runtime)
        runtime, step = self._route(layer, ids, itemsize, rows)
        lease = (
            Lease(self, shared, runtime, step) if runtime.copies is None else DeviceLease(self, shared, runtime, step)
        )
        try:
            self._take_down(layer, ids, rows)
            if not step.plan.empty:
                lease._submit()
        except BaseException:
            lease.release()
            raise
        return lease

    def _check(
        self,
        layer: int,
        tokens: int,
        requests: Sequence[Request | None],
        lengths: Sequence[int] | None,
        decode: bool | Sequence[bool] | None,
        token_mask: torch.Tensor | None,
    ) -> _Rows:
        for request in requests:
            if request is None:
                continue
            if request.closed:
                raise ClosedError("a request of this batch is closed; give None in its place")
            if request._shared is not self._shared:
                raise RoutingError(f"layer {layer}: a request of this batch belongs to another cache")
        each = tokens // max(len(requests), 1)
        counts = [each] * len(requests) if lengths is None else [int(n) for n in lengths]
        if len(counts) != len(requests) or sum(counts) != tokens or min(counts, default=0) < 0:
            given = "" if lengths is None else f" of {counts} rows"
            raise RoutingError(
                f"layer {layer}: {len(requests)} requests{given} for {tokens} rows of ids; expected `lengths`, one for each "
                "request, that add up to the rows"
            )
        if decode is None:
            decodes = [n == 1 for n in counts]
        else:
            decodes = [decode] * len(counts) if isinstance(decode, bool) else [bool(value) for value in decode]
        if len(decodes) != len(counts):
            raise RoutingError(f"layer {layer}: `decode` has {len(decodes)} values for {len(counts)} requests")
        mask = None if token_mask is None else check_token_mask(token_mask, tokens, layer)
        if None in requests:
            whose = torch.tensor([request is not None for request in requests])
            owned = whose.repeat_interleave(torch.tensor(counts))
            mask = owned if mask is None else mask & owned
        return _Rows(requests, counts, decodes, mask)

    def _route(self, layer: int, ids: torch.Tensor, itemsize: int, rows: _Rows) -> tuple[Runtime, Step]:
        shared, began = self._shared, time.monotonic()
        row_stride, column_stride = ids.stride()
        states = [None if request is None else request._state for request in rows.requests]
        while True:
            runtime = shared.runtime
            step = runtime.core.route_batch(
                self._state,
                states,
                rows.lengths,
                rows.decodes,
                layer,
                ids.data_ptr(),
                itemsize,
                ids.shape[1],
                row_stride,
                column_stride,
                0 if rows.mask is None else rows.mask.data_ptr(),
                shared.padding_id,
            )
            if step is not None:
                return runtime, step
            shared.follow(began)

    def _take_down(self, layer: int, ids: torch.Tensor, rows: _Rows) -> None:
        files = self._shared.files
        if not files.taking_down:
            return
        begin = 0
        for request, length, decode in zip(rows.requests, rows.lengths, rows.decodes, strict=True):
            end = begin + length
            if request is not None and length:
                files.routed(
                    request, layer, ids[begin:end], decode, None if rows.mask is None else rows.mask[begin:end]
                )
            begin = end

    def close(self) -> None:
        """End the batch and the leases it still has; its requests go on. A second call does nothing."""
        if self.closed:
            return
        self.closed = True
        shared = self._shared
        shared.mark_readers(self._state)
        began = time.monotonic()
        while not shared.runtime.core.end_batch(self._state):
            shared.follow(began)

    def __enter__(self) -> RequestBatch:
        return self

    def __exit__(
        self, error_type: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def __reduce__(self) -> NoReturn:
        refuse_copy(self)
