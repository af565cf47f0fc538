# What puts the parts together.

cimport cython
from libc.stdint cimport int32_t, int64_t

from moecache._decide.batch cimport BatchState
from moecache._decide.dispatch cimport Dispatcher
from moecache._decide.estimates cimport Estimates
from moecache._decide.evict cimport Evictor
from moecache._decide.history cimport HistoryStore
from moecache._decide.layout cimport Layout
from moecache._decide.prefetch cimport Prefetcher
from moecache._decide.request cimport RequestState
from moecache._decide.slots cimport SlotTable
from moecache._decide.step cimport Account, OpenSteps, Step


@cython.final
cdef class Core:
    cdef readonly HistoryStore store        # past requests
    cdef readonly Layout layout             # how experts are numbered
    cdef readonly SlotTable slots           # which expert is where
    cdef readonly Estimates estimates       # what is known of every expert
    cdef readonly Evictor evictor           # which to evict
    cdef readonly Prefetcher prefetcher     # which to fetch ahead
    cdef readonly OpenSteps open_steps      # whose slots are pinned
    cdef readonly Dispatcher dispatcher     # which slots a step's experts get, and which is handed out next
    cdef readonly object layer_demands      # int64 array [L]: distinct experts of a layer's steps
    cdef readonly object layer_hits         # int64 array [L]: of them, those that were there
    cdef readonly int64_t demands           # distinct experts of all steps
    cdef readonly int64_t hits              # of them, those that were there
    cdef readonly int64_t misses            # of them, those that were not
    cdef readonly int64_t finished          # requests that ended
    cdef readonly bint frozen               # no step begins but in a thread that has one open
    cdef readonly bint closed               # nothing begins any more
    cdef readonly object successor          # what took this core's place, and its requests; None: nobody has
    cdef list requests                      # RequestState: running, the oldest first
    cdef list batches                       # BatchState: that have begun
    cdef int64_t request_number             # of the next request or batch
    cdef int64_t routed_tokens              # counted tokens of steps at layer 0
    cdef int32_t at_layer                   # of the last step
    cdef int64_t deciding_ns                # nanoseconds in route()
    cdef int64_t stall_ns                   # nanoseconds that leases waited for bytes
    cdef int64_t slot_wait_ns               # nanoseconds that leases waited for a slot
    cdef int64_t requests_ns                # nanoseconds that finished requests and batches took until their last lease ended
    cdef int64_t *demands_of                # [L]: layer_demands
    cdef int64_t *hits_of                   # [L]: layer_hits

    cdef int observe(self, RequestState request, Step step) except -1
    cdef int admit(self, Step step, Account account) except -1
    cdef int _observe_step(self, RequestState request, Step step) except -1
    cdef list _accounts(self)
    cdef bint _waits(self) except -1
    cdef int _decide_batch(self, BatchState batch, Step step) except -1
    cdef void share_estimates(self, Core leader) noexcept
    cdef int _end_request(self, RequestState request, bint keep) except -1
    cdef int _end_late(self, RequestState request) except -1
    cdef void _refresh_layer(self, int32_t layer) noexcept
    cdef void _refresh_all(self) noexcept
    cdef void _predict_all(self, RequestState request) noexcept
    cdef int _decide(self, RequestState request, Step step) except -1
