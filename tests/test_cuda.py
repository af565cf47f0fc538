"""What can be said about the CUDA side without a driver: the function table, the order of calls, page-locking.

No GPU is needed, and nothing here shows that one works.
"""

from __future__ import annotations

import ctypes
import errno
import types
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from moecache import cuda
from moecache._engine import CudaLink, Engine, Sources
from moecache.errors import RoutingError, TransferError

pytestmark = pytest.mark.timeout(60)

WAIT = 20.0
NOT_READY, INSUFFICIENT_DRIVER = 600, 35
STREAM = 0x5EED


class FakeRuntime:
    """The five functions as C callbacks: copies happen when an event is asked for the second time."""

    def __init__(self) -> None:
        self.calls: list[tuple[Any, ...]] = []
        self.pending: list[tuple[int, int, int]] = []
        self.asked: set[int] = set()
        self.answers: dict[str, int] = {}
        pointer, number = ctypes.c_void_p, ctypes.c_int
        self.functions = {
            "memcpy_async": ctypes.CFUNCTYPE(number, pointer, pointer, ctypes.c_size_t, number, pointer)(self.memcpy),
            "event_record": ctypes.CFUNCTYPE(number, pointer, pointer)(self.record),
            "event_query": ctypes.CFUNCTYPE(number, pointer)(self.query),
            "stream_wait_event": ctypes.CFUNCTYPE(number, pointer, pointer, ctypes.c_uint)(self.wait_event),
            "set_device": ctypes.CFUNCTYPE(number, number)(self.set_device),
        }

    def addresses(self) -> dict[str, int]:
        return {name: ctypes.cast(function, ctypes.c_void_p).value or 0 for name, function in self.functions.items()}

    def note(self, name: str, *arguments: int) -> int:
        self.calls.append((name, *arguments))
        return self.answers.get(name, 0)

    def memcpy(self, target: int, source: int, nbytes: int, kind: int, stream: int) -> int:
        self.pending.append((target, source, nbytes))
        return self.note("memcpy", target, source, nbytes, kind, stream)

    def record(self, event: int, stream: int | None) -> int:
        return self.note("record", event, stream or 0)

    def query(self, event: int) -> int:
        if "query" in self.answers:
            return self.answers["query"]
        if event not in self.asked:
            self.asked.add(event)
            return NOT_READY
        self.asked.discard(event)
        for target, source, nbytes in self.pending:
            ctypes.memmove(target, source, nbytes)
        self.pending.clear()
        return 0

    def wait_event(self, stream: int | None, event: int, flags: int) -> int:
        return self.note("wait", stream or 0, event)

    def set_device(self, device: int) -> int:
        return self.note("device", device)


def world(
    runtime: FakeRuntime, path: Path | None = None, seams_at: Sequence[int] = (), **options: Any
) -> tuple[Engine, NDArray[np.uint8], Any]:
    """Four sources of 10,001 bytes, three slots."""
    data = np.random.default_rng(0).integers(0, 256, (4, 10_001), dtype=np.uint8)
    room = np.zeros((3, 10_001), np.uint8)
    base = data.ctypes.data
    if path is not None:
        path.write_bytes(b"x" * 77 + data.tobytes())
        base = 77
    sources = Sources(
        segment_start=np.arange(5),
        segment_file=np.full(4, -1 if path is None else 0, np.int32),
        segment_source=(base + np.arange(4) * 10_001).astype(np.uint64),
        segment_nbytes=np.full(4, 10_001),
        segment_region=np.zeros(4, np.int32),
        segment_offset=np.zeros(4, np.int64),
        files=() if path is None else (str(path),),
    )
    link = CudaLink(
        **runtime.addresses(),
        device=3,
        stream=STREAM,
        events=np.arange(100, 104, dtype=np.uint64),
        seams=np.array([data.ctypes.data + seam for seam in seams_at], np.uint64),
        **options,
    )
    complete = np.zeros(3, np.int32)
    address = np.array([room.ctypes.data], np.uint64)
    engine = Engine(
        sources, address, np.array([10_001]), complete, link=link, chunk_bytes=4096, owner=(data, room, runtime)
    )
    return engine, data, (room, complete, link)


def fetch(engine: Engine, source: int, slot: int, generation: int) -> None:
    engine.submit(fetch=np.array([[source, slot, generation]], np.int32))
    engine.wait_all(np.array([slot], np.int32), np.array([generation], np.int32), WAIT)


def test_copies_wait_for_the_slots_reader_and_end_with_an_event() -> None:
    runtime = FakeRuntime()
    slot_event = np.array([0, 501, 502], np.uint64)
    engine, data, (room, complete, _) = world(runtime, slot_event=slot_event)
    with engine:
        fetch(engine, 2, 1, 1)
        fetch(engine, 3, 0, 1)
    assert (room[1] == data[2]).all()
    assert (room[0] == data[3]).all()
    assert complete.tolist() == [1, 1, 0]
    names = [call[0] for call in runtime.calls]
    assert names == ["device", "wait", *["memcpy", "record"] * 3, *["memcpy", "record"] * 3]
    assert runtime.calls[0] == ("device", 3)
    assert runtime.calls[1] == ("wait", STREAM, 501)
    assert all(call[4:] == (1, STREAM) for call in runtime.calls if call[0] == "memcpy")


def test_files_travel_through_the_staging_room(tmp_path: Path) -> None:
    runtime = FakeRuntime()
    store = np.zeros(4 * 16384 + 4096, np.uint8)
    staging = -(-store.ctypes.data // 4096) * 4096
    engine, data, (room, _, link) = world(runtime, tmp_path / "shard", staging=staging, staging_nbytes=4 * 16384)
    assert link.reads_files
    with engine:
        for source in range(4):
            fetch(engine, source, source % 3, 1 + source // 3)
            assert (room[source % 3] == data[source]).all()
        counters = engine.counters()
    sources = [call[2] for call in runtime.calls if call[0] == "memcpy"]
    assert all(staging <= source < staging + 4 * 16384 for source in sources)
    assert counters["direct_reads"] + counters["buffered_reads"] == len(sources)
    assert counters["bytes_demand"] == data.nbytes


def test_files_without_staging_room_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="cannot read files"):
        world(FakeRuntime(), tmp_path / "shard")


def test_no_copy_runs_across_a_seam() -> None:
    runtime = FakeRuntime()
    engine, data, (room, _, _) = world(runtime, seams_at=[-5, 1, 4096, 4100, 10_001, 15_000])
    with engine:
        fetch(engine, 0, 0, 1)
        fetch(engine, 1, 2, 1)
    assert (room[0] == data[0]).all()
    assert (room[2] == data[1]).all()
    lengths = [call[3] for call in runtime.calls if call[0] == "memcpy"]
    assert lengths == [1, 4095, 4, 4092, 1809, 4096, 903, 3193, 1809]


@pytest.mark.parametrize("function", ["memcpy", "record", "query", "wait"])
def test_an_error_code_reaches_the_waiter(function: str) -> None:
    runtime = FakeRuntime()
    engine, data, (room, _, _) = world(runtime, slot_event=np.array([9, 9, 9], np.uint64))
    with engine:
        runtime.answers[function] = 700
        with pytest.raises(TransferError, match="CUDA error 700") as caught:
            fetch(engine, 0, 0, 1)
        assert caught.value.__cause__.errno == errno.EIO
        runtime.answers.clear()
        runtime.pending.clear()
        fetch(engine, 1, 0, 2)
        assert (room[0] == data[1]).all()


def test_readers_on_two_streams_are_both_waited_for() -> None:
    runtime = FakeRuntime()
    engine, _, (_, _, link) = world(runtime, slot_event=np.array([500, 501, 502], np.uint64))
    engine.close()
    runtime.calls.clear()
    link.mark_readers(np.array([0, 2], np.int32), 0)
    link.mark_readers(np.array([2], np.int32), 0)
    link.mark_readers(np.array([2], np.int32), 8)
    expected = [("record", 500, 0), ("record", 502, 0), ("record", 502, 0), ("wait", 8, 502), ("record", 502, 8)]
    assert runtime.calls == expected
    with pytest.raises(RoutingError, match="slot 3"):
        link.mark_readers(np.array([3], np.int32), 0)
    runtime.answers["record"] = 709
    with pytest.raises(OSError, match="CUDA error 709"):
        link.mark_readers(np.array([0], np.int32), 0)


# ---- cuda-python


def bindings() -> types.ModuleType:
    module: types.ModuleType = pytest.importorskip(
        "cuda.bindings.cyruntime", reason="cuda-bindings is not installed (pip install cuda-bindings)"
    )
    return module


def test_the_table_is_filled_from_cuda_python_and_can_be_called() -> None:
    bindings()
    addresses = cuda.function_addresses()
    assert set(addresses) == {"memcpy_async", "event_record", "event_query", "stream_wait_event", "set_device"}
    assert all(addresses.values())
    code = ctypes.CFUNCTYPE(ctypes.c_int, ctypes.c_int)(addresses["set_device"])(0)
    if code == 0:
        pytest.skip("there is a driver here")
    runtime = FakeRuntime()
    runtime.addresses = lambda: addresses  # type: ignore[method-assign]
    engine, _, _ = world(runtime)
    with pytest.raises(TransferError, match=f"CUDA error {code}") as caught:
        fetch(engine, 0, 0, 1)
    assert f"CUDA error {code}" in str(caught.value.__cause__)
    engine.close()


def test_no_driver_is_one_clear_error() -> None:
    bindings()
    runtime = pytest.importorskip("cuda.bindings.runtime")
    if runtime.cudaGetDeviceCount()[0] == 0:
        pytest.skip("there is a driver here")
    with pytest.raises(TransferError, match="cudaSetDevice"):
        cuda.CudaCopies(0, 4)


def test_a_function_of_another_signature_is_refused() -> None:
    capi = dict(bindings().__pyx_capi__)
    capi["cudaEventQuery"] = capi["cudaEventRecord"]
    with pytest.raises(ImportError, match="cudaEventQuery"):
        cuda.function_addresses(types.SimpleNamespace(__pyx_capi__=capi, __name__="stub"))  # type: ignore[arg-type]
    del capi["cudaEventQuery"]
    with pytest.raises(ImportError, match="cudaEventQuery is None"):
        cuda.function_addresses(types.SimpleNamespace(__pyx_capi__=capi, __name__="stub"))  # type: ignore[arg-type]


def test_without_cuda_python_the_error_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(__import__("sys").modules, "cuda.bindings.cyruntime", None)
    with pytest.raises(ImportError, match=r"moecache\[cuda13\]"):
        cuda.function_addresses()


# ---- page-locking


class FakeLocker:
    """Registers up to a number of bytes, like a system with a limit."""

    def __init__(self, limit: int = 1 << 60, raise_at: int = -1) -> None:
        self.limit, self.raise_at = limit, raise_at
        self.held: dict[int, int] = {}
        self.cleared = 0
        self.seen = 0

    def register(self, address: int, nbytes: int) -> int:
        self.seen += 1
        if self.seen == self.raise_at:
            raise KeyboardInterrupt
        assert address % 4096 == nbytes % 4096 == 0
        assert not any(start < address + nbytes and address < start + size for start, size in self.held.items())
        if sum(self.held.values()) + nbytes > self.limit:
            return 2
        self.held[address] = nbytes
        return 0

    def unregister(self, address: int) -> int:
        del self.held[address]
        return 0

    def clear(self) -> None:
        self.cleared += 1

    def lock(self, *ranges: tuple[int, int], **options: Any) -> cuda.PageLock:
        return cuda.PageLock(ranges, self.register, self.unregister, self.clear, **options)


def test_memory_is_locked_in_pieces_and_each_page_once() -> None:
    locker = FakeLocker()
    lock = locker.lock((40_000, 30), (4096 * 20 + 7, 50_000), (36_864, 4000), (0, 0), piece_nbytes=16_384)
    assert locker.held == {36_864: 4096, 81_920: 16_384, 98_304: 16_384, 114_688: 16_384, 131_072: 4096}
    assert lock.seams.tolist() == [36_864, 40_960, 81_920, 98_304, 114_688, 131_072, 135_168]
    assert (lock.locked_nbytes, lock.pageable_nbytes) == (57_344, 0)
    lock.close()
    lock.close()
    assert not locker.held


def test_what_the_system_refuses_stays_pageable_and_is_said_once(caplog: pytest.LogCaptureFixture) -> None:
    locker = FakeLocker(limit=100_000)
    lock = locker.lock((0, 4096 * 100), (4096 * 500, 4096), piece_nbytes=40_960)
    assert (lock.locked_nbytes, lock.pageable_nbytes) == (81_920, 4096 * 101 - 81_920)
    assert locker.cleared == 1
    assert len(caplog.records) == 1
    assert "refused the rest" in caplog.text
    lock.close()
    assert not locker.held


def test_an_exception_while_locking_unlocks_everything() -> None:
    locker = FakeLocker(raise_at=3)
    with pytest.raises(KeyboardInterrupt):
        locker.lock((0, 4096 * 100), piece_nbytes=4096)
    assert not locker.held


def test_the_environment_limits_what_is_locked(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    locker = FakeLocker()
    assert locker.lock((0, 40_960), piece_nbytes=4096, limit_nbytes=9000).locked_nbytes == 8192
    monkeypatch.setenv("MOECACHE_PAGE_LOCK", "0")
    assert locker.lock((0, 40_960), piece_nbytes=4096).locked_nbytes == 0
    assert not caplog.records


def test_memory_someone_else_locked_is_used_and_left_to_them() -> None:
    unlocked: list[int] = []
    lock = cuda.PageLock(
        [(0, 8192)], lambda *_: cuda.ERROR_ALREADY_REGISTERED, lambda a: unlocked.append(a) or 0, lambda: None
    )
    assert lock.locked_nbytes == 8192
    lock.close()
    assert not unlocked


def test_a_driver_that_is_gone_is_no_error_when_unlocking(caplog: pytest.LogCaptureFixture) -> None:
    lock = cuda.PageLock([(0, 8192)], lambda *_: 0, lambda _: cuda.ERROR_UNLOADING, lambda: None)
    lock.close()
    assert not caplog.records
    lock = cuda.PageLock([(0, 8192)], lambda *_: 0, lambda _: 1, lambda: None)
    lock.close()
    assert "could not be unlocked" in caplog.text
