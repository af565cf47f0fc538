"""Which expert is where: the slot table, and the ledger of prefetches that no step has asked for yet."""

import cython
import numpy as np

from libc.stdint cimport int32_t, int64_t, uint8_t
from libc.string cimport memcpy, memmove

from moecache.errors import LeaseError, refuse_copy

from moecache._decide.arrays cimport keep
from moecache._decide.layout cimport Layout
from moecache._decide.plan cimport Plan

cdef enum:
    # A slot's generation from which on the cache is rebuilt before its number runs out (2^31 - 1).
    WORN = 0x7f000000

# The mean share of useful prefetches is taken over about the last 64.
cdef double USEFUL_DECAY = 1.0 / 64
# Experts' worth of waste that may be saved up while nothing is wasted.
cdef double MOST_CREDIT = 32.0


@cython.final
cdef class PrefetchLedger:
    """Prefetches on their way or not used yet, what they may cost, and how they turned out.

    Parameters
    ----------
    waste_share : float
        Prefetched for nothing at most, as a share of what steps needed moved.
    """

    def __cinit__(self, double waste_share):
        self.waste_share, self.useful_share, self.credit = waste_share, 1.0, MOST_CREDIT

    def __reduce__(self):
        refuse_copy(self)

    cdef int _find(self, int32_t slot) noexcept nogil:
        cdef int i
        for i in range(self.size):
            if self.entry[i].slot == slot:
                return i
        return -1

    cdef void _remove(self, int i) noexcept nogil:
        self.size -= 1
        memmove(&self.entry[i], &self.entry[i + 1], (self.size - i) * sizeof(InFlight))

    cdef void begin(self, int32_t slot, int32_t gid, int64_t owner, float chance) noexcept nogil:
        self.entry[self.size] = InFlight(slot, gid, owner, chance, 1)
        self.size += 1
        self.issued += 1

    cdef void resume(self, const InFlight *entry, int32_t slot) noexcept nogil:
        # One of another table goes on in a slot of this one.
        self.entry[self.size] = entry[0]
        self.entry[self.size].slot = slot
        self.size += 1

    cdef void needed(self, double experts) noexcept nogil:
        # What steps needed moved, whoever moved it, is what waste is measured against.
        self.credit = min(self.credit + self.waste_share * experts, MOST_CREDIT)

    cdef void used(self, int32_t slot, bint in_time) noexcept nogil:
        cdef int i = self._find(slot)
        if in_time:
            self.useful += 1
            self.needed(1)
        else:
            self.late += 1
        self.useful_share += USEFUL_DECAY * (1 - self.useful_share)
        if i >= 0:
            self._remove(i)

    cdef void waste(self, int i, bint landed) noexcept nogil:
        # One that has not begun costs nothing and shows nothing. Of one under way a chunk is on the link: half of it by
        # now, all of it in the end.
        cdef double moved = 1 - self.entry[i].left
        if landed:
            moved = 1
        elif moved > 0 and self.chunk_share > 0:
            moved = min(1, moved + 0.5 * self.chunk_share)
        self.wasted += 1
        self.dropped += not landed
        self.credit -= moved
        if moved > 0:
            self.useful_share -= USEFUL_DECAY * self.useful_share
        self._remove(i)

    cdef void lost(self, int32_t slot, bint landed) noexcept nogil:
        # Its slot went to another expert, or its copy failed.
        cdef int i = self._find(slot)
        if i >= 0:
            self.waste(i, landed)

    cdef void inherit(self, PrefetchLedger old) noexcept nogil:
        # The counters of another ledger; its entries go on one by one, in `resume`.
        self.issued, self.useful, self.late = old.issued, old.useful, old.late
        self.wasted, self.dropped, self.useful_share = old.wasted, old.dropped, old.useful_share
        self.credit, self.chunk_share = old.credit, old.chunk_share

    def counters(self):
        """dict of int: monotonic since the start or the last `reset_counters`."""
        return {"prefetch_issued": self.issued, "prefetch_useful": self.useful, "prefetch_late": self.late,
                "prefetch_wasted": self.wasted, "prefetch_dropped": self.dropped, "prefetch_pending": self.size}

    def reset_counters(self):
        """What is on its way or unused counts as issued in the new period: it will end there, one way or another."""
        self.useful = self.late = self.wasted = self.dropped = 0
        self.issued = self.size


@cython.final
cdef class SlotTable:
    """Slots by shape group, their occupants, and who keeps those from being evicted.

    Parameters
    ----------
    layout : Layout
    layer_group : int32 array [L]
        Shape group of each layer.
    slots_per_group : int32 array [groups]
        Slot numbers run through the shape groups in order.
    complete : int32 array [slots]
        Written by whoever moves the bytes: the generation of the occupant whose bytes are all there, negative when its copy
        failed.
    ledger : PrefetchLedger
    """

    def __cinit__(self, Layout layout, layer_group, slots_per_group, complete, PrefetchLedger ledger):
        cdef int32_t group, slot
        self.layout, self.ledger, self.complete, self._memory = layout, ledger, complete, []
        slots = np.ascontiguousarray(slots_per_group, np.int32)
        self.num_groups, self.num_slots = len(slots), int(slots.sum())
        n, m = self.num_slots, layout.num_gids
        self.occupants, self.generations, self.pin_counts = np.full(n, -1, np.int32), np.zeros(n, np.int32), np.zeros(n, np.int32)
        self.occupant, self.generation = <int32_t *> keep(self._memory, self.occupants), <int32_t *> keep(self._memory, self.generations)
        self.pins, self.completed = <int32_t *> keep(self._memory, self.pin_counts), <int32_t *> keep(self._memory, complete)
        self.group_of = <int32_t *> keep(self._memory, np.array(layer_group, np.int32))
        self.begin = <int32_t *> keep(self._memory, np.concatenate([[0], np.cumsum(slots)]).astype(np.int32))
        self.slot_of = <int32_t *> keep(self._memory, np.full(m, -1, np.int32))
        self.vacant = <int32_t *> keep(self._memory, np.zeros(n, np.int32))
        self.vacant_count = <int32_t *> keep(self._memory, np.zeros(self.num_groups, np.int32))
        self.speculative = <uint8_t *> keep(self._memory, np.zeros(n, np.uint8))
        self.shielded_until = <int64_t *> keep(self._memory, np.zeros(m, np.int64))
        for group in range(self.num_groups):
            for slot in range(self.begin[group + 1] - 1, self.begin[group] - 1, -1):
                self.vacate(slot)

    def __reduce__(self):
        refuse_copy(self)

    cdef void vacate(self, int32_t slot) noexcept nogil:
        cdef int32_t group = 0
        while slot >= self.begin[group + 1]:
            group += 1
        self.occupant[slot] = -1
        self.speculative[slot] = 0
        self.vacant[self.begin[group] + self.vacant_count[group]] = slot
        self.vacant_count[group] += 1

    cdef int assign(self, int32_t slot, int32_t gid, Plan plan) except -1 nogil:
        """Give a slot, vacant and popped or a victim, to an expert; a copy for its occupant that is still under way is
        dropped."""
        cdef int32_t old = self.occupant[slot]
        cdef bint landed = self.is_complete(slot)
        if old >= 0 and not landed:
            plan.drop(slot, self.generation[slot])
        if old >= 0:
            self.slot_of[old] = -1
            self.evictions += landed
        if self.speculative[slot]:
            self.ledger.lost(slot, landed)
        self.occupant[slot], self.slot_of[gid] = gid, slot
        self.generation[slot] += 1
        self.worn |= self.generation[slot] >= WORN
        self.speculative[slot] = 0
        return 0

    cdef void discard(self, int32_t slot) noexcept nogil:
        """The occupant's bytes never came: it has no slot any more. The slot is vacant once nobody pins it."""
        if self.occupant[slot] >= 0:
            if self.speculative[slot]:
                self.speculative[slot] = 0
                self.ledger.lost(slot, False)
            self.slot_of[self.occupant[slot]] = -1
            self.occupant[slot] = -1
            if self.pins[slot] == 0:
                self.vacate(slot)

    cdef bint use_speculative(self, int32_t slot, bint in_time) noexcept nogil:
        """A step asks for the occupant: whether it had been prefetched for nobody yet."""
        if not self.speculative[slot]:
            return False
        self.speculative[slot] = 0
        self.ledger.used(slot, in_time)
        return True

    cdef int place(self, int32_t slot, int32_t gid) except -1:
        """Enter an expert whose bytes were put into a vacant slot by other means."""
        cdef int32_t group = self.group_of[self.layout.layer_of[gid]], i = 0, count = self.vacant_count[group]
        cdef int32_t *vacant = &self.vacant[self.begin[group]]
        while i < count and vacant[i] != slot:
            i += 1
        if i == count or self.slot_of[gid] >= 0:
            raise LeaseError(f"slot {slot} is not vacant, or expert {self.layout.locate(gid)} is resident already")
        memmove(&vacant[i], &vacant[i + 1], (count - i - 1) * sizeof(int32_t))
        self.vacant_count[group] -= 1
        self.assign(slot, gid, Plan())
        self.completed[slot] = self.generation[slot]
        return 0

    cdef void inherit(self, SlotTable old) noexcept nogil:
        # Counters of another table, and what its prefetcher has shielded.
        self.evictions, self.steps = old.evictions, old.steps
        memcpy(self.shielded_until, old.shielded_until, self.layout.num_gids * sizeof(int64_t))

    cdef int reset_counters(self) except -1:
        cdef int32_t gid
        for gid in range(self.layout.num_gids):
            self.shielded_until[gid] = max(self.shielded_until[gid] - self.steps, 0)
        self.steps = self.evictions = 0
        self.ledger.reset_counters()
        return 0

    # What Python asks

    def fail(self, int32_t slot, int32_t generation):
        """The copy into a slot failed: its occupant is not resident, and the slot is vacant once nobody pins it."""
        if self.generation[slot] == generation:
            self.discard(slot)

    def forget(self, int32_t slot):
        """Take an unpinned slot from its occupant, whose bytes are about to be overwritten by other means (a resize).

        Raises
        ------
        LeaseError
            A step has it pinned.
        """
        if self.pins[slot]:
            raise LeaseError(f"slot {slot} is in use")
        self.discard(slot)

    def pinned(self):
        """int: slots that are pinned, with an occupant or without."""
        return int(np.count_nonzero(self.pin_counts))

    def pinned_experts(self):
        """list of (layer, expert): experts now pinned by a lease."""
        return [self.layout.locate(gid) for gid in self.occupants[self.pin_counts > 0].tolist() if gid >= 0]

    def resident(self):
        """int32 array: gids that have a slot now, complete or on their way."""
        return self.occupants[self.occupants >= 0]
