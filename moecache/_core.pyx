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
from libc.stdint cimport int8_t, int16_t, int32_t, int64_t, uint8_t, uint16_t, uint32_t, uint64_t, uintptr_t
from libc.stdlib cimport calloc, free, malloc, realloc
from libc.string cimport memcpy, memmove, memset

from moecache.errors import ClosedError, LeaseError, RoutingError, refuse_copy

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
    #include <unistd.h>
    #define moe_load_acquire(p) __atomic_load_n((p), __ATOMIC_ACQUIRE)
    /* A sequence of events that threads wait for without the GIL. Who announces one holds the GIL. */
    typedef struct { pthread_mutex_t lock; pthread_cond_t changed; int64_t number; int32_t waiters; pid_t pid; } moe_events;
    static void moe_events_init(moe_events *e) {
        pthread_condattr_t attr;
        pthread_condattr_init(&attr);
        pthread_condattr_setclock(&attr, CLOCK_MONOTONIC);
        pthread_mutex_init(&e->lock, NULL);
        pthread_cond_init(&e->changed, &attr);
        pthread_condattr_destroy(&attr);
        e->number = 0; e->waiters = 0; e->pid = getpid();
    }
    static void moe_events_destroy(moe_events *e) {
        if (e->pid != getpid()) return;   /* a forked copy: its lock may be held by a thread that is not here */
        pthread_cond_destroy(&e->changed);
        pthread_mutex_destroy(&e->lock);
    }
    static void moe_events_announce(moe_events *e) {
        __atomic_add_fetch(&e->number, 1, __ATOMIC_RELEASE);
        if (e->waiters == 0 || e->pid != getpid()) return;
        pthread_mutex_lock(&e->lock);     /* a waiter is past its look at the number, or asleep */
        pthread_cond_broadcast(&e->changed);
        pthread_mutex_unlock(&e->lock);
    }
    static int64_t moe_events_number(moe_events *e) { return __atomic_load_n(&e->number, __ATOMIC_ACQUIRE); }
    static void moe_events_await(moe_events *e, int64_t seen, int64_t deadline_ns) {
        struct timespec t = {deadline_ns / 1000000000, deadline_ns % 1000000000};
        pthread_mutex_lock(&e->lock);
        while (moe_events_number(e) == seen && pthread_cond_timedwait(&e->changed, &e->lock, &t) == 0) {}
        pthread_mutex_unlock(&e->lock);
    }
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
    ctypedef struct moe_events:
        int32_t waiters
    void moe_events_init(moe_events *) nogil
    void moe_events_destroy(moe_events *) nogil
    void moe_events_announce(moe_events *) nogil
    int64_t moe_events_number(moe_events *) nogil
    void moe_events_await(moe_events *, int64_t, int64_t) nogil

cdef extern from "pythread.h" nogil:
    unsigned long PyThread_get_thread_ident()

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

cdef enum:
    # A slot's generation from which on the cache is rebuilt before its number runs out (2^31 - 1).
    WORN = 0x7f000000


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
    cdef int32_t at_layer             # of the last step
    cdef void *open_steps             # the list of steps that are open, the newest first; borrowed references
    cdef moe_events events            # a step ended, a call of route() returned, the core was frozen, thawed or closed
    cdef readonly bint frozen         # no step begins but in a thread that has one open
    cdef readonly bint closed         # nothing begins any more
    cdef readonly bint worn           # a slot's generation nears the end of its numbers
    cdef readonly object successor    # what took this core's place, and its requests; None: nobody has
    cdef int32_t deciding             # the tables are being changed: who drops a step now must not touch them
    cdef list abandoned               # (slot, generation) of steps that were dropped meanwhile
    cdef int64_t deciding_ns, computing_ns   # time in route(); between the first expert handed out and the lease's end
    cdef int64_t stall_ns, slot_wait_ns      # time that leases waited for bytes; for a slot
    cdef int64_t requests_ns                 # time that finished requests took until their last lease ended

    def __cinit__(self, HistoryStore store, layer_kind, slots_per_kind, complete, str policy="expected-next-use",
                  uintptr_t score=0, bint prefetch=True, int32_t top_k=0, double waste_share=0.25):
        cdef int32_t kind, slot
        moe_events_init(&self.events)
        self.abandoned = []
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

    def __dealloc__(self):
        moe_events_destroy(&self.events)

    def __reduce__(self):
        refuse_copy(self)

    # Requests

    def begin_request(self):
        """Start counting a request; end it with `end_request`. None when another core has taken this one's place."""
        if self.closed:
            raise ClosedError("this cache is closed; make a new one")
        if self.successor is not None:
            return None
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
        """Take a request out of the chances of use and, with `keep`, put its activation matrix into the store.

        Its open steps end. A request that another thread is routing at this moment ends when that call does.

        Returns
        -------
        bool
            False when another core has taken this one's place, and has the request.
        """
        if self.successor is not None:
            return False
        if request not in self.requests:
            return True
        if request.busy:
            request.ending = 2 if keep else 1
            return True
        self._end_steps(request)
        self.deciding += 1
        try:
            self._end_request(request, keep)
        finally:
            self._decided()
        return True

    cdef int _end_request(self, RequestState request, bint keep) except -1:
        self.requests.remove(request)
        self.requests_ns += request.last_ns - request.begun_ns
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
        return 0

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

    cdef inline int _assign(self, int32_t slot, int32_t gid, Plan plan) except -1:
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
        self.worn |= self.generation[slot] >= WORN
        self.speculative[slot] = 0
        return 0

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
        if self.current is not None and not self.current.counting:
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
        if self.current.counting:   # another thread's, whose matches are torn now: as where nothing matches
            return 0
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
        Step or None
            None when another core has taken this one's place; while this one is frozen, or worn, unless this thread has a
            step open.

        Raises
        ------
        RoutingError
            The layer or an id is out of range, or another thread is routing this request. Nothing has changed.
        ClosedError
            The core is closed, or the request has ended.
        """
        cdef Step step
        cdef int64_t begun = moe_now_ns()
        if self.closed:
            raise ClosedError("this cache is closed; make a new one")
        if self.successor is not None or ((self.frozen or self.worn) and not self.held_here()):
            return None
        if not 0 <= layer < self.num_layers:
            raise RoutingError(f"layer {layer} is out of range: this cache has MoE layers 0..{self.num_layers - 1}")
        if request.busy:
            raise RoutingError(f"layer {layer}: another thread is routing this request; give each thread a request of its own")
        step = Step(layer, tokens, k, decode, self.store.experts[layer])
        self.under_way += 1
        request.busy = True
        try:
            step.read(<const char *> ids, itemsize, row_stride, column_stride, <const uint8_t *> counted, sentinel, self.store)
            self._decide(request, step)
        finally:
            request.busy = False
            self.under_way -= 1
            if self.frozen:
                moe_events_announce(&self.events)
            if request.ending:
                self._end_late(request)
        step.plan.export()
        self.deciding_ns += moe_now_ns() - begun
        return step

    cdef int _end_late(self, RequestState request) except -1:
        cdef bint keep = request.ending == 2
        request.ending = 0
        self.end_request(request, keep)
        raise ClosedError("this request was closed while another thread was routing it")

    cdef int _decide(self, RequestState request, Step step) except -1:
        request.count(step)   # may let others in; from here on nobody comes between
        self.deciding += 1
        try:
            self._observe(request, step)
            self._open(request, step)
            if step.unique:
                self._admit(step, request)
                self._serve(step)
                if step.decode:
                    self.prefetcher.plan(self, request, step)
            request.remember(step)
        finally:
            self._decided()
        return 0

    # Which steps are open

    cdef inline void _open(self, RequestState request, Step step) noexcept:
        # Before its first pin, so that a pin is never seen without its holder.
        step.core, step.request, step.thread = self, request, PyThread_get_thread_ident()
        step.previous_open, step.next_open = NULL, self.open_steps
        if self.open_steps != NULL:
            (<Step> self.open_steps).previous_open = <void *> step
        self.open_steps = <void *> step

    cdef inline void _unlist(self, Step step) noexcept:
        if step.next_open != NULL:
            (<Step> step.next_open).previous_open = step.previous_open
        if step.previous_open != NULL:
            (<Step> step.previous_open).next_open = step.next_open
        else:
            self.open_steps = step.next_open
        step.next_open = step.previous_open = NULL

    cdef inline void _let_go(self, Step step) noexcept:
        cdef int i
        step.open = False
        for i in range(step.unique):
            if step.state[i] != DEFERRED:
                self._unpin(step.slot[i], step.generation[i])
        if step.core is not None:
            self._unlist(step)
            step.request.last_ns = moe_now_ns()
            if step.handed_out_ns:
                self.computing_ns += step.request.last_ns - step.handed_out_ns - step.waited_ns
        moe_events_announce(&self.events)

    cdef void _abandoned(self, Step step) noexcept:
        # Dropped without `release`, perhaps by a garbage collection in the middle of a decision: its pins end after that.
        cdef int i
        if not self.deciding:
            self._let_go(step)
            return
        step.open = False
        self._unlist(step)
        for i in range(step.unique):
            if step.state[i] != DEFERRED:
                self.abandoned.append((step.slot[i], step.generation[i]))

    cdef inline int _decided(self) except -1:
        self.deciding -= 1
        if self.deciding == 0 and self.abandoned:
            for slot, generation in self.abandoned:
                self._unpin(slot, generation)
            self.abandoned = []
            moe_events_announce(&self.events)
        return 0

    cdef int _end_steps(self, RequestState request) except -1:
        # None: every request's.
        cdef void *at = self.open_steps
        cdef Step step
        while at != NULL:
            step = <Step> at
            at = step.next_open
            if request is None or step.request is request:
                self._let_go(step)
        return 0

    cdef bint held_here(self) noexcept:
        # Whether this thread has a step open.
        cdef void *at = self.open_steps
        cdef unsigned long here = PyThread_get_thread_ident()
        while at != NULL:
            if (<Step> at).thread == here:
                return True
            at = (<Step> at).next_open
        return False

    def open_here(self):
        """bool: whether this thread has a step open."""
        return self.held_here()

    def open_count(self):
        """int: steps that are open, of all threads, and calls of route() that have not returned."""
        cdef void *at = self.open_steps
        cdef int n = self.under_way
        while at != NULL:
            n += 1
            at = (<Step> at).next_open
        return n

    def held_elsewhere(self, Step step not None):
        """bool: whether a step of another thread pins a slot that this one could use, or is about to."""
        cdef void *at = self.open_steps
        cdef Step other
        cdef int i
        if self.under_way:
            return True
        while at != NULL:
            other = <Step> at
            at = other.next_open
            if other.thread == step.thread or self.layer_kind[other.layer] != self.layer_kind[step.layer]:
                continue
            for i in range(other.unique):
                if other.state[i] != DEFERRED and other.generation[i]:
                    return True
        return False

    def pinned_by(self, RequestState request):
        """int32 array: slots that open steps of a request pin."""
        cdef void *at = self.open_steps
        slots = []
        while at != NULL:
            if (<Step> at).request is request:
                slots += [slot for slot in (<Step> at).slot_list() if slot >= 0]
            at = (<Step> at).next_open
        return np.array(slots, np.int32)

    # Waiting, and handing over to another core

    @property
    def event(self):
        """int: number of the last event. Events are: a step ends, route() returns, freeze, thaw, close."""
        return moe_events_number(&self.events)

    def wait_event(self, int64_t seen, double seconds):
        """Wait without the GIL until an event after number `seen`, or until the time is over."""
        cdef int64_t deadline = moe_now_ns() + <int64_t> (min(max(seconds, 0.0), 60.0) * 1e9)
        self.events.waiters += 1
        with nogil:
            moe_events_await(&self.events, seen, deadline)
        self.events.waiters -= 1

    def waited(self, Step step not None, double seconds, bint for_slot):
        """Count time that a lease has waited, for bytes or for a slot."""
        cdef int64_t ns = <int64_t> (seconds * 1e9)
        cdef RequestState request = step.request
        if step.handed_out_ns:
            step.waited_ns += ns
        if for_slot:
            self.slot_wait_ns += ns
            request.slot_wait_ns += ns
        else:
            self.stall_ns += ns
            request.stall_ns += ns

    def freeze(self):
        """From here on `route` begins a step only in threads that have one open."""
        self.frozen = True

    def thaw(self):
        self.frozen = False
        moe_events_announce(&self.events)

    def close(self):
        """End all requests and their steps; nothing begins any more."""
        cdef list requests = list(self.requests)
        for request in requests:
            self.end_request(request)
        self.closed = True
        self._end_steps(None)
        moe_events_announce(&self.events)

    cdef int _observe(self, RequestState request, Step step) except -1:
        # What a step teaches, whatever the slots hold.
        cdef int i
        cdef int32_t gid
        self.current = request
        request.observe(step)
        if request.hints is not None:
            request.hints.given[step.layer] = 0
        self.clock += 1
        self.steps += 1
        self.at_layer = step.layer
        if step.layer == 0:
            self.routed_tokens += step.counted_tokens
        for i in range(step.unique):
            gid = self.layer_offset[step.layer] + step.experts[i]
            self.last[gid] = self.clock
            self.frequency[gid] += step.counted[i]
        request.outlook.look(request, step.layer, &self.prior[0], step.k)
        self._refresh_layer(step.layer)
        return 0

    cdef int _admit(self, Step step, RequestState request) except -1:
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
        request.demands += step.unique
        request.hits += step.hits
        return 0

    cdef int _join(self, Step step) except -1:
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

    cdef int _serve(self, Step step) except -1:
        # Give a slot to every missing expert, or, in a step too large for the pool, to as many as there are slots.
        cdef int32_t kind = self.layer_kind[step.layer], n, j = 0
        cdef int i
        if step.deferred == 0:
            return 0
        n = self._take_slots(kind, step.deferred, step.layer)
        while j < n:
            i = step.next_deferred(n < step.deferred + j)
            self._give(step, i, self.found.slots[j])
            j += 1
        if step.deferred:
            self.waves += 1
            step.choose_scratch()
        return 0

    cdef inline int _give(self, Step step, int i, int32_t slot) except -1:
        cdef int32_t gid = self.layer_offset[step.layer] + step.experts[i]
        self._assign(slot, gid, step.plan)
        self.pins[slot] = 1
        step.hold(i, slot, self.generation[slot])
        step.deferred -= 1
        return step.plan.fetch(gid, slot, self.generation[slot])

    def take(self, Step step):
        """Position of an expert whose bytes are there and that was not handed out yet, or -1."""
        cdef int i
        for i in range(step.first_open, step.unique):
            if step.state[i] != WAITING or not step.due(i):
                continue
            if moe_load_acquire(&self.completed[step.slot[i]]) == step.generation[i]:
                step.state[i] = TAKEN
                if step.handed_out_ns == 0:
                    step.handed_out_ns = moe_now_ns()
                return i
        return -1

    def put_back(self, Step step, int kept):
        """Experts that were taken and, as an exception came between, never handed out are to be taken again; but `kept`."""
        cdef int i
        for i in range(step.unique):
            if step.state[i] == TAKEN and i != kept:
                step.state[i] = WAITING

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
        self.deciding += 1
        try:
            step.plan.clear()
            self._join(step)
            if step.deferred and self.pins[step.slot[i]] == 1:   # no other lease reads the slot
                j = step.next_deferred(not step.in_order)
                self._give(step, j, step.slot[i])
                step.scratch[j] = 1
            step.plan.export()
        finally:
            self._decided()
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
        if not step.open:
            raise LeaseError(f"layer {step.layer}: this lease has ended")
        if step.request is not None:
            self.current = step.request   # another thread may be counting into the one of the last step
        self.deciding += 1
        try:
            step.plan.clear()
            n = 0
            for i in range(step.unique):
                if step.state[i] == DONE and step.generation[i]:
                    self._unpin(step.slot[i], step.generation[i])
                    step.generation[i] = 0
                    n += 1
            if n:
                moe_events_announce(&self.events)
            self._join(step)
            n = self._take_slots(self.layer_kind[step.layer], min(step.deferred, max(2, step.k)), step.layer)
            for j in range(n):
                i = step.next_deferred(not step.in_order)
                self._give(step, i, self.found.slots[j])
                step.scratch[i] = 1
            step.plan.export()
        finally:
            self._decided()
        return step.deferred < before

    def release(self, Step step):
        """Unpin the step's slots. Harmless when called twice."""
        if step.open:
            self._let_go(step)

    def fail(self, int32_t slot, int32_t generation):
        """The copy into a slot failed: its tenant is not resident, and the slot is free again once nobody holds it."""
        if self.generation[slot] == generation:
            self._discard(slot)

    def holders(self):
        """list of (layer, expert): experts now pinned by a lease."""
        return [self.locate(self.slot_gid[slot]) for slot in range(self.num_slots)
                if self.pins[slot] and self.slot_gid[slot] >= 0]

    def pinned(self):
        """int: slots that are pinned, with an occupant or without."""
        return int(np.count_nonzero(self.slot_pins))

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
        """int32 array: the slots of up to `count` complete, unpinned experts of a kind, the most wanted first.

        Those that were prefetched, or that a coming layer likely uses, go before the others, which come in the order in
        which they would be evicted last.
        """
        cdef int32_t begin = self.slot_begin[kind], end = self.slot_begin[kind + 1], i, slot
        self.found.clear(end - begin)
        self._offer_slots(begin, end, self.at_layer, True)
        order = [self.found.slots[i] for i in range(self.found.size - 1, -1, -1)]
        order = [slot for slot in order if self._is_complete(slot)]
        order.sort(key=lambda slot: not (self.speculative[slot] or self.wanted_until[self.slot_gid[slot]] > self.steps))
        return np.array(order[:count], np.int32)

    def forget(self, int32_t slot):
        """Take an unpinned slot from its occupant, whose bytes are about to be overwritten by other means (a resize).

        Raises
        ------
        LeaseError
            A step has it pinned.
        """
        if self.pins[slot]:
            raise LeaseError(f"slot {slot} is in use")
        self._discard(slot)

    def adopt(self, int32_t slot, int32_t gid):
        """Enter an expert whose bytes were put into a vacant slot by other means (after a resize)."""
        cdef int32_t kind = self.layer_kind[self.gid_layer[gid]], i, count = self.vacant_count[kind]
        cdef int32_t *vacant = &self.vacant[self.slot_begin[kind]]
        i = 0
        while i < count and vacant[i] != slot:
            i += 1
        if i == count or self.gid_slot[gid] >= 0:
            raise LeaseError(f"slot {slot} is not vacant, or expert {self.locate(gid)} is resident already")
        memmove(&vacant[i], &vacant[i + 1], (count - i - 1) * sizeof(int32_t))
        self.vacant_count[kind] -= 1
        self._assign(slot, gid, Plan())
        self.completed[slot] = self.generation[slot]

    def inherit(self, Core old not None, successor=None):
        """Take over another core's requests, recency, frequencies and counters; `successor` stands for this core.

        One call, so that no thread sees half of it: from its end on the old core begins nothing, `route`, `begin_request`
        and `end_request` say so, and `old.successor` leads here.

        Raises
        ------
        ClosedError
            The old core was closed meanwhile.
        LeaseError
            A step of the old core is open.
        """
        if old.closed:
            raise ClosedError("this cache is closed; make a new one")
        if old.open_steps != NULL or old.under_way:
            raise LeaseError("a step of the core to be replaced is open")
        self.requests, self.request_number, self.clock = old.requests, old.request_number, old.clock
        self.last[:] = old.last
        self.frequency[:] = old.frequency
        self.layer_demands[:], self.layer_hits[:] = old.layer_demands, old.layer_hits
        self.demands, self.hits, self.misses, self.evictions = old.demands, old.hits, old.misses, old.evictions
        self.waves, self.steps, self.finished = old.waves, old.steps, old.finished
        self.routed_tokens, self.at_layer = old.routed_tokens, old.at_layer
        self.deciding_ns, self.computing_ns, self.requests_ns = old.deciding_ns, old.computing_ns, old.requests_ns
        self.stall_ns, self.slot_wait_ns = old.stall_ns, old.slot_wait_ns
        self.wanted_until[:] = old.wanted_until
        self.prefetcher.inherit(self, old.prefetcher)
        self._refresh_prior()
        self._refresh_all()
        if successor is not None:
            old.successor, old.requests, old.current = successor, [], None
            moe_events_announce(&old.events)

    def counters(self):
        """dict of int: monotonic since the start or the last `reset_counters`."""
        cdef int64_t open_ns = self.requests_ns
        cdef RequestState request
        for request in self.requests:
            open_ns += request.last_ns - request.begun_ns
        return {"demands": self.demands, "hits": self.hits, "misses": self.misses, "evictions": self.evictions,
                "waves": self.waves, "steps": self.steps, "tokens": self.routed_tokens, "requests": self.finished,
                "deciding_ns": self.deciding_ns, "computing_ns": self.computing_ns, "stall_ns": self.stall_ns,
                "slot_wait_ns": self.slot_wait_ns, "requests_ns": open_ns,
                **self.prefetcher.counters()}

    def reset_counters(self):
        self.demands = self.hits = self.misses = self.evictions = 0
        cdef RequestState request
        cdef int64_t now = moe_now_ns()
        for request in self.requests:
            request.begun_ns = request.last_ns = now
        self.waves = self.finished = self.routed_tokens = 0
        self.deciding_ns = self.computing_ns = self.stall_ns = self.slot_wait_ns = self.requests_ns = 0
        until = np.asarray(self.wanted_until)
        until[:] = np.maximum(until - self.steps, 0)
        self.steps = 0
        self.layer_demands[:] = 0
        self.layer_hits[:] = 0
        self.prefetcher.reset_counters()


include "_replay.pxi"
