# C declarations of the engine: the records it works on and the few system calls Cython does not declare itself.
from libc.stdint cimport int32_t, int64_t, uint32_t, uint64_t


cdef extern from *:
    """
    #include <errno.h>
    #include <fcntl.h>
    #include <pthread.h>
    #include <signal.h>
    #include <string.h>
    #include <sys/mman.h>
    #include <sys/prctl.h>
    #include <sys/stat.h>
    #include <sys/uio.h>
    #include <time.h>
    #include <unistd.h>

    static inline void store_release(int32_t *to, int32_t value) { __atomic_store_n(to, value, __ATOMIC_RELEASE); }
    static inline int32_t load_acquire(const int32_t *from) { return __atomic_load_n(from, __ATOMIC_ACQUIRE); }
    static inline int64_t add_relaxed(int64_t *to, int64_t value) {
        return __atomic_add_fetch(to, value, __ATOMIC_RELAXED);
    }
    static inline int64_t load_relaxed(const int64_t *from) { return __atomic_load_n(from, __ATOMIC_RELAXED); }
    static inline void store_double(double *to, double value) { __atomic_store(to, &value, __ATOMIC_RELAXED); }
    static inline double load_double(const double *from) {
        double value;
        __atomic_load(from, &value, __ATOMIC_RELAXED);
        return value;
    }

    static inline int64_t now_ns(void) {
        struct timespec t;
        clock_gettime(CLOCK_MONOTONIC, &t);
        return (int64_t)t.tv_sec * 1000000000 + t.tv_nsec;
    }

    static inline int cond_init(pthread_cond_t *cond) {
        pthread_condattr_t attr;
        pthread_condattr_init(&attr);
        pthread_condattr_setclock(&attr, CLOCK_MONOTONIC);
        int error = pthread_cond_init(cond, &attr);
        pthread_condattr_destroy(&attr);
        return error;
    }

    static inline void cond_wait_until(pthread_cond_t *cond, pthread_mutex_t *mutex, int64_t deadline_ns) {
        struct timespec t = {deadline_ns / 1000000000, deadline_ns % 1000000000};
        pthread_cond_timedwait(cond, mutex, &t);
    }

    /* The default timer slack of 50 us would make every poll of a copy that late. Signals are for Python's threads. */
    static inline void prepare_thread(void) {
        sigset_t all;
        sigfillset(&all);
        pthread_sigmask(SIG_BLOCK, &all, NULL);
        prctl(PR_SET_TIMERSLACK, 1000UL, 0UL, 0UL, 0UL);
        prctl(PR_SET_NAME, "moecache-io", 0UL, 0UL, 0UL);
    }

    static inline void advise_huge(void *memory, size_t nbytes) {
    #ifdef MADV_HUGEPAGE
        int kept = errno;
        madvise(memory, nbytes, MADV_HUGEPAGE);
        errno = kept;
    #endif
    }

    /* Alignment that direct reads of this file need, of offset and length; 0: the file system says it has none.
       Of the memory they may need less, and never more. */
    static inline int64_t direct_alignment(int fd, int64_t *memory) {
        *memory = 4096;
    #ifdef STATX_DIOALIGN
        struct statx s;
        if (statx(fd, "", AT_EMPTY_PATH, STATX_DIOALIGN, &s) == 0 && (s.stx_mask & STATX_DIOALIGN)) {
            *memory = s.stx_dio_mem_align;
            return s.stx_dio_mem_align > s.stx_dio_offset_align ? s.stx_dio_mem_align : s.stx_dio_offset_align;
        }
    #endif
        return 4096;
    }

    /* What tells a file from another one, and from itself after a write. Returns an errno. */
    static inline int stamp_of(int fd, uint64_t *inode, int64_t *nbytes, int64_t *modified_ns) {
        struct stat s;
        if (fstat(fd, &s)) return errno;
        *inode = s.st_ino;
        *nbytes = s.st_size;
        *modified_ns = (int64_t)s.st_mtim.tv_sec * 1000000000 + s.st_mtim.tv_nsec;
        return 0;
    }

    static int32_t forks = 0;  /* threads do not survive a fork: an engine made before one is dead after it */
    static void count_fork(void) { forks++; }
    static void watch_forks(void) { pthread_atfork(NULL, NULL, count_fork); }
    static int32_t fork_count(void) { return forks; }
    """
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


cdef extern from "_copy.h" nogil:
    enum: MOE_WAYS
    void moe_copy(int way, void *, const void *, size_t)
    void moe_time_ways(double *best, void *, const void *, size_t, int rounds)


cdef enum:
    MAX_PIECES = 8          # segments one chunk may touch
    MAX_PARTS = 2 * MAX_PIECES + 1
    MAX_DEPTH = 64          # chunks an asynchronous link may have outstanding

cdef enum:                  # what a link answers: 0 is done, a positive number is an errno
    PENDING = -1
    END_OF_FILE = -2
    THREAD_ENDS = -3        # only a faulty link says this: the I/O thread is to vanish
    FILE_CHANGED = -4       # written or replaced since its stamp was taken: what was read is not to be used
    MEMORY_MOVED = -5       # the tensor that a source was to be read from lies elsewhere now
    CUDA_ERROR = 100000     # plus the cudaError_t

cdef enum:                  # level of a job
    DEMAND = 0
    PREFETCH = 1

cdef enum:                  # state of a slot's job
    IDLE = 0                # none, complete, failed or dropped
    QUEUED = 1              # in a queue; perhaps some of its chunks move already
    BLOCKED = 2             # may not begin before an earlier tenancy's copy into the slot has stopped
    MOVING = 3              # in no queue any more: its last chunks move

cdef struct Segment:
    int32_t file            # -1: host memory
    int32_t region
    uint64_t source         # byte offset in the file, or address
    int64_t nbytes
    uint64_t offset         # inside the slot's room of the region

cdef struct Chunk:          # the unit that travels; from a file its pieces are neighbours there
    int32_t file
    int32_t pieces
    int64_t nbytes
    uint64_t source[MAX_PIECES]
    uint64_t target[MAX_PIECES]
    int64_t length[MAX_PIECES]

cdef struct File:
    const char* path        # bytes that the keeper owns
    int direct              # descriptor past the page cache, -1: none is open
    int buffered            # descriptor through it, -1: none is open
    int32_t refused         # direct reads are refused, by opening or by the first read
    int32_t users           # reads under way
    int64_t used            # number of the last use among all files' uses
    int64_t align           # of offset and length of a direct read
    int64_t memory_align    # of its memory
    bint stamped            # the next three are known: from the caller, or else from the first opening
    uint64_t inode
    int64_t nbytes
    int64_t modified_ns

cdef struct Files:
    pthread_mutex_t lock    # over descriptors and users; taken last, and held while a file is opened
    File* file
    int32_t count
    int32_t open            # descriptors
    int64_t uses

cdef struct Counters:       # 64-bit
    int64_t bytes_demand
    int64_t bytes_prefetch
    int64_t jobs_demand
    int64_t jobs_prefetch
    int64_t joined
    int64_t prefetch_dropped
    int64_t prefetch_cancelled
    int64_t failed
    int64_t stall_ns
    int64_t busy_ns
    int64_t reading_ns      # the part of busy_ns in which chunks came from files
    int64_t direct_reads
    int64_t buffered_reads
    int64_t helped

cdef struct Mover:          # what a thread that moves bytes has for itself
    Files* files
    Counters* counters
    unsigned char* bounce   # aligned buffer for direct reads, made at the first one
    int64_t bounce_bytes
    int64_t fault_offset    # where in the file the last error was
    int64_t short_read      # injected: most bytes one read returns, 0: no limit
    bint refuse_direct      # injected: direct reads answer EINVAL
    bint on_thread          # an I/O thread's, not a helping caller's
    int way                 # how large copies between host memory are made (_copy.h)
    bint busy               # it copies a chunk of this many bytes into this slot since then
    int32_t slot
    int64_t nbytes
    int64_t since
    Mover* next             # spare ones
    Mover* sibling          # all of them

cdef struct Link:
    bint asynchronous       # copy() only starts a chunk, query() tells when it is over
    bint direct             # read files past the page cache
    bint hangs              # a copy from memory may stand still too: waiting callers leave all to the I/O threads
    int32_t depth           # chunks outstanding at most
    int64_t file_chunk      # most bytes of a chunk that comes from a file, 0: it reads none
    int (*enter)(Link*) noexcept nogil                       # on the I/O thread, once
    int (*begin)(Link*, int32_t slot) noexcept nogil         # before a job's first chunk
    int (*copy)(Link*, Mover*, Chunk*, int32_t ticket) noexcept nogil
    # NULL, or after the start of a job's last chunk: from here on the link itself orders readers behind the copy
    int (*end)(Link*, int32_t slot, int32_t ticket) noexcept nogil
    void (*abandon)(Link*) noexcept nogil                    # the engine closes: outstanding chunks may be given up
    int (*query)(Link*, Mover*, int32_t ticket, int64_t* again_ns) noexcept nogil
    void* state

cdef struct Slot:
    int32_t state
    int32_t level
    int32_t source
    int32_t generation      # of the live job
    int32_t newest          # highest generation seen, also through a drop
    int32_t dropped         # highest generation dropped
    float priority
    int32_t previous        # demand queue
    int32_t next
    int32_t heap            # position in the prefetch queue
    int64_t sequence        # names one admission; 0: none is live, so that a late chunk finds nobody
    int64_t segment         # next byte to move: segment and offset in it
    int64_t offset
    int64_t landed          # bytes of the live job that have arrived
    int32_t begun
    int32_t outstanding     # chunks of the live job that are moving
    int32_t stale           # chunks of earlier jobs that still move into the slot
    int32_t awaited         # callers that sleep until the job is over
    int32_t fault           # of the last failed job
    int32_t fault_file
    int64_t fault_offset

cdef struct Flight:         # a chunk that moves
    int32_t slot
    int32_t level
    int64_t sequence
    int64_t nbytes
    int32_t file

cdef struct Room:
    pthread_mutex_t lock
    pthread_cond_t work     # I/O threads sleep here
    pthread_cond_t done     # waiting callers sleep here
    bint closing
    int32_t threads
    int32_t threads_entered  # that are past the link's enter()
    int32_t threads_ended   # before they were told to
    int thread_error        # why, if it is known
    int32_t sleepers
    int32_t drainers
    int32_t paused          # how many want no chunk to start
    int32_t pausers         # callers that sleep until no chunk moves
    int32_t moving          # chunks between their start and their landing, stale ones too
    bint news               # callers that sleep are to be woken when the lock is given up
    int32_t helpers
    int32_t slots_count
    int32_t* complete       # the caller's
    Slot* slots
    Segment* segments
    int64_t* segment_start
    uint64_t* region_address
    uint64_t* region_stride
    int32_t first           # demand queue, a list through the slots
    int32_t last
    int32_t demand_count
    int32_t* heap           # prefetch queue
    int32_t heap_count
    int64_t sequence
    int32_t live            # jobs that are not idle
    int32_t stale           # sum of all slots' stale
    int way                 # of copying, for the movers
    int64_t chunk_bytes
    int64_t window_bytes
    Link* link
    Files files
    Counters counters
    int64_t link_since      # up to here the time in which chunks move is accounted for
    double link_bytes       # decayed sums
    double link_ns
    double link_rate        # their quotient in bytes/s, read without the lock; 0: nothing has moved yet
    Mover* movers           # spare ones, for callers that help
    Mover* every_mover
    Flight flights[MAX_DEPTH]
    int32_t flight_first
    int32_t flight_count
    int64_t flight_bytes
