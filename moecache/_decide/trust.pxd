# Whether the forecaster is worth listening to.

cimport cython
from libc.stdint cimport int32_t, int64_t, uint8_t

from moecache._decide.step cimport Step


@cython.final
cdef class Trust:
    cdef readonly double lead       # nats by which the forecaster is ahead of the counts in a layer, a running mean
    cdef int64_t owner              # number of the request whose next layer is on trial; -1: none
    cdef int64_t since              # step of the core in which the trial began
    cdef int32_t layer              # that is on trial
    cdef object _memory             # list of arrays behind the addresses below
    cdef float *forecast            # [widest]: the chances that the forecaster gave
    cdef float *counted             # [widest]: those of the counts

    cdef bint due(self, int64_t steps) noexcept nogil
    cdef void begin(self, int64_t owner, int64_t steps, int32_t layer, const float *forecast, const float *counted,
                    int32_t experts) noexcept nogil
    cdef void judge(self, int64_t owner, Step step) noexcept nogil
