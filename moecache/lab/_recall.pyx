"""How well a core knows which experts a coming layer will use, predictor by predictor."""

import cython
import numpy as np

from libc.stdint cimport int16_t, int32_t, int64_t, uint32_t

from moecache._decide.core cimport Core
from moecache._decide.history cimport HistoryStore
from moecache._decide.pairs cimport PAIR_PRIOR
from moecache._decide.request cimport RequestState
from moecache._decide.step cimport Step

PREDICTORS = ("matched", "transitions", "fast", "slow", "request", "prior", "chance", "forecast")

cdef enum:
    NUM_PREDICTORS = 8
    BINS = 20


@cython.final
cdef class Recall:
    """Holds what a core expects against what comes.

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

    def __cinit__(self, distances, widths, next_row, int32_t num_experts):
        self.distances, self.widths, self.next_row = distances, widths, next_row
        self.found = np.zeros((NUM_PREDICTORS, len(distances), len(widths)), np.int64)
        self.used = np.zeros(len(distances), np.int64)
        self.binned = np.zeros((NUM_PREDICTORS, len(distances), BINS, 3), np.float64)
        self.found_view, self.used_view, self.binned_view = self.found, self.used, self.binned
        self.score = np.zeros((NUM_PREDICTORS, num_experts), np.float32)
        self.spread, self.spare = np.zeros(num_experts, np.float32), np.zeros(num_experts, np.float32)
        self.truth = np.zeros(num_experts, np.uint8)

    cdef int observe(self, Core core, RequestState request, Step step, const int16_t[:, :, ::1] experts, Py_ssize_t row,
                     Py_ssize_t f) except -1:
        """One step that the core has observed, of forward pass `f`, whose first token stands in `row`."""
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
            if target >= core.layout.num_layers or at < 0:
                continue
            while reached < target:
                self._propagate(core, reached)
                reached += 1
            self.truth[:] = 0
            for j in range(experts.shape[2]):
                if experts[at, target, j] >= 0:
                    self.truth[experts[at, target, j]] = 1
            self._predict(core, request, step, target, self.distances[d])
            self._judge(core.layout.experts[target], d)
        return 0

    cdef void _propagate(self, Core core, int32_t layer) noexcept:
        # Chances at the layer after this one, along the stored transitions; a rare one is pulled to the global share.
        cdef HistoryStore store = core.store
        cdef int32_t e, following, begin = core.layout.offset[layer]
        cdef int32_t count = core.layout.experts[layer + 1], after = core.layout.offset[layer + 1]
        cdef float scale, total = 0, prior = PAIR_PRIOR
        cdef const uint32_t *row
        self.spare[:] = 0
        for e in range(core.layout.experts[layer]):
            if self.spread[e] <= 0:
                continue
            total += self.spread[e]
            scale = self.spread[e] / (store.transitions.origin[begin + e] + prior)
            row = store.transitions.row(layer, e)
            for following in range(count):
                self.spare[following] += scale * (row[following] + prior * core.estimates.prior[after + following])
        for following in range(count):
            self.spread[following] = self.spare[following] / total if total > 0 else 0

    cdef void _predict(self, Core core, RequestState request, Step step, int32_t target, int32_t distance) noexcept:
        # One row for each of PREDICTORS; -1 where it has nothing to say at this distance.
        cdef int32_t e, gid, begin = core.layout.offset[target]
        cdef int64_t tokens = request.prompt_tokens + request.decode_tokens
        cdef const float *forecast = (
            core.prefetcher.forecast(request, step, target, distance, &core.estimates.use[begin]) if distance else NULL)
        for e in range(core.layout.experts[target]):
            gid = begin + e
            self.score[0, e] = request.match.ratio(gid, target) * step.k
            self.score[1, e] = self.spread[e] if distance else -1
            self.score[2, e] = request.fast[gid]
            self.score[3, e] = request.slow[gid]
            self.score[4, e] = <float> request.match.count_of(gid) / max(tokens, 1)
            self.score[5, e] = core.estimates.prior[gid]
            self.score[6, e] = core.estimates.use[gid]
            self.score[7, e] = forecast[e] if distance else -1

    cdef void _judge(self, int32_t count, int d) noexcept nogil:
        cdef int p, bin
        cdef int32_t e
        for e in range(count):
            self.used_view[d] += self.truth[e]
        for p in range(NUM_PREDICTORS):
            if self.score[p, 0] < 0:
                continue
            for e in range(count):
                bin = min(<int> (self.score[p, e] * BINS), BINS - 1)
                self.binned_view[p, d, bin, 0] += 1
                self.binned_view[p, d, bin, 1] += self.score[p, e]
                self.binned_view[p, d, bin, 2] += self.truth[e]
                if self.truth[e]:
                    self._rank(count, d, p, e)

    cdef void _rank(self, int32_t count, int d, int p, int32_t e) noexcept nogil:
        # A used expert: among how many named ones it is.
        cdef int w
        cdef int32_t other, rank = 0
        cdef float value = self.score[p, e]
        for other in range(count):
            rank += self.score[p, other] > value or (self.score[p, other] == value and other < e)
        for w in range(self.widths.shape[0]):
            if rank < self.widths[w]:
                self.found_view[p, d, w] += 1
