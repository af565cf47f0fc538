"""An engine over the mock CUDA runtime: eight experts, a few slots, and ways to ask for copies."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from moecache import cuda
from moecache._engine import Engine, Sources
from moecache.page_lock import PageLock, lock_pages

WAIT = 20.0
NBYTES = 10_001
DEVICE = 1


@dataclass
class World:
    """Eight experts, three slots."""

    engine: Engine
    copies: cuda.CudaCopies
    data: NDArray[np.uint8]
    target: NDArray[np.uint8]
    complete: NDArray[np.int32]

    def fetch(self, source: int, slot: int, generation: int) -> None:
        self.engine.submit(fetch=np.array([[source, slot, generation]], np.int32))
        self.engine.wait_all(one(slot), one(generation), WAIT)

    def close(self) -> None:
        self.engine.close()
        self.copies.close()


def one(number: int) -> NDArray[np.int32]:
    return np.array([number], np.int32)


def world(path: Path | None = None, *, slots: int = 3, lock: bool = True, **options: Any) -> World:
    data = np.random.default_rng(0).integers(0, 256, (8, NBYTES), dtype=np.uint8)
    target = np.full((slots, NBYTES), 0xEE, np.uint8)
    base = data.ctypes.data
    if path is not None:
        path.write_bytes(b"x" * 77 + data.tobytes())
        base = 77
    sources = Sources(
        segment_start=np.arange(9),
        segment_file=np.full(8, -1 if path is None else 0, np.int32),
        segment_source=(base + np.arange(8) * NBYTES).astype(np.uint64),
        segment_nbytes=np.full(8, NBYTES),
        segment_region=np.zeros(8, np.int32),
        segment_offset=np.zeros(8, np.int64),
        files=() if path is None else (str(path),),
    )
    ranges = [(data.ctypes.data, data.nbytes)] if path is None and lock else []

    def locker(runtime: Any) -> PageLock:
        made = lock_pages(runtime, ranges, **options)
        if path is None and not lock:
            made.pageable_nbytes = data.nbytes
        return made

    copies = cuda.CudaCopies(DEVICE, slots, lock=locker, files=path is not None)
    complete = np.zeros(slots, np.int32)
    address = np.array([target.ctypes.data], np.uint64)
    engine = Engine(
        sources, address, np.array([NBYTES]), complete, link=copies.link, chunk_bytes=4096, owner=(data, target)
    )
    return World(engine, copies, data, target, complete)
