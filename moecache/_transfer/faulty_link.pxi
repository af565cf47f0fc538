# A link that fails, stalls or is late, around another.


cdef enum:                      # where an injected error strikes
    AT_ENTER = 0                # the I/O thread starts
    AT_BEGIN = 1                # a job starts
    AT_COPY = 2                 # a chunk starts
    AT_LANDING = 3              # a chunk's bytes are there


cdef enum:
    STALL_POLL_NS = 50000       # how late the release of a stalled chunk may be noticed


_STAGES = {"enter": AT_ENTER, "begin": AT_BEGIN, "copy": AT_COPY, "landing": AT_LANDING}


cdef struct Faults:             # what a FaultyLink works on; chunks are numbered from 1, a number of 0 stands for none
    Link* inner                 # that makes the copies
    int64_t chunks              # started so far; atomic
    int64_t begins              # jobs started so far, by the one thread of an asynchronous link
    int stage                   # AT_ENTER, AT_BEGIN, AT_COPY or AT_LANDING
    int64_t fail_at             # the first chunk (or job) that fails
    int64_t fails               # how many in a row fail
    int64_t fail_every          # after fail_at they fail again every so many chunks, 0: once
    int error                   # errno of a failure
    int64_t short_copy_at       # of this chunk only a part arrives
    int64_t end_thread_at       # the I/O thread vanishes at this chunk
    int64_t delay_ns            # every chunk takes this much longer
    int64_t short_read          # most bytes one read of a file returns, 0: no limit
    bint refuse_direct          # direct reads return EINVAL
    int64_t stall_at            # this chunk and later ones wait until they are released
    bint stall_landed           # with their bytes there already
    int64_t released            # chunks released from the stall; atomic
    int32_t abandoned           # 1: the engine closes, nothing stalls any more; atomic
    int64_t number[MAX_DEPTH]   # of the chunk with this ticket
    bint landed[MAX_DEPTH]      # whether the bytes of the chunk with this ticket are there


cdef inline bint strikes(Faults* faults, int stage, int64_t number) noexcept nogil:
    cdef int64_t since = number - faults.fail_at
    if faults.stage != stage or not faults.fail_at or since < 0:
        return False
    return (since % faults.fail_every if faults.fail_every else since) < faults.fails


cdef inline bint is_stalled(Faults* faults, int64_t number, bint landed) noexcept nogil:
    return (faults.stall_at and faults.stall_landed == landed and load_acquire(&faults.abandoned) == 0
            and number >= faults.stall_at + load_relaxed(&faults.released))


cdef inline int at_landing(Faults* faults, int64_t number) noexcept nogil:
    return faults.error if number == faults.short_copy_at or strikes(faults, AT_LANDING, number) else 0


cdef void sleep_ns(int64_t nanoseconds) noexcept nogil:
    cdef timespec pause
    pause.tv_sec = nanoseconds // 1000000000
    pause.tv_nsec = nanoseconds % 1000000000
    nanosleep(&pause, NULL)


cdef void stall(Faults* faults, int64_t number, bint landed) noexcept nogil:
    while is_stalled(faults, number, landed):
        sleep_ns(STALL_POLL_NS)


cdef int faulty_enter(Link* link) noexcept nogil:
    cdef Faults* faults = <Faults*> link.context
    store_release(&faults.abandoned, 0)
    if faults.stage == AT_ENTER and faults.fail_at:
        return faults.error
    return faults.inner.enter(faults.inner)


cdef void faulty_abandon(Link* link) noexcept nogil:
    cdef Faults* faults = <Faults*> link.context
    store_release(&faults.abandoned, 1)
    faults.inner.abandon(faults.inner)


cdef int faulty_begin(Link* link, int32_t slot) noexcept nogil:
    cdef Faults* faults = <Faults*> link.context
    faults.begins += 1
    if strikes(faults, AT_BEGIN, faults.begins):
        return faults.error
    return faults.inner.begin(faults.inner, slot)


cdef int faulty_copy(Link* link, Mover* mover, Chunk* chunk, int32_t ticket) noexcept nogil:
    cdef Faults* faults = <Faults*> link.context
    cdef int64_t number = add_relaxed(&faults.chunks, 1)
    cdef Chunk part
    cdef int error
    if faults.delay_ns:
        sleep_ns(faults.delay_ns)
    if faults.end_thread_at and number >= faults.end_thread_at and mover.on_thread:
        return THREAD_ENDS
    mover.fault_file = chunk.file
    mover.fault_offset = chunk.source[0]
    if strikes(faults, AT_COPY, number):
        return faults.error
    if number == faults.short_copy_at:
        part = chunk[0]
        if part.packed != NULL:
            part.rows //= 2
        else:
            part.pieces = 1
            part.nbytes = part.length[0] = part.length[0] // 2
        chunk = &part
    mover.short_read = faults.short_read
    mover.refuse_direct = faults.refuse_direct
    if link.asynchronous:
        faults.number[ticket] = number
        faults.landed[ticket] = False
        return faults.inner.copy(faults.inner, mover, chunk, ticket)
    stall(faults, number, False)
    error = faults.inner.copy(faults.inner, mover, chunk, ticket)
    stall(faults, number, True)
    return error if error else at_landing(faults, number)


cdef int faulty_query(Link* link, Mover* mover, int32_t ticket, int64_t* again_ns) noexcept nogil:
    cdef Faults* faults = <Faults*> link.context
    cdef int64_t number = faults.number[ticket]
    cdef int status
    if not is_stalled(faults, number, False):
        if not faults.landed[ticket]:
            status = faults.inner.query(faults.inner, mover, ticket, again_ns)
            if status:
                return status
            faults.landed[ticket] = True
        if not is_stalled(faults, number, True):
            return at_landing(faults, number)
    again_ns[0] = now_ns() + STALL_POLL_NS
    return PENDING


cdef class FaultyLink(_Link):
    """Injects faults into another link, for tests.

    Parameters
    ----------
    fail_at, fails, fail_every, error, stage
        Chunks number ``fail_at`` to ``fail_at + fails - 1`` (the first is 1) fail with this errno, and with `fail_every` as
        many again every so many chunks: as they start
        (``"copy"``) or, with their bytes in the slot, as they land (``"landing"``). ``"begin"``: the same of a job's
        start, which only asynchronous links have. ``"enter"``: the I/O thread cannot start at all.
    short_copy_at
        Of this chunk half of the first piece arrives, and then it fails with ``error``.
    delay_s
        Every chunk takes this much longer.
    short_read
        A read of a file returns at most this many bytes.
    refuse_direct
        The file system refuses direct reads.
    end_thread_at
        The I/O thread vanishes at this chunk.
    stall_at, stall_landed
        This chunk and all later ones stand still until `release` lets them go on: before their bytes have moved, or
        with `stall_landed` after it (a completion that comes late). Closing the engine frees them too.
    """
    cdef Faults faults          # what the link's functions work on

    def __init__(self, _Link inner not None, *, int64_t fail_at=0, int64_t fails=1, int64_t fail_every=0,
                 int error=EIO, str stage="copy", int64_t short_copy_at=0, double delay_s=0.0, int64_t short_read=0,
                 bint refuse_direct=False, int64_t end_thread_at=0, int64_t stall_at=0, bint stall_landed=False):
        if stage not in _STAGES:
            raise ValueError(f"stage {stage!r} is none of {', '.join(_STAGES)}")
        self.wrap(inner)
        self.faults.inner = &inner.link
        self.faults.stage = _STAGES[stage]
        self.faults.fail_at = fail_at
        self.faults.fails = fails
        self.faults.fail_every = fail_every
        self.faults.error = error
        self.faults.short_copy_at = short_copy_at
        self.faults.end_thread_at = end_thread_at
        self.faults.delay_ns = <int64_t> (delay_s * 1e9)
        self.faults.short_read = short_read
        self.faults.refuse_direct = refuse_direct
        self.faults.stall_at = stall_at
        self.faults.stall_landed = stall_landed
        self.link.hangs |= delay_s > 0 or stall_at > 0
        self.link.context = &self.faults
        self.link.enter = faulty_enter
        self.link.begin = faulty_begin
        self.link.abandon = faulty_abandon
        self.link.copy = faulty_copy
        self.link.query = faulty_query

    def release(self, int64_t chunks=INT64_MAX >> 1):
        """Let so many more of the stalled chunks go on, in the order they were started in; by default all."""
        add_relaxed(&self.faults.released, min(chunks, (INT64_MAX >> 1) - self.faults.released))

    @property
    def chunks(self):
        """Chunks started so far."""
        return load_relaxed(&self.faults.chunks)
