"""Which experts to evict: the score of each policy, and the search for the slots of the largest."""

import cython
import numpy as np

from libc.stdint cimport int32_t, int64_t, uintptr_t

from moecache.errors import PolicyError, refuse_copy

from moecache._decide.arrays cimport address_of, keep, nearly
from moecache._decide.estimates cimport Estimates
from moecache._decide.plan cimport Plan
from moecache._decide.slots cimport SlotTable

cdef extern from "_rank.h" nogil:
    enum:
        BLOCK_SLOTS "MOE_LANES"
    ptrdiff_t moe_latest(float *best, const float *reuse_time, const int32_t *layer, ptrdiff_t n, int32_t now, int32_t layers)

POLICY_CODES = {
    "lru": LRU, "lfu": LFU, "expected-next-use": EXPECTED_NEXT_USE, "counts": COUNTS, "moe-infinity": MOE_INFINITY,
    "user": USER, "belady": BELADY,
}

cdef enum:
    LAYER
    NOW
    NUM_LAYERS
    DISTANCE
    AGE
    FREQUENCY
    REQUEST_FREQUENCY
    FAST
    SLOW
    PRIOR
    PROBABILITY
    MATCHED
    NUM_FEATURES

_BY_FEATURE = {
    LAYER: "layer", NOW: "now", NUM_LAYERS: "num_layers", DISTANCE: "distance", AGE: "age", FREQUENCY: "frequency",
    REQUEST_FREQUENCY: "request_frequency", FAST: "fast", SLOW: "slow", PRIOR: "prior", PROBABILITY: "probability",
    MATCHED: "matched",
}
# What a user's score function is given, in this order (moecache.policy documents each).
FEATURES = tuple(_BY_FEATURE[i] for i in range(NUM_FEATURES))


@cython.final
cdef class Victims:
    """The `wanted` best of many slots: largest score first, then the longest unused, then the lowest slot."""

    def __cinit__(self, int32_t capacity):
        n = max(capacity, 1)
        self._memory = [np.zeros(n, np.int32), np.zeros(n, np.float64), np.zeros(n, np.int64)]
        self.slots, self.scores = <int32_t *> address_of(self._memory[0]), <double *> address_of(self._memory[1])
        self.last = <int64_t *> address_of(self._memory[2])

    def __reduce__(self):
        refuse_copy(self)


@cython.final
cdef class Evictor:
    """Ranks the occupants of a slot table by a policy.

    Parameters
    ----------
    slots : SlotTable
    estimates : Estimates
    policy : str
        A key of `POLICY_CODES`.
    score : int
        Address of a ``double (const double *features)`` for policy "user", else 0; the largest score is evicted.
    """

    def __cinit__(self, SlotTable slots, Estimates estimates, str policy, uintptr_t score):
        if policy not in POLICY_CODES or (policy == "user") != (score != 0):
            raise PolicyError(f"policy {policy!r} with score address {score}: expected one of {', '.join(POLICY_CODES)}, and an "
                              f"address for 'user' alone")
        self.slots, self.estimates, self.found = slots, estimates, Victims(slots.num_slots)
        self.policy, self.score, self._memory = POLICY_CODES[policy], <score_function> score, []
        self.slot_reuse_time = <float *> keep(self._memory, np.zeros(slots.num_slots, np.float32))
        self.slot_layer = <int32_t *> keep(self._memory, np.zeros(slots.num_slots, np.int32))
        self.block_best = <float *> keep(self._memory, np.zeros(slots.num_slots // BLOCK_SLOTS + 1, np.float32))

    def __reduce__(self):
        refuse_copy(self)

    cdef int assign(self, int32_t slot, int32_t gid, Plan plan) except -1 nogil:
        """Give a slot to an expert, and rank it."""
        self.slots.assign(slot, gid, plan)
        self._rank(slot, gid)
        return 0

    cdef int place(self, int32_t slot, int32_t gid) except -1:
        """Enter an expert whose bytes were put into a vacant slot by other means, and rank it."""
        self.slots.place(slot, gid)
        self._rank(slot, gid)
        return 0

    cdef void refresh_layer(self, int32_t layer) noexcept nogil:
        # The estimates of a layer have changed.
        cdef int32_t gid
        for gid in range(self.slots.layout.offset[layer], self.slots.layout.offset[layer + 1]):
            if self.slots.slot_of[gid] >= 0:
                self.slot_reuse_time[self.slots.slot_of[gid]] = self.estimates.reuse_time[gid]

    cdef double _score(self, int32_t gid, int32_t now) noexcept nogil:
        # The larger, the sooner it is evicted. Ties go to the longer unused, then to the lower slot.
        cdef int32_t layer = self.slots.layout.layer_of[gid]
        if self.policy == EXPECTED_NEXT_USE or self.policy == COUNTS:
            return self.lateness(gid, now)
        if self.policy == LRU:
            return 0.0
        if self.policy == LFU:
            return -<double> self.estimates.frequency[gid]
        if self.policy == MOE_INFINITY:
            return -(self._ratio(gid, layer) + 1e-6) * (1.0 - <double> layer / self.slots.layout.num_layers)
        if self.policy == BELADY:
            return self.estimates.next_use[gid]
        return self._user_score(gid, layer, now)

    cdef double _user_score(self, int32_t gid, int32_t layer, int32_t now) noexcept nogil:
        cdef double[NUM_FEATURES] x
        x[LAYER], x[NOW], x[NUM_LAYERS] = layer, now, self.estimates.layout.num_layers
        x[DISTANCE] = self.estimates.layout.distance(layer, now)
        x[AGE], x[FREQUENCY] = self.estimates.clock - self.estimates.last[gid], self.estimates.frequency[gid]
        x[PRIOR], x[PROBABILITY] = self.estimates.prior[gid], self.estimates.use[gid]
        x[REQUEST_FREQUENCY], x[FAST], x[SLOW], x[MATCHED] = 0, self.estimates.prior[gid], self.estimates.prior[gid], 0
        if self.current is not None and not self.current.match.scanning:
            x[REQUEST_FREQUENCY] = self.current.match.count_of(gid)
            x[FAST], x[SLOW] = self.current.fast[gid], self.current.slow[gid]
            x[MATCHED] = self.current.match.ratio(gid, layer)
        return self.score(x)

    cdef double _ratio(self, int32_t gid, int32_t layer) noexcept nogil:
        if self.current is None:
            return self.estimates.prior[gid]
        if self.current.match.scanning:   # another thread's, whose matches are torn now: as where nothing matches
            return 0
        return self.current.match.ratio(gid, layer)

    cdef int32_t find_victims(self, int32_t group, int32_t wanted, int32_t now, bint speculative) noexcept nogil:
        """Up to `wanted` slots into `found`, first choice first; returns how many. Unused prefetches are touched only when asked
        for."""
        # By expected next use, blocks of slots are taken by the best score in each, until none can hold a better one than
        # those found.
        cdef int32_t begin = self.slots.begin[group], end = self.slots.begin[group + 1], at, b, best, blocks
        self.found.clear(wanted)
        if wanted == 0 or begin == end:
            return 0
        if self.policy != EXPECTED_NEXT_USE and self.policy != COUNTS:
            self.offer_slots(begin, end, now, speculative)
            return self.found.size
        blocks = <int32_t> moe_latest(self.block_best, &self.slot_reuse_time[begin], &self.slot_layer[begin], end - begin, now,
                                      self.slots.layout.num_layers)
        while True:
            best = 0
            for b in range(1, blocks):
                if self.block_best[b] > self.block_best[best]:
                    best = b
            if self.block_best[best] < 0 or (
                    self.found.size == wanted and self.block_best[best] < nearly(self.found.scores[wanted - 1])):
                return self.found.size
            self.block_best[best] = -1
            at = begin + best * BLOCK_SLOTS
            self.offer_slots(at, min(at + BLOCK_SLOTS, end), now, speculative)

    cdef void offer_slots(self, int32_t begin, int32_t end, int32_t now, bint speculative) noexcept nogil:
        """Those of the slots `begin` to `end` that may be evicted, to `found`."""
        cdef int32_t slot, gid
        for slot in range(begin, end):
            gid = self.slots.occupant[slot]
            if gid < 0 or self.slots.pins[slot]:
                continue
            if not speculative and (self.slots.speculative[slot] or self.slots.shielded_until[gid] > self.slots.steps):
                continue
            self.found.offer(slot, self._score(gid, now), self.estimates.last[gid])

    cdef int32_t claim(self, int32_t group, int32_t wanted, int32_t now) noexcept nogil:
        """Slots for demanded experts into `found`, vacant ones first; returns how many there are."""
        cdef int32_t vacant = min(self.slots.vacant_count[group], wanted), n, i
        n = self.find_victims(group, wanted - vacant, now, False) if wanted > vacant else 0
        if n < wanted - vacant:
            n = self.find_victims(group, wanted - vacant, now, True)
        for i in range(n - 1, -1, -1):
            self.found.slots[vacant + i] = self.found.slots[i]
        for i in range(vacant):
            self.found.slots[i] = self.slots.pop_vacant(group)
        return vacant + n

    def victims(self, int32_t group, int32_t wanted, int32_t layer):
        """list of int: up to `wanted` slots of a shape group that a step of `layer` would evict now, the first choice first.

        Raises
        ------
        ValueError
            A number is out of range.
        """
        cdef SlotTable slots = self.slots
        if not 0 <= group < slots.num_groups or not 0 <= layer < slots.layout.num_layers or wanted < 0:
            raise ValueError(f"shape group {group}, layer {layer}, {wanted} wanted: expected a group below {slots.num_groups}, a "
                             f"layer below {slots.layout.num_layers}, and no negative number")
        cdef int32_t n = self.find_victims(group, min(wanted, slots.capacity_of(group)), layer, False), i
        return [self.found.slots[i] for i in range(n)]

    def retained(self, int32_t group, int32_t count, int32_t layer):
        """int32 array: the slots of up to `count` complete, unpinned experts of a shape group, the most wanted first, as of a
        step of `layer`.

        Those that were prefetched, or that a coming layer likely uses, go before the others, which come in the order in
        which they would be evicted last.
        """
        cdef SlotTable slots = self.slots
        cdef int32_t begin = slots.begin[group], end = slots.begin[group + 1], i, slot
        self.found.clear(end - begin)
        self.offer_slots(begin, end, layer, True)
        order = [self.found.slots[i] for i in range(self.found.size - 1, -1, -1)]
        order = [slot for slot in order if slots.is_complete(slot)]
        order.sort(key=lambda slot: not (slots.speculative[slot] or slots.shielded_until[slots.occupant[slot]] > slots.steps))
        return np.array(order[:count], np.int32)
