"""What a step wants moved: copies to make, copies that nobody wants any more."""

import cython
import numpy as np

from libc.stdint cimport int32_t
from libc.stdlib cimport free, realloc
from libc.string cimport memcpy

from moecache.errors import refuse_copy

from moecache._decide.arrays cimport address_of

cdef object NO_FETCH = np.zeros((0, 3), np.int32)
cdef object NO_DROP = np.zeros((0, 2), np.int32)


cdef int push(Rows *rows, int32_t a, int32_t b, int32_t c) except -1 nogil:
    cdef int32_t *grown
    if rows.size == rows.capacity:
        grown = <int32_t *> realloc(rows.data, 3 * (2 * rows.capacity + 8) * sizeof(int32_t))
        if grown == NULL:
            with gil:
                raise MemoryError("no memory for a plan of what to move")
        rows.data, rows.capacity = grown, 2 * rows.capacity + 8
    rows.data[3 * rows.size], rows.data[3 * rows.size + 1], rows.data[3 * rows.size + 2] = a, b, c
    rows.size += 1
    return 0


cdef object table(Rows *rows, int columns):
    array = np.empty((rows.size, columns), np.int32)
    cdef int32_t *at = <int32_t *> address_of(array)
    cdef int32_t i
    for i in range(rows.size):
        memcpy(at + i * columns, &rows.data[3 * i], columns * sizeof(int32_t))
    return array


@cython.final
@cython.freelist(16)
cdef class Plan:
    """What to move: rows of (gid, slot, generation) to fetch and to prefetch, rows of (slot, generation) to drop."""

    def __cinit__(self):
        self.clear()

    def __dealloc__(self):
        free(self._fetch.data)
        free(self._prefetch.data)
        free(self._drop.data)

    def __reduce__(self):
        refuse_copy(self)

    cdef int clear(self) except -1:
        self._fetch.size = self._prefetch.size = self._drop.size = 0
        self.fetches = self.prefetches = NO_FETCH
        self.drops = NO_DROP
        self.empty = True
        return 0

    cdef int fetch(self, int32_t gid, int32_t slot, int32_t generation) except -1 nogil:
        return push(&self._fetch, gid, slot, generation)

    cdef int prefetch(self, int32_t gid, int32_t slot, int32_t generation) except -1 nogil:
        return push(&self._prefetch, gid, slot, generation)

    cdef int drop(self, int32_t slot, int32_t generation) except -1 nogil:
        return push(&self._drop, slot, generation, 0)

    cdef int export(self) except -1:
        # The arrays that Python reads, made once the plan is complete.
        self.empty = not (self._fetch.size or self._prefetch.size or self._drop.size)
        if self._fetch.size:
            self.fetches = table(&self._fetch, 3)
        if self._prefetch.size:
            self.prefetches = table(&self._prefetch, 3)
        if self._drop.size:
            self.drops = table(&self._drop, 2)
        return 0
