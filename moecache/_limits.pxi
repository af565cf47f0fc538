# Links around another: one of limited rate, and one that fails, stalls or is late.
# Included by _engine.pyx, after _links.pxi.


cdef inline double uniform(uint64_t* state) noexcept nogil:
    """The next number of SplitMix64 (Steele, Lea, Flood 2014) in [0, 1)."""
    cdef uint64_t z
    state[0] += <uint64_t> 0x9E3779B97F4A7C15
    z = state[0]
    z = (z ^ (z >> 30)) * <uint64_t> 0xBF58476D1CE4E5B9
    z = (z ^ (z >> 27)) * <uint64_t> 0x94D049BB133111EB
    return ((z ^ (z >> 31)) >> 11) * 1.1102230246251565e-16       # 2^-53


cdef struct Throttle:
    Link* inner
    double ns_per_byte
    int64_t latency_ns
    double jitter_ns
    uint64_t seed
    uint64_t random
    bint abandoned
    int64_t free_ns             # when the wire is free again
    int64_t last_due_ns
    int64_t due_ns[MAX_DEPTH]
    Chunk chunks[MAX_DEPTH]


cdef int throttled_enter(Link* link) noexcept nogil:
    cdef Throttle* wire = <Throttle*> link.state
    wire.abandoned = False
    wire.free_ns = wire.last_due_ns = 0
    wire.random = wire.seed
    return wire.inner.enter(wire.inner)


cdef void throttled_abandon(Link* link) noexcept nogil:
    (<Throttle*> link.state).abandoned = True


cdef int throttled_copy(Link* link, Mover* mover, Chunk* chunk, int32_t ticket) noexcept nogil:
    cdef Throttle* wire = <Throttle*> link.state
    cdef int64_t late = wire.latency_ns
    if wire.jitter_ns > 0:
        late += <int64_t> (wire.jitter_ns * uniform(&wire.random))
    wire.free_ns = max(wire.free_ns, now_ns()) + <int64_t> (chunk.nbytes * wire.ns_per_byte)
    # Copies of one stream end in their order: one that is late holds up those behind it.
    wire.last_due_ns = wire.due_ns[ticket] = max(wire.free_ns + late, wire.last_due_ns)
    wire.chunks[ticket] = chunk[0]
    return 0


cdef int throttled_query(Link* link, Mover* mover, int32_t ticket, int64_t* again_ns) noexcept nogil:
    # The bytes land when the chunk is due, not when it starts: a reader that does not wait gets the old ones.
    cdef Throttle* wire = <Throttle*> link.state
    if wire.abandoned:
        return ECANCELED
    if now_ns() < wire.due_ns[ticket]:
        again_ns[0] = wire.due_ns[ticket]
        return PENDING
    return wire.inner.copy(wire.inner, mover, &wire.chunks[ticket], ticket)


cdef enum:                      # where an injected error strikes
    AT_ENTER = 0
    AT_BEGIN = 1
    AT_COPY = 2
    AT_LANDING = 3

cdef enum:
    STALL_POLL_NS = 50000

_STAGES = {"enter": AT_ENTER, "begin": AT_BEGIN, "copy": AT_COPY, "landing": AT_LANDING}


cdef struct Faults:
    Link* inner
    int64_t chunks              # seen so far
    int64_t begins
    int stage
    int64_t fail_at
    int64_t fails
    int error
    int64_t short_copy_at
    int64_t end_thread_at
    int64_t delay_ns
    int64_t short_read
    bint refuse_direct
    int64_t stall_at            # this chunk and later ones wait until they are released, 0: none does
    bint stall_landed           # with their bytes there already
    int64_t released
    int32_t abandoned
    int64_t number[MAX_DEPTH]   # of the chunk with this ticket
    bint landed[MAX_DEPTH]


cdef inline bint strikes(Faults* faults, int stage, int64_t number) noexcept nogil:
    return faults.stage == stage and faults.fail_at and faults.fail_at <= number < faults.fail_at + faults.fails


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
    cdef Faults* faults = <Faults*> link.state
    store_release(&faults.abandoned, 0)
    if faults.stage == AT_ENTER and faults.fail_at:
        return faults.error
    return faults.inner.enter(faults.inner)


cdef void faulty_abandon(Link* link) noexcept nogil:
    cdef Faults* faults = <Faults*> link.state
    store_release(&faults.abandoned, 1)
    faults.inner.abandon(faults.inner)


cdef int faulty_begin(Link* link, int32_t slot) noexcept nogil:
    cdef Faults* faults = <Faults*> link.state
    faults.begins += 1
    if strikes(faults, AT_BEGIN, faults.begins):
        return faults.error
    return faults.inner.begin(faults.inner, slot)


cdef int faulty_copy(Link* link, Mover* mover, Chunk* chunk, int32_t ticket) noexcept nogil:
    cdef Faults* faults = <Faults*> link.state
    cdef int64_t number = add_relaxed(&faults.chunks, 1)
    cdef Chunk part
    cdef int error
    if faults.delay_ns:
        sleep_ns(faults.delay_ns)
    if faults.end_thread_at and number >= faults.end_thread_at and mover.on_thread:
        return THREAD_ENDS
    mover.fault_offset = chunk.source[0]
    if strikes(faults, AT_COPY, number):
        return faults.error
    if number == faults.short_copy_at:
        part = chunk[0]
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
    cdef Faults* faults = <Faults*> link.state
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


cdef class ThrottledLink(_Link):
    """A link of limited rate: chunks follow each other at ``bytes_per_s`` and land ``latency_s`` or somewhat more later.

    It stands in for PCIe: copies are asynchronous, end in the order they were started in, and their bytes change only
    when they land.

    Parameters
    ----------
    inner
        The synchronous link that makes the copies.
    bytes_per_s
        Rate of the wire.
    latency_s, jitter_s
        A chunk lands this long after its last byte has left, plus a random part of `jitter_s`, evenly distributed.
    seed
        Of the random parts: an engine that is made anew with the link sees the same ones.

    Raises
    ------
    ValueError
        The inner link is asynchronous itself, or a number is out of range.
    """
    cdef Throttle wire

    def __init__(self, _Link inner not None, double bytes_per_s, double latency_s=0.0, double jitter_s=0.0,
                 uint64_t seed=0):
        if inner.link.asynchronous:
            raise ValueError("ThrottledLink needs a synchronous inner link (HostLink, FileLink)")
        if not bytes_per_s > 0 or not 0 <= latency_s <= 1e6 or not 0 <= jitter_s <= 1e6:
            raise ValueError(f"need bytes_per_s > 0, and latency_s and jitter_s from 0 to 1e6, got {bytes_per_s}, "
                             f"{latency_s} and {jitter_s}")
        self.wraps(inner)
        self.wire.inner = &inner.link
        self.wire.ns_per_byte = 1e9 / bytes_per_s
        self.wire.latency_ns = <int64_t> (latency_s * 1e9)
        self.wire.jitter_ns = jitter_s * 1e9
        self.wire.seed = seed
        self.link.state = &self.wire
        self.link.enter = throttled_enter
        self.link.abandon = throttled_abandon
        self.link.copy = throttled_copy
        self.link.query = throttled_query
        self.link.asynchronous = True
        self.link.depth = MAX_DEPTH


cdef class FaultyLink(_Link):
    """Injects faults into another link, for tests.

    Parameters
    ----------
    fail_at, fails, error, stage
        Chunks number ``fail_at`` to ``fail_at + fails - 1`` (the first is 1) fail with this errno: as they start
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
    cdef Faults faults

    def __init__(self, _Link inner not None, *, int64_t fail_at=0, int64_t fails=1, int error=EIO, str stage="copy",
                 int64_t short_copy_at=0, double delay_s=0.0, int64_t short_read=0, bint refuse_direct=False,
                 int64_t end_thread_at=0, int64_t stall_at=0, bint stall_landed=False):
        if stage not in _STAGES:
            raise ValueError(f"stage {stage!r} is none of {', '.join(_STAGES)}")
        self.wraps(inner)
        self.faults.inner = &inner.link
        self.faults.stage = _STAGES[stage]
        self.faults.fail_at = fail_at
        self.faults.fails = fails
        self.faults.error = error
        self.faults.short_copy_at = short_copy_at
        self.faults.end_thread_at = end_thread_at
        self.faults.delay_ns = <int64_t> (delay_s * 1e9)
        self.faults.short_read = short_read
        self.faults.refuse_direct = refuse_direct
        self.faults.stall_at = stall_at
        self.faults.stall_landed = stall_landed
        self.link.hangs |= delay_s > 0 or stall_at > 0
        self.link.state = &self.faults
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
