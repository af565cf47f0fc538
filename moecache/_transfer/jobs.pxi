# A job's states and its journey in chunks. Every function here is called with the engine's lock held.
# docs/engine.md has the diagram of the states and says which function writes which change.


cdef enum:
    RATE_MEMORY_NS = 250000000      # what the link did so much busy time ago counts for 1/e in its rate


cdef void retire(EngineState* engine, int32_t slot) noexcept nogil:
    """End the live job of a slot. Chunks of it that still move are stale from now on."""
    cdef Slot* job = &engine.slots[slot]
    if job.state == QUEUED:
        unqueue(engine, slot)
    job.stale += job.outstanding
    engine.stale += job.outstanding
    job.outstanding = 0
    job.sequence = 0
    job.state = IDLE
    engine.live -= 1
    note_end(engine, slot)


cdef void publish(EngineState* engine, int32_t slot) noexcept nogil:
    cdef Slot* job = &engine.slots[slot]
    if job.level == DEMAND:
        engine.counters.jobs_demand += 1
    else:
        engine.counters.jobs_prefetch += 1
    store_release(&engine.complete[slot], job.generation)
    retire(engine, slot)


cdef void fail(EngineState* engine, int32_t slot, int fault, int32_t file, int64_t offset) noexcept nogil:
    cdef Slot* job = &engine.slots[slot]
    job.fault = fault
    job.fault_file = file
    job.fault_offset = offset
    engine.counters.failed += 1
    store_release(&engine.complete[slot], -job.generation)
    retire(engine, slot)


cdef void cancel(EngineState* engine, int32_t slot) noexcept nogil:
    cdef Slot* job = &engine.slots[slot]
    if job.level == PREFETCH:
        if job.begun:
            engine.counters.prefetch_cancelled += 1
        else:
            engine.counters.prefetch_dropped += 1
    retire(engine, slot)


cdef void end_stale_chunk(EngineState* engine, int32_t slot) noexcept nogil:
    """A chunk of an earlier job has stopped: a job that waited for the slot may begin."""
    cdef Slot* job = &engine.slots[slot]
    job.stale -= 1
    engine.stale -= 1
    if job.stale == 0 and job.state == BLOCKED:
        enqueue(engine, slot)
        wake_workers(engine, 1)
    note_end(engine, slot)


cdef int32_t join_job(EngineState* engine, int32_t slot, int32_t level, float priority) noexcept nogil:
    """A live job is asked for again. Returns the number of jobs a sleeping thread may now find."""
    cdef Slot* job = &engine.slots[slot]
    if job.level == DEMAND:
        return 0
    if level == DEMAND:
        engine.counters.joined += 1
        if job.state != QUEUED:
            job.level = DEMAND
            return 0
        unqueue(engine, slot)
        job.level = DEMAND
        enqueue(engine, slot)
        return 1
    job.priority = priority
    if job.state == QUEUED:
        heap_move(engine, job.heap)
    return 0


cdef int32_t admit(EngineState* engine, int32_t source, int32_t slot, int32_t generation, int32_t level,
                   float priority) noexcept nogil:
    """Take one row of a submission. Returns the number of jobs a sleeping thread may now find."""
    cdef Slot* job = &engine.slots[slot]
    if generation < job.newest or (level == PREFETCH and generation <= job.dropped):
        return 0
    if generation == job.newest and job.state != IDLE:
        return join_job(engine, slot, level, priority)
    if engine.complete[slot] == generation:
        return 0
    if job.state != IDLE:
        cancel(engine, slot)
    engine.sequence += 1
    engine.live += 1
    job.sequence = engine.sequence
    job.newest = job.generation = generation
    job.dropped = min(job.dropped, generation - 1)
    job.level = level
    job.priority = priority
    job.source = source
    job.segment = engine.segment_start[source]
    job.offset = 0
    job.landed = 0
    job.begun = 0
    if engine.complete[slot] == -generation:
        store_release(&engine.complete[slot], 0)
    if job.segment == engine.segment_start[source + 1]:
        publish(engine, slot)
        return 0
    if job.stale:
        job.state = BLOCKED
        return 0
    enqueue(engine, slot)
    return 1


cdef void drop_row(EngineState* engine, int32_t slot, int32_t generation) noexcept nogil:
    cdef Slot* job = &engine.slots[slot]
    if generation < job.newest:
        return
    if job.state != IDLE:
        cancel(engine, slot)
    job.newest = generation
    job.dropped = generation
    note_end(engine, slot)


cdef void cut_rows(EngineState* engine, int32_t slot, Chunk* chunk) noexcept nogil:
    """Take the next rows off a packed segment: what they need of each stream."""
    cdef Slot* job = &engine.slots[slot]
    cdef Segment* segment = &engine.segments[job.segment]
    cdef Recipe* recipe = segment.recipe
    cdef int64_t begin, last
    cdef int32_t i
    chunk.packed = segment
    chunk.first_row = job.offset
    chunk.rows = min(recipe.chunk_rows, recipe.rows - job.offset)
    last = chunk.first_row + chunk.rows
    chunk.target[0] = (engine.region_address[segment.region] + slot * engine.region_stride[segment.region]
                       + segment.offset)
    for i in range(recipe.streams):
        begin = chunk.first_row // recipe.step[i] * recipe.nbytes[i]
        chunk.source[i] = segment[i].source + <uint64_t> begin
        chunk.length[i] = (last + recipe.step[i] - 1) // recipe.step[i] * recipe.nbytes[i] - begin
        chunk.nbytes += chunk.length[i]
    chunk.pieces = recipe.streams
    job.offset = last
    if last == recipe.rows:
        job.segment += recipe.streams
        job.offset = 0


cdef bint cut_chunk(EngineState* engine, int32_t slot, Chunk* chunk) noexcept nogil:
    """Take the next chunk off a job; True when it is the last. Neighbours in a file travel as one read."""
    cdef Slot* job = &engine.slots[slot]
    cdef int64_t end = engine.segment_start[job.source + 1], limit = engine.chunk_bytes, whole, take
    cdef Segment* segment = &engine.segments[job.segment]
    cdef uint64_t at
    job.begun = 1
    chunk.packed = NULL
    chunk.file = segment.file
    chunk.pieces = 0
    chunk.nbytes = 0
    if segment.recipe != NULL:
        cut_rows(engine, slot, chunk)
        return job.segment == end
    if chunk.file >= 0:
        # Ending on a block spares the next chunk from reading that block again.
        limit = min(limit, engine.link.file_chunk)
        whole = limit - <int64_t> ((segment.source + job.offset + limit) & 4095)
        limit = whole if whole > 0 else limit
    while job.segment < end and chunk.pieces < MAX_PIECES and chunk.nbytes < limit:
        segment = &engine.segments[job.segment]
        at = segment.source + job.offset
        if chunk.pieces and (segment.recipe != NULL or segment.file != chunk.file
                             or (chunk.file >= 0 and at != chunk.source[0] + <uint64_t> chunk.nbytes)):
            break
        take = min(segment.nbytes - job.offset, limit - chunk.nbytes)
        chunk.source[chunk.pieces] = at
        chunk.target[chunk.pieces] = (engine.region_address[segment.region] + slot * engine.region_stride[segment.region]
                                      + segment.offset + job.offset)
        chunk.length[chunk.pieces] = take
        chunk.pieces += 1
        chunk.nbytes += take
        job.offset += take
        if job.offset == segment.nbytes:
            job.segment += 1
            job.offset = 0
    return job.segment == end


cdef inline void count_bytes(EngineState* engine, int32_t level, int64_t nbytes) noexcept nogil:
    if level == DEMAND:
        engine.counters.bytes_demand += nbytes
    else:
        engine.counters.bytes_prefetch += nbytes


cdef void count_start(EngineState* engine) noexcept nogil:
    if engine.moving == 0:
        engine.link_since = now_ns()
    engine.moving += 1


cdef void count_landing(EngineState* engine, int64_t nbytes, bint arrived) noexcept nogil:
    """Account for the time since the last landing, in which this chunk and perhaps others moved."""
    cdef int64_t now = now_ns()
    cdef double elapsed = now - engine.link_since
    cdef double kept = RATE_MEMORY_NS / (RATE_MEMORY_NS + elapsed)
    engine.link_since = now
    engine.moving -= 1
    if arrived:
        engine.link_bytes = engine.link_bytes * kept + nbytes
        engine.link_ns = engine.link_ns * kept + elapsed
        store_double(&engine.link_rate, 1e9 * engine.link_bytes / max(engine.link_ns, 1.0))
    if engine.pausers and engine.moving == 0:
        engine.notify = True


cdef void start_chunk(EngineState* engine, int32_t slot, InFlight* flight, Chunk* chunk) noexcept nogil:
    """Take a chunk off a queued job to move it; the job leaves its queue with the last."""
    cdef Slot* job = &engine.slots[slot]
    cdef bint last = cut_chunk(engine, slot, chunk)
    flight.slot = slot
    flight.level = job.level
    flight.sequence = job.sequence
    flight.nbytes = chunk.nbytes
    flight.file = chunk.file
    job.outstanding += 1
    count_start(engine)
    if last:
        unqueue(engine, slot)
        job.state = MOVING


cdef void end_chunk(EngineState* engine, InFlight* flight, int error, Mover* mover) noexcept nogil:
    """A chunk that this mover has moved has arrived, or failed."""
    cdef Slot* job = &engine.slots[flight.slot]
    cdef bint live = job.sequence == flight.sequence
    count_landing(engine, flight.nbytes, error == 0)
    if error == 0:
        count_bytes(engine, job.level if live else flight.level, flight.nbytes)
    if not live:
        end_stale_chunk(engine, flight.slot)
        return
    job.outstanding -= 1
    if error:
        fail(engine, flight.slot, error, mover.fault_file if flight.file >= 0 else -1, mover.fault_offset)
        return
    job.landed += flight.nbytes
    if job.state == MOVING and job.outstanding == 0:
        publish(engine, flight.slot)


cdef void publish_started(EngineState* engine, InFlight* flight) noexcept nogil:
    """All of a job is under way on a link that orders readers behind it: nobody need wait for it to land."""
    cdef Slot* job = &engine.slots[flight.slot]
    if job.sequence == flight.sequence:
        store_release(&engine.complete[flight.slot], job.generation)
        note_end(engine, flight.slot)
