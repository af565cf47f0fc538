"""ExpertCache: a few experts on the device, the others one copy away."""

from __future__ import annotations

import logging
import os
from collections import defaultdict
from collections.abc import Iterator
from contextlib import contextmanager
from types import TracebackType
from typing import Any, NoReturn

import torch

from ._core import Core
from ._engine import Engine
from .bank import ExpertBank
from .capacity import nbytes_of, slots_for
from .cuda import CudaCopies, numbered
from .errors import RoutingError, UnsupportedModelError, refuse_copy
from .history import History
from .memory import untouched_nbytes
from .options import CacheOptions
from .persistence import CacheFiles
from .policy import Score, resolve
from .pool import Pool
from .recorder import RecordedModel, Recorder
from .request import Request
from .request_batch import RequestBatch
from .runtime import Runtime, Setup
from .state import CacheState
from .stats import Stats

__all__ = ["ExpertCache"]

logger = logging.getLogger("moecache")


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
        Earlier requests of this model. A path is read if it exists; it is written after requests (`autosave` of the
        options), by ``close()``, when the cache is collected, when the interpreter ends, and before SIGTERM or SIGHUP end it.
        Several caches and processes may share one: each adds what it has gained. An object is read and learns, and is not
        written.
    prefetch : bool
        Fetch experts of coming layers ahead where that promises to pay.
    learn : bool or path
        Record what is routed into a folder, and fit the history's forecaster anew in a process of low priority whenever the
        log has doubled; requests begun after a fit use its weights. True: a folder beside the history's file, with the
        ending ``.learn``. The log is bounded (:data:`moecache.learning.LOG_TOKENS`). Off by default.
    top_k : int, optional
        Experts per token. When known, a capacity below it is refused and the history is checked against it.
    timeout : float
        Seconds after which a wait for bytes or for a slot is an error.
    options : CacheOptions, optional
        What most users never set.

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
    UnsupportedModelError
        Packed experts, and a device that is not the CPU.
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
        prefetch: bool = True,
        learn: bool | str | os.PathLike[str] = False,
        top_k: int | None = None,
        timeout: float = 60.0,
        options: CacheOptions | None = None,
    ) -> None:
        options = options or CacheOptions()
        self.bank = bank
        self.device = numbered(device)
        self.num_experts = tuple(bank.num_experts)
        self.top_k = top_k
        if bank.is_packed and self.device.type != "cpu":
            raise UnsupportedModelError(
                f"packed experts are decoded into host memory only, and the cache is on {self.device}: expected device='cpu', or "
                "a bank of decoded tensors (ExpertBank.from_tensors)"
            )
        self._reserve = nbytes_of(options.reserve or 0)
        self._padding_id = -1 if options.padding_id is None else options.padding_id
        if 0 <= self._padding_id < max(self.num_experts):
            raise RoutingError(
                f"padding_id {self._padding_id} is an expert of some layer: expected a number that no router gives"
            )
        self._policy = resolve(policy)
        slots = self._slots_for(capacity)
        self._files = CacheFiles(
            history, RecordedModel.of(bank, top_k, self._padding_id), learn, self._policy.name, options
        )
        self.history, self._learner = self._files.history, self._files.learner
        setup = Setup(
            bank=bank,
            history=self.history,
            device=self.device,
            policy=self._policy,
            prefetch=prefetch,
            top_k=top_k,
            options=options,
        )
        try:
            runtime = Runtime(setup, Pool(bank.shape_groups, slots, self.device))
        except BaseException:
            self._files.abandon()
            raise
        self._state = CacheState(runtime, self._files, self._padding_id, timeout)
        self._warn_if_small()
        self._files.watch(self)

    def _slots_for(self, capacity: int | float | str, runtime: Runtime | None = None) -> tuple[int, ...]:
        per_group = [0] * len(self.bank.shape_groups)
        for layer, group in enumerate(self.bank.layer_group):
            per_group[group] += self.num_experts[layer]
        reserve, held = self._reserve, 0 if runtime is None else runtime.pool.nbytes
        if isinstance(capacity, str) and capacity == "auto" and self.device.type == "cpu":
            # A bank that lies in the same memory, mapped from files say, takes its pages as they are first copied.
            kept = None if runtime is None else runtime.sources
            sources = self.bank.sources(defaultdict(int)) if kept is None else kept
            host = sources.segment_file < 0
            reserve += untouched_nbytes(
                zip(sources.segment_source[host].tolist(), sources.segment_nbytes[host].tolist(), strict=True)
            )
        return slots_for(
            capacity, self.bank.shape_groups, per_group, self.device, self.top_k, reserve=reserve, held=held
        )

    @property
    def closed(self) -> bool:
        return self._state.closed

    @property
    def timeout(self) -> float:
        """Seconds after which a wait is an error."""
        return self._state.timeout

    @property
    def _core(self) -> Core:
        return self._state.current().core

    @property
    def _engine(self) -> Engine:
        return self._state.current().engine

    @property
    def _copies(self) -> CudaCopies | None:
        return self._state.current().copies

    @property
    def pool(self) -> Pool:
        """The slots, as they are now."""
        return self._state.current().pool

    @property
    def capacity(self) -> int:
        return sum(self.pool.slots)

    def _warn_if_small(self) -> None:
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
        return sum(per_layer[self._core.layout.locate(int(gid))[0]] for gid in self._core.slots.resident())

    def resident(self) -> set[tuple[int, int]]:
        """(layer, expert) of every expert that has a slot now, complete or on its way."""
        return {self._core.layout.locate(int(gid)) for gid in self._core.slots.resident()}

    def request(self) -> Request:
        """Start a request: one prompt and its completion. Close it, or use it as a context manager.

        Raises
        ------
        ClosedError
        CheckpointError
            A file that experts in memory are mapped from has been written to.
        """
        self._state.check_open()
        self.bank.check_mapped()
        if self._learner is not None:
            self._learner.between_requests()
        return Request(self, self._state)

    def batch(self) -> RequestBatch:
        """Start a batch: steps that several requests share. Close it, or use it as a context manager.

        Raises
        ------
        ClosedError
        """
        self._state.check_open()
        return RequestBatch(self, self._state)

    def stats(self) -> Stats:
        """Counters since the start or the last :meth:`reset_stats`."""
        runtime = self._state.current()
        core: dict[str, Any] = runtime.core.counters()
        seconds: dict[str, Any] = {
            name[:-3] + "_s": core.pop(name) / 1e9 for name in list(core) if name.endswith("_ns")
        }
        moved = runtime.counters()
        lock = None if runtime.copies is None else runtime.copies.lock
        learner = self._learner
        return Stats(
            **core,
            **seconds,
            bytes_demand=moved["bytes_demand"],
            bytes_prefetch=moved["bytes_prefetch"],
            reading_s=moved["reading_ns"] / 1e9,
            copying_s=(moved["busy_ns"] - moved["reading_ns"]) / 1e9,
            capacity_experts=self.capacity,
            resident_experts=len(runtime.core.slots.resident()),
            resident_bytes=self.resident_nbytes,
            expert_bytes_total=self.bank.nbytes,
            expert_bytes_stored=self.bank.stored_nbytes,
            direct_reads=moved["direct_reads"],
            buffered_reads=moved["buffered_reads"],
            failed=moved["failed"],
            fits=0 if learner is None else learner.fits,
            fits_failed=0 if learner is None else learner.fits_failed,
            host_locked_bytes=0 if lock is None else lock.locked_nbytes,
            host_pageable_bytes=0 if lock is None else lock.pageable_nbytes,
            layer_demands=tuple(runtime.core.layer_demands.tolist()),
            layer_hits=tuple(runtime.core.layer_hits.tolist()),
        )

    def reset_stats(self) -> None:
        """Start the counters over, for measurements after a warm-up. Prefetches still on their way, or not asked for yet,
        count as issued from here on.

        Raises
        ------
        ClosedError
        """
        self._state.check_open()
        self._state.current().reset_counters()
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
        self._state.check_open()
        return self._files.record(path, model)

    def resize(self, capacity: int | float | str) -> None:
        """Change the number of slots; the experts most wanted stay.

        May be called at any time, from any thread: steps under way are waited for, and new ones wait until it is over.
        Shrinking needs no second pool on a CPU, and beside the old one memory for the largest parameter's new slots on
        another device; for the length of a growth both pools exist. The same size changes nothing.

        Raises
        ------
        CapacityError
            A capacity that cannot work, or the device has not enough memory; the cache is as it was.
        LeaseError
            This thread has a lease open or is resizing already, or other threads' leases did not end before the timeout;
            the cache is as it was.
        TransferError
            What moves did not land before the timeout, or new I/O threads could not be started; it is as it was.
        ClosedError
        """
        self._state.check_open()
        if self._copies is not None:
            self._copies.check("resize() was called")
        self._state.replace(self._slots_for(capacity, self._state.current()))

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Let no copy start inside the block, and none move when it begins: the device sees nothing of the cache.

        For what must not share the link or the driver with copies, the capture of a CUDA graph by a library that needs it
        to itself, say. Prefetches wait; a step that misses inside the block waits until its timeout.

        Raises
        ------
        TransferError
            What moves did not land before the timeout.
        LeaseError
            This thread is in the middle of a resize.
        ClosedError
        """
        self._state.check_open()
        pause = self._state.hold_copies()
        try:
            yield
        finally:
            pause.end()

    def close(self) -> None:
        """End open requests, stop the I/O threads, give the pool back, write the history if it came with a path.

        A second call does nothing.
        """
        self._state.close()

    def __enter__(self) -> ExpertCache:
        return self

    def __exit__(
        self, error_type: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def __reduce__(self) -> NoReturn:
        refuse_copy(self)

    def __repr__(self) -> str:
        state = "closed" if self.closed else f"{self.capacity} of {sum(self.num_experts)} experts on {self.device}"
        return f"<ExpertCache {state}, {self.policy}, bank on {self.bank.location}>"
