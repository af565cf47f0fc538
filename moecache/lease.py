"""The slots of one step while its experts are computed."""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping
from contextlib import suppress
from types import TracebackType
from typing import NoReturn

import numpy as np
import torch

from ._core import Step
from .errors import ClosedError, LeaseError, TransferError, refuse_copy
from .runtime import Runtime
from .state import SLICE_S, CacheState

__all__ = ["DeviceLease", "Lease"]

_FIRST_ROW = torch.zeros(1, dtype=torch.int64, device="cpu")
_NAMED = 8  # experts that an error names
_IN_ORDER = np.zeros(64, np.float32)  # prefetches travel in the order in which they were chosen


class Lease:
    """The slots of one step, held until the ``with`` block is left.

    A lease that is dropped without that, by an interrupt, say, gives its slots back when it is collected, and at the
    latest when its request is closed.

    Attributes
    ----------
    weights : mapping of parameter name to Tensor ``[slots, *shape]``
        The pool of the layer; index it with the slots that :meth:`ready` yields.
    """

    __slots__ = ("_at", "_core", "_first_slot", "_request", "_runtime", "_shared", "_step", "_taken", "weights")

    def __init__(self, request: object, shared: CacheState, runtime: Runtime, step: Step) -> None:
        self._shared, self._runtime, self._core, self._step = shared, runtime, runtime.core, step
        self._request = request  # which lives as long as its leases
        group, tensors = runtime.setup.bank.layer_group[step.layer], runtime.tensors
        if not tensors:
            raise ClosedError("this cache was closed while a step began")
        self.weights: Mapping[str, torch.Tensor] = tensors[group]
        self._first_slot = runtime.first_slot[group]
        self._at = (0, 0)
        self._taken = -1

    @property
    def experts(self) -> list[int]:
        """Distinct experts of the step, ascending."""
        return self._step.expert_list()

    @property
    def slots(self) -> list[int]:
        """Slot of each of :attr:`experts`, -1 where a later wave will give one. Only with ``missing == 0`` all hold bytes."""
        first, slots, copies = self._first_slot, self._step.slot_list(), self._runtime.copies
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

        ``tokens`` is an int64 Tensor of row numbers, in the order in which ``torch.where`` lists the expert's one-hot mask:
        by place among the top k first, then by token. ``weights[name][slot]`` may be read until the next item is asked for.
        A step that needs more experts than there are slots runs in waves; the loop does not notice.

        Raises
        ------
        TransferError
            A copy failed; its ``__cause__`` is the original error. The next call tries again.
        LeaseError
            The lease has ended, or other leases held every slot until the timeout.
        """
        dispatcher, step, copies = self._core.dispatcher, self._step, self._runtime.copies
        rows = None if step.token_index is None else torch.from_numpy(step.token_index)
        dispatcher.put_back(step, self._taken)
        while True:
            if not step.open:
                self._check_open()
            # The item before this one, be it that of an earlier loop that was left, is done with when the next is asked for.
            if self._taken >= 0:
                i, self._taken = self._taken, -1
                if dispatcher.finish(step, i):
                    self._mark_readers(step.plan.fetches[:, 1])
                    self._submit()
            if step.done == step.unique:
                return
            i = dispatcher.next_ready(step)
            if i < 0:
                self._wait()
                continue
            expert, slot, begin, end = step.item(i)
            if copies is not None and copies.link.is_fresh(slot):
                copies.before_reading(np.array([slot], np.int32))
            if rows is not None:
                tokens = rows[begin:end]
            else:
                tokens = _FIRST_ROW if end - begin == 1 else _FIRST_ROW.expand(end - begin)
            self._at, self._taken = (begin, end), i
            yield expert, slot - self._first_slot, tokens

    def _check_open(self) -> None:
        if not self._step.open:
            if self._core.closed:
                raise ClosedError(f"layer {self._step.layer}: the cache was closed")
            raise LeaseError(f"layer {self._step.layer}: this lease has ended; read the slots inside its `with` block")

    def _mark_readers(self, slots: np.ndarray) -> None:
        # Kernels already issued still read these slots: no copy may start before them.
        copies = self._runtime.copies
        if copies is not None:
            copies.mark_readers(slots)

    def _submit(self) -> None:
        plan = self._step.plan
        self._runtime.engine.submit(plan.fetches, plan.prefetches, _IN_ORDER[: len(plan.prefetches)], plan.drops)

    def _wait(self) -> None:
        # Until one of this step's experts lands, or, when none of them has a slot, until another lease gives one up.
        step = self._step
        _, slots, generations = step.pending()
        if not len(slots):
            self._wait_for_slot()
            return
        began = time.perf_counter()
        try:
            self._runtime.engine.wait_any(slots, generations, self._shared.timeout)
        except TransferError as error:
            at = getattr(error, "position", -1)
            if at < 0:
                raise
            self._core.slots.fail(int(slots[at]), int(generations[at]))
            raise
        finally:
            self._waited(time.perf_counter() - began)

    def _wait_for_slot(self) -> None:
        core, step, timeout = self._core, self._step, self._shared.timeout
        began = time.perf_counter()
        try:
            while True:
                seen = core.open_steps.event
                self._check_open()
                # Looked at before the slots are, lest the last of them ends in between.
                others = core.open_steps.pinned_elsewhere(step)
                if core.dispatcher.retry(step):
                    break
                self._shared.check_process()
                if not others or time.perf_counter() - began > timeout:
                    raise self._no_slots(others)
                core.open_steps.wait_event(seen, SLICE_S)
        finally:
            self._waited(time.perf_counter() - began, for_slot=True)
        self._submit()

    def _waited(self, seconds: float, *, for_slot: bool = False) -> None:
        self._core.waited(self._step, seconds, for_slot)

    def _no_slots(self, others: bool) -> LeaseError:
        step, held = self._step, self._core.slots.pinned_experts()
        names = ", ".join(f"layer {layer} expert {expert}" for layer, expert in held[:_NAMED])
        more = f" and {len(held) - _NAMED} more" if len(held) > _NAMED else ""
        whose = "other threads did not end theirs in time" if others else "this thread holds them itself"
        return LeaseError(
            f"layer {step.layer} needs slots for {step.deferred} more experts, and all {self._core.slots.num_slots} are held by "
            f"leases ({names}{more}), {whose}; end a lease before the next step, or ask for a larger capacity"
        )

    def release(self) -> None:
        """Give the slots back. A second call does nothing."""
        step = self._step
        if not step.open:
            return
        try:
            if self._runtime.copies is not None:
                self._mark_readers(np.array([slot for slot in step.slot_list() if slot >= 0], np.int32))
        finally:
            self._core.release(step)

    def __enter__(self) -> Lease:
        return self

    def __exit__(
        self, error_type: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.release()

    def __reduce__(self) -> NoReturn:
        refuse_copy(self)


class DeviceLease(Lease):
    """A lease whose slots may still be read by kernels on a device when it is dropped."""

    __slots__ = ()

    def __del__(self) -> None:
        with suppress(Exception):  # the device captures, or is gone: the core unpins all the same
            self.release()
