# Where the numbers of an array lie, and how far float32 scores may be from them.

cdef void *address_of(object array) except? NULL
cdef void *keep(list memory, object array) except? NULL


cdef inline double nearly(double score) noexcept nogil:
    # A float32 score is at least this much of its true value, with some to spare: three roundings of 2^-24.
    return score * (1 - 1.0 / (1 << 21))
