# Jobs, their queues and their journey. Every function here is called with the room's lock held.
# Included by _engine.pyx. docs/engine.md has the diagram of a job's states and says which function owns which change.

cdef enum:
    RATE_MEMORY_NS = 250000000      # what the link did so much busy time ago counts for 1/e in its rate


cdef inline bint sooner(Room* room, int32_t a, int32_t b) noexcept nogil:
    cdef Slot* x = &room.slots[a]
    cdef Slot* y = &room.slots[b]
    return x.priority > y.priority or (x.priority == y.priority and x.sequence < y.sequence)


cdef inline void heap_put(Room* room, int32_t at, int32_t slot) noexcept nogil:
    room.heap[at] = slot
    room.slots[slot].heap = at


cdef void heap_move(Room* room, int32_t at) noexcept nogil:
    """Bring the entry at this position to where it belongs."""
    cdef int32_t slot = room.heap[at], child
    while at > 0 and sooner(room, slot, room.heap[(at - 1) // 2]):
        heap_put(room, at, room.heap[(at - 1) // 2])
        at = (at - 1) // 2
    while True:
        child = 2 * at + 1
        if child >= room.heap_count:
            break
        if child + 1 < room.heap_count and sooner(room, room.heap[child + 1], room.heap[child]):
            child += 1
        if not sooner(room, room.heap[child], slot):
            break
        heap_put(room, at, room.heap[child])
        at = child
    heap_put(room, at, slot)


cdef void enqueue(Room* room, int32_t slot) noexcept nogil:
    cdef Slot* job = &room.slots[slot]
    job.state = QUEUED
    if job.level == PREFETCH:
        heap_put(room, room.heap_count, slot)
        room.heap_count += 1
        heap_move(room, room.heap_count - 1)
        return
    job.next = -1
    job.previous = room.last
    if room.last < 0:
        room.first = slot
    else:
        room.slots[room.last].next = slot
    room.last = slot
    room.demand_count += 1


cdef void unqueue(Room* room, int32_t slot) noexcept nogil:
    cdef Slot* job = &room.slots[slot]
    cdef int32_t moved
    if job.level == PREFETCH:
        room.heap_count -= 1
        moved = room.heap[room.heap_count]
        if moved != slot:
            heap_put(room, job.heap, moved)
            heap_move(room, job.heap)
        return
    if job.previous < 0:
        room.first = job.next
    else:
        room.slots[job.previous].next = job.next
    if job.next < 0:
        room.last = job.previous
    else:
        room.slots[job.next].previous = job.previous
    room.demand_count -= 1


cdef inline int32_t next_job(Room* room) noexcept nogil:
    """The job whose chunk goes next, -1: none may."""
    if room.paused:
        return -1
    if room.first >= 0:
        return room.first
    return room.heap[0] if room.heap_count else -1


cdef void wake_workers(Room* room, int32_t jobs) noexcept nogil:
    if jobs == 1:
        pthread_cond_signal(&room.work)
    elif jobs > 1:
        pthread_cond_broadcast(&room.work)


cdef inline void tell(Room* room, int32_t slot) noexcept nogil:
    """Something has ended in this slot: note it if anybody sleeps who wants to know."""
    if room.slots[slot].awaited or (room.drainers and room.live == 0 and room.stale == 0):
        room.news = True


cdef inline void tell_now(Room* room) noexcept nogil:
    if room.news:
        room.news = False
        pthread_cond_broadcast(&room.done)


cdef inline void leave(Room* room) noexcept nogil:
    """Give the lock up. Callers are woken after it: under the lock they would only stop at it, and on a busy machine
    the thread that moves the bytes would wait for them to be scheduled."""
    cdef bint news = room.news
    room.news = False
    pthread_mutex_unlock(&room.lock)
    if news:
        pthread_cond_broadcast(&room.done)


cdef void retire(Room* room, int32_t slot) noexcept nogil:
    """End the live job of a slot. Chunks of it that still move are stale from now on."""
    cdef Slot* job = &room.slots[slot]
    if job.state == QUEUED:
        unqueue(room, slot)
    job.stale += job.outstanding
    room.stale += job.outstanding
    job.outstanding = 0
    job.sequence = 0
    job.state = IDLE
    room.live -= 1
    tell(room, slot)


cdef void publish(Room* room, int32_t slot) noexcept nogil:
    cdef Slot* job = &room.slots[slot]
    if job.level == DEMAND:
        room.counters.jobs_demand += 1
    else:
        room.counters.jobs_prefetch += 1
    store_release(&room.complete[slot], job.generation)
    retire(room, slot)


cdef void fail(Room* room, int32_t slot, int fault, int32_t file, int64_t offset) noexcept nogil:
    cdef Slot* job = &room.slots[slot]
    job.fault = fault
    job.fault_file = file
    job.fault_offset = offset
    room.counters.failed += 1
    store_release(&room.complete[slot], -job.generation)
    retire(room, slot)


cdef void cancel(Room* room, int32_t slot) noexcept nogil:
    cdef Slot* job = &room.slots[slot]
    if job.level == PREFETCH:
        if job.begun:
            room.counters.prefetch_cancelled += 1
        else:
            room.counters.prefetch_dropped += 1
    retire(room, slot)


cdef void stale_landed(Room* room, int32_t slot) noexcept nogil:
    """A chunk of an earlier job has stopped: a job that waited for the slot may begin."""
    cdef Slot* job = &room.slots[slot]
    job.stale -= 1
    room.stale -= 1
    if job.stale == 0 and job.state == BLOCKED:
        enqueue(room, slot)
        wake_workers(room, 1)
    tell(room, slot)


cdef int32_t join(Room* room, int32_t slot, int32_t level, float priority) noexcept nogil:
    """A live job is asked for again. Returns the number of jobs a sleeping thread may now find."""
    cdef Slot* job = &room.slots[slot]
    if job.level == DEMAND:
        return 0
    if level == DEMAND:
        room.counters.joined += 1
        if job.state != QUEUED:
            job.level = DEMAND
            return 0
        unqueue(room, slot)
        job.level = DEMAND
        enqueue(room, slot)
        return 1
    job.priority = priority
    if job.state == QUEUED:
        heap_move(room, job.heap)
    return 0


cdef int32_t admit(Room* room, int32_t source, int32_t slot, int32_t generation, int32_t level,
                   float priority) noexcept nogil:
    """Take one row of a submission. Returns the number of jobs a sleeping thread may now find."""
    cdef Slot* job = &room.slots[slot]
    if generation < job.newest or (level == PREFETCH and generation <= job.dropped):
        return 0
    if generation == job.newest and job.state != IDLE:
        return join(room, slot, level, priority)
    if room.complete[slot] == generation:
        return 0
    if job.state != IDLE:
        cancel(room, slot)
    room.sequence += 1
    room.live += 1
    job.sequence = room.sequence
    job.newest = job.generation = generation
    job.dropped = min(job.dropped, generation - 1)
    job.level = level
    job.priority = priority
    job.source = source
    job.segment = room.segment_start[source]
    job.offset = 0
    job.landed = 0
    job.begun = 0
    if room.complete[slot] == -generation:
        store_release(&room.complete[slot], 0)
    if job.segment == room.segment_start[source + 1]:
        publish(room, slot)
        return 0
    if job.stale:
        job.state = BLOCKED
        return 0
    enqueue(room, slot)
    return 1


cdef void drop_row(Room* room, int32_t slot, int32_t generation) noexcept nogil:
    cdef Slot* job = &room.slots[slot]
    if generation < job.newest:
        return
    if job.state != IDLE:
        cancel(room, slot)
    job.newest = generation
    job.dropped = generation
    tell(room, slot)


cdef bint cut(Room* room, int32_t slot, Chunk* chunk) noexcept nogil:
    """Take the next chunk off a job; True when it is the last. Neighbours in a file travel as one read."""
    cdef Slot* job = &room.slots[slot]
    cdef int64_t end = room.segment_start[job.source + 1], limit = room.chunk_bytes, whole, take
    cdef Segment* segment = &room.segments[job.segment]
    cdef uint64_t at
    job.begun = 1
    chunk.file = segment.file
    chunk.pieces = 0
    chunk.nbytes = 0
    if chunk.file >= 0:
        # Ending on a block spares the next chunk from reading that block again.
        limit = min(limit, room.link.file_chunk)
        whole = limit - <int64_t> ((segment.source + job.offset + limit) & 4095)
        limit = whole if whole > 0 else limit
    while job.segment < end and chunk.pieces < MAX_PIECES and chunk.nbytes < limit:
        segment = &room.segments[job.segment]
        at = segment.source + job.offset
        if chunk.pieces and (segment.file != chunk.file
                             or (chunk.file >= 0 and at != chunk.source[0] + <uint64_t> chunk.nbytes)):
            break
        take = min(segment.nbytes - job.offset, limit - chunk.nbytes)
        chunk.source[chunk.pieces] = at
        chunk.target[chunk.pieces] = (room.region_address[segment.region] + slot * room.region_stride[segment.region]
                                      + segment.offset + job.offset)
        chunk.length[chunk.pieces] = take
        chunk.pieces += 1
        chunk.nbytes += take
        job.offset += take
        if job.offset == segment.nbytes:
            job.segment += 1
            job.offset = 0
    return job.segment == end


cdef inline void count_bytes(Room* room, int32_t level, int64_t nbytes) noexcept nogil:
    if level == DEMAND:
        room.counters.bytes_demand += nbytes
    else:
        room.counters.bytes_prefetch += nbytes


cdef void link_starts(Room* room) noexcept nogil:
    if room.moving == 0:
        room.link_since = now_ns()
    room.moving += 1


cdef void link_lands(Room* room, int64_t nbytes, bint arrived) noexcept nogil:
    """Account for the time since the last landing, in which this chunk and perhaps others moved."""
    cdef int64_t now = now_ns()
    cdef double elapsed = now - room.link_since
    cdef double kept = RATE_MEMORY_NS / (RATE_MEMORY_NS + elapsed)
    room.link_since = now
    room.moving -= 1
    if arrived:
        room.link_bytes = room.link_bytes * kept + nbytes
        room.link_ns = room.link_ns * kept + elapsed
        store_double(&room.link_rate, 1e9 * room.link_bytes / max(room.link_ns, 1.0))
    if room.pausers and room.moving == 0:
        room.news = True


cdef void take(Room* room, int32_t slot, Flight* flight, Chunk* chunk) noexcept nogil:
    """Take a chunk off a queued job to move it; the job leaves its queue with the last."""
    cdef Slot* job = &room.slots[slot]
    cdef bint last = cut(room, slot, chunk)
    flight.slot = slot
    flight.level = job.level
    flight.sequence = job.sequence
    flight.nbytes = chunk.nbytes
    flight.file = chunk.file
    job.outstanding += 1
    link_starts(room)
    if last:
        unqueue(room, slot)
        job.state = MOVING


cdef void landed(Room* room, Flight* flight, int error, int64_t offset) noexcept nogil:
    """A chunk has arrived, or failed."""
    cdef Slot* job = &room.slots[flight.slot]
    cdef bint live = job.sequence == flight.sequence
    link_lands(room, flight.nbytes, error == 0)
    if error == 0:
        count_bytes(room, job.level if live else flight.level, flight.nbytes)
    if not live:
        stale_landed(room, flight.slot)
        return
    job.outstanding -= 1
    if error:
        fail(room, flight.slot, error, flight.file, offset)
        return
    job.landed += flight.nbytes
    if job.state == MOVING and job.outstanding == 0:
        publish(room, flight.slot)


cdef int carry(Room* room, Mover* mover, int32_t slot) noexcept nogil:
    """Copy one chunk of a queued job on this thread, over a synchronous link, with the lock given up meanwhile.

    Several threads may carry chunks of the same job. Returns THREAD_ENDS when that fault was injected, else 0.
    """
    cdef Flight flight
    cdef Chunk chunk
    cdef int error
    cdef int64_t elapsed
    take(room, slot, &flight, &chunk)
    if room.sleepers and next_job(room) >= 0:
        pthread_cond_signal(&room.work)
    mover.busy = True
    mover.slot = slot
    mover.nbytes = chunk.nbytes
    mover.since = now_ns()
    leave(room)
    error = room.link.copy(room.link, mover, &chunk, 0)
    elapsed = now_ns() - mover.since
    pthread_mutex_lock(&room.lock)
    room.counters.busy_ns += elapsed
    if flight.file >= 0:
        room.counters.reading_ns += elapsed
    mover.busy = error == THREAD_ENDS
    if error == THREAD_ENDS:
        return THREAD_ENDS
    landed(room, &flight, error, mover.fault_offset)
    return 0


cdef void serve(Room* room, Mover* mover) noexcept nogil:
    """Life of an I/O thread over a synchronous link: chunk after chunk of whatever is most wanted then."""
    cdef int32_t slot
    while not room.closing:
        slot = next_job(room)
        if slot < 0:
            tell_now(room)
            room.sleepers += 1
            pthread_cond_wait(&room.work, &room.lock)
            room.sleepers -= 1
        elif carry(room, mover, slot) == THREAD_ENDS:
            return


cdef void announce(Room* room, Flight* flight) noexcept nogil:
    """All of a job is under way on a link that orders readers behind it: nobody need wait for it to land."""
    cdef Slot* job = &room.slots[flight.slot]
    if job.sequence == flight.sequence:
        store_release(&room.complete[flight.slot], job.generation)
        tell(room, flight.slot)


cdef int launch(Room* room, Mover* mover, int32_t slot) noexcept nogil:
    """Start the next chunk of a queued job on the asynchronous link."""
    cdef int32_t ticket = (room.flight_first + room.flight_count) % room.link.depth
    cdef Flight* flight = &room.flights[ticket]
    cdef bint first = room.slots[slot].begun == 0, ends
    cdef Chunk chunk
    cdef int error = 0
    take(room, slot, flight, &chunk)
    ends = room.slots[slot].state == MOVING and room.link.end != NULL
    leave(room)
    if first:
        error = room.link.begin(room.link, slot)
    if error == 0:
        error = room.link.copy(room.link, mover, &chunk, ticket)
    if error == 0 and ends:
        error = room.link.end(room.link, slot, ticket)
    pthread_mutex_lock(&room.lock)
    if error == THREAD_ENDS:
        return THREAD_ENDS
    if error:
        landed(room, flight, error, mover.fault_offset)
        return 0
    room.flight_count += 1
    room.flight_bytes += chunk.nbytes
    if ends:
        announce(room, flight)
    return 0


cdef void serve_asynchronous(Room* room, Mover* mover) noexcept nogil:
    """Life of the I/O thread over an asynchronous link: keep a small window of chunks outstanding."""
    cdef int32_t slot
    cdef int status
    cdef int64_t again = 0, seen = 0, now
    cdef Flight* flight
    while True:
        again = 0
        if room.closing and room.flight_count:
            room.link.abandon(room.link)
        while room.flight_count:
            flight = &room.flights[room.flight_first]
            leave(room)
            status = room.link.query(room.link, mover, room.flight_first, &again)
            now = now_ns()
            pthread_mutex_lock(&room.lock)
            room.counters.busy_ns += now - seen
            if flight.file >= 0:
                room.counters.reading_ns += now - seen
            seen = now
            if status == PENDING:
                break
            room.flight_first = (room.flight_first + 1) % room.link.depth
            room.flight_count -= 1
            room.flight_bytes -= flight.nbytes
            landed(room, flight, status, mover.fault_offset)
        if room.closing and room.flight_count == 0:
            return
        slot = -1 if room.closing else next_job(room)
        if slot >= 0 and (room.flight_count == 0 or (room.flight_count < room.link.depth and
                          room.flight_bytes + room.chunk_bytes <= room.window_bytes)):
            if room.flight_count == 0:
                seen = now_ns()
            if launch(room, mover, slot) == THREAD_ENDS:
                return
            continue
        tell_now(room)
        room.sleepers += 1
        if room.flight_count:
            cond_wait_until(&room.work, &room.lock, again)
        else:
            pthread_cond_wait(&room.work, &room.lock)
        room.sleepers -= 1
