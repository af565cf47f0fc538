"""What an engine with one I/O thread has to do, chunk by chunk, in plain Python: written from docs/engine.md."""

from __future__ import annotations

from dataclasses import dataclass, field

DEMAND, PREFETCH = "demand", "prefetch"


@dataclass(eq=False)
class Job:
    source: int
    slot: int
    generation: int
    level: str
    priority: float
    number: int  # of its admission
    left: list[int]  # bytes of the chunks still to start
    started: bool = False
    moving: int = 0
    state: str = "queued"  # or "blocked", "moving", "over"


@dataclass
class Chunk:
    job: Job
    level: str
    nbytes: int
    number: int


@dataclass
class Model:
    """``chunks[source]``: bytes of its chunks. ``window`` 0: one chunk at a time, as over a synchronous link."""

    chunks: list[list[int]]
    slots: int
    chunk_bytes: int
    window: int = 0
    fail_at: int = 0
    fails: int = 0
    stage: str = "copy"
    paused: bool = False
    started: int = 0
    admissions: int = 0
    flights: list[Chunk] = field(default_factory=list)
    demands: list[Job] = field(default_factory=list)  # queued ones, in order

    def __post_init__(self) -> None:
        self.complete = [0] * self.slots
        self.newest = [0] * self.slots
        self.dropped = [0] * self.slots
        self.live: list[Job | None] = [None] * self.slots
        self.counters = dict.fromkeys(
            (
                "bytes_demand",
                "bytes_prefetch",
                "jobs_demand",
                "jobs_prefetch",
                "joined",
                "prefetch_dropped",
                "prefetch_cancelled",
                "failed",
            ),
            0,
        )

    def submit(
        self,
        fetch: list[tuple[int, int, int]],
        prefetch: list[tuple[int, int, int, float]],
        drop: list[tuple[int, int]],
    ) -> None:
        for slot, generation in drop:
            self._drop(slot, generation)
        for source, slot, generation in fetch:
            self._admit(source, slot, generation, DEMAND, 0.0)
        for source, slot, generation, priority in prefetch:
            self._admit(source, slot, generation, PREFETCH, priority)
        self._start()

    def pause(self) -> None:
        self.paused = True

    def resume(self) -> None:
        self.paused = False
        self._start()

    def land(self) -> None:
        """The oldest chunk under way arrives."""
        chunk = self.flights.pop(0)
        job = chunk.job
        job.moving -= 1
        failed = self.stage == "landing" and self._fails(chunk.number)
        live = job.state != "over"
        if not failed:
            self.counters[f"bytes_{job.level if live else chunk.level}"] += chunk.nbytes
        if live and failed:
            self._fail(job)
        elif live and job.state == "moving" and not job.moving:
            self._publish(job)
        waiting = self.live[job.slot]
        if waiting and waiting.state == "blocked" and not self._held(job.slot):
            self._queue(waiting)
        self._start()

    @property
    def bytes_landed(self) -> int:
        return self.counters["bytes_demand"] + self.counters["bytes_prefetch"]

    def _fails(self, number: int) -> bool:
        return self.fail_at > 0 and self.fail_at <= number < self.fail_at + self.fails

    def _held(self, slot: int) -> bool:
        return any(chunk.job.slot == slot and chunk.job.state == "over" for chunk in self.flights)

    def _queue(self, job: Job) -> None:
        job.state = "queued"
        if job.level == DEMAND:
            self.demands.append(job)

    def _end(self, job: Job) -> None:
        if job in self.demands:
            self.demands.remove(job)
        job.state = "over"
        self.live[job.slot] = None

    def _publish(self, job: Job) -> None:
        self.counters[f"jobs_{job.level}"] += 1
        self.complete[job.slot] = job.generation
        self._end(job)

    def _fail(self, job: Job) -> None:
        self.counters["failed"] += 1
        self.complete[job.slot] = -job.generation
        self._end(job)

    def _cancel(self, job: Job) -> None:
        if job.level == PREFETCH:
            self.counters["prefetch_cancelled" if job.started else "prefetch_dropped"] += 1
        self._end(job)

    def _drop(self, slot: int, generation: int) -> None:
        if generation < self.newest[slot]:
            return
        job = self.live[slot]
        if job:
            self._cancel(job)
        self.newest[slot] = self.dropped[slot] = generation

    def _admit(self, source: int, slot: int, generation: int, level: str, priority: float) -> None:
        job = self.live[slot]
        if generation < self.newest[slot] or (level == PREFETCH and generation <= self.dropped[slot]):
            return
        if job and generation == self.newest[slot]:
            self._join(job, level, priority)
            return
        if self.complete[slot] == generation:
            return
        if job:
            self._cancel(job)
        self.admissions += 1
        self.newest[slot] = generation
        self.dropped[slot] = min(self.dropped[slot], generation - 1)
        if self.complete[slot] == -generation:
            self.complete[slot] = 0
        job = Job(source, slot, generation, level, priority, self.admissions, list(self.chunks[source]))
        self.live[slot] = job
        if not job.left:
            self._publish(job)
        elif self._held(slot):
            job.state = "blocked"
        else:
            self._queue(job)

    def _join(self, job: Job, level: str, priority: float) -> None:
        if job.level == PREFETCH and level == DEMAND:
            self.counters["joined"] += 1
            job.level = DEMAND
            if job.state == "queued":
                self.demands.append(job)
        elif job.level == PREFETCH:
            job.priority = priority

    def _next(self) -> Job | None:
        if self.paused:
            return None
        if self.demands:
            return self.demands[0]
        queued = [job for job in self.live if job and job.state == "queued"]
        return min(queued, key=lambda job: (-job.priority, job.number), default=None)

    def _start(self) -> None:
        """Start chunks as long as the link takes more."""
        while job := self._next():
            outstanding = sum(chunk.nbytes for chunk in self.flights)
            if self.flights and (not self.window or outstanding + self.chunk_bytes > self.window):
                return
            self.started += 1
            job.started = True
            nbytes = job.left.pop(0)
            if not job.left:
                job.state = "moving"
                if job in self.demands:
                    self.demands.remove(job)
            if self.stage == "copy" and self._fails(self.started):
                self._fail(job)
                continue
            job.moving += 1
            self.flights.append(Chunk(job, job.level, nbytes, self.started))
