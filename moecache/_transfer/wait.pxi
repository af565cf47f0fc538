# Callers that wait: for jobs, copying them themselves where they can, and for the engine to be still.


cdef enum:                  # how a wait ended
    READY = 0               # the bytes are there
    FAILED = 1              # the copy has failed
    LOST = 2                # dropped, or its slot was given to a later generation
    CLOSED = 3              # the engine was closed
    DEAD = 4                # an I/O thread has ended
    TIMEOUT = 5
    SLICE = 6               # time to look at signals


cdef enum:
    SLICE_NS = 200000000    # how late Ctrl-C may be noticed


cdef bint help_one(EngineState* engine, const int32_t* slots, const int32_t* generations, Py_ssize_t n) noexcept nogil:
    """Copy a chunk of the first demand job still queued among those waited for; False when there is none.

    Only from memory: a read of a file may hang, and the caller's timeout with it.
    """
    cdef Py_ssize_t i
    cdef Slot* job
    cdef Mover* mover
    if engine.paused or engine.link.hangs:
        return False
    for i in range(n):
        job = &engine.slots[slots[i]]
        if job.state != QUEUED or job.level != DEMAND or job.generation != generations[i]:
            continue
        if engine.segments[job.segment].file >= 0:
            continue
        mover = take_mover(engine)
        if mover == NULL:
            return False
        engine.helpers += 1
        engine.counters.helped += 1
        copy_chunk(engine, mover, slots[i])
        engine.helpers -= 1
        return_mover(engine, mover)
        if engine.closing and engine.helpers == 0:
            pthread_cond_broadcast(&engine.done)
        return True
    return False


cdef int check_jobs(EngineState* engine, const int32_t* slots, const int32_t* generations, Py_ssize_t n, bint every,
                    Py_ssize_t* position) noexcept nogil:
    """How the wait stands: READY, FAILED, LOST with the position, or SLICE when it goes on."""
    cdef Py_ssize_t i
    cdef int32_t value
    cdef int outcome = READY if every else SLICE
    for i in range(n):
        value = load_acquire(&engine.complete[slots[i]])
        if value == generations[i]:
            if every:
                continue
            position[0] = i
            return READY
        if every:
            outcome = SLICE
        if value == -generations[i]:
            position[0] = i
            outcome = FAILED
        elif outcome != FAILED and (engine.slots[slots[i]].newest > generations[i]
                                    or engine.slots[slots[i]].dropped >= generations[i]):
            position[0] = i
            outcome = LOST
        if every and outcome != SLICE:
            return outcome
    return outcome


cdef int await_jobs(EngineState* engine, const int32_t* slots, const int32_t* generations, Py_ssize_t n, bint every,
                    int64_t deadline, int64_t slice_end, Py_ssize_t* position) noexcept nogil:
    cdef int64_t began = now_ns()
    cdef Py_ssize_t i
    cdef int outcome
    pthread_mutex_lock(&engine.lock)
    while True:
        outcome = check_jobs(engine, slots, generations, n, every, position)
        if outcome != SLICE:
            break
        if engine.closing:
            outcome = CLOSED
            break
        if engine.threads_ended:
            outcome = DEAD
            break
        if now_ns() >= deadline:
            outcome = TIMEOUT
            break
        if now_ns() >= slice_end:
            break
        if not engine.link.asynchronous and help_one(engine, slots, generations, n):
            continue
        notify_now(engine)
        for i in range(n):
            engine.slots[slots[i]].awaited += 1
        cond_wait_until(&engine.done, &engine.lock, min(deadline, slice_end))
        for i in range(n):
            engine.slots[slots[i]].awaited -= 1
    engine.counters.stall_ns += now_ns() - began
    unlock(engine)
    return outcome


cdef int await_still(EngineState* engine, bint moving, int64_t deadline, int64_t slice_end) noexcept nogil:
    """Wait until no chunk moves and no thread is still starting, or else until there is no job left."""
    cdef int32_t* asleep = &engine.pausers if moving else &engine.drainers
    cdef int outcome = SLICE
    pthread_mutex_lock(&engine.lock)
    while outcome == SLICE:
        if (engine.moving == 0 and engine.threads_entered == engine.threads if moving
                else engine.live == 0 and engine.stale == 0):
            outcome = READY
        elif engine.closing:
            outcome = CLOSED
        elif engine.threads_ended:
            outcome = DEAD
        elif now_ns() >= deadline:
            outcome = TIMEOUT
        elif now_ns() >= slice_end:
            break
        else:
            asleep[0] += 1
            cond_wait_until(&engine.done, &engine.lock, min(deadline, slice_end))
            asleep[0] -= 1
    pthread_mutex_unlock(&engine.lock)
    return outcome
