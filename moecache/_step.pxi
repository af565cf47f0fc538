# Included by _core.pyx: one step (Step), what it wants moved (Plan), and the best-of-n list behind every choice of
# slots (Candidates).

cdef object NO_FETCH = np.zeros((0, 3), np.int32)
cdef object NO_DROP = np.zeros((0, 2), np.int32)
cdef object NO_PRIORITY = np.zeros(0, np.float32)


cdef struct Rows:
    # Triples of int32 (pairs leave the third unused) that grow as needed.
    int32_t size, room
    int32_t *data


cdef inline int push(Rows *rows, int32_t a, int32_t b, int32_t c) except -1 nogil:
    cdef int32_t *grown
    if rows.size == rows.room:
        grown = <int32_t *> realloc(rows.data, 3 * (2 * rows.room + 8) * sizeof(int32_t))
        if grown == NULL:
            with gil:
                raise MemoryError("no memory for a plan of what to move")
        rows.data, rows.room = grown, 2 * rows.room + 8
    rows.data[3 * rows.size], rows.data[3 * rows.size + 1], rows.data[3 * rows.size + 2] = a, b, c
    rows.size += 1
    return 0


cdef object table(Rows *rows, int columns):
    cdef int32_t[:, ::1] view
    cdef int32_t i
    cdef int j
    array = np.empty((rows.size, columns), np.int32)
    view = array
    for i in range(rows.size):
        for j in range(columns):
            view[i, j] = rows.data[3 * i + j]
    return array


@cython.final
@cython.freelist(16)
cdef class Plan:
    """What to move: rows of (gid, slot, generation) to fetch and to prefetch, rows of (slot, generation) to drop."""

    cdef readonly object fetches, prefetches, priorities, drops
    cdef readonly bint empty
    cdef Rows _fetch, _prefetch, _drop
    cdef list _priority

    def __cinit__(self):
        self.clear()

    def __dealloc__(self):
        free(self._fetch.data)
        free(self._prefetch.data)
        free(self._drop.data)

    def __reduce__(self):
        refuse_copy(self)

    cdef int clear(self) except -1:
        self._fetch.size = self._prefetch.size = self._drop.size = 0
        self._priority = None
        self.fetches = self.prefetches = NO_FETCH
        self.priorities, self.drops = NO_PRIORITY, NO_DROP
        self.empty = True
        return 0

    cdef int fetch(self, int32_t gid, int32_t slot, int32_t generation) except -1 nogil:
        return push(&self._fetch, gid, slot, generation)

    cdef int prefetch(self, int32_t gid, int32_t slot, int32_t generation, float priority) except -1:
        push(&self._prefetch, gid, slot, generation)
        if self._priority is None:
            self._priority = []
        self._priority.append(priority)
        return 0

    cdef int drop(self, int32_t slot, int32_t generation) except -1 nogil:
        return push(&self._drop, slot, generation, 0)

    cdef int export(self) except -1:
        self.empty = not (self._fetch.size or self._prefetch.size or self._drop.size)
        if self._fetch.size:
            self.fetches = table(&self._fetch, 3)
        if self._prefetch.size:
            self.prefetches, self.priorities = table(&self._prefetch, 3), np.array(self._priority, np.float32)
        if self._drop.size:
            self.drops = table(&self._drop, 2)
        return 0


@cython.final
@cython.no_gc   # no reference leads back to a step; its __dealloc__ needs `core` as it was
@cython.freelist(16)
cdef class Step:
    """One call of one MoE layer: its distinct experts, who asked for them, and where they are.

    A step that is dropped without `Core.release` unpins its slots by itself.
    """

    cdef Core core              # where it is listed as open; None: nowhere (a replay's)
    cdef RequestState request   # whose step it is
    cdef void *next_open        # neighbours in the list of the core's open steps; borrowed
    cdef void *previous_open
    cdef readonly uint64_t thread   # that routed it
    cdef int64_t handed_out_ns, waited_ns   # when its first expert was handed out; time that it has waited since
    cdef readonly int32_t layer
    cdef readonly Py_ssize_t tokens, counted_tokens
    cdef readonly int k, unique, hits, missing, deferred, done
    cdef readonly bint decode, open
    cdef public bint in_order          # hand out the lowest expert that is not done, as far as slots allow
    cdef readonly Plan plan
    cdef readonly object token_index
    cdef object _places
    cdef int32_t num_experts
    cdef int first_open
    cdef bint repeats
    cdef int32_t *ids
    cdef int32_t *experts
    cdef int32_t *start
    cdef int32_t *counted
    cdef int32_t *slot
    cdef int32_t *generation
    cdef int32_t *work
    cdef int64_t *place
    cdef uint8_t *state
    cdef uint8_t *scratch

    def __cinit__(self, int32_t layer, Py_ssize_t tokens, int k, bint decode, int32_t num_experts):
        cdef Py_ssize_t room = min(<Py_ssize_t> num_experts, max(tokens * k, 1))
        cdef Py_ssize_t places = k if tokens == 1 else 0
        self.layer, self.tokens, self.k, self.decode, self.num_experts = layer, tokens, k, decode, num_experts
        self.open = True
        self.plan = Plan()
        self.ids = <int32_t *> malloc(max(tokens * k, 1) * sizeof(int32_t))
        self.place = <int64_t *> malloc(places * sizeof(int64_t) + (7 * room + 1) * sizeof(int32_t) + 2 * room)
        if self.ids == NULL or self.place == NULL:
            raise MemoryError()
        self.experts = <int32_t *> (self.place + places)
        self.start = self.experts + room
        self.counted = self.start + room + 1
        self.slot = self.counted + room
        self.generation = self.slot + room
        self.work = self.generation + room
        self.state = <uint8_t *> (self.work + 2 * room)
        self.scratch = self.state + room

    def __dealloc__(self):
        if self.core is not None and self.open:
            self.core._abandoned(self)
        free(self.ids)
        free(self.place)

    def __reduce__(self):
        refuse_copy(self)

    cdef inline int32_t tally(self, int i) noexcept nogil:
        return self.start[i + 1] - self.start[i]

    cdef inline void hold(self, int i, int32_t slot, int32_t generation) noexcept nogil:
        self.slot[i], self.generation[i], self.state[i] = slot, generation, WAITING

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
        cdef int i, n, best, wanted, assigned = self.unique - self.deferred
        wanted = min(assigned, max(2, min(self.k, assigned // 2)))
        for n in range(wanted):
            best = -1
            for i in range(self.unique):
                if self.state[i] == DEFERRED or self.scratch[i]:
                    continue
                if best < 0 or self.tally(i) < self.tally(best):
                    best = i
            self.scratch[best] = 1

    cdef int read(self, const char *address, int itemsize, Py_ssize_t row_stride, Py_ssize_t column_stride,
                  const uint8_t *counted, int64_t sentinel, HistoryStore store) except -1:
        """Copy and check the router's ids, then group the (token, position) pairs by expert."""
        cdef Py_ssize_t bad, token, place
        cdef int64_t work = self.tokens * self.k * PAIR_WORK, begun, ended
        cdef int64_t[::1] token_index, position
        cdef int32_t *tally
        if store.lets_go(work):
            begun = moe_now_ns()
            with nogil:
                bad = self._copy(address, itemsize, row_stride, column_stride, sentinel)
                ended = moe_now_ns()
            store.came_back(begun, ended)
        else:
            bad = self._copy(address, itemsize, row_stride, column_stride, sentinel)
        if bad >= 0:
            token, place = bad // self.k, bad % self.k
            found = self._peek(address, itemsize, token * row_stride + place * column_stride)
            raise RoutingError(
                f"layer {self.layer}: expert id {found} of token {token}, position {place}, is out of range: expected "
                f"0..{self.num_experts - 1}, or -1 for padding")
        tally = <int32_t *> calloc(2 * self.num_experts, sizeof(int32_t))
        if tally == NULL:
            raise MemoryError()
        try:
            self._tally(tally, counted)
            if self.tokens == 1:
                self._group(tally, NULL, self.place)
            elif self.unique:
                self.token_index = np.empty(self.start[self.unique], np.int64)
                self._places = np.empty(self.start[self.unique], np.int64)
                token_index, position = self.token_index, self._places
                if store.lets_go(work):
                    begun = moe_now_ns()
                    with nogil:
                        self._group(tally, &token_index[0], &position[0])
                        ended = moe_now_ns()
                    store.came_back(begun, ended)
                else:
                    self._group(tally, &token_index[0], &position[0])
        finally:
            free(tally)
        self._forget_uncounted(counted)
        return 0

    cdef inline int64_t _peek(self, const char *address, int itemsize, Py_ssize_t i) noexcept nogil:
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
                          int64_t sentinel) noexcept nogil:
        # Returns the first pair out of range, or -1.
        cdef Py_ssize_t t
        cdef int j
        cdef int64_t value
        for t in range(self.tokens):
            for j in range(self.k):
                value = self._peek(address, itemsize, t * row_stride + j * column_stride)
                if value == sentinel:
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

    cdef void _forget_uncounted(self, const uint8_t *counted) noexcept nogil:
        # From here on the ids are what is learnt from: no uncounted rows, no expert twice in a row.
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

    # What a lease reads. Positions count the distinct experts of the step in ascending order.

    def item(self, int i):
        """(expert, slot, start, end): the expert's pairs are `start` to `end` of `token_index` and `topk_position`."""
        return self.experts[i], self.slot[i], self.start[i], self.start[i + 1]

    @property
    def topk_position(self):
        """int64 array: the place among its token's top k of every pair."""
        cdef Py_ssize_t n = self.start[self.unique], i
        cdef int64_t[::1] view
        if self._places is None:
            # One token is the common case, and most callers never ask: made on demand.
            self._places = np.empty(n, np.int64)
            view = self._places
            for i in range(n):
                view[i] = self.place[i]
        return self._places

    def expert_list(self):
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
cdef class Candidates:
    """The `wanted` best of many slots: largest score first, then the longest unused, then the lowest slot."""

    cdef int32_t[::1] slots
    cdef double[::1] scores
    cdef int64_t[::1] last
    cdef int32_t size, wanted

    def __cinit__(self, int32_t room):
        self.slots = np.zeros(max(room, 1), np.int32)
        self.scores = np.zeros(max(room, 1), np.float64)
        self.last = np.zeros(max(room, 1), np.int64)

    cdef inline void clear(self, int32_t wanted) noexcept nogil:
        self.size, self.wanted = 0, wanted

    cdef inline bint _before(self, int32_t slot, double score, int64_t last, int32_t i) noexcept nogil:
        if score != self.scores[i]:
            return score > self.scores[i]
        if last != self.last[i]:
            return last < self.last[i]
        return slot < self.slots[i]

    cdef inline void offer(self, int32_t slot, double score, int64_t last) noexcept nogil:
        cdef int32_t i
        if self.size == self.wanted:
            if self.wanted == 0 or not self._before(slot, score, last, self.size - 1):
                return
            i = self.size - 1
        else:
            i = self.size
            self.size += 1
        while i > 0 and self._before(slot, score, last, i - 1):
            self.slots[i], self.scores[i], self.last[i] = self.slots[i - 1], self.scores[i - 1], self.last[i - 1]
            i -= 1
        self.slots[i], self.scores[i], self.last[i] = slot, score, last
