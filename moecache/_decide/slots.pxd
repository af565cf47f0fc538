# Which expert is where.

cimport cython
from libc.stdint cimport int32_t, int64_t, uint8_t

from moecache._decide.layout cimport Layout
from moecache._decide.plan cimport Plan
from moecache._decide.sync cimport moe_load_acquire

cdef enum:
    MAX_IN_FLIGHT = 64   # prefetches on their way, or not used yet


cdef struct InFlight:
    # A prefetch that is on its way, or has landed and was not asked for yet.
    int32_t slot    # where it goes
    int32_t gid     # the expert
    int64_t owner   # number of the request it is for
    float chance    # that it is asked for
    float left      # share of its bytes still to move, by the measured pace


@cython.final
cdef class PrefetchLedger:
    cdef readonly int64_t issued        # prefetches begun
    cdef readonly int64_t useful        # asked for, and there
    cdef readonly int64_t late          # asked for while on their way
    cdef readonly int64_t wasted        # never asked for
    cdef readonly int64_t dropped       # of the wasted, those that did not land
    cdef readonly int32_t size          # on their way, or not used yet: exactly the slots marked speculative
    cdef InFlight[MAX_IN_FLIGHT] entry  # [size], in the order in which they were asked for: so they travel
    cdef double useful_share            # of prefetches, by a decaying mean
    cdef double waste_share             # what may be wasted, as a share of what steps needed moved
    cdef double credit                  # experts' worth that may be wasted now
    cdef double chunk_share             # of an expert's bytes that a chunk of the link holds

    cdef void needed(self, double experts) noexcept nogil
    cdef void used(self, int32_t slot, bint in_time) noexcept nogil
    cdef void waste(self, int i, bint landed) noexcept nogil
    cdef void lost(self, int32_t slot, bint landed) noexcept nogil
    cdef void begin(self, int32_t slot, int32_t gid, int64_t owner, float chance) noexcept nogil
    cdef void resume(self, const InFlight *entry, int32_t slot) noexcept nogil
    cdef void inherit(self, PrefetchLedger old) noexcept nogil
    cdef int _find(self, int32_t slot) noexcept nogil
    cdef void _remove(self, int i) noexcept nogil


@cython.final
cdef class SlotTable:
    cdef readonly Layout layout             # how experts are numbered
    cdef readonly PrefetchLedger ledger     # prefetches on their way or not used yet
    cdef readonly int32_t num_slots         # slots of all shape groups
    cdef readonly int32_t num_groups        # shape groups
    cdef readonly object occupants          # int32 array [slots]: gid of each slot's expert, -1 for none
    cdef readonly object generations        # int32 array [slots]: occupants that a slot has had
    cdef readonly object pin_counts         # int32 array [slots]: steps that compute with a slot
    cdef readonly object complete           # int32 array [slots]: generation whose bytes are all there; negative: failed
    cdef readonly bint worn                 # a slot's generation nears the end of its numbers
    cdef readonly int64_t evictions         # complete occupants that lost their slot to another expert
    cdef readonly int64_t steps             # steps so far; `reset_counters` begins again
    cdef object _memory                     # list of arrays behind the addresses below
    cdef int32_t *group_of                  # [L]: shape group of a layer
    cdef int32_t *begin                     # [groups + 1]: first slot of a shape group
    cdef int32_t *occupant                  # [slots]: occupants
    cdef int32_t *generation                # [slots]: generations
    cdef int32_t *pins                      # [slots]: pin_counts
    cdef int32_t *completed                 # [slots]: complete; written by whoever moves the bytes
    cdef int32_t *slot_of                   # [M]: slot of an expert, -1 for none
    cdef int32_t *vacant                    # by group a stack of its vacant slots, from begin[group] on
    cdef int32_t *vacant_count              # [groups]: vacant slots
    cdef uint8_t *speculative               # [slots]: whether its occupant was prefetched and not asked for yet
    cdef int64_t *shielded_until            # [M]: up to which step an expert is no victim; written by the prefetcher

    cdef inline bint is_complete(self, int32_t slot) noexcept nogil:
        return moe_load_acquire(&self.completed[slot]) == self.generation[slot]

    cdef inline bint has_failed(self, int32_t slot) noexcept nogil:
        return moe_load_acquire(&self.completed[slot]) == -self.generation[slot]

    cdef inline int32_t capacity_of(self, int32_t group) noexcept nogil:
        return self.begin[group + 1] - self.begin[group]

    cdef inline int32_t pop_vacant(self, int32_t group) noexcept nogil:
        self.vacant_count[group] -= 1
        return self.vacant[self.begin[group] + self.vacant_count[group]]

    cdef inline void unpin(self, int32_t slot, int32_t generation) noexcept nogil:
        if self.generation[slot] == generation and self.pins[slot] > 0:
            self.pins[slot] -= 1
            if self.pins[slot] == 0 and self.occupant[slot] < 0:
                self.vacate(slot)

    cdef void vacate(self, int32_t slot) noexcept nogil
    cdef int assign(self, int32_t slot, int32_t gid, Plan plan) except -1 nogil
    cdef void discard(self, int32_t slot) noexcept nogil
    cdef bint use_speculative(self, int32_t slot, bint in_time) noexcept nogil
    cdef int place(self, int32_t slot, int32_t gid) except -1
    cdef void inherit(self, SlotTable old) noexcept nogil
    cdef int reset_counters(self) except -1
