"""Whether long work releases the GIL: not while taking it back has just lasted longer than the work."""

import cython


@cython.final
cdef class GilPolicy:
    """When the loops of a decision release the GIL.

    Attributes
    ----------
    mode : int
        1 where that pays (the default: not while taking it back has just lasted longer than the work), 0 never, 2 always and
        for short work too.
    """

    def __cinit__(self):
        self.mode = 1
