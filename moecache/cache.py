"""ExpertCache, Request, Lease: ask ``_core`` what to do, tell ``_engine`` to do it."""

from __future__ import annotations

import logging
import os
import threading
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from types import TracebackType
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from ._core import Core, RequestState, Step
from ._engine import Engine
from .bank import ExpertBank
from .cuda import CudaCopies, copies_for, numbered
from .errors import ClosedError, LeaseError, PolicyError, RoutingError, TransferError
from .history import Fingerprint, History, open_history
from .learning import open_learner
from .policy import Score, resolve
from .pool import Pool, slots_for
from .router_output import ID_SIZE, UNSIGNED, check_weights, counted_mask, ids_on_cpu, signed
from .stats import Stats

if TYPE_CHECKING:
    from ._engine import Sources
    from .lab.record import Recorder

__all__ = ["ExpertCache", "Lease", "Request"]

logger = logging.getLogger("moecache")

_FIRST_ROW = torch.zeros(1, dtype=torch.int64, device="cpu")
# The engine's window: what may be on the link before something that is wanted more.
_WINDOW_BYTES = 4 << 20


class ExpertCache:
    """A few experts on the device, the others one copy away.

    Parameters
    ----------
    bank : ExpertBank
        Where all experts lie.
    capacity : int, float or str
        Experts on the device at once: a number, a fraction in (0, 1] of all, bytes as "8GiB", or "auto".
    device : torch.device or str
        Where the pool lives and the experts are computed.
    policy : str or Score
        A name of :data:`moecache.policy.NAMES`, or a score of your own.
    history : History, path or None
        Earlier requests of this model. A path is read if it exists and written on ``close()``.
    history_capacity : int
        Requests kept in a history made here.
    prefetch : bool
        Fetch experts of coming layers ahead where that promises to pay.
    prefetch_waste : float
        Bytes that wrong prefetches may move at most, as a share of those that steps needed moved.
    learn : bool or path
        Record what is routed into a folder, and fit the history's forecaster anew in a process of low priority whenever the
        log has doubled; requests begun after a fit use its weights. True: a folder beside the history's file, with the
        ending ``.learn``. The log is bounded (:data:`moecache.learning.LOG_TOKENS`). Off by default.
    top_k : int, optional
        Experts per token. When known, a capacity below it is refused and the history is checked against it.
    threads : int, optional
        I/O threads; by default two for a bank on disk, so that one reads while the other copies out, and one otherwise.
    timeout : float
        Seconds after which a wait for bytes or for a slot is an error.
    sentinel : int, optional
        An expert id that means "none", besides -1.
    link : engine link, optional
        What the bytes travel over; by default what bank and device need.

    Attributes
    ----------
    num_experts : tuple of int
        Experts of each MoE layer.
    capacity : int
        Slots.

    Raises
    ------
    CapacityError
        A capacity that cannot work, or more than the device has free.
    PolicyError, HistoryFormatError, LearnError
    TraceFormatError
        The log to learn from is damaged, or of another model.
    """

    def __init__(
        self,
        bank: ExpertBank,
        capacity: int | float | str = 0.25,
        *,
        device: torch.device | str = "cpu",
        policy: str | Score = "expected-next-use",
        history: History | str | os.PathLike[str] | None = None,
        history_capacity: int = 1000,
        prefetch: bool = True,
        prefetch_waste: float = 0.25,
        learn: bool | str | os.PathLike[str] = False,
        top_k: int | None = None,
        threads: int | None = None,
        timeout: float = 60.0,
        sentinel: int | None = None,
        link: Any = None,
    ) -> None:
        self.bank = bank
        self.device = numbered(device)
        self.num_experts = tuple(bank.num_experts)
        self.top_k = top_k
        self.timeout = timeout
        self._sentinel = -1 if sentinel is None else sentinel
        if 0 <= self._sentinel < max(self.num_experts):
            raise RoutingError(
                f"sentinel {sentinel} is an expert of some layer: expected a number that no router gives"
            )
        self._policy = resolve(policy)
        if not prefetch_waste >= 0:
            raise PolicyError(f"prefetch_waste {prefetch_waste} is no share: expected a number from 0 on, such as 0.25")
        self._prefetch, self._prefetch_waste = prefetch, prefetch_waste
        self._threads = threads or (2 if bank.location == "disk" else 1)
        self._link = link
        slots = self._slots_for(capacity)
        self.history, self._history_path = open_history(history, Fingerprint.of(bank, top_k), history_capacity)
        self._learner = open_learner(learn, self.history, self._history_path, self._policy.name)
        self.closed = False
        self._slot_freed = threading.Condition()
        self._waiting = 0
        self._leases: dict[int, int] = {}
        self._mean_expert_nbytes = bank.nbytes / sum(self.num_experts)
        self._moved: dict[str, int] = {}
        self._copies: CudaCopies | None = None
        self._recorder: Recorder | None = None
        try:
            self._build(Pool(bank.kinds, slots, self.device))
        except BaseException:
            if self._learner is not None:
                self._learner.close()
            raise
        self._say_if_small()
        if self._learner is not None:
            self._learner.watch(self)

    def _slots_for(self, capacity: int | float | str) -> tuple[int, ...]:
        per_kind = [0] * len(self.bank.kinds)
        for layer, kind in enumerate(self.bank.layer_kind):
            per_kind[kind] += self.num_experts[layer]
        return slots_for(capacity, self.bank.kinds, per_kind, self.device, self.top_k)

    def _build(self, pool: Pool) -> None:
        self.pool = pool
        self.capacity = sum(pool.slots)
        complete = np.zeros(self.capacity, np.int32)
        numbers, addresses, strides = self.pool.regions()
        sources = self.bank.sources(numbers)
        self._copies = self._copies_for(sources) if self._link is None else None
        link = self._link if self._copies is None else self._copies.link
        self._engine = Engine(
            sources, addresses, strides, complete, link=link, threads=self._threads, owner=(self.bank, self.pool)
        )
        self._core = Core(
            self.history.store,
            np.array(self.bank.layer_kind, np.int32),
            np.array(pool.slots, np.int32),
            complete,
            self._policy.code,
            self._policy.address,
            self._prefetch,
            self.top_k or 0,
            self._prefetch_waste,
        )

    def _tell_pace(self, layer_s: float) -> None:
        # The core has no clock: what a step and a copy take is told to it.
        rate = self._engine.link_rate
        if rate > 0:
            expert = self._mean_expert_nbytes
            self._core.pace(layer_s, expert / rate, min(expert, _WINDOW_BYTES) / rate)

    def _copies_for(self, sources: Sources) -> CudaCopies | None:
        if self.device.type != "cuda":
            return None
        return copies_for(sources, self.device, self.capacity, self.bank)

    def _say_if_small(self) -> None:
        one_token = (self.top_k or 1) * len(self.num_experts)
        if self.capacity < one_token:
            nbytes = (self.top_k or 1) * sum(self.bank.expert_nbytes(layer) for layer in range(len(self.num_experts)))
            logger.warning(
                "capacity of %d experts is below the %d that one token uses over all layers (up to %s bytes a token): "
                "few hits are to be expected and nothing is prefetched",
                self.capacity,
                one_token,
                f"{nbytes:,}",
            )

    # What people ask of a cache

    @property
    def layers(self) -> int:
        """Number of MoE layers."""
        return len(self.num_experts)

    @property
    def policy(self) -> str:
        return self._policy.name

    @property
    def resident_nbytes(self) -> int:
        """Bytes of the experts that have a slot now."""
        per_layer = [self.bank.expert_nbytes(layer) for layer in range(self.layers)]
        return sum(per_layer[self._core.locate(int(gid))[0]] for gid in self._core.resident())

    def resident(self) -> set[tuple[int, int]]:
        """(layer, expert) of every expert that has a slot now, complete or on its way."""
        return {self._core.locate(int(gid)) for gid in self._core.resident()}

    def request(self) -> Request:
        """Start a request: one prompt and its answer. Close it, or use it as a context manager.

        Raises
        ------
        ClosedError
        """
        self._check_open()
        if self._learner is not None:
            self._learner.between_requests()
        return Request(self)

    def stats(self) -> Stats:
        """Counters since the start or the last :meth:`reset_stats`."""
        core = self._core.counters()
        lock = None if self._copies is None else self._copies.lock
        learner = self._learner
        moved = {name: n + self._moved.get(name, 0) for name, n in self._engine_counters().items()}
        return Stats(
            **core,
            bytes_demand=moved["bytes_demand"],
            bytes_prefetch=moved["bytes_prefetch"],
            stall_s=moved["stall_ns"] / 1e9,
            capacity_experts=self.capacity,
            resident_experts=len(self._core.resident()),
            resident_bytes=self.resident_nbytes,
            expert_bytes_total=self.bank.nbytes,
            direct_reads=moved["direct_reads"],
            buffered_reads=moved["buffered_reads"],
            failed=moved["failed"],
            fits=0 if learner is None else learner.fits,
            fits_failed=0 if learner is None else learner.fits_failed,
            host_locked_bytes=0 if lock is None else lock.locked_nbytes,
            host_pageable_bytes=0 if lock is None else lock.pageable_nbytes,
            layer_demands=tuple(self._core.layer_demands.tolist()),
            layer_hits=tuple(self._core.layer_hits.tolist()),
        )

    def _engine_counters(self) -> dict[str, int]:
        return self._engine.counters() if not self.closed else dict.fromkeys(self._moved, 0)

    def reset_stats(self) -> None:
        """Start the counters over, for measurements after a warm-up."""
        self._check_open()
        self._core.reset_counters()
        self._engine.reset_counters()
        self._moved = {}
        if self._learner is not None:
            self._learner.fits = self._learner.fits_failed = 0

    def record(self, path: str | os.PathLike[str], model: str | None = None) -> Recorder:
        """Write what is routed from now on into a routing trace, which appears whole when the recorder or the cache is
        closed.

        Parameters
        ----------
        path : path
            Of a .safetensors file; :func:`moecache.lab.read_trace` reads it, ``moecache replay`` plays it.
        model : str, optional
            The model's name, for the file.

        Raises
        ------
        ClosedError
        """
        from .lab.record import Recorder

        self._check_open()
        if self._recorder is not None:
            self._recorder.close()
        self._recorder = Recorder(self, path, model)
        return self._recorder

    def resize(self, capacity: int | float | str) -> None:
        """Change the number of slots between steps; the experts most worth keeping stay.

        For the length of the call both pools exist.

        Raises
        ------
        CapacityError
            A capacity that cannot work; the cache is as it was.
        LeaseError
            A step is under way.
        """
        self._check_open()
        if self._copies is not None:
            self._copies.check("resize() was called")
        slots = self._slots_for(capacity)
        if self._core.under_way or any(list(self._leases.values())):
            raise LeaseError("resize() while a lease is open: leave the `with request.route(...)` block first")
        self._engine.drain(self.timeout)
        core, pool, copies = self._core, self.pool, self._copies
        new_pool = Pool(self.bank.kinds, slots, self.device)
        # A link serves one engine at a time.
        self._keep_counters(self._engine)
        self._engine.close()
        self._build(new_pool)
        for kind, tensors in enumerate(self.pool.tensors):
            for n, slot in enumerate(core.retained(kind, slots[kind]).tolist()):
                for name, tensor in tensors.items():
                    tensor[n].copy_(pool.tensors[kind][name][slot - pool.first_slot[kind]])
                self._core.adopt(self.pool.first_slot[kind] + n, int(core.slot_expert[slot]))
        self._core.inherit(core)
        if self._copies is not None:
            # The copies above, too, were given to the compute stream only.
            self._copies.mark_readers(np.arange(self.capacity, dtype=np.int32))
        if copies is not None:
            copies.close()

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Let no copy start inside the block, and none move when it begins: the device sees nothing of the cache.

        For what must not share the link or the driver with copies, the capture of a CUDA graph by a library that needs it
        to itself, say. Prefetches wait; a step that misses inside the block waits until its timeout.

        Raises
        ------
        TransferError
            What moves did not land before the timeout.
        ClosedError
        """
        self._check_open()
        engine = self._engine
        engine.pause(self.timeout)
        try:
            yield
        finally:
            with suppress(ClosedError):  # closed, or resized, meanwhile
                engine.resume()

    def _keep_counters(self, engine: Engine) -> None:
        self._moved = {name: n + self._moved.get(name, 0) for name, n in engine.counters().items()}

    def close(self) -> None:
        """End open requests, stop the I/O threads, give the pool back, write the history if it came with a path.

        A second call does nothing.
        """
        if self.closed:
            return
        self._core.end_requests()
        with suppress(ClosedError):  # in a forked child the engine is the parent's
            self._keep_counters(self._engine)
        self.closed = True
        self._engine.close()
        if self._copies is not None:
            self._copies.close()
        self.pool.tensors = ()
        if self._recorder is not None:
            self._recorder.close()
        if self._learner is not None:
            self._learner.close()
        if self._history_path is not None:
            self.history.save(self._history_path)

    def __enter__(self) -> ExpertCache:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def __repr__(self) -> str:
        state = "closed" if self.closed else f"{self.capacity} of {sum(self.num_experts)} experts on {self.device}"
        return f"<ExpertCache {state}, {self.policy}, bank on {self.bank.location}>"

    def _check_open(self) -> None:
        if self.closed:
            raise ClosedError("this cache is closed; make a new one")


class Request:
    """One prompt and its answer: what it routes is counted, matched and, at its end, kept in the history.

    Made by :meth:`ExpertCache.request`. Used by one thread at a time; different requests may run in different threads.
    """

    def __init__(self, cache: ExpertCache) -> None:
        self.cache = cache
        self._state: RequestState = cache._core.begin_request()
        self._decoded_at = 0.0
        self._waited = 0.0
        self.closed = False

    @property
    def counts(self) -> tuple[np.ndarray, ...]:
        """The activation matrix so far: for each layer an int64 array of tokens routed to each expert."""
        return tuple(np.split(self._state.counts, np.cumsum(self.cache.num_experts)[:-1]))

    def route(
        self,
        layer: int,
        ids: torch.Tensor,
        weights: torch.Tensor | None = None,
        *,
        decode: bool | None = None,
        counted: torch.Tensor | None = None,
    ) -> Lease:
        """Take the router's choice for one step; returns a lease on the experts' slots.

        Parameters
        ----------
        layer : int
            Which MoE layer, counting only those, from 0.
        ids : integer Tensor ``[tokens, k]``
            -1 is padding: nothing is loaded or counted for it. An expert named twice in a row is served at both places
            and counted once.
        weights : float Tensor ``[tokens, k]``, optional
            The gate weights, only looked at for NaN.
        decode : bool, optional
            Whether the step belongs to the answer; by default when it has one token.
        counted : bool Tensor ``[tokens]``, optional
            False rows are computed but not counted (padding tokens of a batch).

        Raises
        ------
        RoutingError
            Ids out of range, of a wrong dtype, shape or device, or NaN weights. Nothing has changed.
        ClosedError
        CaptureError
            The current stream captures a CUDA graph.
        """
        cache = self.cache
        if self.closed or cache.closed:
            raise ClosedError("this request is closed" if self.closed else "this cache is closed; make a new one")
        if cache._copies is not None:
            cache._copies.check(f"layer {layer}: experts were asked for")
        if type(ids) is not torch.Tensor or not ids.is_cpu:
            ids = ids_on_cpu(ids, cache.device, layer)
        itemsize = ID_SIZE.get(ids.dtype)
        if itemsize is None and ids.dtype in UNSIGNED:
            ids, itemsize = signed(ids), 8
        if itemsize is None:
            raise RoutingError(f"layer {layer}: ids are {ids.dtype}; expected integers such as torch.int64")
        shape = ids.shape
        if len(shape) != 2:
            raise RoutingError(f"layer {layer}: ids have shape {tuple(shape)}; expected [tokens, k]")
        tokens, k = shape
        if weights is not None:
            check_weights(weights, ids, layer)
        row_stride, column_stride = ids.stride()
        mask = None if counted is None else counted_mask(counted, tokens, layer)
        decode = tokens == 1 if decode is None else decode
        self._time(decode)
        step = cache._core.route(
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
            cache._sentinel,
        )
        lease = Lease(self, step)
        if cache._recorder is not None:
            cache._recorder.step(self, layer, ids, step.decode, mask)
        if cache._learner is not None:
            cache._learner.step(self, layer, ids, step.decode, mask)
        plan = step.plan
        if not plan.empty:
            try:
                lease._submit()
            except BaseException:
                lease.release()
                raise
        return lease

    def _time(self, decode: bool) -> None:
        # From one step of the answer to the next, less what this request waited for bytes.
        now = time.perf_counter() if decode else 0.0
        if decode and self._decoded_at:
            self.cache._tell_pace(now - self._decoded_at - self._waited)
        self._decoded_at, self._waited = now, 0.0

    def hint(self, layer: int, chances: torch.Tensor | np.ndarray) -> None:
        """Say what is known better of a coming layer, such as the model's own router on the hidden state of this one.

        Prefetching believes it, instead of its own forecast, until this request routes the layer. Costs microseconds,
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
        cache = self.cache
        if self.closed or cache.closed:
            raise ClosedError("this request is closed" if self.closed else "this cache is closed; make a new one")
        if isinstance(chances, torch.Tensor):
            chances = chances.detach().to("cpu", torch.float32).numpy()
        array = np.ascontiguousarray(chances, np.float32)
        if array.ndim != 1:
            raise RoutingError(f"layer {layer}: chances have shape {array.shape}; expected [experts]")
        cache._core.hint(self._state, layer, array)

    def close(self, keep: bool = True) -> None:
        """End the request. With ``keep`` its activation matrix enters the history. A second call does nothing."""
        if not self.closed:
            self.closed = True
            self.cache._core.end_request(self._state, keep)
            if self.cache._learner is not None and not self.cache.closed:
                self.cache._learner.between_requests()

    def __enter__(self) -> Request:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close(keep=kind is None)


class Lease:
    """The slots of one step, held until the ``with`` block is left.

    Attributes
    ----------
    weights : mapping of parameter name to Tensor ``[slots, *shape]``
        The pool of the layer; index it with the slots that :meth:`ready` yields.
    """

    __slots__ = ("_at", "_cache", "_core", "_first_slot", "_request", "_step", "_taken", "_thread", "weights")

    def __init__(self, request: Request, step: Step) -> None:
        self._request = request
        self._cache = cache = request.cache
        self._core = cache._core
        self._step = step
        kind = cache.bank.layer_kind[step.layer]
        self.weights: Mapping[str, torch.Tensor] = cache.pool.tensors[kind]
        self._first_slot = cache.pool.first_slot[kind]
        self._at = (0, 0)
        self._taken = -1
        self._thread = threading.get_ident()
        cache._leases[self._thread] = cache._leases.get(self._thread, 0) + 1

    @property
    def experts(self) -> list[int]:
        """Distinct experts of the step, ascending."""
        return self._step.expert_list()

    @property
    def slots(self) -> list[int]:
        """Slot of each of :attr:`experts`, -1 where a later wave will give one. Only with ``missing == 0`` all hold bytes."""
        first, slots, copies = self._first_slot, self._step.slot_list(), self._cache._copies
        if copies is not None:
            copies.before_reading(np.array([slot for slot in slots if slot >= 0], np.int32))
        return [slot - first if slot >= 0 else -1 for slot in slots]

    @property
    def missing(self) -> int:
        """How many of the experts were not there when the layer asked."""
        return self._step.missing

    @property
    def positions(self) -> torch.Tensor:
        """int64 Tensor ``[n]``: at which of its top-k places each token of the item last yielded named the expert."""
        begin, end = self._at
        return torch.from_numpy(self._step.topk_position[begin:end])

    @property
    def in_order(self) -> bool:
        """Whether :meth:`ready` yields experts in ascending order as far as the slots allow, rather than as they land.

        May be set at any time; for who must keep results until those of lower experts are there, and has kept enough.
        """
        return self._step.in_order

    @in_order.setter
    def in_order(self, value: bool) -> None:
        self._step.in_order = value

    def ready(self) -> Iterator[tuple[int, int, torch.Tensor]]:
        """Yield ``(expert, slot, tokens)`` for every expert of the step: those already there first, then each as it
        lands.

        ``tokens`` is an int64 Tensor of row numbers, in the order in which ``torch.where`` lists the expert's one-hot
        mask: by place
        among the top k first, then by token. ``weights[name][slot]`` may be read until the next item is asked for. A
        step that needs
        more experts than there are slots runs in waves; the loop does not notice.

        Raises
        ------
        TransferError
            A copy failed; its ``__cause__`` is the original error. The next call tries again.
        LeaseError
            The lease has ended, or other leases held every slot until the timeout.
        """
        core, step, copies = self._core, self._step, self._cache._copies
        rows = None if step.token_index is None else torch.from_numpy(step.token_index)
        while True:
            if not step.open:
                raise LeaseError(f"layer {step.layer}: this lease has ended; read the slots inside its `with` block")
            # The item before this one, be it that of an earlier loop that was left, is done with when the next is asked for.
            if self._taken >= 0:
                i, self._taken = self._taken, -1
                if core.finish(step, i):
                    self._mark_readers(step.plan.fetches[:, 1])
                    self._submit()
            if step.done == step.unique:
                return
            i = core.take(step)
            if i < 0:
                self._wait()
                continue
            expert, slot, begin, end = step.item(i)
            if copies is not None and copies.link.is_fresh(slot):
                copies.before_reading(np.array([slot], np.int32))
            self._at, self._taken = (begin, end), i
            if rows is not None:
                tokens = rows[begin:end]
            else:
                tokens = _FIRST_ROW if end - begin == 1 else _FIRST_ROW.expand(end - begin)
            yield expert, slot - self._first_slot, tokens

    def _mark_readers(self, slots: np.ndarray) -> None:
        # Kernels already issued still read these slots: no copy may start before them.
        copies = self._cache._copies
        if copies is not None:
            copies.mark_readers(slots)

    def _submit(self) -> None:
        plan = self._step.plan
        self._cache._engine.submit(plan.fetches, plan.prefetches, plan.priorities, plan.drops)

    def _wait(self) -> None:
        # Until one of this step's experts lands, or, when none of them has a slot, until another lease gives one up.
        cache, step = self._cache, self._step
        _, slots, generations = step.pending()
        if not len(slots):
            self._wait_for_slot()
            return
        began = time.perf_counter()
        try:
            cache._engine.wait_any(slots, generations, cache.timeout)
        except TransferError as error:
            position = getattr(error, "position", -1)
            if position >= 0:
                self._core.fail(int(slots[position]), int(generations[position]))
            raise
        finally:
            self._request._waited += time.perf_counter() - began

    def _wait_for_slot(self) -> None:
        cache, step = self._cache, self._step
        deadline = time.monotonic() + cache.timeout
        with cache._slot_freed:
            cache._waiting += 1
            try:
                others = self._held_by_others()
                while not self._core.retry(step):
                    # Nobody else to wait for, neither before the look nor after it: this thread holds the slots itself.
                    before, others = others, self._held_by_others()
                    if (not before and not others) or time.monotonic() > deadline:
                        held = ", ".join(f"layer {layer} expert {expert}" for layer, expert in self._core.holders())
                        raise LeaseError(
                            f"layer {step.layer} needs slots for {step.deferred} more experts, and all "
                            f"{cache.capacity} are held by leases ({held}); end a lease before the next step, or ask for a larger capacity"
                        )
                    cache._slot_freed.wait(0.05)
            finally:
                cache._waiting -= 1
        self._submit()

    def _held_by_others(self) -> int:
        return sum(n for thread, n in list(self._cache._leases.items()) if thread != self._thread)

    def release(self) -> None:
        """Let go of the slots. A second call does nothing."""
        step, cache = self._step, self._cache
        if not step.open:
            return
        try:
            if cache._copies is not None:
                self._mark_readers(np.array([slot for slot in step.slot_list() if slot >= 0], np.int32))
        finally:
            self._core.release(step)
            cache._leases[self._thread] -= 1
            if cache._waiting:
                with cache._slot_freed:
                    cache._slot_freed.notify_all()

    def __enter__(self) -> Lease:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.release()
