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
    clock : LinkClock, optional
        Gives copies and layers a duration; with one core only, which may prefetch.
    hints : float32 array [T, L, widest layer], optional
        Chances handed to the first core before each pass of one token, as somebody with a better forecast would.
    judge : Recall, optional
        Looks at what the first core expects, instead of serving anything.
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
    cdef bint knows_future, traced, uncounted, hinted
    cdef const float[:, :, ::1] hints
    cdef LinkClock clock
    cdef Recall judge

    def __cinit__(self, list cores, experts, start, request, decode, last, counted, next_use=None, tables=None, LinkClock clock=None,
                  Recall judge=None, hints=None):
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
        self.hinted = hints is not None
        if self.hinted:
            self.hints = hints
        self.work = np.zeros(2 * int(self.leader.store.num_experts.max()), np.int32)
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
                self._pass_on()
            if self.clock is not None:
                self.clock.begin_pass(self.decode[f])
            for layer in range(self.leader.num_layers):
                if self.hinted and self.start[f + 1] - self.start[f] == 1:
                    self.leader.hint(request, layer, self.hints[self.start[f], layer, :self.leader.store.experts[layer]])
            for layer in range(self.leader.num_layers):
                self._step(request, f, layer)
            if self.last[f]:
                self.leader.end_request(self.running.pop(self.request[f]))
                self._pass_on()

    cdef void _pass_on(self) noexcept:
        # Requests that begin or end change the waits of all layers.
        cdef int c
        cdef int32_t layer
        cdef Core core
        for c in range(1, len(self.cores)):
            core = self.cores[c]
            for layer in range(core.num_layers):
                core._sort_waits(layer)

    cdef Step _read(self, Py_ssize_t f, int32_t layer):
        # The step with its distinct experts counted, not yet judged.
        cdef Py_ssize_t row = self.start[f]
        cdef int layers = self.experts.shape[1], k = self.experts.shape[2]
        cdef const uint8_t *counted = &self.counted[row] if self.uncounted else NULL
        cdef Step step = Step(layer, self.start[f + 1] - row, k, self.decode[f], self.leader.store.experts[layer])
        if step._copy(<const char *> &self.experts[row, layer, 0], 2, <Py_ssize_t> layers * k, 1, -1) >= 0:
            raise RoutingError(f"forward pass {f}, layer {layer}: an expert id is out of range 0..{step.num_experts - 1}")
        self.work[:] = 0
        step._tally(&self.work[0], counted)
        step._forget_uncounted(counted)
        return step

    cdef int _step(self, RequestState request, Py_ssize_t f, int32_t layer) except -1:
        cdef int c
        cdef Core core
        cdef Step step = self._read(f, layer)
        if self.clock is not None:
            self.clock.reach_layer(self.leader)
        if step.unique == 0:
            return 0
        request.count(step)
        self.leader._observe(request, step)
        if self.judge is not None:
            self.judge.look(self.leader, request, step, self.experts, self.start[f], f)
            return request.remember(step)
        if self.knows_future:
            self._look_ahead(step, self.start[f])
        self.demand_view[self.request[f]] += step.unique
        for c in range(len(self.cores)):
            core = self.cores[c]
            if c:
                core.current, core.clock = request, self.leader.clock
                core.steps, core.routed_tokens = self.leader.steps, self.leader.routed_tokens
                core._sort_waits(layer)
                rewind(step)
            core._admit(step, request)
            core._serve(step)
            self.hit_view[c, self.request[f]] += step.hits
            if self.clock is None:
                land(core, step)
            else:
                if step.decode:
                    core.prefetcher.plan(core, request, step)
                self.clock.compute(core, step)
            if self.traced:
                self.tables[c, f * self.leader.num_layers + layer, :core.num_slots] = core.slot_gid
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


cdef struct Job:
    int32_t slot, generation
    int64_t remaining
    float priority
    bint demanded, started


cdef class LinkClock:
    """Time for a replay: a link that moves experts in chunks, demands before prefetches, beside layers that take their time.

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

    cdef int64_t expert_nbytes, chunk_nbytes, chunk
    cdef double rate, latency_s, pass_s, layer_s, expert_s, link_time, chunk_end, began
    cdef double routed_at, stalled_then
    cdef readonly double now, stall_s, busy_s, decode_s
    cdef readonly int64_t bytes_demand, bytes_prefetch, bytes_joined   # joined: of prefetches, before a demand joined them
    cdef Job *jobs
    cdef int32_t size, room, current
    cdef bint decoding

    def __cinit__(self, int64_t expert_nbytes, int64_t chunk_nbytes, double rate, double latency_s, double pass_s, double layer_s,
                  double expert_s):
        self.expert_nbytes, self.chunk_nbytes, self.rate, self.latency_s = expert_nbytes, chunk_nbytes, rate, latency_s
        self.pass_s, self.layer_s, self.expert_s = pass_s, layer_s, expert_s
        self.current, self.room = -1, 64
        self.jobs = <Job *> malloc(self.room * sizeof(Job))
        if self.jobs == NULL:
            raise MemoryError()

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
        core.prefetcher.pace(self.now - self.routed_at - (self.stall_s - self.stalled_then) if self.decoding else 0,
                             self.latency_s + self.expert_nbytes / self.rate,
                             min(self.chunk_nbytes, self.expert_nbytes) / self.rate)
        self.routed_at, self.stalled_then = self.now, self.stall_s

    cdef int compute(self, Core core, Step step) except -1:
        # The resident experts first, then each as it lands, as a lease yields them.
        cdef int i
        cdef double asked
        self._submit(step.plan)
        while step.done < step.unique:
            i = core.take(step)
            if i >= 0:
                self.now += self.expert_s
                self._advance(core, self.now)
                if core.finish(step, i):
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
        cdef int32_t i, n
        cdef int32_t[:, ::1] rows
        cdef float[::1] priorities
        plan.export()
        if plan.empty:
            return 0
        rows = plan.drops
        for n in range(rows.shape[0]):
            i = self._find(rows[n, 0], rows[n, 1])
            if i >= 0:
                self._remove(i)
        rows = plan.fetches
        for n in range(rows.shape[0]):
            i = self._find(rows[n, 1], rows[n, 2])
            if i >= 0:
                if not self.jobs[i].demanded:
                    self.bytes_joined += self.expert_nbytes - self.jobs[i].remaining + (self.chunk if self.current == i else 0)
                self.jobs[i].demanded = True
            else:
                self._add(rows[n, 1], rows[n, 2], 0, True)
        rows, priorities = plan.prefetches, plan.priorities
        for n in range(rows.shape[0]):
            self._add(rows[n, 1], rows[n, 2], priorities[n], False)
        return 0

    cdef int _add(self, int32_t slot, int32_t generation, float priority, bint demanded) except -1:
        cdef Job *grown
        if self.size == self.room:
            grown = <Job *> realloc(self.jobs, 2 * self.room * sizeof(Job))
            if grown == NULL:
                raise MemoryError()
            self.jobs, self.room = grown, 2 * self.room
        self.jobs[self.size] = Job(slot, generation, self.expert_nbytes, priority, demanded, False)
        self.size += 1
        return 0

    cdef int32_t _find(self, int32_t slot, int32_t generation) noexcept nogil:
        cdef int32_t i
        for i in range(self.size):
            if self.jobs[i].slot == slot and self.jobs[i].generation == generation:
                return i
        return -1

    cdef void _remove(self, int32_t i) noexcept nogil:
        # Jobs stay in the order in which they were asked for. A chunk on the wire is not called back.
        self.size -= 1
        memmove(&self.jobs[i], &self.jobs[i + 1], (self.size - i) * sizeof(Job))
        if self.current == i:
            self.current = -1
        elif self.current > i:
            self.current -= 1

    cdef bint _start_chunk(self) noexcept nogil:
        # Demands in order, then prefetches by priority. False when there is nothing to move.
        cdef int32_t i, best = -1
        cdef Job *job
        for i in range(self.size):
            if best < 0 or self._before(&self.jobs[i], &self.jobs[best]):
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

    cdef bint _before(self, Job *a, Job *b) noexcept nogil:
        if a.demanded or b.demanded:
            return a.demanded and not b.demanded
        return a.priority > b.priority

    cdef void _end_chunk(self, Core core) noexcept nogil:
        cdef Job *job
        self.busy_s += self.chunk_end - self.link_time
        self.link_time, self.chunk_end = self.chunk_end, -1
        if self.current < 0:
            return
        job = &self.jobs[self.current]
        job.remaining -= self.chunk
        if job.remaining == 0:
            core.completed[job.slot] = job.generation
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


PREDICTORS = ("matched", "transitions", "fast", "slow", "request", "prior", "chance", "forecast")

cdef enum:
    NUM_PREDICTORS = 8, BINS = 20


cdef class Recall:
    """How well a core knows which experts a coming layer will use.

    Parameters
    ----------
    distances : int32 array [D]
        Layers ahead in the same token, ascending; 0 is the same layer of the next token.
    widths : int32 array [W]
        Experts that may be named.
    next_row : int64 array [F]
        Where the next token of the same request stands, or -1.
    num_experts : int
        Of the largest layer.

    Attributes
    ----------
    found : int64 array [8, D, W]
        Used experts among those named, by predictor (`PREDICTORS`).
    used : int64 array [D]
    binned : float64 array [8, D, 20, 3]
        Of all experts by predicted chance in twentieths: how many, sum of the chance, how many were used.
    """

    cdef readonly object found, used, binned
    cdef int32_t[::1] distances, widths
    cdef int64_t[::1] next_row, used_view
    cdef int64_t[:, :, ::1] found_view
    cdef double[:, :, :, ::1] binned_view
    cdef float[:, ::1] score
    cdef float[::1] spread, spare
    cdef uint8_t[::1] truth

    def __cinit__(self, distances, widths, next_row, int32_t num_experts):
        self.distances, self.widths, self.next_row = distances, widths, next_row
        self.found = np.zeros((NUM_PREDICTORS, len(distances), len(widths)), np.int64)
        self.used = np.zeros(len(distances), np.int64)
        self.binned = np.zeros((NUM_PREDICTORS, len(distances), BINS, 3), np.float64)
        self.found_view, self.used_view, self.binned_view = self.found, self.used, self.binned
        self.score = np.zeros((NUM_PREDICTORS, num_experts), np.float32)
        self.spread, self.spare = np.zeros(num_experts, np.float32), np.zeros(num_experts, np.float32)
        self.truth = np.zeros(num_experts, np.uint8)

    cdef int look(self, Core core, RequestState request, Step step, const int16_t[:, :, ::1] experts, Py_ssize_t row,
                  Py_ssize_t f) except -1:
        cdef int d, j
        cdef int32_t target, reached = step.layer
        cdef int64_t at
        if step.tokens != 1 or not step.decode:
            return 0
        self.spread[:] = 0
        for j in range(step.unique):
            self.spread[step.experts[j]] = 1
        for d in range(self.distances.shape[0]):
            target = step.layer + self.distances[d]
            at = row if self.distances[d] else self.next_row[f]
            if target >= core.num_layers or at < 0:
                continue
            while reached < target:
                self._propagate(core, reached)
                reached += 1
            self.truth[:] = 0
            for j in range(experts.shape[2]):
                if experts[at, target, j] >= 0:
                    self.truth[experts[at, target, j]] = 1
            self._predict(core, request, step, target, self.distances[d])
            self._judge(core.store.experts[target], d)
        return 0

    cdef void _propagate(self, Core core, int32_t layer) noexcept:
        # Chances at the layer after this one, along the stored transitions; a rare one is pulled to the global share.
        cdef HistoryStore store = core.store
        cdef int32_t e, following, begin = store.layer_offset[layer]
        cdef int32_t count = store.experts[layer + 1], after = store.layer_offset[layer + 1]
        cdef float scale, total = 0
        cdef uint32_t *row
        self.spare[:] = 0
        for e in range(store.experts[layer]):
            if self.spread[e] <= 0:
                continue
            total += self.spread[e]
            scale = self.spread[e] / (store.origin_view[begin + e] + TRANSITION_PRIOR)
            row = &store.transition_view[store.transition_offset[layer] + <int64_t> e * count]
            for following in range(count):
                self.spare[following] += scale * (row[following] + TRANSITION_PRIOR * core.prior[after + following])
        for following in range(count):
            self.spread[following] = self.spare[following] / total if total > 0 else 0

    cdef void _predict(self, Core core, RequestState request, Step step, int32_t target, int32_t distance) noexcept:
        # One row for each of PREDICTORS; -1 where it has nothing to say at this distance.
        cdef int32_t e, gid, begin = core.layer_offset[target]
        cdef int64_t tokens = request.prompt_tokens + request.decode_tokens
        cdef const float *forecast = core.prefetcher.forecast(core, request, step, target, distance) if distance else NULL
        for e in range(core.store.experts[target]):
            gid = begin + e
            self.score[0, e] = request.ratio(gid, target) * step.k
            self.score[1, e] = self.spread[e] if distance else -1
            self.score[2, e] = request.fast[gid]
            self.score[3, e] = request.slow[gid]
            self.score[4, e] = <float> (request.prompt[gid] + request.decode[gid]) / max(tokens, 1)
            self.score[5, e] = core.prior[gid]
            self.score[6, e] = core.use[gid]
            self.score[7, e] = forecast[e] if distance else -1

    cdef void _judge(self, int32_t count, int d) noexcept nogil:
        cdef int p, w, bin
        cdef int32_t e, other, rank
        cdef float value
        for e in range(count):
            self.used_view[d] += self.truth[e]
        for p in range(NUM_PREDICTORS):
            if self.score[p, 0] < 0:
                continue
            for e in range(count):
                value = self.score[p, e]
                bin = min(<int> (value * BINS), BINS - 1)
                self.binned_view[p, d, bin, 0] += 1
                self.binned_view[p, d, bin, 1] += value
                self.binned_view[p, d, bin, 2] += self.truth[e]
                if not self.truth[e]:
                    continue
                rank = 0
                for other in range(count):
                    rank += self.score[p, other] > value or (self.score[p, other] == value and other < e)
                for w in range(self.widths.shape[0]):
                    if rank < self.widths[w]:
                        self.found_view[p, d, w] += 1
