"""What every back-end promises: the same tests over memory, files, a limited link and, where there is one, CUDA."""

from __future__ import annotations

import errno
import threading
import time

import numpy as np
import pytest
from harness import POISON, WAIT, Backend, World, bytes_landed, held_back, settle, step, until

from moecache.errors import ClosedError, TransferError

pytestmark = pytest.mark.timeout(120)

BLOCK = 4096  # chunks of this size, in a file that begins with them, are the same ones over every link


# ---- bytes


@pytest.mark.failure("36")
@pytest.mark.parametrize("chunk_bytes", [997, 4096, 2 << 20])
def test_odd_sizes_arrive_byte_for_byte(backend: Backend, chunk_bytes: int) -> None:
    rng = np.random.default_rng(chunk_bytes)
    sizes = [[1], [3], [4097], [1, 3, 4097], [4095, 4096, 1], [65_537], [1_048_577, 16_383, 0, 63], [2_200_003]]
    parts = []
    for lengths in sizes:
        offsets = [7, 1]
        parts.append([])
        for index, length in enumerate(lengths):
            parts[-1].append((index % 2, offsets[index % 2], rng.bytes(length)))
            offsets[index % 2] += length + 5
    world = backend.world(parts, [2_300_011, 20_001], len(sizes), chunk_bytes=chunk_bytes)
    world.wait_all(world.fetch(*((source, source) for source in range(len(sizes)))))
    for slot in range(len(sizes)):
        assert world.holds(slot, slot)
        assert world.untouched_between(slot, slot)
    assert bytes_landed(world) == (sum(map(sum, sizes)), 0)


@pytest.mark.parametrize("shift", [0, 1, 63, 64, 4095])
def test_large_copies_at_every_alignment(backend: Backend, shift: int) -> None:
    """Large chunks take another way through the caches, in blocks of lines and pages with a rest on both ends."""
    data = np.random.default_rng(shift).bytes(3 * 1_048_576 + 65)
    parts = [[(0, shift, data[:-shift] if shift else data)], [(0, 64 + shift, data)]]
    world = backend.world(parts, [len(data) + 4200], 2, chunk_bytes=(1 << 20) + shift)
    world.wait_all(world.fetch((0, 0), (1, 1)))
    for slot in (0, 1):
        assert world.holds(slot, slot)
        assert world.untouched_between(slot, slot)


# ---- order


def test_demands_in_order_before_prefetches_by_priority(backend: Backend) -> None:
    world = backend.simple(8, 1000, 8, faults={"stall_at": 1}, window_bytes=1)
    world.prefetch((0, 0, 0.0))
    held_back(world, 1)
    world.prefetch((1, 1, 0.1), (2, 2, 0.9), (3, 3, 0.5), (4, 4, 0.9))
    world.fetch((5, 5), (6, 6))
    order: list[int] = []
    for done in range(1, 8):
        step(world)
        until(lambda done=done: np.count_nonzero(world.complete) == done)
        order += [slot for slot in range(8) if world.complete[slot] and slot not in order]
    assert order == [0, 5, 6, 2, 4, 3, 1]


def test_a_demand_overtakes_at_the_next_chunk_and_the_rest_goes_on_where_it_stopped(backend: Backend) -> None:
    world = backend.simple(2, 10 * BLOCK, 2, lead=0, faults={"stall_at": 1}, chunk_bytes=BLOCK, window_bytes=BLOCK)
    world.prefetch((0, 0, 1.0))
    step(world, 3)
    world.fetch((1, 1))
    step(world, 11)  # the chunk under way and the demand's ten
    until(lambda: world.complete[1])
    assert world.holds(1, 1)
    assert bytes_landed(world) == (10 * BLOCK, 4 * BLOCK)
    assert world.complete[0] == 0
    step(world, 6)
    until(lambda: world.complete[0])
    assert world.holds(0, 0)
    assert world.options["link"].chunks == 20


def test_before_a_demand_land_no_more_than_the_windows_bytes(backend: Backend) -> None:
    world = backend.simple(
        20, 10 * BLOCK, 20, lead=0, faults={"stall_at": 1}, chunk_bytes=BLOCK, window_bytes=3 * BLOCK
    )
    world.prefetch(*((source, source, 1.0) for source in range(19)))
    outstanding = 3 if backend.asynchronous else 1
    held_back(world, outstanding)
    world.fetch((19, 19))
    step(world, outstanding + 10)
    until(lambda: world.complete[19])
    assert bytes_landed(world) == (10 * BLOCK, outstanding * BLOCK)
    assert world.holds(19, 19)


# ---- join, cancel


@pytest.mark.failure("18")
def test_a_demand_joins_a_prefetch_under_way(backend: Backend) -> None:
    world = backend.simple(3, 5 * BLOCK, 3, lead=0, faults={"stall_at": 1}, chunk_bytes=BLOCK, window_bytes=BLOCK)
    mine, other = world.prefetch((0, 0, 0.0), (1, 1, 1.0))
    step(world, 1)  # of the other one
    world.raise_(0, mine)
    world.raise_(0, mine)
    step(world, 6)  # the other's chunk that was under way, then all of mine
    until(lambda: world.complete[0])
    assert world.complete[1] == 0
    world.raise_(1, other)
    step(world, 3)
    world.wait_all([mine, other])
    counters = settle(world)
    assert world.options["link"].chunks == 10
    assert (counters["joined"], counters["jobs_demand"], counters["jobs_prefetch"]) == (2, 2, 0)
    assert world.holds(0, 0)
    assert world.holds(1, 1)


def test_a_queued_prefetch_is_dropped_without_moving_a_byte(backend: Backend) -> None:
    world = backend.simple(2, 1000, 2, faults={"stall_at": 1}, window_bytes=1)
    _, second = world.prefetch((0, 0, 1.0), (1, 1, 0.0))
    held_back(world, 1)
    world.drop(second)
    step(world)
    counters = settle(world)
    assert (counters["prefetch_dropped"], counters["prefetch_cancelled"]) == (1, 0)
    assert world.options["link"].chunks == 1
    assert (world.regions[0][1] == POISON).all()
    with pytest.raises(TransferError, match="dropped"):
        world.wait_all([second])


@pytest.mark.parametrize("landed", [False, True], ids=["on-its-way", "landed-late"])
def test_a_chunk_of_a_dropped_prefetch_holds_up_the_slots_next_occupant(backend: Backend, landed: bool) -> None:
    world = backend.simple(2, 3000, 1, faults={"stall_at": 2, "stall_landed": landed}, chunk_bytes=1000)
    (first,) = world.prefetch((0, 0, 1.0))
    held_back(world, 2)
    chunks = world.options["link"].chunks
    world.drop(first)
    (second,) = world.fetch((1, 0))
    assert "blocked: slot 0, generation 2" in world.engine.describe()
    with pytest.raises(TransferError, match="still move into the slot"):
        world.wait_all([second], 0.02)
    assert world.options["link"].chunks == chunks
    world.options["link"].release()
    world.wait_all([second])
    assert world.holds(0, 1)
    assert settle(world)["prefetch_cancelled"] == 1


# ---- failure at each stage


@pytest.mark.parametrize(
    ("stage", "chunk"),
    [("begin", 1), *((stage, chunk) for stage in ("copy", "short copy", "landing") for chunk in (1, 2, 5))],
)
def test_a_failure_reaches_the_waiter_and_the_next_call_works(backend: Backend, stage: str, chunk: int) -> None:
    faults = {"short_copy_at": chunk} if stage == "short copy" else {"fail_at": chunk, "stage": stage}
    if stage == "begin" and not backend.asynchronous:
        pytest.skip("jobs of a synchronous link have no beginning of their own")
    world = backend.simple(2, 5000, 2, faults={"error": errno.ENODEV, **faults}, chunk_bytes=1000, window_bytes=2000)
    (job,) = world.fetch((0, 0))
    with pytest.raises(TransferError) as caught:
        world.wait_all([job])
    assert caught.value.errno == errno.ENODEV
    assert caught.value.__cause__.errno == errno.ENODEV
    assert caught.value.position == 0
    assert world.complete[0] == -1
    world.raise_(0, job)
    world.wait_all([job])
    assert world.holds(0, 0)
    world.wait_all(world.fetch((1, 0), (0, 1)))
    assert world.holds(0, 1)
    assert world.holds(1, 0)
    assert settle(world)["failed"] == 1


def test_a_thread_that_cannot_start_is_an_error(backend: Backend) -> None:
    world = backend.simple(1, 1000, 1, faults={"fail_at": 1, "stage": "enter", "error": errno.EPERM})
    until(lambda: "0 of 1 I/O threads alive" in world.engine.describe())
    with pytest.raises(TransferError, match=r"thread has ended \(.*permitted\)"):
        world.prefetch((0, 0, 1.0))


@pytest.mark.failure("23")
@pytest.mark.parametrize("landed", [False, True], ids=["on-its-way", "landed-late"])
def test_a_stalled_copy_is_not_complete_before_it_says_so(backend: Backend, landed: bool) -> None:
    world = backend.simple(1, 3000, 1, faults={"stall_at": 1, "stall_landed": landed})
    (job,) = world.prefetch((0, 0, 1.0))
    held_back(world, 1)
    if landed:
        until(lambda: world.holds(0, 0))
    elif backend.kind not in ("mock-cuda", "cuda"):  # a device copies when it likes; nobody was notified
        assert (world.regions[0][0] == POISON).all()
    with pytest.raises(TransferError, match=r"not complete after 0\.01 s: source 0 \(slot 0, generation 1\)"):
        world.wait_all([job], 0.01)
    assert world.complete[0] == 0
    world.options["link"].release()
    world.wait_all([job])
    assert world.holds(0, 0)


def close_under_a_waiter(world: World, jobs: list[tuple[int, int]]) -> None:
    caught: list[BaseException] = []

    def work() -> None:
        try:
            world.wait_all(jobs)
        except ClosedError as error:
            caught.append(error)

    waiter = threading.Thread(target=work)
    waiter.start()
    until(lambda: "callers wait" in world.engine.describe())
    world.engine.close()
    waiter.join(WAIT)
    assert len(caught) == 1


def test_closing_frees_what_is_stalled(backend: Backend) -> None:
    world = backend.simple(4, 3000, 4, faults={"stall_at": 1}, chunk_bytes=1000)
    jobs = world.prefetch(*((source, source, 1.0) for source in range(4)))
    held_back(world, 1)
    close_under_a_waiter(world, jobs)
    assert not world.complete.any()


# ---- pause


def test_nothing_starts_while_paused_and_all_goes_on_after(backend: Backend) -> None:
    world = backend.simple(6, 3000, 6, faults={"stall_at": 1}, chunk_bytes=1000, window_bytes=2000)
    link = world.options["link"]
    first = world.prefetch((0, 0, 1.0))
    held_back(world, 2 if backend.asynchronous else 1)
    with pytest.raises(TransferError, match="paused"):
        world.engine.pause(0.01)  # a chunk moves: this pause did not come about
    pausing = threading.Thread(target=world.engine.pause, args=(WAIT,))
    pausing.start()
    until(lambda: "paused" in world.engine.describe())
    started = link.chunks
    link.release()
    pausing.join(WAIT)
    assert not pausing.is_alive()
    assert link.chunks == started

    more = world.fetch((1, 1), (2, 2))
    (dropped,) = world.prefetch((3, 3, 1.0))
    world.drop(dropped)
    world.raise_(0, first[0])
    with pytest.raises(TransferError, match="paused"):
        world.wait_all(more, 0.02)
    with pytest.raises(TransferError, match="paused"):
        world.engine.drain(0.01)
    world.engine.pause(0.0)  # pauses add up
    world.engine.resume()
    assert link.chunks == started
    assert (world.regions[0][1:] == POISON).all()
    world.engine.resume()
    world.wait_all(first + more)
    assert all(world.holds(slot, slot) for slot in range(3))
    assert settle(world)["joined"] == 1
    with pytest.raises(TransferError, match="without a pause"):
        world.engine.resume()


def test_closing_works_while_paused(backend: Backend) -> None:
    world = backend.simple(2, 3000, 2)
    world.engine.pause(WAIT)
    jobs = world.fetch((0, 0), (1, 1))
    close_under_a_waiter(world, jobs)
    with pytest.raises(ClosedError):
        world.engine.resume()


def test_a_waiter_asleep_through_a_pause_is_served_after_it(backend: Backend) -> None:
    world = backend.simple(2, 3000, 2)
    world.engine.pause(WAIT)
    jobs = world.fetch((0, 0), (1, 1))
    waiter = threading.Thread(target=world.wait_all, args=(jobs,))
    waiter.start()
    until(lambda: "callers wait" in world.engine.describe())
    world.engine.resume()
    waiter.join(WAIT)
    assert not waiter.is_alive()
    assert world.holds(0, 0)


# ---- readers, threads


@pytest.mark.failure("6")
def test_a_slots_next_copy_never_touches_what_a_slow_reader_reads(backend: Backend) -> None:
    """The reader takes its time; its slot gets the next occupant when it is done, all others at once, with copies dropped."""
    nbytes, slots, sources = 40_000, 4, 6
    world = backend.simple(sources, nbytes, slots, chunk_bytes=4096, window_bytes=3 * 4096)
    rng = np.random.default_rng(0)
    for _ in range(60):
        slot, source = int(rng.integers(slots)), int(rng.integers(sources))
        (wrong,) = world.prefetch((int(rng.integers(sources)), slot, 1.0))
        if rng.random() < 0.5:
            world.drop(wrong)
        (job,) = world.fetch((source, slot))
        world.wait_all([job])
        for part in range(4):
            others = [other for other in range(slots) if other != slot]
            ahead = world.prefetch(*((int(rng.integers(sources)), other, float(rng.random())) for other in others))
            if rng.random() < 0.5:
                world.drop(*ahead[:2])
            time.sleep(0.0002)
            here = slice(part * nbytes // 4, (part + 1) * nbytes // 4)
            assert world.regions[0][slot, here].tobytes() == world.parts[source][0][2][here]
        assert world.complete[slot] == job[1]


@pytest.mark.failure("31")
def test_a_hundred_thousand_operations_of_two_threads_with_poisoned_free_slots(backend: Backend) -> None:
    """Prefetches, raises, drops, demands and waits, each thread in slots of its own.

    A slot is poisoned when its expert is evicted. Poison that has changed by the time the slot is given away again, or bytes
    that are not the expert's when it is complete, are what a late chunk of an earlier occupant would leave.
    """
    sources, each, nbytes, wanted = 16, 8, 600, 50_000
    world = backend.simple(sources, nbytes, 2 * each, chunk_bytes=256, window_bytes=512)
    buffer, errors, counts = world.regions[0], [], [0, 0]
    expected = np.stack([np.frombuffer(parts[0][2], np.uint8) for parts in world.parts])

    def work(number: int) -> None:
        rng = np.random.default_rng(number)
        mine = np.arange(number * each, (number + 1) * each, dtype=np.int32)
        whose = slice(number * each, (number + 1) * each)
        generation = np.zeros(each, np.int32)
        priority = np.zeros(each, np.float32)

        def rows(source: np.ndarray) -> np.ndarray:
            return np.stack([source, mine, generation], axis=1).astype(np.int32)

        while counts[number] < wanted:
            assert (buffer[whose] == POISON).all(), "bytes came into a free slot"
            generation += 1
            guess = rng.integers(sources, size=each)
            world.engine.submit(prefetch=rows(guess), priority=priority)
            # Half of the guesses are right and joined, the others dropped or displaced by the slot's next occupant.
            source = np.where(rng.random(each) < 0.5, guess, rng.integers(sources, size=each))
            wrong = source != guess
            dropped = np.stack([mine, generation], axis=1)[wrong & (rng.random(each) < 0.5)]
            generation[wrong] += 1
            world.engine.submit(fetch=rows(source), drop=np.ascontiguousarray(dropped))
            world.engine.wait_all(mine, generation, WAIT)
            assert (buffer[whose] == expected[source]).all(), "not the expert's bytes"
            assert (world.complete[whose] == generation).all()
            if backend.kind == "cuda":
                for slot in mine:
                    buffer[int(slot)] = POISON
            else:
                buffer[whose] = POISON
            counts[number] += 3 * each + len(dropped)

    def guarded(number: int) -> None:
        try:
            work(number)
        except BaseException as error:
            errors.append(error)

    workers = [threading.Thread(target=guarded, args=(number,)) for number in range(2)]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join()
    assert errors == []
    counters = settle(world)
    assert min(counts) >= wanted
    assert counters["joined"] > 0
    assert counters["prefetch_dropped"] + counters["prefetch_cancelled"] > 0
    assert counters["failed"] == 0


@pytest.mark.failure("29")
def test_python_goes_on_while_a_call_waits(backend: Backend) -> None:
    """A thread that ticks every millisecond ends the wait after fifty ticks; with the GIL held they would never come."""
    world = backend.simple(1, 1000, 1, faults={"stall_at": 1}, chunk_bytes=1000)
    jobs = world.fetch((0, 0))
    held_back(world, 1)
    ticks = []

    def tick() -> None:
        held_back(world, 1)
        for _ in range(50):
            time.sleep(0.001)
            ticks.append(int(world.complete[0]))
        world.options["link"].release()

    ticker = threading.Thread(target=tick)
    ticker.start()
    world.wait_all(jobs)
    ticker.join()
    assert ticks == [0] * 50
    assert world.holds(0, 0)
    assert settle(world)["helped"] == 0  # a link that may stand still is left to the I/O threads


def test_several_engines_at_once(backend: Backend) -> None:
    worlds = [backend.simple(4, 5000 + i, 4, chunk_bytes=1000, threads=1 + i % 2) for i in range(3)]
    jobs = [world.fetch((0, 3), (1, 2), (2, 1), (3, 0)) for world in worlds]
    for world, mine in zip(worlds, jobs, strict=True):
        world.wait_all(mine)
        assert all(world.holds(3 - source, source) for source in range(4))
    worlds[0].engine.close()
    for world in worlds[1:]:
        world.wait_all(world.fetch((3, 3)))
        assert world.holds(3, 3)


def test_the_links_rate_is_measured(backend: Backend) -> None:
    world: World = backend.simple(4, 1 << 20, 4)
    assert world.engine.link_rate == 0.0
    world.wait_all(world.fetch(*((source, source) for source in range(4))))
    rate = world.engine.link_rate
    assert 0.0 < rate < 1e13
    world.engine.reset_counters()
    world.engine.close()
    assert world.engine.link_rate == rate
