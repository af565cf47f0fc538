# The links: what the bytes travel over. Each is a C record of functions; the classes below only fill one in.
# Included by _engine.pyx.


cdef int no_enter(Link* link) noexcept nogil:
    return 0


cdef int no_begin(Link* link, int32_t slot) noexcept nogil:
    return 0


cdef void no_abandon(Link* link) noexcept nogil:
    pass


cdef int host_copy(Link* link, Mover* mover, Chunk* chunk, int32_t ticket) noexcept nogil:
    cdef int32_t i
    for i in range(chunk.pieces):
        memcpy(<void*> chunk.target[i], <void*> chunk.source[i], <size_t> chunk.length[i])
    return 0


cdef int read_buffered(Mover* mover, File* file, uint64_t source, unsigned char* target, int64_t nbytes) noexcept nogil:
    cdef int64_t done = 0, got, ask
    while done < nbytes:
        ask = nbytes - done
        if mover.short_read:
            ask = min(ask, mover.short_read)
        got = pread(file.buffered, target + done, <size_t> ask, <off_t> (source + done))
        if got <= 0:
            if got < 0 and errno == EINTR:
                continue
            mover.fault_offset = source + done
            return END_OF_FILE if got == 0 else errno
        done += got
    return 0


cdef int read_direct(Mover* mover, File* file, uint64_t source, unsigned char* buffer, int64_t nbytes) noexcept nogil:
    """Read the aligned blocks around the bytes into the buffer; EAGAIN: they are to be read the other way."""
    cdef int64_t mask = file.align - 1, done = 0, got
    cdef uint64_t base = source & ~(<uint64_t> mask)
    cdef int64_t needed = <int64_t> (source - base) + nbytes
    cdef int64_t ask = (needed + mask) & ~mask
    while done < needed:
        got = pread(file.direct, buffer + done, <size_t> (ask - done), <off_t> (base + done))
        if got < 0 and errno == EINTR:
            continue
        if mover.refuse_direct or (got < 0 and errno in (EINVAL, EOPNOTSUPP)):
            store_release(&file.refused, 1)
            return EAGAIN
        if got <= 0:
            mover.fault_offset = base + done
            return END_OF_FILE if got == 0 else errno
        if mover.short_read:
            got = min(got, mover.short_read)
        if done + got < needed:
            # The next direct read must begin on a block; less than a block is the end of the file or a whim.
            if got < file.align:
                return EAGAIN
            got &= ~mask
        done += got
    return 0


cdef bint goes_direct(Link* link, File* file) noexcept nogil:
    return link.direct and file.direct >= 0 and load_acquire(&file.refused) == 0


cdef int file_copy(Link* link, Mover* mover, Chunk* chunk, int32_t ticket) noexcept nogil:
    cdef File* file
    cdef int error = EAGAIN
    cdef int32_t i
    cdef int64_t at
    if chunk.file < 0:
        return host_copy(link, mover, chunk, ticket)
    file = &mover.files[chunk.file]
    if goes_direct(link, file):
        if mover.bounce == NULL and posix_memalign(<void**> &mover.bounce, 4096, <size_t> mover.bounce_bytes):
            mover.bounce = NULL
            return ENOMEM
        error = read_direct(mover, file, chunk.source[0], mover.bounce, chunk.nbytes)
        if error == 0:
            add_relaxed(&mover.counters.direct_reads, 1)
            at = chunk.source[0] & <uint64_t> (file.align - 1)
            for i in range(chunk.pieces):
                memcpy(<void*> chunk.target[i], mover.bounce + at, <size_t> chunk.length[i])
                at += chunk.length[i]
        if error != EAGAIN:
            return error
    for i in range(chunk.pieces):
        error = read_buffered(mover, file, chunk.source[i], <unsigned char*> chunk.target[i], chunk.length[i])
        if error:
            return error
    add_relaxed(&mover.counters.buffered_reads, 1)
    if link.direct:
        posix_fadvise(file.buffered, <off_t> chunk.source[0], <off_t> chunk.nbytes, POSIX_FADV_DONTNEED)
    return 0


cdef struct Throttle:
    Link* inner
    double ns_per_byte
    int64_t latency_ns
    bint abandoned
    int64_t free_ns             # when the wire is free again
    int64_t due_ns[MAX_DEPTH]
    Chunk chunks[MAX_DEPTH]


cdef int throttled_enter(Link* link) noexcept nogil:
    cdef Throttle* wire = <Throttle*> link.state
    wire.abandoned = False
    wire.free_ns = 0
    return wire.inner.enter(wire.inner)


cdef void throttled_abandon(Link* link) noexcept nogil:
    (<Throttle*> link.state).abandoned = True


cdef int throttled_copy(Link* link, Mover* mover, Chunk* chunk, int32_t ticket) noexcept nogil:
    cdef Throttle* wire = <Throttle*> link.state
    wire.free_ns = max(wire.free_ns, now_ns()) + <int64_t> (chunk.nbytes * wire.ns_per_byte)
    wire.due_ns[ticket] = wire.free_ns + wire.latency_ns
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


cdef struct Faults:
    Link* inner
    int64_t chunks              # seen so far
    int64_t fail_at
    int64_t fails
    int error
    int64_t end_thread_at
    int64_t delay_ns
    int64_t short_read
    bint refuse_direct


cdef int faulty_enter(Link* link) noexcept nogil:
    cdef Faults* faults = <Faults*> link.state
    return faults.inner.enter(faults.inner)


cdef void faulty_abandon(Link* link) noexcept nogil:
    cdef Faults* faults = <Faults*> link.state
    faults.inner.abandon(faults.inner)


cdef int faulty_begin(Link* link, int32_t slot) noexcept nogil:
    cdef Faults* faults = <Faults*> link.state
    return faults.inner.begin(faults.inner, slot)


cdef int faulty_copy(Link* link, Mover* mover, Chunk* chunk, int32_t ticket) noexcept nogil:
    cdef Faults* faults = <Faults*> link.state
    cdef int64_t number = add_relaxed(&faults.chunks, 1)
    cdef timespec pause
    if faults.delay_ns:
        pause.tv_sec = faults.delay_ns // 1000000000
        pause.tv_nsec = faults.delay_ns % 1000000000
        nanosleep(&pause, NULL)
    if faults.end_thread_at and number >= faults.end_thread_at and mover.on_thread:
        return THREAD_ENDS
    if faults.fail_at and faults.fail_at <= number < faults.fail_at + faults.fails:
        mover.fault_offset = chunk.source[0]
        return faults.error
    mover.short_read = faults.short_read
    mover.refuse_direct = faults.refuse_direct
    return faults.inner.copy(faults.inner, mover, chunk, ticket)


cdef int faulty_query(Link* link, Mover* mover, int32_t ticket, int64_t* again_ns) noexcept nogil:
    cdef Faults* faults = <Faults*> link.state
    return faults.inner.query(faults.inner, mover, ticket, again_ns)


cdef enum:
    CUDA_NOT_READY = 600
    CUDA_HOST_TO_DEVICE = 1
    CUDA_POLL_NS = 10000


cdef uint64_t NO_STREAM = <uint64_t> -1       # 0 is a handle: the default stream


cdef struct Cuda:
    int (*memcpy_async)(void*, const void*, size_t, int, void*) noexcept nogil
    int (*event_record)(void*, void*) noexcept nogil
    int (*event_query)(void*) noexcept nogil
    int (*stream_wait_event)(void*, void*, unsigned int) noexcept nogil
    int (*set_device)(int) noexcept nogil
    int device
    void* stream
    uint64_t* events            # one per ticket
    uint64_t* slot_event        # last reader of each slot, 0: none
    uint64_t* slot_stream       # where that was recorded
    int32_t slots
    uint64_t* seams             # host addresses no single copy may run across
    int32_t seam_count
    unsigned char* staging      # page-locked room for file reads, one part per ticket
    int64_t staging_part


cdef int cuda_error(int code) noexcept nogil:
    return 0 if code == 0 else CUDA_ERROR + code


cdef int cuda_enter(Link* link) noexcept nogil:
    # A new thread's current device is 0; using it would make a context there.
    cdef Cuda* cuda = <Cuda*> link.state
    return cuda_error(cuda.set_device(cuda.device))


cdef int cuda_begin(Link* link, int32_t slot) noexcept nogil:
    cdef Cuda* cuda = <Cuda*> link.state
    if cuda.slot_event == NULL or cuda.slot_event[slot] == 0:
        return 0
    return cuda_error(cuda.stream_wait_event(cuda.stream, <void*> cuda.slot_event[slot], 0))


cdef int cuda_send(Cuda* cuda, uint64_t target, uint64_t source, int64_t nbytes) noexcept nogil:
    # Memory registered in pieces is several registrations to the driver, and a copy may use only one of them.
    cdef int64_t part
    cdef int32_t low = 0, high = cuda.seam_count, middle
    cdef int error
    while low < high:
        middle = (low + high) // 2
        if cuda.seams[middle] <= source:
            low = middle + 1
        else:
            high = middle
    while nbytes:
        part = nbytes
        if low < cuda.seam_count and cuda.seams[low] - source < <uint64_t> nbytes:
            part = <int64_t> (cuda.seams[low] - source)
            low += 1
        error = cuda.memcpy_async(<void*> target, <void*> source, <size_t> part, CUDA_HOST_TO_DEVICE, cuda.stream)
        if error:
            return cuda_error(error)
        target += part
        source += part
        nbytes -= part
    return 0


cdef int cuda_copy(Link* link, Mover* mover, Chunk* chunk, int32_t ticket) noexcept nogil:
    cdef Cuda* cuda = <Cuda*> link.state
    cdef File* file
    cdef unsigned char* staged
    cdef int error = EAGAIN
    cdef int32_t i
    if chunk.file >= 0:
        file = &mover.files[chunk.file]
        staged = cuda.staging + ticket * cuda.staging_part
        if goes_direct(link, file):
            error = read_direct(mover, file, chunk.source[0], staged, chunk.nbytes)
        if error == 0:
            add_relaxed(&mover.counters.direct_reads, 1)
            staged += chunk.source[0] & <uint64_t> (file.align - 1)
        elif error == EAGAIN:
            error = read_buffered(mover, file, chunk.source[0], staged, chunk.nbytes)
            add_relaxed(&mover.counters.buffered_reads, 1)
            if link.direct:
                posix_fadvise(file.buffered, <off_t> chunk.source[0], <off_t> chunk.nbytes, POSIX_FADV_DONTNEED)
        if error:
            return error
        for i in range(chunk.pieces):
            chunk.source[i] = <uint64_t> staged
            staged += chunk.length[i]
    for i in range(chunk.pieces):
        error = cuda_send(cuda, chunk.target[i], chunk.source[i], chunk.length[i])
        if error:
            return error
    return cuda_error(cuda.event_record(<void*> cuda.events[ticket], cuda.stream))


cdef int cuda_query(Link* link, Mover* mover, int32_t ticket, int64_t* again_ns) noexcept nogil:
    cdef Cuda* cuda = <Cuda*> link.state
    cdef int code = cuda.event_query(<void*> cuda.events[ticket])
    if code == CUDA_NOT_READY:
        again_ns[0] = now_ns() + CUDA_POLL_NS
        return PENDING
    return cuda_error(code)


cdef class _Link:
    cdef Link link
    cdef readonly bint in_use   # an asynchronous link keeps what is under way, so it serves one engine at a time
    cdef object kept

    def __cinit__(self, *args, **kwargs):
        self.link.enter = no_enter
        self.link.begin = no_begin
        self.link.abandon = no_abandon
        self.link.depth = 1
        self.link.file_chunk = INT64_MAX

    cdef void wraps(self, _Link inner):
        self.kept = inner
        self.link.asynchronous = inner.link.asynchronous
        self.link.direct = inner.link.direct
        self.link.depth = inner.link.depth
        self.link.file_chunk = inner.link.file_chunk

    @property
    def asynchronous(self):
        return self.link.asynchronous


cdef class HostLink(_Link):
    """Copies host memory to host memory."""

    def __init__(self):
        self.link.copy = host_copy
        self.link.file_chunk = 0


cdef class FileLink(_Link):
    """Reads files with ``pread``; copies segments that lie in host memory too.

    Parameters
    ----------
    direct
        Read past the page cache (``O_DIRECT``), whatever the alignment of a segment. Where the file system refuses,
        reads go through the cache, the pages are given back after each and ``buffered_reads`` counts them.
        ``False``: read through the page cache and leave the pages there.
    """

    def __init__(self, direct=True):
        self.link.copy = file_copy
        self.link.direct = direct


cdef class ThrottledLink(_Link):
    """A link of limited rate: chunks follow each other at ``bytes_per_s`` and land ``latency_s`` later.

    It stands in for PCIe: copies are asynchronous, and their bytes change only when they land.

    Raises
    ------
    ValueError
        The inner link is asynchronous itself, or a number is out of range.
    """
    cdef Throttle wire

    def __init__(self, _Link inner not None, double bytes_per_s, double latency_s=0.0):
        if inner.link.asynchronous:
            raise ValueError("ThrottledLink needs a synchronous inner link (HostLink, FileLink)")
        if not bytes_per_s > 0 or not latency_s >= 0:
            raise ValueError(f"need bytes_per_s > 0 and latency_s >= 0, got {bytes_per_s} and {latency_s}")
        self.wraps(inner)
        self.wire.inner = &inner.link
        self.wire.ns_per_byte = 1e9 / bytes_per_s
        self.wire.latency_ns = <int64_t> (latency_s * 1e9)
        self.link.state = &self.wire
        self.link.enter = throttled_enter
        self.link.abandon = throttled_abandon
        self.link.copy = throttled_copy
        self.link.query = throttled_query
        self.link.asynchronous = True
        self.link.depth = MAX_DEPTH


cdef class FaultyLink(_Link):
    """Injects faults into another link.

    Parameters
    ----------
    fail_at, fails, error
        Chunks number ``fail_at`` to ``fail_at + fails - 1`` (the first is 1) fail with this errno.
    delay_s
        Every chunk takes this much longer.
    short_read
        A read of a file returns at most this many bytes.
    refuse_direct
        The file system refuses direct reads.
    end_thread_at
        The I/O thread vanishes at this chunk.
    """
    cdef Faults faults

    def __init__(self, _Link inner not None, *, int64_t fail_at=0, int64_t fails=1, int error=EIO, double delay_s=0.0,
                 int64_t short_read=0, bint refuse_direct=False, int64_t end_thread_at=0):
        self.wraps(inner)
        self.faults = Faults(inner=&inner.link, chunks=0, fail_at=fail_at, fails=fails, error=error,
                             end_thread_at=end_thread_at, delay_ns=<int64_t> (delay_s * 1e9), short_read=short_read,
                             refuse_direct=refuse_direct)
        self.link.state = &self.faults
        self.link.enter = faulty_enter
        self.link.begin = faulty_begin
        self.link.abandon = faulty_abandon
        self.link.copy = faulty_copy
        self.link.query = faulty_query

    @property
    def chunks(self):
        """Chunks seen so far."""
        return self.faults.chunks


cdef class CudaLink(_Link):
    """Copies page-locked host memory to a CUDA device, on a stream of its own.

    Nothing here is linked against CUDA: the functions are addresses, which :mod:`moecache.cuda` takes from cuda-python.

    Parameters
    ----------
    memcpy_async, event_record, event_query, stream_wait_event, set_device
        Addresses of the runtime's functions of these names.
    device
        Device number, made current on the I/O thread.
    stream
        Handle of the copy stream.
    events : uint64[D]
        Handles of D <= 64 events; at most D chunks are outstanding.
    slot_event : uint64[slots]
        Per slot the event recorded after its last reader, 0: none. Not copied: what is there when a job begins is what
        the copy waits for. See `mark_readers`.
    seams : uint64[n]
        Ascending host addresses that no single copy may run across (the borders of registered pieces).
    staging, staging_nbytes
        Page-locked room (address aligned to 4096) that file reads go through; needed only for experts in files.
    direct
        Read files past the page cache.
    owner
        Any object to keep alive as long as the link.
    """
    cdef Cuda cuda
    cdef uint64_t[::1] slot_stream

    def __init__(self, *, uint64_t memcpy_async, uint64_t event_record, uint64_t event_query,
                 uint64_t stream_wait_event, uint64_t set_device, int device, uint64_t stream,
                 uint64_t[::1] events not None, uint64_t[::1] slot_event=None,
                 uint64_t[::1] seams=None, uint64_t staging=0, int64_t staging_nbytes=0, bint direct=True, owner=None):
        if not 1 <= events.shape[0] <= MAX_DEPTH:
            raise ValueError(f"need 1 to {MAX_DEPTH} events, got {events.shape[0]}")
        if staging % 4096:
            raise ValueError("the staging room must begin at a multiple of 4096")
        self.kept = (events, slot_event, seams, owner)
        self.cuda.memcpy_async = <int (*)(void*, const void*, size_t, int, void*) noexcept nogil> <void*> memcpy_async
        self.cuda.event_record = <int (*)(void*, void*) noexcept nogil> <void*> event_record
        self.cuda.event_query = <int (*)(void*) noexcept nogil> <void*> event_query
        self.cuda.stream_wait_event = <int (*)(void*, void*, unsigned int) noexcept nogil> <void*> stream_wait_event
        self.cuda.set_device = <int (*)(int) noexcept nogil> <void*> set_device
        self.cuda.device = device
        self.cuda.stream = <void*> stream
        self.cuda.events = &events[0]
        if slot_event is not None and slot_event.shape[0]:
            self.slot_stream = np.full(slot_event.shape[0], NO_STREAM, np.uint64)
            self.cuda.slots = <int32_t> slot_event.shape[0]
            self.cuda.slot_event = &slot_event[0]
            self.cuda.slot_stream = &self.slot_stream[0]
        if seams is not None and seams.shape[0]:
            self.cuda.seam_count = <int32_t> seams.shape[0]
            self.cuda.seams = &seams[0]
        self.cuda.staging = <unsigned char*> staging
        self.cuda.staging_part = staging_nbytes // events.shape[0] // 4096 * 4096
        self.link.state = &self.cuda
        self.link.enter = cuda_enter
        self.link.begin = cuda_begin
        self.link.copy = cuda_copy
        self.link.query = cuda_query
        self.link.asynchronous = True
        self.link.direct = direct
        self.link.depth = <int32_t> events.shape[0]
        # A direct read takes the aligned blocks around the bytes: up to one block more on either side.
        self.link.file_chunk = max(self.cuda.staging_part - 2 * 4096, 0)

    def mark_readers(self, const int32_t[::1] slots not None, uint64_t stream):
        """Record on a compute stream that everything queued there so far may read these slots.

        Parameters
        ----------
        slots : int32[n]
            Their entries in `slot_event` are handles of existing events.
        stream
            Handle of the compute stream. A slot that another stream has read keeps that order too: this stream waits
            for the other's event before it records its own.

        Raises
        ------
        OSError
            The runtime refused; the message has its number.
        """
        cdef Py_ssize_t i
        cdef int32_t slot
        cdef int error = 0
        cdef void* event
        for i in range(slots.shape[0]):
            if not 0 <= slots[i] < self.cuda.slots:
                raise RoutingError(f"slot {slots[i]} is outside 0..{self.cuda.slots - 1}")
        with nogil:
            for i in range(slots.shape[0]):
                slot = slots[i]
                event = <void*> self.cuda.slot_event[slot]
                if self.cuda.slot_stream[slot] not in (NO_STREAM, stream):
                    error = self.cuda.stream_wait_event(<void*> stream, event, 0)
                if error == 0:
                    error = self.cuda.event_record(event, <void*> stream)
                if error:
                    break
                self.cuda.slot_stream[slot] = stream
        if error:
            raise system_error(CUDA_ERROR + error, None, 0)

    @property
    def reads_files(self):
        """Whether there is staging room for experts that lie in files."""
        return self.link.file_chunk > 0
