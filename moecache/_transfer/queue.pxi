# Who goes next: demands in the order they were asked for, prefetches in a heap by priority; and who is woken for it.
# Every function here is called with the engine's lock held.


cdef inline bint precedes(EngineState* engine, int32_t a, int32_t b) noexcept nogil:
    """Whether the prefetch of one slot goes before that of another."""
    cdef Slot* x = &engine.slots[a]
    cdef Slot* y = &engine.slots[b]
    return x.priority > y.priority or (x.priority == y.priority and x.sequence < y.sequence)


cdef inline void heap_put(EngineState* engine, int32_t at, int32_t slot) noexcept nogil:
    engine.heap[at] = slot
    engine.slots[slot].heap = at


cdef void heap_move(EngineState* engine, int32_t at) noexcept nogil:
    """Bring the entry at this position to where it belongs."""
    cdef int32_t slot = engine.heap[at], child
    while at > 0 and precedes(engine, slot, engine.heap[(at - 1) // 2]):
        heap_put(engine, at, engine.heap[(at - 1) // 2])
        at = (at - 1) // 2
    while True:
        child = 2 * at + 1
        if child >= engine.heap_count:
            break
        if child + 1 < engine.heap_count and precedes(engine, engine.heap[child + 1], engine.heap[child]):
            child += 1
        if not precedes(engine, engine.heap[child], slot):
            break
        heap_put(engine, at, engine.heap[child])
        at = child
    heap_put(engine, at, slot)


cdef void enqueue(EngineState* engine, int32_t slot) noexcept nogil:
    cdef Slot* job = &engine.slots[slot]
    job.state = QUEUED
    if job.level == PREFETCH:
        heap_put(engine, engine.heap_count, slot)
        engine.heap_count += 1
        heap_move(engine, engine.heap_count - 1)
        return
    job.next = -1
    job.previous = engine.last
    if engine.last < 0:
        engine.first = slot
    else:
        engine.slots[engine.last].next = slot
    engine.last = slot
    engine.demand_count += 1


cdef void unqueue(EngineState* engine, int32_t slot) noexcept nogil:
    cdef Slot* job = &engine.slots[slot]
    cdef int32_t moved
    if job.level == PREFETCH:
        engine.heap_count -= 1
        moved = engine.heap[engine.heap_count]
        if moved != slot:
            heap_put(engine, job.heap, moved)
            heap_move(engine, job.heap)
        return
    if job.previous < 0:
        engine.first = job.next
    else:
        engine.slots[job.previous].next = job.next
    if job.next < 0:
        engine.last = job.previous
    else:
        engine.slots[job.next].previous = job.previous
    engine.demand_count -= 1


cdef inline int32_t next_job(EngineState* engine) noexcept nogil:
    """The job whose chunk goes next, -1: none may."""
    if engine.paused:
        return -1
    if engine.first >= 0:
        return engine.first
    return engine.heap[0] if engine.heap_count else -1


cdef void wake_workers(EngineState* engine, int32_t jobs) noexcept nogil:
    if jobs == 1:
        pthread_cond_signal(&engine.work)
    elif jobs > 1:
        pthread_cond_broadcast(&engine.work)


cdef inline void note_end(EngineState* engine, int32_t slot) noexcept nogil:
    """Something has ended in this slot: notify those who wait for it, when the lock is released."""
    if engine.slots[slot].awaited or (engine.drainers and engine.live == 0 and engine.stale == 0):
        engine.notify = True


cdef inline void notify_now(EngineState* engine) noexcept nogil:
    if engine.notify:
        engine.notify = False
        pthread_cond_broadcast(&engine.done)


cdef inline void unlock(EngineState* engine) noexcept nogil:
    """Release the lock, then notify: under it the woken callers would only stop at it, and on a busy machine the thread
    that moves the bytes would wait for them to be scheduled."""
    cdef bint pending = engine.notify
    engine.notify = False
    pthread_mutex_unlock(&engine.lock)
    if pending:
        pthread_cond_broadcast(&engine.done)
