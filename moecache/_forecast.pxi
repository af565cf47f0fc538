# Included by _core.pyx: the routing forecaster as it runs. Weights are fitted elsewhere (moecache.lab.fit); the formulas are in
# docs/forecaster.md.

cdef enum:
    # Tokens of a prompt that the state is fed, from its end on: what lies before has faded to nothing.
    FED_ROWS = 512


cdef object padded(object array):
    # The last axis padded to whole registers.
    return np.pad(array, [(0, 0)] * (array.ndim - 1) + [(0, -array.shape[array.ndim - 1] % MOE_PADDED)])


cdef object halves(object array):
    # float16 as its bits; what is below its normal numbers is zero.
    return np.ascontiguousarray(np.where(np.abs(array) < np.float16(2.0 ** -14), np.float16(0), array)).view(np.uint16)


cdef object bytes_of(object array):
    # float16 [..., r, n] as int8 and float32 scales [..., n]. An eighth of a thousandth of an expert's largest weight is far
    # below what fitting knows of it, and half the bytes are half the time.
    scale = np.abs(array.astype(np.float32)).max(axis=array.ndim - 2) / 127 + np.float32(1e-30)
    return np.rint(array / np.expand_dims(scale, array.ndim - 2)).astype(np.int8), scale.astype(np.float32)


cdef class ForecastWeights:
    """A `moecache.forecaster.Forecaster` laid out for reading: the experts of a layer side by side for each component."""

    cdef int32_t layers, scales, rank, width, distances, rectified
    cdef int64_t gids
    cdef readonly object source
    cdef float[::1] decay, prior
    cdef uint16_t[::1] write, pairs
    cdef int8_t[::1] use_read, ahead_read
    cdef float[::1] use_scale, ahead_scale
    cdef float[:, :, ::1] usual
    cdef float[:, ::1] use_bias, use_weights, ahead_gain, ahead_bias, ahead_weights
    cdef int64_t[::1] place   # of a layer's padded block of one row, ascending
    cdef int32_t[::1] room    # its padded width
    cdef int64_t[:, ::1] pair_place

    def __cinit__(self, source):
        experts = np.array(source.fingerprint.num_experts, np.int64)
        begin = np.concatenate([[0], np.cumsum(experts)])
        self.source = source
        self.layers, self.gids = len(experts), int(experts.sum())
        self.scales, self.rank, self.distances = source.write.shape[0], source.write.shape[2], source.ahead_gain.shape[0]
        self.rectified = source.rectified
        self.decay, self.prior = np.array(source.decay, np.float32), np.array(source.prior, np.float32)
        write = halves(padded(source.write))
        self.width, self.write = write.shape[2], write.reshape(-1)
        rows = [slice(begin[i], begin[i + 1]) for i in range(self.layers)]
        usual = [np.einsum("smr,m->sr", source.write[:, own].astype(np.float64), source.prior[own]) for own in rows]
        self.usual = np.pad(np.stack(usual, 1), ((0, 0), (0, 0), (0, self.width - self.rank))).astype(np.float32)
        uses = [bytes_of(padded(np.moveaxis(source.use_read[:, own], 1, 2))) for own in rows]
        aheads = [bytes_of(padded(source.ahead_read[own].T)) for own in rows]
        self.room = np.array([scale.shape[1] for _, scale in uses], np.int32)
        self.place = np.concatenate([[0], np.cumsum(self.room)]).astype(np.int64)
        self.use_read, self.use_scale = (np.concatenate([x[i].reshape(-1) for x in uses]) for i in range(2))
        self.ahead_read, self.ahead_scale = (np.concatenate([x[i].reshape(-1) for x in aheads]) for i in range(2))
        self.use_bias, self.use_weights = np.array(source.use_bias, np.float32), np.array(source.use_weights, np.float32)
        self.ahead_gain, self.ahead_bias = np.array(source.ahead_gain, np.float32), np.array(source.ahead_bias, np.float32)
        self.ahead_weights = np.array(source.ahead_weights, np.float32)
        self.pairs = np.append(halves(source.ahead_pairs), np.uint16(0))
        sizes = [experts * np.roll(experts, -d) for d in range(1, self.distances + 1)]
        self.pair_place = (np.cumsum(sizes) - np.ravel(sizes)).reshape(self.distances, self.layers)


cdef class ForecastState:
    """What one running request has told the forecaster."""

    cdef ForecastWeights weights
    cdef HistoryStore store
    cdef float[:, ::1] averages, logs
    cdef float[:, :, ::1] kept
    cdef float[::1] total, state, written, work, chances
    cdef uint8_t[::1] told   # whether a layer's chances were read since its last visit

    def __cinit__(self, ForecastWeights weights, HistoryStore store):
        cdef int32_t widest = int(np.max(weights.room))
        self.weights, self.store = weights, store
        self.averages = np.tile(np.asarray(weights.prior), (max(weights.scales - 1, 1), 1))
        self.logs = np.zeros((max(weights.scales - 1, 1), weights.gids), np.float32)
        self.kept = np.zeros((weights.scales, weights.layers, weights.width), np.float32)
        self.total, self.state = np.zeros(weights.width, np.float32), np.zeros(weights.width, np.float32)
        self.written = np.zeros(weights.width, np.float32)
        self.work = np.zeros(widest, np.float32)
        self.chances, self.told = np.zeros(weights.gids, np.float32), np.zeros(weights.layers, np.uint8)

    cdef void visit(self, int32_t layer, const int32_t *ids, Py_ssize_t tokens, int k) noexcept:
        """Take in what a step routed: rows of ids, -1 for none."""
        cdef ForecastWeights w = self.weights
        cdef int32_t begin = self.store.layer_offset[layer], n = self.store.experts[layer]
        cdef Py_ssize_t t
        cdef int j, s
        self.told[layer] = 0
        for t in range(max(0, tokens - FED_ROWS), tokens):
            if routed(&ids[t * k], k):
                self._take(w, layer, begin, n, &ids[t * k], k)
        for s in range(w.scales - 1):
            moe_log_ratio(&self.logs[s, begin], &self.averages[s, begin], &w.prior[begin], n)
        for j in range(w.width):
            self.state[j] = self.total[j] if j >= w.rectified or self.total[j] > 0 else 0

    cdef void _take(self, ForecastWeights w, int32_t layer, int32_t begin, int32_t n, const int32_t *ids, int k) noexcept nogil:
        cdef int j, s
        cdef int32_t e
        cdef float a
        for s in range(w.scales):
            a = w.decay[s]
            memset(&self.written[0], 0, w.width * sizeof(float))
            for j in range(k):
                if ids[j] >= 0:
                    moe_add_halves(&self.written[0], &w.write[(s * w.gids + begin + ids[j]) * w.width], w.width)
            moe_write(&self.kept[s, layer, 0], &self.total[0], &self.written[0], &w.usual[s, layer, 0], w.width, a)
            if s == 0:
                continue
            for e in range(n):
                self.averages[s - 1, begin + e] *= 1 - a
            for j in range(k):
                if ids[j] >= 0:
                    self.averages[s - 1, begin + ids[j]] += a

    cdef void hazards(self, int32_t layer, float *out) noexcept:
        """Log odds [6, experts] of the layer's hazards."""
        cdef ForecastWeights w = self.weights
        cdef int32_t begin = self.store.layer_offset[layer], n = self.store.experts[layer], room = w.room[layer], i
        cdef const int8_t *read = &w.use_read[INTERVALS * w.rank * w.place[layer]]
        cdef const float *scale = &w.use_scale[INTERVALS * w.place[layer]]
        for i in range(INTERVALS):
            memcpy(&self.work[0], &w.use_bias[i, begin], n * sizeof(float))
            moe_read(&self.work[0], read + <Py_ssize_t> i * w.rank * room, scale + i * room, &self.state[0], w.rank, room)
            moe_add_logs(&self.work[0], &self.logs[0, begin], w.gids, &w.use_weights[i, 0], w.scales - 1, n)
            memcpy(out + <Py_ssize_t> i * n, &self.work[0], n * sizeof(float))

    cdef void coming(self, int32_t layer, int distance, const int32_t *ids, int k, float *out) noexcept:
        """Chance [experts] of use `distance` layers after `layer`, whose experts `ids` were just taken in."""
        cdef ForecastWeights w = self.weights
        cdef int d = distance - 1, j
        cdef int32_t target = (layer + distance) % w.layers
        cdef int32_t begin = self.store.layer_offset[target], n = self.store.experts[target], room = w.room[target]
        for j in range(w.rank):
            self.written[j] = self.state[j] * w.ahead_gain[d, j]
        memcpy(&self.work[0], &w.ahead_bias[d, begin], n * sizeof(float))
        moe_read(&self.work[0], &w.ahead_read[w.rank * w.place[target]], &w.ahead_scale[w.place[target]], &self.written[0],
                 w.rank, room)
        moe_add_logs(&self.work[0], &self.logs[0, begin], w.gids, &w.ahead_weights[d, 0], w.scales - 1, n)
        for j in range(k):
            if ids[j] >= 0:
                moe_add_halves(&self.work[0], &w.pairs[w.pair_place[d, layer] + <int64_t> ids[j] * n], n)
        memcpy(out, &self.work[0], n * sizeof(float))
        moe_sigmoids(out, n)

    cdef const float *ahead(self, int32_t layer, int distance, const int32_t *ids, int k) noexcept:
        """Chances as in `coming`. A layer is read when it comes into sight and each time its distance has halved; what is
        learned in between changes them little, and reading costs more than all else in a step."""
        cdef int32_t target = (layer + distance) % self.weights.layers
        cdef float *out = &self.chances[self.store.layer_offset[target]]
        if distance & (distance - 1) == 0 or not self.told[target]:
            self.coming(layer, distance, ids, k, out)
            self.told[target] = 1
        return out

    def use_odds(self, int32_t layer):
        """float32 array [6, experts]: log odds of a layer's hazards after its last visit."""
        cdef float[:, ::1] out = np.zeros((INTERVALS, self.store.experts[layer]), np.float32)
        self.hazards(layer, &out[0, 0])
        return np.asarray(out)

    def ahead_chances(self, int32_t layer, int distance, const int32_t[::1] ids):
        """float32 array [experts]: chance of use `distance` layers after `layer`, which has just routed `ids`."""
        if not 1 <= distance <= self.weights.distances:
            raise RoutingError(f"{distance} layers ahead: expected 1..{self.weights.distances}")
        cdef float[::1] out = np.zeros(self.store.experts[(layer + distance) % self.weights.layers], np.float32)
        self.coming(layer, distance, &ids[0], <int> ids.shape[0], &out[0])
        return np.asarray(out)
