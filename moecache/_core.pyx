# cython: language_level=3, boundscheck=False, wraparound=False, cdivision=True, initializedcheck=False
"""The room that decides: activation counts, history match, chance of use, victims, prefetches, the slot table.

No torch, no I/O, no threads. A decision keeps the GIL, which is what makes it atomic between Python threads. The long loops
before it let go of it: the copying and grouping of a long prompt's ids, which touch nothing shared, and the scan of a large
store, which reads it under a lock that writers wait for. Where taking the GIL back lasts longer than the loop itself, as
behind a busy Python thread, they keep it (`HistoryStore.release`).
"""

import cython
import numpy as np

from libc.math cimport pow, sqrt
from libc.stdint cimport int8_t, int16_t, int32_t, int64_t, uint8_t, uint16_t, uint32_t, uintptr_t
from libc.stdlib cimport calloc, free, malloc, realloc
from libc.string cimport memcpy, memmove, memset

from moecache.errors import LeaseError, RoutingError

cdef extern from "_match.h" nogil:
    ptrdiff_t moe_place(ptrdiff_t entry)
    void moe_add_columns(double *dots, const uint8_t *columns, ptrdiff_t stride, const int32_t *gids,
                         const int32_t *weights, int k, int wide, double scale, ptrdiff_t n)
    enum: BLOCK_SLOTS "MOE_LANES"
    ptrdiff_t moe_latest(float *best, const float *wait, const int32_t *layer, ptrdiff_t n, int32_t now, int32_t layers)
    ptrdiff_t moe_reaching(int32_t *entries, const double *dots, const float *inverse_norm, ptrdiff_t n, float least)
    void moe_lift(double *out, double *rarity, const int32_t *table, const int32_t *origins, const int32_t *targets,
                  int width, const int32_t *experts, int n, int k, double prior)

cdef extern from "_hazard.h" nogil:
    enum:
        INTERVALS "MOE_INTERVALS"
        FEATURES_SEEN "MOE_FEATURES"
        HORIZON "MOE_HORIZON"
    const int *moe_edge
    void moe_features(float *out, const float *slow, const float *fast, const float *prior, const double *lift,
                      const float *matched, int n)
    void moe_linear(float *z, const double *w, const float *x, int f, int n)
    void moe_hazards(float *hazard, ptrdiff_t stride, const float *x, const double *weights, const float *outside,
                     const double *trust, float *work, int n, int rows)
    void moe_follow(float *out, const float *use, const double *lift, const int32_t *table, const int32_t *origins,
                    int width, const int32_t *experts, int n, float prior, float power, float sure)
    void moe_join(float *hazard, ptrdiff_t stride, const float *other, ptrdiff_t other_stride, int n)
    void moe_wait(float *wait, const float *hazard, ptrdiff_t stride, int n, float layers)
    void moe_learn(double *w, double *A, const float *x, const uint8_t *first, int n, int low, int high, int f, double decay)

cdef extern from "_forecast.h" nogil:
    enum: MOE_PADDED
    void moe_read(float *out, const int8_t *weights, const float *scale, const float *state, int r, int n)
    void moe_add_halves(float *out, const uint16_t *weights, int n)
    void moe_write(float *kept, float *state, const float *written, const float *usual, int r, float a)
    void moe_log_ratio(float *out, const float *average, const float *prior, int n)
    void moe_add_logs(float *out, const float *logs, ptrdiff_t stride, const float *weights, int scales, int n)
    void moe_sigmoids(float *z, int n)

cdef extern from *:
    """
    #include <pthread.h>
    #include <time.h>
    #define moe_load_acquire(p) __atomic_load_n((p), __ATOMIC_ACQUIRE)
    static int64_t moe_now_ns(void) {
        struct timespec t;
        clock_gettime(CLOCK_MONOTONIC, &t);
        return t.tv_sec * (int64_t)1000000000 + t.tv_nsec;
    }
    """
    ctypedef struct pthread_rwlock_t:
        pass
    int pthread_rwlock_init(pthread_rwlock_t *, void *) nogil
    int pthread_rwlock_rdlock(pthread_rwlock_t *) nogil
    int pthread_rwlock_wrlock(pthread_rwlock_t *) nogil
    int pthread_rwlock_unlock(pthread_rwlock_t *) nogil
    int pthread_rwlock_destroy(pthread_rwlock_t *) nogil
    int32_t moe_load_acquire(int32_t *p) nogil
    int64_t moe_now_ns() nogil

# Decay per token of the two frequencies (docs/policies.md has the replay behind them).
cdef double FAST = 0.3, SLOW = 0.02
# Pseudo-observations that pull a rarely seen transition towards the expert's own frequency.
cdef float TRANSITION_PRIOR = 8.0
# Tokens' worth of pseudo-observations that pull an expert's share of all tokens to uniform.
cdef double PRIOR_TOKENS = 16.0
# Ids of one decode step that are remembered until the layer's next one, and rows of a prompt that are learned from.
cdef enum:
    MAX_SUCCESSION = 128
    LEARNED_ROWS = 512

cdef enum:
    LRU, LFU, EXPECTED_NEXT_USE, COUNTS, MOE_INFINITY, USER, BELADY

POLICY_CODES = {
    "lru": LRU, "lfu": LFU, "expected-next-use": EXPECTED_NEXT_USE, "counts": COUNTS, "moe-infinity": MOE_INFINITY,
    "user": USER, "belady": BELADY,
}

# What a user's score function is given, in this order (moecache.policy documents each).
FEATURES = ("layer", "now", "num_layers", "distance", "age", "frequency", "request_frequency", "fast", "slow", "prior",
            "probability", "matched")
ctypedef double (*score_function)(const double *) noexcept nogil

cdef enum:
    WAITING, TAKEN, DONE, DEFERRED   # an expert of a step: to come, handed out, computed, without a slot yet


cdef inline bint repeated(const int32_t *row, int j) noexcept nogil:
    cdef int i
    for i in range(j):
        if row[i] == row[j]:
            return True
    return False


cdef inline bint routed(const int32_t *row, int k) noexcept nogil:
    cdef int j
    for j in range(k):
        if row[j] >= 0:
            return True
    return False


include "_step.pxi"
include "_forecast.pxi"
include "_hazard.pxi"
include "_store.pxi"
include "_request.pxi"
include "_prefetch.pxi"


@cython.final
cdef class Core:
    """Slots, their tenants and the policy that chooses among them.

    Parameters
    ----------
    store : HistoryStore
    layer_kind : int32 array [L]
        Layers whose experts have the same shapes share a kind.
    slots_per_kind : int32 array [kinds]
        Slot numbers run through the kinds in order.
    complete : int32 array [slots]
        Written by whoever moves the bytes: the generation of the tenant whose bytes are all there, negative when its
        copy failed.
    policy : str
        A key of `POLICY_CODES`.
    score : int, optional
        Address of a ``double (const double *features)`` for policy "user"; the largest score is given up.
    prefetch : bool
    top_k : int
        Experts per token, where known, else 0.
    waste_share : float
        Prefetched for nothing at most, as a share of what steps needed moved.
    """

    cdef readonly HistoryStore store
    cdef readonly int32_t num_layers, num_gids, num_slots, num_kinds
    cdef readonly object slot_expert, slot_generation, slot_pins, complete, layer_demands, layer_hits, probability
    cdef readonly object last_use, waits
    cdef int32_t[::1] layer_kind, slot_begin, gid_layer, layer_offset, slot_gid, gid_slot, generation, pins, completed
    cdef int32_t[::1] vacant, vacant_count
    cdef uint8_t[::1] speculative
    cdef int64_t[::1] last, frequency, demands_view, hits_view, wanted_until
    cdef float[::1] slot_wait, block_best   # the first: `wait` in the order of the slots
    cdef int32_t[::1] slot_layer
    cdef float[::1] use, wait, prior
    cdef float[:, ::1] joined
    cdef double[::1] next_use
    cdef int policy
    cdef score_function score
    cdef int64_t clock, request_number
    cdef list requests
    cdef RequestState current
    cdef Candidates found
    cdef Prefetcher prefetcher
    cdef readonly int64_t demands, hits, misses, evictions, waves, steps, finished
    cdef readonly int32_t under_way   # calls of route() that have not returned
    cdef int64_t routed_tokens

    def __cinit__(self, HistoryStore store, layer_kind, slots_per_kind, complete, str policy="expected-next-use",
                  uintptr_t score=0, bint prefetch=True, int32_t top_k=0, double waste_share=0.25):
        cdef int32_t kind, slot
        self.store = store
        self.num_layers, self.num_gids = store.num_layers, store.num_gids
        self.layer_offset = store.layer_offset
        self.layer_kind = np.ascontiguousarray(layer_kind, np.int32)
        slots = np.ascontiguousarray(slots_per_kind, np.int32)
        self.num_kinds, self.num_slots = len(slots), int(slots.sum())
        self.slot_begin = np.concatenate([[0], np.cumsum(slots)]).astype(np.int32)
        self.gid_layer = np.repeat(np.arange(self.num_layers, dtype=np.int32), store.num_experts)
        self.complete = complete
        self.completed = complete
        self.slot_expert = np.full(self.num_slots, -1, np.int32)
        self.slot_generation = np.zeros(self.num_slots, np.int32)
        self.slot_pins = np.zeros(self.num_slots, np.int32)
        self.slot_gid, self.generation, self.pins = self.slot_expert, self.slot_generation, self.slot_pins
        self.gid_slot = np.full(self.num_gids, -1, np.int32)
        self.speculative = np.zeros(self.num_slots, np.uint8)
        self.vacant = np.zeros(self.num_slots, np.int32)
        self.vacant_count = np.zeros(self.num_kinds, np.int32)
        for kind in range(self.num_kinds):
            for slot in range(self.slot_begin[kind + 1] - 1, self.slot_begin[kind] - 1, -1):
                self._vacate(slot)
        self.last_use = np.full(self.num_gids, -1, np.int64)
        self.last = self.last_use
        self.frequency = np.zeros(self.num_gids, np.int64)
        self.layer_demands, self.layer_hits = np.zeros(self.num_layers, np.int64), np.zeros(self.num_layers, np.int64)
        self.demands_view, self.hits_view = self.layer_demands, self.layer_hits
        self.probability = np.zeros(self.num_gids, np.float32)
        self.use = self.probability
        self.waits = np.zeros(self.num_gids, np.float32)
        self.wait = self.waits
        self.slot_wait = np.zeros(self.num_slots, np.float32)
        self.slot_layer = np.zeros(self.num_slots, np.int32)
        self.block_best = np.zeros(self.num_slots // BLOCK_SLOTS + 1, np.float32)
        self.prior = np.zeros(self.num_gids, np.float32)
        self.joined = np.zeros((INTERVALS, int(store.num_experts.max())), np.float32)
        self.next_use = np.zeros(self.num_gids, np.float64)
        if policy not in POLICY_CODES or (policy == "user") != (score != 0):
            raise ValueError(f"policy {policy!r} with score address {score}")
        self.policy = POLICY_CODES[policy]
        self.score = <score_function> score
        self.requests = []
        self.found = Candidates(self.num_slots)
        self.wanted_until = np.zeros(self.num_gids, np.int64)
        self.prefetcher = Prefetcher(top_k, prefetch and policy != "belady", int(store.num_experts.max()), waste_share)
        self._refresh_prior()

    # Requests

    def begin_request(self):
        """Start counting a request; end it with `end_request`."""
        cdef RequestState request = RequestState(self.store, self.request_number)
        self.request_number += 1
        request.start(&self.prior[0])
        if self.policy == EXPECTED_NEXT_USE and self.store.forecaster is not None:
            request.believe(self.store.forecaster)
        self.requests.append(request)
        self.store.active.append(request)
        self._look_all(request)
        self._refresh_all()
        return request

    def end_request(self, RequestState request, bint keep=True):
        """Take a request out of the chances of use and, with `keep`, put its activation matrix into the store."""
        if request not in self.requests:
            return
        self.requests.remove(request)
        self.store.active.remove(request)
        request.outlook.finish()
        self.prefetcher.forget(self, request.number)
        if self.current is request:
            self.current = None
        if keep:
            tokens = request.prompt_tokens + request.decode_tokens
            self.store.add(request.prompt_counts, request.decode_counts, tokens, request)
            self._refresh_prior()
        self.finished += 1
        for request in self.requests:
            self._look_all(request)
        self._refresh_all()

    def pace(self, double layer_s=0, double expert_s=0, double chunk_s=0):
        """What a clock says. Without it prefetching looks one layer ahead only.

        Parameters
        ----------
        layer_s : float
            Seconds from one step of a request to its next, less what it waited for bytes. A running median is kept.
        expert_s : float
            Seconds that the link takes for one expert.
        chunk_s : float
            Seconds for which a copy under way can hold up one that is wanted more.
        """
        self.prefetcher.pace(layer_s, expert_s, chunk_s)

    def hint(self, RequestState request, int32_t layer, const float[::1] chances):
        """Believe these chances (in 0..1) of a request's next visit to a layer, until it comes.

        Raises
        ------
        RoutingError
            The layer is out of range, the length is not its number of experts, or a number is no chance. Nothing has
            changed.
        """
        cdef int32_t e
        if not 0 <= layer < self.num_layers:
            raise RoutingError(f"layer {layer} is out of range: this cache has MoE layers 0..{self.num_layers - 1}")
        if chances.shape[0] != self.store.experts[layer]:
            raise RoutingError(f"layer {layer}: {chances.shape[0]} chances; expected one for each of its "
                               f"{self.store.experts[layer]} experts")
        for e in range(chances.shape[0]):
            if not 0 <= chances[e] <= 1:   # NaN compares false
                raise RoutingError(f"layer {layer}: the chance of expert {e} is {chances[e]}; expected 0 to 1")
        if request.hints is None:
            request.hints = Hints(self.store)
        request.hints.give(layer, self.layer_offset[layer], chances)

    def end_requests(self):
        """End every request that is still open."""
        for request in list(self.requests):
            self.end_request(request)

    cdef void _refresh_prior(self) noexcept:
        # Share of all stored tokens that used the expert, pulled to uniform while few were seen.
        cdef int32_t layer, gid
        cdef double row, weight, seen
        for layer in range(self.num_layers):
            row = 0
            for gid in range(self.layer_offset[layer], self.layer_offset[layer + 1]):
                row += self.store.total_view[gid]
            weight = row / self.store.tokens if self.store.tokens and row else max(self.prefetcher.top_k, 1)
            for gid in range(self.layer_offset[layer], self.layer_offset[layer + 1]):
                seen = self.store.total_view[gid] + PRIOR_TOKENS * weight / self.store.experts[layer]
                self.prior[gid] = min(1.0, seen / (self.store.tokens + PRIOR_TOKENS))

    cdef void _refresh_all(self) noexcept:
        cdef int32_t layer
        for layer in range(self.num_layers):
            self._refresh_layer(layer)

    cdef void _look_all(self, RequestState request) noexcept:
        cdef int32_t layer
        for layer in range(self.num_layers):
            request.outlook.look(request, layer, &self.prior[0], request.previous_k)

    cdef void _refresh_layer(self, int32_t layer) noexcept:
        # Chance that some active request uses the expert at its layer's next visit, and how long until it is worth its
        # slot.
        cdef int32_t i, e, begin = self.layer_offset[layer], count = self.store.experts[layer]
        cdef Py_ssize_t widest = self.joined.shape[1]
        cdef RequestState request
        cdef bint first = True
        cdef const float *hazard = &self.joined[0, 0]
        cdef Py_ssize_t stride = widest
        if not self.requests:
            for e in range(count):
                for i in range(INTERVALS):
                    self.joined[i, e] = 1 - pow(1 - self.prior[begin + e], <double> (moe_edge[i + 1] - moe_edge[i]))
        elif len(self.requests) == 1:
            request = self.requests[0]
            hazard, stride = &request.outlook.hazard[0, begin], self.num_gids
        else:
            for request in self.requests:
                if first:
                    for i in range(INTERVALS):
                        memcpy(&self.joined[i, 0], &request.outlook.hazard[i, begin], count * sizeof(float))
                else:
                    moe_join(&self.joined[0, 0], widest, &request.outlook.hazard[0, begin], self.num_gids, count)
                first = False
        memcpy(&self.use[begin], hazard, count * sizeof(float))
        moe_wait(&self.wait[begin], hazard, stride, count, self.num_layers)
        self._place_waits(layer)

    cdef void _place_waits(self, int32_t layer) noexcept nogil:
        cdef int32_t gid
        for gid in range(self.layer_offset[layer], self.layer_offset[layer + 1]):
            if self.gid_slot[gid] >= 0:
                self.slot_wait[self.gid_slot[gid]] = self.wait[gid]

    # The slot table

    cdef inline void _vacate(self, int32_t slot) noexcept nogil:
        cdef int32_t kind = 0
        while slot >= self.slot_begin[kind + 1]:
            kind += 1
        self.slot_gid[slot] = -1
        self.speculative[slot] = 0
        self.vacant[self.slot_begin[kind] + self.vacant_count[kind]] = slot
        self.vacant_count[kind] += 1

    cdef inline bint _is_complete(self, int32_t slot) noexcept nogil:
        return moe_load_acquire(&self.completed[slot]) == self.generation[slot]

    cdef inline void _assign(self, int32_t slot, int32_t gid, Plan plan) noexcept:
        cdef int32_t old = self.slot_gid[slot]
        cdef bint landed = self._is_complete(slot)
        if old >= 0:
            self.gid_slot[old] = -1
            if landed:
                self.evictions += 1
            else:
                plan.drop(slot, self.generation[slot])
        if self.speculative[slot]:
            self.prefetcher.lost(slot, landed)
        self.slot_gid[slot] = gid
        self.slot_wait[slot], self.slot_layer[slot] = self.wait[gid], self.gid_layer[gid]
        self.gid_slot[gid] = slot
        self.generation[slot] += 1
        self.speculative[slot] = 0

    cdef void _discard(self, int32_t slot) noexcept nogil:
        # The tenant's bytes never came: forget it. Holders of a pin give the slot back when they let go.
        if self.slot_gid[slot] >= 0:
            if self.speculative[slot]:
                self.speculative[slot] = 0
                self.prefetcher.lost(slot, False)
            self.gid_slot[self.slot_gid[slot]] = -1
            self.slot_gid[slot] = -1
            if self.pins[slot] == 0:
                self._vacate(slot)

    cdef inline void _unpin(self, int32_t slot, int32_t generation) noexcept nogil:
        if self.generation[slot] == generation and self.pins[slot] > 0:
            self.pins[slot] -= 1
            if self.pins[slot] == 0 and self.slot_gid[slot] < 0:
                self._vacate(slot)

    cdef double _score(self, int32_t gid, int32_t now) noexcept nogil:
        # The larger, the sooner it is given up. Ties go to the longer unused, then to the lower slot.
        cdef int32_t layer = self.gid_layer[gid]
        cdef double[12] x
        if self.policy == EXPECTED_NEXT_USE or self.policy == COUNTS:
            return self._lateness(gid, now)
        if self.policy == LRU:
            return 0.0
        if self.policy == LFU:
            return -<double> self.frequency[gid]
        if self.policy == MOE_INFINITY:
            return -(self._ratio(gid, layer) + 1e-6) * (1.0 - <double> layer / self.num_layers)
        if self.policy == BELADY:
            return self.next_use[gid]
        x[0], x[1], x[2], x[3] = layer, now, self.num_layers, self._distance(layer, now)
        x[4], x[5] = self.clock - self.last[gid], self.frequency[gid]
        x[6], x[7], x[8], x[11] = 0, self.prior[gid], self.prior[gid], 0
        if self.current is not None:
            x[6] = self.current.prompt[gid] + self.current.decode[gid]
            x[7], x[8] = self.current.fast[gid], self.current.slow[gid]
            x[11] = self.current.ratio(gid, layer)
        x[9], x[10] = self.prior[gid], self.use[gid]
        return self.score(x)

    cdef inline int32_t _distance(self, int32_t layer, int32_t now) noexcept nogil:
        # Layer steps from `now` to the next visit of `layer`, 1..L.
        return layer - now if layer > now else layer - now + self.num_layers

    cdef inline double _lateness(self, int32_t gid, int32_t now) noexcept nogil:
        # Expected next use in layer steps from now.
        return self.wait[gid] + self._distance(self.gid_layer[gid], now)

    cdef inline double _ratio(self, int32_t gid, int32_t layer) noexcept nogil:
        if self.current is None:
            return self.prior[gid]
        return self.current.ratio(gid, layer)

    cdef int32_t _find_victims(self, int32_t kind, int32_t wanted, int32_t now, bint speculative) noexcept nogil:
        # Fills self.found with up to `wanted` slots, first choice first. Unused prefetches are touched only when asked
        # for. By expected next use, blocks of slots are taken by the best score in each, until none can hold a better one
        # than those found.
        cdef int32_t begin = self.slot_begin[kind], end = self.slot_begin[kind + 1], at, b, best, blocks
        self.found.clear(wanted)
        if wanted == 0 or begin == end:
            return 0
        if self.policy != EXPECTED_NEXT_USE and self.policy != COUNTS:
            self._offer_slots(begin, end, now, speculative)
            return self.found.size
        blocks = <int32_t> moe_latest(&self.block_best[0], &self.slot_wait[begin], &self.slot_layer[begin], end - begin,
                                      now, self.num_layers)
        while True:
            best = 0
            for b in range(1, blocks):
                if self.block_best[b] > self.block_best[best]:
                    best = b
            if self.block_best[best] < 0 or (
                    self.found.size == wanted and self.block_best[best] < self.found.scores[wanted - 1] * NEARLY):
                return self.found.size
            self.block_best[best] = -1
            at = begin + best * BLOCK_SLOTS
            self._offer_slots(at, min(at + BLOCK_SLOTS, end), now, speculative)

    cdef void _offer_slots(self, int32_t begin, int32_t end, int32_t now, bint speculative) noexcept nogil:
        cdef int32_t slot, gid
        for slot in range(begin, end):
            gid = self.slot_gid[slot]
            if gid < 0 or self.pins[slot]:
                continue
            if not speculative and (self.speculative[slot] or self.wanted_until[gid] > self.steps):
                continue
            self.found.offer(slot, self._score(gid, now), self.last[gid])

    cdef int32_t _take_slots(self, int32_t kind, int32_t wanted, int32_t now) noexcept nogil:
        # Slots for demanded experts, vacant ones first; returns how many there are, in self.found.slots.
        cdef int32_t vacant = min(self.vacant_count[kind], wanted), n, i
        n = self._find_victims(kind, wanted - vacant, now, False) if wanted > vacant else 0
        if n < wanted - vacant:
            n = self._find_victims(kind, wanted - vacant, now, True)
        for i in range(n - 1, -1, -1):
            self.found.slots[vacant + i] = self.found.slots[i]
        for i in range(vacant):
            self.vacant_count[kind] -= 1
            self.found.slots[i] = self.vacant[self.slot_begin[kind] + self.vacant_count[kind]]
        return vacant + n

    # One step

    def route(self, RequestState request, int32_t layer, uintptr_t ids, int itemsize, Py_ssize_t tokens, int k,
              Py_ssize_t row_stride, Py_ssize_t column_stride, bint decode, uintptr_t counted=0, int64_t sentinel=-1):
        """Count a step, judge it against the cache as it stands, and plan what to move.

        Parameters
        ----------
        request : RequestState
        layer : int
        ids : int
            Address of the router's choice, ``[tokens, k]``; -1 and `sentinel` are padding.
        itemsize : int
            Bytes of an id: 8, 4, 2, 1 signed; -1 for uint8.
        row_stride, column_stride : int
            In elements.
        decode : bool
            Count as decode rather than prompt.
        counted : int
            Address of a bool per token, or 0: rows that are computed but not counted.

        Returns
        -------
        Step

        Raises
        ------
        RoutingError
            The layer or an id is out of range. Nothing has changed.
        """
        cdef Step step
        if not 0 <= layer < self.num_layers:
            raise RoutingError(f"layer {layer} is out of range: this cache has MoE layers 0..{self.num_layers - 1}")
        step = Step(layer, tokens, k, decode, self.store.experts[layer])
        self.under_way += 1
        try:
            step.read(<const char *> ids, itemsize, row_stride, column_stride, <const uint8_t *> counted, sentinel, self.store)
            self._decide(request, step)
        finally:
            self.under_way -= 1
        step.plan.export()
        return step

    cdef int _decide(self, RequestState request, Step step) except -1:
        request.count(step)   # may let others in; from here on nobody comes between
        self._observe(request, step)
        if step.unique:
            self._admit(step, request)
            self._serve(step)
            if step.decode:
                self.prefetcher.plan(self, request, step)
        request.remember(step)
        return 0

    cdef void _observe(self, RequestState request, Step step) noexcept:
        # What a step teaches, whatever the slots hold.
        cdef int i
        cdef int32_t gid
        self.current = request
        request.observe(step)
        if request.hints is not None:
            request.hints.given[step.layer] = 0
        self.clock += 1
        self.steps += 1
        if step.layer == 0:
            self.routed_tokens += step.counted_tokens
        for i in range(step.unique):
            gid = self.layer_offset[step.layer] + step.experts[i]
            self.last[gid] = self.clock
            self.frequency[gid] += step.counted[i]
        request.outlook.look(request, step.layer, &self.prior[0], step.k)
        self._refresh_layer(step.layer)

    cdef void _admit(self, Step step, RequestState request) noexcept:
        # Classify every expert against the cache as it stood, and pin those already there so that none can be a victim
        # of its own step.
        cdef int i
        for i in range(step.unique):
            step.state[i] = DEFERRED
        step.deferred = step.unique
        step.hits = self._join(step)
        self.prefetcher.settle(self, request.number, step)
        self.demands += step.unique
        self.hits += step.hits
        self.misses += step.unique - step.hits
        step.missing = step.unique - step.hits
        self.prefetcher.needed(step.missing)
        self.demands_view[step.layer] += step.unique
        self.hits_view[step.layer] += step.hits

    cdef int _join(self, Step step) noexcept:
        # Hold those of the step's experts without a slot that have one in the table, be it that another request brought
        # them since.
        # Returns how many of them are complete.
        cdef int i, complete = 0
        cdef int32_t gid, slot
        cdef bint there
        for i in range(step.unique):
            gid = self.layer_offset[step.layer] + step.experts[i]
            slot = self.gid_slot[gid]
            if step.state[i] != DEFERRED or slot < 0:
                continue
            if moe_load_acquire(&self.completed[slot]) == -self.generation[slot]:
                self._discard(slot)
                continue
            step.hold(i, slot, self.generation[slot])
            step.deferred -= 1
            self.pins[slot] += 1
            there = self._is_complete(slot)
            if there:
                complete += 1
            else:
                step.plan.fetch(gid, slot, self.generation[slot])
            if self.speculative[slot]:
                self.speculative[slot] = 0
                self.prefetcher.used(slot, there)
        return complete

    cdef void _serve(self, Step step) noexcept:
        # Give a slot to every missing expert, or, in a step too large for the pool, to as many as there are slots.
        cdef int32_t kind = self.layer_kind[step.layer], n, j = 0
        cdef int i
        if step.deferred == 0:
            return
        n = self._take_slots(kind, step.deferred, step.layer)
        while j < n:
            i = step.next_deferred(n < step.deferred + j)
            self._give(step, i, self.found.slots[j])
            j += 1
        if step.deferred:
            self.waves += 1
            step.choose_scratch()

    cdef inline void _give(self, Step step, int i, int32_t slot) noexcept:
        cdef int32_t gid = self.layer_offset[step.layer] + step.experts[i]
        self._assign(slot, gid, step.plan)
        self.pins[slot] = 1
        step.hold(i, slot, self.generation[slot])
        step.deferred -= 1
        step.plan.fetch(gid, slot, self.generation[slot])

    def take(self, Step step):
        """Position of an expert whose bytes are there and that was not handed out yet, or -1."""
        cdef int i
        for i in range(step.first_open, step.unique):
            if step.state[i] != WAITING or not step.due(i):
                continue
            if moe_load_acquire(&self.completed[step.slot[i]]) == step.generation[i]:
                step.state[i] = TAKEN
                return i
        return -1

    def finish(self, Step step, int i):
        """The expert at position `i` has been computed. True when `step.plan` holds new fetches for a later wave."""
        cdef int j
        if not 0 <= i < step.unique or step.state[i] != TAKEN:
            raise LeaseError(f"position {i} of this step was not handed out, or is done already")
        step.state[i] = DONE
        step.done += 1
        while step.first_open < step.unique and step.state[step.first_open] == DONE:
            step.first_open += 1
        if not step.deferred or not step.scratch[i]:
            return False
        step.plan.clear()
        self._join(step)
        if step.deferred and self.pins[step.slot[i]] == 1:   # no other lease reads the slot
            j = step.next_deferred(not step.in_order)
            self._give(step, j, step.slot[i])
            step.scratch[j] = 1
        step.plan.export()
        return not step.plan.empty

    def retry(self, Step step):
        """Look again for slots for experts without one. True when some got one; what to fetch for them is in
        `step.plan`.

        Called when nothing of the step is under way. The slots of what it has computed are let go first: a lease that
        waits for others
        while they wait for it would never end.
        """
        cdef int32_t n, j
        cdef int i, before = step.deferred
        if not step.deferred:
            return False
        step.plan.clear()
        for i in range(step.unique):
            if step.state[i] == DONE:
                self._unpin(step.slot[i], step.generation[i])
                step.generation[i] = 0
        self._join(step)
        n = self._take_slots(self.layer_kind[step.layer], min(step.deferred, max(2, step.k)), step.layer)
        for j in range(n):
            i = step.next_deferred(not step.in_order)
            self._give(step, i, self.found.slots[j])
            step.scratch[i] = 1
        step.plan.export()
        return step.deferred < before

    def release(self, Step step):
        """Unpin the step's slots. Harmless when called twice."""
        cdef int i
        if not step.open:
            return
        step.open = False
        for i in range(step.unique):
            if step.state[i] != DEFERRED:
                self._unpin(step.slot[i], step.generation[i])

    def fail(self, int32_t slot, int32_t generation):
        """The copy into a slot failed: its tenant is not resident, and the slot is free again once nobody holds it."""
        if self.generation[slot] == generation:
            self._discard(slot)

    def holders(self):
        """list of (layer, expert): experts now pinned by a lease."""
        return [self.locate(self.slot_gid[slot]) for slot in range(self.num_slots)
                if self.pins[slot] and self.slot_gid[slot] >= 0]

    def locate(self, int32_t gid):
        """(layer, expert) of a global number."""
        return int(self.gid_layer[gid]), gid - self.layer_offset[self.gid_layer[gid]]

    def resident(self):
        """int32 array: gids that have a slot now, complete or on their way."""
        return self.slot_expert[self.slot_expert >= 0]

    def victims(self, int32_t kind, int32_t wanted, int32_t layer):
        """list of int: up to `wanted` slots of a kind that a step of `layer` would give up now, the first choice first."""
        if not 0 <= kind < self.num_kinds or not 0 <= layer < self.num_layers or wanted < 0:
            raise ValueError(f"kind {kind}, layer {layer}, {wanted} wanted: expected a kind below {self.num_kinds}, a "
                             f"layer below {self.num_layers}, and no negative number")
        cdef int32_t n = self._find_victims(
            kind, min(wanted, self.slot_begin[kind + 1] - self.slot_begin[kind]), layer, False), i
        return [self.found.slots[i] for i in range(n)]

    def retained(self, int32_t kind, int32_t count):
        """int32 array: the slots of up to `count` complete, unpinned experts of a kind, those given up last."""
        slots = [slot for slot in self.victims(kind, self.num_slots, 0) if self._is_complete(slot)]
        return np.array(slots[::-1][:count], np.int32)

    def adopt(self, int32_t slot, int32_t gid):
        """Enter an expert whose bytes were put into a vacant slot by other means (after a resize)."""
        cdef int32_t kind = self.layer_kind[self.gid_layer[gid]], i
        taken = [self.vacant[self.slot_begin[kind] + i] for i in range(self.vacant_count[kind])]
        if slot not in taken or self.gid_slot[gid] >= 0:
            raise LeaseError(f"slot {slot} is not vacant, or expert {self.locate(gid)} is resident already")
        taken.remove(slot)
        for i in range(len(taken)):
            self.vacant[self.slot_begin[kind] + i] = taken[i]
        self.vacant_count[kind] -= 1
        self._assign(slot, gid, Plan())
        self.completed[slot] = self.generation[slot]

    def inherit(self, Core old):
        """Go on with another core's requests, recency, frequencies and counters (after a resize)."""
        self.requests, self.request_number, self.clock = old.requests, old.request_number, old.clock
        self.last[:] = old.last
        self.frequency[:] = old.frequency
        self.layer_demands[:], self.layer_hits[:] = old.layer_demands, old.layer_hits
        self.demands, self.hits, self.misses, self.evictions = old.demands, old.hits, old.misses, old.evictions
        self.waves, self.steps, self.finished = old.waves, old.steps, old.finished
        self.routed_tokens = old.routed_tokens
        self.prefetcher.inherit(old.prefetcher)
        self._refresh_prior()
        self._refresh_all()

    def counters(self):
        """dict of int: monotonic since the start or the last `reset_counters`."""
        return {"demands": self.demands, "hits": self.hits, "misses": self.misses, "evictions": self.evictions,
                "waves": self.waves, "steps": self.steps, "tokens": self.routed_tokens, "requests": self.finished,
                **self.prefetcher.counters()}

    def reset_counters(self):
        self.demands = self.hits = self.misses = self.evictions = 0
        self.waves = self.steps = self.finished = self.routed_tokens = 0
        self.layer_demands[:] = 0
        self.layer_hits[:] = 0
        self.prefetcher.reset_counters()


include "_replay.pxi"
