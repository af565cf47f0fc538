"""One step: its distinct experts, who asked for them, where they are; and which steps are open."""

import cython
import numpy as np

from libc.stdint cimport int8_t, int16_t, int32_t, int64_t, uint8_t
from libc.stdlib cimport calloc, free, malloc
from libc.string cimport memcpy, memset

from moecache.errors import RoutingError, refuse_copy

from moecache._decide.arrays cimport address_of
from moecache._decide.gil cimport PAIR_WORK, GilPolicy
from moecache._decide.layout cimport repeated, routed
from moecache._decide.plan cimport Plan
from moecache._decide.slots cimport SlotTable
from moecache._decide.sync cimport (moe_events_await, moe_events_destroy, moe_events_init, moe_events_notify,
                                    moe_events_number, moe_now_ns)

cdef extern from "pythread.h" nogil:
    unsigned long PyThread_get_thread_ident()


@cython.final
cdef class Account:
    """What the steps of one request came to: demands, hits, time."""

    def __cinit__(self, int64_t number):
        self.number = number
        self.begun_ns = self.last_ns = moe_now_ns()

    def __reduce__(self):
        refuse_copy(self)


@cython.final
@cython.no_gc
@cython.freelist(16)
cdef class Step:
    """One call of one MoE layer: its distinct experts, who asked for them, and where they are.

    Positions count the distinct experts in ascending order. A step that is dropped while it is open unpins its slots by itself.
    """

    def __cinit__(self, int32_t layer, Py_ssize_t tokens, int k, bint decode, int32_t num_experts):
        cdef Py_ssize_t most = min(<Py_ssize_t> num_experts, max(tokens * k, 1))
        cdef Py_ssize_t places = k if tokens == 1 else 0
        self.layer, self.tokens, self.k, self.decode, self.num_experts = layer, tokens, k, decode, num_experts
        self.open = True
        self.plan = Plan()
        self.ids = <int32_t *> malloc(max(tokens * k, 1) * sizeof(int32_t))
        self.position = <int64_t *> malloc(places * sizeof(int64_t) + (7 * most + 1) * sizeof(int32_t) + 2 * most)
        if self.ids == NULL or self.position == NULL:
            raise MemoryError(f"no memory for a step of {tokens} tokens")
        self.experts = <int32_t *> (self.position + places)
        self.start = self.experts + most
        self.counted = self.start + most + 1
        self.slot = self.counted + most
        self.generation = self.slot + most
        self.work = self.generation + most
        self.state = <uint8_t *> (self.work + 2 * most)
        self.scratch = self.state + most

    def __dealloc__(self):
        if self.owner is not None and self.open:
            self.owner.drop(self)
        free(self.ids)
        free(self.position)

    def __reduce__(self):
        refuse_copy(self)

    cdef int next_deferred(self, bint busiest) noexcept nogil:
        cdef int i, best = -1
        for i in range(self.unique):
            if self.state[i] == DEFERRED and (best < 0 or busiest and self.tally(i) > self.tally(best)):
                best = i
        return best

    cdef bint due(self, int i) noexcept nogil:
        # In order, the lowest that is not done; where it has no slot yet, those whose slots later waves pass through.
        cdef int j
        if not self.in_order or i == self.first_open:
            return True
        if self.state[self.first_open] != DEFERRED:
            return False
        if self.scratch[i]:
            return True
        for j in range(self.first_open, self.unique):
            if self.scratch[j] and self.state[j] == WAITING:
                return False
        return True

    cdef void choose_scratch(self) noexcept nogil:
        # Later waves pass through a few slots only, those of the least busy newcomers, so that the first wave keeps the
        # rest.
        cdef int i, _, best, wanted, assigned = self.unique - self.deferred
        wanted = min(assigned, max(2, min(self.k, assigned // 2)))
        for _ in range(wanted):
            best = -1
            for i in range(self.unique):
                if self.state[i] == DEFERRED or self.scratch[i]:
                    continue
                if best < 0 or self.tally(i) < self.tally(best):
                    best = i
            self.scratch[best] = 1

    cdef int unpin_done(self, SlotTable slots) noexcept nogil:
        # Unpin what has been computed, while the step goes on; returns how many slots.
        cdef int i, n = 0
        for i in range(self.unique):
            if self.state[i] == DONE and self.generation[i]:
                slots.unpin(self.slot[i], self.generation[i])
                self.generation[i] = 0
                n += 1
        return n

    cdef void unpin_all(self, SlotTable slots) noexcept nogil:
        cdef int i
        for i in range(self.unique):
            if self.state[i] != DEFERRED:
                slots.unpin(self.slot[i], self.generation[i])

    cdef void rewind(self) noexcept nogil:
        # As right after `read`, but for its plan.
        self.hits = self.missing = self.deferred = self.done = self.first_open = 0
        memset(self.scratch, 0, self.unique)

    cdef int read(self, const char *address, int itemsize, Py_ssize_t row_stride, Py_ssize_t column_stride,
                  const uint8_t *counted, int64_t padding, GilPolicy policy) except -1:
        """Copy and check the router's ids, then group the (token, position) pairs by expert."""
        cdef Py_ssize_t bad
        cdef int64_t work = self.tokens * self.k * PAIR_WORK, begun, ended
        cdef int32_t *tally
        if policy.releases(work):
            begun = moe_now_ns()
            with nogil:
                bad = self._copy(address, itemsize, row_stride, column_stride, padding)
                ended = moe_now_ns()
            policy.took_back(begun, ended)
        else:
            bad = self._copy(address, itemsize, row_stride, column_stride, padding)
        self._check(bad, address, itemsize, row_stride, column_stride)
        tally = <int32_t *> calloc(2 * self.num_experts, sizeof(int32_t))
        if tally == NULL:
            raise MemoryError(f"no memory to count {self.num_experts} experts")
        try:
            self._tally(tally, counted)
            self._group_all(tally, work, policy)
        finally:
            free(tally)
        self._drop_uncounted(counted)
        return 0

    cdef int read_counts(self, const char *address, int itemsize, Py_ssize_t row_stride, Py_ssize_t column_stride,
                         const uint8_t *counted, int32_t *tally) except -1:
        """As `read`, but for the pairs of each expert, which a replay does not ask for; `tally` [2 experts] is all zero."""
        cdef Py_ssize_t bad = self._copy(address, itemsize, row_stride, column_stride, -1)
        self._check(bad, address, itemsize, row_stride, column_stride)
        self._tally(tally, counted)
        self._drop_uncounted(counted)
        return 0

    cdef Step part(self, Py_ssize_t first, Py_ssize_t rows, bint decode):
        """Some rows of a step that was read, for counting: without those that do not count, and without the pairs of each
        expert."""
        cdef Step part = Step(self.layer, rows, self.k, decode, self.num_experts)
        cdef int32_t *tally = <int32_t *> calloc(2 * self.num_experts, sizeof(int32_t))
        if tally == NULL:
            raise MemoryError(f"no memory to count {self.num_experts} experts")
        memcpy(part.ids, self.ids + first * self.k, rows * self.k * sizeof(int32_t))
        part._tally(tally, NULL)
        free(tally)
        part.open = False
        return part

    cdef int _check(self, Py_ssize_t bad, const char *address, int itemsize, Py_ssize_t row_stride,
                    Py_ssize_t column_stride) except -1:
        # What `_copy` has found.
        if bad < 0:
            return 0
        found = self._peek(address, itemsize, bad // self.k * row_stride + bad % self.k * column_stride)
        raise RoutingError(
            f"layer {self.layer}: expert id {found} of token {bad // self.k}, position {bad % self.k}, is out of range: "
            f"expected 0..{self.num_experts - 1}, or -1 for padding")

    cdef int64_t _peek(self, const char *address, int itemsize, Py_ssize_t i) noexcept nogil:
        if itemsize == 8:
            return (<const int64_t *> address)[i]
        if itemsize == 4:
            return (<const int32_t *> address)[i]
        if itemsize == 2:
            return (<const int16_t *> address)[i]
        if itemsize == 1:
            return (<const int8_t *> address)[i]
        return (<const uint8_t *> address)[i]

    cdef Py_ssize_t _copy(self, const char *address, int itemsize, Py_ssize_t row_stride, Py_ssize_t column_stride,
                          int64_t padding) noexcept nogil:
        # Returns the first pair out of range, or -1.
        cdef Py_ssize_t t
        cdef int j
        cdef int64_t value
        for t in range(self.tokens):
            for j in range(self.k):
                value = self._peek(address, itemsize, t * row_stride + j * column_stride)
                if value == padding:
                    value = -1
                if value < -1 or value >= self.num_experts:
                    return t * self.k + j
                self.ids[t * self.k + j] = <int32_t> value
        return -1

    cdef void _tally(self, int32_t *tally, const uint8_t *counted) noexcept nogil:
        # tally[e]: pairs; tally[num_experts + e]: counted tokens. A row that names an expert twice counts once.
        cdef Py_ssize_t t
        cdef int j, n = 0
        cdef int32_t e, total = 0
        cdef int32_t *row
        for t in range(self.tokens):
            row = self.ids + t * self.k
            if routed(row, self.k) and (counted == NULL or counted[t]):
                self.counted_tokens += 1
            for j in range(self.k):
                if row[j] >= 0:
                    tally[row[j]] += 1
                    if repeated(row, j):
                        self.repeats = True
                    elif counted == NULL or counted[t]:
                        tally[self.num_experts + row[j]] += 1
        self.start[0] = 0
        for e in range(self.num_experts):
            if tally[e]:
                self.experts[n] = e
                self.counted[n] = tally[self.num_experts + e]
                self.scratch[n] = 0
                tally[self.num_experts + e] = total   # from here on: where the expert's next pair goes
                total += tally[e]
                n += 1
                self.start[n] = total
        self.unique = n

    cdef int _group_all(self, int32_t *tally, int64_t work, GilPolicy policy) except -1:
        cdef int64_t begun, ended
        cdef int64_t *token_index
        cdef int64_t *position
        if self.tokens == 1:
            self._group(tally, NULL, self.position)
            return 0
        if not self.unique:
            return 0
        self.token_index = np.empty(self.start[self.unique], np.int64)
        self._positions = np.empty(self.start[self.unique], np.int64)
        token_index, position = <int64_t *> address_of(self.token_index), <int64_t *> address_of(self._positions)
        if policy.releases(work):
            begun = moe_now_ns()
            with nogil:
                self._group(tally, token_index, position)
                ended = moe_now_ns()
            policy.took_back(begun, ended)
        else:
            self._group(tally, token_index, position)
        return 0

    cdef void _group(self, int32_t *tally, int64_t *token_index, int64_t *position) noexcept nogil:
        # Position first, then token: the order in which torch.where lists the one-hot mask of an expert.
        cdef Py_ssize_t t
        cdef int j
        cdef int32_t e, at
        cdef int32_t *cursor = tally + self.num_experts
        for j in range(self.k):
            for t in range(self.tokens):
                e = self.ids[t * self.k + j]
                if e < 0:
                    continue
                at = cursor[e]
                cursor[e] += 1
                position[at] = j
                if token_index != NULL:
                    token_index[at] = t

    cdef void _drop_uncounted(self, const uint8_t *counted) noexcept nogil:
        # From here on the ids are what is learned from: no uncounted rows, no expert twice in a row.
        cdef Py_ssize_t t
        cdef int j
        cdef int32_t *row
        if counted == NULL and not self.repeats:
            return
        for t in range(self.tokens):
            row = self.ids + t * self.k
            for j in range(self.k - 1, -1, -1):
                if counted != NULL and not counted[t] or repeated(row, j):
                    row[j] = -1

    # What a lease reads

    def item(self, int i):
        """(expert, slot, start, end): the expert's pairs are `start` to `end` of `token_index` and `topk_position`."""
        return self.experts[i], self.slot[i], self.start[i], self.start[i + 1]

    @property
    def topk_position(self):
        """int64 array: the place among its token's top k of every pair."""
        if self._positions is None:
            # One token is the common case, and most callers never ask: made on demand.
            self._positions = np.array([self.position[i] for i in range(self.start[self.unique])], np.int64)
        return self._positions

    def expert_list(self):
        """list of int: the distinct experts, ascending."""
        return [self.experts[i] for i in range(self.unique)]

    def slot_list(self):
        """Slots in the order of `expert_list`; -1 where a later wave will give one."""
        return [self.slot[i] if self.state[i] != DEFERRED else -1 for i in range(self.unique)]

    def pending(self):
        """(positions, slots, generations): int32 arrays of the experts that have a slot and may be handed out next."""
        order = np.array([i for i in range(self.unique) if self.state[i] == WAITING and self.due(i)], np.int32)
        slots = np.array([self.slot[i] for i in order], np.int32)
        generations = np.array([self.generation[i] for i in order], np.int32)
        return order, slots, generations


@cython.final
cdef class OpenSteps:
    """The steps that are open, of all threads, and the events that those who wait for their slots wait for.

    Events are: a step ends, route() returns while the core is frozen, the core is frozen, thawed or closed.
    """

    def __cinit__(self, SlotTable slots):
        moe_events_init(&self.events)
        self.slots, self.abandoned = slots, []

    def __dealloc__(self):
        moe_events_destroy(&self.events)

    def __reduce__(self):
        refuse_copy(self)

    cdef void notify(self) noexcept nogil:
        moe_events_notify(&self.events)

    cdef void open(self, Step step, object request, Account account) noexcept:
        # Before its first pin, so that a pin is never seen without its step.
        step.owner, step.request, step.account, step.thread = self, request, account, PyThread_get_thread_ident()
        step.previous_open, step.next_open = NULL, self.newest
        if self.newest != NULL:
            (<Step> self.newest).previous_open = <void *> step
        self.newest = <void *> step

    cdef void _unlist(self, Step step) noexcept:
        if step.next_open != NULL:
            (<Step> step.next_open).previous_open = step.previous_open
        if step.previous_open != NULL:
            (<Step> step.previous_open).next_open = step.next_open
        else:
            self.newest = step.next_open
        step.next_open = step.previous_open = NULL

    cdef void close(self, Step step) noexcept:
        """Unpin the step's slots. Harmless when called twice."""
        if not step.open:
            return
        step.open = False
        step.unpin_all(self.slots)
        if step.owner is not None:
            self._unlist(step)
            step.account.last_ns = moe_now_ns()
            if step.handed_out_ns:
                self.computing_ns += step.account.last_ns - step.handed_out_ns - step.waited_ns
        self.notify()

    cdef void drop(self, Step step) noexcept:
        # Dropped without `close`, perhaps by a garbage collection in the middle of a decision: its pins end after that.
        cdef int i
        if not self.deciding:
            self.close(step)
            return
        step.open = False
        self._unlist(step)
        for i in range(step.unique):
            if step.state[i] != DEFERRED:
                self.abandoned.append((step.slot[i], step.generation[i]))

    cdef void begin_decision(self) noexcept:
        self.deciding += 1

    cdef int end_decision(self) except -1:
        self.deciding -= 1
        if self.deciding == 0 and self.abandoned:
            for slot, generation in self.abandoned:
                self.slots.unpin(slot, generation)
            self.abandoned = []
            self.notify()
        return 0

    cdef int close_all(self, object request) except -1:
        # None: every request's.
        cdef void *at = self.newest
        cdef Step step
        while at != NULL:
            step = <Step> at
            at = step.next_open
            if request is None or step.request is request:
                self.close(step)
        return 0

    # What Python asks

    @property
    def event(self):
        """int: number of the last event."""
        return moe_events_number(&self.events)

    def wait_event(self, int64_t seen, double seconds):
        """Wait without the GIL until an event after number `seen`, or until the time is over."""
        cdef int64_t deadline = moe_now_ns() + <int64_t> (min(max(seconds, 0.0), 60.0) * 1e9)
        self.events.waiters += 1
        with nogil:
            moe_events_await(&self.events, seen, deadline)
        self.events.waiters -= 1

    cpdef bint here(self) noexcept:
        """bool: whether this thread has a step open."""
        cdef void *at = self.newest
        cdef unsigned long here = PyThread_get_thread_ident()
        while at != NULL:
            if (<Step> at).thread == here:
                return True
            at = (<Step> at).next_open
        return False

    def count(self):
        """int: steps that are open, of all threads, and calls of route() that have not returned."""
        cdef void *at = self.newest
        cdef int n = self.routing
        while at != NULL:
            n += 1
            at = (<Step> at).next_open
        return n

    def pinned_elsewhere(self, Step step not None):
        """bool: whether a step of another thread pins a slot that this one could use, or is about to."""
        cdef void *at = self.newest
        cdef Step other
        cdef int i
        if self.routing:
            return True
        while at != NULL:
            other = <Step> at
            at = other.next_open
            if other.thread == step.thread or self.slots.group_of[other.layer] != self.slots.group_of[step.layer]:
                continue
            for i in range(other.unique):
                if other.state[i] != DEFERRED and other.generation[i]:
                    return True
        return False

    def pinned_by(self, routed_by):
        """int32 array: slots that open steps of a request or a batch pin."""
        cdef void *at = self.newest
        slots = []
        while at != NULL:
            if (<Step> at).request is routed_by:
                slots += [slot for slot in (<Step> at).slot_list() if slot >= 0]
            at = (<Step> at).next_open
        return np.array(slots, np.int32)
