# One step, and which steps are open.

cimport cython
from libc.stdint cimport int32_t, int64_t, uint8_t, uint64_t

from moecache._decide.gil cimport GilPolicy
from moecache._decide.plan cimport Plan
from moecache._decide.slots cimport SlotTable
from moecache._decide.sync cimport moe_events

cdef enum:
    WAITING     # an expert of a step: has a slot, is to be handed out
    TAKEN       # handed out
    DONE        # computed
    DEFERRED    # without a slot yet


@cython.final
cdef class Account:
    cdef readonly int64_t number        # of the request
    cdef readonly int64_t demands       # distinct experts of its steps
    cdef readonly int64_t hits          # of them, those that were there
    cdef readonly int64_t stall_ns      # nanoseconds that its leases waited for bytes
    cdef readonly int64_t slot_wait_ns  # nanoseconds that they waited for a slot
    cdef int64_t begun_ns               # clock when it began, or the counters were reset
    cdef int64_t last_ns                # clock when its last lease ended


@cython.final
@cython.no_gc   # no reference leads back to a step; its __dealloc__ needs `owner` as it was
@cython.freelist(16)
cdef class Step:
    cdef OpenSteps owner            # where it is listed as open; None: nowhere (a replay's)
    cdef object request             # the RequestState or BatchState that routed it; None in a replay
    cdef Account account            # of that request
    cdef void *next_open            # neighbours in the list of open steps; borrowed
    cdef void *previous_open
    cdef readonly uint64_t thread   # identity of the thread that routed it
    cdef int64_t handed_out_ns      # clock when its first expert was handed out; 0: none was
    cdef int64_t waited_ns          # nanoseconds that its lease has waited since
    cdef readonly int32_t layer     # MoE layer
    cdef readonly Py_ssize_t tokens             # rows of ids
    cdef readonly Py_ssize_t counted_tokens     # of them, those that are learned from
    cdef readonly int k             # ids of a row
    cdef readonly int unique        # distinct experts, U
    cdef readonly int hits          # of them, those that were there
    cdef readonly int missing       # of them, those that were not
    cdef readonly int deferred      # of them, those without a slot yet
    cdef readonly int done          # of them, those that are computed
    cdef readonly bint decode       # counted as decode rather than prompt
    cdef readonly bint open         # its pins stand
    cdef public bint in_order       # hand out the lowest expert that is not done, as far as slots allow
    cdef readonly Plan plan         # what it wants moved
    cdef readonly object token_index    # int64 array [pairs]: token of each pair, by expert; None for one token
    cdef object _positions          # int64 array [pairs]: place among its token's top k; None: not made yet
    cdef int32_t num_experts        # experts of the layer
    cdef int first_open             # first position that is not done
    cdef bint repeats               # whether a row names an expert twice
    cdef int32_t *ids               # [tokens, k]: the router's choice, -1 for none
    cdef int32_t *experts           # [U]: the distinct ones, ascending
    cdef int32_t *start             # [U + 1]: where an expert's pairs begin
    cdef int32_t *counted           # [U]: counted tokens of an expert
    cdef int32_t *slot              # [U]: its slot
    cdef int32_t *generation        # [U]: the slot's generation when it was pinned; 0: not pinned any more
    cdef int32_t *work              # [2, U]: scratch
    cdef int64_t *position          # [k] for one token: place of its pairs among the top k
    cdef uint8_t *state             # [U]: WAITING, TAKEN, DONE or DEFERRED
    cdef uint8_t *scratch           # [U]: whether later waves pass through its slot

    cdef inline int32_t tally(self, int i) noexcept nogil:
        return self.start[i + 1] - self.start[i]

    cdef inline void pin(self, int i, int32_t slot, int32_t generation) noexcept nogil:
        # The expert at position i has a slot; whoever calls counts the pin in the slot table.
        self.slot[i], self.generation[i], self.state[i] = slot, generation, WAITING
        self.deferred -= 1

    cdef int next_deferred(self, bint busiest) noexcept nogil
    cdef bint due(self, int i) noexcept nogil
    cdef void choose_scratch(self) noexcept nogil
    cdef int unpin_done(self, SlotTable slots) noexcept nogil
    cdef void unpin_all(self, SlotTable slots) noexcept nogil
    cdef int read(self, const char *address, int itemsize, Py_ssize_t row_stride, Py_ssize_t column_stride,
                  const uint8_t *counted, int64_t padding, GilPolicy policy) except -1
    cdef int read_counts(self, const char *address, int itemsize, Py_ssize_t row_stride, Py_ssize_t column_stride,
                         const uint8_t *counted, int32_t *tally) except -1
    cdef Step part(self, Py_ssize_t first, Py_ssize_t rows, bint decode)
    cdef void rewind(self) noexcept nogil
    cdef int _check(self, Py_ssize_t bad, const char *address, int itemsize, Py_ssize_t row_stride,
                    Py_ssize_t column_stride) except -1
    cdef int64_t _peek(self, const char *address, int itemsize, Py_ssize_t i) noexcept nogil
    cdef Py_ssize_t _copy(self, const char *address, int itemsize, Py_ssize_t row_stride, Py_ssize_t column_stride,
                          int64_t padding) noexcept nogil
    cdef void _tally(self, int32_t *tally, const uint8_t *counted) noexcept nogil
    cdef int _group_all(self, int32_t *tally, int64_t work, GilPolicy policy) except -1
    cdef void _group(self, int32_t *tally, int64_t *token_index, int64_t *position) noexcept nogil
    cdef void _drop_uncounted(self, const uint8_t *counted) noexcept nogil


@cython.final
cdef class OpenSteps:
    cdef SlotTable slots            # whose slots the steps pin
    cdef void *newest               # the list of steps that are open, the newest first; borrowed references
    cdef int32_t deciding           # the slot table is being changed: who drops a step now must not touch it
    cdef list abandoned             # (slot, generation) of steps that were dropped meanwhile
    cdef readonly int32_t routing   # calls of route() that have not returned
    cdef readonly int64_t computing_ns  # between the first expert handed out and a step's end, less what it waited
    cdef moe_events events          # a step ended, a call of route() returned, the core was frozen, thawed or closed

    cdef void open(self, Step step, object request, Account account) noexcept
    cdef void close(self, Step step) noexcept
    cdef void drop(self, Step step) noexcept
    cdef void begin_decision(self) noexcept
    cdef int end_decision(self) except -1
    cdef int close_all(self, object request) except -1
    cdef void notify(self) noexcept nogil
    cdef void _unlist(self, Step step) noexcept
    cpdef bint here(self) noexcept
