# cython: language_level=3, boundscheck=False, wraparound=False, initializedcheck=False, cdivision=True
"""What moves bytes: a queue of two levels, native I/O threads, and the links they copy over.

It knows sources, slots and segments, not experts, and decides nothing. A submission is one native call; a slot's
number in ``complete`` says when its bytes are all there; waiting never holds the GIL, and a waiting caller copies
what it waits for itself where the link allows that. The parts are in ``_transfer/``, one idea a file.
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

include "_transfer/link.pxi"
include "_transfer/host_link.pxi"
include "_transfer/descriptors.pxi"
include "_transfer/file_link.pxi"
include "_transfer/cuda_link.pxi"
include "_transfer/throttled_link.pxi"
include "_transfer/faulty_link.pxi"
include "_transfer/queue.pxi"
include "_transfer/jobs.pxi"
include "_transfer/threads.pxi"
include "_transfer/wait.pxi"
include "_transfer/handle.pxi"
include "_transfer/sources.pxi"
include "_transfer/report.pxi"

watch_forks()


cdef class Engine:
    """Moves experts into slots. What it does, its words and its errors are described in ``_engine.pyi``."""
    cdef _Handle handle         # None: the constructor has failed
    cdef EngineState* state     # of the handle
    cdef int32_t sources_count  # for checks of what is submitted
    cdef Engine successor       # that took over its pauses; None: none has
    cdef object __weakref__     # engines can be referenced weakly

    def __init__(self, sources, region_address, region_stride, complete, *, link=None, threads=1,
                 chunk_bytes=None, window_bytes=4 << 20, owner=None, Engine replaces=None):
        cdef _Handle handle = _Handle()
        cdef EngineState* state = &handle.state
        if not 1 <= threads <= MAX_THREADS or (chunk_bytes is not None and chunk_bytes < 1) or window_bytes < 1:
            raise ValueError(f"need 1 to {MAX_THREADS} threads, chunk_bytes > 0 and window_bytes > 0, got {threads}, "
                             f"{chunk_bytes} and {window_bytes}")
        if link is None:
            link = FileLink() if len(sources.files) else HostLink()
        handle.link = link
        if handle.link.users and (replaces is None or replaces.handle.link is not link):
            raise ValueError("this link already serves another engine; give each its own")
        if len(sources.files) and handle.link.link.file_chunk <= 0:
            raise ValueError(f"{type(link).__name__} cannot read files, and the sources have {len(sources.files)}")
        if len(sources.recipes) and not handle.link.link.decodes:
            raise ValueError(f"{type(link).__name__} cannot decode, and the sources are packed")
        state.link = &handle.link.link
        state.window_bytes = window_bytes
        choose_chunks(handle, len(sources.files) > 0, chunk_bytes)
        handle.owner, handle.sources, handle.name_of = owner, sources, sources.name_of
        handle.paths = tuple(os.fspath(path) for path in sources.files)
        fill_regions(handle, region_address, region_stride)
        fill_segments(handle, sources)
        fill_slots(handle, complete)
        if sources.tensors:
            keep_tensors(handle, sources)
        open_files(handle, sources.stamps)
        self.handle = handle
        self.state = state
        self.sources_count = <int32_t> (len(sources.segment_start) - 1)
        handle.start_threads(threads)

    def __del__(self):
        # Before a collection clears anything. No Python code, as in a weak reference's callback: an interrupt that strikes
        # there is lost, and the close with it.
        if self.handle is not None:
            self.handle.close()

    cdef int check_usable(self) except -1:
        if self.handle is None or self.handle.closed:
            raise ClosedError("the engine is closed")
        if self.handle.forks != fork_count():
            raise ClosedError("the engine belongs to the parent process: I/O threads do not survive a fork. "
                              "Make a new one in the child")
        return 0

    @property
    def closed(self):
        return self.handle is None or self.handle.closed

    def submit(self, const int32_t[:, ::1] fetch=None, const int32_t[:, ::1] prefetch=None,
               const float[::1] priority=None, const int32_t[:, ::1] drop=None):
        cdef EngineState* state = self.state
        cdef Py_ssize_t fetches = 0, prefetches = 0, drops = 0, i
        cdef int32_t startable = 0
        cdef int32_t[:, ::1] moved = None
        self.check_usable()
        if fetch is not None:
            fetches = fetch.shape[0]
            self.check_rows(fetch, 3)
        if prefetch is not None:
            prefetches = prefetch.shape[0]
            self.check_rows(prefetch, 3)
            if priority is None or priority.shape[0] != prefetches:
                raise RoutingError(f"{prefetches} prefetches need as many priorities")
        if drop is not None:
            drops = drop.shape[0]
            self.check_rows(drop, 2)
        if fetches + prefetches + drops == 0:
            return
        if self.handle.where is not None:
            moved = find_moved(self.handle, fetch, prefetch)
        pthread_mutex_lock(&state.lock)
        if state.closing or state.threads_ended:
            pthread_mutex_unlock(&state.lock)
            raise_outcome(self.handle, CLOSED if state.closing else DEAD, 0, -1, 0, 0.0)
        for i in range(drops):
            drop_row(state, drop[i, 0], drop[i, 1])
        for i in range(fetches):
            startable += admit(state, fetch[i, 0], fetch[i, 1], fetch[i, 2], DEMAND, 0)
        for i in range(prefetches):
            startable += admit(state, prefetch[i, 0], prefetch[i, 1], prefetch[i, 2], PREFETCH, priority[i])
        if moved is not None:
            for i in range(moved.shape[0]):
                if state.slots[moved[i, 1]].state != IDLE and state.slots[moved[i, 1]].generation == moved[i, 2]:
                    fail(state, moved[i, 1], MEMORY_MOVED, -1, 0)
        startable = min(startable, state.sleepers)
        unlock(state)
        wake_workers(state, startable)  # a thread woken under the lock would only stop at it

    cdef int check_rows(self, const int32_t[:, ::1] rows, Py_ssize_t width) except -1:
        cdef Py_ssize_t i
        cdef int32_t slot
        if rows.shape[0] and rows.shape[1] != width:
            raise RoutingError(f"rows of {width} numbers are needed, got {rows.shape[1]}")
        for i in range(rows.shape[0]):
            slot = rows[i, width - 2]
            if not 0 <= slot < self.state.slots_count:
                raise RoutingError(f"slot {slot} of row {i} is outside 0..{self.state.slots_count - 1}")
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
        cdef EngineState* state = self.state
        cdef Py_ssize_t n = slots.shape[0], i, position = 0
        cdef int outcome
        cdef int64_t deadline
        self.check_usable()
        deadline = deadline_after(timeout)
        if generations.shape[0] != n or (n == 0 and not every):
            raise RoutingError(f"{n} slots and {generations.shape[0]} generations: need as many, and at least one")
        for i in range(n):
            if not 0 <= slots[i] < state.slots_count:
                raise RoutingError(f"slot {slots[i]} is outside 0..{state.slots_count - 1}")
        if n == 0 or check_jobs(state, &slots[0], &generations[0], n, every, &position) == READY:
            return position
        while True:
            with nogil:
                outcome = await_jobs(state, &slots[0], &generations[0], n, every, deadline, now_ns() + SLICE_NS,
                                     &position)
            if outcome == READY:
                return position
            if outcome != SLICE:
                raise_outcome(self.handle, outcome, position, slots[position], generations[position], timeout)
            PyErr_CheckSignals()

    def drain(self, double timeout):
        self.wait_still(False, timeout)

    cdef int wait_still(self, bint moving, double timeout) except -1:
        cdef int outcome
        cdef int64_t deadline
        self.check_usable()
        deadline = deadline_after(timeout)
        while True:
            with nogil:
                outcome = await_still(self.state, moving, deadline, now_ns() + SLICE_NS)
            if outcome == READY:
                return 0
            if outcome != SLICE:
                raise_outcome(self.handle, outcome, 0, -1, 0, timeout)
            PyErr_CheckSignals()

    def pause(self, double timeout):
        self.check_usable()
        self.add_pause(1)
        try:
            self.wait_still(True, timeout)
        except BaseException:
            self.add_pause(-1)
            raise

    def hold(self, double timeout):
        cdef Pause pause = Pause.__new__(Pause)
        self.check_usable()
        self.add_pause(1)
        pause.engine = self
        self.wait_still(True, timeout)
        return pause

    def hand_pauses_to(self, Engine other not None):
        cdef int32_t paused
        pthread_mutex_lock(&self.state.lock)
        paused = self.state.paused
        pthread_mutex_unlock(&self.state.lock)
        self.successor = other
        other.add_pause(paused)

    def resume(self):
        self.check_usable()
        if not self.add_pause(-1):
            raise TransferError("resume() without a pause() before it")

    cdef bint add_pause(self, int32_t change) noexcept:
        """Count a pause or its end; False: there was none to end."""
        cdef EngineState* state = self.state
        pthread_mutex_lock(&state.lock)
        cdef bint counted = state.paused + change >= 0
        if counted:
            state.paused += change
        cdef bint goes_on = state.paused == 0
        pthread_mutex_unlock(&state.lock)
        if goes_on:
            pthread_cond_broadcast(&state.work)
            pthread_cond_broadcast(&state.done)      # callers that wait may help again
        return counted

    def move_region(self, int32_t region, uint64_t address, dict tensors, str name, tensor):
        cdef EngineState* state = self.state
        self.check_usable()
        if not 0 <= region < self.handle.regions_count:
            raise RoutingError(f"region {region} is outside 0..{self.handle.regions_count - 1}")
        pthread_mutex_lock(&state.lock)
        cdef bint idle = state.live == 0 and state.stale == 0
        if idle:
            state.region_address[region] = address
        pthread_mutex_unlock(&state.lock)
        if not idle:
            raise TransferError("a region cannot move while copies are under way; drain the engine first")
        tensors[name] = tensor

    def describe(self):
        self.check_usable()
        return describe(self.handle)

    @property
    def link_rate(self):
        return 0.0 if self.handle is None else load_double(&self.state.link_rate)

    def counters(self):
        self.check_usable()
        # Copied first: making Python objects may run any finalizer, and none may meet the lock held.
        pthread_mutex_lock(&self.state.lock)
        cdef Counters now = read_counters(self.state)
        pthread_mutex_unlock(&self.state.lock)
        return dict(now)

    def reset_counters(self):
        self.check_usable()
        cdef Py_ssize_t i
        cdef int64_t* counter = <int64_t*> &self.state.counters
        pthread_mutex_lock(&self.state.lock)
        for i in range(<Py_ssize_t> (sizeof(Counters) // sizeof(int64_t))):
            add_relaxed(&counter[i], -load_relaxed(&counter[i]))
        pthread_mutex_unlock(&self.state.lock)

    def close(self):
        if self.handle is not None:
            self.handle.close()

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
        if engine is not None and not engine.handle.closed and engine.handle.forks == fork_count():
            engine.add_pause(-1)

    def __dealloc__(self):
        if self.engine is not None:
            self.end()


cdef int64_t deadline_after(double seconds) except -1:
    if seconds != seconds:
        raise RoutingError("a timeout that is not a number: give seconds")
    return now_ns() + <int64_t> (min(max(seconds, 0.0), 1e8) * 1e9)
