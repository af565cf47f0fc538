# Included by _core.pyx: what a running request has done so far, and what it is compared with.

@cython.final
cdef class RequestState:
    """Counts and estimates of one running request."""

    cdef readonly HistoryStore store
    cdef readonly int64_t number, prompt_tokens, decode_tokens
    cdef readonly int64_t demands, hits   # of its steps
    cdef readonly int64_t stall_ns, slot_wait_ns   # waited for bytes; for a slot
    cdef int64_t begun_ns, last_ns   # when it began, or the counters were reset; when its last lease ended
    cdef bint counting          # the scan is under way without the GIL: matches are torn
    cdef bint busy              # route() is under way, perhaps without the GIL
    cdef int ending             # end_request() was called meanwhile: 1, or 2 to keep it
    cdef readonly object prompt_counts, decode_counts
    cdef int64_t[::1] prompt, decode, row_sum
    cdef double[::1] dots
    cdef float[::1] fast, slow
    cdef double[::1] lift
    cdef Outlook outlook
    cdef readonly ForecastState forecast   # None without
    cdef Hints hints   # None before the first
    cdef double[::1] work
    cdef int64_t square
    # The best matches found last, best first: the first `num_best` still are the best, all `num_found` are entries.
    cdef int num_best, num_found
    cdef int32_t[MAX_BEST] best
    cdef double[MAX_BEST] best_key
    cdef int32_t[::1] near
    cdef int32_t rows
    cdef int32_t previous_layer, previous_k
    cdef Py_ssize_t previous_tokens
    cdef int32_t *previous_ids
    cdef int32_t[:, ::1] last_ids
    cdef int32_t[::1] last_tokens, last_k

    def __cinit__(self, HistoryStore store, int64_t number):
        self.store = store
        self.number = number
        self.prompt_counts = np.zeros(store.num_gids, np.int64)
        self.decode_counts = np.zeros(store.num_gids, np.int64)
        self.prompt, self.decode = self.prompt_counts, self.decode_counts
        self.dots = np.zeros(store.stride, np.float64)
        self.near = np.zeros(store.stride, np.int32)
        self.row_sum = np.zeros(store.num_layers, np.int64)
        self.fast = np.zeros(store.num_gids, np.float32)
        self.slow = np.zeros(store.num_gids, np.float32)
        self.lift = np.ones(store.num_gids)
        self.work = np.zeros(int(store.num_experts.max()), np.float64)
        self.outlook = Outlook(store)
        self.last_ids = np.full((store.num_layers, MAX_SUCCESSION), -1, np.int32)
        self.last_tokens = np.zeros(store.num_layers, np.int32)
        self.last_k = np.zeros(store.num_layers, np.int32)
        self.rows = 1
        self.previous_layer = -1
        self.begun_ns = self.last_ns = moe_now_ns()

    def __dealloc__(self):
        free(self.previous_ids)

    def __reduce__(self):
        refuse_copy(self)

    @property
    def counts(self):
        """int64 array [M]: the activation matrix so far, prompt and decode together."""
        return self.prompt_counts + self.decode_counts

    @property
    def hazards(self):
        """float32 array [6, M]: chance of a use in each coming token interval, given none before it, as of each layer's last
        visit. Intervals end 1, 2, 4, 8, 16 and 32 tokens ahead."""
        return np.array(self.outlook.hazard)

    def load(self, counts):
        """Count a whole activation matrix at once (int64 array [M])."""
        cdef int32_t[::1] gids = np.flatnonzero(counts).astype(np.int32)
        cdef int32_t[::1] weights = np.asarray(counts)[np.asarray(gids)].astype(np.int32)
        cdef Py_ssize_t n = gids.shape[0]
        if n:
            self._count(&gids[0], &weights[0], <int> n, False)

    cdef void refresh(self, int32_t entry) noexcept:
        # An entry was written under a running request: its dot product starts over.
        cdef int32_t gid
        cdef int64_t total = 0
        for gid in range(self.store.num_gids):
            total += (self.prompt[gid] + self.decode[gid]) * self.store.joined(entry, gid)
        self.dots[entry] = total
        self.num_best = 0

    cdef void count(self, Step step) noexcept:
        # The step into the activation matrix and the running match.
        cdef int32_t offset = self.store.layer_offset[step.layer]
        cdef int i, n = 0
        cdef int64_t begun, ended
        for i in range(step.unique):
            if step.counted[i]:
                step.work[n] = offset + step.experts[i]
                step.work[step.unique + n] = step.counted[i]
                self.row_sum[step.layer] += step.counted[i]
                n += 1
        if not self.store.lets_go(<int64_t> n * self.store.size):
            self._count(step.work, step.work + step.unique, n, step.decode)
            return
        # Nobody else counts into this request, and whoever replaces an entry waits for the scan, so that the counts and
        # the dot products are one to him.
        pthread_rwlock_rdlock(&self.store.guard)
        begun = moe_now_ns()
        self.counting = True
        with nogil:
            self._count(step.work, step.work + step.unique, n, step.decode)
            self.match()
            pthread_rwlock_unlock(&self.store.guard)
            ended = moe_now_ns()
        self.counting = False
        self.store.came_back(begun, ended)

    cdef void _count(self, const int32_t *gids, const int32_t *weights, int n, bint decode) noexcept nogil:
        cdef int j
        cdef int64_t before
        cdef bint wide = False
        cdef int64_t *into = &self.decode[0] if decode else &self.prompt[0]
        for j in range(n):
            before = self.prompt[gids[j]] + self.decode[gids[j]]
            self.square += weights[j] * (2 * before + weights[j])
            into[gids[j]] += weights[j]
            wide |= weights[j] != 1
        if self.store.size:
            self.store.add_columns(&self.dots[0], gids, weights, n, wide)
        self.num_best = 0

    cdef inline double _key(self, int32_t entry) noexcept nogil:
        # Orders entries as the cosine does; equal for equal cosines as long as the dot product is below 2^26.
        return self.dots[entry] * self.dots[entry] / self.store.square_view[entry]

    cdef inline bint _before(self, double key, int32_t entry, int i, bint oldest) noexcept nogil:
        # Whether an entry goes before the i-th best. Of equally similar ones the newest comes first, or the oldest.
        if key != self.best_key[i]:
            return key > self.best_key[i]
        return (self.store.written_view[entry] > self.store.written_view[self.best[i]]) != oldest

    cdef int find_best(self, int p, bint oldest) noexcept nogil:
        # The p entries of largest cosine similarity into `best`, best first; returns how many have any. One scan lists the
        # entries that reach what the best ones of the last time are worth now, seldom many more than they; those are
        # looked at in full precision.
        cdef double least = 0
        cdef float least_score
        cdef int i, size = 0
        cdef int32_t entry
        cdef Py_ssize_t n, near
        if self.num_found >= p:
            least = self._key(self.best[0])
            for i in range(1, p):
                least = min(least, self._key(self.best[i]))
        least_score = max(<float> (sqrt(least) * NEARLY), <float> 1e-30)
        near = moe_reaching(&self.near[0], &self.dots[0], &self.store.inverse_norm[0], self.store.size, least_score)
        for n in range(near):
            entry = self.near[n]
            if <float> self.dots[entry] * self.store.inverse_norm[entry] >= least_score:
                size = self._offer(entry, size, p, oldest)
                if size == p:
                    least_score = max(least_score, <float> (sqrt(self.best_key[p - 1]) * NEARLY))
        self.num_found = size
        self.num_best = 0 if oldest else size
        return size

    cdef inline int _offer(self, int32_t entry, int size, int p, bint oldest) noexcept nogil:
        cdef double key = self._key(entry)
        cdef int i
        if size == p:
            if not self._before(key, entry, p - 1, oldest):
                return size
            i = p - 1
        else:
            i = size
            size += 1
        while i > 0 and self._before(key, entry, i - 1, oldest):
            self.best[i], self.best_key[i] = self.best[i - 1], self.best_key[i - 1]
            i -= 1
        self.best[i], self.best_key[i] = entry, key
        return size

    cdef int32_t match(self) noexcept nogil:
        # The entry of largest cosine similarity; -1 when nothing is stored or nothing in common.
        if self.num_best == 0 and self.find_best(1, False) == 0:
            return -1
        return self.best[0]

    def matches(self, int p):
        """The best matches among the stored requests.

        Parameters
        ----------
        p : int
            How many, at most 16.

        Returns
        -------
        (int32 array, float64 array)
            Entries and cosine similarities, the largest first and of equal ones the newest. Fewer than `p` where fewer
            have anything in common with the request.
        """
        if not 1 <= p <= MAX_BEST:
            raise ValueError(f"{p} matches: expected 1..{MAX_BEST}")
        cdef int n = self.find_best(p, False), i
        entries = np.array([self.best[i] for i in range(n)], np.int32)
        return entries, np.sqrt(np.array([self.best_key[i] for i in range(n)], np.float64) / max(self.square, 1))

    def match_step(self, int32_t layer, uintptr_t ids, int k):
        """Count one token's experts at one layer and return the best match.

        Parameters
        ----------
        layer : int
        ids : int
            Address of `k` distinct experts of the layer, int32.
        k : int
            At most 64.

        Returns
        -------
        (int, float)
            Entry and cosine similarity; (-1, 0.0) when nothing stored has anything in common.
        """
        cdef const int32_t *experts = <const int32_t *> ids
        cdef int32_t[64] gids
        cdef int32_t[64] weights
        cdef int j
        cdef int32_t entry
        if not 0 <= layer < self.store.num_layers or not 0 <= k <= 64:
            raise RoutingError(
                f"layer {layer} with {k} ids: expected a layer below {self.store.num_layers} and at most 64 ids")
        for j in range(k):
            if not 0 <= experts[j] < self.store.experts[layer]:
                raise RoutingError(f"layer {layer}: expert {experts[j]} is outside 0..{self.store.experts[layer] - 1}")
            gids[j] = self.store.layer_offset[layer] + experts[j]
            weights[j] = 1
        self.row_sum[layer] += k
        self._count(gids, weights, k, True)
        entry = self.match()
        if entry < 0:
            return -1, 0.0
        return entry, sqrt(self.best_key[0] / self.square)

    def similarities(self):
        """float64 array [size]: cosine similarity to every stored request; zero where either side is empty."""
        size = self.store.size
        square = self.store.square[:size] * max(self.square, 1)
        return np.asarray(self.dots)[:size] / np.sqrt(np.where(square, square, 1))

    cdef float ratio(self, int32_t gid, int32_t layer) noexcept nogil:
        # Share of the layer's activations that went to the expert in the best matching request, or in this one before
        # there is any.
        cdef int32_t stored, entry = self.match()
        if entry >= 0:
            stored = <int32_t> self.store.prompt[entry, gid] + self.store.decode[entry, gid]
            return stored * self.store.row_inverse[entry, layer]
        if self.row_sum[layer]:
            return <float> (self.prompt[gid] + self.decode[gid]) / self.row_sum[layer]
        return 0.0

    cdef void start(self, const float *prior) noexcept nogil:
        cdef int32_t gid
        for gid in range(self.store.num_gids):
            self.fast[gid] = prior[gid]
            self.slow[gid] = prior[gid]

    cdef void believe(self, ForecastWeights weights):
        self.forecast = ForecastState(weights, self.store)
        self.outlook.believe()

    cdef int remember(self, Step step) except -1:
        # Layer transitions need the ids of the layer before; the rows are the same tokens when their number is the
        # same.
        cdef HistoryStore store = self.store
        cdef Py_ssize_t n = step.tokens
        cdef Py_ssize_t used = min(n, <Py_ssize_t> LEARNED_ROWS)
        cdef bint follows = self.previous_layer >= 0 and self.previous_tokens == n
        if follows and step.layer == self.previous_layer + 1 or (
                follows and step.decode and step.layer == 0 and self.previous_layer == store.num_layers - 1):
            store.learn_transitions(self.previous_layer, self.previous_ids, step.ids, used, self.previous_k, step.k)
        self._succeed(step)
        free(self.previous_ids)
        self.previous_ids = step.ids
        step.ids = NULL
        self.previous_layer, self.previous_tokens, self.previous_k = step.layer, n, step.k
        return 0

    cdef void _succeed(self, Step step) noexcept:
        # The rows of a decode step follow the same rows of the one before it; the first token of an answer follows the
        # last of the prompt, and within a prompt each row follows the one above it.
        cdef HistoryStore store = self.store
        cdef int32_t layer = step.layer
        cdef Py_ssize_t kept = step.tokens if step.decode else 1, i
        if self.last_tokens[layer] and self.last_tokens[layer] == step.tokens:
            store.learn_successions(layer, &self.last_ids[layer, 0], step.ids, step.tokens, self.last_k[layer], step.k)
        if not step.decode and step.tokens > 1:
            store.learn_successions(layer, step.ids, step.ids + step.k,
                                    min(step.tokens, <Py_ssize_t> LEARNED_ROWS) - 1, step.k, step.k)
        self.last_tokens[layer] = 0
        if step.tokens and kept * step.k <= MAX_SUCCESSION:
            self.last_tokens[layer], self.last_k[layer] = <int32_t> kept, step.k
            for i in range(kept * step.k):
                self.last_ids[layer, i] = step.ids[(step.tokens - kept) * step.k + i]

    cdef void _follow(self, Step step) noexcept:
        # What one token's experts say of the layer's next visit. A batch's rows have no common next token.
        cdef HistoryStore store = self.store
        cdef int32_t offset = store.layer_offset[step.layer], count = store.experts[step.layer], e
        cdef int64_t at = store.succession_offset[step.layer]
        if step.decode and step.tokens > 1:
            for e in range(count):
                self.lift[offset + e] = 1
            return
        moe_lift(&self.lift[offset], &self.work[0], <const int32_t *> &store.succession_view[at],
                 <const int32_t *> &store.followed_view[offset], <const int32_t *> &store.followed_view[offset], count,
                 step.ids + (step.tokens - 1) * step.k, step.k, step.k, TRANSITION_PRIOR)

    cdef void observe(self, Step step) noexcept:
        # Decayed frequencies and what follows of one step, which `count` has counted. Later tokens weigh more, so rows are
        # taken from the last to the first.
        cdef HistoryStore store = self.store
        cdef int32_t offset = store.layer_offset[step.layer], experts = store.experts[step.layer], e
        cdef int j
        cdef Py_ssize_t t
        cdef double fast = FAST, slow = SLOW, keep_fast, keep_slow
        keep_fast = pow(1 - FAST, <double> step.counted_tokens)
        keep_slow = pow(1 - SLOW, <double> step.counted_tokens)
        for e in range(experts):
            self.fast[offset + e] *= keep_fast
            self.slow[offset + e] *= keep_slow
        for t in range(step.tokens - 1, -1, -1):
            if not routed(&step.ids[t * step.k], step.k):
                continue
            for j in range(step.k):
                e = step.ids[t * step.k + j]
                if e >= 0:
                    self.fast[offset + e] += fast
                    self.slow[offset + e] += slow
            fast *= 1 - FAST
            slow *= 1 - SLOW
        if step.decode and step.tokens == 1 and step.counted_tokens == 1:
            self.outlook.count(step.layer, step.ids, step.k)
        else:
            self.outlook.skip(step.layer)
        if self.forecast is not None:
            self.forecast.visit(step.layer, step.ids, step.tokens, step.k)
        if step.tokens:
            self._follow(step)
        if step.layer == 0:
            if step.decode:
                self.decode_tokens += step.counted_tokens
                self.rows = <int32_t> max(step.counted_tokens, 1)
            else:
                self.prompt_tokens += step.counted_tokens
