"""Which job goes first, which is dropped, which is joined: at chunk boundaries, and never two copies of one expert."""

from __future__ import annotations

import numpy as np
import pytest
from harness import WAIT, held_back, order_of_completion, settle, simple, until

from moecache._engine import FaultyLink, HostLink, ThrottledLink
from moecache.errors import TransferError

pytestmark = pytest.mark.timeout(60)


def test_demand_goes_before_prefetch_and_prefetches_go_by_priority() -> None:
    world = simple(8, 1000, 8, link=FaultyLink(ThrottledLink(HostLink(), 1e5)), window_bytes=1)
    with world.engine:
        first = world.prefetch((0, 0, 0.0))
        held_back(world, 1)
        later = world.prefetch((1, 1, 0.1), (2, 2, 0.9), (3, 3, 0.5), (4, 4, 0.9))
        demand = world.fetch((5, 5), (6, 6))
        assert order_of_completion(world, first + later + demand) == [0, 5, 6, 2, 4, 3, 1]


def test_demand_behind_a_full_prefetch_queue_waits_for_the_window_only() -> None:
    chunk, window = 1000, 3000
    link = FaultyLink(ThrottledLink(HostLink(), 2e5))
    world = simple(20, 10 * chunk, 20, link=link, chunk_bytes=chunk, window_bytes=window)
    with world.engine:
        world.prefetch(*((source, source, 1.0) for source in range(19)))
        held_back(world, 5)
        before = link.chunks
        job = world.fetch((19, 19))
        # Nothing of the wrong prefetches starts between the submission and the demand's own ten chunks.
        between = world.engine.counters()
        world.wait_all(job)
        after = world.engine.counters()
        assert world.holds(19, 19)
        assert after["bytes_demand"] == 10 * chunk
        # What was outstanding at the submission still lands before it; one chunk more may start while we look.
        assert after["bytes_prefetch"] - between["bytes_prefetch"] <= window + chunk
        assert link.chunks - before <= 10 + 1 + window // chunk
        world.drop(*((slot, 1) for slot in range(19)))


@pytest.mark.parametrize("throttled", [False, True])
def test_demand_overtakes_a_prefetch_at_a_chunk_boundary_and_the_rest_follows(throttled: bool) -> None:
    inner = ThrottledLink(HostLink(), 1e6) if throttled else HostLink()
    link = FaultyLink(inner, delay_s=0.002)
    world = simple(2, 50_000, 2, link=link, chunk_bytes=1000, window_bytes=1000)
    with world.engine:
        prefetch = world.prefetch((0, 0, 1.0))
        held_back(world, 3)
        demand = world.fetch((1, 1))
        until(lambda: world.complete[1])  # not a wait of the engine's: that one helps
        assert world.complete[0] == 0
        world.wait_all(prefetch + demand)
        assert world.holds(0, 0)
        assert world.holds(1, 1)
        assert link.chunks == 100  # nothing was copied twice
        assert settle(world)["joined"] == 0


@pytest.mark.parametrize("throttled", [False, True])
def test_demand_joins_a_prefetch_in_flight(throttled: bool) -> None:
    inner = ThrottledLink(HostLink(), 1e6) if throttled else HostLink()
    link = FaultyLink(inner, delay_s=0.002)
    world = simple(1, 20_000, 1, link=link, chunk_bytes=1000)
    with world.engine:
        (job,) = world.prefetch((0, 0, 1.0))
        held_back(world, 3)
        world.raise_(0, job)
        world.raise_(0, job)
        world.wait_all([job])
        world.raise_(0, job)
        counters = settle(world)
    assert world.holds(0, 0)
    assert link.chunks == 20
    assert (counters["joined"], counters["jobs_demand"], counters["jobs_prefetch"]) == (1, 1, 0)
    assert counters["bytes_demand"] + counters["bytes_prefetch"] == 20_000


def test_a_queued_prefetch_that_is_raised_leaves_the_prefetch_queue() -> None:
    world = simple(5, 1000, 5, link=FaultyLink(ThrottledLink(HostLink(), 1e5)), window_bytes=1)
    with world.engine:
        jobs = world.prefetch(*((source, source, -float(source)) for source in range(5)))
        held_back(world, 1)
        world.raise_(4, jobs[4])
        assert order_of_completion(world, jobs) == [0, 4, 1, 2, 3]
        assert settle(world)["joined"] == 1


def test_a_prefetch_asked_for_again_takes_the_new_priority() -> None:
    world = simple(4, 1000, 4, link=FaultyLink(ThrottledLink(HostLink(), 1e5)), window_bytes=1)
    with world.engine:
        jobs = world.prefetch((0, 0, 9.0), (1, 1, 3.0), (2, 2, 2.0), (3, 3, 1.0))
        held_back(world, 1)
        rows = np.array([[3, *jobs[3]], [1, *jobs[1]]], np.int32)
        world.engine.submit(prefetch=rows, priority=np.array([8.0, 0.5], np.float32))
        assert order_of_completion(world, jobs) == [0, 3, 2, 1]


@pytest.mark.parametrize("throttled", [False, True])
def test_a_prefetch_dropped_in_flight_never_mixes_with_the_slots_next_occupant(throttled: bool) -> None:
    inner = ThrottledLink(HostLink(), 3e6, 0.003) if throttled else HostLink()
    link = FaultyLink(inner, delay_s=0.001)
    world = simple(3, 20_000, 2, link=link, chunk_bytes=1000, window_bytes=4000)
    with world.engine:
        for turn in range(6):
            seen = link.chunks
            (job,) = world.prefetch((turn % 2, 0, 1.0))
            held_back(world, seen + 3)
            if turn % 3 == 0:
                world.drop(job)
            assert world.complete[0] != job[1]
            world.wait_all(world.fetch((2, 0)))
            assert world.holds(0, 2)
            with pytest.raises(TransferError, match="dropped"):
                world.wait_any([job])
        counters = settle(world)
        assert world.holds(0, 2)
    assert counters["prefetch_cancelled"] == 6
    assert counters["jobs_demand"] == 6
    assert counters["jobs_prefetch"] == 0


def test_a_queued_prefetch_is_dropped_without_moving_a_byte() -> None:
    link = FaultyLink(ThrottledLink(HostLink(), 1e6))
    world = simple(3, 10_000, 3, link=link, window_bytes=1)
    with world.engine:
        jobs = world.prefetch((0, 0, 2.0), (1, 1, 1.0), (2, 2, 0.0))
        held_back(world, 1)
        world.drop(jobs[1])
        counters = settle(world)
        assert link.chunks == 2
        assert (counters["prefetch_dropped"], counters["prefetch_cancelled"]) == (1, 0)
        assert world.complete.tolist() == [1, 0, 1]
        assert (world.regions[0][1] == 0xEE).all()


def test_generations_that_came_late_are_ignored() -> None:
    world = simple(3, 1000, 1)
    with world.engine:
        world.engine.submit(fetch=np.array([[0, 0, 5]], np.int32))
        world.wait_all([(0, 5)])
        world.engine.submit(fetch=np.array([[1, 0, 4]], np.int32), drop=np.array([[0, 3]], np.int32))
        world.engine.drain(WAIT)
        assert world.holds(0, 0)
        # A drop can overtake the submission of the prefetch it is about.
        world.engine.submit(drop=np.array([[0, 7]], np.int32))
        world.engine.submit(prefetch=np.array([[1, 0, 7]], np.int32), priority=np.ones(1, np.float32))
        world.engine.submit(fetch=np.array([[2, 0, 6]], np.int32))
        counters = settle(world)
        assert world.holds(0, 0)
        assert counters["bytes_demand"] == 1000
        world.engine.submit(fetch=np.array([[1, 0, 7]], np.int32))
        world.wait_all([(0, 7)])
        assert world.holds(0, 1)
