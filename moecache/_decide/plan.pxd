# What a step wants moved.

cimport cython
from libc.stdint cimport int32_t


cdef struct Rows:
    # Triples of int32 (pairs leave the third unused) that grow as needed.
    int32_t size        # triples
    int32_t capacity    # triples that there is memory for
    int32_t *data       # [size, 3]


@cython.final
@cython.freelist(16)
cdef class Plan:
    cdef readonly object fetches        # int32 array [n, 3]: (gid, slot, generation) that the step waits for
    cdef readonly object prefetches     # int32 array [n, 3]: (gid, slot, generation) ahead of need, the likeliest first
    cdef readonly object drops          # int32 array [n, 2]: (slot, generation) whose copies nobody wants any more
    cdef readonly bint empty            # whether there is nothing in any of them
    cdef Rows _fetch                    # what becomes `fetches` in `export`
    cdef Rows _prefetch                 # what becomes `prefetches`
    cdef Rows _drop                     # what becomes `drops`

    cdef int clear(self) except -1
    cdef int fetch(self, int32_t gid, int32_t slot, int32_t generation) except -1 nogil
    cdef int prefetch(self, int32_t gid, int32_t slot, int32_t generation) except -1 nogil
    cdef int drop(self, int32_t slot, int32_t generation) except -1 nogil
    cdef int export(self) except -1
