"""The engine against one plain copy of the same bytes, and what one expert costs on demand.

    pytest bench/bench_link.py

Rates are shown side by side and nothing is asserted about time. Both sides of a ratio are measured in turn, in the same
run, and the ratio is the median over pairs of neighbouring rounds, which on a busy machine is steadier than that of two
medians.
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

EXPERT = 3 << 20
EXPERTS = 32
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

    def submit(self, experts: NDArray[np.int64]) -> tuple[NDArray[np.int32], NDArray[np.int32]]:
        """Demand these experts into slots 0, 1, ...; what to wait for."""
        self.generation += 1
        rows = np.empty((len(experts), 3), np.int32)
        rows[:, 0] = experts
        rows[:, 1] = np.arange(len(experts))
        rows[:, 2] = self.generation
        self.engine.submit(fetch=rows)
        return np.ascontiguousarray(rows[:, 1]), np.ascontiguousarray(rows[:, 2])

    def fetch(self, experts: NDArray[np.int64]) -> None:
        self.engine.wait_all(*self.submit(experts), WAIT)


def make(path: Path | None, experts: int, nbytes: int, slots: int, **options: object) -> World:
    data = np.random.default_rng(0).integers(0, 256, (experts, nbytes), dtype=np.uint8)
    room = np.zeros((slots, nbytes), np.uint8)
    base = data.ctypes.data
    if path is not None:
        base = 1000  # like a safetensors header: no expert begins on a block
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
    address = np.array([room.ctypes.data], np.uint64)
    engine = Engine(sources, address, np.array([nbytes]), complete, owner=(data, room), **options)  # type: ignore[arg-type]
    return World(engine, data, room, path)


def seconds(call: Callable[[], object]) -> float:
    began = time.perf_counter()
    call()
    return time.perf_counter() - began


def side_by_side(
    benchmark: BenchmarkFixture, world: World, engine: Callable[[], object], plain: Callable[[], object]
) -> None:
    """Benchmark the first; time the second between its rounds."""
    nbytes = world.experts.nbytes
    ours, theirs = [], []

    def turn() -> None:
        ours.append(seconds(engine))

    def between() -> None:
        theirs.append(seconds(plain))

    for _ in range(2):
        plain()
        engine()
    world.engine.reset_counters()
    benchmark.pedantic(turn, setup=between, rounds=ROUNDS)
    copying = world.engine.counters()["busy_ns"] / 1e9 / sum(ours)
    plain_s, engine_s = np.array(theirs), np.array(ours[: len(theirs)])
    rates = nbytes / np.median(engine_s) / 1e9, nbytes / np.median(plain_s) / 1e9
    ratio = np.median(plain_s / engine_s)
    benchmark.extra_info.update(
        GB_per_s=round(rates[0], 2),
        plain_GB_per_s=round(rates[1], 2),
        rate_of_plain=round(ratio, 3),
        time_spent_copying=round(copying, 3),
    )
    print(
        f"\n{benchmark.name}: {rates[0]:.2f} GB/s, plain {rates[1]:.2f} GB/s, {ratio:.1%}, {copying:.0%} of the time in copies",
        end="",
    )


def test_memory_against_one_copy(benchmark: BenchmarkFixture) -> None:
    """The I/O thread alone: prefetches, which no waiting caller helps with."""
    world = make(None, EXPERTS, EXPERT, EXPERTS)
    everything = np.arange(EXPERTS)

    def engine() -> None:
        world.generation += 1
        rows = np.stack([everything, everything, np.full(EXPERTS, world.generation)], axis=1).astype(np.int32)
        world.engine.submit(prefetch=rows, priority=np.zeros(EXPERTS, np.float32))
        world.engine.drain(WAIT)

    with world.engine:
        side_by_side(benchmark, world, engine, lambda: np.copyto(world.slots, world.experts))


def test_memory_with_a_helping_caller(benchmark: BenchmarkFixture) -> None:
    world = make(None, EXPERTS, EXPERT, EXPERTS)
    everything = np.arange(EXPERTS)
    with world.engine:
        side_by_side(
            benchmark,
            world,
            lambda: world.fetch(everything),
            lambda: np.copyto(world.slots, world.experts),
        )


def read_plainly(path: Path, nbytes: int, block: int = 2 << 20) -> Callable[[], None]:
    """A loop of aligned direct reads over the whole file into one buffer, and no copy out of it."""
    buffer = mmap.mmap(-1, block)
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_DIRECT)
        os.preadv(descriptor, [buffer], 0)
    except OSError:
        descriptor = os.open(path, os.O_RDONLY)

    def read() -> None:
        at = 0
        while at < nbytes:
            at += os.preadv(descriptor, [buffer], at) or nbytes

    return read


@pytest.mark.parametrize("threads", [1, 2])
def test_files_against_one_loop_of_reads(benchmark: BenchmarkFixture, tmp_path: Path, threads: int) -> None:
    world = make(tmp_path / "shard", EXPERTS, EXPERT, EXPERTS, threads=threads)
    everything = np.arange(EXPERTS)

    def engine() -> None:
        world.generation += 1
        rows = np.stack([everything, everything, np.full(EXPERTS, world.generation)], axis=1).astype(np.int32)
        world.engine.submit(prefetch=rows, priority=np.zeros(EXPERTS, np.float32))
        world.engine.drain(WAIT)

    with world.engine:
        side_by_side(benchmark, world, engine, read_plainly(tmp_path / "shard", world.experts.nbytes))
        counters = world.engine.counters()
        benchmark.extra_info.update(direct=counters["direct_reads"], buffered=counters["buffered_reads"])


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
        tenancy = world.submit(np.array([next(turn)]))
        submitted = time.perf_counter()
        world.engine.wait_any(*tenancy, WAIT)
        ours.append(time.perf_counter() - began)
        submits.append(submitted - began)

    with world.engine:
        benchmark.pedantic(demand, setup=plain, rounds=min(experts, 400), warmup_rounds=5)
        assert (world.slots[0] == world.experts[order[(len(ours) - 1) % experts]]).all()
        ours_us, plain_us = np.median(ours) * 1e6, np.median(theirs) * 1e6
        benchmark.extra_info.update(
            submit_and_wait_us=round(ours_us, 1),
            plain_us=round(plain_us, 1),
            on_top_us=round(ours_us - plain_us, 1),
            helped=world.engine.counters()["helped"],
        )
    print(f"\n{benchmark.name}: {ours_us:.1f} us, plain {plain_us:.1f} us, on top {ours_us - plain_us:.1f} us")


def test_a_limited_link_reaches_its_rate(benchmark: BenchmarkFixture) -> None:
    """Chunks follow each other without a gap when the window holds more than the latency's worth of bytes."""
    rate = 5e8
    world = make(None, EXPERTS, EXPERT, EXPERTS, link=ThrottledLink(HostLink(), rate, 20e-6))
    everything = np.arange(EXPERTS)
    with world.engine:
        benchmark.pedantic(lambda: world.fetch(everything), rounds=5, warmup_rounds=1)
    reached = world.experts.nbytes / benchmark.stats.stats.median
    benchmark.extra_info["rate_of_limit"] = round(reached / rate, 3)
    print(f"\n{benchmark.name}: {reached / 1e9:.3f} of {rate / 1e9:.1f} GB/s, {reached / rate:.1%}")
