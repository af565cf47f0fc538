# What an engine says of itself when a wait takes too long, and the error that a wait ends with.


_STATES = ("idle", "queued", "blocked", "moving")


cdef enum:
    MOST_JOBS = 40              # lines of a report; a longer one buries what it is about


cdef class _Snapshot:
    """A copy of what a report needs: made under the lock, read without it."""
    cdef EngineState state      # only the fields that `fill` copies
    cdef Slot* slots            # [slots] copies of all, owned
    cdef Mover movers[128]      # copies of those that were made, as many as there is space for
    cdef int32_t movers_count   # how many these are

    def __dealloc__(self):
        free(self.slots)

    cdef void fill(self, EngineState* engine) noexcept:
        cdef Mover* mover
        cdef Mover* copied
        pthread_mutex_lock(&engine.lock)
        # Not all of it: descriptors and the counters of reads have another lock, and none.
        self.state.first, self.state.slots_count, self.state.paused = engine.first, engine.slots_count, engine.paused
        self.state.demand_count, self.state.heap_count, self.state.moving = engine.demand_count, engine.heap_count, engine.moving
        self.state.threads, self.state.threads_ended, self.state.link = engine.threads, engine.threads_ended, engine.link
        self.state.segment_start, self.state.segments = engine.segment_start, engine.segments
        self.state.flight_first, self.state.flight_count = engine.flight_first, engine.flight_count
        self.state.link_rate = load_double(&engine.link_rate)
        memcpy(self.state.flights, engine.flights, sizeof(engine.flights))
        memcpy(self.slots, engine.slots, engine.slots_count * sizeof(Slot))
        mover = engine.all_movers
        while mover != NULL and self.movers_count < 128:
            # What a copy works with (fault_offset, short_read) changes without the lock.
            copied = &self.movers[self.movers_count]
            copied.busy, copied.on_thread, copied.slot = mover.busy, mover.on_thread, mover.slot
            copied.nbytes, copied.since = mover.nbytes, mover.since
            self.movers_count += 1
            mover = mover.next_of_all
        pthread_mutex_unlock(&engine.lock)

    cdef list order(self):
        """Slots with a live job: demands and prefetches as they will be served, then those in no queue."""
        cdef int32_t slot = self.state.first
        jobs = []
        while slot >= 0:
            jobs.append(slot)
            slot = self.slots[slot].next
        prefetches = [i for i in range(self.state.slots_count)
                      if self.slots[i].state == QUEUED and self.slots[i].level == PREFETCH]
        prefetches.sort(key=lambda i: (-self.slots[<int32_t> i].priority, self.slots[<int32_t> i].sequence))
        rest = [i for i in range(self.state.slots_count) if self.slots[i].state in (BLOCKED, MOVING)]
        return jobs + prefetches + rest

    cdef str job(self, int32_t slot):
        cdef Slot* job = &self.slots[slot]
        cdef int64_t total = 0, i
        for i in range(self.state.segment_start[job.source], self.state.segment_start[job.source + 1]):
            total += self.state.segments[i].nbytes
        parts = [f"{'demand' if job.level == DEMAND else 'prefetch'}, {_STATES[job.state]}: slot {slot}, "
                 f"generation {job.generation}, source {job.source}, {job.landed} of {total} bytes there"]
        if job.level == PREFETCH:
            parts.append(f"priority {job.priority:g}")
        if job.outstanding:
            parts.append(f"{job.outstanding} chunks moving")
        if job.stale:
            parts.append(f"held by {job.stale} chunks of earlier jobs that still move into the slot")
        if job.awaited:
            parts.append(f"{job.awaited} callers wait")
        return ", ".join(parts)

    cdef list holders(self):
        """Who moves which bytes now."""
        cdef int64_t now = now_ns()
        cdef Mover* mover
        cdef InFlight* flight
        parts = []
        for i in range(self.movers_count):
            mover = &self.movers[i]
            if mover.busy:
                parts.append(f"{'an I/O thread' if mover.on_thread else 'a waiting caller'} has been copying "
                             f"{mover.nbytes} bytes into slot {mover.slot} for {(now - mover.since) / 1e6:.1f} ms")
        for i in range(self.state.flight_count):
            flight = &self.state.flights[(self.state.flight_first + i) % self.state.link.depth]
            parts.append(f"on the link: {flight.nbytes} bytes for slot {flight.slot}"
                         f"{'' if self.slots[flight.slot].sequence == flight.sequence else ', no longer wanted'}")
        return parts


cdef str describe(_Handle handle):
    """Some lines about an engine that is not closed; see `Engine.describe`."""
    cdef _Snapshot seen = _Snapshot()
    cdef EngineState* state = &seen.state
    seen.slots = <Slot*> allocate(handle.state.slots_count, sizeof(Slot))
    seen.fill(&handle.state)
    jobs = seen.order()
    waiting = sum(1 for i in jobs if seen.slots[<int32_t> i].state == BLOCKED)
    lines = [f"{state.demand_count} demand and {state.heap_count} prefetch jobs queued, {waiting} blocked; "
             f"{state.moving} chunks moving; {state.threads - state.threads_ended} of {state.threads} I/O threads alive; "
             f"link rate {state.link_rate / 1e9:.3g} GB/s"]
    if state.paused:
        lines.append(f"paused {state.paused} times: no chunk starts before as many calls of resume()")
    lines += [seen.job(<int32_t> i) for i in jobs[:MOST_JOBS]]
    if len(jobs) > MOST_JOBS:
        lines.append(f"and {len(jobs) - MOST_JOBS} more jobs")
    return "\n".join(lines + seen.holders())


cdef object system_error(int fault):
    if fault >= CUDA_ERROR:
        return OSError(EIO, cuda_message(fault - CUDA_ERROR))
    return OSError(fault, os.strerror(fault))


cdef int raise_outcome(_Handle handle, int outcome, Py_ssize_t position, int32_t slot, int32_t generation,
                       double timeout) except -1:
    """Raise what a call that ended like this has to raise; slot -1: it was not about one."""
    cdef Slot* job = &handle.state.slots[max(slot, 0)]
    cause = None
    # Another thread may have given the slot away meanwhile.
    source = job.source if slot >= 0 and job.generation == generation else -1
    copy = f"slot {slot}, generation {generation}"
    if source >= 0:
        copy = f"{handle.name_of(source)} ({copy})"
    if outcome == CLOSED:
        raise ClosedError("the engine was closed")
    if outcome == DEAD:
        if handle.state.thread_error:
            cause = system_error(handle.state.thread_error)
        error = TransferError(f"an I/O thread has ended ({cause or 'reason unknown'}), copies can no longer be "
                              f"made. Close this engine and make a new one\n{describe(handle)}")
    elif outcome == TIMEOUT:
        what = "" if slot < 0 else f": {copy}, {_STATES[job.state]}"
        error = TransferError(f"not complete after {timeout:g} s{what}. A slow link needs a longer timeout\n"
                              f"{describe(handle)}")
    elif outcome == LOST:
        error = TransferError(f"{copy} was dropped, or given to another expert (generation {job.newest}), before its "
                              "bytes were there")
    else:
        cause = cause_of(handle, job.fault, job.fault_file, job.fault_offset)
        reason = getattr(cause, "strerror", None) or str(cause)
        error = TransferError(getattr(cause, "errno", EIO), f"the copy of {copy} failed: {reason}",
                              None if job.fault_file < 0 else handle.paths[job.fault_file])
    error.position, error.source = position, source
    raise error from cause


cdef object cause_of(_Handle handle, int fault, int32_t file, int64_t offset):
    if fault == MEMORY_MOVED:
        return CheckpointError("the memory of its tensor has moved since the bank was built (put into shared memory?); "
                               "build the bank after that")
    if file >= 0 and fault < CUDA_ERROR:
        return file_error(handle, file, fault, offset)
    return system_error(fault)
