# How experts are numbered.

cimport cython
from libc.stdint cimport int32_t


@cython.final
cdef class Layout:
    cdef readonly object num_experts       # int32 array [L]: experts of each layer
    cdef readonly int32_t num_layers       # MoE layers, L
    cdef readonly int32_t num_gids         # experts of all layers, M
    cdef readonly int32_t widest           # experts of the largest layer
    cdef readonly object layer_offset      # int32 array [L + 1]: gid of each layer's first expert
    cdef readonly object layer_of_gid      # int32 array [M]: layer of each expert
    cdef int32_t *experts                  # [L]: num_experts
    cdef int32_t *offset                   # [L + 1]: layer_offset
    cdef int32_t *layer_of                 # [M]: layer_of_gid

    cdef int check_layer(self, int32_t layer) except -1

    cdef inline int32_t following(self, int32_t layer) noexcept nogil:
        # The layer after this one; the first one follows the last.
        return layer + 1 if layer + 1 < self.num_layers else 0

    cdef inline int32_t distance(self, int32_t layer, int32_t now) noexcept nogil:
        # Layer steps from a visit of `now` to the next visit of `layer`: 1..L.
        return layer - now if layer > now else layer - now + self.num_layers


# Rows of top-k ids, -1 for none.

cdef inline bint repeated(const int32_t *row, int j) noexcept nogil:
    # Whether the j-th id of a row stands in it before.
    cdef int i
    for i in range(j):
        if row[i] == row[j]:
            return True
    return False


cdef inline bint routed(const int32_t *row, int k) noexcept nogil:
    # Whether a row names any expert.
    cdef int j
    for j in range(k):
        if row[j] >= 0:
            return True
    return False
