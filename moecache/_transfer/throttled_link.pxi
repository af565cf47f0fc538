# A link of limited rate and latency around another.


cdef inline double uniform(uint64_t* state) noexcept nogil:
    """The next number of SplitMix64 (Steele, Lea, Flood 2014) in [0, 1)."""
    cdef uint64_t z
    state[0] += <uint64_t> 0x9E3779B97F4A7C15
    z = state[0]
    z = (z ^ (z >> 30)) * <uint64_t> 0xBF58476D1CE4E5B9
    z = (z ^ (z >> 27)) * <uint64_t> 0x94D049BB133111EB
    return ((z ^ (z >> 31)) >> 11) * 1.1102230246251565e-16       # 2^-53


cdef struct Throttle:           # what a ThrottledLink works on; from `random` on written by the I/O thread
    Link* inner                 # that makes the copies
    double ns_per_byte          # of the wire
    int64_t latency_ns          # from a chunk's last byte on the wire to its landing
    double jitter_ns            # most that is added to it
    uint64_t seed               # of the random parts
    uint64_t random             # state of their generator
    bint abandoned              # the engine closes
    int64_t free_ns             # when the wire is free again
    int64_t last_due_ns         # when the chunk started last lands
    int64_t due_ns[MAX_DEPTH]   # when the chunk with this ticket lands
    Chunk chunks[MAX_DEPTH]     # the chunk with this ticket


cdef int throttled_enter(Link* link) noexcept nogil:
    cdef Throttle* wire = <Throttle*> link.context
    wire.abandoned = False
    wire.free_ns = wire.last_due_ns = 0
    wire.random = wire.seed
    return wire.inner.enter(wire.inner)


cdef void throttled_abandon(Link* link) noexcept nogil:
    (<Throttle*> link.context).abandoned = True


cdef int throttled_copy(Link* link, Mover* mover, Chunk* chunk, int32_t ticket) noexcept nogil:
    cdef Throttle* wire = <Throttle*> link.context
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
    cdef Throttle* wire = <Throttle*> link.context
    if wire.abandoned:
        return ECANCELED
    if now_ns() < wire.due_ns[ticket]:
        again_ns[0] = wire.due_ns[ticket]
        return PENDING
    return wire.inner.copy(wire.inner, mover, &wire.chunks[ticket], ticket)


cdef class ThrottledLink(_Link):
    """A link of limited rate: chunks follow each other at ``bytes_per_s`` and land ``latency_s`` or somewhat more later.

    It models PCIe: copies are asynchronous, end in the order they were started in, and their bytes change only
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
    cdef Throttle wire          # what the link's functions work on

    def __init__(self, _Link inner not None, double bytes_per_s, double latency_s=0.0, double jitter_s=0.0,
                 uint64_t seed=0):
        if inner.link.asynchronous:
            raise ValueError("ThrottledLink needs a synchronous inner link (HostLink, FileLink)")
        if not bytes_per_s > 0 or not 0 <= latency_s <= 1e6 or not 0 <= jitter_s <= 1e6:
            raise ValueError(f"need bytes_per_s > 0, and latency_s and jitter_s from 0 to 1e6, got {bytes_per_s}, "
                             f"{latency_s} and {jitter_s}")
        self.wrap(inner)
        self.wire.inner = &inner.link
        self.wire.ns_per_byte = 1e9 / bytes_per_s
        self.wire.latency_ns = <int64_t> (latency_s * 1e9)
        self.wire.jitter_ns = jitter_s * 1e9
        self.wire.seed = seed
        self.link.context = &self.wire
        self.link.enter = throttled_enter
        self.link.abandon = throttled_abandon
        self.link.copy = throttled_copy
        self.link.query = throttled_query
        self.link.asynchronous = True
        self.link.depth = MAX_DEPTH
