# Callers that wait: for jobs, copying them themselves where they can, and for the engine to be still.
# Included by _engine.pyx.

cdef enum:                  # how a wait ended
    READY = 0
    FAILED = 1
    LOST = 2                # dropped, or its slot was given to a later generation
    CLOSED = 3
    DEAD = 4
    TIMEOUT = 5
    SLICE = 6               # time to look at signals

cdef enum:
    SLICE_NS = 200000000    # how late Ctrl-C may be noticed


cdef bint help_one(Room* room, const int32_t* slots, const int32_t* generations, Py_ssize_t n) noexcept nogil:
    """Copy a chunk of the first demand job still queued among those waited for; False when there is none.

    Only from memory: a read of a file may hang, and the caller's timeout with it.
    """
    cdef Py_ssize_t i
    cdef Slot* job
    cdef Mover* mover
    if room.paused or room.link.hangs:
        return False
    for i in range(n):
        job = &room.slots[slots[i]]
        if job.state != QUEUED or job.level != DEMAND or job.generation != generations[i]:
            continue
        if room.segments[job.segment].file >= 0:
            continue
        mover = take_mover(room)
        if mover == NULL:
            return False
        room.helpers += 1
        room.counters.helped += 1
        carry(room, mover, slots[i])
        room.helpers -= 1
        give_mover(room, mover)
        if room.closing and room.helpers == 0:
            pthread_cond_broadcast(&room.done)
        return True
    return False


cdef int look(Room* room, const int32_t* slots, const int32_t* generations, Py_ssize_t n, bint every,
              Py_ssize_t* position) noexcept nogil:
    """How the wait stands: READY, FAILED, LOST with the position, or SLICE when it goes on."""
    cdef Py_ssize_t i
    cdef int32_t value
    cdef int found = READY if every else SLICE
    for i in range(n):
        value = load_acquire(&room.complete[slots[i]])
        if value == generations[i]:
            if every:
                continue
            position[0] = i
            return READY
        if every:
            found = SLICE
        if value == -generations[i]:
            position[0] = i
            found = FAILED
        elif found != FAILED and (room.slots[slots[i]].newest > generations[i]
                                  or room.slots[slots[i]].dropped >= generations[i]):
            position[0] = i
            found = LOST
        if every and found != SLICE:
            return found
    return found


cdef int await_jobs(Room* room, const int32_t* slots, const int32_t* generations, Py_ssize_t n, bint every,
                    int64_t deadline, int64_t slice_end, Py_ssize_t* position) noexcept nogil:
    cdef int64_t began = now_ns()
    cdef Py_ssize_t i
    cdef int found
    pthread_mutex_lock(&room.lock)
    while True:
        found = look(room, slots, generations, n, every, position)
        if found != SLICE:
            break
        if room.closing:
            found = CLOSED
            break
        if room.threads_ended:
            found = DEAD
            break
        if now_ns() >= deadline:
            found = TIMEOUT
            break
        if now_ns() >= slice_end:
            break
        if not room.link.asynchronous and help_one(room, slots, generations, n):
            continue
        tell_now(room)
        for i in range(n):
            room.slots[slots[i]].awaited += 1
        cond_wait_until(&room.done, &room.lock, min(deadline, slice_end))
        for i in range(n):
            room.slots[slots[i]].awaited -= 1
    room.counters.stall_ns += now_ns() - began
    leave(room)
    return found


cdef int await_still(Room* room, bint moving, int64_t deadline, int64_t slice_end) noexcept nogil:
    """Wait until no chunk moves and no thread is still starting, or else until there is no job left."""
    cdef int32_t* asleep = &room.pausers if moving else &room.drainers
    cdef int found = SLICE
    pthread_mutex_lock(&room.lock)
    while found == SLICE:
        if (room.moving == 0 and room.threads_entered == room.threads if moving
                else room.live == 0 and room.stale == 0):
            found = READY
        elif room.closing:
            found = CLOSED
        elif room.threads_ended:
            found = DEAD
        elif now_ns() >= deadline:
            found = TIMEOUT
        elif now_ns() >= slice_end:
            break
        else:
            asleep[0] += 1
            cond_wait_until(&room.done, &room.lock, min(deadline, slice_end))
            asleep[0] -= 1
    pthread_mutex_unlock(&room.lock)
    return found
