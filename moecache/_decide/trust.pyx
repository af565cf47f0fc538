"""Whether the forecaster is worth listening to: its chances of the next layer are held against those of the counts, now and then."""

import cython
import numpy as np

from libc.math cimport log
from libc.stdint cimport int32_t, int64_t, uint32_t
from libc.string cimport memcpy

from moecache.errors import refuse_copy

from moecache._decide.arrays cimport keep
from moecache._decide.step cimport Step

# One step in 8 is tried, picked by a hash (Knuth's multiplicative one); a trial whose layer has not come after so many steps of
# the core is given up. The mean forgets in so many trials. A forecaster begins with a lead that a few bad trials use up.
cdef uint32_t HASH = 2654435761
cdef int64_t PATIENCE = 4096
cdef double RATE = 1.0 / 32, FIRST_LEAD = 0.5
cdef double LEAST = 1e-4    # chance that nothing goes below, nor above its complement


@cython.final
cdef class Trust:
    """The running difference of two logarithmic losses (I. J. Good, *Rational Decisions*, J. Royal Statistical Society B 14, 1952).

    Parameters
    ----------
    widest : int
        Experts of the layer that has most.
    """

    def __cinit__(self, int32_t widest):
        self.lead, self.owner, self._memory = FIRST_LEAD, -1, []
        self.forecast = <float *> keep(self._memory, np.zeros(widest, np.float32))
        self.counted = <float *> keep(self._memory, np.zeros(widest, np.float32))

    def __reduce__(self):
        refuse_copy(self)

    cdef bint due(self, int64_t steps) noexcept nogil:
        return (self.owner < 0 or steps - self.since > PATIENCE) and (<uint32_t> steps * HASH) >> 29 == 0

    cdef void begin(self, int64_t owner, int64_t steps, int32_t layer, const float *forecast, const float *counted,
                    int32_t experts) noexcept nogil:
        """Chances [experts] of a request's next layer, from both."""
        self.owner, self.since, self.layer = owner, steps, layer
        memcpy(self.forecast, forecast, experts * sizeof(float))
        memcpy(self.counted, counted, experts * sizeof(float))

    cdef void judge(self, int64_t owner, Step step) noexcept nogil:
        """The layer has come: who knew better which experts it uses?"""
        cdef double lead = 0, forecast, counted
        cdef int32_t e
        cdef int i = 0
        if owner != self.owner or step.layer != self.layer:
            return
        self.owner = -1
        if step.tokens != 1 or step.unique == 0:
            return
        for e in range(step.num_experts):
            forecast = min(max(<double> self.forecast[e], LEAST), 1 - LEAST)
            counted = min(max(<double> self.counted[e], LEAST), 1 - LEAST)
            if i < step.unique and step.experts[i] == e:
                lead += log(forecast / counted)
                i += 1
            else:
                lead += log((1 - forecast) / (1 - counted))
        self.lead += RATE * (lead - self.lead)
