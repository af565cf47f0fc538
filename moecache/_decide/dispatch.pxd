# Which slots the experts of a step get, and which expert is handed out next.

cimport cython
from libc.stdint cimport int32_t, int64_t

from moecache._decide.evict cimport Evictor
from moecache._decide.slots cimport SlotTable
from moecache._decide.step cimport OpenSteps, Step


@cython.final
cdef class Dispatcher:
    cdef Evictor evictor            # finds victims, gives slots away
    cdef SlotTable slots            # the evictor's
    cdef OpenSteps open_steps       # which steps pin slots
    cdef readonly int64_t waves     # steps that needed more experts than there were slots

    cdef int admit(self, Step step) except -1
    cdef int serve(self, Step step) except -1
    cdef int _join(self, Step step) except -1
    cdef int _give(self, Step step, int i, int32_t slot) except -1
    cpdef int next_ready(self, Step step) except -2
    cpdef bint finish(self, Step step, int i) except -1
