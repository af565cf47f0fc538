# How well a core knows which experts a coming layer will use.

cimport cython
from libc.stdint cimport int16_t, int32_t, int64_t, uint8_t

from moecache._decide.core cimport Core
from moecache._decide.request cimport RequestState
from moecache._decide.step cimport Step


@cython.final
cdef class Recall:
    cdef readonly object found              # int64 array [8, D, W]: used experts among those named
    cdef readonly object used               # int64 array [D]: used experts
    cdef readonly object binned             # float64 array [8, D, 20, 3]: experts, sum of their chance, used ones, by chance
    cdef int32_t[::1] distances             # [D]: layers ahead; 0: the same layer of the next token
    cdef int32_t[::1] widths                # [W]: experts that may be named
    cdef int64_t[::1] next_row              # [F]: row of the next token of the same request, -1 for none
    cdef int64_t[::1] used_view             # used
    cdef int64_t[:, :, ::1] found_view      # found
    cdef double[:, :, :, ::1] binned_view   # binned
    cdef float[:, ::1] score                # [8, widest]: chance by predictor
    cdef float[::1] spread                  # [widest]: chances followed along the transitions
    cdef float[::1] spare                   # [widest]: scratch
    cdef uint8_t[::1] truth                 # [widest]: whether an expert is used

    cdef int observe(self, Core core, RequestState request, Step step, const int16_t[:, :, ::1] experts, Py_ssize_t row,
                     Py_ssize_t f) except -1
    cdef void _propagate(self, Core core, int32_t layer) noexcept
    cdef void _predict(self, Core core, RequestState request, Step step, int32_t target, int32_t distance) noexcept
    cdef void _judge(self, int32_t count, int d) noexcept nogil
    cdef void _rank(self, int32_t count, int d, int p, int32_t e) noexcept nogil
