"""What a cache runs on: slots, the engine that fills them and the core that decides about them, built and replaced whole."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING, NoReturn

import numpy as np
import torch

from ._core import Core
from ._engine import Engine, Sources
from .cuda import CudaCopies, copies_for
from .errors import ClosedError, refuse_copy
from .pool import Pool

if TYPE_CHECKING:
    from .bank import ExpertBank
    from .history import History
    from .options import CacheOptions
    from .policy import Resolved

__all__ = ["Runtime", "Setup"]

logger = logging.getLogger("moecache")

# The engine's window: what may be on the link before something that is wanted more.
_WINDOW_BYTES = 4 << 20


@dataclass(frozen=True)
class Setup:
    """What stays the same when a cache changes its size."""

    bank: ExpertBank
    history: History
    device: torch.device
    policy: Resolved
    prefetch: bool
    top_k: int | None
    options: CacheOptions


class Runtime:
    """Slots, engine and core of a cache.

    A lease keeps the runtime it was made with. Another size is another runtime, which takes the place of this one in a
    single native call (:meth:`Core.inherit`): `core.successor` leads to it.

    Parameters
    ----------
    setup : Setup
    pool : Pool
        The slots.
    replaces : Runtime, optional
        An idle one over the same link, which is closed once this one has taken its place.

    Attributes
    ----------
    pool : Pool
    engine : Engine
    core : Core
    copies : CudaCopies or None
        What a CUDA device adds.
    """

    def __init__(self, setup: Setup, pool: Pool, replaces: Runtime | None = None) -> None:
        bank = setup.bank
        self.setup, self.pool = setup, pool
        self.first_slot = pool.first_slot
        self._mean_expert_nbytes = bank.nbytes / sum(bank.num_experts)
        self.tensors = pool.tensors
        self._before: dict[str, int] = {} if replaces is None else replaces.counters()
        complete = np.zeros(sum(pool.slots), np.int32)
        numbers, addresses, strides = pool.regions()
        self._region = numbers
        # Regions have the same numbers at every size, and the bank may have been closed since the cache was made.
        kept = None if replaces is None else replaces.sources
        sources = bank.sources(numbers) if kept is None else kept
        self.sources: Sources | None = sources  # None once closed: it holds the bank's tensors
        self.engine: Engine
        self.copies = self._copies_for(sources)
        try:
            self.engine = Engine(
                sources,
                addresses,
                strides,
                complete,
                link=setup.options.link if self.copies is None else self.copies.link,
                threads=setup.options.threads or (2 if bank.location == "disk" else 1),
                window_bytes=_WINDOW_BYTES,
                owner=(bank, pool),
                replaces=None if replaces is None else replaces.engine,
            )
        except BaseException:
            if self.copies is not None:
                self.copies.close()
            raise
        try:
            self.core = Core(
                setup.history.store,
                np.array(bank.layer_group, np.int32),
                np.array(pool.slots, np.int32),
                complete,
                setup.policy.code,
                setup.policy.address,
                setup.prefetch,
                setup.top_k or 0,
                setup.options.prefetch_waste,
            )
        except BaseException:
            self._shut()
            raise

    def _copies_for(self, sources: Sources) -> CudaCopies | None:
        if self.setup.options.link is not None or self.setup.device.type != "cuda":
            return None
        return copies_for(sources, self.setup.device, sum(self.pool.slots), self.setup.bank)

    def counters(self) -> dict[str, int]:
        """The engine's counters since the start or the last reset, those of earlier runtimes included."""
        try:
            now = self.engine.counters()
        except ClosedError:  # or a forked child's copy: the engine is its parent's
            return dict(self._before)
        return {name: n + self._before.get(name, 0) for name, n in now.items()}

    def reset_counters(self) -> None:
        self.core.reset_counters()
        self.engine.reset_counters()
        self._before = {}

    def report_pace(self, layer_s: float) -> None:
        """Report to the core, which has no clock, how long a step took and how fast copies are."""
        rate = self.engine.link_rate
        if rate > 0:
            expert = self._mean_expert_nbytes
            self.core.prefetcher.set_pace(layer_s, expert / rate, min(expert, _WINDOW_BYTES) / rate)

    def replaced(self, slots: Sequence[int]) -> Runtime:
        """A runtime of so many slots of each shape group in the place of this one; the experts most wanted stay.

        Called while the core is frozen, nothing is under way and no step is open. Where no group grows, the new slots are
        the first ones of the old memory and the rest is given back; otherwise both pools exist for the length of the call.
        Whatever is raised before the new one has taken the place of this one leaves this one as it was, less experts that
        it holds.

        Raises
        ------
        CapacityError
            The device has not enough memory for the new slots.
        ClosedError
            The cache was closed meanwhile.
        """
        shrinks = all(new <= old for new, old in zip(slots, self.pool.slots, strict=True))
        pool = self.pool.narrowed(slots) if shrinks else Pool(self.setup.bank.shape_groups, slots, self.setup.device)
        new = Runtime(self.setup, pool, replaces=self)
        try:
            for group in range(len(slots)):
                new._adopt(self, group, in_place=shrinks)
            if new.copies is not None:
                # Copies between slots were given to the compute stream: the engine's must come after them.
                new.copies.mark_readers(np.arange(new.core.slots.num_slots, dtype=np.int32))
            new.core.inherit(self.core, new)
        except BaseException:
            if self.core.successor is not new:
                new._shut()
            raise
        self.engine.hand_pauses_to(new.engine)
        self._shut()
        if shrinks:
            new._give_back(self.pool)
        return new

    def _adopt(self, old: Runtime, group: int, *, in_place: bool) -> None:
        # The most wanted experts of a group into the first rows. In place, those that lie there already stay where they are.
        first, old_first, count = self.first_slot[group], old.first_slot[group], self.pool.slots[group]
        rows = [slot - old_first for slot in old.core.retained(group, count).tolist()]
        taken = {row for row in rows if in_place and row < count}
        free = iter([row for row in range(count) if row not in taken])
        for row in rows:
            expert, target = int(old.core.slots.occupants[old_first + row]), row
            if row not in taken:
                target = next(free)
                if in_place:
                    old.core.slots.forget(old_first + target)
                for name, tensor in self.tensors[group].items():
                    tensor[target].copy_(old.tensors[group][name][row])
            self.core.adopt(first + target, expert)

    def _give_back(self, wider: Pool) -> None:
        if self.setup.device.type == "cpu":
            self.pool.release_beyond(wider)
            return
        # Parameter by parameter, so that the largest of the new tensors is all that exists twice.
        for group, tensors in enumerate(self.tensors):
            for name, tensor in list(tensors.items()):
                try:
                    smaller, address = self.pool.copy_of(group, name)
                except torch.cuda.OutOfMemoryError:
                    logger.warning(
                        "%s is too full to give back what %s no longer needs of %d slots: %d bytes stay allocated",
                        self.setup.device,
                        name,
                        wider.slots[group],
                        tensor.untyped_storage().nbytes(),
                    )
                    continue
                self.engine.move_region(self._region[group, name], address, tensors, name, smaller)
        if self.copies is not None:
            self.copies.mark_readers(np.arange(self.core.slots.num_slots, dtype=np.int32))

    def close(self) -> None:
        """End all requests and steps, stop the engine, give back what it holds. A second call does nothing."""
        self.core.close()
        self._before = self.counters()
        self._shut()
        if not self.core.frozen:  # else a resize is reading the slots, perhaps the one that this call interrupts
            self.drop_slots()

    def drop_slots(self) -> None:
        """Give the slots' memory back; open leases keep what they read."""
        self.tensors = self.pool.tensors = ()

    def _shut(self) -> None:
        self.engine.close()
        self.sources = None
        if self.copies is not None:
            with suppress(ClosedError):  # in a forked child the link is its parent's
                self.copies.close()

    def __reduce__(self) -> NoReturn:
        refuse_copy(self)
