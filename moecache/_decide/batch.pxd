# Requests that run together.

cimport cython
from libc.stdint cimport int32_t, int64_t

from moecache._decide.request cimport RequestState
from moecache._decide.slots cimport SlotTable
from moecache._decide.step cimport Account, Step


@cython.final
cdef class BatchState:
    cdef readonly Account account   # demands, hits and time of its steps
    cdef readonly int64_t prompt_tokens     # counted tokens of its requests' prompts
    cdef readonly int64_t decode_tokens     # counted tokens they decoded
    cdef list held                  # RequestState: named in the call of route_batch() under way; None: there is none
    cdef list requests              # of them, those with rows
    cdef list parts                 # Step: the rows of each, as if they were a step of their own
    cdef object _memory             # list of arrays behind the address below
    cdef float *chance              # [widest]: scratch: chance that one of them uses an expert

    cdef int split(self, Step step, list requests, list rows, list decodes) except -1
    cdef int hold(self, list requests) except -1
    cdef void let_go(self) noexcept
    cdef int count(self) except -1
    cdef int observe(self, const float *prior) except -1
    cdef int credit(self, SlotTable slots) except -1
    cdef int record(self) except -1
    cdef RequestState first(self)
