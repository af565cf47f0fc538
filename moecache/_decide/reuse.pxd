# The chance that an expert is used again within coming token intervals.

cimport cython
from libc.stdint cimport int16_t, int32_t, uint8_t

from moecache._decide.layout cimport Layout

cdef extern from "_intervals.h" nogil:
    enum:
        INTERVALS "MOE_INTERVALS"
        HORIZON "MOE_HORIZON"
    const int *moe_edge


@cython.final
cdef class OnlineWeights:
    cdef readonly object counts             # float64 array [6, 6]: bias and five features' weights by interval
    cdef readonly object counts_curvature   # float64 array [6, 6, 6]: how sure they are
    cdef readonly object blend              # float64 array [6, 3]: bias, weight of the counts' log odds, of the forecaster's
    cdef readonly object blend_curvature    # float64 array [6, 3, 3]: how sure they are
    cdef double *w                          # counts
    cdef double *wc                         # counts_curvature
    cdef double *b                          # blend
    cdef double *bc                         # blend_curvature

    cdef void learn(self, const float *x, const float *outside, const uint8_t *first, int n, int seen,
                    float *work) noexcept nogil


@cython.final
cdef class ReusePredictor:
    cdef readonly object hazards    # float32 array [6, M]: chance of a first use in each interval, as of a layer's last visit
    cdef Layout layout              # how experts are numbered
    cdef OnlineWeights weights      # shared by all requests
    cdef object _memory             # list of arrays behind the addresses below
    cdef float *hazard              # [6, M]: hazards
    cdef float *now                 # [5, widest]: features of the layer that is predicted
    cdef float *work                # [2, widest]: scratch
    cdef float *kept                # by layer [5, experts]: features at its snapshot
    cdef uint8_t *first             # [M]: visits from the snapshot to the first use; 0: not used yet
    cdef int16_t *age               # [L]: visits since the snapshot; below 0: visits until one is taken
    cdef bint blending              # whether a forecaster's log odds are blended in
    cdef float *kept_outside        # by layer [6, experts]: its log odds at the snapshot; NULL without

    cdef int attach_forecaster(self) except -1
    cdef void count(self, int32_t layer, const int32_t *ids, int k) noexcept nogil
    cdef void skip(self, int32_t layer) noexcept nogil
    cdef void finish(self) noexcept nogil
    cdef void predict(self, int32_t layer, const float *slow, const float *fast, const float *prior, const double *lift,
                      const float *matched, float *outside, int rows) noexcept nogil
    cdef void _learn(self, int32_t layer) noexcept nogil
