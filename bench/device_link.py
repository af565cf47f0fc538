"""The link to a device beside one plain copy of the same bytes, and copies under arithmetic."""

from __future__ import annotations

import statistics
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from device_results import MIB, WAIT, Results, median_of, seconds_of
from torch.nn.functional import linear

from moecache._engine import Engine, Sources


def plain_rate(device: torch.device, nbytes: int, rounds: int, locked: bool = True) -> float:
    """Bytes per second of one copy of host memory."""
    source = torch.ones(nbytes, dtype=torch.uint8, pin_memory=locked and device.type == "cuda")
    target = torch.empty(nbytes, dtype=torch.uint8, device=device)
    return nbytes / median_of(lambda: target.copy_(source, non_blocking=True), device, rounds)


def patterned(count: int, nbytes: int) -> torch.Tensor:
    """uint8 ``[count, nbytes]``, no two rows alike."""
    row = torch.randint(0, 256, (nbytes,), dtype=torch.uint8, generator=torch.Generator().manual_seed(0))
    return row[None] + torch.arange(count, dtype=torch.uint8)[:, None]


class Rig:
    """An engine from host memory, or a file, to as many slots on the device."""

    def __init__(
        self,
        device: torch.device,
        source: torch.Tensor,
        memory: str = "locked",
        *,
        path: Path | None = None,
        chunk_bytes: int = 2 * MIB,
        window_bytes: int = 4 * MIB,
    ) -> None:
        count, nbytes = source.shape
        self.device, self.count, self.nbytes = device, count, nbytes
        self.target = torch.zeros((count, nbytes), dtype=torch.uint8, device=device)
        self.generation = 0
        base = source.data_ptr() if path is None else 0
        sources = Sources(
            segment_start=np.arange(count + 1),
            segment_file=np.full(count, -1 if path is None else 0, np.int32),
            segment_source=(base + np.arange(count) * nbytes).astype(np.uint64),
            segment_nbytes=np.full(count, nbytes),
            segment_region=np.zeros(count, np.int32),
            segment_offset=np.zeros(count, np.int64),
            files=() if path is None else (str(path),),
        )
        self.copies = None
        if device.type == "cuda":
            from moecache.cuda import CudaCopies

            ranges = [(source.data_ptr(), source.numel())] if path is None else []
            limit = None if memory == "locked" else 0
            locks = {"driver": None}.get(memory, lambda runtime: runtime.lock(ranges, limit_nbytes=limit))
            self.copies = CudaCopies(device.index, count, lock=locks, files=path is not None)
        self.engine = Engine(
            sources,
            np.array([self.target.data_ptr()], np.uint64),
            np.array([nbytes]),
            np.zeros(count, np.int32),
            link=None if self.copies is None else self.copies.link,
            threads=2 if path is not None else 1,
            chunk_bytes=chunk_bytes,
            window_bytes=window_bytes,
            owner=(source, self.target),
        )

    def rows(self, experts: np.ndarray) -> np.ndarray:
        return np.stack([experts, experts, np.full(len(experts), self.generation)], axis=1).astype(np.int32)

    def prefetch(self, count: int | None = None) -> None:
        self.generation += 1
        rows = self.rows(np.arange(self.count if count is None else count))
        self.engine.submit(prefetch=rows, priority=np.zeros(len(rows), np.float32))

    def everything(self) -> None:
        """All experts as prefetches: the I/O thread alone."""
        self.prefetch()
        self.engine.drain(WAIT)

    def demand(self, expert: int) -> None:
        """Fetch one and let the device have it."""
        rows = self.rows(np.array([expert]))
        self.engine.submit(fetch=rows)
        self.engine.wait_all(rows[:, 1].copy(), rows[:, 2].copy(), WAIT)
        if self.copies is not None:
            self.copies.before_reading(rows[:, 1].copy())
            torch.cuda.current_stream(self.device).synchronize()

    def close(self) -> None:
        self.engine.drain(WAIT)
        self.engine.close()
        if self.copies is not None:
            self.copies.close()

    def __enter__(self) -> Rig:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()


def link(results: Results, device: torch.device, small: bool) -> None:
    rounds, count, nbytes = (3, 8, 1 * MIB) if small else (9, 32, 17_301_504)
    many = patterned(count + 1 if small else 101, nbytes)
    source = many[:count]
    whole = count * nbytes
    plain = plain_rate(device, min(whole, 256 * MIB), rounds)
    pageable = plain_rate(device, min(whole, 256 * MIB), rounds, locked=False)
    results.add(plain_GB_per_s=round(plain / 1e9, 2), plain_pageable_GB_per_s=round(pageable / 1e9, 2))

    def measure(rig: Rig, **row: Any) -> None:
        with rig:
            rate = whole / median_of(rig.everything, device, rounds)
            ok = torch.equal(rig.target.cpu(), source)
        results.row("rates", **row, GB_per_s=round(rate / 1e9, 2), over_plain=round(rate / plain, 3), exact=ok)

    for memory in ("locked", "staged", "driver") if device.type == "cuda" else ("locked",):
        measure(Rig(device, source, memory), memory=memory, chunk_MiB=2, window_MiB=4)
    for chunk in (0.5, 1, 4, 8):
        rig = Rig(device, source, chunk_bytes=int(chunk * MIB), window_bytes=int(2 * chunk * MIB))
        measure(rig, memory="locked", chunk_MiB=chunk, window_MiB=2 * chunk)
    for window in (2, 8, 16):
        measure(Rig(device, source, window_bytes=window * MIB), memory="locked", chunk_MiB=2, window_MiB=window)
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "experts"
        source.numpy().tofile(path)
        measure(Rig(device, source, path=path), memory="file", chunk_MiB=2, window_MiB=4)
    with Rig(device, many) as rig:
        rig.everything()
        last = rig.count - 1
        target = torch.empty(nbytes, dtype=torch.uint8, device=device)
        pinned = torch.empty(nbytes, dtype=torch.uint8, pin_memory=device.type == "cuda")
        alone = median_of(lambda: target.copy_(pinned, non_blocking=True), device, 30)

        def one() -> None:
            rig.generation += 1
            rig.demand(rig.generation % rig.count)

        results.add(one_expert_us=round(1e6 * median_of(one, device, 30), 1), one_plain_copy_us=round(1e6 * alone, 1))
        for queued in sorted({1, min(10, last), last}):
            times = []
            for _ in range(rounds):
                rig.prefetch(queued)
                times.append(seconds_of(lambda: rig.demand(last)))
                rig.engine.drain(WAIT)
            results.row("demand_behind", prefetches=queued, ms=round(1e3 * statistics.median(times), 3))


def overlap(results: Results, device: torch.device, small: bool) -> None:
    """Copies and arithmetic alone, then at once: what share of the shorter is hidden behind the longer."""
    count, nbytes, side, rounds = (8, 1 * MIB, 256, 3) if small else (64, 17_301_504, 8192, 5)
    source = patterned(count, nbytes)
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    square = torch.randn(side, side, device=device, dtype=dtype)
    column = torch.randn(1, side, device=device, dtype=dtype)
    with Rig(device, source) as rig:
        copying = median_of(rig.everything, device, rounds)
        for name, left in (("GEMM", square), ("GEMV", column)):
            once = median_of(lambda left=left: [linear(left, square) for _ in range(10)], device, rounds) / 10  # type: ignore[misc]
            times = max(1, round(copying / once))

            def compute(left: torch.Tensor = left, times: int = times) -> None:
                for _ in range(times):
                    linear(left, square)

            def both(compute: Callable[[], None] = compute) -> None:
                rig.prefetch()
                compute()
                rig.engine.drain(WAIT)

            computing = median_of(compute, device, rounds)
            together = median_of(both, device, rounds)
            hidden = (copying + computing - together) / min(copying, computing)
            results.row(
                "overlap",
                work=name,
                copies_ms=round(1e3 * copying, 2),
                work_ms=round(1e3 * computing, 2),
                both_ms=round(1e3 * together, 2),
                hidden=round(hidden, 3),
            )
