# Included by _core.pyx: the chance that an expert is used within each of the coming token intervals, from counts, with
# logistic weights that are learned as requests run.

# What counts say before anything was learned: rounded from two models' traces. Rows: intervals; columns: bias, then the log
# odds of slow, fast and prior, the log of the lift, the log odds of the match (see moe_features).
cdef object FIRST_WEIGHTS = np.array([
    [0.2, 0.5, 0.05, 0.5, 0.45, 0.0],
    [0.0, 0.7, 0.05, 0.2, 0.15, 0.0],
    [0.7, 0.7, 0.05, 0.2, 0.12, 0.0],
    [1.2, 0.6, 0.08, 0.2, 0.1, 0.0],
    [1.7, 0.5, 0.1, 0.25, 0.1, 0.0],
    [1.7, 0.35, 0.1, 0.25, 0.1, 0.0],
])
# A forecaster is believed until it proves wrong.
cdef object FIRST_TRUST = np.tile([0.0, 0.0, 1.0], (6, 1))
# What is left of the curvature after one more layer's visit was learned from: a thousand visits are remembered of what
# counts mean, thirty of how far a forecaster can be trusted, which may change with the subject.
cdef double REMEMBERED = 0.999, TRUSTED = 0.97
# Weights are bounded (as moe_learn does), and curvatures by more than any merge adds up to.
cdef double LARGEST_WEIGHT = 10, MOST_CURVATURE = 1e12


@cython.final
cdef class OnlineWeights:
    """Logistic weights of the hazards, and the curvature that says how sure they are; one set for all layers."""

    cdef readonly object counts, counts_curvature, trust, trust_curvature
    cdef double[:, ::1] w, t
    cdef double[:, :, ::1] wc, tc

    def __cinit__(self):
        self.counts, self.trust = FIRST_WEIGHTS.copy(), FIRST_TRUST.copy()
        self.counts_curvature = np.zeros((INTERVALS, FEATURES_SEEN + 1, FEATURES_SEEN + 1))
        self.trust_curvature = np.zeros((INTERVALS, 3, 3))
        self.w, self.t, self.wc, self.tc = self.counts, self.trust, self.counts_curvature, self.trust_curvature

    def arrays(self):
        """dict of float64 arrays by name: what is kept with a history. Written to in place."""
        return {"counts": self.counts, "counts_curvature": self.counts_curvature,
                "trust": self.trust, "trust_curvature": self.trust_curvature}

    def join(self, others):
        """Take in what others have learned: means weighted by how sure each is (a Gaussian posterior each). Where none has
        learned anything, the plain mean."""
        for weights, curvature in (("counts", "counts_curvature"), ("trust", "trust_curvature")):
            mine, sure = getattr(self, weights), getattr(self, curvature)
            for i in range(INTERVALS):
                both = [(getattr(o, weights)[i], getattr(o, curvature)[i]) for o in (self, *others)]
                full = [(w, np.tril(c) + np.tril(c, -1).T) for w, c in both]
                joined = sum(c for _, c in full)
                unit = np.eye(len(joined)) * 1e-3
                mine[i] = np.linalg.solve(joined + unit * len(full), sum((c + unit) @ w for w, c in full))
                sure[i] = joined * min(1, 0.5 * MOST_CURVATURE / max(np.abs(joined).max(), 1))
            np.clip(mine, -LARGEST_WEIGHT, LARGEST_WEIGHT, out=mine)

    @staticmethod
    def faults(arrays):
        """str or None: why arrays by name cannot be what was learned, weights as `arrays` gives them."""
        for weights in ("counts", "trust"):
            if not (np.abs(arrays[weights]) <= LARGEST_WEIGHT).all():   # also false for NaN
                return f"{weights} beyond {LARGEST_WEIGHT}"
            curvature = arrays[f"{weights}_curvature"]
            if not (np.abs(curvature) <= MOST_CURVATURE).all():
                return f"{weights}_curvature beyond {MOST_CURVATURE}"
            full = np.tril(curvature) + np.tril(curvature, -1).transpose(0, 2, 1)
            if (np.linalg.eigvalsh(full) < -0.5).any():
                return f"{weights}_curvature that is no sum of squares"
        return None

    cdef void learn(self, const float *x, const float *outside, const uint8_t *first, int n, int seen, float *work) noexcept nogil:
        # From one snapshot of n experts and when each was used after it; intervals not over after `seen` visits are left
        # out.
        cdef int i
        for i in range(INTERVALS):
            if moe_edge[i + 1] > seen:
                return
            if outside != NULL:
                # Judged by what the counts said, before they learn from the same visits.
                moe_linear(work, &self.w[i, 0], x, FEATURES_SEEN, n)
                memcpy(work + n, outside + <Py_ssize_t> i * n, n * sizeof(float))
                moe_learn(&self.t[i, 0], &self.tc[i, 0, 0], work, first, n, moe_edge[i], moe_edge[i + 1], 2, TRUSTED)
            moe_learn(&self.w[i, 0], &self.wc[i, 0, 0], x, first, n, moe_edge[i], moe_edge[i + 1], FEATURES_SEEN, REMEMBERED)


@cython.final
cdef class Outlook:
    """Hazards of all experts for one running request, and the snapshots from which their weights learn.

    Every layer keeps one snapshot of what was known at a visit. It is compared with the 32 visits that follow, learned
    from and taken again; layers take turns, so that a step seldom does more than count.
    """

    cdef HistoryStore store
    cdef float[:, ::1] hazard
    cdef float[::1] now, outside, matched, work, kept, kept_outside
    cdef uint8_t[::1] first
    cdef int16_t[::1] age   # visits since the snapshot; below 0: visits until one is taken
    cdef bint trusting

    def __cinit__(self, HistoryStore store):
        cdef Py_ssize_t widest = int(store.num_experts.max()), gids = store.num_gids
        self.store = store
        self.hazard = np.zeros((INTERVALS, gids), np.float32)
        self.now, self.matched = np.zeros(FEATURES_SEEN * widest, np.float32), np.zeros(widest, np.float32)
        self.work = np.zeros(2 * widest, np.float32)
        self.kept = np.zeros(FEATURES_SEEN * gids, np.float32)
        self.first = np.zeros(gids, np.uint8)
        self.age = -1 - (7 * np.arange(store.num_layers) % HORIZON).astype(np.int16)

    cdef void believe(self):
        # A forecaster has its say from here on.
        self.trusting = True
        self.outside = np.zeros(INTERVALS * int(self.store.num_experts.max()), np.float32)
        self.kept_outside = np.zeros(INTERVALS * self.store.num_gids, np.float32)

    cdef void count(self, int32_t layer, const int32_t *ids, int k) noexcept nogil:
        # One token's experts at one layer, before anything else is known of them.
        cdef int32_t begin = self.store.layer_offset[layer]
        cdef int j
        self.age[layer] += 1
        if self.age[layer] <= 0:
            return
        for j in range(k):
            if ids[j] >= 0 and self.first[begin + ids[j]] == 0:
                self.first[begin + ids[j]] = <uint8_t> self.age[layer]
        if self.age[layer] == HORIZON:
            self._learn(layer)
            self.age[layer] = 0

    cdef void _learn(self, int32_t layer) noexcept nogil:
        cdef int32_t begin = self.store.layer_offset[layer]
        cdef const float *outside = NULL
        if self.trusting:
            outside = &self.kept_outside[<Py_ssize_t> begin * INTERVALS]
        self.store.weights.learn(&self.kept[<Py_ssize_t> begin * FEATURES_SEEN], outside, &self.first[begin],
                                 self.store.experts[layer], self.age[layer], &self.work[0])

    cdef void skip(self, int32_t layer) noexcept nogil:
        # A step of several tokens: what follows it is not the next visit of one token.
        self.age[layer] = -1

    cdef void finish(self) noexcept nogil:
        # The request ends: what its open snapshots have seen so far is learned.
        cdef int32_t layer
        for layer in range(self.store.num_layers):
            if self.age[layer] > 0:
                self._learn(layer)
            self.age[layer] = -1

    cdef void look(self, RequestState request, int32_t layer, const float *prior, int k) noexcept:
        """Hazards of one layer's experts from what the request has done by now."""
        cdef HistoryStore store = self.store
        cdef int32_t begin = store.layer_offset[layer], n = store.experts[layer], e, entry = request.match()
        cdef const float *outside = NULL
        for e in range(n):
            self.matched[e] = prior[begin + e]
        if entry >= 0:
            for e in range(n):
                self.matched[e] = k * store.row_inverse[entry, layer] * store.joined(entry, begin + e)
        moe_features(&self.now[0], &request.slow[begin], &request.fast[begin], &prior[begin], &request.lift[begin],
                     &self.matched[0], n)
        if self.trusting:
            request.forecast.hazards(layer, &self.outside[0])
            # Whatever a file says: what is learned from stays bounded, as the features are.
            for e in range(INTERVALS * n):
                self.outside[e] = min(max(self.outside[e], <float> -15), <float> 15)
            outside = &self.outside[0]
        moe_hazards(&self.hazard[0, begin], store.num_gids, &self.now[0], &store.weights.w[0, 0], outside,
                    &store.weights.t[0, 0], &self.work[0], n, request.rows)
        if self.age[layer] == 0:
            memcpy(&self.kept[<Py_ssize_t> begin * FEATURES_SEEN], &self.now[0], FEATURES_SEEN * n * sizeof(float))
            memset(&self.first[begin], 0, n)
            if self.trusting:
                memcpy(&self.kept_outside[<Py_ssize_t> begin * INTERVALS], outside, INTERVALS * n * sizeof(float))
