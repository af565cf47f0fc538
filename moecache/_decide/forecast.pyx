"""The routing forecaster as it runs. Its weights are fitted elsewhere (`moecache.lab.fit`); the formulas are in docs/forecaster.md."""

import cython
import numpy as np

from libc.stdint cimport int8_t, int32_t, int64_t, uint8_t, uint16_t
from libc.string cimport memcpy, memset

from moecache.errors import RoutingError, refuse_copy

from moecache._decide.arrays cimport address_of, keep
from moecache._decide.layout cimport Layout, routed
from moecache._decide.reuse cimport INTERVALS

cdef extern from "_forecast.h" nogil:
    enum: MOE_PADDED
    void moe_read(float *out, const int8_t *weights, const float *scale, const float *state, int r, int n)
    void moe_add_halves(float *out, const uint16_t *weights, int n)
    void moe_write(float *kept, float *state, const float *written, const float *usual, int r, float a)
    void moe_log_ratio(float *out, const float *average, const float *prior, int n)
    void moe_add_logs(float *out, const float *logs, ptrdiff_t stride, const float *weights, int scales, int n)
    void moe_sigmoids(float *z, int n)

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


cdef object joined(list parts, int i):
    return np.concatenate([part[i].reshape(-1) for part in parts])


@cython.final
cdef class ForecastWeights:
    """A `moecache.forecaster.Forecaster` laid out for reading: the experts of a layer side by side for each component."""

    def __cinit__(self, source):
        experts = np.array(source.fingerprint.num_experts, np.int64)
        self.source = source
        self._memory = []
        self.layers, self.gids = len(experts), int(experts.sum())
        self.scales, self.rank, self.distances = source.write.shape[0], source.write.shape[2], source.ahead_gain.shape[0]
        self.rectified = source.rectified
        self._lay_out_state(source, experts)
        self._lay_out_reads(source, experts)
        sizes = [experts * np.roll(experts, -d) for d in range(1, self.distances + 1)]
        self.pairs = <uint16_t *> keep(self._memory, np.append(halves(source.ahead_pairs), np.uint16(0)))
        self.pair_place = <int64_t *> keep(self._memory, np.cumsum(sizes) - np.ravel(sizes))

    def __reduce__(self):
        refuse_copy(self)

    cdef int _lay_out_state(self, source, experts) except -1:
        begin = np.concatenate([[0], np.cumsum(experts)])
        write = halves(padded(source.write))
        self.width = write.shape[2]
        usual = [np.einsum("smr,m->sr", source.write[:, begin[i]:begin[i + 1]].astype(np.float64),
                           source.prior[begin[i]:begin[i + 1]]) for i in range(self.layers)]
        usual = np.pad(np.stack(usual, 1), ((0, 0), (0, 0), (0, self.width - self.rank))).astype(np.float32)
        self.write, self.usual = <uint16_t *> keep(self._memory, write), <float *> keep(self._memory, usual)
        self.decay = <float *> keep(self._memory, np.array(source.decay, np.float32, order="C"))
        self.prior = <float *> keep(self._memory, np.array(source.prior, np.float32, order="C"))
        return 0

    cdef int _lay_out_reads(self, source, experts) except -1:
        begin = np.concatenate([[0], np.cumsum(experts)])
        rows = [slice(begin[i], begin[i + 1]) for i in range(self.layers)]
        uses = [bytes_of(padded(np.moveaxis(source.use_read[:, own], 1, 2))) for own in rows]
        aheads = [bytes_of(padded(source.ahead_read[own].T)) for own in rows]
        capacity = np.array([scale.shape[1] for _, scale in uses], np.int32)
        self.most, self.capacity = capacity.max(), <int32_t *> keep(self._memory, capacity)
        self.place = <int64_t *> keep(self._memory, np.concatenate([[0], np.cumsum(capacity)]).astype(np.int64))
        self.use_read = <int8_t *> keep(self._memory, joined(uses, 0))
        self.use_scale = <float *> keep(self._memory, joined(uses, 1))
        self.ahead_read = <int8_t *> keep(self._memory, joined(aheads, 0))
        self.ahead_scale = <float *> keep(self._memory, joined(aheads, 1))
        self.use_bias = <float *> keep(self._memory, np.array(source.use_bias, np.float32, order="C"))
        self.use_weights = <float *> keep(self._memory, np.array(source.use_weights, np.float32, order="C"))
        self.ahead_gain = <float *> keep(self._memory, np.array(source.ahead_gain, np.float32, order="C"))
        self.ahead_bias = <float *> keep(self._memory, np.array(source.ahead_bias, np.float32, order="C"))
        self.ahead_weights = <float *> keep(self._memory, np.array(source.ahead_weights, np.float32, order="C"))
        return 0


@cython.final
cdef class ForecastState:
    """What one running request has shown the forecaster."""

    def __cinit__(self, ForecastWeights weights, Layout layout):
        cdef int32_t scales = max(weights.scales - 1, 1)
        self.weights, self.layout = weights, layout
        prior = np.array(weights.source.prior, np.float32)
        averages, logs = np.tile(prior, (scales, 1)), np.zeros((scales, weights.gids), np.float32)
        kept = np.zeros((weights.scales, weights.layers, weights.width), np.float32)
        total, state, written = (np.zeros(weights.width, np.float32) for _ in range(3))
        work, chances, read = np.zeros(weights.most, np.float32), np.zeros(weights.gids, np.float32), np.zeros(
            weights.layers, np.uint8)
        self._memory = [averages, logs, kept, total, state, written, work, chances, read]
        self.averages, self.logs = <float *> address_of(averages), <float *> address_of(logs)
        self.kept, self.total = <float *> address_of(kept), <float *> address_of(total)
        self.state, self.written = <float *> address_of(state), <float *> address_of(written)
        self.work, self.chances = <float *> address_of(work), <float *> address_of(chances)
        self.read = <uint8_t *> address_of(read)

    def __reduce__(self):
        refuse_copy(self)

    cdef void visit(self, int32_t layer, const int32_t *ids, Py_ssize_t tokens, int k) noexcept:
        """Take in what a step routed: rows of ids, -1 for none."""
        cdef ForecastWeights w = self.weights
        cdef int32_t begin = self.layout.offset[layer], n = self.layout.experts[layer]
        cdef Py_ssize_t t
        cdef int j, s
        self.read[layer] = 0
        for t in range(max(0, tokens - FED_ROWS), tokens):
            if routed(&ids[t * k], k):
                self._write(layer, &ids[t * k], k)
        for s in range(w.scales - 1):
            moe_log_ratio(&self.logs[s * w.gids + begin], &self.averages[s * w.gids + begin], &w.prior[begin], n)
        for j in range(w.width):
            self.state[j] = self.total[j] if j >= w.rectified or self.total[j] > 0 else 0

    cdef void _write(self, int32_t layer, const int32_t *ids, int k) noexcept:
        # One token at one layer into the state and the averages.
        cdef ForecastWeights w = self.weights
        cdef int32_t begin = self.layout.offset[layer], n = self.layout.experts[layer], e
        cdef int j, s
        cdef float a
        cdef float *average
        for s in range(w.scales):
            a = w.decay[s]
            memset(self.written, 0, w.width * sizeof(float))
            for j in range(k):
                if ids[j] >= 0:
                    moe_add_halves(self.written, &w.write[(s * w.gids + begin + ids[j]) * w.width], w.width)
            moe_write(&self.kept[(<Py_ssize_t> s * w.layers + layer) * w.width], self.total, self.written,
                      &w.usual[(<Py_ssize_t> s * w.layers + layer) * w.width], w.width, a)
            if s == 0:
                continue
            average = &self.averages[(s - 1) * w.gids + begin]
            for e in range(n):
                average[e] *= 1 - a
            for j in range(k):
                if ids[j] >= 0:
                    average[ids[j]] += a

    cdef void hazards(self, int32_t layer, float *out) noexcept:
        """Log odds [6, experts] of the layer's hazards."""
        cdef ForecastWeights w = self.weights
        cdef int32_t begin = self.layout.offset[layer], n = self.layout.experts[layer], capacity = w.capacity[layer], i
        cdef const int8_t *read = &w.use_read[INTERVALS * w.rank * w.place[layer]]
        cdef const float *scale = &w.use_scale[INTERVALS * w.place[layer]]
        for i in range(INTERVALS):
            memcpy(self.work, &w.use_bias[i * w.gids + begin], n * sizeof(float))
            moe_read(self.work, read + <Py_ssize_t> i * w.rank * capacity, scale + i * capacity, self.state, w.rank, capacity)
            moe_add_logs(self.work, &self.logs[begin], w.gids, &w.use_weights[i * (w.scales - 1)], w.scales - 1, n)
            memcpy(out + <Py_ssize_t> i * n, self.work, n * sizeof(float))

    cdef void _coming(self, int32_t layer, int distance, const int32_t *ids, int k, float *out) noexcept:
        """Chance [experts] of use `distance` layers after `layer`, whose experts `ids` were just taken in."""
        cdef ForecastWeights w = self.weights
        cdef int d = distance - 1, j
        cdef int32_t target = (layer + distance) % w.layers
        cdef int32_t begin = self.layout.offset[target], n = self.layout.experts[target], capacity = w.capacity[target]
        for j in range(w.rank):
            self.written[j] = self.state[j] * w.ahead_gain[d * w.rank + j]
        memcpy(self.work, &w.ahead_bias[d * w.gids + begin], n * sizeof(float))
        moe_read(self.work, &w.ahead_read[w.rank * w.place[target]], &w.ahead_scale[w.place[target]], self.written, w.rank,
                 capacity)
        moe_add_logs(self.work, &self.logs[begin], w.gids, &w.ahead_weights[d * (w.scales - 1)], w.scales - 1, n)
        for j in range(k):
            if ids[j] >= 0:
                moe_add_halves(self.work, &w.pairs[w.pair_place[d * w.layers + layer] + <int64_t> ids[j] * n], n)
        memcpy(out, self.work, n * sizeof(float))
        moe_sigmoids(out, n)

    cdef const float *ahead(self, int32_t layer, int distance, const int32_t *ids, int k) noexcept:
        """Chances as in `_coming`. A layer is read when it comes into sight and each time its distance has halved; what is
        learned in between changes them little, and reading costs more than all else in a step."""
        cdef int32_t target = (layer + distance) % self.weights.layers
        cdef float *out = &self.chances[self.layout.offset[target]]
        if distance & (distance - 1) == 0 or not self.read[target]:
            self._coming(layer, distance, ids, k, out)
            self.read[target] = 1
        return out

    def use_odds(self, int32_t layer):
        """float32 array [6, experts]: log odds of a layer's hazards after its last visit."""
        out = np.zeros((INTERVALS, self.layout.experts[layer]), np.float32)
        self.hazards(layer, <float *> address_of(out))
        return out

    def ahead_chances(self, int32_t layer, int distance, ids):
        """float32 array [experts]: chance of use `distance` layers after `layer`, which has just routed `ids` (int32)."""
        if not 1 <= distance <= self.weights.distances:
            raise RoutingError(f"{distance} layers ahead: expected 1..{self.weights.distances}")
        rows = np.array(ids, np.int32)
        out = np.zeros(self.layout.experts[(layer + distance) % self.weights.layers], np.float32)
        self._coming(layer, distance, <const int32_t *> address_of(rows), <int> len(rows), <float *> address_of(out))
        return out
