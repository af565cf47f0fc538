"""The engine against one plain copy of the same bytes, a limited link against its limit, and what one expert costs on demand.

    pytest bench/bench_link.py -o python_files='bench_*.py'

Figures are printed, and kept in pytest-benchmark's ``extra_info``; nothing is asserted about time. Both sides of a ratio are
measured in turn, in the same run, and the ratio is the median over pairs of neighbouring rounds, which on a busy machine
is steadier than that of two medians.
"""

from __future__ import annotations

import mmap
import os
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest
from numpy.typing import NDArray
from pytest_benchmark.fixture import BenchmarkFixture

from moecache._engine import Engine, HostLink, Sources, ThrottledLink

MiB = 1 << 20
EXPERT = 3 * MiB
EXPERTS = 32
IN_MEMORY = 160  # 480 MiB and as much again: more than the caches hold, as banks are
ROUNDS = 30
WAIT = 60.0


@dataclass
class World:
    """Experts of one size, in memory or in one file, and a slot for each of a few."""

    engine: Engine
    experts: NDArray[np.uint8]  # [E, nbytes]
    slots: NDArray[np.uint8]  # [S, nbytes]
    path: Path | None
    generation: int = 0

    def rows(self, experts: NDArray[np.int64], slots: NDArray[np.int64] | None) -> NDArray[np.int32]:
        """New generations with these experts, in slots 0, 1, ... if no others are named."""
        self.generation += 1
        rows = np.empty((len(experts), 3), np.int32)
        rows[:, 0] = experts
        rows[:, 1] = np.arange(len(experts)) if slots is None else slots
        rows[:, 2] = self.generation
        return rows

    def submit(self, experts: NDArray[np.int64]) -> tuple[NDArray[np.int32], NDArray[np.int32]]:
        """Demand these experts; what to wait for."""
        rows = self.rows(experts, None)
        self.engine.submit(fetch=rows)
        return np.ascontiguousarray(rows[:, 1]), np.ascontiguousarray(rows[:, 2])

    def prefetch(self, experts: NDArray[np.int64], slots: NDArray[np.int64] | None = None) -> None:
        """Copied by the I/O thread alone: no waiting caller helps with prefetches."""
        rows = self.rows(experts, slots)
        self.engine.submit(prefetch=rows, priority=np.zeros(len(experts), np.float32))
        self.engine.drain(WAIT)

    def fetch(self, experts: NDArray[np.int64], slots: NDArray[np.int64] | None = None) -> None:
        rows = self.rows(experts, slots)
        self.engine.submit(fetch=rows)
        self.engine.wait_all(np.ascontiguousarray(rows[:, 1]), np.ascontiguousarray(rows[:, 2]), WAIT)


def make(
    path: Path | None, experts: int, nbytes: int, slots: int, *, in_place: bool = False, **options: object
) -> World:
    """``in_place``: experts lie in the file as they lie in the slots, modulo a block."""
    data = np.random.default_rng(0).integers(0, 256, (experts, nbytes), dtype=np.uint8)
    target = np.zeros((slots, nbytes), np.uint8)
    base = data.ctypes.data
    if path is not None:
        # Mostly, as behind a safetensors header, no expert begins on a block.
        base = 4096 + target.ctypes.data % 4096 if in_place else 1000
        with path.open("wb") as file:
            file.write(b"\0" * base + data.tobytes())
            file.flush()
            os.fsync(file.fileno())
    sources = Sources(
        segment_start=np.arange(experts + 1),
        segment_file=np.full(experts, -1 if path is None else 0, np.int32),
        segment_source=(base + np.arange(experts) * nbytes).astype(np.uint64),
        segment_nbytes=np.full(experts, nbytes),
        segment_region=np.zeros(experts, np.int32),
        segment_offset=np.zeros(experts, np.int64),
        files=() if path is None else (str(path),),
    )
    complete = np.zeros(slots, np.int32)
    address = np.array([target.ctypes.data], np.uint64)
    engine = Engine(sources, address, np.array([nbytes]), complete, owner=(data, target), **options)  # type: ignore[arg-type]
    return World(engine, data, target, path)


def seconds(call: Callable[[], object]) -> float:
    began = time.perf_counter()
    call()
    return time.perf_counter() - began


def report(benchmark: BenchmarkFixture, **figures: float) -> None:
    benchmark.extra_info.update(figures)
    print(f"\n{benchmark.name}: " + ", ".join(f"{name} {value:g}" for name, value in figures.items()), end="")


def side_by_side(
    benchmark: BenchmarkFixture,
    world: World,
    engine: Callable[[], object],
    plain: Callable[[], object],
    **others: Callable[[], object],
) -> None:
    """Benchmark the first; time the second, and others to compare with, between its rounds."""
    nbytes = world.experts.nbytes
    ours, theirs = [], []
    more: dict[str, list[float]] = {name: [] for name in others}

    def turn() -> None:
        ours.append(seconds(engine))

    def between() -> None:
        theirs.append(seconds(plain))
        for name, other in others.items():
            more[name].append(seconds(other))

    for _ in range(2):
        engine()
        between()
    theirs.clear()
    for spent in more.values():
        spent.clear()
    world.engine.reset_counters()
    benchmark.pedantic(turn, setup=between, rounds=ROUNDS)
    copying = world.engine.counters()["busy_ns"] / 1e9 / sum(ours)
    plain_s, engine_s = np.array(theirs), np.array(ours)
    report(
        benchmark,
        rate_over_plain_copy=round(np.median(plain_s / engine_s), 3),
        GB_per_s=round(nbytes / np.median(engine_s) / 1e9, 2),
        plain_GB_per_s=round(nbytes / np.median(plain_s) / 1e9, 2),
        **{f"rate_over_{name}": round(np.median(np.array(spent) / engine_s), 3) for name, spent in more.items()},
        share_of_time_in_copies=round(copying, 3),
        measured_link_rate_GB_per_s=round(world.engine.link_rate / 1e9, 2),
    )


@pytest.mark.parametrize("chunk", [MiB // 4, MiB, 2 * MiB, 8 * MiB], ids=lambda chunk: f"{chunk >> 10}KiB")
def test_memory_against_one_copy(benchmark: BenchmarkFixture, chunk: int) -> None:
    """The I/O thread alone, and one ``memcpy`` of all bytes: by this thread, and by an engine's as a single chunk.

    The default chunk is 2 MiB.
    """
    world = make(None, IN_MEMORY, EXPERT, IN_MEMORY, chunk_bytes=chunk)
    everything = np.arange(IN_MEMORY)
    one = whole(world)
    with world.engine, one.engine:
        side_by_side(
            benchmark,
            world,
            lambda: world.prefetch(everything),
            lambda: np.copyto(world.slots, world.experts),
            one_chunk=lambda: one.prefetch(np.zeros(1, np.int64)),
        )


def whole(world: World) -> World:
    """The same bytes into the same target, as one expert in one chunk."""
    nbytes = world.experts.nbytes
    one, zero = np.array([nbytes]), np.zeros(1, np.int64)
    source = np.array([world.experts.ctypes.data], np.uint64)
    sources = Sources(np.array([0, 1]), np.array([-1]), source, one, zero, zero)
    engine = Engine(
        sources,
        np.array([world.slots.ctypes.data], np.uint64),
        one,
        np.zeros(1, np.int32),
        chunk_bytes=nbytes,
        owner=(world.experts, world.slots),
    )
    return World(engine, world.experts, world.slots, None)


def test_memory_with_a_helping_caller(benchmark: BenchmarkFixture) -> None:
    world = make(None, IN_MEMORY, EXPERT, IN_MEMORY)
    everything = np.arange(IN_MEMORY)
    with world.engine:
        side_by_side(benchmark, world, lambda: world.fetch(everything), lambda: np.copyto(world.slots, world.experts))


@pytest.mark.parametrize("helped", [False, True], ids=["thread", "caller"])
def test_copies_past_the_caches_and_their_reader(benchmark: BenchmarkFixture, helped: bool) -> None:
    """One expert after the other is copied and read once: chunks of 1 MiB, and just below it those that stay in cache."""
    chunks = {"past": MiB, "through": MiB - 4096}
    worlds = {way: make(None, IN_MEMORY, EXPERT, IN_MEMORY, chunk_bytes=chunk) for way, chunk in chunks.items()}
    order = np.random.default_rng(1).permutation(IN_MEMORY)
    times: dict[str, list[list[float]]] = {way: [] for way in worlds}
    for world in worlds.values():
        world.fetch(np.arange(IN_MEMORY))

    def turn(way: str) -> None:
        world = worlds[way]
        copy = world.fetch if helped else world.prefetch
        spent = [0.0, 0.0]
        for expert, slot in zip(order[:40], order[-40:], strict=True):
            spent[0] += seconds(lambda: copy(np.array([expert]), np.array([slot])))  # noqa: B023
            spent[1] += seconds(world.slots[slot].view(np.uint64).sum)
        times[way].append(spent)
        order[:] = np.roll(order, 40)

    for way in worlds:
        turn(way)
        times[way].clear()
    benchmark.pedantic(lambda: turn("past"), setup=lambda: turn("through"), rounds=ROUNDS)
    past, through = np.array(times["past"]), np.array(times["through"])
    report(
        benchmark,
        copy_speedup=round(np.median(through[:, 0] / past[:, 0]), 3),
        copy_and_read_speedup=round(np.median(through.sum(1) / past.sum(1)), 3),
        read_us=round(np.median(past[:, 1]) / 40 * 1e6, 1),
        read_from_cache_us=round(np.median(through[:, 1]) / 40 * 1e6, 1),
    )
    for world in worlds.values():
        world.engine.close()


def read_plainly(path: Path, nbytes: int, huge: bool, block: int = 2 * MiB) -> Callable[[], None]:
    """A loop of aligned direct reads over the whole file into one buffer, and no copy out of it.

    The buffer has small pages like that of ``dd``, or huge ones: a disk's request has a limited number of parts, and
    every small page is one.
    """
    buffer = mmap.mmap(-1, 2 * block, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    buffer.madvise(mmap.MADV_HUGEPAGE if huge else mmap.MADV_NOHUGEPAGE)
    start = -np.frombuffer(buffer, np.uint8).ctypes.data % block
    part = memoryview(buffer)[start : start + block]
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_DIRECT)
        os.preadv(descriptor, [part], 0)
    except OSError:
        descriptor = os.open(path, os.O_RDONLY)

    def read() -> None:
        at = 0
        while at < nbytes:
            at += os.preadv(descriptor, [part], at) or nbytes

    return read


@pytest.mark.parametrize("in_place", [False, True], ids=["bounced", "in-place"])
@pytest.mark.parametrize("threads", [1, 2])
def test_files_against_one_loop_of_reads(
    benchmark: BenchmarkFixture, tmp_path: Path, threads: int, in_place: bool
) -> None:
    """A cache of experts on disk uses two threads. The plain loop reads all into one buffer and copies nothing."""
    world = make(tmp_path / "shard", EXPERTS, EXPERT, EXPERTS, in_place=in_place, threads=threads)
    everything = np.arange(EXPERTS)
    with world.engine:
        plain, huge = (read_plainly(tmp_path / "shard", world.experts.nbytes, huge) for huge in (False, True))
        side_by_side(benchmark, world, lambda: world.prefetch(everything), plain, reads_into_huge_pages=huge)
        counters = world.engine.counters()
        report(benchmark, direct=counters["direct_reads"], buffered=counters["buffered_reads"])


@pytest.mark.parametrize("place", ["memory", "file"])
@pytest.mark.parametrize("nbytes", [48 << 10, EXPERT], ids=["48KiB", "3MiB"])
def test_one_expert_on_demand(benchmark: BenchmarkFixture, tmp_path: Path, nbytes: int, place: str) -> None:
    """submit and wait for one expert, the next one each time, against a plain copy (or read) of the same bytes."""
    experts = (96 << 20) // nbytes
    world = make(None if place == "memory" else tmp_path / "shard", experts, nbytes, 1)
    order = np.random.default_rng(1).permutation(experts)
    turn = iter(np.tile(order, 100))
    plain_turn = iter(np.tile(order, 100))
    ours, theirs, submits = [], [], []
    if place == "file":
        block = -(-nbytes // 4096) * 4096 + 4096
        buffer = mmap.mmap(-1, block)
        descriptor = os.open(tmp_path / "shard", os.O_RDONLY | getattr(os, "O_DIRECT", 0))

    def plain() -> None:
        expert = next(plain_turn)
        if place == "memory":
            theirs.append(seconds(lambda: np.copyto(world.slots[0], world.experts[expert])))
        else:
            at = (1000 + int(expert) * nbytes) // 4096 * 4096
            theirs.append(seconds(lambda: os.preadv(descriptor, [buffer], at)))

    def demand() -> None:
        began = time.perf_counter()
        job = world.submit(np.array([next(turn)]))
        submitted = time.perf_counter()
        world.engine.wait_any(*job, WAIT)
        ours.append(time.perf_counter() - began)
        submits.append(submitted - began)

    with world.engine:
        benchmark.pedantic(demand, setup=plain, rounds=min(experts, 400), warmup_rounds=5)
        assert (world.slots[0] == world.experts[order[(len(ours) - 1) % experts]]).all()
        ours_us, plain_us = np.median(ours) * 1e6, np.median(theirs) * 1e6
        report(
            benchmark,
            on_top_us=round(ours_us - plain_us, 1),
            submit_and_wait_us=round(ours_us, 1),
            plain_us=round(plain_us, 1),
            submit_us=round(np.median(submits) * 1e6, 1),
            helped=world.engine.counters()["helped"],
        )


@pytest.mark.parametrize("level", ["demand", "prefetch"])
def test_overhead_of_a_job(benchmark: BenchmarkFixture, level: str) -> None:
    """A thousand experts of one byte."""
    jobs = 1000
    world = make(None, jobs, 1, jobs)
    everything = np.arange(jobs)
    copy = world.fetch if level == "demand" else world.prefetch
    with world.engine:
        benchmark.pedantic(lambda: copy(everything), rounds=100, warmup_rounds=5)
    report(benchmark, us_per_job=round(benchmark.stats.stats.median / jobs * 1e6, 3))


@pytest.mark.parametrize("chunks", [1, 2, 4])
@pytest.mark.parametrize("chunk", [MiB // 4, MiB, 2 * MiB], ids=lambda chunk: f"{chunk >> 10}KiB")
def test_a_limited_link_reaches_its_rate(benchmark: BenchmarkFixture, chunk: int, chunks: int) -> None:
    """Chunks follow each other without a gap when the window holds more than the latency's worth of bytes."""
    rate = 1e9
    link = ThrottledLink(HostLink(), rate, latency_s=20e-6, jitter_s=20e-6)
    world = make(None, EXPERTS, EXPERT, EXPERTS, link=link, chunk_bytes=chunk, window_bytes=chunks * chunk)
    everything = np.arange(EXPERTS)
    with world.engine:
        benchmark.pedantic(lambda: world.fetch(everything), rounds=5, warmup_rounds=1)
        measured = world.engine.link_rate
    reached = world.experts.nbytes / benchmark.stats.stats.median
    report(benchmark, rate_of_limit=round(reached / rate, 3), measured_rate_of_limit=round(measured / rate, 3))


@pytest.mark.parametrize("queued", [1, 10, 100])
@pytest.mark.parametrize("design", ["chunks", "whole-experts", "published"])
def test_a_demand_behind_prefetches(benchmark: BenchmarkFixture, design: str, queued: int) -> None:
    """A limited link at 1 GB/s, prefetches of 8 MB, then a demand of 8 MB when the link is busy.

    ``chunks``: the engine as it is. ``whole-experts``: a chunk is an expert, and the demand is the next one.
    ``published``: that, and nothing overtakes what is queued.
    The demand's first byte starts when what was under way has landed: seen as the landing of its first chunk, less that
    chunk's own time. The window's time is the bound for that, the window's time and the expert's own for its last byte.
    """
    rate, nbytes = 1e9, 8_000_000
    chunk, window = (2 * MiB, 4 * MiB) if design == "chunks" else (nbytes, nbytes)
    experts = np.random.default_rng(0).integers(1, 256, (2, nbytes), dtype=np.uint8)
    targets = np.zeros((2, nbytes), np.uint8)
    # The prefetches all read the same bytes and land in the same target: what counts is the time on the link.
    sources = Sources(
        segment_start=np.arange(queued + 2),
        segment_file=np.full(queued + 1, -1, np.int32),
        segment_source=(experts.ctypes.data + nbytes * np.r_[np.zeros(queued, np.int64), 1]).astype(np.uint64),
        segment_nbytes=np.full(queued + 1, nbytes),
        segment_region=np.r_[np.zeros(queued, np.int32), np.int32(1)],
        segment_offset=np.zeros(queued + 1, np.int64),
    )
    complete = np.zeros(queued + 1, np.int32)
    engine = Engine(
        sources,
        targets.ctypes.data + nbytes * np.arange(2, dtype=np.uint64),
        np.zeros(2, np.int64),
        complete,
        link=ThrottledLink(HostLink(), rate, latency_s=10e-6),
        chunk_bytes=chunk,
        window_bytes=window,
        owner=(experts, targets),
    )
    numbers = np.arange(queued + 1)
    firsts, lasts = [], []
    generation = 0

    def behind() -> None:
        nonlocal generation
        generation += 1
        targets[1] = 0
        rows = np.stack([numbers, numbers, np.full(queued + 1, generation)], axis=1).astype(np.int32)
        priority = np.zeros(queued, np.float32)
        engine.submit(prefetch=rows[:-1], priority=priority)
        while not engine.counters()["bytes_prefetch"]:
            time.sleep(1e-4)
        began = time.perf_counter()
        if design == "published":
            engine.submit(prefetch=rows[-1:], priority=priority[:1])
        else:
            engine.submit(fetch=rows[-1:])
        while not targets[1, 0]:
            time.sleep(5e-5)
        firsts.append(time.perf_counter() - began)
        engine.wait_all(rows[-1:, 1].copy(), rows[-1:, 2].copy(), WAIT)
        lasts.append(time.perf_counter() - began)
        engine.submit(drop=np.ascontiguousarray(rows[:-1, 1:]))
        engine.drain(WAIT)
        engine.reset_counters()

    with engine:
        benchmark.pedantic(behind, rounds=3 if design == "published" and queued == 100 else 9)
    started, last = (np.array(firsts) - min(chunk, nbytes) / rate) * 1e3, np.array(lasts) * 1e3
    report(
        benchmark,
        start_ms=round(max(np.median(started), 0.0), 2),
        latest_start_ms=round(max(started.max(), 0.0), 2),
        window_ms=round(window / rate * 1e3, 2),
        last_byte_ms=round(np.median(last), 2),
        latest_last_byte_ms=round(last.max(), 2),
        window_and_own_ms=round((window + nbytes) / rate * 1e3, 2),
    )
