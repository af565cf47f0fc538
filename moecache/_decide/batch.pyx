"""Requests that run together: each counts and learns from its own rows of a step that they share."""

import cython
import numpy as np

from libc.stdint cimport int32_t, int64_t

from moecache.errors import RoutingError, refuse_copy

from moecache._decide.arrays cimport keep
from moecache._decide.request cimport RequestState
from moecache._decide.slots cimport SlotTable
from moecache._decide.step cimport Account, Step


@cython.final
cdef class BatchState:
    """Steps whose rows belong to several requests.

    The cache sees one step; the activation matrices, frequencies and hazards are each request's own.

    Parameters
    ----------
    widest : int
        Experts of the layer that has most.
    number : int
        Tells it from other batches and requests of its core.
    """

    def __cinit__(self, int32_t widest, int64_t number):
        self.account, self.requests, self.parts, self._memory = Account(number), [], [], []
        self.chance = <float *> keep(self._memory, np.zeros(widest, np.float32))

    def __reduce__(self):
        refuse_copy(self)

    cdef int split(self, Step step, list requests, list rows, list decodes) except -1:
        """Give each request its rows of the step; None in a request's place: rows that nobody counts."""
        cdef Py_ssize_t first = 0, n
        cdef int i
        for i in range(len(requests)):
            n = rows[i]
            if requests[i] is not None and n:
                self.requests.append(requests[i])
                self.parts.append(step.part(first, n, decodes[i]))
            first += n
        return 0

    cdef int hold(self, list requests) except -1:
        """Keep other threads from routing this batch and its requests; raises where one does, or a request is named twice."""
        cdef RequestState request
        if self.held is not None:
            raise RoutingError("another thread is routing this batch; give each thread a batch of its own")
        self.held = []
        for request in requests:
            if request is None:
                continue
            if request.busy:
                self.let_go()
                raise RoutingError("a request of this batch is named twice, or another thread is routing it")
            request.busy = True
            self.held.append(request)
        return 0

    cdef void let_go(self) noexcept:
        cdef RequestState request
        for request in self.held:
            request.busy = False
        self.held, self.requests, self.parts = None, [], []

    cdef int count(self) except -1:
        cdef int i
        for i in range(len(self.requests)):
            (<RequestState> self.requests[i]).count(<Step> self.parts[i])
        return 0

    cdef int observe(self, const float *prior) except -1:
        cdef int i
        cdef Step part
        cdef RequestState request
        for i in range(len(self.requests)):
            request, part = self.requests[i], self.parts[i]
            request.observe(part)
            request.predict(part.layer, prior, part.k)
            if part.layer == 0 and part.decode:
                self.decode_tokens += part.counted_tokens
            elif part.layer == 0:
                self.prompt_tokens += part.counted_tokens
        return 0

    cdef int credit(self, SlotTable slots) except -1:
        """Demands and hits of each request's own experts: one that several ask for counts for each of them."""
        cdef int i, j
        cdef Step part
        cdef Account account
        cdef int32_t slot
        for i in range(len(self.requests)):
            part, account = self.parts[i], (<RequestState> self.requests[i]).account
            account.demands += part.unique
            for j in range(part.unique):
                slot = slots.slot_of[slots.layout.offset[part.layer] + part.experts[j]]
                account.hits += slot >= 0 and slots.is_complete(slot)
        return 0

    cdef int record(self) except -1:
        cdef int i
        for i in range(len(self.requests)):
            (<RequestState> self.requests[i]).record(<Step> self.parts[i])
        return 0

    cdef RequestState first(self):
        return self.requests[0] if self.requests else None
