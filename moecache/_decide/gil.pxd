# Whether long work releases the GIL.

cimport cython
from libc.stdint cimport int64_t

from moecache._decide.sync cimport moe_now_ns

# Work is counted in bytes of columns to add: from this much on, about 30 us, the GIL is released; so much is one (token,
# position) pair of a step to copy or to group. Where the GIL came back late, it is kept for this many times as long.
cdef enum:
    LONG_WORK = 1 << 19
    PAIR_WORK = 32
    PATIENCE = 32


@cython.final
cdef class GilPolicy:
    cdef public int mode        # 1: release it where that pays; 0: never; 2: always, for short work too
    cdef int64_t kept_until     # nanoseconds of the clock until which it is kept: taking it back has just been slow

    cdef inline bint releases(self, int64_t work) noexcept:
        if self.mode != 1:
            return self.mode == 2
        return work >= LONG_WORK and moe_now_ns() >= self.kept_until

    cdef inline void took_back(self, int64_t begun, int64_t ended) noexcept:
        # Right after the GIL was taken again. Behind a busy Python thread that lasts until the interpreter makes it give
        # way, 5 ms as a rule.
        cdef int64_t now = moe_now_ns()
        if now - ended > ended - begun:
            self.kept_until = now + PATIENCE * (now - ended)
