# Copies to a CUDA device, over the addresses of runtime functions that moecache.cuda takes from cuda-python.


cdef enum:                      # of the CUDA runtime's API
    CUDA_INVALID_VALUE = 1      # cudaErrorInvalidValue
    CUDA_NOT_READY = 600        # cudaErrorNotReady
    CUDA_HOST_TO_DEVICE = 1     # cudaMemcpyHostToDevice
    CUDA_CAPTURE_RELAXED = 2    # cudaStreamCaptureModeRelaxed

cdef enum:
    CUDA_POLL_NS = 10000        # how late a landing may be noticed


cdef uint64_t NO_STREAM = <uint64_t> -1       # 0 is a handle: the default stream


cdef struct Cuda:               # what a CudaLink works on; written when it is made, except where a field says otherwise
    # The runtime's functions of these names, which return a cudaError_t.
    int (*memcpy_async)(void*, const void*, size_t, int, void*) noexcept nogil
    int (*event_record)(void*, void*) noexcept nogil
    int (*event_query)(void*) noexcept nogil
    int (*stream_wait_event)(void*, void*, unsigned int) noexcept nogil
    int (*set_device)(int) noexcept nogil
    int (*exchange_capture_mode)(int*) noexcept nogil
    int device                  # number of the device
    void* stream                # that copies are queued on
    uint64_t* events            # [tickets] end of the chunk with each ticket
    int32_t slots               # length of the next four
    uint64_t* read_event        # last reader of each slot
    uint64_t* read_stream       # where that was recorded, NO_STREAM: nowhere; written with the link's `marking` held
    uint64_t* copy_event        # end of the last copy into each slot
    int32_t* fresh              # 1: the copy may not have landed, who reads the slot waits for its event; atomic
    int32_t ending[MAX_DEPTH]   # slot whose copy ends with the chunk of this ticket, -1: none; the I/O thread's
    uint64_t* locked            # ascending [start, stop) of page-locked host memory, one registration each
    int32_t locked_count        # how many there are
    unsigned char* staging      # page-locked memory for what lies in files or in pageable memory, one part per ticket
    int64_t staging_part        # bytes of a part, a multiple of 4096; 0: there is no such memory


# Names of cudaError_t that a copy, an event or a stream may return; after those of the second kind nothing works any more.
_CUDA_ERRORS = {1: "invalid value", 2: "out of memory", 4: "driver shutting down", 35: "insufficient driver",
                46: "device busy or unavailable", 100: "no device", 101: "invalid device", 201: "invalid context",
                304: "operating system call failed", 400: "invalid handle", 709: "context is destroyed",
                800: "not permitted", 801: "not supported", 900: "stream capture unsupported",
                901: "stream capture invalidated", 905: "stream capture isolation"}
_CUDA_STICKY = {214: "uncorrectable ECC error", 220: "uncorrectable NVLink error", 700: "illegal address",
                702: "launch timeout", 710: "device-side assert", 714: "hardware stack error", 715: "illegal instruction",
                716: "misaligned address", 717: "invalid address space", 718: "invalid program counter",
                719: "launch failure", 999: "unknown"}


def cuda_message(int code):
    """What a cudaError_t says."""
    if code in _CUDA_STICKY:
        return (f"CUDA error {code} ({_CUDA_STICKY[code]}), from this copy or a kernel before it: the process can use the "
                "device no more")
    return f"CUDA error {code}" + (f" ({_CUDA_ERRORS[code]})" if code in _CUDA_ERRORS else "")


cdef int cuda_error(int code) noexcept nogil:
    return 0 if code == 0 else CUDA_ERROR + code


cdef int cuda_enter(Link* link) noexcept nogil:
    # A new thread's current device is 0; using it would make a context there. And copies on a stream of our own do not
    # concern a graph that another thread captures: relaxed, neither do this thread's queries.
    cdef Cuda* cuda = <Cuda*> link.context
    cdef int mode = CUDA_CAPTURE_RELAXED
    cdef int code = cuda.set_device(cuda.device)
    return cuda_error(code if code else cuda.exchange_capture_mode(&mode))


cdef int cuda_begin(Link* link, int32_t slot) noexcept nogil:
    cdef Cuda* cuda = <Cuda*> link.context
    if slot >= cuda.slots or cuda.read_stream[slot] == NO_STREAM:
        return 0
    return cuda_error(cuda.stream_wait_event(cuda.stream, <void*> cuda.read_event[slot], 0))


cdef int64_t locked_run(Cuda* cuda, uint64_t source, int64_t nbytes, bint* locked) noexcept nogil:
    """How many of the bytes lie in one registration, or, if the first does not, before the next one.

    Memory registered in pieces is several registrations to the driver, and a copy may use only one of them.
    """
    cdef int32_t low = 0, high = cuda.locked_count, middle
    while low < high:
        middle = (low + high) // 2
        if cuda.locked[2 * middle + 1] <= source:
            low = middle + 1
        else:
            high = middle
    locked[0] = low < cuda.locked_count and cuda.locked[2 * low] <= source
    if low == cuda.locked_count:
        return nbytes
    return <int64_t> min(<uint64_t> nbytes, cuda.locked[2 * low + (1 if locked[0] else 0)] - source)


cdef int cuda_send(Cuda* cuda, uint64_t target, uint64_t source, int64_t nbytes) noexcept nogil:
    return cuda.memcpy_async(<void*> target, <void*> source, <size_t> nbytes, CUDA_HOST_TO_DEVICE, cuda.stream)


cdef int cuda_send_memory(Cuda* cuda, Chunk* chunk, int32_t ticket) noexcept nogil:
    """Page-locked memory travels from where it lies, the rest by way of the staging buffer as long as there is any.

    The driver copies pageable memory too, but only when the stream has come that far, with the calling thread waiting.
    """
    cdef unsigned char* staged = cuda.staging + ticket * cuda.staging_part
    cdef int64_t capacity = cuda.staging_part, nbytes, left
    cdef uint64_t target, source
    cdef bint locked = False
    cdef int32_t i
    cdef int code
    for i in range(chunk.pieces):
        target, source, left = chunk.target[i], chunk.source[i], chunk.length[i]
        while left:
            nbytes = locked_run(cuda, source, left, &locked)
            code = cuda_send(cuda, target, source, nbytes) if locked else CUDA_INVALID_VALUE
            # Memory locked by somebody else may end, or have been unlocked, without our knowing.
            if code == CUDA_INVALID_VALUE and nbytes <= capacity:
                memcpy(staged, <void*> source, <size_t> nbytes)
                code = cuda_send(cuda, target, <uint64_t> staged, nbytes)
                staged += nbytes
                capacity -= nbytes
            elif code == CUDA_INVALID_VALUE and not locked:
                code = cuda_send(cuda, target, source, nbytes)
            if code:
                return cuda_error(code)
            target += nbytes
            source += nbytes
            left -= nbytes
    return 0


cdef int cuda_send_file(Link* link, Mover* mover, Chunk* chunk, int32_t ticket) noexcept nogil:
    """Read into the staging buffer while the chunks before travel on from theirs."""
    cdef Cuda* cuda = <Cuda*> link.context
    cdef unsigned char* staged = NULL
    cdef int32_t i
    cdef int error = read_staged(link, mover, chunk.file, chunk, cuda.staging + ticket * cuda.staging_part, &staged)
    for i in range(chunk.pieces):
        if error:
            break
        error = cuda_error(cuda_send(cuda, chunk.target[i], <uint64_t> staged, chunk.length[i]))
        staged += chunk.length[i]
    return error


cdef int cuda_copy(Link* link, Mover* mover, Chunk* chunk, int32_t ticket) noexcept nogil:
    cdef Cuda* cuda = <Cuda*> link.context
    cdef int error
    if chunk.file >= 0:
        error = cuda_send_file(link, mover, chunk, ticket)
    else:
        error = cuda_send_memory(cuda, chunk, ticket)
    return error if error else cuda_error(cuda.event_record(<void*> cuda.events[ticket], cuda.stream))


cdef int cuda_end(Link* link, int32_t slot, int32_t ticket) noexcept nogil:
    cdef Cuda* cuda = <Cuda*> link.context
    cdef int code = cuda.event_record(<void*> cuda.copy_event[slot], cuda.stream)
    if code == 0:
        cuda.ending[ticket] = slot
        store_release(&cuda.fresh[slot], 1)
    return cuda_error(code)


cdef int cuda_query(Link* link, Mover* mover, int32_t ticket, int64_t* again_ns) noexcept nogil:
    cdef Cuda* cuda = <Cuda*> link.context
    cdef int code = cuda.event_query(<void*> cuda.events[ticket])
    cdef int32_t slot = cuda.ending[ticket]
    if code == CUDA_NOT_READY:
        again_ns[0] = now_ns() + CUDA_POLL_NS
        return PENDING
    cuda.ending[ticket] = -1
    if slot >= 0 and code == 0:
        store_release(&cuda.fresh[slot], 0)
    return cuda_error(code)


cdef class CudaLink(_Link):
    """Copies host memory, and through it files, to a CUDA device, on a stream of its own.

    Nothing here is linked against CUDA: the functions are addresses, which :mod:`moecache.cuda` takes from cuda-python.
    A slot counts as complete when the last of its bytes has been given to the stream: `before_reading` puts the reader's
    stream behind them, and the host does not wait for what only the device needs.

    Parameters
    ----------
    memcpy_async, event_record, event_query, stream_wait_event, set_device, exchange_capture_mode
        Addresses of the runtime's functions of these names (the last is ``cudaThreadExchangeStreamCaptureMode``).
    device
        Device number, made current on the I/O thread.
    stream
        Handle of the copy stream.
    events : uint64[D]
        Handles of D <= 64 events; at most D chunks are outstanding.
    read_event, copy_event : uint64[slots]
        Per slot the handles of two events: recorded after its last reader, and at the end of the last copy into it.
    locked : uint64[n, 2]
        Ascending [start, stop) of page-locked host memory, one registration each. No single copy runs across a border.
    staging, staging_nbytes
        Page-locked memory (address aligned to 4096) that file reads and pageable memory go through; needed for files only.
    direct
        Read files past the page cache.
    owner
        Any object to keep alive as long as the link.
    """
    cdef Cuda cuda                      # what the link's functions work on
    cdef uint64_t[::1] read_stream      # the memory of `cuda.read_stream`
    cdef int32_t[::1] fresh             # the memory of `cuda.fresh`
    cdef pthread_mutex_t marking        # held while readers are recorded: two leases on one expert may end at once

    def __cinit__(self, *args, **kwargs):
        pthread_mutex_init(&self.marking, NULL)

    def __dealloc__(self):
        pthread_mutex_destroy(&self.marking)

    def __init__(self, *, uint64_t memcpy_async, uint64_t event_record, uint64_t event_query,
                 uint64_t stream_wait_event, uint64_t set_device, uint64_t exchange_capture_mode, int device,
                 uint64_t stream, uint64_t[::1] events not None, uint64_t[::1] read_event not None,
                 uint64_t[::1] copy_event not None, uint64_t[:, ::1] locked=None, uint64_t staging=0,
                 int64_t staging_nbytes=0, bint direct=True, owner=None):
        cdef Py_ssize_t slots = read_event.shape[0]
        if not 1 <= events.shape[0] <= MAX_DEPTH:
            raise ValueError(f"need 1 to {MAX_DEPTH} events, got {events.shape[0]}")
        if slots < 1 or copy_event.shape[0] != slots:
            raise ValueError(f"need two events a slot, got {slots} and {copy_event.shape[0]}")
        if staging % 4096:
            raise ValueError("the staging buffer must begin at a multiple of 4096")
        if locked is not None and locked.shape[0] and locked.shape[1] != 2:
            raise ValueError("locked memory is [start, stop) in two columns")
        self.kept = (events, read_event, copy_event, locked, owner)
        self.cuda.memcpy_async = <int (*)(void*, const void*, size_t, int, void*) noexcept nogil> <void*> memcpy_async
        self.cuda.event_record = <int (*)(void*, void*) noexcept nogil> <void*> event_record
        self.cuda.event_query = <int (*)(void*) noexcept nogil> <void*> event_query
        self.cuda.stream_wait_event = <int (*)(void*, void*, unsigned int) noexcept nogil> <void*> stream_wait_event
        self.cuda.set_device = <int (*)(int) noexcept nogil> <void*> set_device
        self.cuda.exchange_capture_mode = <int (*)(int*) noexcept nogil> <void*> exchange_capture_mode
        self.cuda.device = device
        self.cuda.stream = <void*> stream
        self.cuda.events = &events[0]
        self.read_stream = np.full(slots, NO_STREAM, np.uint64)
        self.fresh = np.zeros(slots, np.int32)
        self.cuda.slots = <int32_t> slots
        self.cuda.read_event = &read_event[0]
        self.cuda.read_stream = &self.read_stream[0]
        self.cuda.copy_event = &copy_event[0]
        self.cuda.fresh = &self.fresh[0]
        for i in range(MAX_DEPTH):
            self.cuda.ending[i] = -1
        if locked is not None and locked.shape[0]:
            self.cuda.locked_count = <int32_t> locked.shape[0]
            self.cuda.locked = &locked[0, 0]
        self.cuda.staging = <unsigned char*> staging
        self.cuda.staging_part = staging_nbytes // events.shape[0] // 4096 * 4096
        self.link.context = &self.cuda
        self.link.enter = cuda_enter
        self.link.begin = cuda_begin
        self.link.copy = cuda_copy
        self.link.end = cuda_end
        self.link.query = cuda_query
        self.link.asynchronous = True
        self.link.decodes = False
        self.link.direct = direct
        self.link.depth = <int32_t> events.shape[0]
        # A direct read takes the aligned blocks around the bytes: up to one block more on either side.
        self.link.file_chunk = max(self.cuda.staging_part - 2 * 4096, 0)

    cdef int check(self, const int32_t[::1] slots) except -1:
        cdef Py_ssize_t i
        for i in range(slots.shape[0]):
            if not 0 <= slots[i] < self.cuda.slots:
                raise RoutingError(f"slot {slots[i]} is outside 0..{self.cuda.slots - 1}")
        return 0

    def before_reading(self, const int32_t[::1] slots not None, uint64_t stream):
        """Let what this compute stream is given from now on wait, on the device, for the copies into these slots.

        Parameters
        ----------
        slots : int32[n]
        stream
            Handle of the compute stream.

        Returns
        -------
        int
            How many of the copies may not have landed yet.

        Raises
        ------
        OSError
            The runtime refused; the message has its number.
        """
        cdef Py_ssize_t i
        cdef int waits = 0, code = 0
        self.check(slots)
        with nogil:
            for i in range(slots.shape[0]):
                if load_acquire(&self.cuda.fresh[slots[i]]) and code == 0:
                    code = self.cuda.stream_wait_event(<void*> stream, <void*> self.cuda.copy_event[slots[i]], 0)
                    waits += 1
        if code:
            raise system_error(CUDA_ERROR + code)
        return waits

    def is_fresh(self, int32_t slot):
        """Whether the last copy into a slot may not have landed yet."""
        return 0 <= slot < self.cuda.slots and load_acquire(&self.cuda.fresh[slot]) != 0

    def mark_readers(self, const int32_t[::1] slots not None, uint64_t stream):
        """Record on a compute stream that everything queued there so far may read these slots.

        Parameters
        ----------
        slots : int32[n]
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
        cdef int code = 0
        cdef void* event
        self.check(slots)
        with nogil:
            pthread_mutex_lock(&self.marking)
            for i in range(slots.shape[0]):
                slot = slots[i]
                event = <void*> self.cuda.read_event[slot]
                if self.cuda.read_stream[slot] not in (NO_STREAM, stream):
                    code = self.cuda.stream_wait_event(<void*> stream, event, 0)
                if code == 0:
                    code = self.cuda.event_record(event, <void*> stream)
                if code:
                    break
                self.cuda.read_stream[slot] = stream
            pthread_mutex_unlock(&self.marking)
        if code:
            raise system_error(CUDA_ERROR + code)

    @property
    def reads_files(self):
        """Whether there is staging buffer for experts that lie in files."""
        return self.link.file_chunk > 0
