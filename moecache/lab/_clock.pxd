# Time for a replay.

cimport cython
from libc.stdint cimport int32_t, int64_t

from moecache._decide.core cimport Core
from moecache._decide.plan cimport Plan
from moecache._decide.step cimport Step


cdef struct Job:
    # A copy that is asked for and not done.
    int32_t slot            # where it goes
    int32_t generation      # of the slot, when it was asked for
    int64_t remaining       # bytes still to move
    bint demanded           # a step waits for it
    bint started            # its first chunk has begun


@cython.final
cdef class LinkClock:
    cdef int64_t expert_nbytes          # bytes of an expert
    cdef int64_t chunk_nbytes           # bytes that move without a look at what else is wanted
    cdef int64_t chunk                  # bytes of the chunk that is on the link
    cdef double rate                    # bytes per second
    cdef double latency_s               # before the first byte of each expert
    cdef double pass_s                  # a forward pass outside its MoE layers
    cdef double layer_s                 # a layer before it routes
    cdef double expert_s                # arithmetic of one expert
    cdef double link_time               # up to when the link's doing is known
    cdef double chunk_end               # when the chunk on the link ends; at most 0: there is none
    cdef double began                   # when the forward pass began
    cdef double routed_at               # when the step before routed
    cdef double stalled_then            # stall_s at that time
    cdef readonly double now            # seconds since the start
    cdef readonly double stall_s        # that steps waited for copies
    cdef readonly double busy_s         # that the link moved bytes
    cdef readonly double decode_s       # of forward passes that decode
    cdef readonly int64_t bytes_demand  # moved for steps that waited
    cdef readonly int64_t bytes_prefetch    # moved ahead of need
    cdef readonly int64_t bytes_joined  # of those, before a demand joined them
    cdef Job *jobs                      # [size], in the order in which they were asked for
    cdef int32_t size                   # jobs
    cdef int32_t capacity               # jobs that there is memory for
    cdef int32_t current                # job whose chunk is on the link; -1: none
    cdef bint decoding                  # the forward pass decodes

    cdef void begin_pass(self, bint decode) noexcept nogil
    cdef void reach_layer(self, Core core) noexcept nogil
    cdef int compute(self, Core core, Step step) except -1
    cdef int _submit(self, Plan plan) except -1
    cdef int _fetch(self, int32_t slot, int32_t generation) except -1
    cdef int _add(self, int32_t slot, int32_t generation, bint demanded) except -1
    cdef int32_t _find(self, int32_t slot, int32_t generation) noexcept nogil
    cdef void _remove(self, int32_t i) noexcept nogil
    cdef bint _start_chunk(self) noexcept nogil
    cdef void _end_chunk(self, Core core) noexcept nogil
    cdef bint _next_chunk(self, Core core) noexcept nogil
    cdef void _advance(self, Core core, double until) noexcept nogil
