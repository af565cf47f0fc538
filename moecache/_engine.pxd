# C declarations of the engine: the records it works on and the few system calls Cython does not declare itself.
from libc.stdint cimport int32_t, int64_t, uint32_t, uint64_t


cdef extern from "_transfer/system.h":
    ctypedef struct pthread_t:
        pass
    ctypedef struct pthread_mutex_t:
        pass
    ctypedef struct pthread_cond_t:
        pass
    int pthread_create(pthread_t *, void *, void *(*)(void *) noexcept nogil, void *) nogil
    int pthread_join(pthread_t, void **) nogil
    int pthread_mutex_init(pthread_mutex_t *, void *) nogil
    int pthread_mutex_lock(pthread_mutex_t *) nogil
    int pthread_mutex_unlock(pthread_mutex_t *) nogil
    int pthread_mutex_destroy(pthread_mutex_t *) nogil
    int pthread_cond_wait(pthread_cond_t *, pthread_mutex_t *) nogil
    int pthread_cond_signal(pthread_cond_t *) nogil
    int pthread_cond_broadcast(pthread_cond_t *) nogil
    int pthread_cond_destroy(pthread_cond_t *) nogil
    void store_release(int32_t *, int32_t) nogil
    int32_t load_acquire(const int32_t *) nogil
    int64_t add_relaxed(int64_t *, int64_t) nogil
    int64_t load_relaxed(const int64_t *) nogil
    void store_double(double *, double) nogil
    double load_double(const double *) nogil
    int64_t now_ns() nogil
    int cond_init(pthread_cond_t *) nogil
    void cond_wait_until(pthread_cond_t *, pthread_mutex_t *, int64_t) nogil
    void prepare_thread() nogil
    int64_t direct_alignment(int, int64_t *) nogil
    void advise_huge(void *, size_t) nogil
    int stamp_of(int, uint64_t *, int64_t *, int64_t *) nogil
    int32_t fork_count() nogil
    void watch_forks() nogil
    struct iovec:
        void *iov_base
        size_t iov_len
    ssize_t preadv(int, const iovec *, int, int64_t) nogil
    int ECANCELED
    int O_DIRECT
    int O_CLOEXEC


cdef extern from "_transfer/copy.h" nogil:
    enum: MOE_WAYS
    void moe_copy(int way, void *, const void *, size_t)
    void moe_time_ways(double *best, void *, const void *, size_t, int rounds)


cdef enum:
    MAX_PIECES = 8                  # segments one chunk may touch
    MAX_PARTS = 2 * MAX_PIECES + 1  # buffers one read may fill: the pieces and what lies around them
    MAX_DEPTH = 64                  # chunks an asynchronous link may have outstanding
    MAX_THREADS = 64                # I/O threads of one engine
    MAX_STREAMS = 4                 # runs of bytes that packed values are decoded from; no more than MAX_PIECES

cdef enum:                  # what a link's functions return: 0 is done, a positive number is an errno
    PENDING = -1            # the chunk is still under way
    END_OF_FILE = -2        # the file is shorter than its sources say
    THREAD_ENDS = -3        # only a faulty link returns this: the I/O thread is to vanish
    FILE_CHANGED = -4       # written or replaced since its stamp was taken: what was read is not to be used
    MEMORY_MOVED = -5       # the tensor that a source was to be read from lies elsewhere now
    CUDA_ERROR = 100000     # plus the cudaError_t

cdef enum:                  # level of a job
    DEMAND = 0              # a step waits for it
    PREFETCH = 1            # a copy ahead of need

cdef enum:                  # state of a slot's job
    IDLE = 0                # none, complete, failed or dropped
    QUEUED = 1              # in a queue; perhaps some of its chunks move already
    BLOCKED = 2             # may not begin before the copy of an earlier generation into the slot has stopped
    MOVING = 3              # in no queue any more: its last chunks move

# Decodes rows from `first` on, one of the recipe's quanta, of a matrix that begins at `out`. Each stream begins with what
# these rows need of it. Called without the GIL, on any thread.
ctypedef void (*Decoder)(const unsigned char** streams, const int64_t* numbers, const unsigned char* table, int64_t first,
                         int64_t rows, unsigned char* out) noexcept nogil

cdef struct Recipe:         # how a matrix is decoded from its streams; written when the engine is made
    Decoder decode          # the format's loop
    const int64_t* numbers  # that it is called with
    const unsigned char* table  # that it is called with, NULL: none
    int32_t streams         # in use of the two arrays below
    int64_t rows            # of the matrix
    int64_t chunk_rows      # that one chunk decodes, a multiple of the quantum
    int64_t step[MAX_STREAMS]       # of so many rows
    int64_t nbytes[MAX_STREAMS]     # the stream has so many bytes

cdef struct Segment:        # a run of a source's bytes; written when the engine is made
    Recipe* recipe          # of the matrix whose first stream this is, NULL: plain bytes, or a further stream, which follows
    int32_t file            # index into the files, -1: host memory
    int32_t region          # where in the slot it goes: which region,
    uint64_t source         # byte offset in the file, or address
    int64_t nbytes          # never 0
    uint64_t offset         # and how many bytes from the slot's begin in that region

cdef struct Chunk:          # the unit that travels; plain pieces from a file are neighbours there
    Segment* packed         # the first of the streams that its pieces are parts of, NULL: its bytes go as they are
    int64_t first_row       # of those that are decoded,
    int64_t rows            # and how many they are; their matrix begins at target[0]
    int32_t file            # that all its pieces, or the first of its streams, come from, -1: host memory
    int32_t pieces          # in use of the three arrays below
    int64_t nbytes          # of all pieces
    uint64_t source[MAX_PIECES]     # byte offset in the file, or address
    uint64_t target[MAX_PIECES]     # address in the slot
    int64_t length[MAX_PIECES]      # bytes

cdef struct File:           # one of a checkpoint's files; written with the lock of its Files held, except `refused`
    const char* path        # bytes that the handle owns
    int direct              # descriptor past the page cache, -1: none is open
    int buffered            # descriptor through it, -1: none is open
    int32_t refused         # direct reads are refused, by opening or by the first read; atomic
    int32_t users           # reads under way
    int64_t used            # number of the last use among all files' uses
    int64_t align           # bytes that offset and length of a direct read are multiples of, 0: not asked yet
    int64_t memory_align    # bytes that the address of a direct read is a multiple of
    bint stamped            # the next three are known: from the caller, or else from the first opening
    uint64_t inode          # what the file was when its stamp was taken
    int64_t nbytes          # its length then
    int64_t modified_ns     # its time of modification then

cdef struct Files:          # of one engine
    pthread_mutex_t lock    # over descriptors and users; taken last, and held while a file is opened
    File* file              # [count]
    int32_t count           # files
    int32_t open            # descriptors that are open
    int64_t uses            # of all files so far; names the last use of one

cdef struct Counters:       # sums since the start or a reset, all of 64 bits; Engine.counters() in _engine.pyi defines them
    int64_t bytes_demand        # arrived with a job whose level was demand by then
    int64_t bytes_prefetch      # arrived with a prefetch, those of dropped ones too
    int64_t jobs_demand         # completed
    int64_t jobs_prefetch       # completed
    int64_t joined              # prefetches raised to demand before they were complete
    int64_t prefetch_dropped    # dropped before their first chunk had started
    int64_t prefetch_cancelled  # dropped after that
    int64_t failed              # jobs
    int64_t stall_ns            # callers waited
    int64_t busy_ns             # the link was in use, summed over threads that copy at once
    int64_t reading_ns          # the part of busy_ns in which chunks came from files
    int64_t direct_reads        # chunks read past the page cache; atomic, without the lock
    int64_t buffered_reads      # chunks read through it; atomic, without the lock
    int64_t helped              # chunks copied by waiting callers

cdef struct Mover:          # what a thread that moves bytes has for itself
    Files* files            # of the engine
    Counters* counters      # of the engine, for those that are atomic
    unsigned char* bounce   # aligned buffer for direct reads, made at the first one
    int64_t bounce_bytes    # its size, once it is made
    int32_t fault_file      # in which file the last error of a read was,
    int64_t fault_offset    # and where in it
    int64_t short_read      # injected: most bytes one read returns, 0: no limit
    bint refuse_direct      # injected: direct reads return EINVAL
    bint on_thread          # an I/O thread's, not a helping caller's
    int way                 # how large copies between host memory are made (copy.h)
    bint busy               # it copies a chunk over a synchronous link:
    int32_t slot            # into this slot,
    int64_t nbytes          # so many bytes,
    int64_t since           # since then, in ns of the monotonic clock
    Mover* next             # in the list of spare ones
    Mover* next_of_all      # in the list of all

cdef struct Link:           # what bytes travel over; written when it is made
    bint asynchronous       # copy() only starts a chunk, query() says when it is over
    bint direct             # read files past the page cache
    bint decodes            # it takes packed sources
    bint hangs              # a copy from memory may stand still too: waiting callers leave all to the I/O threads
    int32_t depth           # chunks outstanding at most
    int64_t file_chunk      # most bytes of a chunk that comes from a file, 0: it reads none
    # On an I/O thread, once, before anything else.
    int (*enter)(Link*) noexcept nogil
    # Before a job's first chunk; asynchronous links only.
    int (*begin)(Link*, int32_t slot) noexcept nogil
    # Make, or start, the copy of a chunk. The ticket is 0 <= ticket < depth and free; synchronous links get 0.
    int (*copy)(Link*, Mover*, Chunk*, int32_t ticket) noexcept nogil
    # NULL, or after the start of a job's last chunk: from here on the link itself orders readers behind the copy.
    int (*end)(Link*, int32_t slot, int32_t ticket) noexcept nogil
    # The engine closes: outstanding chunks may be left undone.
    void (*abandon)(Link*) noexcept nogil
    # How the copy with this ticket stands; PENDING: ask again at that time, in ns of the monotonic clock.
    int (*query)(Link*, Mover*, int32_t ticket, int64_t* again_ns) noexcept nogil
    void* context           # what the functions work on: the record of the link's class

cdef struct Slot:           # a slot and its one live job; written with the engine's lock held
    int32_t state           # IDLE, QUEUED, BLOCKED or MOVING
    int32_t level           # DEMAND or PREFETCH
    int32_t source          # what is copied
    int32_t generation      # of the live job, or of the last
    int32_t newest          # highest generation seen, also through a drop
    int32_t dropped         # highest generation dropped
    float priority          # of a prefetch; the larger goes first
    int32_t previous        # neighbours in the demand queue, -1: none
    int32_t next
    int32_t heap            # position in the prefetch queue
    int64_t sequence        # names one admission; 0: none is live, so that a late chunk finds nobody
    int64_t segment         # where the next chunk begins: in this segment
    int64_t offset          # so many bytes after its begin, or rows of a packed one
    int64_t landed          # bytes of the live job that have arrived
    int32_t begun           # 1: its first chunk has started
    int32_t outstanding     # chunks of the live job that are moving
    int32_t stale           # chunks of earlier jobs that still move into the slot
    int32_t awaited         # callers that sleep until the job is over
    int32_t fault           # of the last failed job: what the link returned,
    int32_t fault_file      # for which file, -1: none,
    int64_t fault_offset    # at which byte of it

cdef struct InFlight:       # a chunk that moves
    int32_t slot            # that it goes to
    int32_t level           # of the job when it started
    int64_t sequence        # of the job it belongs to, which may have ended since
    int64_t nbytes          # it carries
    int32_t file            # it comes from, -1: host memory

cdef struct EngineState:    # written with `lock` held, except where a field says otherwise
    pthread_mutex_t lock    # never held while a link's function runs
    pthread_cond_t work     # I/O threads sleep here
    pthread_cond_t done     # waiting callers sleep here
    bint closing            # no job is taken any more, threads are to end
    int32_t threads         # I/O threads that were started
    int32_t threads_entered     # that are past the link's enter()
    int32_t threads_ended   # before the engine was closed
    int thread_error        # why, if it is known
    int32_t sleepers        # I/O threads that sleep
    int32_t drainers        # callers that sleep until no job is left
    int32_t paused          # how many want no chunk to start
    int32_t pausers         # callers that sleep until no chunk moves
    int32_t moving          # chunks between their start and their landing, stale ones too
    bint notify             # callers that sleep are to be woken when the lock is released
    int32_t helpers         # waiting callers that copy a chunk now
    int32_t slots_count     # written when the engine is made, as are the next six
    int32_t* complete       # [slots] the caller's: atomic, release order; read without the lock
    Slot* slots             # [slots]
    Segment* segments       # those of source i are segment_start[i] to segment_start[i + 1] - 1
    int64_t* segment_start  # [sources + 1]
    Recipe* recipes         # that segments refer to
    int64_t staging_bytes   # that the streams of a chunk take with the blocks around them, at most
    uint64_t* region_address    # [regions] where each begins; move_region() writes it too
    uint64_t* region_stride     # [regions] bytes from one slot to the next
    int32_t first           # ends of the demand queue, a list through the slots; -1: it is empty
    int32_t last
    int32_t demand_count    # jobs in it
    int32_t* heap           # [slots] prefetch queue
    int32_t heap_count      # jobs in it
    int64_t sequence        # of the last admission
    int32_t live            # jobs that are not idle
    int32_t stale           # sum of all slots' stale
    int way                 # of copying, for the movers
    int64_t chunk_bytes     # most bytes of a chunk
    int64_t window_bytes    # most bytes outstanding on an asynchronous link; one chunk may be at least
    Link* link              # what bytes travel over
    Files files             # with a lock of their own
    Counters counters       # what happened so far
    int64_t link_since      # up to here the time in which chunks move is accounted for, in ns
    double link_bytes       # decayed sum of bytes that arrived
    double link_ns          # decayed sum of time in which something moved
    double link_rate        # their quotient in bytes/s, read without the lock; 0: nothing has moved yet
    Mover* spare_movers     # for callers that help
    Mover* all_movers       # every one that was made
    InFlight flights[MAX_DEPTH]     # ring of chunks on an asynchronous link; a ticket is a position here
    int32_t flight_first    # position of the oldest
    int32_t flight_count    # how many there are
    int64_t flight_bytes    # of all of them
