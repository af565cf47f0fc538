# Included by _core.pyx: whole traces played through cores, as `Core.route` would decide, with every copy landing at once.

cdef void follow(Core core, Core leader) noexcept:
    # A core that differs from its leader only in slots reads the leader's counts and chances: one observation serves both.
    core.last, core.frequency, core.prior = leader.last, leader.frequency, leader.prior
    core.use, core.wait, core.next_use = leader.use, leader.wait, leader.next_use


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
        Filled with the tenants of all slots after each step (-1: vacant), for tests.
    """

    cdef readonly list cores
    cdef readonly object demands, hits
    cdef Core leader
    cdef const int16_t[:, :, ::1] experts
    cdef const int64_t[::1] start
    cdef const int32_t[::1] request
    cdef const uint8_t[::1] decode, last, counted
    cdef const int64_t[:, :, ::1] next_use
    cdef int32_t[:, :, ::1] tables
    cdef int64_t[::1] demand_view
    cdef int64_t[:, ::1] hit_view
    cdef int32_t[::1] work
    cdef dict running
    cdef bint knows_future, traced, uncounted

    def __cinit__(self, list cores, experts, start, request, decode, last, counted, next_use=None, tables=None):
        cdef Core core
        self.cores = cores
        self.leader = cores[0]
        for core in cores[1:]:
            follow(core, self.leader)
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
        self.work = np.zeros(2 * int(self.leader.store.num_experts.max()), np.int32)
        self.running = {}

    def run(self, Py_ssize_t first, Py_ssize_t end):
        """Play forward passes ``first`` to ``end``."""
        cdef Py_ssize_t f
        cdef int32_t layer
        cdef RequestState request
        for f in range(first, end):
            request = self.running.get(self.request[f])
            if request is None:
                request = self.running[self.request[f]] = self.leader.begin_request()
            for layer in range(self.leader.num_layers):
                self._step(request, f, layer)
            if self.last[f]:
                self.leader.end_request(self.running.pop(self.request[f]))

    cdef int _step(self, RequestState request, Py_ssize_t f, int32_t layer) except -1:
        cdef Py_ssize_t row = self.start[f]
        cdef int layers = self.experts.shape[1], k = self.experts.shape[2], c
        cdef Core core
        cdef const uint8_t *counted = &self.counted[row] if self.uncounted else NULL
        cdef Step step = Step(layer, self.start[f + 1] - row, k, self.decode[f], self.leader.store.experts[layer])
        if step._copy(<const char *> &self.experts[row, layer, 0], 2, <Py_ssize_t> layers * k, 1, -1) >= 0:
            raise RoutingError(f"forward pass {f}, layer {layer}: an expert id is out of range 0..{step.num_experts - 1}")
        self.work[:] = 0
        step._tally(&self.work[0], counted)
        if step.unique == 0:
            return 0
        step._forget_uncounted(counted)
        self.leader._observe(request, step)
        if self.knows_future:
            self._look_ahead(step, row)
        self.demand_view[self.request[f]] += step.unique
        for c in range(len(self.cores)):
            core = self.cores[c]
            if c:
                core.current, core.clock, core.steps, core.routed_tokens = request, self.leader.clock, self.leader.steps, self.leader.routed_tokens
                rewind(step)
            core._admit(step, request)
            core._serve(step)
            self.hit_view[c, self.request[f]] += step.hits
            land(core, step)
            if self.traced:
                self.tables[c, f * layers + layer, :core.num_slots] = core.slot_gid
        return request.remember(step)

    cdef void _look_ahead(self, Step step, Py_ssize_t row) noexcept:
        cdef Py_ssize_t t
        cdef int j
        cdef int32_t offset = self.leader.layer_offset[step.layer]
        for t in range(step.tokens):
            for j in range(step.k):
                if self.experts[row + t, step.layer, j] >= 0:
                    self.leader.next_use[offset + self.experts[row + t, step.layer, j]] = <double> self.next_use[row + t, step.layer, j]


cdef void rewind(Step step) noexcept:
    # The same step, for another core.
    step.hits = step.missing = step.deferred = step.done = step.first_open = 0
    memset(step.scratch, 0, step.unique)
    step.plan.clear()


cdef int land(Core core, Step step) except -1:
    # Every copy arrives, the experts are computed, the slots are let go.
    cdef int i
    if step.deferred:
        compute(core, step)
    for i in range(step.unique):
        if step.state[i] == WAITING:
            core.completed[step.slot[i]] = step.generation[i]
        core._unpin(step.slot[i], step.generation[i])
    return 0


cdef int compute(Core core, Step step) except -1:
    # In waves: those already there first, then one after another in the order in which their copies were asked for.
    cdef int i, n = 0
    queue = [i for i in range(step.unique) if step.state[i] == WAITING and not core._is_complete(step.slot[i])]
    while step.done < step.unique:
        i = core.take(step)
        if i < 0:
            i = queue[n]
            n += 1
            core.completed[step.slot[i]] = step.generation[i]
            continue
        if core.finish(step, i):
            queue += [j for j in range(step.unique) if step.state[j] == WAITING and j not in queue]
    return 0
