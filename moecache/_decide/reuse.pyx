"""The chance that an expert is used again within coming token intervals: logistic hazards of what was counted, with weights that are
learned as requests run."""

import cython
import numpy as np

from libc.stdint cimport int16_t, int32_t, uint8_t
from libc.string cimport memcpy, memset

from moecache.errors import refuse_copy

from moecache._decide.arrays cimport address_of
from moecache._decide.layout cimport Layout

cdef extern from "_hazard.h" nogil:
    enum:
        FEATURES_SEEN "MOE_FEATURES"
    void moe_features(float *out, const float *slow, const float *fast, const float *prior, const double *lift,
                      const float *matched, int n)
    void moe_linear(float *z, const double *w, const float *x, int f, int n)
    void moe_hazards(float *hazard, ptrdiff_t stride, const float *x, const double *weights, const float *outside,
                     const double *blend, float *work, int n, int rows)
    void moe_learn(double *w, double *A, const float *x, const uint8_t *first, int n, int low, int high, int f, double decay)

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
# A forecaster's log odds stand as they are until they prove wrong.
cdef object FIRST_BLEND = np.tile([0.0, 0.0, 1.0], (6, 1))
# What is left of the curvature after one more layer's visit was learned from: a thousand visits are remembered of what
# counts mean, thirty of how much a forecaster weighs, which may change with the subject.
cdef double REMEMBERED = 0.999, BLEND_REMEMBERED = 0.97
# Weights are bounded (as moe_learn does), and curvatures by more than any merge adds up to.
cdef double LARGEST_WEIGHT = 10, MOST_CURVATURE = 1e12
# Log odds of a forecaster beyond this are cut: what is learned from stays bounded, as the features are.
cdef float MOST_ODDS = 15


@cython.final
cdef class OnlineWeights:
    """Logistic weights of the hazards, and the curvature that says how sure they are; one set for all layers."""

    def __cinit__(self):
        self.counts, self.blend = FIRST_WEIGHTS.copy(), FIRST_BLEND.copy()
        self.counts_curvature = np.zeros((INTERVALS, FEATURES_SEEN + 1, FEATURES_SEEN + 1))
        self.blend_curvature = np.zeros((INTERVALS, 3, 3))
        self.w, self.b = <double *> address_of(self.counts), <double *> address_of(self.blend)
        self.wc = <double *> address_of(self.counts_curvature)
        self.bc = <double *> address_of(self.blend_curvature)

    def __reduce__(self):
        refuse_copy(self)

    def arrays(self):
        """dict of float64 arrays by name: what is kept with a history. Written to in place."""
        return {"counts": self.counts, "counts_curvature": self.counts_curvature,
                "blend": self.blend, "blend_curvature": self.blend_curvature}

    def join(self, others):
        """Take in what others have learned: means weighted by how sure each is (a Gaussian posterior each). Where none has
        learned anything, the plain mean."""
        for weights, curvature in (("counts", "counts_curvature"), ("blend", "blend_curvature")):
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
        for weights in ("counts", "blend"):
            if not (np.abs(arrays[weights]) <= LARGEST_WEIGHT).all():   # also false for NaN
                return f"{weights} beyond {LARGEST_WEIGHT}"
            curvature = arrays[f"{weights}_curvature"]
            if not (np.abs(curvature) <= MOST_CURVATURE).all():
                return f"{weights}_curvature beyond {MOST_CURVATURE}"
            full = np.tril(curvature) + np.tril(curvature, -1).transpose(0, 2, 1)
            if (np.linalg.eigvalsh(full) < -0.5).any():
                return f"{weights}_curvature that is no sum of squares"
        return None

    cdef void learn(self, const float *x, const float *outside, const uint8_t *first, int n, int seen,
                    float *work) noexcept nogil:
        # From one snapshot of n experts and when each was used after it; intervals not over after `seen` visits are left
        # out.
        cdef int i, width = FEATURES_SEEN + 1
        for i in range(INTERVALS):
            if moe_edge[i + 1] > seen:
                return
            if outside != NULL:
                # Judged by what the counts said, before they learn from the same visits.
                moe_linear(work, &self.w[i * width], x, FEATURES_SEEN, n)
                memcpy(work + n, outside + <Py_ssize_t> i * n, n * sizeof(float))
                moe_learn(&self.b[3 * i], &self.bc[9 * i], work, first, n, moe_edge[i], moe_edge[i + 1], 2, BLEND_REMEMBERED)
            moe_learn(&self.w[i * width], &self.wc[i * width * width], x, first, n, moe_edge[i], moe_edge[i + 1], FEATURES_SEEN,
                      REMEMBERED)


@cython.final
cdef class ReusePredictor:
    """Hazards of all experts for one running request, and the snapshots from which their weights learn.

    Every layer keeps one snapshot of what was known at a visit. It is compared with the 32 visits that follow, learned
    from and taken again; layers take turns, so that a step seldom does more than count.
    """

    def __cinit__(self, Layout layout, OnlineWeights weights):
        cdef Py_ssize_t widest = layout.widest, gids = layout.num_gids
        self.layout, self.weights = layout, weights
        self.hazards = np.zeros((INTERVALS, gids), np.float32)
        now, work = np.zeros(FEATURES_SEEN * widest, np.float32), np.zeros(2 * widest, np.float32)
        kept, first = np.zeros(FEATURES_SEEN * gids, np.float32), np.zeros(gids, np.uint8)
        age = -1 - (7 * np.arange(layout.num_layers) % HORIZON).astype(np.int16)
        self._memory = [now, work, kept, first, age]
        self.hazard, self.now, self.work = (
            <float *> address_of(self.hazards), <float *> address_of(now), <float *> address_of(work))
        self.kept, self.first, self.age = (
            <float *> address_of(kept), <uint8_t *> address_of(first), <int16_t *> address_of(age))

    cdef int attach_forecaster(self) except -1:
        # From here on `predict` is given a forecaster's log odds.
        kept = np.zeros(INTERVALS * self.layout.num_gids, np.float32)
        self._memory.append(kept)
        self.kept_outside = <float *> address_of(kept)
        self.blending = True
        return 0

    cdef void count(self, int32_t layer, const int32_t *ids, int k) noexcept nogil:
        # One token's experts at one layer, before anything else is known of them.
        cdef int32_t begin = self.layout.offset[layer]
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
        cdef int32_t begin = self.layout.offset[layer]
        cdef const float *outside = NULL
        if self.blending:
            outside = &self.kept_outside[<Py_ssize_t> begin * INTERVALS]
        self.weights.learn(&self.kept[<Py_ssize_t> begin * FEATURES_SEEN], outside, &self.first[begin],
                           self.layout.experts[layer], self.age[layer], self.work)

    cdef void skip(self, int32_t layer) noexcept nogil:
        # A step of several tokens: what follows it is not the next visit of one token.
        self.age[layer] = -1

    cdef void finish(self) noexcept nogil:
        # The request ends: what its open snapshots have seen so far is learned.
        cdef int32_t layer
        for layer in range(self.layout.num_layers):
            if self.age[layer] > 0:
                self._learn(layer)
            self.age[layer] = -1

    cdef void predict(self, int32_t layer, const float *slow, const float *fast, const float *prior, const double *lift,
                      const float *matched, float *outside, int rows) noexcept nogil:
        """Hazards of one layer's experts [n] from their frequencies, their lift, their share in the best match and, unless
        NULL, a forecaster's log odds [6, n]; `rows` tokens a step are so many chances."""
        cdef int32_t begin = self.layout.offset[layer], n = self.layout.experts[layer], e
        moe_features(self.now, slow, fast, prior, lift, matched, n)
        if outside != NULL:
            for e in range(INTERVALS * n):
                outside[e] = min(max(outside[e], -MOST_ODDS), MOST_ODDS)
        moe_hazards(&self.hazard[begin], self.layout.num_gids, self.now, self.weights.w, outside, self.weights.b, self.work, n,
                    rows)
        if self.age[layer] == 0:
            memcpy(&self.kept[<Py_ssize_t> begin * FEATURES_SEEN], self.now, FEATURES_SEEN * n * sizeof(float))
            memset(&self.first[begin], 0, n)
            if outside != NULL:
                memcpy(&self.kept_outside[<Py_ssize_t> begin * INTERVALS], outside, INTERVALS * n * sizeof(float))
