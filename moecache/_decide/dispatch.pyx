"""Which slots the experts of a step get, and which expert is handed out next: all at once, or in waves where there are too few slots."""

import cython

from libc.stdint cimport int32_t

from moecache.errors import LeaseError, refuse_copy

from moecache._decide.evict cimport Evictor
from moecache._decide.request cimport RequestState
from moecache._decide.slots cimport SlotTable
from moecache._decide.step cimport DEFERRED, DONE, TAKEN, WAITING, OpenSteps, Step
from moecache._decide.sync cimport moe_load_acquire, moe_now_ns


@cython.final
cdef class Dispatcher:
    """Gives the experts of a step their slots and hands them out.

    Parameters
    ----------
    evictor : Evictor
    open_steps : OpenSteps
    """

    def __cinit__(self, Evictor evictor, OpenSteps open_steps):
        self.evictor, self.slots, self.open_steps = evictor, evictor.slots, open_steps

    def __reduce__(self):
        refuse_copy(self)

    cdef int admit(self, Step step) except -1:
        """Pin what is there, against the cache as it stood, so that none can be a victim of its own step."""
        cdef int i
        for i in range(step.unique):
            step.state[i] = DEFERRED
        step.deferred = step.unique
        step.hits = self._join(step)
        step.missing = step.unique - step.hits
        return 0

    cdef int _join(self, Step step) except -1:
        # Pin those of the step's experts without a slot that have one in the table, be it that another request brought them
        # since. Returns how many of them are complete.
        cdef SlotTable slots = self.slots
        cdef int i, complete = 0
        cdef int32_t gid, slot
        cdef bint there
        for i in range(step.unique):
            gid = self.slots.layout.offset[step.layer] + step.experts[i]
            slot = slots.slot_of[gid]
            if step.state[i] != DEFERRED or slot < 0:
                continue
            if slots.has_failed(slot):
                slots.discard(slot)
                continue
            there = slots.is_complete(slot)
            if not there:
                step.plan.fetch(gid, slot, slots.generation[slot])
            step.pin(i, slot, slots.generation[slot])
            slots.pins[slot] += 1
            complete += there
            slots.use_speculative(slot, there)
        return complete

    cdef int serve(self, Step step) except -1:
        """Give a slot to every missing expert, or, in a step too large for the pool, to as many as there are slots."""
        cdef int32_t n, j
        cdef int i
        if step.deferred == 0:
            return 0
        n = self.evictor.claim(self.slots.group_of[step.layer], step.deferred, step.layer)
        for j in range(n):
            i = step.next_deferred(n < step.deferred + j)
            self._give(step, i, self.evictor.found.slots[j])
        if step.deferred:
            self.waves += 1
            step.choose_scratch()
        return 0

    cdef int _give(self, Step step, int i, int32_t slot) except -1:
        cdef int32_t gid = self.slots.layout.offset[step.layer] + step.experts[i]
        self.evictor.assign(slot, gid, step.plan)
        self.slots.pins[slot] = 1
        step.pin(i, slot, self.slots.generation[slot])
        return step.plan.fetch(gid, slot, self.slots.generation[slot])

    cpdef int next_ready(self, Step step) except -2:
        """Position of an expert whose bytes are there and that was not handed out yet, or -1."""
        cdef int i
        for i in range(step.first_open, step.unique):
            if step.state[i] != WAITING or not step.due(i):
                continue
            if moe_load_acquire(&self.slots.completed[step.slot[i]]) == step.generation[i]:
                step.state[i] = TAKEN
                if step.handed_out_ns == 0:
                    step.handed_out_ns = moe_now_ns()
                return i
        return -1

    def put_back(self, Step step, int kept):
        """Experts that were handed out and, as an exception came between, never arrived are to be handed out again; but
        `kept`."""
        cdef int i
        for i in range(step.unique):
            if step.state[i] == TAKEN and i != kept:
                step.state[i] = WAITING

    cpdef bint finish(self, Step step, int i) except -1:
        """The expert at position `i` has been computed. True when `step.plan` has new fetches for a later wave.

        Raises
        ------
        LeaseError
            It was not handed out, or is done already.
        """
        cdef int j
        if not 0 <= i < step.unique or step.state[i] != TAKEN:
            raise LeaseError(f"position {i} of this step was not handed out, or is done already")
        step.state[i] = DONE
        step.done += 1
        while step.first_open < step.unique and step.state[step.first_open] == DONE:
            step.first_open += 1
        if not step.deferred or not step.scratch[i]:
            return False
        self.open_steps.begin_decision()
        try:
            step.plan.clear()
            self._join(step)
            if step.deferred and self.slots.pins[step.slot[i]] == 1:   # no other lease reads the slot
                j = step.next_deferred(not step.in_order)
                self._give(step, j, step.slot[i])
                step.scratch[j] = 1
            step.plan.export()
        finally:
            self.open_steps.end_decision()
        return not step.plan.empty

    def retry(self, Step step):
        """Look again for slots for experts without one. True when some got one; what to fetch for them is in `step.plan`.

        Called when nothing of the step is under way. The slots of what it has computed are unpinned first: a lease that waits
        for others while they wait for it would never end.

        Raises
        ------
        LeaseError
            The step has ended.
        """
        cdef int32_t n, j
        cdef int i, before = step.deferred
        if not step.deferred:
            return False
        if not step.open:
            raise LeaseError(f"layer {step.layer}: this lease has ended")
        if isinstance(step.request, RequestState):
            self.evictor.current = <RequestState> step.request   # another thread may have routed the last step
        self.open_steps.begin_decision()
        try:
            step.plan.clear()
            if step.unpin_done(self.slots):
                self.open_steps.notify()
            self._join(step)
            n = self.evictor.claim(self.slots.group_of[step.layer], min(step.deferred, max(2, step.k)), step.layer)
            for j in range(n):
                i = step.next_deferred(not step.in_order)
                self._give(step, i, self.evictor.found.slots[j])
                step.scratch[i] = 1
            step.plan.export()
        finally:
            self.open_steps.end_decision()
        return step.deferred < before
