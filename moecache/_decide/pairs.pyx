"""Who followed whom: which experts a router chose after which, counted over all requests."""

import cython
import numpy as np

from libc.math cimport sqrt
from libc.stdint cimport int32_t, int64_t, uint32_t

from moecache.errors import refuse_copy

from moecache._decide.arrays cimport address_of
from moecache._decide.layout cimport Layout

cdef extern from "_pairs.h" nogil:
    void moe_lift(double *out, double *rarity, const int32_t *table, const int32_t *origins, const int32_t *targets,
                  int width, const int32_t *experts, int n, int k, double prior)
    void moe_chances_after(float *out, const float *use, const double *lift, const int32_t *table, const int32_t *origins,
                           int width, const int32_t *experts, int n, float prior, float power, float sure)

# Exponent of the joint evidence of k experts, times sqrt(k): between counting it once (1 / k) and k times (1). Chosen by
# calibration. The mean of the pairs stands as it is from even odds on.
cdef double TEMPER = 1.0
cdef float SURE = 0.5
# The window of a table that forgets: uses of an expert on the mean that are kept at least, twice as many at most
# (docs/policies.md has the replays behind it).
cdef int64_t RECENT_USES = 64


@cython.final
cdef class PairTable:
    """How often each expert was followed by each of another layer, or of the same layer for the next token.

    Parameters
    ----------
    layout : Layout
    next_layer : bool
        Whether the next layer's experts follow (transitions; the first layer, for the next token, follows the last), or the
        same layer's for the next token (successions).
    forgets : bool
        Whether `lift` reads a window of the last tokens: what was stored then speaks for no more than that, and traffic that is
        unlike it soon speaks for itself.
    """

    def __cinit__(self, Layout layout, bint next_layer, bint forgets=False):
        self.layout, self.next_layer, self.forgets = layout, next_layer, forgets
        experts = layout.num_experts.astype(np.int64)
        sizes = experts * (np.roll(experts, -1) if next_layer else experts)
        self._place = np.cumsum(sizes) - sizes
        self.counts = np.zeros(int(sizes.sum()), np.uint32)
        self.origins = np.zeros(layout.num_gids, np.uint32)
        self.count = <uint32_t *> address_of(self.counts)
        self.origin = <uint32_t *> address_of(self.origins)
        self.place = <int64_t *> address_of(self._place)
        self._recent = [self.counts, self.origins, np.zeros(layout.num_layers, np.int64)]
        if forgets:
            self._recent[:2] = np.zeros_like(self.counts), np.zeros_like(self.origins)
        self.recent, self.recent_origin = <uint32_t *> address_of(self._recent[0]), <uint32_t *> address_of(self._recent[1])
        self.recent_uses = <int64_t *> address_of(self._recent[2])

    def __reduce__(self):
        refuse_copy(self)

    def restore(self, counts, origins):
        """Put back what was counted. Counts may be larger than the table's own: those of a layer are halved together until
        they fit."""
        cdef int32_t layer
        for layer in range(self.layout.num_layers):
            experts = slice(self.layout.offset[layer], self.layout.offset[layer + 1])
            width = self.layout.experts[self.target(layer)]
            rows = slice(self.place[layer], self.place[layer] + self.layout.experts[layer] * width)
            largest = max(int(np.max(origins[experts])), int(np.max(counts[rows])))
            halvings = max(0, largest.bit_length() - 31)
            self.counts[rows] = np.asarray(counts[rows]) >> halvings
            self.origins[experts] = np.asarray(origins[experts]) >> halvings
            self._restore_recent(layer)

    cdef int _restore_recent(self, int32_t layer) except -1:
        if not self.forgets:
            return 0
        experts = slice(self.layout.offset[layer], self.layout.offset[layer + 1])
        width = self.layout.experts[self.target(layer)]
        rows = slice(self.place[layer], self.place[layer] + self.layout.experts[layer] * width)
        uses = int(self.origins[experts].sum(dtype=np.int64))
        share = min(1.0, RECENT_USES * self.layout.experts[layer] / max(uses, 1))
        self._recent[0][rows] = self.counts[rows] * share
        self._recent[1][experts] = self.origins[experts] * share
        self.recent_uses[layer] = self._recent[1][experts].sum(dtype=np.int64)
        return 0

    cdef void learn(self, int32_t layer, const int32_t *before, const int32_t *after, Py_ssize_t tokens, int k_before,
                    int k_after) noexcept nogil:
        # Row by row of ids: each expert of `before` was followed by each of `after`.
        cdef Py_ssize_t t
        cdef int i
        for t in range(tokens):
            self._count(layer, self.count, self.origin, before + t * k_before, after + t * k_after, k_before, k_after)
            if not self.forgets:
                continue
            self._count(layer, self.recent, self.recent_origin, before + t * k_before, after + t * k_after, k_before, k_after)
            for i in range(k_before):
                self.recent_uses[layer] += before[t * k_before + i] >= 0
            if self.recent_uses[layer] >= 2 * RECENT_USES * self.layout.experts[layer]:
                self._forget(layer)

    cdef void _count(self, int32_t layer, uint32_t *table, uint32_t *origins, const int32_t *before, const int32_t *after, int k_before,
                     int k_after) noexcept nogil:
        # A count that would leave 31 bits (what reads them is signed) halves the whole layer, so that every ratio stays and
        # the old weighs half as much from then on.
        cdef int i, j
        cdef int32_t e, width = self.layout.experts[self.target(layer)], begin = self.layout.offset[layer]
        cdef uint32_t *row
        for i in range(k_before):
            e = before[i]
            if e < 0:
                continue
            if origins[begin + e] >= 0x7fffffff:
                self._halve(layer, table, origins)
            origins[begin + e] += 1
            row = &table[self.place[layer] + <int64_t> e * width]
            for j in range(k_after):
                if after[j] >= 0:
                    row[after[j]] += 1

    cdef void _halve(self, int32_t layer, uint32_t *table, uint32_t *origins) noexcept nogil:
        cdef int64_t i, height = self.layout.experts[layer]
        for i in range(height):
            origins[self.layout.offset[layer] + i] >>= 1
        for i in range(height * self.layout.experts[self.target(layer)]):
            table[self.place[layer] + i] >>= 1

    cdef void _forget(self, int32_t layer) noexcept nogil:
        cdef int32_t gid
        self._halve(layer, self.recent, self.recent_origin)
        self.recent_uses[layer] = 0
        for gid in range(self.layout.offset[layer], self.layout.offset[layer + 1]):
            self.recent_uses[layer] += self.recent_origin[gid]

    cdef void lift(self, int32_t layer, double *out, double *work, const int32_t *experts, int n, int k) noexcept nogil:
        """How much more often than usual each expert of the target [width] followed the `n` given ones, of tokens of `k`
        experts; `work` holds as many numbers."""
        cdef int32_t target = self.target(layer)
        moe_lift(out, work, <const int32_t *> &self.recent[self.place[layer]],
                 <const int32_t *> &self.recent_origin[self.layout.offset[layer]],
                 <const int32_t *> &self.recent_origin[self.layout.offset[target]], self.layout.experts[target], experts, n, k,
                 PAIR_PRIOR)

    cdef void chances_after(self, int32_t layer, float *out, const float *use, double *work, const int32_t *experts, int n,
                            int k) noexcept nogil:
        """Chance of each expert of the target [width] after the `n` given ones.

        The odds of its own chance `use` are multiplied by the lift; that product counts the same evidence several times, as
        experts of one token go together, and is tempered (docs/policies.md has the calibration). The mean of the pairs is a
        lower bound, for what follows surely although it is rare. `work` holds 2 width numbers.
        """
        cdef int32_t width = self.layout.experts[self.target(layer)]
        self.lift(layer, work, work + width, experts, n, k)
        moe_chances_after(out, use, work, <const int32_t *> self.row(layer, 0),
                          <const int32_t *> &self.origin[self.layout.offset[layer]], width, experts, n, PAIR_PRIOR,
                          TEMPER / sqrt(n), SURE)
