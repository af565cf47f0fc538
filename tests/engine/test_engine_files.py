"""Bytes on their way from memory and files: sizes, alignments, what the file system refuses."""

from __future__ import annotations

import os
import tempfile
from pathlib import Path

import numpy as np
import pytest
from harness import POISON, Part, World, equal_parts, simple
from numpy.typing import NDArray

from moecache._engine import FaultyLink, FileLink

pytestmark = pytest.mark.timeout(60)


@pytest.mark.failure("36")
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
    world = World(parts, [2_600_000, 5000, 300], 7, folder, files=2, options=options)
    with world.engine:
        world.wait_all(world.fetch(*((source, source + 1) for source in range(6))))
        for source in range(6):
            assert world.holds(source + 1, source)
            assert world.untouched_between(source + 1, source)
        assert all((buffer[0] == 0xEE).all() for buffer in world.regions)
        counters = world.engine.counters()
    assert counters["bytes_demand"] == sum(sum(lengths) for lengths in sizes)
    assert counters["jobs_demand"] == 6
    if place in ("file-buffered", "file-refused", "short-buffered"):
        assert counters["buffered_reads"] > 0
        assert counters["direct_reads"] == 0
    assert (counters["direct_reads"] + counters["buffered_reads"] > 0) == (folder is not None)


@pytest.mark.failure("123")
def test_a_read_ending_with_less_than_a_block_is_finished_through_the_cache(tmp_path: Path) -> None:
    world = simple(3, 30_000, 3, folder=tmp_path, link=FaultyLink(FileLink(), short_read=100))
    with world.engine:
        world.wait_all(world.fetch((0, 0), (1, 1), (2, 2)))
        assert all(world.holds(slot, slot) for slot in range(3))


@pytest.mark.parametrize("short", [0, 9001, 70_000])
@pytest.mark.parametrize("shift", [0, 1, 512, 4095])
def test_blocks_read_into_place_and_what_lies_around_them(tmp_path: Path, shift: int, short: int) -> None:
    """Where file and slot lie alike modulo a block, whole blocks are read to where they belong and the rest bounces."""
    rng = np.random.default_rng(shift)
    sizes = [[300_000, 5, 70_001, 20_000], [4096 * 9], [16_384 + 4095, 16_383], [999_999]]
    parts: list[list[Part]] = []
    at = shift
    for lengths in sizes:
        parts.append([])
        offset = [0, 0]
        for index, length in enumerate(lengths):
            region = index % 2
            # The first byte of every second segment has the file's own alignment in the slot, the others none.
            offset[region] += (at - offset[region]) % 4096 + 7 * (index % 2)
            parts[-1].append((region, offset[region], rng.bytes(length)))
            offset[region] += length
            at += length
    link = FaultyLink(FileLink(), short_read=short)
    options = {"link": link, "chunk_bytes": 1 << 18}
    world = World(parts, [1 << 20, 1 << 18], 4, tmp_path, lead=shift, options=options, allocate=paged_memory)
    with world.engine:
        for turn in range(2):
            world.wait_all(world.fetch(*((source, (source + turn) % 4) for source in range(4))))
            for source in range(4):
                assert world.holds((source + turn) % 4, source)
            if turn == 0:
                assert all(world.untouched_between(source, source) for source in range(4))


def paged_memory(slots: int, stride: int) -> NDArray[np.uint8]:
    """A region that begins with a page."""
    memory = np.full(slots * stride + 4096, POISON, np.uint8)
    start = -memory.ctypes.data % 4096
    return memory[start : start + slots * stride].reshape(slots, stride)


def test_neighbours_in_a_file_are_read_at_once(tmp_path: Path) -> None:
    """Gate, up and down of an expert lie one after the other in most checkpoints; given here in another order."""
    data = np.random.default_rng(0).bytes(30_000)
    parts = [[(0, 0, data[:9_999]), (1, 0, data[9_999:20_001]), (0, 9_999, data[20_001:])]]
    for gap, reads in ((0, 1), (64, 3)):
        world = World(parts, [20_000, 20_000], 1, tmp_path, gap=gap)
        with world.engine:
            world.wait_all(world.fetch((0, 0)))
            assert world.holds(0, 0)
            counters = world.engine.counters()
        assert counters["direct_reads"] + counters["buffered_reads"] == reads


def test_memory_and_files_in_one_list(tmp_path: Path) -> None:
    world = World(equal_parts(4, 5000), [5000], 4, tmp_path, options={})
    world.engine.close()
    for source in (1, 3):
        world.sources.segment_file[source] = -1
        world.sources.segment_source[source] = world.memory[source].ctypes.data
    with world.make() as world.engine:
        world.wait_all(world.fetch((0, 0), (1, 1), (2, 2), (3, 3)))
        assert all(world.holds(slot, slot) for slot in range(4))


def test_a_source_without_bytes_is_complete_at_once() -> None:
    world = World([[], [(0, 0, b"")]], [16], 2)
    with world.engine:
        world.wait_all(world.fetch((0, 0), (1, 1)), timeout=0.0)
        assert world.complete.tolist() == [1, 1]


@pytest.mark.failure("123")
@pytest.mark.parametrize("place", ["/dev/shm", "disk"])
def test_every_read_is_counted_as_direct_or_buffered(tmp_path: Path, place: str) -> None:
    with tempfile.TemporaryDirectory(dir=place if place != "disk" else tmp_path) as folder:
        try:
            os.close(os.open(Path(folder) / "probe", os.O_CREAT | os.O_RDWR | os.O_DIRECT))
            opens_direct = True
        except OSError:
            opens_direct = False
        world = simple(4, 9000, 4, folder=Path(folder))
        with world.engine:
            world.wait_all(world.fetch(*((slot, slot) for slot in range(4))))
            assert all(world.holds(slot, slot) for slot in range(4))
            counters = world.engine.counters()
    assert counters["direct_reads"] + counters["buffered_reads"] == 4
    if not opens_direct:
        assert counters["buffered_reads"] == 4
