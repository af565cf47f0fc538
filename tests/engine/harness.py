"""A small world around an engine: sources with known bytes, regions to copy into, ways to ask for copies."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from fake_cuda import FakeCuda
from numpy.typing import NDArray

from moecache._engine import Engine, FaultyLink, FileLink, HostLink, Sources, ThrottledLink

WAIT = 20.0  # seconds nothing here should ever take
POISON = 0xEE
Part = tuple[int, int, bytes]  # region, offset in the slot's memory, bytes


def address_of(buffer: Any) -> int:
    return int(buffer.ctypes.data if isinstance(buffer, np.ndarray) else buffer.address)


def host_memory(slots: int, stride: int) -> NDArray[np.uint8]:
    return np.full((slots, stride), POISON, np.uint8)


@dataclass
class World:
    """Sources with known bytes, regions to copy into, an engine between them.

    ``options`` are the engine's; a callable ``link`` is given the world and makes one. ``allocate`` makes a region.
    """

    parts: list[list[Part]]
    strides: list[int]
    slots: int
    folder: Path | None = None
    files: int = 1
    gap: int = 0  # bytes between neighbouring segments in a file
    lead: int = 13  # bytes before the first segment in a file: nothing is aligned
    options: dict[str, Any] = field(default_factory=dict)
    allocate: Callable[[int, int], Any] = host_memory

    def __post_init__(self) -> None:
        self.regions = [self.allocate(self.slots, stride) for stride in self.strides]
        self.complete = np.zeros(self.slots, np.int32)
        self.generation = np.zeros(self.slots, np.int32)
        self.paths: list[Path] = []
        self.sources = self._sources()
        if callable(self.options.get("link")):
            self.options["link"] = self.options["link"](self)
        self.engine = self.make()

    def make(self) -> Engine:
        address = np.array([address_of(buffer) for buffer in self.regions], np.uint64)
        owner = (self.regions, self.memory)
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
        """Submit demand jobs (source, slot) as new generations; (slot, generation) of each."""
        rows = [(source, slot, self.give(slot)) for source, slot in pairs]
        self.engine.submit(fetch=np.array(rows, np.int32).reshape(-1, 3))
        return [(slot, generation) for _, slot, generation in rows]

    def prefetch(self, *rows: tuple[int, int, float]) -> list[tuple[int, int]]:
        made = [(source, slot, self.give(slot)) for source, slot, _ in rows]
        priority = np.array([row[2] for row in rows], np.float32)
        self.engine.submit(prefetch=np.array(made, np.int32), priority=priority)
        return [(slot, generation) for _, slot, generation in made]

    def raise_(self, source: int, job: tuple[int, int]) -> None:
        self.engine.submit(fetch=np.array([[source, *job]], np.int32))

    def drop(self, *jobs: tuple[int, int]) -> None:
        self.engine.submit(drop=np.array(jobs, np.int32))

    def wait_all(self, jobs: Sequence[tuple[int, int]], timeout: float = WAIT) -> None:
        self.engine.wait_all(*columns(jobs), timeout)

    def wait_any(self, jobs: Sequence[tuple[int, int]], timeout: float = WAIT) -> int:
        return self.engine.wait_any(*columns(jobs), timeout)

    def holds(self, slot: int, source: int) -> bool:
        return all(
            self.regions[region][slot, offset : offset + len(data)].tobytes() == data
            for region, offset, data in self.parts[source]
        )

    def untouched_between(self, slot: int, source: int) -> bool:
        """Bytes of the slot's regions that no segment covers are still what they were."""
        for region, buffer in enumerate(self.regions):
            mine = np.ones(buffer.shape[1], bool)
            for to, offset, data in self.parts[source]:
                if to == region:
                    mine[offset : offset + len(data)] = False
            if not (buffer[slot, mine] == POISON).all():
                return False
        return True


def step(world: World, chunks: int = 1) -> None:
    """Let stalled chunks land, one after the other."""
    for _ in range(chunks):
        before = sum(bytes_landed(world))
        world.options["link"].release(1)
        until(lambda: sum(bytes_landed(world)) > before)  # noqa: B023


def bytes_landed(world: World) -> tuple[int, int]:
    counters = world.engine.counters()
    return counters["bytes_demand"], counters["bytes_prefetch"]


def columns(jobs: Sequence[tuple[int, int]]) -> tuple[NDArray[np.int32], NDArray[np.int32]]:
    table = np.array(jobs, np.int32).reshape(-1, 2)
    return np.ascontiguousarray(table[:, 0]), np.ascontiguousarray(table[:, 1])


def equal_parts(sources: int, nbytes: int, seed: int = 0) -> list[list[Part]]:
    rng = np.random.default_rng(seed)
    return [[(0, 0, rng.bytes(nbytes))] for _ in range(sources)]


def simple(sources: int, nbytes: int, slots: int, **options: Any) -> World:
    folder = options.pop("folder", None)
    return World(equal_parts(sources, nbytes), [nbytes], slots, folder, options=options)


def settle(world: World) -> dict[str, int]:
    world.engine.drain(WAIT)
    return world.engine.counters()


def until(true: Callable[[], object]) -> None:
    """Return once it is, without a call of the engine's that helps."""
    end = time.monotonic() + WAIT
    while not true():
        assert time.monotonic() < end, "it never came"
        time.sleep(0.0001)


def held_back(world: World, chunks: int) -> None:
    """Return once the link has been given this many chunks."""
    until(lambda: world.options["link"].chunks >= chunks)


def order_of_completion(world: World, jobs: Sequence[tuple[int, int]]) -> list[int]:
    left = dict(enumerate(jobs))
    order = []
    while left:
        numbers = list(left)
        order.append(numbers[world.wait_any([left[number] for number in numbers])])
        del left[order[-1]]
    return order


BACKENDS = ("host", "file", "limited", "mock-cuda", "cuda")


class DeviceMemory:
    """A region on a CUDA device that is looked at and written like the arrays of the other back-ends."""

    def __init__(self, slots: int, stride: int) -> None:
        import torch

        self.tensor = torch.full((slots, stride), POISON, dtype=torch.uint8, device="cuda")
        torch.cuda.synchronize()
        self.shape = (slots, stride)

    @property
    def address(self) -> int:
        return self.tensor.data_ptr()

    def __getitem__(self, index: Any) -> NDArray[np.uint8]:
        return self.tensor.cpu().numpy()[index]

    def __setitem__(self, slot: int, value: int) -> None:
        import torch

        self.tensor[slot] = value
        torch.cuda.synchronize()


@dataclass
class Backend:
    """Makes worlds over one kind of link, each wrapped so that faults can be put in and chunks held back."""

    kind: str
    new_folder: Callable[[], Path]
    stack: ExitStack  # closes the engines, then what their links stood on

    @property
    def asynchronous(self) -> bool:
        return self.kind in ("limited", "mock-cuda", "cuda")

    def world(self, parts: list[list[Part]], strides: list[int], slots: int, **options: Any) -> World:
        """``faults`` are `FaultyLink`'s arguments, ``lead`` the world's, the other options the engine's."""
        faults, lead = options.pop("faults", {}), options.pop("lead", 13)
        folder = self.new_folder() if self.kind == "file" else None
        options["link"] = lambda world: FaultyLink(self._inner(world), **faults)
        allocate = DeviceMemory if self.kind == "cuda" else host_memory
        world = World(parts, strides, slots, folder, lead=lead, options=options, allocate=allocate)
        self.stack.callback(world.engine.close)
        return world

    def simple(self, sources: int, nbytes: int, slots: int, **options: Any) -> World:
        return self.world(equal_parts(sources, nbytes), [nbytes], slots, **options)

    def _inner(self, world: World) -> Any:
        if self.kind == "host":
            return HostLink()
        if self.kind == "file":
            return FileLink()
        if self.kind == "limited":
            return ThrottledLink(HostLink(), 4e9, latency_s=10e-6, jitter_s=10e-6, seed=1)
        import torch

        from moecache import cuda

        if self.kind == "mock-cuda":
            fake = FakeCuda()
            patches = pytest.MonkeyPatch()
            self.stack.callback(patches.undo)
            fake.install(patches)
        copies = cuda.copies_for(world.sources, torch.device("cuda", 0), world.slots)
        self.stack.callback(copies.close)
        return copies.link
