# The routing forecaster as it runs.

cimport cython
from libc.stdint cimport int8_t, int32_t, int64_t, uint8_t, uint16_t

from moecache._decide.layout cimport Layout


@cython.final
cdef class ForecastWeights:
    cdef readonly object source     # the moecache.forecaster.Forecaster it was made from
    cdef int32_t layers             # MoE layers, L
    cdef int32_t scales             # decays of the state, S
    cdef int32_t rank               # numbers of the state, r
    cdef int32_t width              # rank, padded to whole registers
    cdef int32_t distances          # layers ahead that it forecasts, D
    cdef int32_t rectified          # components of the state that count only above zero
    cdef int32_t most               # padded experts of the largest layer
    cdef int64_t gids               # experts of all layers, M
    cdef object _memory             # list of arrays behind the addresses below
    cdef float *decay               # [S]: how much of the state a token replaces
    cdef float *prior               # [M]: usual share of the tokens that use an expert
    cdef uint16_t *write            # float16 [S, M, width]: what an expert adds to the state
    cdef uint16_t *pairs            # float16 by distance and layer [experts, experts of the target]
    cdef int8_t *use_read           # by layer [6, rank, capacity]: state to the log odds of its hazards
    cdef int8_t *ahead_read         # by layer [rank, capacity]: state to the log odds of a use ahead
    cdef float *use_scale           # by layer [6, capacity]: what a unit of use_read is
    cdef float *ahead_scale         # by layer [capacity]: what a unit of ahead_read is
    cdef float *usual               # [S, L, width]: what the prior writes
    cdef float *use_bias            # [6, M]
    cdef float *use_weights         # [6, S - 1]: of the logs of the averages
    cdef float *ahead_gain          # [D, rank]: of the state
    cdef float *ahead_bias          # [D, M]
    cdef float *ahead_weights       # [D, S - 1]: of the logs of the averages
    cdef int64_t *place             # [L + 1]: where a layer's padded row of experts begins
    cdef int32_t *capacity          # [L]: experts of a layer, padded to whole registers
    cdef int64_t *pair_place        # [D, L]: where a matrix of `pairs` begins

    cdef int _lay_out_state(self, source, experts) except -1
    cdef int _lay_out_reads(self, source, experts) except -1


@cython.final
cdef class ForecastState:
    cdef readonly ForecastWeights weights   # shared by all requests
    cdef Layout layout              # how experts are numbered
    cdef object _memory             # list of arrays behind the addresses below
    cdef float *averages            # [S - 1, M]: decayed shares of the tokens that used an expert
    cdef float *logs                # [S - 1, M]: their logs against the prior
    cdef float *kept                # [S, L, width]: the state by scale and layer
    cdef float *total               # [width]: sum of the state
    cdef float *state               # [width]: the sum, rectified
    cdef float *written             # [width]: scratch
    cdef float *work                # [most]: scratch
    cdef float *chances             # [M]: chance of use ahead as last read
    cdef uint8_t *read              # [L]: whether a layer's chances were read since its last visit

    cdef void visit(self, int32_t layer, const int32_t *ids, Py_ssize_t tokens, int k) noexcept
    cdef void hazards(self, int32_t layer, float *out) noexcept
    cdef const float *ahead(self, int32_t layer, int distance, const int32_t *ids, int k) noexcept
    cdef void _write(self, int32_t layer, const int32_t *ids, int k) noexcept
    cdef void _coming(self, int32_t layer, int distance, const int32_t *ids, int k, float *out) noexcept
