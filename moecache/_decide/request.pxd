# A running request.

cimport cython
from libc.stdint cimport int32_t, int64_t, uint8_t

from moecache._decide.forecast cimport ForecastState, ForecastWeights
from moecache._decide.history cimport HistoryStore, RunningMatch
from moecache._decide.layout cimport Layout
from moecache._decide.reuse cimport ReusePredictor
from moecache._decide.step cimport Account, Step

cdef enum:
    MAX_SUCCESSION = 128    # ids of one decode step that are kept until the layer's next one
    LEARNED_ROWS = 512      # rows of a prompt that pairs are learned from


@cython.final
cdef class Hints:
    cdef object _memory     # list of arrays behind the addresses below
    cdef float *chance      # [M]: chance that the request's next visit to a layer uses an expert
    cdef uint8_t *given     # [L]: whether a layer's chances were given and it has not come since

    cdef int give(self, int32_t layer, int32_t begin, object chances) except -1


@cython.final
cdef class RequestState:
    cdef readonly HistoryStore store        # what it learns into and is held against
    cdef readonly RunningMatch match        # its activation matrix, and the stored ones that are like it
    cdef readonly Account account           # demands, hits, time
    cdef readonly ReusePredictor predictor  # chance of use by interval
    cdef readonly ForecastState forecast    # the fitted forecaster's state; None without
    cdef readonly int64_t prompt_tokens     # counted tokens of its prompt
    cdef readonly int64_t decode_tokens     # counted tokens it decoded
    cdef Hints hints                        # chances given from outside; None before the first
    cdef bint busy                          # route() is under way, perhaps without the GIL
    cdef int ending                         # end_request() was called meanwhile: 1, or 2 to keep it
    cdef object _memory                     # list of arrays behind the addresses below
    cdef float *fast                        # [M]: share of the last few tokens that used an expert
    cdef float *slow                        # [M]: share of the last few dozen tokens
    cdef double *lift                       # [M]: how much more often than usual it follows the last token's experts
    cdef double *work                       # [widest]: scratch
    cdef float *matched                     # [widest]: scratch: chance by the best match
    cdef float *outside                     # [6, widest]: scratch: the forecaster's log odds; NULL without
    cdef int32_t rows                       # tokens of a decode step
    cdef int32_t previous_layer             # of the step before; -1: none
    cdef int32_t previous_k                 # ids of a row of that step
    cdef Py_ssize_t previous_tokens         # rows of that step
    cdef int32_t *previous_ids              # its ids [tokens, k]
    cdef Py_ssize_t previous_capacity       # ids that there is memory for
    cdef int32_t *last_ids                  # [L, MAX_SUCCESSION]: ids of a layer's last visit
    cdef int32_t *last_tokens               # [L]: its rows; 0: too many to keep, or none
    cdef int32_t *last_k                    # [L]: ids of a row

    cdef void start(self, const float *prior) noexcept nogil
    cdef int attach_forecaster(self, ForecastWeights weights) except -1
    cdef int count(self, Step step) except -1
    cdef int observe(self, Step step) except -1
    cdef void predict(self, int32_t layer, const float *prior, int k) noexcept
    cdef int record(self, Step step) except -1
    cdef void _decay(self, Step step) noexcept nogil
    cdef void _lift_successors(self, Step step) noexcept nogil
    cdef void _record_successions(self, Step step) noexcept
    cdef int _keep_ids(self, Step step) except -1
