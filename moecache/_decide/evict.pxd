# Which experts to evict.

cimport cython
from libc.stdint cimport int32_t, int64_t

from moecache._decide.estimates cimport Estimates
from moecache._decide.plan cimport Plan
from moecache._decide.request cimport RequestState
from moecache._decide.slots cimport SlotTable

cdef enum Policy:
    LRU
    LFU
    EXPECTED_NEXT_USE
    COUNTS
    MOE_INFINITY
    USER
    BELADY

ctypedef double (*score_function)(const double *) noexcept nogil


@cython.final
cdef class Victims:
    cdef object _memory         # list of arrays behind the addresses below
    cdef int32_t *slots         # [size]: the first choice first
    cdef double *scores         # [size]: of their occupants
    cdef int64_t *last          # [size]: clock of their last use
    cdef int32_t size           # found
    cdef int32_t wanted         # to be found at most

    cdef inline void clear(self, int32_t wanted) noexcept nogil:
        self.size, self.wanted = 0, wanted

    cdef inline bint _before(self, int32_t slot, double score, int64_t last, int32_t i) noexcept nogil:
        if score != self.scores[i]:
            return score > self.scores[i]
        if last != self.last[i]:
            return last < self.last[i]
        return slot < self.slots[i]

    cdef inline void offer(self, int32_t slot, double score, int64_t last) noexcept nogil:
        cdef int32_t i
        if self.size == self.wanted:
            if self.wanted == 0 or not self._before(slot, score, last, self.size - 1):
                return
            i = self.size - 1
        else:
            i = self.size
            self.size += 1
        while i > 0 and self._before(slot, score, last, i - 1):
            self.slots[i], self.scores[i], self.last[i] = self.slots[i - 1], self.scores[i - 1], self.last[i - 1]
            i -= 1
        self.slots[i], self.scores[i], self.last[i] = slot, score, last


@cython.final
cdef class Evictor:
    cdef SlotTable slots            # whose occupants are ranked
    cdef Estimates estimates        # what they are ranked by; a replay shares one among several evictors
    cdef Victims found              # of the last search
    cdef RequestState current       # whose step came last; None: nobody's
    cdef Policy policy              # which score
    cdef score_function score       # a user's, for policy USER
    cdef object _memory             # list of arrays behind the addresses below
    cdef float *slot_reuse_time     # [slots]: reuse time of the occupant, in the order of the slots
    cdef int32_t *slot_layer        # [slots]: its layer
    cdef float *block_best          # [slots / 64 + 1]: scratch: largest score of a block of slots

    cdef inline double lateness(self, int32_t gid, int32_t now) noexcept nogil:
        # Layer steps from `now` until the expert is worth its slot.
        return self.estimates.reuse_time[gid] + self.estimates.layout.distance(self.estimates.layout.layer_of[gid], now)

    cdef inline void _rank(self, int32_t slot, int32_t gid) noexcept nogil:
        self.slot_reuse_time[slot], self.slot_layer[slot] = self.estimates.reuse_time[gid], self.slots.layout.layer_of[gid]

    cdef int assign(self, int32_t slot, int32_t gid, Plan plan) except -1 nogil
    cdef int place(self, int32_t slot, int32_t gid) except -1
    cdef void refresh_layer(self, int32_t layer) noexcept nogil
    cdef int32_t find_victims(self, int32_t group, int32_t wanted, int32_t now, bint speculative) noexcept nogil
    cdef int32_t claim(self, int32_t group, int32_t wanted, int32_t now) noexcept nogil
    cdef void offer_slots(self, int32_t begin, int32_t end, int32_t now, bint speculative) noexcept nogil
    cdef double _score(self, int32_t gid, int32_t now) noexcept nogil
    cdef double _user_score(self, int32_t gid, int32_t layer, int32_t now) noexcept nogil
    cdef double _ratio(self, int32_t gid, int32_t layer) noexcept nogil
