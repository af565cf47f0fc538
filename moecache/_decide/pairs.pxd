# Who followed whom.

cimport cython
from libc.stdint cimport int32_t, int64_t, uint32_t

from moecache._decide.layout cimport Layout

# Pseudo-observations that pull a rarely seen pair towards the expert's own frequency.
cdef enum:
    PAIR_PRIOR = 8


@cython.final
cdef class PairTable:
    cdef readonly object counts     # uint32 array: pairs, by layer a matrix [experts of the layer, experts of its target]
    cdef readonly object origins    # uint32 array [M]: how often an expert was followed at all
    cdef Layout layout              # how experts are numbered
    cdef bint forgets               # whether `lift` reads a window of the last tokens rather than all that was counted
    cdef bint next_layer            # what follows: the next layer's experts; else the same layer's for the next token
    cdef object _place              # int64 array [L]: where each layer's matrix begins in counts
    cdef uint32_t *count            # counts
    cdef uint32_t *origin           # [M]: origins
    cdef object _recent             # list of arrays behind the three that follow
    cdef uint32_t *recent           # as counts, of the window; counts itself without one
    cdef uint32_t *recent_origin    # [M]: as origins, of the window; origins itself without one
    cdef int64_t *recent_uses       # [L]: sum of a layer's recent_origin
    cdef int64_t *place             # [L]: _place

    cdef inline int32_t target(self, int32_t layer) noexcept nogil:
        return self.layout.following(layer) if self.next_layer else layer

    cdef inline const uint32_t *row(self, int32_t layer, int32_t expert) noexcept nogil:
        # What followed one expert of a layer.
        return &self.count[self.place[layer] + <int64_t> expert * self.layout.experts[self.target(layer)]]

    cdef void learn(self, int32_t layer, const int32_t *before, const int32_t *after, Py_ssize_t tokens, int k_before,
                    int k_after) noexcept nogil
    cdef void lift(self, int32_t layer, double *out, double *work, const int32_t *experts, int n, int k) noexcept nogil
    cdef void chances_after(self, int32_t layer, float *out, const float *use, double *work, const int32_t *experts, int n,
                            int k) noexcept nogil
    cdef void _count(self, int32_t layer, uint32_t *table, uint32_t *origins, const int32_t *before, const int32_t *after, int k_before,
                     int k_after) noexcept nogil
    cdef void _halve(self, int32_t layer, uint32_t *table, uint32_t *origins) noexcept nogil
    cdef int _restore_recent(self, int32_t layer) except -1
    cdef void _forget(self, int32_t layer) noexcept nogil
