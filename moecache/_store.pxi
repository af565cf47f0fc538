# Included by _core.pyx: what finished requests did.

cdef struct Tall:
    # Entries whose count in one column does not fit a byte, and its high byte: pairs.
    int32_t size, room
    int32_t *pair


# A list of tall entries is walked while it is this many times shorter than the store; a walk costs about a nanosecond an
# entry, adding the column of all high bytes a thirtieth of that.
cdef enum:
    FEW = 32
# Work is counted in bytes of columns to add: from this much on, about 30 us, the GIL is let go; so much is one (token,
# position) pair of a step to copy or to group. Where the GIL came back late, it is kept for this many times as long.
cdef enum:
    LONG_WORK = 1 << 19
    PAIR_WORK = 32
    PATIENCE = 32
# Most best matches that can be asked for at once.
cdef enum:
    MAX_BEST = 16
# Tokens of all requests together, and of one expert: what a file may say (tensorfile.MOST_TOKENS), far from wrapping.
cdef int64_t MOST_TOKENS = 1LL << 53
# A float32 score is this close to its true value, with room to spare: three roundings of 2^-24.
cdef double NEARLY = 1 - 1.0 / (1 << 21)


@cython.final
cdef class HistoryStore:
    """Activation matrices of finished requests, transposed, with what they say about the next step.

    ``columns[gid][i]`` is a byte, so that routing k experts adds k contiguous columns to a running dot product. The high
    bytes of counts above 255 lie in columns of their own, made when the first such count comes: the sums are exact whole
    numbers. Memory is 5 bytes per request and expert, 6 with high bytes, and a running request's dot products take 8
    bytes per stored request.

    Parameters
    ----------
    num_experts : int32 array [L]
        Experts of each MoE layer.
    capacity : int
        Requests kept.

    Attributes
    ----------
    release : int
        Whether long work lets go of the GIL: 1 where that pays (the default: not while taking it back has just lasted
        longer than the work), 0 never, 2 always and short work too.
    """

    cdef public int release
    cdef int64_t held_until
    cdef pthread_rwlock_t guard   # scans without the GIL read, `add` writes; `add` has the GIL and waits for scans
    cdef readonly int32_t num_layers, num_gids, capacity, size
    cdef readonly int64_t finished, replaced, tokens
    cdef readonly object prompt_counts, decode_counts, total, transitions, origins, successions, followed, num_experts
    cdef readonly object written, square
    cdef Py_ssize_t stride
    cdef int32_t[::1] experts, layer_offset
    cdef uint8_t[::1] columns, high
    cdef Tall *tall
    cdef float[::1] inverse_norm
    cdef double[::1] square_view
    cdef int64_t[::1] written_view
    cdef float[:, ::1] row_inverse
    cdef uint16_t[:, ::1] prompt, decode
    cdef int64_t[::1] total_view, transition_offset, succession_offset
    cdef uint32_t[::1] transition_view, origin_view, succession_view, followed_view
    cdef readonly OnlineWeights weights
    cdef public ForecastWeights forecaster   # None without; requests begun from now on use it
    cdef list active

    def __cinit__(self, num_experts, int32_t capacity):
        pthread_rwlock_init(&self.guard, NULL)
        self.release = 1
        self.num_experts = np.ascontiguousarray(num_experts, np.int32)
        self.experts = self.num_experts
        self.num_layers = self.experts.shape[0]
        self.layer_offset = np.concatenate([[0], np.cumsum(self.num_experts)]).astype(np.int32)
        self.num_gids = self.layer_offset[self.num_layers]
        self.capacity = capacity
        self.stride = (capacity + 63) // 64 * 64
        self.columns = np.zeros(self.num_gids * self.stride, np.uint8)
        self.high = np.zeros(0, np.uint8)
        self.inverse_norm = np.zeros(self.stride, np.float32)
        self.square = np.zeros(self.stride, np.float64)
        self.square_view = self.square
        self.written = np.zeros(capacity, np.int64)
        self.written_view = self.written
        self.row_inverse = np.zeros((capacity, self.num_layers), np.float32)
        self.prompt_counts = np.zeros((capacity, self.num_gids), np.uint16)
        self.decode_counts = np.zeros((capacity, self.num_gids), np.uint16)
        self.prompt, self.decode = self.prompt_counts, self.decode_counts
        self.total = np.zeros(self.num_gids, np.int64)
        self.total_view = self.total
        following = np.roll(self.num_experts, -1).astype(np.int64)
        sizes = self.num_experts * following
        self.transition_offset = np.cumsum(sizes) - sizes
        self.transitions = np.zeros(int(sizes.sum()), np.uint32)
        self.transition_view = self.transitions
        self.origins = np.zeros(self.num_gids, np.uint32)
        self.origin_view = self.origins
        sizes = self.num_experts.astype(np.int64) ** 2
        self.succession_offset = np.cumsum(sizes) - sizes
        self.successions = np.zeros(int(sizes.sum()), np.uint32)
        self.succession_view = self.successions
        self.followed = np.zeros(self.num_gids, np.uint32)
        self.followed_view = self.followed
        self.tall = <Tall *> calloc(self.num_gids, sizeof(Tall))
        if self.tall == NULL:
            raise MemoryError()
        self.active = []
        self.weights = OnlineWeights()

    def __reduce__(self):
        refuse_copy(self)

    def __dealloc__(self):
        cdef int32_t gid
        if self.tall != NULL:
            for gid in range(self.num_gids):
                free(self.tall[gid].pair)
            free(self.tall)
        pthread_rwlock_destroy(&self.guard)

    cdef inline bint lets_go(self, int64_t work) noexcept:
        if self.release != 1:
            return self.release == 2
        return work >= LONG_WORK and moe_now_ns() >= self.held_until

    cdef inline void came_back(self, int64_t begun, int64_t ended) noexcept:
        # Right after the GIL was taken again. Behind a busy Python thread that lasts until the interpreter makes it give
        # way, 5 ms as a rule.
        cdef int64_t now = moe_now_ns()
        if now - ended > ended - begun:
            self.held_until = now + PATIENCE * (now - ended)

    cdef void add_columns(self, double *dots, const int32_t *gids, const int32_t *weights, int k,
                          bint wide) noexcept nogil:
        cdef int32_t[64] many
        cdef int32_t[64] heavy
        cdef int j, n = 0
        moe_add_columns(dots, &self.columns[0], self.stride, gids, weights, k, wide, 1, self.size)
        for j in range(k):
            if self.tall[gids[j]].size * FEW < self.size:
                self._add_tall(dots, &self.tall[gids[j]], 256.0 * weights[j])
                continue
            many[n], heavy[n] = gids[j], weights[j]
            n += 1
            if n == 64:
                moe_add_columns(dots, &self.high[0], self.stride, many, heavy, n, wide, 256, self.size)
                n = 0
        if n:
            moe_add_columns(dots, &self.high[0], self.stride, many, heavy, n, wide, 256, self.size)

    cdef inline void _add_tall(self, double *dots, const Tall *table, double weight) noexcept nogil:
        cdef int32_t i
        for i in range(0, 2 * table.size, 2):
            dots[table.pair[i]] += weight * table.pair[i + 1]

    cdef int _push_tall(self, Tall *table, int32_t entry, int32_t high) except -1:
        cdef int32_t room = 2 * table.room + 4
        cdef int32_t *grown
        if table.size == table.room:
            grown = <int32_t *> realloc(table.pair, 2 * room * sizeof(int32_t))
            if grown == NULL:
                raise MemoryError()
            table.pair, table.room = grown, room
        table.pair[2 * table.size], table.pair[2 * table.size + 1] = entry, high
        table.size += 1
        return 0

    cdef void _drop_tall(self, Tall *table, int32_t entry) noexcept nogil:
        cdef int32_t i
        for i in range(0, 2 * table.size, 2):
            if table.pair[i] == entry:
                table.size -= 1
                table.pair[i], table.pair[i + 1] = table.pair[2 * table.size], table.pair[2 * table.size + 1]
                return

    cdef inline int32_t joined(self, int32_t entry, int32_t gid) noexcept nogil:
        # What the columns hold of an entry.
        return min(<int32_t> self.prompt[entry, gid] + self.decode[entry, gid], 65535)

    cdef int _write(self, int32_t entry, const uint16_t[::1] prompt, const uint16_t[::1] decode) except -1:
        cdef int32_t gid, layer, count
        cdef Py_ssize_t place = moe_place(entry), at
        cdef int64_t square = 0, row
        for layer in range(self.num_layers):
            row = 0
            for gid in range(self.layer_offset[layer], self.layer_offset[layer + 1]):
                at = gid * self.stride + place
                if self.joined(entry, gid) > 255:
                    self._drop_tall(&self.tall[gid], entry)
                self.prompt[entry, gid], self.decode[entry, gid] = prompt[gid], decode[gid]
                count = self.joined(entry, gid)
                if count > 255:
                    self._push_tall(&self.tall[gid], entry, count >> 8)
                self.columns[at] = count & 255
                if self.high.shape[0]:
                    self.high[at] = count >> 8
                square += <int64_t> count * count
                row += count
            self.row_inverse[entry, layer] = 1.0 / row if row else 0.0
        self.square_view[entry] = square
        self.inverse_norm[entry] = 1.0 / sqrt(<double> square) if square else 0.0
        self.written_view[entry] = self.finished
        return 0

    @property
    def nbytes(self):
        """Bytes of memory, for all of `capacity` whether filled or not."""
        arrays = (self.columns, self.high, self.inverse_norm, self.square, self.row_inverse, self.prompt_counts,
                  self.decode_counts, self.written, self.total, self.transitions, self.origins, self.successions,
                  self.followed)
        return sum(np.asarray(array).nbytes for array in arrays)

    def order(self):
        """int64 array [size]: the entries, oldest first. An entry is as old as the request that it holds now."""
        return np.argsort(self.written[:self.size])

    def add(self, prompt, decode, int64_t tokens, RequestState request=None, int32_t entry=-1):
        """Keep one finished request; a full store gives up the entry that resembles it most, the oldest of several.

        Parameters
        ----------
        prompt, decode : integer array [M]
            Activation counts by gid. Counts above 65535 are kept as 65535, and their sum is matched as at most that.
        tokens : int
            Tokens the counts stand for.
        request : RequestState, optional
            The request itself, whose running dot products save a scan of the store.
        entry : int, optional
            Where to keep it; entries are filled in ascending order before any is replaced.

        Returns
        -------
        int
            The entry written, or -1 for a request that routed nothing.
        """
        cdef RequestState other
        cdef const uint16_t[::1] p = np.minimum(prompt, 65535).astype(np.uint16)
        cdef const uint16_t[::1] d = np.minimum(decode, 65535).astype(np.uint16)
        if p.shape[0] != self.num_gids or d.shape[0] != self.num_gids:
            raise ValueError(f"expected {self.num_gids} counts, got {p.shape[0]} and {d.shape[0]}")
        if not -1 <= entry <= min(self.size, self.capacity - 1):
            raise ValueError(f"entry {entry}: expected at most {min(self.size, self.capacity - 1)}")
        joined = np.asarray(prompt, np.int64) + np.asarray(decode, np.int64)
        if not joined.any():
            return -1
        if entry < 0 and self.size < self.capacity:
            entry = self.size
        elif entry < 0:
            if request is None:
                request = RequestState(self, -1)
                request.load(joined)
            # Nothing in common with any: the oldest.
            entry = request.best[0] if request.find_best(1, True) else <int32_t> self.written.argmin()
        cdef uint8_t[::1] high = self.high
        if joined.max() > 255 and not high.shape[0]:
            high = np.zeros(self.columns.shape[0], np.uint8)
        # No Python object is made while the lock is held: a finaliser could come back here.
        pthread_rwlock_wrlock(&self.guard)
        try:
            self.high = high
            self._write(entry, p, d)
            if entry == self.size:
                self.size += 1
            else:
                self.replaced += 1
            self.finished += 1
            for other in self.active:
                other.refresh(entry)
        finally:
            pthread_rwlock_unlock(&self.guard)
        np.minimum(self.total + joined, MOST_TOKENS, out=self.total)
        self.tokens = min(self.tokens + tokens, MOST_TOKENS)
        return entry

    def restore(self, total, tokens, transitions, origins, successions, followed):
        """Put back what `add` and the requests had accumulated, after the entries were added again.

        Counts may be larger than the store's own: those of a layer are halved together until they fit.
        """
        self.total[:] = np.minimum(total, MOST_TOKENS)
        self.tokens = min(tokens, MOST_TOKENS)
        for layer in range(self.num_layers):
            first, end = self.layer_offset[layer], self.layer_offset[layer + 1]
            following = self.layer_offset[(layer + 1) % self.num_layers + 1] - self.layer_offset[(layer + 1) % self.num_layers]
            for table, sums, into, sums_into, at, width in (
                (transitions, origins, self.transitions, self.origins, self.transition_offset[layer], following),
                (successions, followed, self.successions, self.followed, self.succession_offset[layer], end - first),
            ):
                rows = slice(at, at + (end - first) * width)
                largest = max(int(np.max(sums[first:end])), int(np.max(table[rows])))
                halvings = max(0, largest.bit_length() - 31)
                into[rows] = np.asarray(table[rows]) >> halvings
                sums_into[first:end] = np.asarray(sums[first:end]) >> halvings

    cdef void learn_transitions(self, int32_t layer, const int32_t *before, const int32_t *after, Py_ssize_t tokens,
                                int k_before, int k_after) noexcept nogil:
        # `after`: ids of the layer that follows, the first one following the last one.
        learn(&self.transition_view[self.transition_offset[layer]], &self.origin_view[self.layer_offset[layer]],
              self.experts[layer], self.experts[layer + 1 if layer + 1 < self.num_layers else 0], before, after, tokens,
              k_before, k_after)

    cdef void learn_successions(self, int32_t layer, const int32_t *before, const int32_t *after, Py_ssize_t tokens,
                                int k_before, int k_after) noexcept nogil:
        # `after`: ids of the same layer for the next token.
        learn(&self.succession_view[self.succession_offset[layer]], &self.followed_view[self.layer_offset[layer]],
              self.experts[layer], self.experts[layer], before, after, tokens, k_before, k_after)


cdef void halve(uint32_t *table, uint32_t *origins, int32_t height, int32_t width) noexcept nogil:
    cdef int64_t i
    for i in range(height):
        origins[i] >>= 1
    for i in range(<int64_t> height * width):
        table[i] >>= 1


cdef void learn(uint32_t *table, uint32_t *origins, int32_t height, int32_t width, const int32_t *before,
                const int32_t *after, Py_ssize_t tokens, int k_before, int k_after) noexcept nogil:
    # Row by row: each expert of `before` was followed by each of `after`. A count that would leave 31 bits (what reads
    # them is signed) halves the whole layer, so that every ratio stays and the old weighs half as much from then on.
    cdef Py_ssize_t t
    cdef int i, j
    cdef int32_t e
    cdef uint32_t *row
    for t in range(tokens):
        for i in range(k_before):
            e = before[t * k_before + i]
            if e < 0:
                continue
            if origins[e] >= 0x7fffffff:
                halve(table, origins, height, width)
            origins[e] += 1
            row = &table[<int64_t> e * width]
            for j in range(k_after):
                if after[t * k_after + j] >= 0:
                    row[after[t * k_after + j]] += 1
