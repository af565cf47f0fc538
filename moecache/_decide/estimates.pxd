# What is known of every expert, whatever the slots hold.

cimport cython
from libc.stdint cimport int32_t, int64_t

from moecache._decide.history cimport HistoryStore
from moecache._decide.layout cimport Layout
from moecache._decide.request cimport RequestState
from moecache._decide.step cimport Step


@cython.final
cdef class Estimates:
    cdef HistoryStore store             # past requests
    cdef Layout layout                  # how experts are numbered
    cdef readonly object last_use       # int64 array [M]: clock of an expert's last use, -1 for never
    cdef readonly object probability    # float32 array [M]: chance of use at the layer's next visit, by any running request
    cdef readonly object reuse_times    # float32 array [M]: layer steps beyond the next visit until it is worth its slot
    cdef readonly int64_t clock         # steps ever counted
    cdef int32_t usual_k                # experts of a token while the store has none; at least 1
    cdef object _memory                 # list of arrays behind the addresses below
    cdef int64_t *last                  # [M]: last_use
    cdef int64_t *frequency             # [M]: counted tokens that used an expert, ever
    cdef float *use                     # [M]: probability
    cdef float *reuse_time              # [M]: reuse_times
    cdef float *prior                   # [M]: share of all stored tokens that used an expert
    cdef float *hazards                 # [6, widest]: scratch: hazards joined over requests
    cdef double *next_use               # [M]: of a replay that knows the future: when an expert is used next

    cdef int observe(self, Step step) except -1
    cdef void refresh_prior(self) noexcept
    cdef void refresh_layer(self, list requests, int32_t layer) noexcept
    cdef void inherit(self, Estimates old) noexcept nogil
