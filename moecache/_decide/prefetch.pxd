# Which experts to fetch ahead.

cimport cython
from libc.stdint cimport int32_t, int64_t

from moecache._decide.batch cimport BatchState
from moecache._decide.evict cimport Evictor
from moecache._decide.pairs cimport PairTable
from moecache._decide.plan cimport Plan
from moecache._decide.request cimport RequestState
from moecache._decide.slots cimport PrefetchLedger, SlotTable
from moecache._decide.step cimport Step
from moecache._decide.trust cimport Trust

cdef enum:
    MAX_DEPTH = 8           # layers ahead that are looked at
    MAX_CANDIDATES = 32     # experts among which a step chooses


cdef struct Candidate:
    # An expert without a slot that a coming layer may use.
    int32_t gid         # the expert
    int32_t distance    # layer steps from now
    float chance        # that it is used


@cython.final
cdef class Prefetcher:
    cdef Evictor evictor                # finds victims, gives slots away
    cdef SlotTable slots                # the evictor's
    cdef PrefetchLedger ledger          # the slot table's
    cdef PairTable transitions          # who followed whom in the next layer
    cdef readonly Trust trust           # whether the forecaster is listened to
    cdef bint enabled                   # whether anything is fetched ahead
    cdef bint by_match                  # chances are shares of the best matching request (policy moe-infinity)
    cdef Candidate[MAX_CANDIDATES] candidate    # [num_candidates]: the likeliest first
    cdef int32_t num_candidates         # found by a step
    cdef int32_t most_candidates        # that it looks for at most
    cdef double layer_s                 # seconds from one layer step to the next, a running median; 0: not known
    cdef double expert_s                # seconds that the link takes for one expert; 0: not known
    cdef double chunk_s                 # seconds that a copy under way can hold up another
    cdef double idle                    # experts that the link moves in a layer step's time; 0: not known
    cdef double break_even              # chance from which on moving an expert ahead surely pays
    cdef double floor                   # share of useful prefetches from which on prefetching does
    cdef object _memory                 # list of arrays behind the addresses below
    cdef float *chance                  # [widest]: scratch: chances of a coming layer
    cdef double *work                   # [2, widest]: scratch

    cpdef void set_pace(self, double layer_s, double expert_s, double chunk_s) noexcept nogil
    cdef int settle(self, int64_t owner, Step step) except -1
    cdef void forget(self, int64_t owner) noexcept nogil
    cdef const float *forecast(self, RequestState request, Step step, int32_t target, int distance, const float *use) noexcept
    cdef const float *forecast_all(self, BatchState batch, int32_t target, int distance) noexcept
    cdef const float *_by_counts(self, RequestState request, Step step, int32_t target, int distance, const float *use) noexcept
    cdef void _try_forecaster(self, RequestState request, Step step, int64_t owner) noexcept
    cdef int plan(self, RequestState request, BatchState batch, Step step) except -1
    cdef void inherit(self, Prefetcher old) noexcept
    cdef int _cancel(self, int i, Plan plan) except -1 nogil
    cdef void _advance(self) noexcept nogil
    cdef bint _may(self, Step step) noexcept
    cdef int _rank(self, RequestState request, BatchState batch, Step step, int depth, float least) except -1
    cdef int _rank_layer(self, int64_t owner, Plan plan, int32_t target, int distance, float least,
                         const float *chance) except -1 nogil
    cdef void _offer(self, Candidate candidate) noexcept nogil
    cdef int _select(self, int wanted, double idle) noexcept nogil
    cdef int _queue(self, int64_t owner, Step step, int n) except -1
    cdef int _queue_group(self, int64_t owner, Step step, int n, int32_t group) except -1
    cdef int _start(self, int64_t owner, const Candidate *candidate, int32_t slot, Plan plan) except -1
