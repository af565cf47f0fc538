"""One prompt and its completion, as the cache sees them."""

from __future__ import annotations

import time
from types import TracebackType
from typing import Any, NoReturn

import numpy as np
import torch

from ._core import Account, BatchState, RequestState, Step
from .errors import ClosedError, RoutingError, refuse_copy
from .lease import DeviceLease, Lease
from .router_output import check_token_mask, check_topk_weights, checked_ids
from .runtime import Runtime
from .state import CacheState
from .stats import RequestStats

__all__ = ["Request", "StepClock", "stats_of"]


class StepClock:
    """Tells a cache how long its decode steps take without what they wait for.

    Parameters
    ----------
    account : Account
        Of whoever routes the steps.
    """

    def __init__(self, account: Account) -> None:
        self._account = account
        self._decoded_at = 0.0
        self._waited_before_ns = 0  # for bytes or a slot, up to the last decode step

    def step(self, decode: bool, runtime: Runtime) -> None:
        now = time.perf_counter() if decode else 0.0
        waited_ns = self._account.stall_ns + self._account.slot_wait_ns
        if decode and self._decoded_at:
            waited_s = (waited_ns - self._waited_before_ns) / 1e9
            runtime.report_pace(now - self._decoded_at - waited_s)
        self._decoded_at, self._waited_before_ns = now, waited_ns


def stats_of(state: RequestState | BatchState) -> RequestStats:
    """What a request or a batch has asked of its cache so far."""
    return RequestStats(
        demands=state.account.demands,
        hits=state.account.hits,
        prompt_tokens=state.prompt_tokens,
        decode_tokens=state.decode_tokens,
        stall_s=state.account.stall_ns / 1e9,
        slot_wait_s=state.account.slot_wait_ns / 1e9,
    )


class Request:
    """One prompt and its completion: what it routes is counted, matched and, at its end, kept in the history.

    Made by :meth:`ExpertCache.request`. Used by one thread at a time; different requests may run in different threads.

    Attributes
    ----------
    cache : ExpertCache
        The cache that it was made by, which lives as long as its requests.
    closed : bool
    """

    def __init__(self, cache: Any, shared: CacheState) -> None:
        self.cache, self._shared = cache, shared
        began = time.monotonic()
        while (state := shared.runtime.core.begin_request()) is None:
            shared.follow(began)
        self._state: RequestState = state
        shared.files.begun(state)
        self._clock = StepClock(state.account)
        self.closed = False

    @property
    def counts(self) -> tuple[np.ndarray, ...]:
        """The activation matrix so far: for each layer an int64 array of tokens routed to each expert."""
        return tuple(np.split(self._state.match.counts, np.cumsum(self._shared.runtime.setup.bank.num_experts)[:-1]))

    def stats(self) -> RequestStats:
        """What this request has asked of the cache so far.

        The sums over all requests and batches are the cache's, with what requests did in a batch left to the batch: an expert
        that several of them ask for counts for each of them here, and once there; waits are counted there alone.
        """
        return stats_of(self._state)

    def route(
        self,
        layer: int,
        topk_ids: torch.Tensor,
        topk_weights: torch.Tensor | None = None,
        *,
        decode: bool | None = None,
        token_mask: torch.Tensor | None = None,
    ) -> Lease:
        """Take the router's choice for one step; returns a lease on the experts' slots.

        Parameters
        ----------
        layer : int
            Which MoE layer, counting only those, from 0.
        topk_ids : integer Tensor ``[tokens, k]``
            -1 is padding: nothing is loaded or counted for it. An expert named twice in a row is served at both places
            and counted once.
        topk_weights : float Tensor ``[tokens, k]``, optional
            The gate weights, only looked at for NaN.
        decode : bool, optional
            Whether the step belongs to the completion; by default when it has one token.
        token_mask : bool Tensor ``[tokens]``, optional
            False rows are computed but not counted (padding tokens of a batch).

        Raises
        ------
        RoutingError
            Ids out of range, of a wrong dtype, shape or device, or NaN weights; another thread is routing this request.
            Nothing has changed.
        LeaseError
            A resize held the step up until the timeout.
        ClosedError
        CaptureError
            The current stream captures a CUDA graph.
        """
        ids, cache, runtime = topk_ids, self._shared, self._shared.runtime
        if self.closed or cache.closed:
            raise ClosedError("this request is closed" if self.closed else "this cache is closed; make a new one")
        if runtime.copies is not None:
            runtime.copies.check(f"layer {layer}: experts were asked for")
        ids, itemsize = checked_ids(ids, runtime.setup.device, layer)
        tokens, k = ids.shape
        if topk_weights is not None:
            check_topk_weights(topk_weights, ids, layer)
        row_stride, column_stride = ids.stride()
        mask = None if token_mask is None else check_token_mask(token_mask, tokens, layer)
        decode = tokens == 1 if decode is None else decode
        self._clock.step(decode, runtime)
        step = runtime.core.route(
            self._state,
            layer,
            ids.data_ptr(),
            itemsize,
            tokens,
            k,
            row_stride,
            column_stride,
            decode,
            0 if mask is None else mask.data_ptr(),
            cache.padding_id,
        )
        if step is None:
            runtime, step = self._route_after_resize(layer, ids, itemsize, decode, mask)
        lease = Lease(self, cache, runtime, step) if runtime.copies is None else DeviceLease(self, cache, runtime, step)
        try:
            cache.files.routed(self, layer, ids, decode, mask)
            if not step.plan.empty:
                lease._submit()
        except BaseException:
            lease.release()
            raise
        return lease

    def _route_after_resize(
        self, layer: int, ids: torch.Tensor, itemsize: int, decode: bool, mask: torch.Tensor | None
    ) -> tuple[Runtime, Step]:
        cache, began = self._shared, time.monotonic()
        mask_address = 0 if mask is None else mask.data_ptr()
        while True:
            cache.follow(began)
            runtime, (tokens, k), (row, column) = cache.runtime, ids.shape, ids.stride()
            step = runtime.core.route(
                self._state,
                layer,
                ids.data_ptr(),
                itemsize,
                tokens,
                k,
                row,
                column,
                decode,
                mask_address,
                cache.padding_id,
            )
            if step is not None:
                return runtime, step

    def hint(self, layer: int, chances: torch.Tensor | np.ndarray) -> None:
        """Say what is known better of a coming layer, such as the model's own router on the hidden state of this one.

        Prefetching goes by it, instead of its own forecast, until this request routes the layer. Costs microseconds,
        and for a tensor on a device the copy to the host.

        Parameters
        ----------
        layer : int
            Counting only MoE layers, from 0; its next visit is meant, this token's or the next one's.
        chances : float Tensor or array ``[experts]``
            For each expert the chance, in 0 to 1, that it is used; calibrated ones serve best.

        Raises
        ------
        RoutingError
            The layer or a number is out of range (NaN is), or the length is not the layer's. Nothing has changed.
        ClosedError
        """
        cache = self._shared
        if self.closed or cache.closed:
            raise ClosedError("this request is closed" if self.closed else "this cache is closed; make a new one")
        if isinstance(chances, torch.Tensor):
            chances = chances.detach().to("cpu", torch.float32).numpy()
        array = np.ascontiguousarray(chances, np.float32)
        if array.ndim != 1:
            raise RoutingError(f"layer {layer}: chances have shape {array.shape}; expected [experts]")
        self._state.hint(layer, array)

    def close(self, keep: bool = True) -> None:
        """End the request and the leases it still has. With ``keep`` its activation matrix enters the history.

        A second call does nothing.
        """
        if self.closed:
            return
        self.closed = True
        cache = self._shared
        cache.mark_readers(self._state)
        began = time.monotonic()
        cache.files.ending(self._state)  # before it ends, lest a signal handler counts it a second time
        while not cache.runtime.core.end_request(self._state, keep):
            cache.follow(began)
        cache.files.ended()

    def __enter__(self) -> Request:
        return self

    def __exit__(
        self, error_type: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close(keep=error_type is None)

    def __reduce__(self) -> NoReturn:
        refuse_copy(self)
