"""Callers that wait, help, run out of time, pause."""

from __future__ import annotations

import errno
import threading
from pathlib import Path

import numpy as np
import pytest
from harness import World, equal_parts, held_back, settle, simple

from moecache._engine import FaultyLink, FileLink, HostLink, ThrottledLink
from moecache.errors import ClosedError, RoutingError, TransferError

pytestmark = pytest.mark.timeout(60)


def test_a_waiting_caller_copies_what_is_still_queued() -> None:
    world = simple(6, 4 << 20, 6, link=HostLink(), chunk_bytes=1 << 16)
    with world.engine:
        world.wait_all(world.fetch(*((slot, slot) for slot in range(6))))
        assert all(world.holds(slot, slot) for slot in range(6))
        counters = settle(world)
        assert counters["helped"] > 0
        assert counters["jobs_demand"] == 6
        assert counters["stall_ns"] > 0
        assert counters["busy_ns"] > 0
        world.engine.reset_counters()
        assert not any(world.engine.counters().values())


def test_a_waiting_caller_and_the_thread_share_the_chunks_of_one_job() -> None:
    link = FaultyLink(HostLink())
    world = simple(2, 20_000_000, 2, link=link, chunk_bytes=1000)
    with world.engine:
        (job,) = world.fetch((1, 1))
        held_back(world, 2)  # the thread has begun
        world.wait_all([job])
        assert world.holds(1, 1)
        counters = settle(world)
    assert 0 < counters["helped"] < link.chunks
    assert counters["bytes_demand"] == 20_000_000


@pytest.mark.failure("G28")
def test_a_read_that_hangs_does_not_hold_the_caller(tmp_path: Path) -> None:
    link = FaultyLink(FileLink(), stall_at=1)
    world = simple(2, 40 * 4096, 2, folder=tmp_path, link=link, chunk_bytes=4096)
    with world.engine:
        (job,) = world.fetch((1, 1))
        with pytest.raises(TransferError, match=r"not complete after 0\.05 s"):
            world.wait_all([job], 0.05)
        link.release()
        world.wait_all([job])
        assert world.holds(1, 1)
        assert settle(world)["helped"] == 0


@pytest.mark.failure("G28")
def test_reads_of_files_are_left_to_the_threads(tmp_path: Path) -> None:
    world = simple(2, 40 * 4096, 2, folder=tmp_path, link=FileLink(), chunk_bytes=4096)
    with world.engine:
        world.wait_all(world.fetch((1, 1)))
        assert world.holds(1, 1)
        assert settle(world)["helped"] == 0


def test_a_failed_chunk_ends_a_job_that_several_threads_copy() -> None:
    link = FaultyLink(HostLink(), delay_s=0.002, fail_at=12)
    world = simple(2, 40_000, 2, link=link, chunk_bytes=1000, threads=3)
    with world.engine:
        with pytest.raises(TransferError) as caught:
            world.wait_all(world.fetch((0, 0)))
        assert caught.value.errno == errno.EIO
        world.wait_all(world.fetch((1, 0)))
        assert world.holds(0, 1)
        assert settle(world)["failed"] == 1


def test_a_wait_that_takes_too_long_shows_the_queue() -> None:
    link = FaultyLink(HostLink(), stall_at=2)
    world = simple(8, 1000, 8, link=link, chunk_bytes=600, threads=2)
    first = world.fetch((7, 0))
    held_back(world, 2)
    asked = world.fetch((1, 1))
    ahead = world.prefetch((2, 2, 0.25), (3, 3, 0.75), (4, 4, 0.5))
    held_back(world, 3)
    world.drop(ahead[2])
    world.drop((0, 1))
    again = world.fetch((6, 0))
    with pytest.raises(TransferError) as caught:
        world.wait_all(ahead[:1], 0.02)
    lines = str(caught.value).splitlines()
    assert lines[0].startswith("not complete after 0.02 s: source 2 (slot 2, generation 1), queued.")
    assert lines[1].startswith("1 demand and 2 prefetch jobs queued, 1 blocked; 2 chunks moving; 2 of 2 I/O threads")
    assert lines[2:6] == [
        "demand, queued: slot 1, generation 1, source 1, 0 of 1000 bytes there, 1 chunks moving",
        "prefetch, queued: slot 3, generation 1, source 3, 0 of 1000 bytes there, priority 0.75",
        "prefetch, queued: slot 2, generation 1, source 2, 0 of 1000 bytes there, priority 0.25",
        "demand, blocked: slot 0, generation 2, source 6, 0 of 1000 bytes there, "
        "held by 1 chunks of earlier jobs that still move into the slot",
    ]
    moving = sorted(line.split(" for ")[0] for line in lines[6:])
    assert moving[0] in {
        f"an I/O thread has been copying {n} bytes into slot 0" for n in (400, 600)
    }  # as chance has it
    assert moving[1:] == ["an I/O thread has been copying 600 bytes into slot 1"]
    with pytest.raises(TransferError, match=r"not complete after 0 s\. [^:]*\n1 demand"):
        world.engine.drain(0.0)
    link.release()
    world.wait_all(asked + again + ahead[:2])
    assert world.holds(0, 6)
    assert first == [(0, 1)]
    world.engine.close()
    with pytest.raises(ClosedError):
        world.engine.describe()


def test_the_report_of_a_long_queue_is_cut_short() -> None:
    world = simple(200, 10, 200, link=FaultyLink(HostLink(), stall_at=1))
    with world.engine:
        world.prefetch(*((source, source, 1.0) for source in range(200)))
        held_back(world, 1)
        lines = world.engine.describe().splitlines()
        assert len(lines) < 50
        assert "and 160 more jobs" in lines


def test_the_report_says_what_is_on_an_asynchronous_link() -> None:
    world = simple(2, 1000, 2, link=FaultyLink(ThrottledLink(HostLink(), 1e9), stall_at=1), chunk_bytes=600)
    with world.engine:
        wrong, _ = world.prefetch((0, 0, 1.0), (1, 1, 0.0))
        held_back(world, 4)
        world.drop(wrong)
        lines = world.engine.describe().splitlines()
    assert lines[-4:] == [
        "on the link: 600 bytes for slot 0, no longer wanted",
        "on the link: 400 bytes for slot 0, no longer wanted",
        "on the link: 600 bytes for slot 1",
        "on the link: 400 bytes for slot 1",
    ]


def test_a_timeout_that_is_not_a_number_is_refused() -> None:
    world = simple(1, 1000, 1, link=FaultyLink(HostLink(), stall_at=1))
    with world.engine:
        jobs = world.prefetch((0, 0, 1.0))
        nan = float("nan")
        for call in (
            lambda: world.wait_all(jobs, nan),
            lambda: world.wait_any(jobs, nan),
            lambda: world.engine.drain(nan),
            lambda: world.engine.pause(nan),
        ):
            with pytest.raises(RoutingError, match="not a number"):
                call()
        assert "paused" not in world.engine.describe()
        world.options["link"].release()
        world.wait_all(jobs, float("inf"))


@pytest.mark.parametrize("kind", ["host", "throttled"])
def test_many_threads_wait_at_once(kind: str) -> None:
    link = HostLink() if kind == "host" else ThrottledLink(HostLink(), 1e9)
    threads, slots = 4, 16
    world = simple(32, 3000, slots, link=link, threads=2, chunk_bytes=1000)
    errors: list[BaseException] = []

    def work(number: int) -> None:
        rng = np.random.default_rng(number)
        mine = range(number, slots, threads)
        try:
            for _ in range(150):
                pairs = [(int(rng.integers(32)), slot) for slot in mine]
                world.prefetch(*((int(rng.integers(32)), slot, 1.0) for slot in mine))
                jobs = world.fetch(*pairs)
                while jobs:
                    position = world.wait_any(jobs)
                    slot, _ = jobs.pop(position)
                    assert world.holds(*next((s, source) for source, s in pairs if s == slot))
        except BaseException as error:
            errors.append(error)

    workers = [threading.Thread(target=work, args=(number,)) for number in range(threads)]
    with world.engine:
        for worker in workers:
            worker.start()
        for worker in workers:
            worker.join()
        counters = settle(world)
    assert not errors
    assert counters["jobs_demand"] == threads * 150 * (slots // threads)


def test_several_threads_may_wait_for_the_same_copy() -> None:
    world = simple(1, 4000, 1, link=ThrottledLink(HostLink(), 1e5))
    with world.engine:
        jobs = world.fetch((0, 0))
        seen: list[bool] = []

        def work() -> None:
            world.wait_all(jobs)
            seen.append(world.holds(0, 0))

        workers = [threading.Thread(target=work) for _ in range(4)]
        for worker in workers:
            worker.start()
        for worker in workers:
            worker.join()
    assert seen == [True] * 4


def test_two_engines_are_independent(tmp_path: Path) -> None:
    one = simple(4, 6000, 4, folder=tmp_path)
    other = World(equal_parts(4, 6000, seed=9), [6000], 4)
    with one.engine, other.engine:
        jobs = one.fetch((0, 0), (1, 1)), other.fetch((2, 0), (3, 1))
        one.wait_all(jobs[0])
        other.wait_all(jobs[1])
        assert one.holds(0, 0)
        assert other.holds(0, 2)
        one.engine.close()
        other.wait_all(other.fetch((1, 2)))
        assert other.holds(2, 1)
