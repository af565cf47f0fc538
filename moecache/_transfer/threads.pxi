# Threads that move bytes: the I/O threads' loops over synchronous and asynchronous links, and what a thread has for itself.


cdef Mover* take_mover(EngineState* engine) noexcept nogil:
    cdef Mover* mover = engine.spare_movers
    if mover != NULL:
        engine.spare_movers = mover.next
        return mover
    mover = <Mover*> calloc(1, sizeof(Mover))
    if mover != NULL:
        mover.next_of_all = engine.all_movers
        engine.all_movers = mover
        mover.files = &engine.files
        mover.counters = &engine.counters
        mover.way = engine.way
        mover.bounce_bytes = max(staged_bytes(engine.chunk_bytes), engine.staging_bytes)
    return mover


cdef void return_mover(EngineState* engine, Mover* mover) noexcept nogil:
    mover.next = engine.spare_movers
    engine.spare_movers = mover


cdef int copy_chunk(EngineState* engine, Mover* mover, int32_t slot) noexcept nogil:
    """Copy one chunk of a queued job on this thread, over a synchronous link, with the lock released meanwhile.

    Several threads may copy chunks of the same job. Returns THREAD_ENDS when that fault was injected, else 0.
    """
    cdef InFlight flight
    cdef Chunk chunk
    cdef int error
    cdef int64_t elapsed
    start_chunk(engine, slot, &flight, &chunk)
    if engine.sleepers and next_job(engine) >= 0:
        pthread_cond_signal(&engine.work)
    mover.busy = True
    mover.slot = slot
    mover.nbytes = chunk.nbytes
    mover.since = now_ns()
    unlock(engine)
    error = engine.link.copy(engine.link, mover, &chunk, 0)
    elapsed = now_ns() - mover.since
    pthread_mutex_lock(&engine.lock)
    engine.counters.busy_ns += elapsed
    if flight.file >= 0:
        engine.counters.reading_ns += elapsed
    mover.busy = error == THREAD_ENDS
    if error == THREAD_ENDS:
        return THREAD_ENDS
    end_chunk(engine, &flight, error, mover)
    return 0


cdef void serve(EngineState* engine, Mover* mover) noexcept nogil:
    """Life of an I/O thread over a synchronous link: chunk after chunk of whatever is most wanted then."""
    cdef int32_t slot
    while not engine.closing:
        slot = next_job(engine)
        if slot < 0:
            notify_now(engine)
            engine.sleepers += 1
            pthread_cond_wait(&engine.work, &engine.lock)
            engine.sleepers -= 1
        elif copy_chunk(engine, mover, slot) == THREAD_ENDS:
            return


cdef int launch_chunk(EngineState* engine, Mover* mover, int32_t slot) noexcept nogil:
    """Start the next chunk of a queued job on the asynchronous link."""
    cdef int32_t ticket = (engine.flight_first + engine.flight_count) % engine.link.depth
    cdef InFlight* flight = &engine.flights[ticket]
    cdef bint first = engine.slots[slot].begun == 0, ends
    cdef Chunk chunk
    cdef int error = 0
    start_chunk(engine, slot, flight, &chunk)
    ends = engine.slots[slot].state == MOVING and engine.link.end != NULL
    unlock(engine)
    if first:
        error = engine.link.begin(engine.link, slot)
    if error == 0:
        error = engine.link.copy(engine.link, mover, &chunk, ticket)
    if error == 0 and ends:
        error = engine.link.end(engine.link, slot, ticket)
    pthread_mutex_lock(&engine.lock)
    if error == THREAD_ENDS:
        return THREAD_ENDS
    if error:
        end_chunk(engine, flight, error, mover)
        return 0
    engine.flight_count += 1
    engine.flight_bytes += chunk.nbytes
    if ends:
        publish_started(engine, flight)
    return 0


cdef int64_t end_landed_chunks(EngineState* engine, Mover* mover, int64_t* asked) noexcept nogil:
    """End the chunks on the asynchronous link that have landed, oldest first. Returns when to ask for the next.

    ``asked`` is up to when the link's time in use is accounted for.
    """
    cdef int status
    cdef int64_t again = 0, now
    cdef InFlight* flight
    while engine.flight_count:
        flight = &engine.flights[engine.flight_first]
        unlock(engine)
        status = engine.link.query(engine.link, mover, engine.flight_first, &again)
        now = now_ns()
        pthread_mutex_lock(&engine.lock)
        engine.counters.busy_ns += now - asked[0]
        if flight.file >= 0:
            engine.counters.reading_ns += now - asked[0]
        asked[0] = now
        if status == PENDING:
            break
        engine.flight_first = (engine.flight_first + 1) % engine.link.depth
        engine.flight_count -= 1
        engine.flight_bytes -= flight.nbytes
        end_chunk(engine, flight, status, mover)
    return again


cdef inline bint fits_window(EngineState* engine) noexcept nogil:
    """Whether one more chunk may be outstanding on the asynchronous link."""
    if engine.flight_count == 0:
        return True
    return (engine.flight_count < engine.link.depth
            and engine.flight_bytes + engine.chunk_bytes <= engine.window_bytes)


cdef void serve_asynchronous(EngineState* engine, Mover* mover) noexcept nogil:
    """Life of the I/O thread over an asynchronous link: keep a small window of chunks outstanding."""
    cdef int32_t slot
    cdef int64_t again, asked = 0
    while True:
        if engine.closing and engine.flight_count:
            engine.link.abandon(engine.link)
        again = end_landed_chunks(engine, mover, &asked)
        if engine.closing and engine.flight_count == 0:
            return
        slot = -1 if engine.closing else next_job(engine)
        if slot >= 0 and fits_window(engine):
            if engine.flight_count == 0:
                asked = now_ns()
            if launch_chunk(engine, mover, slot) == THREAD_ENDS:
                return
            continue
        notify_now(engine)
        engine.sleepers += 1
        if engine.flight_count:
            cond_wait_until(&engine.work, &engine.lock, again)
        else:
            pthread_cond_wait(&engine.work, &engine.lock)
        engine.sleepers -= 1


cdef void* thread_main(void* argument) noexcept nogil:
    cdef EngineState* engine = <EngineState*> argument
    cdef Mover* mover
    cdef int error
    prepare_thread()
    # A link is never called with the lock held: submit() takes the lock and keeps the GIL.
    error = engine.link.enter(engine.link)
    pthread_mutex_lock(&engine.lock)
    engine.threads_entered += 1
    engine.notify = engine.notify or engine.pausers != 0
    mover = take_mover(engine)
    engine.thread_error = ENOMEM if mover == NULL else error
    if mover != NULL:
        mover.on_thread = True
        if error == 0:
            if engine.link.asynchronous:
                serve_asynchronous(engine, mover)
            else:
                serve(engine, mover)
        mover.on_thread = False
        return_mover(engine, mover)
    if not engine.closing:
        engine.threads_ended += 1
    pthread_cond_broadcast(&engine.done)
    pthread_mutex_unlock(&engine.lock)
    return NULL
