"""Whole traces played through cores, as `Core.route` would decide, with every copy landing at once or when a clock says so."""

import cython
import numpy as np

from libc.stdint cimport int16_t, int32_t, int64_t, uint8_t

from moecache._decide.core cimport Core
from moecache._decide.request cimport RequestState
from moecache._decide.step cimport WAITING, Step
from moecache.lab._clock cimport LinkClock
from moecache.lab._recall cimport Recall


@cython.final
cdef class Replay:
    """Forward passes played through cores of one policy and several capacities.

    Parameters
    ----------
    cores : list of Core
        All on the same store, none with prefetching; the first one's requests count for all.
    experts : int16 array [T, L, k]
        In the order of play; -1 is none.
    start : int64 array [F + 1]
        Rows ``start[f]:start[f + 1]`` are forward pass f.
    request : int32 array [F]
        Which request the pass belongs to.
    decode, last : uint8 array [F]
        Whether it counts as decode, and whether its request ends with it.
    counted : uint8 array [T]
    next_use : int64 array [T, L, k], optional
        For policy "belady".
    tables : int32 array [len(cores), F * L, slots], optional
        Filled with the occupants of all slots after each step (-1: vacant), for tests.
    clock : LinkClock, optional
        Gives copies and layers a duration; with one core only, which may prefetch.
    hints : float32 array [T, L, widest layer], optional
        Chances handed to the first core before each pass of one token, as somebody with a better forecast would.
    judge : Recall, optional
        Looks at what the first core expects, instead of serving anything.
    """

    cdef readonly list cores                # of Core: one policy, several capacities
    cdef readonly object demands            # int64 array [requests]: distinct experts of each request's steps
    cdef readonly object hits               # int64 array [cores, requests]: of them, those that were there
    cdef Core leader                        # the first core, whose requests and estimates count for all
    cdef const int16_t[:, :, ::1] experts   # [T, L, k]: the trace, in the order of play
    cdef const int64_t[::1] start           # [F + 1]: first row of each forward pass
    cdef const int32_t[::1] request         # [F]: request of each forward pass
    cdef const uint8_t[::1] decode          # [F]: whether it counts as decode
    cdef const uint8_t[::1] last            # [F]: whether its request ends with it
    cdef const uint8_t[::1] counted         # [T]: rows that count
    cdef const int64_t[:, :, ::1] next_use  # [T, L, k]: when an expert is used next, for policy belady
    cdef int32_t[:, :, ::1] tables          # [cores, F * L, slots]: filled with the occupants after each step
    cdef int64_t[::1] demand_view           # demands
    cdef int64_t[:, ::1] hit_view           # hits
    cdef int32_t[::1] work                  # [2 widest]: scratch
    cdef dict running                       # RequestState by number of request
    cdef bint knows_future                  # next_use is given
    cdef bint traced                        # tables are given
    cdef bint uncounted                     # some rows do not count
    cdef bint hinted                        # hints are given
    cdef const float[:, :, ::1] hints       # [T, L, widest]: chances handed to the first core before each pass of one token
    cdef LinkClock clock                    # gives copies and layers a duration; None: every copy lands at once
    cdef Recall judge                       # holds what the first core expects against what comes; None: experts are served

    def __cinit__(self, list cores, experts, start, request, decode, last, counted, next_use=None, tables=None, LinkClock clock=None,
                  Recall judge=None, hints=None):
        cdef Core core
        self.cores = cores
        self.leader = cores[0]
        for core in cores[1:]:
            core.share_estimates(self.leader)
        self.experts, self.start, self.request, self.decode, self.last, self.counted = experts, start, request, decode, last, counted
        self.uncounted = not counted.all()
        requests = int(request.max()) + 1 if len(request) else 0
        self.demands, self.hits = np.zeros(requests, np.int64), np.zeros((len(cores), requests), np.int64)
        self.demand_view, self.hit_view = self.demands, self.hits
        self.knows_future, self.traced = next_use is not None, tables is not None
        if self.knows_future:
            self.next_use = next_use
        if self.traced:
            self.tables = tables
        self.hinted = hints is not None
        if self.hinted:
            self.hints = hints
        self.work = np.zeros(2 * int(self.leader.layout.widest), np.int32)
        self.running = {}
        self.clock, self.judge = clock, judge

    def run(self, Py_ssize_t first, Py_ssize_t end):
        """Play forward passes ``first`` to ``end``."""
        cdef Py_ssize_t f
        cdef int32_t layer
        cdef RequestState request
        for f in range(first, end):
            request = self.running.get(self.request[f])
            if request is None:
                request = self.running[self.request[f]] = self.leader.begin_request()
                self._rank_followers()
            if self.clock is not None:
                self.clock.begin_pass(self.decode[f])
            for layer in range(self.leader.layout.num_layers):
                if self.hinted and self.start[f + 1] - self.start[f] == 1:
                    request.hint(layer, self.hints[self.start[f], layer, :self.leader.layout.experts[layer]])
            for layer in range(self.leader.layout.num_layers):
                self._step(request, f, layer)
            if self.last[f]:
                self.leader.end_request(self.running.pop(self.request[f]))
                self._rank_followers()

    cdef void _rank_followers(self) noexcept:
        # A request that begins or ends changes what the leader expects of all layers.
        cdef Core core
        cdef int32_t layer
        for core in self.cores[1:]:
            for layer in range(core.layout.num_layers):
                core.evictor.refresh_layer(layer)

    cdef Step _read(self, Py_ssize_t f, int32_t layer):
        # The step with its distinct experts counted, not yet judged.
        cdef Py_ssize_t row = self.start[f]
        cdef int layers = self.experts.shape[1], k = self.experts.shape[2]
        cdef const uint8_t *counted = &self.counted[row] if self.uncounted else NULL
        cdef Step step = Step(layer, self.start[f + 1] - row, k, self.decode[f], self.leader.layout.experts[layer])
        self.work[:] = 0
        step.read_counts(<const char *> &self.experts[row, layer, 0], 2, <Py_ssize_t> layers * k, 1, counted, &self.work[0])
        return step

    cdef int _step(self, RequestState request, Py_ssize_t f, int32_t layer) except -1:
        cdef int c
        cdef Core core
        cdef int32_t[::1] occupants
        cdef Step step = self._read(f, layer)
        if self.clock is not None:
            self.clock.reach_layer(self.leader)
        if step.unique == 0:
            return 0
        request.count(step)
        self.leader.observe(request, step)
        if self.judge is not None:
            self.judge.observe(self.leader, request, step, self.experts, self.start[f], f)
            return request.record(step)
        if self.knows_future:
            self._see_future(step, self.start[f])
        self.demand_view[self.request[f]] += step.unique
        for c in range(len(self.cores)):
            core = self.cores[c]
            if c:
                core.evictor.current, core.slots.steps = request, self.leader.slots.steps
                core.routed_tokens = self.leader.routed_tokens
                core.evictor.refresh_layer(layer)
                step.rewind()
                step.plan.clear()
            core.admit(step, request.account)
            core.dispatcher.serve(step)
            self.hit_view[c, self.request[f]] += step.hits
            if self.clock is None:
                land(core, step)
            else:
                if step.decode:
                    core.prefetcher.plan(request, None, step)
                self.clock.compute(core, step)
            if self.traced:
                occupants = core.slots.occupants
                self.tables[c, f * self.leader.layout.num_layers + layer, :core.slots.num_slots] = occupants
        return request.record(step)

    cdef void _see_future(self, Step step, Py_ssize_t row) noexcept:
        cdef Py_ssize_t t
        cdef int j
        cdef int32_t offset = self.leader.layout.offset[step.layer]
        for t in range(step.tokens):
            for j in range(step.k):
                if self.experts[row + t, step.layer, j] >= 0:
                    self.leader.estimates.next_use[offset + self.experts[row + t, step.layer, j]] = (
                        <double> self.next_use[row + t, step.layer, j])


cdef int land(Core core, Step step) except -1:
    # Every copy arrives, the experts are computed, the slots are unpinned.
    cdef int i
    if step.deferred:
        compute(core, step)
    for i in range(step.unique):
        if step.state[i] == WAITING:
            core.slots.completed[step.slot[i]] = step.generation[i]
    step.unpin_all(core.slots)
    return 0


cdef int compute(Core core, Step step) except -1:
    # In waves: those already there first, then one after another in the order in which their copies were asked for.
    cdef int i, n = 0
    queue = [i for i in range(step.unique) if step.state[i] == WAITING and not core.slots.is_complete(step.slot[i])]
    while step.done < step.unique:
        i = core.dispatcher.next_ready(step)
        if i < 0:
            i = queue[n]
            n += 1
            core.slots.completed[step.slot[i]] = step.generation[i]
            continue
        if core.dispatcher.finish(step, i):
            queue += [j for j in range(step.unique) if step.state[j] == WAITING and j not in queue]
    return 0
