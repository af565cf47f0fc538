# What an engine tells about itself when a wait takes too long.
# Included by _engine.pyx.

_STATES = ("idle", "queued", "blocked", "moving")

cdef enum:
    MOST_JOBS = 40              # lines of a report; a longer one buries what it is about


cdef class _Snapshot:
    """A copy of what a report needs: made under the lock, read without it."""
    cdef Room room
    cdef Slot* slots
    cdef Mover movers[128]
    cdef int32_t movers_count

    def __dealloc__(self):
        free(self.slots)

    cdef void fill(self, Room* room) noexcept:
        cdef Mover* mover
        cdef Mover* copied
        pthread_mutex_lock(&room.lock)
        # Not all of it: descriptors and the counters of reads have another lock, and none.
        self.room.first, self.room.slots_count, self.room.paused = room.first, room.slots_count, room.paused
        self.room.demand_count, self.room.heap_count, self.room.moving = room.demand_count, room.heap_count, room.moving
        self.room.threads, self.room.threads_ended, self.room.link = room.threads, room.threads_ended, room.link
        self.room.segment_start, self.room.segments = room.segment_start, room.segments
        self.room.flight_first, self.room.flight_count = room.flight_first, room.flight_count
        self.room.link_rate = load_double(&room.link_rate)
        memcpy(self.room.flights, room.flights, sizeof(room.flights))
        memcpy(self.slots, room.slots, room.slots_count * sizeof(Slot))
        mover = room.every_mover
        while mover != NULL and self.movers_count < 128:
            # What a copy works with (fault_offset, short_read) changes without the lock.
            copied = &self.movers[self.movers_count]
            copied.busy, copied.on_thread, copied.slot = mover.busy, mover.on_thread, mover.slot
            copied.nbytes, copied.since = mover.nbytes, mover.since
            self.movers_count += 1
            mover = mover.sibling
        pthread_mutex_unlock(&room.lock)

    cdef list order(self):
        """Slots with a live job: demands and prefetches as they will be served, then those in no queue."""
        cdef int32_t slot = self.room.first
        jobs = []
        while slot >= 0:
            jobs.append(slot)
            slot = self.slots[slot].next
        prefetches = [i for i in range(self.room.slots_count)
                      if self.slots[i].state == QUEUED and self.slots[i].level == PREFETCH]
        prefetches.sort(key=lambda i: (-self.slots[<int32_t> i].priority, self.slots[<int32_t> i].sequence))
        rest = [i for i in range(self.room.slots_count) if self.slots[i].state in (BLOCKED, MOVING)]
        return jobs + prefetches + rest

    cdef str job(self, int32_t slot):
        cdef Slot* job = &self.slots[slot]
        cdef int64_t total = 0, i
        for i in range(self.room.segment_start[job.source], self.room.segment_start[job.source + 1]):
            total += self.room.segments[i].nbytes
        said = [f"{'demand' if job.level == DEMAND else 'prefetch'}, {_STATES[job.state]}: slot {slot}, "
                f"generation {job.generation}, source {job.source}, {job.landed} of {total} bytes there"]
        if job.level == PREFETCH:
            said.append(f"priority {job.priority:g}")
        if job.outstanding:
            said.append(f"{job.outstanding} chunks moving")
        if job.stale:
            said.append(f"held by {job.stale} chunks of earlier jobs that still move into the slot")
        if job.awaited:
            said.append(f"{job.awaited} callers wait")
        return ", ".join(said)

    cdef list holders(self):
        """Who moves which bytes now."""
        cdef int64_t now = now_ns()
        cdef Mover* mover
        cdef Flight* flight
        said = []
        for i in range(self.movers_count):
            mover = &self.movers[i]
            if mover.busy:
                said.append(f"{'an I/O thread' if mover.on_thread else 'a waiting caller'} has been copying "
                            f"{mover.nbytes} bytes into slot {mover.slot} for {(now - mover.since) / 1e6:.1f} ms")
        for i in range(self.room.flight_count):
            flight = &self.room.flights[(self.room.flight_first + i) % self.room.link.depth]
            said.append(f"on the link: {flight.nbytes} bytes for slot {flight.slot}"
                        f"{'' if self.slots[flight.slot].sequence == flight.sequence else ', no longer wanted'}")
        return said


cdef str describe(_Keeper keeper):
    """Some lines about an engine that is not closed; see `Engine.describe`."""
    cdef _Snapshot seen = _Snapshot()
    cdef Room* room = &seen.room
    seen.slots = <Slot*> room_for(keeper.room.slots_count, sizeof(Slot))
    seen.fill(&keeper.room)
    jobs = seen.order()
    waiting = sum(1 for i in jobs if seen.slots[<int32_t> i].state == BLOCKED)
    lines = [f"{room.demand_count} demand and {room.heap_count} prefetch jobs queued, {waiting} blocked; "
             f"{room.moving} chunks moving; {room.threads - room.threads_ended} of {room.threads} I/O threads alive; "
             f"link rate {room.link_rate / 1e9:.3g} GB/s"]
    if room.paused:
        lines.append(f"paused {room.paused} times: no chunk starts before as many calls of resume()")
    lines += [seen.job(<int32_t> i) for i in jobs[:MOST_JOBS]]
    if len(jobs) > MOST_JOBS:
        lines.append(f"and {len(jobs) - MOST_JOBS} more jobs")
    return "\n".join(lines + seen.holders())
