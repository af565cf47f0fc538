"""What is known of every expert, whatever the slots hold: last use, frequency, chance of use and reuse time over all running requests."""

import cython
import numpy as np

from libc.math cimport pow
from libc.stdint cimport int32_t, int64_t
from libc.string cimport memcpy

from moecache.errors import refuse_copy

from moecache._decide.arrays cimport keep
from moecache._decide.history cimport HistoryStore
from moecache._decide.request cimport RequestState
from moecache._decide.reuse cimport INTERVALS, moe_edge
from moecache._decide.step cimport Step

cdef extern from "_rank.h" nogil:
    void moe_join(float *hazard, ptrdiff_t stride, const float *other, ptrdiff_t other_stride, int n)
    void moe_reuse_time(float *reuse_time, const float *hazard, ptrdiff_t stride, int n, float layers)

# Tokens' worth of pseudo-observations that pull an expert's share of all tokens to uniform.
cdef double PRIOR_TOKENS = 16.0


@cython.final
cdef class Estimates:
    """Recency, frequency, chance of use and reuse time of every expert.

    Parameters
    ----------
    store : HistoryStore
    top_k : int
        Experts per token, where known, else 0.
    """

    def __cinit__(self, HistoryStore store, int32_t top_k):
        gids = store.layout.num_gids
        self.store, self.layout, self._memory, self.usual_k = store, store.layout, [], max(top_k, 1)
        self.last_use = np.full(gids, -1, np.int64)
        self.probability, self.reuse_times = np.zeros(gids, np.float32), np.zeros(gids, np.float32)
        self.last, self.use = <int64_t *> keep(self._memory, self.last_use), <float *> keep(self._memory, self.probability)
        self.reuse_time = <float *> keep(self._memory, self.reuse_times)
        self.frequency = <int64_t *> keep(self._memory, np.zeros(gids, np.int64))
        self.prior = <float *> keep(self._memory, np.zeros(gids, np.float32))
        self.hazards = <float *> keep(self._memory, np.zeros((INTERVALS, store.layout.widest), np.float32))
        self.next_use = <double *> keep(self._memory, np.zeros(gids, np.float64))
        self.refresh_prior()

    def __reduce__(self):
        refuse_copy(self)

    cdef int observe(self, Step step) except -1:
        # A step's experts were used now.
        cdef int i
        cdef int32_t gid
        self.clock += 1
        for i in range(step.unique):
            gid = self.layout.offset[step.layer] + step.experts[i]
            self.last[gid] = self.clock
            self.frequency[gid] += step.counted[i]
        return 0

    cdef void refresh_prior(self) noexcept:
        # Share of all stored tokens that used the expert, pulled to uniform while few were seen.
        cdef int32_t layer, gid
        cdef double row, weight, seen
        cdef HistoryStore store = self.store
        for layer in range(self.layout.num_layers):
            row = 0
            for gid in range(self.layout.offset[layer], self.layout.offset[layer + 1]):
                row += store.total_of[gid]
            weight = row / store.tokens if store.tokens and row else self.usual_k
            for gid in range(self.layout.offset[layer], self.layout.offset[layer + 1]):
                seen = store.total_of[gid] + PRIOR_TOKENS * weight / self.layout.experts[layer]
                self.prior[gid] = min(1.0, seen / (store.tokens + PRIOR_TOKENS))

    cdef void refresh_layer(self, list requests, int32_t layer) noexcept:
        # Chance that some running request uses the expert at its layer's next visit, and how long until it is worth its
        # slot.
        cdef int32_t i, e, begin = self.layout.offset[layer], count = self.layout.experts[layer], widest = self.layout.widest
        cdef RequestState request
        cdef bint first = True
        cdef const float *hazard = self.hazards
        cdef Py_ssize_t stride = widest
        if not requests:
            for e in range(count):
                for i in range(INTERVALS):
                    self.hazards[i * widest + e] = 1 - pow(1 - self.prior[begin + e], <double> (moe_edge[i + 1] - moe_edge[i]))
        elif len(requests) == 1:
            request = requests[0]
            hazard, stride = &request.predictor.hazard[begin], self.layout.num_gids
        else:
            for request in requests:
                hazard = &request.predictor.hazard[begin]
                if first:
                    for i in range(INTERVALS):
                        memcpy(&self.hazards[i * widest], &hazard[<Py_ssize_t> i * self.layout.num_gids], count * sizeof(float))
                else:
                    moe_join(self.hazards, widest, hazard, self.layout.num_gids, count)
                first = False
            hazard = self.hazards
        memcpy(&self.use[begin], hazard, count * sizeof(float))
        moe_reuse_time(&self.reuse_time[begin], hazard, stride, count, self.layout.num_layers)

    cdef void inherit(self, Estimates old) noexcept nogil:
        # Recency and frequency of another one's experts.
        self.clock = old.clock
        memcpy(self.last, old.last, self.layout.num_gids * sizeof(int64_t))
        memcpy(self.frequency, old.frequency, self.layout.num_gids * sizeof(int64_t))
