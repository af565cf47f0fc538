# What a link is: a C record of functions, which the classes of the files beside this one fill in.


cdef int no_enter(Link* link) noexcept nogil:
    return 0


cdef int no_begin(Link* link, int32_t slot) noexcept nogil:
    return 0


cdef void no_abandon(Link* link) noexcept nogil:
    pass


cdef class _Link:
    """What all links share: their C record, and who uses it."""
    cdef Link link              # what an engine calls
    cdef int users              # engines; an asynchronous link keeps what is under way, so it serves one at a time
    cdef object kept            # the link inside, or whatever else its addresses belong to

    def __cinit__(self, *args, **kwargs):
        self.link.enter = no_enter
        self.link.begin = no_begin
        self.link.abandon = no_abandon
        self.link.depth = 1
        self.link.file_chunk = INT64_MAX
        self.link.decodes = True

    cdef void wrap(self, _Link inner):
        self.kept = inner
        self.link.asynchronous = inner.link.asynchronous
        self.link.direct = inner.link.direct
        self.link.depth = inner.link.depth
        self.link.file_chunk = inner.link.file_chunk
        self.link.hangs = inner.link.hangs
        self.link.decodes = inner.link.decodes

    @property
    def in_use(self):
        return self.users > 0

    @property
    def asynchronous(self):
        return self.link.asynchronous

    def __reduce__(self):
        refuse_copy(self)
