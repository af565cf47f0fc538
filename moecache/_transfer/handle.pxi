# What owns an engine's C record, threads and memory, and the list of those that are open.


cdef void* allocate(Py_ssize_t count, size_t size) except NULL:
    """Zeroed memory for so many records, at least one."""
    cdef void* made = calloc(max(count, 1), size)
    if made == NULL:
        raise MemoryError()
    return made


cdef void stop(EngineState* engine, pthread_t* threads) noexcept nogil:
    """Cancel all jobs, wait for callers that help, and join the threads."""
    cdef int32_t i
    pthread_mutex_lock(&engine.lock)
    engine.closing = True
    for i in range(engine.slots_count):
        if engine.slots[i].state != IDLE:
            cancel(engine, i)
    # The I/O thread of an asynchronous one says so itself. With nothing under way the link may serve another engine by now.
    if engine.threads and engine.moving and not engine.link.asynchronous:
        engine.link.abandon(engine.link)
    pthread_cond_broadcast(&engine.work)
    pthread_cond_broadcast(&engine.done)
    while engine.helpers:
        pthread_cond_wait(&engine.done, &engine.lock)
    pthread_mutex_unlock(&engine.lock)
    for i in range(engine.threads):
        pthread_join(threads[i], NULL)
    engine.threads = 0


cdef void* open_handles = NULL     # of this process: those whose threads may still run; borrowed references


# At exit the last to register runs first: what a device lends (weakref.finalize in cuda.py) is given back after the threads
# have ended that use it.
weakref.finalize(refuse_copy, int).detach()


@atexit.register
def _close_all():
    """Stop all I/O threads before the interpreter takes the memory away that they copy between."""
    cdef void* at = open_handles
    while open_handles != NULL:
        (<_Handle> open_handles).close()
        if at == open_handles:
            break               # a forked child's copy, which closes nothing
        at = open_handles


cdef class _Handle:
    """Owns an engine's state and threads, and keeps alive what they work on. `_close_all` finds those that are open."""
    cdef void* next_open            # in the list of open handles
    cdef void* previous_open        # in the list of open handles
    cdef EngineState state          # what threads and callers share
    cdef pthread_t threads[MAX_THREADS]     # the first `state.threads` were started
    cdef int32_t forks              # of the process when this was made; another number: this is a forked child
    cdef bint closed                # set once, before the threads are asked to end
    cdef _Link link                 # what bytes travel over
    cdef bint counted               # among the link's users
    cdef int32_t regions_count      # length of the state's arrays of regions
    cdef tuple paths                # of the files
    cdef list encoded               # the same as bytes, whose memory the C records point to
    cdef object complete            # the caller's array that the state writes to
    cdef object owner               # of the memory at both ends; None once closed
    cdef object sources             # that own the addresses of their tensors; None once closed
    cdef object name_of             # what messages call a source, by its number
    # Only where sources lie in tensors: those of source i are tensor_of[tensor_start[i]] to tensor_of[tensor_start[i + 1] - 1].
    cdef list where                 # of each tensor its method that says where it lies; None: no source lies in one
    cdef int64_t[::1] seen          # of each tensor the submission that has asked it last
    cdef int64_t submission         # number of the last one
    cdef int64_t[::1] tensor_start  # [sources + 1]
    cdef int32_t[::1] tensor_of     # [segments]
    cdef uint64_t[::1] tensor_address   # of each tensor where it lay when the sources were made

    def __cinit__(self):
        self.forks = fork_count()
        self.state.first = self.state.last = -1
        pthread_mutex_init(&self.state.lock, NULL)
        pthread_mutex_init(&self.state.files.lock, NULL)
        cond_init(&self.state.work)
        cond_init(&self.state.done)

    cdef void enlist(self) noexcept:
        global open_handles
        self.next_open = open_handles
        if open_handles != NULL:
            (<_Handle> open_handles).previous_open = <void*> self
        open_handles = <void*> self

    cdef void unlist(self) noexcept:
        global open_handles
        if self.next_open != NULL:
            (<_Handle> self.next_open).previous_open = self.previous_open
        if self.previous_open != NULL:
            (<_Handle> self.previous_open).next_open = self.next_open
        elif open_handles == <void*> self:
            open_handles = self.next_open
        self.next_open = self.previous_open = NULL

    cdef void start_threads(self, int32_t threads) except *:
        """Start the I/O threads; where one cannot be, none stays."""
        cdef EngineState* state = &self.state
        cdef int error
        # Chunks of an asynchronous link land in the order they were started: one thread keeps that order.
        for _ in range(1 if state.link.asynchronous else threads):
            error = pthread_create(&self.threads[state.threads], NULL, thread_main, state)
            if error:
                self.close()
                raise OSError(error, "no I/O thread could be started: " + os.strerror(error))
            state.threads += 1
        self.counted = state.link.asynchronous
        self.link.users += self.counted
        self.enlist()

    cdef void close(self):
        """Stop the threads and release what they worked on; does nothing in a forked child, or again."""
        if self.closed or self.forks != fork_count():
            return
        self.closed = True
        self.unlist()
        cdef EngineState* state = &self.state
        with nogil:
            stop(state, self.threads)
        for i in range(state.files.count):
            close_descriptor(&state.files, &state.files.file[i].direct)
            close_descriptor(&state.files, &state.files.file[i].buffered)
        state.files.count = 0
        while state.all_movers != NULL:
            mover = state.all_movers
            state.all_movers = mover.next_of_all
            free(mover.bounce)
            free(mover)
        state.spare_movers = NULL
        if self.counted:
            self.counted = False
            self.link.users -= 1
        self.owner = self.sources = self.where = None

    def __dealloc__(self):
        # The copies of a parent's threads in a forked child hold the lock for ever: leave everything as it is.
        if self.forks != fork_count():
            return
        self.close()
        free(self.state.slots)
        free(self.state.segments)
        free(self.state.segment_start)
        free(self.state.recipes)
        free(self.state.region_address)
        free(self.state.region_stride)
        free(self.state.heap)
        free(self.state.files.file)
        pthread_mutex_destroy(&self.state.files.lock)
        pthread_cond_destroy(&self.state.work)
        pthread_cond_destroy(&self.state.done)
        pthread_mutex_destroy(&self.state.lock)


cdef Counters read_counters(EngineState* engine) noexcept nogil:
    """The counters; those of reads change without the lock."""
    cdef Counters now
    cdef Py_ssize_t i
    for i in range(<Py_ssize_t> (sizeof(Counters) // sizeof(int64_t))):
        (<int64_t*> &now)[i] = load_relaxed(&(<int64_t*> &engine.counters)[i])
    return now
