"""Time for a replay: a link that moves experts in chunks, demands before prefetches, beside layers that take their time."""

import cython

from libc.stdint cimport int32_t, int64_t
from libc.stdlib cimport free, malloc, realloc
from libc.string cimport memmove

from moecache._decide.core cimport Core
from moecache._decide.plan cimport Plan
from moecache._decide.step cimport Step


@cython.final
cdef class LinkClock:
    """A clock that a replay moves on.

    Parameters
    ----------
    expert_nbytes, chunk_nbytes : int
    rate : float
        Bytes per second.
    latency_s : float
        Before the first byte of each expert.
    pass_s, layer_s, expert_s : float
        What a forward pass takes outside its MoE layers, a layer before it routes, and the arithmetic of one expert.
    """

    def __cinit__(self, int64_t expert_nbytes, int64_t chunk_nbytes, double rate, double latency_s, double pass_s, double layer_s,
                  double expert_s):
        self.expert_nbytes, self.chunk_nbytes, self.rate, self.latency_s = expert_nbytes, chunk_nbytes, rate, latency_s
        self.pass_s, self.layer_s, self.expert_s = pass_s, layer_s, expert_s
        self.current, self.capacity = -1, 64
        self.jobs = <Job *> malloc(self.capacity * sizeof(Job))
        if self.jobs == NULL:
            raise MemoryError("no memory for a link's queue")

    def __dealloc__(self):
        free(self.jobs)

    def finish(self):
        """End the last forward pass."""
        self.begin_pass(False)

    cdef void begin_pass(self, bint decode) noexcept nogil:
        if self.decoding:
            self.decode_s += self.now - self.began
        self.began, self.decoding = self.now, decode
        self.now += self.pass_s

    cdef void reach_layer(self, Core core) noexcept nogil:
        self.now += self.layer_s
        self._advance(core, self.now)
        # As a cache does: the time since the last step, less what it waited.
        core.prefetcher.set_pace(self.now - self.routed_at - (self.stall_s - self.stalled_then) if self.decoding else 0,
                                 self.latency_s + self.expert_nbytes / self.rate,
                                 min(self.chunk_nbytes, self.expert_nbytes) / self.rate)
        self.routed_at, self.stalled_then = self.now, self.stall_s

    cdef int compute(self, Core core, Step step) except -1:
        # The resident experts first, then each as it lands, as a lease yields them.
        cdef int i
        cdef double asked
        self._submit(step.plan)
        while step.done < step.unique:
            i = core.dispatcher.next_ready(step)
            if i >= 0:
                self.now += self.expert_s
                self._advance(core, self.now)
                if core.dispatcher.finish(step, i):
                    self._submit(step.plan)
                continue
            asked = self.now
            if not self._next_chunk(core):
                raise RuntimeError("a step waits for copies that nobody makes")
            self.now = max(asked, self.link_time)
            self.stall_s += self.now - asked
        core.release(step)
        return 0

    cdef int _submit(self, Plan plan) except -1:
        cdef int32_t i
        plan.export()
        for slot, generation in plan.drops.tolist():
            i = self._find(slot, generation)
            if i >= 0:
                self._remove(i)
        for _, slot, generation in plan.fetches.tolist():
            self._fetch(slot, generation)
        for _, slot, generation in plan.prefetches.tolist():
            self._add(slot, generation, False)
        return 0

    cdef int _fetch(self, int32_t slot, int32_t generation) except -1:
        cdef int32_t i = self._find(slot, generation)
        if i < 0:
            return self._add(slot, generation, True)
        if not self.jobs[i].demanded:
            self.bytes_joined += self.expert_nbytes - self.jobs[i].remaining + (self.chunk if self.current == i else 0)
        self.jobs[i].demanded = True
        return 0

    cdef int _add(self, int32_t slot, int32_t generation, bint demanded) except -1:
        cdef Job *grown
        if self.size == self.capacity:
            grown = <Job *> realloc(self.jobs, 2 * self.capacity * sizeof(Job))
            if grown == NULL:
                raise MemoryError("no memory for a link's queue")
            self.jobs, self.capacity = grown, 2 * self.capacity
        self.jobs[self.size] = Job(slot, generation, self.expert_nbytes, demanded, False)
        self.size += 1
        return 0

    cdef int32_t _find(self, int32_t slot, int32_t generation) noexcept nogil:
        cdef int32_t i
        for i in range(self.size):
            if self.jobs[i].slot == slot and self.jobs[i].generation == generation:
                return i
        return -1

    cdef void _remove(self, int32_t i) noexcept nogil:
        # A chunk on the wire is not called back.
        self.size -= 1
        memmove(&self.jobs[i], &self.jobs[i + 1], (self.size - i) * sizeof(Job))
        if self.current == i:
            self.current = -1
        elif self.current > i:
            self.current -= 1

    cdef bint _start_chunk(self) noexcept nogil:
        # Demands in order, then prefetches in order. False when there is nothing to move.
        cdef int32_t i, best = -1
        cdef Job *job
        for i in range(self.size):
            if best < 0 or self.jobs[i].demanded and not self.jobs[best].demanded:
                best = i
        if best < 0:
            return False
        job = &self.jobs[best]
        self.current = best
        self.chunk = min(self.chunk_nbytes, job.remaining)
        self.chunk_end = self.link_time + self.chunk / self.rate + (0 if job.started else self.latency_s)
        job.started = True
        if job.demanded:
            self.bytes_demand += self.chunk
        else:
            self.bytes_prefetch += self.chunk
        return True

    cdef void _end_chunk(self, Core core) noexcept nogil:
        cdef Job *job
        self.busy_s += self.chunk_end - self.link_time
        self.link_time, self.chunk_end = self.chunk_end, -1
        if self.current < 0:
            return
        job = &self.jobs[self.current]
        job.remaining -= self.chunk
        if job.remaining == 0:
            core.slots.completed[job.slot] = job.generation
            self._remove(self.current)
        self.current = -1

    cdef bint _next_chunk(self, Core core) noexcept nogil:
        # Let the link finish one chunk, whenever that is.
        self.link_time = self.link_time if self.chunk_end > 0 else max(self.link_time, self.now)
        if self.chunk_end <= 0 and not self._start_chunk():
            return False
        self._end_chunk(core)
        return True

    cdef void _advance(self, Core core, double until) noexcept nogil:
        # What the link does up to a moment; a chunk begun before it is finished after it.
        while True:
            if self.chunk_end > 0:
                if self.chunk_end > until:
                    return
                self._end_chunk(core)
            elif self.link_time >= until:
                return
            elif not self._start_chunk():
                self.link_time = until
                return
