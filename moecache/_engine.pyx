# cython: language_level=3, boundscheck=False, wraparound=False, initializedcheck=False, cdivision=True
"""The room that moves bytes: a queue of two levels, native I/O threads, and the links they copy over.

It knows sources, slots and segments, not experts, and decides nothing. A submission is one native call; a slot's
number in ``complete`` tells when its bytes are all there; waiting never holds the GIL, and a waiting caller copies
what it waits for itself where the link allows that.
"""

import atexit
import logging
import os
import weakref
from dataclasses import dataclass

import cython
import numpy as np

from cpython.exc cimport PyErr_CheckSignals
from libc.errno cimport EAGAIN, EINTR, EINVAL, EIO, EMFILE, ENFILE, ENOMEM, EOPNOTSUPP, errno
from libc.stdint cimport INT64_MAX
from libc.stdlib cimport calloc, free
from libc.string cimport memcpy, memset
from posix.fcntl cimport O_RDONLY, POSIX_FADV_DONTNEED, open as posix_open, posix_fadvise
from posix.stdlib cimport posix_memalign
from posix.time cimport nanosleep, timespec
from posix.types cimport off_t
from posix.unistd cimport close as posix_close, pread

from moecache import copying
from moecache.errors import CheckpointError, ClosedError, RoutingError, TransferError, refuse_copy
from moecache.stamp import Stamp, changed

logger = logging.getLogger("moecache")

include "_files.pxi"
include "_links.pxi"
include "_limits.pxi"
include "_queue.pxi"
include "_wait.pxi"

watch_forks()


cdef void* thread_main(void* argument) noexcept nogil:
    cdef Room* room = <Room*> argument
    cdef Mover* mover
    cdef int error
    prepare_thread()
    # A link is never called with the lock held: submit() takes the lock and keeps the GIL.
    error = room.link.enter(room.link)
    pthread_mutex_lock(&room.lock)
    room.threads_entered += 1
    room.news = room.news or room.pausers != 0
    mover = take_mover(room)
    room.thread_error = ENOMEM if mover == NULL else error
    if mover != NULL:
        mover.on_thread = True
        if error == 0:
            if room.link.asynchronous:
                serve_asynchronous(room, mover)
            else:
                serve(room, mover)
        mover.on_thread = False
        give_mover(room, mover)
    if not room.closing:
        room.threads_ended += 1
    pthread_cond_broadcast(&room.done)
    pthread_mutex_unlock(&room.lock)
    return NULL


cdef Mover* take_mover(Room* room) noexcept nogil:
    cdef Mover* mover = room.movers
    if mover != NULL:
        room.movers = mover.next
        return mover
    mover = <Mover*> calloc(1, sizeof(Mover))
    if mover != NULL:
        mover.sibling = room.every_mover
        room.every_mover = mover
        mover.files = &room.files
        mover.counters = &room.counters
        mover.way = room.way
        mover.bounce_bytes = ((room.chunk_bytes + 4095) & ~4095) + 2 * 4096
    return mover


cdef void give_mover(Room* room, Mover* mover) noexcept nogil:
    mover.next = room.movers
    room.movers = mover


cdef void stop(Room* room, pthread_t* threads) noexcept nogil:
    cdef int32_t i
    pthread_mutex_lock(&room.lock)
    room.closing = True
    for i in range(room.slots_count):
        if room.slots[i].state != IDLE:
            cancel(room, i)
    # The I/O thread of an asynchronous one says so itself. With nothing under way the link may serve another engine by now.
    if room.threads and room.moving and not room.link.asynchronous:
        room.link.abandon(room.link)
    pthread_cond_broadcast(&room.work)
    pthread_cond_broadcast(&room.done)
    while room.helpers:
        pthread_cond_wait(&room.done, &room.lock)
    pthread_mutex_unlock(&room.lock)
    for i in range(room.threads):
        pthread_join(threads[i], NULL)
    room.threads = 0


@dataclass(frozen=True, eq=False)
class Sources:
    """Where the bytes of every source lie and where in a slot they go. Source number = global expert number.

    Attributes
    ----------
    segment_start : int64[n + 1]
        Source ``i`` consists of the segments ``segment_start[i]`` to ``segment_start[i + 1] - 1``.
    segment_file : int32[S]
        Index into `files`, or -1: host memory.
    segment_source : uint64[S]
        Byte offset in the file, or host address.
    segment_nbytes : int64[S]
    segment_region : int32[S]
        Region of the destination.
    segment_offset : int64[S]
        Byte offset inside the slot's room of that region.
    files
        Paths of the files.
    stamps
        For each file what it was when its contents were looked at (inode, bytes, time of modification in ns); none:
        what it is when the engine is made. Bytes of a file that is not that any more are never used.
    tensors, tensor_address
        The tensors that own the host memory, kept as long as the engine is open, and uint64[n], where each lay.
    segment_tensor : int32[S]
        Which of them a segment lies in, -1: none. A segment whose tensor has moved is not copied.
    name_of
        What messages call a source, by its number.
    """

    segment_start: object
    segment_file: object
    segment_source: object
    segment_nbytes: object
    segment_region: object
    segment_offset: object
    files: tuple = ()
    stamps: tuple = ()
    tensors: tuple = ()
    tensor_address: object = None
    segment_tensor: object = None
    name_of: object = "source {}".format

    def __reduce__(self):
        refuse_copy(self)


cdef void* open_keepers = NULL     # of this process: those whose threads may still run; borrowed references


# At exit the last to register runs first: what a device lends (weakref.finalize in cuda.py) is given back after the threads
# have ended that use it.
weakref.finalize(refuse_copy, int).detach()


@atexit.register
def _close_all():
    """Stop all I/O threads before the interpreter takes the memory away that they copy between."""
    cdef void* at = open_keepers
    while open_keepers != NULL:
        (<_Keeper> open_keepers).close()
        if at == open_keepers:
            break               # a forked child's copy, which closes nothing
        at = open_keepers


cdef class _Keeper:
    """Owns the C record. `_close_all` finds those that are open."""
    cdef void* next_open    # in the list of open keepers
    cdef void* previous_open
    cdef Room room
    cdef pthread_t threads[64]
    cdef int32_t forks
    cdef bint closed
    cdef _Link link
    cdef bint counted       # among the link's users
    cdef tuple paths
    cdef list encoded           # the same as bytes, whose memory the C records point to
    cdef object complete, owner, sources, name_of
    # Only where sources lie in tensors: those of source i are tensor_of[tensor_start[i]] to tensor_of[tensor_start[i + 1] - 1].
    cdef list where             # of each tensor its method that says where it lies
    cdef int64_t[::1] seen      # the submission that has asked it last
    cdef int64_t submission
    cdef int64_t[::1] tensor_start
    cdef int32_t[::1] tensor_of
    cdef uint64_t[::1] tensor_address

    def __cinit__(self):
        self.forks = fork_count()
        self.room.first = self.room.last = -1
        pthread_mutex_init(&self.room.lock, NULL)
        pthread_mutex_init(&self.room.files.lock, NULL)
        cond_init(&self.room.work)
        cond_init(&self.room.done)

    cdef void enlist(self) noexcept:
        global open_keepers
        self.next_open = open_keepers
        if open_keepers != NULL:
            (<_Keeper> open_keepers).previous_open = <void*> self
        open_keepers = <void*> self

    cdef void unlist(self) noexcept:
        global open_keepers
        if self.next_open != NULL:
            (<_Keeper> self.next_open).previous_open = self.previous_open
        if self.previous_open != NULL:
            (<_Keeper> self.previous_open).next_open = self.next_open
        elif open_keepers == <void*> self:
            open_keepers = self.next_open
        self.next_open = self.previous_open = NULL

    cdef void close(self):
        if self.closed or self.forks != fork_count():
            return
        self.closed = True
        self.unlist()
        cdef Room* room = &self.room
        with nogil:
            stop(room, self.threads)
        for i in range(room.files.count):
            close_descriptor(&room.files, &room.files.file[i].direct)
            close_descriptor(&room.files, &room.files.file[i].buffered)
        room.files.count = 0
        while room.every_mover != NULL:
            mover = room.every_mover
            room.every_mover = mover.sibling
            free(mover.bounce)
            free(mover)
        room.movers = NULL
        if self.counted:
            self.counted = False
            self.link.users -= 1
        self.owner = self.sources = self.where = None

    def __dealloc__(self):
        # The copies of a parent's threads in a forked child hold the lock for ever: leave everything as it is.
        if self.forks != fork_count():
            return
        self.close()
        free(self.room.slots)
        free(self.room.segments)
        free(self.room.segment_start)
        free(self.room.region_address)
        free(self.room.region_stride)
        free(self.room.heap)
        free(self.room.files.file)
        pthread_mutex_destroy(&self.room.files.lock)
        pthread_cond_destroy(&self.room.work)
        pthread_cond_destroy(&self.room.done)
        pthread_mutex_destroy(&self.room.lock)


include "_report.pxi"


cdef void* room_for(Py_ssize_t count, size_t size) except NULL:
    cdef void* made = calloc(max(count, 1), size)
    if made == NULL:
        raise MemoryError()
    return made


cdef void fill_segments(_Keeper keeper, sources, Py_ssize_t regions) except *:
    """Check the sources and lay them out as C records, each source's segments in the order of the file."""
    cdef Room* room = &keeper.room
    start = np.ascontiguousarray(sources.segment_start, dtype=np.int64)
    columns = [np.ascontiguousarray(getattr(sources, "segment_" + name), dtype=dtype)
               for name, dtype in (("file", np.int32), ("source", np.uint64), ("nbytes", np.int64),
                                   ("region", np.int32), ("offset", np.int64))]
    total = start[len(start) - 1] if len(start) else -1
    if total < 0 or start[0] != 0 or np.any(np.diff(start) < 0) or any(len(column) != total for column in columns):
        raise ValueError("segment_start must rise from 0 to the length that all segment arrays share")
    number = np.repeat(np.arange(len(start) - 1), np.diff(start))
    order = np.lexsort((columns[1], columns[0], number))
    order = order[columns[2][order] > 0]
    cdef int32_t[::1] file = columns[0][order]
    cdef uint64_t[::1] source = columns[1][order]
    cdef int64_t[::1] nbytes = columns[2][order]
    cdef int32_t[::1] region = columns[3][order]
    cdef int64_t[::1] offset = columns[4][order]
    cdef int64_t[::1] first = np.searchsorted(number[order], np.arange(len(start)))
    if np.any(columns[2] < 0):
        raise ValueError("segment_nbytes must not be negative")
    if len(order) and not (0 <= min(region) and max(region) < regions and max(file) < len(sources.files)):
        raise ValueError(f"a segment names a region outside 0..{regions - 1} or a file outside the "
                         f"{len(sources.files)} given")
    room.segments = <Segment*> room_for(len(order), sizeof(Segment))
    room.segment_start = <int64_t*> room_for(len(start), sizeof(int64_t))
    cdef Py_ssize_t i
    for i in range(file.shape[0]):
        room.segments[i] = Segment(file=file[i], region=region[i], source=source[i], nbytes=nbytes[i],
                                   offset=<uint64_t> offset[i])
    for i in range(first.shape[0]):
        room.segment_start[i] = first[i]


cdef void keep_tensors(_Keeper keeper, sources) except *:
    """Note where the tensors lie that own the sources' memory."""
    start = np.ascontiguousarray(sources.segment_start, dtype=np.int64)
    of = np.ascontiguousarray(sources.segment_tensor, dtype=np.int32)
    address = np.ascontiguousarray(sources.tensor_address, dtype=np.uint64)
    if len(of) != start[len(start) - 1] or len(address) != len(sources.tensors) or of.max(initial=-1) >= len(address):
        raise ValueError(f"segment_tensor and tensor_address do not fit the {len(sources.tensors)} tensors and the segments")
    keeper.where = [tensor.data_ptr for tensor in sources.tensors]
    keeper.seen = np.zeros(len(address), np.int64)
    keeper.tensor_start, keeper.tensor_of, keeper.tensor_address = start, of, address


def time_copies(Py_ssize_t nbytes, int rounds):
    """Seconds that one copy between cold buffers takes this thread, by way; the best of so many rounds."""
    cdef double best[MOE_WAYS]
    cdef char* source = <char*> room_for(nbytes, 1)
    cdef char* target = NULL
    try:
        target = <char*> room_for(nbytes, 1)
        with nogil:
            memset(source, 1, nbytes)
            memset(target, 2, nbytes)
            moe_time_ways(best, target, source, nbytes, rounds)
        return [best[way] for way in range(MOE_WAYS)]
    finally:
        free(source)
        free(target)


cdef Counters read_counters(Room* room) noexcept nogil:
    """The counters; those of reads change without the lock."""
    cdef Counters now
    cdef Py_ssize_t i
    for i in range(<Py_ssize_t> (sizeof(Counters) // sizeof(int64_t))):
        (<int64_t*> &now)[i] = load_relaxed(&(<int64_t*> &room.counters)[i])
    return now


cdef class Engine:
    """Moves experts into slots. The face, its words and its errors are described in ``_engine.pyi``."""
    cdef _Keeper keeper
    cdef Room* room
    cdef int32_t sources_count, regions_count
    cdef Engine successor   # that took over its pauses; None: none has
    cdef object __weakref__

    def __init__(self, sources, region_address, region_stride, complete, *, link=None, threads=1,
                 chunk_bytes=None, window_bytes=4 << 20, owner=None, Engine replaces=None):
        cdef _Keeper keeper = _Keeper()
        cdef Room* room = &keeper.room
        cdef uint64_t[::1] address = np.ascontiguousarray(region_address, dtype=np.uint64)
        cdef uint64_t[::1] stride = np.ascontiguousarray(region_stride, dtype=np.int64).view(np.uint64)
        cdef int32_t[::1] slots = complete
        if not 1 <= threads <= 64 or (chunk_bytes is not None and chunk_bytes < 1) or window_bytes < 1:
            raise ValueError(f"need 1 to 64 threads, chunk_bytes > 0 and window_bytes > 0, got {threads}, "
                             f"{chunk_bytes} and {window_bytes}")
        if address.shape[0] != stride.shape[0]:
            raise ValueError("region_address and region_stride must have one entry per region")
        if link is None:
            link = FileLink() if len(sources.files) else HostLink()
        keeper.link = link
        if keeper.link.users and (replaces is None or replaces.keeper.link is not link):
            raise ValueError("this link already serves another engine; give each its own")
        if len(sources.files) and keeper.link.link.file_chunk <= 0:
            raise ValueError(f"{type(link).__name__} cannot read files, and the sources have {len(sources.files)}")
        room.link = &keeper.link.link
        room.chunk_bytes = copying.CHUNK_NBYTES
        if not room.link.asynchronous:
            choice = copying.settle(time_copies)
            room.way = copying.WAYS.index(choice.way)
            # Reads of files are best in large chunks, whatever is best for memory.
            if not len(sources.files):
                room.chunk_bytes = choice.chunk_nbytes
        if chunk_bytes is not None:
            room.chunk_bytes = chunk_bytes
        room.window_bytes = window_bytes
        room.complete = &slots[0] if slots.shape[0] else NULL
        keeper.complete, keeper.owner, keeper.sources, keeper.name_of = complete, owner, sources, sources.name_of
        keeper.paths = tuple(os.fspath(path) for path in sources.files)
        fill_segments(keeper, sources, address.shape[0])
        room.region_address = <uint64_t*> room_for(address.shape[0], sizeof(uint64_t))
        room.region_stride = <uint64_t*> room_for(address.shape[0], sizeof(uint64_t))
        for i in range(address.shape[0]):
            room.region_address[i] = address[i]
            room.region_stride[i] = stride[i]
        room.slots = <Slot*> room_for(slots.shape[0], sizeof(Slot))
        room.heap = <int32_t*> room_for(slots.shape[0], sizeof(int32_t))
        room.slots_count = <int32_t> slots.shape[0]
        if sources.tensors:
            keep_tensors(keeper, sources)
        open_files(keeper, sources.stamps)
        self.keeper = keeper
        self.room = room
        self.sources_count, self.regions_count = len(sources.segment_start) - 1, address.shape[0]
        # Chunks of an asynchronous link land in the order they were started: one thread keeps that order.
        for _ in range(1 if room.link.asynchronous else threads):
            error = pthread_create(&keeper.threads[room.threads], NULL, thread_main, room)
            if error:
                keeper.close()
                raise OSError(error, "no I/O thread could be started: " + os.strerror(error))
            room.threads += 1
        keeper.counted = room.link.asynchronous
        keeper.link.users += keeper.counted
        keeper.enlist()

    def __del__(self):
        # Before a collection clears anything. No Python code, as in a weak reference's callback: an interrupt that strikes
        # there is lost, and the close with it.
        if self.keeper is not None:
            self.keeper.close()

    cdef int usable(self) except -1:
        if self.keeper is None or self.keeper.closed:
            raise ClosedError("the engine is closed")
        if self.keeper.forks != fork_count():
            raise ClosedError("the engine belongs to the parent process: I/O threads do not survive a fork. "
                              "Make a new one in the child")
        return 0

    @property
    def closed(self):
        return self.keeper is None or self.keeper.closed

    def submit(self, const int32_t[:, ::1] fetch=None, const int32_t[:, ::1] prefetch=None,
               const float[::1] priority=None, const int32_t[:, ::1] drop=None):
        cdef Room* room = self.room
        cdef Py_ssize_t fetches = 0, prefetches = 0, drops = 0, i
        cdef int32_t woken = 0
        cdef int32_t[:, ::1] moved = None
        self.usable()
        if fetch is not None:
            fetches = fetch.shape[0]
            self.check(fetch, 3)
        if prefetch is not None:
            prefetches = prefetch.shape[0]
            self.check(prefetch, 3)
            if priority is None or priority.shape[0] != prefetches:
                raise RoutingError(f"{prefetches} prefetches need as many priorities")
        if drop is not None:
            drops = drop.shape[0]
            self.check(drop, 2)
        if fetches + prefetches + drops == 0:
            return
        if self.keeper.where is not None:
            moved = self.find_moved(self.keeper.where, fetch, prefetch)
        pthread_mutex_lock(&room.lock)
        if room.closing or room.threads_ended:
            pthread_mutex_unlock(&room.lock)
            self.give_up(CLOSED if room.closing else DEAD, 0, -1, 0, 0.0)
        for i in range(drops):
            drop_row(room, drop[i, 0], drop[i, 1])
        for i in range(fetches):
            woken += admit(room, fetch[i, 0], fetch[i, 1], fetch[i, 2], DEMAND, 0)
        for i in range(prefetches):
            woken += admit(room, prefetch[i, 0], prefetch[i, 1], prefetch[i, 2], PREFETCH, priority[i])
        if moved is not None:
            for i in range(moved.shape[0]):
                if room.slots[moved[i, 1]].state != IDLE and room.slots[moved[i, 1]].generation == moved[i, 2]:
                    fail(room, moved[i, 1], MEMORY_MOVED, -1, 0)
        woken = min(woken, room.sleepers)
        leave(room)
        wake_workers(room, woken)       # a thread woken under the lock would only stop at it

    cdef object find_moved(self, list where, const int32_t[:, ::1] fetch, const int32_t[:, ::1] prefetch):
        """Rows of sources whose tensor does not lie any more where it did, or None."""
        cdef _Keeper keeper = self.keeper
        cdef const int32_t[:, ::1] rows
        cdef int64_t k
        cdef int32_t number
        cdef Py_ssize_t i
        found = None
        keeper.submission += 1
        for rows in (fetch, prefetch):
            for i in range(0 if rows is None else rows.shape[0]):
                for k in range(keeper.tensor_start[rows[i, 0]], keeper.tensor_start[rows[i, 0] + 1]):
                    number = keeper.tensor_of[k]
                    # The experts of a layer mostly lie in one tensor.
                    if number < 0 or keeper.seen[number] == keeper.submission:
                        continue
                    if <uint64_t> where[number]() == keeper.tensor_address[number]:
                        keeper.seen[number] = keeper.submission
                        continue
                    found = (found or []) + [(rows[i, 0], rows[i, 1], rows[i, 2])]
                    break
        return None if found is None else np.array(found, np.int32)

    cdef int check(self, const int32_t[:, ::1] rows, Py_ssize_t width) except -1:
        cdef Py_ssize_t i
        cdef int32_t slot
        if rows.shape[0] and rows.shape[1] != width:
            raise RoutingError(f"rows of {width} numbers are needed, got {rows.shape[1]}")
        for i in range(rows.shape[0]):
            slot = rows[i, width - 2]
            if not 0 <= slot < self.room.slots_count:
                raise RoutingError(f"slot {slot} of row {i} is outside 0..{self.room.slots_count - 1}")
            if rows[i, width - 1] <= 0:
                raise RoutingError(f"generation {rows[i, width - 1]} of row {i} is not positive")
            if width == 3 and not 0 <= rows[i, 0] < self.sources_count:
                raise RoutingError(f"source {rows[i, 0]} of row {i} is outside 0..{self.sources_count - 1}")
        return 0

    def wait_any(self, const int32_t[::1] slots not None, const int32_t[::1] generations not None, double timeout):
        return self.wait(slots, generations, timeout, False)

    def wait_all(self, const int32_t[::1] slots not None, const int32_t[::1] generations not None, double timeout):
        self.wait(slots, generations, timeout, True)

    cdef Py_ssize_t wait(self, const int32_t[::1] slots, const int32_t[::1] generations, double timeout,
                         bint every) except -1:
        cdef Room* room = self.room
        cdef Py_ssize_t n = slots.shape[0], i, position = 0
        cdef int found
        cdef int64_t deadline
        self.usable()
        deadline = deadline_after(timeout)
        if generations.shape[0] != n or (n == 0 and not every):
            raise RoutingError(f"{n} slots and {generations.shape[0]} generations: need as many, and at least one")
        for i in range(n):
            if not 0 <= slots[i] < room.slots_count:
                raise RoutingError(f"slot {slots[i]} is outside 0..{room.slots_count - 1}")
        if n == 0 or look(room, &slots[0], &generations[0], n, every, &position) == READY:
            return position
        while True:
            with nogil:
                found = await_jobs(room, &slots[0], &generations[0], n, every, deadline, now_ns() + SLICE_NS,
                                   &position)
            if found == READY:
                return position
            if found != SLICE:
                self.give_up(found, position, slots[position], generations[position], timeout)
            PyErr_CheckSignals()

    def drain(self, double timeout):
        self.wait_still(False, timeout)

    cdef int wait_still(self, bint moving, double timeout) except -1:
        cdef int found
        cdef int64_t deadline
        self.usable()
        deadline = deadline_after(timeout)
        while True:
            with nogil:
                found = await_still(self.room, moving, deadline, now_ns() + SLICE_NS)
            if found == READY:
                return 0
            if found != SLICE:
                self.give_up(found, 0, -1, 0, timeout)
            PyErr_CheckSignals()

    def pause(self, double timeout):
        self.usable()
        self.add_pause(1)
        try:
            self.wait_still(True, timeout)
        except BaseException:
            self.add_pause(-1)
            raise

    def hold(self, double timeout):
        cdef Pause pause = Pause.__new__(Pause)
        self.usable()
        self.add_pause(1)
        pause.engine = self
        self.wait_still(True, timeout)
        return pause

    def hand_pauses_to(self, Engine other not None):
        cdef int32_t paused
        pthread_mutex_lock(&self.room.lock)
        paused = self.room.paused
        pthread_mutex_unlock(&self.room.lock)
        self.successor = other
        other.add_pause(paused)

    def resume(self):
        self.usable()
        if not self.add_pause(-1):
            raise TransferError("resume() without a pause() before it")

    cdef bint add_pause(self, int32_t change) noexcept:
        """Count a pause or its end; False: there was none to end."""
        cdef Room* room = self.room
        pthread_mutex_lock(&room.lock)
        cdef bint counted = room.paused + change >= 0
        if counted:
            room.paused += change
        cdef bint goes_on = room.paused == 0
        pthread_mutex_unlock(&room.lock)
        if goes_on:
            pthread_cond_broadcast(&room.work)
            pthread_cond_broadcast(&room.done)      # callers that wait may help again
        return counted

    cdef int give_up(self, int found, Py_ssize_t position, int32_t slot, int32_t generation,
                     double timeout) except -1:
        """Raise what a call that ended like this has to raise; slot -1: it was not about one."""
        cdef Slot* job = &self.room.slots[max(slot, 0)]
        cause = None
        # Another thread may have given the slot away meanwhile.
        source = job.source if slot >= 0 and job.generation == generation else -1
        copy = f"slot {slot}, generation {generation}"
        if source >= 0:
            copy = f"{self.keeper.name_of(source)} ({copy})"
        if found == CLOSED:
            raise ClosedError("the engine was closed")
        if found == DEAD:
            if self.room.thread_error:
                cause = system_error(self.room.thread_error)
            error = TransferError(f"an I/O thread has ended ({cause or 'reason unknown'}), copies can no longer be "
                                  f"made. Close this engine and make a new one\n{describe(self.keeper)}")
        elif found == TIMEOUT:
            what = "" if slot < 0 else f": {copy}, {_STATES[job.state]}"
            error = TransferError(f"not complete after {timeout:g} s{what}. A slow link needs a longer timeout\n"
                                  f"{describe(self.keeper)}")
        elif found == LOST:
            error = TransferError(f"{copy} was dropped, or given to another expert (generation {job.newest}), before its "
                                  "bytes were there")
        else:
            cause = self.cause_of(job.fault, job.fault_file, job.fault_offset)
            said = getattr(cause, "strerror", None) or str(cause)
            error = TransferError(getattr(cause, "errno", EIO), f"the copy of {copy} failed: {said}",
                                  None if job.fault_file < 0 else self.keeper.paths[job.fault_file])
        error.position, error.source = position, source
        raise error from cause

    cdef object cause_of(self, int fault, int32_t file, int64_t offset):
        if fault == MEMORY_MOVED:
            return CheckpointError("the memory of its tensor has moved since the bank was built (put into shared memory?); "
                                   "build the bank after that")
        if file >= 0 and fault < CUDA_ERROR:
            return file_error(self.keeper, file, fault, offset)
        return system_error(fault)

    def move_region(self, int32_t region, uint64_t address, dict tensors, str name, tensor):
        cdef Room* room = &self.keeper.room
        self.usable()
        if not 0 <= region < self.regions_count:
            raise RoutingError(f"region {region} is outside 0..{self.regions_count - 1}")
        pthread_mutex_lock(&room.lock)
        cdef bint idle = room.live == 0 and room.stale == 0
        if idle:
            room.region_address[region] = address
        pthread_mutex_unlock(&room.lock)
        if not idle:
            raise TransferError("a region cannot move while copies are under way; drain the engine first")
        tensors[name] = tensor

    def describe(self):
        self.usable()
        return describe(self.keeper)

    @property
    def link_rate(self):
        return 0.0 if self.keeper is None else load_double(&self.room.link_rate)

    def counters(self):
        self.usable()
        # Copied first: making Python objects may run any finalizer, and none may meet the lock held.
        pthread_mutex_lock(&self.room.lock)
        cdef Counters now = read_counters(self.room)
        pthread_mutex_unlock(&self.room.lock)
        return dict(now)

    def reset_counters(self):
        self.usable()
        cdef Py_ssize_t i
        cdef int64_t* counter = <int64_t*> &self.room.counters
        pthread_mutex_lock(&self.room.lock)
        for i in range(<Py_ssize_t> (sizeof(Counters) // sizeof(int64_t))):
            add_relaxed(&counter[i], -load_relaxed(&counter[i]))
        pthread_mutex_unlock(&self.room.lock)

    def close(self):
        if self.keeper is not None:
            self.keeper.close()

    def __reduce__(self):
        refuse_copy(self)

    def __enter__(self):
        return self

    def __exit__(self, *exception):
        self.close()


@cython.final
@cython.no_gc   # an engine does not lead back to its pauses; __dealloc__ needs it
cdef class Pause:
    """A pause that ends with `end`, or when it is dropped: an interrupt cannot leave an engine paused."""
    cdef Engine engine      # None: over

    def end(self):
        cdef Engine engine = self.engine
        self.engine = None
        while engine is not None and engine.successor is not None:
            engine = engine.successor
        if engine is not None and not engine.keeper.closed and engine.keeper.forks == fork_count():
            engine.add_pause(-1)

    def __dealloc__(self):
        if self.engine is not None:
            self.end()


cdef int64_t deadline_after(double seconds) except -1:
    if seconds != seconds:
        raise RoutingError("a timeout that is not a number: give seconds")
    return now_ns() + <int64_t> (min(max(seconds, 0.0), 1e8) * 1e9)


cdef object system_error(int fault):
    if fault >= CUDA_ERROR:
        return OSError(EIO, cuda_message(fault - CUDA_ERROR))
    return OSError(fault, os.strerror(fault))
