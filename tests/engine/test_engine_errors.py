"""What goes wrong on the way, and what is refused before anything is queued."""

from __future__ import annotations

import errno
import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from harness import WAIT, settle, simple

from moecache._engine import FaultyLink, FileLink, HostLink, ThrottledLink
from moecache.errors import CheckpointError, RoutingError, TransferError

pytestmark = pytest.mark.timeout(60)


@pytest.mark.failure("J39", "128")
def test_a_file_too_short_names_itself_and_the_place(tmp_path: Path) -> None:
    for link in (FileLink(), FileLink(direct=False)):
        world = simple(2, 50_000, 2, folder=tmp_path)
        world.engine.close()
        os.truncate(world.paths[0], 70_000)
        world.options = {"link": link}
        with world.make() as world.engine:
            whole, cut = world.fetch((0, 0), (1, 1))
            said = "copy of source 1 .*the file has 70000 bytes, and those from 70000 on were expected too"
            with pytest.raises(TransferError, match=said) as caught:
                world.wait_all([whole, cut])
            world.wait_all([whole])  # the other may have failed while this one was under way
            assert world.holds(0, 0)
            assert (caught.value.position, caught.value.source) == (1, 1)
            assert isinstance(caught.value.__cause__, OSError)
            assert caught.value.filename == caught.value.__cause__.filename == str(world.paths[0])
            assert world.complete[1] == -1


@pytest.mark.failure("B8", "128")
def test_a_file_cut_short_under_the_engine_has_changed(tmp_path: Path) -> None:
    for link in (FileLink(), FileLink(direct=False)):
        world = simple(2, 50_000, 2, folder=tmp_path, link=link)
        size = world.paths[0].stat().st_size
        os.truncate(world.paths[0], 70_000)
        with world.engine:
            for source in (0, 1):
                with pytest.raises(TransferError, match=f"it had {size} bytes, and has 70000") as caught:
                    world.wait_all(world.fetch((source, 0)))
                assert isinstance(caught.value.__cause__, CheckpointError)
                assert caught.value.filename == str(world.paths[0])


def test_a_missing_file_is_an_error_when_the_engine_is_made(tmp_path: Path) -> None:
    world = simple(1, 10, 1, folder=tmp_path)
    world.engine.close()
    world.paths[0].unlink()
    with pytest.raises(TransferError, match="shard0") as caught:
        world.make()
    assert caught.value.errno == errno.ENOENT


@pytest.mark.parametrize("number", [1, 2, 5])
@pytest.mark.parametrize("throttled", [False, True])
def test_an_error_at_any_chunk_reaches_the_waiter_and_the_next_call_works(number: int, throttled: bool) -> None:
    inner = ThrottledLink(HostLink(), 1e9) if throttled else HostLink()
    world = simple(2, 5000, 2, link=FaultyLink(inner, fail_at=number, error=errno.EIO), chunk_bytes=1000)
    with world.engine:
        (job,) = world.fetch((0, 0))
        with pytest.raises(TransferError) as caught:
            world.wait_any([job])
        assert caught.value.errno == errno.EIO
        assert caught.value.__cause__.errno == errno.EIO
        assert world.complete[0] == -1
        world.raise_(0, job)
        world.wait_all([job])
        assert world.holds(0, 0)
        world.wait_all(world.fetch((1, 0)))
        assert world.holds(0, 1)
        assert settle(world)["failed"] == 1


def test_a_link_can_fail_again_every_so_many_chunks() -> None:
    world = simple(12, 100, 12, link=FaultyLink(HostLink(), fail_at=2, fail_every=5))
    with world.engine:
        for number in range(12):
            (job,) = world.fetch((number, number))
            try:
                world.wait_all([job])
            except TransferError:
                assert number in (1, 6, 11)
        assert settle(world)["failed"] == 3


def test_a_failed_prefetch_is_only_counted() -> None:
    world = simple(2, 100, 2, link=FaultyLink(HostLink(), fail_at=1))
    with world.engine:
        (job,) = world.prefetch((0, 0, 1.0))
        assert settle(world)["failed"] == 1
        assert world.complete[0] == -1
        world.raise_(0, job)
        world.wait_all([job])
        assert world.holds(0, 0)


def test_a_complete_job_is_returned_before_a_failed_one() -> None:
    world = simple(2, 100, 2, link=FaultyLink(HostLink(), fail_at=1))
    with world.engine:
        jobs = world.fetch((0, 0))
        world.engine.drain(WAIT)
        jobs += world.fetch((1, 1))
        world.engine.drain(WAIT)
        assert world.wait_any(jobs) == 1
        with pytest.raises(TransferError) as caught:
            world.wait_all(jobs)
        assert caught.value.position == 0


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"fetch": [[3, 0, 1]]}, "source 3"),
        ({"fetch": [[-1, 0, 1]]}, "source -1"),
        ({"fetch": [[0, 2, 1]]}, "slot 2"),
        ({"fetch": [[0, 0, 0]]}, "generation 0"),
        ({"fetch": [[0, 0]]}, "rows of 3"),
        ({"fetch": [[0, 0, 1], [0, -1, 1]]}, "slot -1 of row 1"),
        ({"prefetch": [[0, 9, 1]]}, "slot 9"),
        ({"prefetch": [[0, 1, 1]]}, "priorities"),
        ({"drop": [[2, 1]]}, "slot 2"),
    ],
)
def test_unknown_numbers_are_refused_before_anything_is_queued(arguments: dict[str, Any], message: str) -> None:
    world = simple(3, 100, 2)
    with world.engine:
        good = np.array([[1, 1, 1]], np.int32)
        rows = {name: np.array(value, np.int32) for name, value in arguments.items()}
        if "prefetch" in rows and "priorities" not in message:
            rows["priority"] = np.ones(1, np.float32)
        with pytest.raises(RoutingError, match=message):
            world.engine.submit(**{"fetch": good, **rows})
        counters = settle(world)
        assert counters["jobs_demand"] == 0
        assert world.complete.tolist() == [0, 0]


def test_arrays_that_do_not_fit_are_refused() -> None:
    world = simple(2, 100, 2)
    with world.engine:
        with pytest.raises(RoutingError):
            world.engine.wait_any(np.zeros(2, np.int32), np.ones(1, np.int32), 0.1)
        with pytest.raises(RoutingError):
            world.wait_any([])
        with pytest.raises(RoutingError, match="slot 7"):
            world.wait_all([(7, 1)])
        world.wait_all([])
    world.sources.segment_region[0] = 1
    with pytest.raises(ValueError, match="region"):
        world.make()
    world.sources.segment_region[0] = 0
    world.sources.segment_nbytes[0] = -1
    with pytest.raises(ValueError, match="negative"):
        world.make()
    with pytest.raises(ValueError, match="threads"):
        simple(1, 1, 1, threads=0)


def test_a_link_that_cannot_read_files_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="cannot read files"):
        simple(1, 10, 1, folder=tmp_path, link=HostLink())


def test_an_asynchronous_link_serves_one_engine_at_a_time() -> None:
    link = ThrottledLink(HostLink(), 1e9)
    world = simple(1, 10, 1, link=link)
    with pytest.raises(ValueError, match="another engine"):
        simple(1, 10, 1, link=link)
    world.engine.close()
    simple(1, 10, 1, link=link).engine.close()
