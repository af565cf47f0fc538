"""The engine through its public face: real files, real threads, bytes against plain references."""

from __future__ import annotations

import contextlib
import errno
import gc
import os
import subprocess
import sys
import tempfile
import threading
import time
import weakref
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule
from numpy.typing import NDArray

import moecache._engine
from moecache._engine import Engine, FaultyLink, FileLink, HostLink, Sources, ThrottledLink
from moecache.errors import ClosedError, RoutingError, TransferError

pytestmark = pytest.mark.timeout(60)

WAIT = 20.0  # seconds nothing here should ever take
Part = tuple[int, int, bytes]  # region, offset in the slot's room, bytes


@dataclass
class Bench:
    """A little world: sources with known bytes, regions to copy into, an engine between them."""

    parts: list[list[Part]]
    strides: list[int]
    slots: int
    folder: Path | None = None
    files: int = 1
    gap: int = 0  # bytes between neighbouring segments in a file
    lead: int = 13  # bytes before the first segment in a file: nothing is aligned
    options: dict[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.rooms = [np.full((self.slots, stride), 0xEE, np.uint8) for stride in self.strides]
        self.complete = np.zeros(self.slots, np.int32)
        self.generation = np.zeros(self.slots, np.int32)
        self.paths: list[Path] = []
        self.sources = self._sources()
        self.engine = self.make()

    def make(self) -> Engine:
        address = np.array([room.ctypes.data for room in self.rooms], np.uint64)
        owner = (self.rooms, self.memory)
        stride = np.array(self.strides, np.int64)
        return Engine(self.sources, address, stride, self.complete, owner=owner, **self.options)

    def _sources(self) -> Sources:
        flat = [(number, part) for number, parts in enumerate(self.parts) for part in parts]
        start = np.zeros(len(self.parts) + 1, np.int64)
        for number, _ in flat:
            start[number + 1 :] += 1
        self.memory = [np.frombuffer(data, np.uint8) for _, (_, _, data) in flat]
        if self.folder is None:
            where = [(-1, array.ctypes.data) for array in self.memory]
        else:
            blobs = [bytearray(b"\xaa" * self.lead) for _ in range(self.files)]
            where = []
            for index, (_, (_, _, data)) in enumerate(flat):
                blob = blobs[index % self.files]
                where.append((index % self.files, len(blob)))
                blob += data + b"\xbb" * self.gap
            for number, blob in enumerate(blobs):
                self.paths.append(self.folder / f"shard{number}")
                self.paths[-1].write_bytes(blob)
        return Sources(
            segment_start=start,
            segment_file=np.array([file for file, _ in where], np.int32),
            segment_source=np.array([source for _, source in where], np.uint64),
            segment_nbytes=np.array([len(data) for _, (_, _, data) in flat], np.int64),
            segment_region=np.array([region for _, (region, _, _) in flat], np.int32),
            segment_offset=np.array([offset for _, (_, offset, _) in flat], np.int64),
            files=tuple(str(path) for path in self.paths),
        )

    def give(self, slot: int) -> int:
        self.generation[slot] += 1
        return int(self.generation[slot])

    def fetch(self, *pairs: tuple[int, int]) -> list[tuple[int, int]]:
        """Submit demand jobs (source, slot) as new tenancies; (slot, generation) of each."""
        rows = [(source, slot, self.give(slot)) for source, slot in pairs]
        self.engine.submit(fetch=np.array(rows, np.int32).reshape(-1, 3))
        return [(slot, generation) for _, slot, generation in rows]

    def prefetch(self, *rows: tuple[int, int, float]) -> list[tuple[int, int]]:
        made = [(source, slot, self.give(slot)) for source, slot, _ in rows]
        priority = np.array([row[2] for row in rows], np.float32)
        self.engine.submit(prefetch=np.array(made, np.int32), priority=priority)
        return [(slot, generation) for _, slot, generation in made]

    def raise_(self, source: int, tenancy: tuple[int, int]) -> None:
        self.engine.submit(fetch=np.array([[source, *tenancy]], np.int32))

    def drop(self, *tenancies: tuple[int, int]) -> None:
        self.engine.submit(drop=np.array(tenancies, np.int32))

    def wait_all(self, tenancies: Sequence[tuple[int, int]], timeout: float = WAIT) -> None:
        self.engine.wait_all(*columns(tenancies), timeout)

    def wait_any(self, tenancies: Sequence[tuple[int, int]], timeout: float = WAIT) -> int:
        return self.engine.wait_any(*columns(tenancies), timeout)

    def holds(self, slot: int, source: int) -> bool:
        return all(
            self.rooms[region][slot, offset : offset + len(data)].tobytes() == data
            for region, offset, data in self.parts[source]
        )

    def untouched_between(self, slot: int, source: int) -> bool:
        """Bytes of the slot's rooms that no segment covers are still what they were."""
        for region, room in enumerate(self.rooms):
            mine = np.ones(room.shape[1], bool)
            for to, offset, data in self.parts[source]:
                if to == region:
                    mine[offset : offset + len(data)] = False
            if not (room[slot, mine] == 0xEE).all():
                return False
        return True


def columns(tenancies: Sequence[tuple[int, int]]) -> tuple[NDArray[np.int32], NDArray[np.int32]]:
    table = np.array(tenancies, np.int32).reshape(-1, 2)
    return np.ascontiguousarray(table[:, 0]), np.ascontiguousarray(table[:, 1])


def equal_parts(sources: int, nbytes: int, seed: int = 0) -> list[list[Part]]:
    rng = np.random.default_rng(seed)
    return [[(0, 0, rng.bytes(nbytes))] for _ in range(sources)]


def simple(sources: int, nbytes: int, slots: int, **options: Any) -> Bench:
    folder = options.pop("folder", None)
    return Bench(equal_parts(sources, nbytes), [nbytes], slots, folder, options=options)


def settle(bench: Bench) -> dict[str, int]:
    bench.engine.drain(WAIT)
    return bench.engine.counters()


# ---- bytes


@pytest.mark.parametrize("place", ["memory", "file", "file-buffered", "file-refused", "short", "short-buffered"])
@pytest.mark.parametrize("chunk_bytes", [1000, 1 << 20])
def test_every_size_alignment_and_region_arrives_byte_for_byte(tmp_path: Path, place: str, chunk_bytes: int) -> None:
    rng = np.random.default_rng(3)
    sizes = [[1, 3], [4097, 4096], [511], [2_500_001, 7, 0], [1] * 11, [70_000, 4095, 1]]
    parts = []
    for lengths in sizes:
        offset = [5, 0, 17]
        parts.append([])
        for index, length in enumerate(lengths):
            region = index % 3
            parts[-1].append((region, offset[region], rng.bytes(length)))
            offset[region] += length + 2
    links = {
        "memory": None,
        "file": None,
        "file-buffered": FileLink(direct=False),
        "file-refused": FaultyLink(FileLink(), refuse_direct=True),
        "short": FaultyLink(FileLink(), short_read=9001),
        "short-buffered": FaultyLink(FileLink(direct=False), short_read=9001),
    }
    folder = None if place == "memory" else tmp_path
    options = {"link": links[place], "chunk_bytes": chunk_bytes}
    bench = Bench(parts, [2_600_000, 5000, 300], 7, folder, files=2, options=options)
    with bench.engine:
        bench.wait_all(bench.fetch(*((source, source + 1) for source in range(6))))
        for source in range(6):
            assert bench.holds(source + 1, source)
            assert bench.untouched_between(source + 1, source)
        assert all((room[0] == 0xEE).all() for room in bench.rooms)
        counters = bench.engine.counters()
    assert counters["bytes_demand"] == sum(sum(lengths) for lengths in sizes)
    assert counters["jobs_demand"] == 6
    if place in ("file-buffered", "file-refused", "short-buffered"):
        assert counters["buffered_reads"] > 0
        assert counters["direct_reads"] == 0
    assert (counters["direct_reads"] + counters["buffered_reads"] > 0) == (folder is not None)


def test_a_read_ending_with_less_than_a_block_is_finished_through_the_cache(tmp_path: Path) -> None:
    bench = simple(3, 30_000, 3, folder=tmp_path, link=FaultyLink(FileLink(), short_read=100))
    with bench.engine:
        bench.wait_all(bench.fetch((0, 0), (1, 1), (2, 2)))
        assert all(bench.holds(slot, slot) for slot in range(3))


def test_neighbours_in_a_file_are_read_at_once(tmp_path: Path) -> None:
    """Gate, up and down of an expert lie one after the other in most checkpoints; given here in another order."""
    data = np.random.default_rng(0).bytes(30_000)
    parts = [[(0, 0, data[:9_999]), (1, 0, data[9_999:20_001]), (0, 9_999, data[20_001:])]]
    for gap, reads in ((0, 1), (64, 3)):
        bench = Bench(parts, [20_000, 20_000], 1, tmp_path, gap=gap)
        with bench.engine:
            bench.wait_all(bench.fetch((0, 0)))
            assert bench.holds(0, 0)
            counters = bench.engine.counters()
        assert counters["direct_reads"] + counters["buffered_reads"] == reads


def test_memory_and_files_in_one_list(tmp_path: Path) -> None:
    bench = Bench(equal_parts(4, 5000), [5000], 4, tmp_path, options={})
    bench.engine.close()
    for source in (1, 3):
        bench.sources.segment_file[source] = -1
        bench.sources.segment_source[source] = bench.memory[source].ctypes.data
    with bench.make() as bench.engine:
        bench.wait_all(bench.fetch((0, 0), (1, 1), (2, 2), (3, 3)))
        assert all(bench.holds(slot, slot) for slot in range(4))


def test_a_source_without_bytes_is_complete_at_once() -> None:
    bench = Bench([[], [(0, 0, b"")]], [16], 2)
    with bench.engine:
        bench.wait_all(bench.fetch((0, 0), (1, 1)), timeout=0.0)
        assert bench.complete.tolist() == [1, 1]


@pytest.mark.parametrize("place", ["/dev/shm", "disk"])
def test_every_read_is_counted_as_direct_or_buffered(tmp_path: Path, place: str) -> None:
    with tempfile.TemporaryDirectory(dir=place if place != "disk" else tmp_path) as folder:
        try:
            os.close(os.open(Path(folder) / "probe", os.O_CREAT | os.O_RDWR | os.O_DIRECT))
            opens_direct = True
        except OSError:
            opens_direct = False
        bench = simple(4, 9000, 4, folder=Path(folder))
        with bench.engine:
            bench.wait_all(bench.fetch(*((slot, slot) for slot in range(4))))
            assert all(bench.holds(slot, slot) for slot in range(4))
            counters = bench.engine.counters()
    assert counters["direct_reads"] + counters["buffered_reads"] == 4
    if not opens_direct:
        assert counters["buffered_reads"] == 4


# ---- errors


def test_a_file_cut_short_names_itself_and_the_place(tmp_path: Path) -> None:
    for link in (FileLink(), FileLink(direct=False)):
        bench = simple(2, 50_000, 2, folder=tmp_path, link=link)
        os.truncate(bench.paths[0], 70_000)
        with bench.engine:
            with pytest.raises(TransferError, match="ends at byte 70000") as caught:
                bench.wait_all(bench.fetch((0, 0), (1, 1)))
            assert bench.holds(0, 0)
            assert caught.value.position == 1
            assert isinstance(caught.value.__cause__, OSError)
            assert caught.value.filename == caught.value.__cause__.filename == str(bench.paths[0])
            assert bench.complete[1] == -1


def test_a_missing_file_is_an_error_when_the_engine_is_made(tmp_path: Path) -> None:
    bench = simple(1, 10, 1, folder=tmp_path)
    bench.engine.close()
    bench.paths[0].unlink()
    with pytest.raises(FileNotFoundError, match="shard0"):
        bench.make()


@pytest.mark.parametrize("number", [1, 2, 5])
@pytest.mark.parametrize("throttled", [False, True])
def test_an_error_at_any_chunk_reaches_the_waiter_and_the_next_call_works(number: int, throttled: bool) -> None:
    inner = ThrottledLink(HostLink(), 1e9) if throttled else HostLink()
    bench = simple(2, 5000, 2, link=FaultyLink(inner, fail_at=number, error=errno.EIO), chunk_bytes=1000)
    with bench.engine:
        (tenancy,) = bench.fetch((0, 0))
        with pytest.raises(TransferError) as caught:
            bench.wait_any([tenancy])
        assert caught.value.errno == errno.EIO
        assert caught.value.__cause__.errno == errno.EIO
        assert bench.complete[0] == -1
        bench.raise_(0, tenancy)
        bench.wait_all([tenancy])
        assert bench.holds(0, 0)
        bench.wait_all(bench.fetch((1, 0)))
        assert bench.holds(0, 1)
        assert settle(bench)["failed"] == 1


def test_a_failed_prefetch_is_only_counted() -> None:
    bench = simple(2, 100, 2, link=FaultyLink(HostLink(), fail_at=1))
    with bench.engine:
        (tenancy,) = bench.prefetch((0, 0, 1.0))
        assert settle(bench)["failed"] == 1
        assert bench.complete[0] == -1
        bench.raise_(0, tenancy)
        bench.wait_all([tenancy])
        assert bench.holds(0, 0)


def test_one_that_is_there_is_returned_before_one_that_failed() -> None:
    bench = simple(2, 100, 2, link=FaultyLink(HostLink(), fail_at=1))
    with bench.engine:
        tenancies = bench.fetch((0, 0))
        bench.engine.drain(WAIT)
        tenancies += bench.fetch((1, 1))
        bench.engine.drain(WAIT)
        assert bench.wait_any(tenancies) == 1
        with pytest.raises(TransferError) as caught:
            bench.wait_all(tenancies)
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
    bench = simple(3, 100, 2)
    with bench.engine:
        good = np.array([[1, 1, 1]], np.int32)
        rows = {name: np.array(value, np.int32) for name, value in arguments.items()}
        if "prefetch" in rows and "priorities" not in message:
            rows["priority"] = np.ones(1, np.float32)
        with pytest.raises(RoutingError, match=message):
            bench.engine.submit(**{"fetch": good, **rows})
        counters = settle(bench)
        assert counters["jobs_demand"] == 0
        assert bench.complete.tolist() == [0, 0]


def test_arrays_that_do_not_fit_are_refused() -> None:
    bench = simple(2, 100, 2)
    with bench.engine:
        with pytest.raises(RoutingError):
            bench.engine.wait_any(np.zeros(2, np.int32), np.ones(1, np.int32), 0.1)
        with pytest.raises(RoutingError):
            bench.wait_any([])
        with pytest.raises(RoutingError, match="slot 7"):
            bench.wait_all([(7, 1)])
        bench.wait_all([])
    bench.sources.segment_region[0] = 1
    with pytest.raises(ValueError, match="region"):
        bench.make()
    bench.sources.segment_region[0] = 0
    bench.sources.segment_nbytes[0] = -1
    with pytest.raises(ValueError, match="negative"):
        bench.make()
    with pytest.raises(ValueError, match="threads"):
        simple(1, 1, 1, threads=0)


def test_a_link_that_cannot_read_files_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="cannot read files"):
        simple(1, 10, 1, folder=tmp_path, link=HostLink())


def test_an_asynchronous_link_serves_one_engine_at_a_time() -> None:
    link = ThrottledLink(HostLink(), 1e9)
    bench = simple(1, 10, 1, link=link)
    with pytest.raises(ValueError, match="another engine"):
        simple(1, 10, 1, link=link)
    bench.engine.close()
    simple(1, 10, 1, link=link).engine.close()


# ---- order, cancelling, joining


def held_back(bench: Bench, chunks: int) -> None:
    """Return once the link has been given this many chunks."""
    end = time.monotonic() + WAIT
    while bench.options["link"].chunks < chunks:
        assert time.monotonic() < end
        time.sleep(0.0005)


def order_of_completion(bench: Bench, tenancies: Sequence[tuple[int, int]]) -> list[int]:
    left = dict(enumerate(tenancies))
    order = []
    while left:
        numbers = list(left)
        order.append(numbers[bench.wait_any([left[number] for number in numbers])])
        del left[order[-1]]
    return order


def test_demand_goes_before_prefetch_and_prefetches_go_by_priority() -> None:
    bench = simple(8, 1000, 8, link=FaultyLink(ThrottledLink(HostLink(), 1e5)), window_bytes=1)
    with bench.engine:
        first = bench.prefetch((0, 0, 0.0))
        held_back(bench, 1)
        later = bench.prefetch((1, 1, 0.1), (2, 2, 0.9), (3, 3, 0.5), (4, 4, 0.9))
        demand = bench.fetch((5, 5), (6, 6))
        assert order_of_completion(bench, first + later + demand) == [0, 5, 6, 2, 4, 3, 1]


def test_demand_behind_a_full_prefetch_queue_waits_for_the_window_only() -> None:
    chunk, window = 1000, 3000
    link = FaultyLink(ThrottledLink(HostLink(), 2e5))
    bench = simple(20, 10 * chunk, 20, link=link, chunk_bytes=chunk, window_bytes=window)
    with bench.engine:
        bench.prefetch(*((source, source, 1.0) for source in range(19)))
        held_back(bench, 5)
        before = link.chunks
        tenancy = bench.fetch((19, 19))
        # Nothing of the wrong prefetches starts between the submission and the demand's own ten chunks.
        between = bench.engine.counters()
        bench.wait_all(tenancy)
        after = bench.engine.counters()
        assert bench.holds(19, 19)
        assert after["bytes_demand"] == 10 * chunk
        # What was outstanding at the submission still lands before it; one chunk more may start while we look.
        assert after["bytes_prefetch"] - between["bytes_prefetch"] <= window + chunk
        assert link.chunks - before <= 10 + 1 + window // chunk
        bench.drop(*((slot, 1) for slot in range(19)))


@pytest.mark.parametrize("throttled", [False, True])
def test_demand_overtakes_a_prefetch_at_a_chunk_boundary_and_the_rest_follows(throttled: bool) -> None:
    inner = ThrottledLink(HostLink(), 1e6) if throttled else HostLink()
    link = FaultyLink(inner, delay_s=0.002)
    bench = simple(2, 50_000, 2, link=link, chunk_bytes=1000, window_bytes=1000)
    with bench.engine:
        prefetch = bench.prefetch((0, 0, 1.0))
        held_back(bench, 3)
        demand = bench.fetch((1, 1))
        end = time.monotonic() + WAIT
        while bench.complete[1] == 0:  # not a wait of the engine's: that one helps
            assert time.monotonic() < end
            time.sleep(0.0005)
        assert bench.complete[0] == 0
        bench.wait_all(prefetch + demand)
        assert bench.holds(0, 0)
        assert bench.holds(1, 1)
        assert link.chunks == 100  # nothing was copied twice
        assert settle(bench)["joined"] == 0


@pytest.mark.parametrize("throttled", [False, True])
def test_demand_joins_a_prefetch_in_flight(throttled: bool) -> None:
    inner = ThrottledLink(HostLink(), 1e6) if throttled else HostLink()
    link = FaultyLink(inner, delay_s=0.002)
    bench = simple(1, 20_000, 1, link=link, chunk_bytes=1000)
    with bench.engine:
        (tenancy,) = bench.prefetch((0, 0, 1.0))
        held_back(bench, 3)
        bench.raise_(0, tenancy)
        bench.raise_(0, tenancy)
        bench.wait_all([tenancy])
        bench.raise_(0, tenancy)
        counters = settle(bench)
    assert bench.holds(0, 0)
    assert link.chunks == 20
    assert (counters["joined"], counters["jobs_demand"], counters["jobs_prefetch"]) == (1, 1, 0)
    assert counters["bytes_demand"] + counters["bytes_prefetch"] == 20_000


def test_a_queued_prefetch_that_is_raised_leaves_the_prefetch_queue() -> None:
    bench = simple(5, 1000, 5, link=FaultyLink(ThrottledLink(HostLink(), 1e5)), window_bytes=1)
    with bench.engine:
        tenancies = bench.prefetch(*((source, source, -float(source)) for source in range(5)))
        held_back(bench, 1)
        bench.raise_(4, tenancies[4])
        assert order_of_completion(bench, tenancies) == [0, 4, 1, 2, 3]
        assert settle(bench)["joined"] == 1


def test_a_prefetch_asked_for_again_takes_the_new_priority() -> None:
    bench = simple(4, 1000, 4, link=FaultyLink(ThrottledLink(HostLink(), 1e5)), window_bytes=1)
    with bench.engine:
        tenancies = bench.prefetch((0, 0, 9.0), (1, 1, 3.0), (2, 2, 2.0), (3, 3, 1.0))
        held_back(bench, 1)
        rows = np.array([[3, *tenancies[3]], [1, *tenancies[1]]], np.int32)
        bench.engine.submit(prefetch=rows, priority=np.array([8.0, 0.5], np.float32))
        assert order_of_completion(bench, tenancies) == [0, 3, 2, 1]


@pytest.mark.parametrize("throttled", [False, True])
def test_a_prefetch_dropped_in_flight_never_mixes_with_the_slots_next_tenant(throttled: bool) -> None:
    inner = ThrottledLink(HostLink(), 3e6, 0.003) if throttled else HostLink()
    link = FaultyLink(inner, delay_s=0.001)
    bench = simple(3, 20_000, 2, link=link, chunk_bytes=1000, window_bytes=4000)
    with bench.engine:
        for turn in range(6):
            seen = link.chunks
            (tenancy,) = bench.prefetch((turn % 2, 0, 1.0))
            held_back(bench, seen + 3)
            if turn % 3 == 0:
                bench.drop(tenancy)
            assert bench.complete[0] != tenancy[1]
            bench.wait_all(bench.fetch((2, 0)))
            assert bench.holds(0, 2)
            with pytest.raises(TransferError, match="dropped"):
                bench.wait_any([tenancy])
        counters = settle(bench)
        assert bench.holds(0, 2)
    assert counters["prefetch_cancelled"] == 6
    assert counters["jobs_demand"] == 6
    assert counters["jobs_prefetch"] == 0


def test_a_queued_prefetch_is_dropped_without_moving_a_byte() -> None:
    link = FaultyLink(ThrottledLink(HostLink(), 1e6))
    bench = simple(3, 10_000, 3, link=link, window_bytes=1)
    with bench.engine:
        tenancies = bench.prefetch((0, 0, 2.0), (1, 1, 1.0), (2, 2, 0.0))
        held_back(bench, 1)
        bench.drop(tenancies[1])
        counters = settle(bench)
        assert link.chunks == 2
        assert (counters["prefetch_dropped"], counters["prefetch_cancelled"]) == (1, 0)
        assert bench.complete.tolist() == [1, 0, 1]
        assert (bench.rooms[0][1] == 0xEE).all()


def test_generations_that_came_late_are_ignored() -> None:
    bench = simple(3, 1000, 1)
    with bench.engine:
        bench.engine.submit(fetch=np.array([[0, 0, 5]], np.int32))
        bench.wait_all([(0, 5)])
        bench.engine.submit(fetch=np.array([[1, 0, 4]], np.int32), drop=np.array([[0, 3]], np.int32))
        bench.engine.drain(WAIT)
        assert bench.holds(0, 0)
        # A drop can overtake the submission of the prefetch it is about.
        bench.engine.submit(drop=np.array([[0, 7]], np.int32))
        bench.engine.submit(prefetch=np.array([[1, 0, 7]], np.int32), priority=np.ones(1, np.float32))
        bench.engine.submit(fetch=np.array([[2, 0, 6]], np.int32))
        counters = settle(bench)
        assert bench.holds(0, 0)
        assert counters["bytes_demand"] == 1000
        bench.engine.submit(fetch=np.array([[1, 0, 7]], np.int32))
        bench.wait_all([(0, 7)])
        assert bench.holds(0, 1)


class Tenancies(RuleBasedStateMachine):
    """Any sequence of submissions, drops and waits against a table of who owns which slot."""

    SOURCES, SLOTS, NBYTES = 6, 3, 5000

    @initialize(kind=st.sampled_from(["host", "slow", "throttled"]), threads=st.integers(1, 2))
    def begin(self, kind: str, threads: int) -> None:
        link: Any = HostLink()
        if kind == "slow":
            link = FaultyLink(HostLink(), delay_s=0.0002)
        elif kind == "throttled":
            link = ThrottledLink(HostLink(), 2e7, 0.0005)
        options = {"link": link, "threads": threads, "chunk_bytes": 700, "window_bytes": 1500}
        self.bench = simple(self.SOURCES, self.NBYTES, self.SLOTS, **options)
        self.owner: dict[int, tuple[int, int, bool]] = {}  # slot -> source, generation, certain to complete

    @rule(slot=st.integers(0, SLOTS - 1), source=st.integers(0, SOURCES - 1), demand=st.booleans())
    def give_slot(self, slot: int, source: int, demand: bool) -> None:
        if demand:
            ((_, generation),) = self.bench.fetch((source, slot))
        else:
            ((_, generation),) = self.bench.prefetch((source, slot, float(source)))
        self.owner[slot] = (source, generation, True)

    # Whether a dropped copy was complete already is a matter of time, so nothing drawn may depend on it.
    @rule(slot=st.integers(0, SLOTS - 1))
    def ask_again(self, slot: int) -> None:
        source, generation, sure = self.owner.get(slot, (0, 0, False))
        if sure:
            self.bench.raise_(source, (slot, generation))

    @rule(slot=st.integers(0, SLOTS - 1))
    def drop(self, slot: int) -> None:
        if slot in self.owner:
            source, generation, _ = self.owner[slot]
            self.bench.drop((slot, generation))
            self.owner[slot] = (source, generation, bool(self.bench.complete[slot] == generation))

    @rule(slot=st.integers(0, SLOTS - 1))
    def drop_what_is_over(self, slot: int) -> None:
        if slot in self.owner and self.owner[slot][1] > 1:
            self.bench.drop((slot, self.owner[slot][1] - 1))

    @rule()
    def wait_for_all(self) -> None:
        live = [(slot, generation) for slot, (_, generation, sure) in self.owner.items() if sure]
        self.bench.wait_all(live)

    @rule(slots=st.lists(st.integers(0, SLOTS - 1), min_size=1))
    def wait_for_one(self, slots: list[int]) -> None:
        some = [(slot, self.owner[slot][1]) for slot in slots if slot in self.owner and self.owner[slot][2]]
        if some:
            slot, generation = some[self.bench.wait_any(some)]
            assert self.bench.complete[slot] == generation

    @precondition(lambda self: hasattr(self, "owner"))
    @invariant()
    def complete_means_complete(self) -> None:
        for slot, (source, generation, _) in self.owner.items():
            if self.bench.complete[slot] == generation:
                assert self.bench.holds(slot, source)

    def teardown(self) -> None:
        if not hasattr(self, "bench"):
            return
        with self.bench.engine:
            self.wait_for_all()
            counters = settle(self.bench)
            for slot, (source, generation, sure) in self.owner.items():
                assert (self.bench.complete[slot] == generation) == sure
                assert not sure or self.bench.holds(slot, source)
        assert counters["failed"] == 0


TestTenancies = Tenancies.TestCase
TestTenancies.settings = settings(
    max_examples=60, stateful_step_count=25, deadline=None, suppress_health_check=[HealthCheck.too_slow]
)


# ---- waiting


def test_a_waiting_caller_copies_what_is_still_queued() -> None:
    bench = simple(6, 2000, 6, link=FaultyLink(HostLink(), delay_s=0.01))
    with bench.engine:
        bench.wait_all(bench.fetch(*((slot, slot) for slot in range(6))))
        assert all(bench.holds(slot, slot) for slot in range(6))
        counters = settle(bench)
        assert counters["helped"] > 0
        assert counters["jobs_demand"] == 6
        assert counters["stall_ns"] > 0
        assert counters["busy_ns"] > 0
        bench.engine.reset_counters()
        assert not any(bench.engine.counters().values())


def test_a_waiting_caller_and_the_thread_share_the_chunks_of_one_job(tmp_path: Path) -> None:
    link = FaultyLink(FileLink(), delay_s=0.005)
    bench = simple(2, 40 * 4096, 2, folder=tmp_path, link=link, chunk_bytes=4096)
    with bench.engine:
        (tenancy,) = bench.fetch((1, 1))
        held_back(bench, 2)  # the thread has begun
        bench.wait_all([tenancy])
        assert bench.holds(1, 1)
        counters = settle(bench)
    assert 0 < counters["helped"] < link.chunks
    assert counters["bytes_demand"] == 40 * 4096
    assert counters["direct_reads"] + counters["buffered_reads"] == link.chunks


def test_a_failed_chunk_ends_a_job_that_several_threads_carry() -> None:
    link = FaultyLink(HostLink(), delay_s=0.002, fail_at=12)
    bench = simple(2, 40_000, 2, link=link, chunk_bytes=1000, threads=3)
    with bench.engine:
        with pytest.raises(TransferError) as caught:
            bench.wait_all(bench.fetch((0, 0)))
        assert caught.value.errno == errno.EIO
        bench.wait_all(bench.fetch((1, 0)))
        assert bench.holds(0, 1)
        assert settle(bench)["failed"] == 1


def test_a_wait_that_takes_too_long_says_how_things_stand() -> None:
    bench = simple(2, 1000, 2, link=ThrottledLink(HostLink(), 1.0), window_bytes=1)
    tenancies = bench.fetch((0, 0), (1, 1))
    for call in (bench.wait_any, bench.wait_all):
        with pytest.raises(TransferError, match=r"1 demand and 0 prefetch jobs queued.*slot 0.*1 of 1 I/O threads"):
            call(tenancies, 0.05)
    with pytest.raises(TransferError, match="not complete after"):
        bench.engine.drain(0.01)


def test_the_gil_is_free_while_a_call_waits() -> None:
    bench = simple(1, 1000, 1, link=ThrottledLink(HostLink(), 1e9, 0.3))
    ticks = 0
    stop = threading.Event()

    def tick() -> None:
        nonlocal ticks
        while not stop.is_set():
            ticks += 1
            time.sleep(0.001)

    thread = threading.Thread(target=tick)
    with bench.engine:
        tenancies = bench.fetch((0, 0))
        thread.start()
        before = ticks
        bench.wait_all(tenancies)
        during = ticks - before
    stop.set()
    thread.join()
    assert during >= 5


@pytest.mark.parametrize("kind", ["host", "throttled"])
def test_many_threads_wait_at_once(kind: str) -> None:
    link = HostLink() if kind == "host" else ThrottledLink(HostLink(), 1e9)
    threads, slots = 4, 16
    bench = simple(32, 3000, slots, link=link, threads=2, chunk_bytes=1000)
    errors: list[BaseException] = []

    def work(number: int) -> None:
        rng = np.random.default_rng(number)
        mine = range(number, slots, threads)
        try:
            for _ in range(150):
                pairs = [(int(rng.integers(32)), slot) for slot in mine]
                bench.prefetch(*((int(rng.integers(32)), slot, 1.0) for slot in mine))
                tenancies = bench.fetch(*pairs)
                while tenancies:
                    position = bench.wait_any(tenancies)
                    slot, _ = tenancies.pop(position)
                    assert bench.holds(*next((s, source) for source, s in pairs if s == slot))
        except BaseException as error:
            errors.append(error)

    workers = [threading.Thread(target=work, args=(number,)) for number in range(threads)]
    with bench.engine:
        for worker in workers:
            worker.start()
        for worker in workers:
            worker.join()
        counters = settle(bench)
    assert not errors
    assert counters["jobs_demand"] == threads * 150 * (slots // threads)


def test_several_threads_may_wait_for_the_same_copy() -> None:
    bench = simple(1, 4000, 1, link=ThrottledLink(HostLink(), 1e5))
    with bench.engine:
        tenancies = bench.fetch((0, 0))
        seen: list[bool] = []

        def work() -> None:
            bench.wait_all(tenancies)
            seen.append(bench.holds(0, 0))

        workers = [threading.Thread(target=work) for _ in range(4)]
        for worker in workers:
            worker.start()
        for worker in workers:
            worker.join()
    assert seen == [True] * 4


def test_two_engines_are_independent(tmp_path: Path) -> None:
    one = simple(4, 6000, 4, folder=tmp_path)
    other = Bench(equal_parts(4, 6000, seed=9), [6000], 4)
    with one.engine, other.engine:
        tenancies = one.fetch((0, 0), (1, 1)), other.fetch((2, 0), (3, 1))
        one.wait_all(tenancies[0])
        other.wait_all(tenancies[1])
        assert one.holds(0, 0)
        assert other.holds(0, 2)
        one.engine.close()
        other.wait_all(other.fetch((1, 2)))
        assert other.holds(2, 1)


# ---- the end


def test_a_closed_engine_says_so() -> None:
    bench = simple(1, 100, 1)
    engine = bench.engine
    tenancy = bench.fetch((0, 0))
    assert not engine.closed
    engine.close()
    engine.close()
    assert engine.closed
    for call in (
        lambda: bench.fetch((0, 0)),
        lambda: bench.wait_all(tenancy),
        lambda: engine.drain(1),
        engine.counters,
    ):
        with pytest.raises(ClosedError):
            call()


def test_closing_while_busy_stops_at_a_chunk_and_frees_the_waiters() -> None:
    link = FaultyLink(ThrottledLink(HostLink(), 1e5))
    bench = simple(2, 1 << 20, 2, link=link, chunk_bytes=1000, window_bytes=2000)
    tenancies = bench.fetch((0, 0), (1, 1))
    caught: list[BaseException] = []

    def work() -> None:
        try:
            bench.wait_all(tenancies)
        except BaseException as error:
            caught.append(error)

    worker = threading.Thread(target=work)
    worker.start()
    held_back(bench, 4)
    bench.engine.close()
    worker.join(WAIT)
    assert not worker.is_alive()
    assert isinstance(caught[0], ClosedError)
    assert link.chunks < 50
    after = [room.copy() for room in bench.rooms]
    time.sleep(0.02)
    assert all((room == copy).all() for room, copy in zip(bench.rooms, after, strict=True))


def test_closing_waits_for_a_caller_that_is_copying(tmp_path: Path) -> None:
    bench = simple(4, 200_000, 4, folder=tmp_path, link=FaultyLink(FileLink(), delay_s=0.005), chunk_bytes=4096)
    tenancies = bench.fetch(*((slot, slot) for slot in range(4)))

    def work() -> None:
        with contextlib.suppress(ClosedError):
            bench.wait_all(tenancies)

    worker = threading.Thread(target=work)
    worker.start()
    held_back(bench, 4)
    bench.engine.close()
    worker.join(WAIT)
    assert not worker.is_alive()


def test_a_thread_that_is_gone_is_an_error_and_not_a_hang() -> None:
    bench = simple(4, 1000, 4, link=FaultyLink(ThrottledLink(HostLink(), 1e6), end_thread_at=2), window_bytes=1)
    tenancies = bench.fetch((0, 0), (1, 1))
    with pytest.raises(TransferError, match="thread has ended"):
        bench.wait_all(tenancies)
    assert bench.complete[0] == 1
    with pytest.raises(TransferError, match="thread has ended"):
        bench.fetch((2, 2))
    with pytest.raises(TransferError, match="thread has ended"):
        bench.engine.drain(WAIT)
    bench.wait_any(tenancies[:1])  # what had arrived stays
    bench.engine.close()


def test_an_engine_nobody_holds_stops_and_lets_go_of_its_owner() -> None:
    class Owner:
        pass

    bench = simple(2, 1 << 16, 2, link=ThrottledLink(HostLink(), 1e6))
    bench.engine.close()
    owner = Owner()
    gone = weakref.ref(owner)
    address = np.array([bench.rooms[0].ctypes.data], np.uint64)
    engine = Engine(bench.sources, address, np.array([1 << 16]), bench.complete, owner=owner)
    engine.submit(fetch=np.array([[0, 0, 1]], np.int32))
    del owner
    gc.collect()
    assert gone() is not None
    threads = len(os.listdir("/proc/self/task"))
    del engine
    gc.collect()
    assert gone() is None
    assert len(os.listdir("/proc/self/task")) == threads - 1


def test_files_are_closed(tmp_path: Path) -> None:
    before = len(os.listdir("/proc/self/fd"))
    for _ in range(3):
        bench = Bench(equal_parts(4, 100), [100], 4, tmp_path, files=4)
        bench.wait_all(bench.fetch((0, 0)))
        bench.engine.close()
    assert len(os.listdir("/proc/self/fd")) == before


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_a_forked_child_gets_an_error_and_leaves_the_parent_alone() -> None:
    bench = simple(2, 4000, 2, link=ThrottledLink(HostLink(), 1e5))
    tenancies = bench.fetch((0, 0))
    child = os.fork()
    if child == 0:
        code = 1
        try:
            for call in (lambda: bench.fetch((1, 1)), lambda: bench.wait_all(tenancies), bench.engine.counters):
                with pytest.raises(ClosedError, match="fork"):
                    call()
            bench.engine.close()
            fresh = simple(2, 100, 2)  # a new one works
            fresh.wait_all(fresh.fetch((1, 1)))
            fresh.engine.close()
            bench.engine = None  # type: ignore[assignment]
            gc.collect()
            code = 0
        finally:
            os._exit(code)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    with bench.engine:
        bench.wait_all(tenancies)
        assert bench.holds(0, 0)


EXIT = """
import contextlib, os, sys, threading, types
import numpy as np
# The package without the rest of it, which imports torch and takes seconds.
sys.modules["moecache"] = types.ModuleType("moecache")
sys.modules["moecache"].__path__ = [{package!r}]
import moecache._engine
from moecache._engine import Engine, FaultyLink, HostLink, Sources, ThrottledLink
data = np.ones(1 << 22, np.uint8); room = np.zeros((2, 1 << 22), np.uint8); complete = np.zeros(2, np.int32)
one, size = np.zeros(1, np.int64), np.array([1 << 22])
sources = Sources(np.array([0, 1]), np.array([-1]), np.array([data.ctypes.data], np.uint64), size, one, one)
link = {link}
engine = Engine(sources, np.array([room.ctypes.data], np.uint64), np.array([1 << 22]), complete, link=link,
                chunk_bytes=1 << 16, owner=(data, room))
engine.submit(fetch=np.array([[0, 0, 1]], np.int32),
              prefetch=np.array([[0, 1, 1]], np.int32), priority=np.ones(1, np.float32))
def wait():
    with contextlib.suppress(BaseException):
        engine.wait_all(np.zeros(1, np.int32), np.ones(1, np.int32), 1e3)
{end}
"""


@pytest.mark.parametrize(
    "link", ["HostLink()", "ThrottledLink(HostLink(), 1e6)", "FaultyLink(HostLink(), delay_s=0.01)"]
)
@pytest.mark.parametrize(
    "end",
    [
        "",
        "del data, room, complete",
        "sys.keep = engine",
        "if os.fork() == 0: sys.exit(0)\nassert os.wait()[1] == 0",
        "threading.Thread(target=wait, daemon=True).start()",
    ],
    ids=["plain", "deleted", "kept", "forked", "waiting"],
)
def test_leaving_without_closing_is_silent(link: str, end: str) -> None:
    package = str(Path(moecache._engine.__file__).parent)
    done = subprocess.run(
        [sys.executable, "-W", "ignore::DeprecationWarning", "-c", EXIT.format(package=package, link=link, end=end)],
        capture_output=True,
        text=True,
        timeout=WAIT,
        check=False,
    )
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")
