"""The CUDA link and what is around it, over the mock CUDA runtime, whose streams run late and beside the caller.

No GPU is needed, and nothing here shows that one works.
"""

from __future__ import annotations

import contextlib
import gc
import re
import threading
import types
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from fake_cuda import NOTHING, FakeCuda, installed, reference_sum
from numpy.typing import NDArray

from moecache import cuda
from moecache._engine import CudaLink, Engine, Sources
from moecache.cuda_runtime import SIGNATURES, function_addresses
from moecache.errors import CapacityError, CaptureError, ClosedError, RoutingError, TransferError
from moecache.page_lock import PageLock, lock_pages

pytestmark = pytest.mark.timeout(60)

WAIT = 20.0
NBYTES = 10_001
DEVICE = 1


@pytest.fixture
def fake(monkeypatch: pytest.MonkeyPatch) -> Iterator[FakeCuda]:
    with installed(monkeypatch) as fake:
        yield fake


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


# ---- bytes


@pytest.mark.parametrize("memory", ["locked", "pieces", "partly", "pageable"])
def test_bytes_arrive_whatever_of_the_memory_is_locked(fake: FakeCuda, memory: str) -> None:
    options = {
        "locked": {},
        "pieces": {"piece_nbytes": 4096},
        "partly": {"piece_nbytes": 4096, "limit_nbytes": 5 * 4096},
        "pageable": {"lock": False},
    }[memory]
    before = fake.counts()
    here = world(**options)  # type: ignore[arg-type]
    fake.delay(300)
    for source in range(8):
        here.fetch(source, source % 3, 1 + source // 3)
        here.engine.drain(WAIT)
        assert (here.target[source % 3] == here.data[source]).all()
    counts = fake.counts()
    # What is not locked goes through the staging buffer, which is.
    assert counts["pageable"] == before["pageable"]
    assert (here.copies.staging_nbytes > 0) == (memory in ("partly", "pageable"))
    here.close()
    assert fake.held() == NOTHING
    assert fake.counts()["violations"] == before["violations"]


@pytest.mark.failure("26")
def test_without_any_locked_memory_the_driver_copies(fake: FakeCuda) -> None:
    fake.fail("host_alloc", 2)
    before = fake.counts()["pageable"]
    here = world(lock=False)
    here.fetch(5, 0, 1)
    here.engine.drain(WAIT)
    assert (here.target[0] == here.data[5]).all()
    assert fake.counts()["pageable"] > before
    here.close()


@pytest.mark.failure("22")
def test_memory_that_somebody_else_unlocked_is_staged(fake: FakeCuda) -> None:
    here = world(piece_nbytes=4096, limit_nbytes=5 * 4096)
    # As after the end of another owner: the link still takes for one registration what is now two, with a gap.
    start = int(here.copies.lock.locked[1, 0])  # type: ignore[union-attr]
    fake.runtime.cudaHostUnregister(start)
    fake.runtime.cudaHostRegister(start, 4096, 1)
    for source in range(3):
        here.fetch(source, source, 1)
    here.engine.drain(WAIT)
    assert (here.target == here.data[:3]).all()
    here.close()
    assert fake.held() == NOTHING


@pytest.mark.parametrize("locked", [True, False])
def test_files_travel_through_the_staging_buffer(
    fake: FakeCuda, tmp_path: Path, caplog: pytest.LogCaptureFixture, locked: bool
) -> None:
    if not locked:
        fake.fail("host_alloc", 2)
    here = world(tmp_path / "shard")
    fake.delay(300)
    assert here.copies.link.reads_files
    for source in range(8):
        here.fetch(source, source % 3, 1 + source // 3)
        here.engine.drain(WAIT)
        assert (here.target[source % 3] == here.data[source]).all()
    counters = here.engine.counters()
    assert counters["direct_reads"] + counters["buffered_reads"] >= 8 * 3
    assert counters["bytes_demand"] == here.data.nbytes
    assert ("no page-locked memory for reading files" in caplog.text) == (not locked)
    here.close()
    assert fake.held() == NOTHING


def test_files_without_staging_room_are_refused(fake: FakeCuda, tmp_path: Path) -> None:
    copies = cuda.CudaCopies(DEVICE, 3)
    (tmp_path / "shard").write_bytes(bytes(100))
    sources = Sources(
        *(np.array(column) for column in ([0, 1], [0], [0], [100], [0], [0])), files=(tmp_path / "shard",)
    )  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="cannot read files"):
        Engine(sources, np.zeros(1, np.uint64), np.array([100]), np.zeros(3, np.int32), link=copies.link)
    copies.close()


# ---- order


@pytest.mark.failure("23")
def test_the_reader_waits_on_its_stream_and_not_on_the_host(fake: FakeCuda) -> None:
    here = world()
    fake.gate(True)
    compute = fake.stream()
    here.fetch(2, 1, 1)  # returns: all bytes have been given to the copy stream, none has arrived
    assert here.complete[1] == 1
    assert here.copies.link.is_fresh(1)
    too_early = fake.sum(compute, here.target[1])
    fake.synchronize(compute)
    assert here.copies.link.before_reading(one(1), compute) == 1
    found = fake.sum(compute, here.target[1])
    fake.gate(False)
    fake.synchronize(compute)
    assert found[0] == reference_sum(here.data[2])
    assert too_early[0] == reference_sum(np.full(NBYTES, 0xEE, np.uint8))
    here.engine.drain(WAIT)
    assert not here.copies.link.is_fresh(1)
    assert here.copies.link.before_reading(one(1), compute) == 0
    fake.runtime.cudaStreamDestroy(compute)
    here.close()


@pytest.mark.failure("6")
def test_no_copy_starts_before_the_slots_readers_are_done(fake: FakeCuda) -> None:
    here = world()
    streams = [fake.stream(), fake.stream()]
    here.fetch(0, 0, 1)
    here.engine.drain(WAIT)
    sums = []
    for stream in streams:
        fake.gate(True, stream)
        sums.append(fake.sum(stream, here.target[0]))
        here.copies.link.mark_readers(np.array([0], np.int32), stream)
    here.fetch(1, 0, 2)
    here.fetch(3, 1, 1)  # another slot's copy waits behind it: one stream
    fake.gate(False, streams[1])
    with pytest.raises(TransferError, match="not complete"):
        here.engine.drain(0.05)
    assert (here.target[0] == here.data[0]).all()
    fake.gate(False, streams[0])
    here.engine.drain(WAIT)
    assert (here.target[0] == here.data[1]).all()
    assert (here.target[1] == here.data[3]).all()
    for stream, found in zip(streams, sums, strict=True):
        fake.synchronize(stream)
        assert found[0] == reference_sum(here.data[0])
        fake.runtime.cudaStreamDestroy(stream)
    here.close()


@pytest.mark.failure("25")
def test_memory_is_not_written_before_its_former_users_are_done(
    fake: FakeCuda, monkeypatch: pytest.MonkeyPatch
) -> None:
    stream = fake.stream()
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: types.SimpleNamespace(cuda_stream=stream))
    fake.gate(True, stream)
    here = world()
    here.fetch(1, 0, 1)
    with pytest.raises(TransferError, match="not complete"):
        here.engine.drain(0.05)
    assert (here.target[0] == 0xEE).all()
    fake.gate(False)
    here.engine.drain(WAIT)
    assert (here.target[0] == here.data[1]).all()
    here.close()
    fake.runtime.cudaStreamDestroy(stream)


@pytest.mark.parametrize("seed", range(3))
def test_thousands_of_copies_and_kernels_in_random_order(fake: FakeCuda, seed: int) -> None:
    here = world(slots=4, piece_nbytes=8192)
    streams = [fake.stream(), fake.stream()]
    fake.delay(40)
    expected = [reference_sum(row) for row in here.data]
    random = np.random.default_rng(seed)
    generation = np.zeros(4, int)
    seen = []
    for _ in range(700):
        slots = random.permutation(4)[: random.integers(1, 4)].astype(np.int32)
        sources = random.integers(0, 8, len(slots))
        generation[slots] += 1
        rows = np.stack([sources, slots, generation[slots]], axis=1).astype(np.int32)
        here.engine.submit(fetch=rows)
        stream = streams[random.integers(2)]
        for _, slot, number in rows.tolist():
            here.engine.wait_any(one(slot), one(number), WAIT)
            here.copies.link.before_reading(one(slot), stream)
        kernels = [(fake.sum(stream, here.target[slot]), source) for source, slot, _ in rows.tolist()]
        here.copies.link.mark_readers(slots, stream)
        seen += kernels
    for stream in streams:
        fake.synchronize(stream)
    assert [int(found[0]) for found, _ in seen] == [expected[source] for _, source in seen]
    here.close()
    for stream in streams:
        fake.runtime.cudaStreamDestroy(stream)
    assert fake.held() == NOTHING


def test_slots_that_do_not_exist_are_refused(fake: FakeCuda) -> None:
    with cuda.CudaCopies(DEVICE, 3) as copies:
        for call in (copies.link.mark_readers, copies.link.before_reading):
            with pytest.raises(RoutingError, match="slot 3"):
                call(np.array([0, 3], np.int32), 0)  # type: ignore[operator]
        assert not copies.link.is_fresh(3)


def test_torchs_default_stream_is_named_as_the_one_of_all_threads(fake: FakeCuda) -> None:
    streams: list[int] = []
    with cuda.CudaCopies(DEVICE, 3) as copies:
        link = copies.link
        copies.link = types.SimpleNamespace(mark_readers=lambda slots, stream: streams.append(stream), in_use=False)  # type: ignore[assignment]
        copies.mark_readers(np.arange(6, dtype=np.int32)[::2])
        copies.link = link
    assert streams == [cuda.STREAM_LEGACY]


# ---- errors


@pytest.mark.parametrize("function", ["memcpy_async", "event_record", "event_query", "stream_wait_event"])
def test_an_error_code_reaches_the_waiter(fake: FakeCuda, function: str) -> None:
    here = world()
    fake.fail(function, 801)

    def twice() -> None:
        for _ in range(2):  # an error of an event is seen after the wait: then the next fetch says so
            here.fetch(0, 0, 1)
            here.engine.drain(WAIT)

    with pytest.raises(TransferError, match=r"CUDA error 801 \(not supported\)") as caught:
        twice()
    assert isinstance(caught.value.__cause__, OSError)
    fake.fail(function, 0)
    here.fetch(1, 0, 2)
    here.engine.drain(WAIT)
    assert (here.target[0] == here.data[1]).all()
    here.close()
    assert fake.held() == NOTHING


@pytest.mark.parametrize("function", ["set_device", "exchange_capture_mode"])
def test_a_thread_that_cannot_begin_is_an_error_and_no_hang(fake: FakeCuda, function: str) -> None:
    fake.fail(function, 46, 1 if function == "set_device" else 0)  # the caller sets it once
    here = world()
    with pytest.raises(TransferError, match="CUDA error 46"):
        here.fetch(0, 0, 1)
    here.close()
    assert fake.held() == NOTHING


@pytest.mark.failure("86")
def test_after_a_sticky_error_everything_says_so_and_closing_is_quiet(
    fake: FakeCuda, caplog: pytest.LogCaptureFixture
) -> None:
    here = world()
    fake.c.fake_sticky(700)
    with pytest.raises(TransferError, match=r"illegal address.*can use the device no more"):
        here.fetch(0, 0, 1)
    with pytest.raises(OSError, match="illegal address"):
        here.copies.mark_readers(np.array([0], np.int32))
    here.close()
    assert [record.message for record in caplog.records if "unlocked" in record.message]
    fake.c.fake_sticky(0)
    for start in here.copies.lock.locked[:, 0].tolist():  # type: ignore[union-attr]
        fake.runtime.cudaHostUnregister(start)  # what the driver does at exit
    assert fake.held() == NOTHING


@pytest.mark.failure("101")
@pytest.mark.parametrize(
    ("function", "after"),
    [("set_device", 0), ("stream_create", 0), ("event_create", 0), ("event_create", 7), ("event_record", 2)],
)
def test_what_cannot_be_made_leaves_nothing_behind(fake: FakeCuda, function: str, after: int) -> None:
    fake.fail(function, 2, after)
    with pytest.raises(OSError, match=r"cudaErrorMemoryAllocation \(2\)|CUDA error 2 \(out of memory\)"):
        world()
    gc.collect()
    assert fake.held() == NOTHING
    assert fake.c.fake_current_device() == 0


def test_an_exception_while_locking_gives_everything_back(fake: FakeCuda) -> None:
    def lock(runtime: Any) -> PageLock:
        lock_pages(runtime, [(4096 * 100, 4096)])
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        cuda.CudaCopies(DEVICE, 3, lock=lock)
    gc.collect()
    held = fake.held()
    fake.runtime.cudaHostUnregister(4096 * 100)
    assert held == {**NOTHING, "registrations": 1}  # the lock made inside was the caller's


# ---- devices, lifetime, capture


@pytest.mark.failure("102")
def test_the_current_device_is_what_it_was_after_every_call(fake: FakeCuda) -> None:
    here = world()
    assert fake.c.fake_current_device() == 0
    here.fetch(0, 0, 1)
    here.copies.mark_readers(np.array([0], np.int32))
    here.close()
    assert fake.c.fake_current_device() == 0


@pytest.mark.failure("103")
def test_a_device_is_numbered_once_and_refused_when_it_is_not_there(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 1)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "4,7")
    assert cuda.numbered("cuda") == torch.device("cuda:1")
    assert cuda.numbered("cuda:0") == torch.device("cuda:0")
    assert cuda.numbered("cpu") == torch.device("cpu")
    with pytest.raises(CapacityError, match=r"cuda:2: .* sees 2 CUDA devices \(CUDA_VISIBLE_DEVICES=4,7\)"):
        cuda.numbered("cuda:2")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(CapacityError, match="sees 0 CUDA devices"):
        cuda.numbered("cuda")


def test_the_engine_is_closed_first_and_closing_twice_does_nothing(fake: FakeCuda) -> None:
    here = world()
    with pytest.raises(ClosedError, match="engine"):
        here.copies.close()
    here.fetch(0, 0, 1)
    here.close()
    here.close()
    assert fake.held() == NOTHING


@pytest.mark.failure("94")
@pytest.mark.parametrize("cycle", [False, True])
def test_what_nobody_closed_is_given_back_when_nobody_uses_it(fake: FakeCuda, cycle: bool) -> None:
    here = world()
    fake.delay(2000)
    before = fake.counts()["violations"]
    here.engine.submit(fetch=np.array([[source, source, 1] for source in range(3)], np.int32))
    if cycle:
        here.cycle = [here]  # type: ignore[attr-defined]
    del here
    gc.collect()
    assert fake.held() == NOTHING
    assert fake.counts()["violations"] == before


@pytest.mark.failure("32")
def test_copies_go_on_while_another_thread_captures_a_graph(fake: FakeCuda) -> None:
    fake.c.fake_capture(1)
    here = world()
    fake.delay(500)
    for source in range(6):
        here.fetch(source, source % 3, 1 + source // 3)
        here.copies.before_reading(one(source % 3))
        here.copies.mark_readers(one(source % 3))
    here.engine.drain(WAIT)
    assert (here.target == here.data[3:6]).all()
    here.close()
    assert fake.held() == NOTHING
    assert not fake.counts()["capture_broken"]
    compute = fake.stream()
    fake.synchronize_unsafely(compute)  # so that the check above can fail
    assert fake.counts()["capture_broken"]
    fake.c.fake_capture(0)
    fake.runtime.cudaStreamDestroy(compute)


def test_a_stream_that_captures_is_refused(fake: FakeCuda) -> None:
    here = world()
    fake.capturing = True
    for call in (here.copies.mark_readers, here.copies.before_reading):
        with pytest.raises(CaptureError, match="captures a CUDA graph"):
            call(one(0))
    with pytest.raises(CaptureError):
        cuda.CudaCopies(DEVICE, 3)
    fake.capturing = False
    here.close()
    assert fake.held() == NOTHING


@pytest.mark.failure("28", "29")
def test_waiting_for_a_gated_device_lets_other_threads_run(fake: FakeCuda) -> None:
    here = world()
    fake.gate(True)
    opener = threading.Timer(0.1, fake.gate, [False])
    opener.start()  # a thread that needs the GIL while this one waits
    here.engine.submit(fetch=np.array([[i, i % 3, 1 + i // 3] for i in range(8)], np.int32))
    here.engine.drain(WAIT)
    opener.join()
    here.close()


# ---- cuda-python


def bindings() -> types.ModuleType:
    module: types.ModuleType = pytest.importorskip(
        "cuda.bindings.cyruntime", reason="cuda-bindings is not installed (pip install cuda-bindings)"
    )
    return module


def has_driver() -> bool:
    try:
        return int(pytest.importorskip("cuda.bindings.runtime").cudaGetDeviceCount()[0]) == 0
    except RuntimeError:  # cuda-python 12.8
        return False


@pytest.mark.failure("134")
def test_the_table_is_filled_from_cuda_python_and_can_be_called() -> None:
    bindings()
    addresses = function_addresses()
    assert set(addresses) == set(SIGNATURES)
    assert all(addresses.values())
    if has_driver():
        pytest.skip("there is a driver here")
    runtime = pytest.importorskip("cuda.bindings.runtime")
    try:
        expected = int(runtime.cudaSetDevice(0)[0])  # also the bindings' own set-up
    except RuntimeError as error:
        pytest.skip(f"without a driver this cuda-python raises from its functions: {error}")
    events = np.arange(1, 5, dtype=np.uint64)
    link = CudaLink(**addresses, device=0, stream=0, events=events, read_event=events, copy_event=events)  # type: ignore[arg-type]
    sources = Sources(*(np.array(column) for column in ([0, 1], [-1], [4096], [100], [0], [0])))  # type: ignore[arg-type]
    engine = Engine(sources, np.zeros(1, np.uint64), np.array([100]), np.zeros(4, np.int32), link=link)
    with contextlib.suppress(TransferError):  # the thread may have found out before
        engine.submit(fetch=np.array([[0, 0, 1]], np.int32))
    with pytest.raises(TransferError, match=rf"CUDA error {expected}\b"):
        engine.wait_all(one(0), one(1), WAIT)
    engine.close()


def test_the_signatures_are_those_the_link_calls() -> None:
    """Types of the same passing convention, in the same places, in the capsules' names and in the link's C record."""
    text = (Path(cuda.__file__).parent / "_transfer" / "cuda_link.pxi").read_text()
    fields = dict(re.findall(r"^    int \(\*(\w+)\)\(([^)]*)\) noexcept nogil$", text, re.M))

    def kind(c_type: str) -> str:
        if "*" in c_type or c_type.strip() in ("cudaStream_t", "cudaEvent_t"):
            return "pointer"
        return {"unsigned int": "int", "size_t": "size_t"}.get(c_type.strip(), "int")

    for argument, (function, signature) in SIGNATURES.items():
        result, parameters = re.fullmatch(r"(\w+) \((.*)\)", signature).groups()  # type: ignore[union-attr]
        assert result == "cudaError_t", function
        assert [kind(p) for p in parameters.split(",")] == [kind(p) for p in fields[argument].split(",")], function


def test_the_mock_runtime_returns_what_cuda_python_does() -> None:
    """Every function we call from Python is there and returns a code and as many results, also without a driver."""
    bindings()
    runtime = pytest.importorskip("cuda.bindings.runtime")
    if has_driver():
        pytest.skip("there is a driver here: the arguments below are not real")
    arguments = {
        "cudaThreadExchangeStreamCaptureMode": (runtime.cudaStreamCaptureMode.cudaStreamCaptureModeRelaxed,),
        "cudaSetDevice": (0,),
        "cudaStreamCreateWithFlags": (1,),
        "cudaEventCreateWithFlags": (2,),
        "cudaHostRegister": (4096, 4096, 1),
        "cudaHostAlloc": (4096, 1),
        "cudaGetDeviceCount": (),
        "cudaGetLastError": (),
    }
    results = {
        "cudaStreamCreateWithFlags": 1,
        "cudaEventCreateWithFlags": 1,
        "cudaHostAlloc": 1,
        "cudaGetDeviceCount": 1,
        "cudaPointerGetAttributes": 1,
        "cudaThreadExchangeStreamCaptureMode": 1,
    }
    text = "".join(
        Path(cuda.__file__).with_name(f"{name}.py").read_text() for name in ("cuda", "cuda_runtime", "page_lock")
    )
    used = set(re.findall(r'"(cuda[A-Z]\w+)"', text)) | set(re.findall(r"\._module\.(cuda\w+)", text))
    used -= {name for name, _ in SIGNATURES.values()} - {"cudaSetDevice", "cudaThreadExchangeStreamCaptureMode"}
    used.discard("cudaStreamCaptureMode")  # the enumeration
    assert used >= set(arguments)
    assert used <= {name[1:] for name in dir(FakeCuda) if name.startswith("_cuda")}
    for function in sorted(used):
        try:
            code, *found = getattr(runtime, function)(*arguments.get(function, (4096,)))
        except RuntimeError:  # cuda-python 12.8
            continue
        assert isinstance(int(code), int)
        assert code.name.startswith("cuda")
        assert len(found) == results.get(function, 0), function


def test_no_driver_is_one_clear_error() -> None:
    bindings()
    if has_driver():
        pytest.skip("there is a driver here")
    with pytest.raises(TransferError, match="cudaGetDeviceCount"):
        cuda.CudaCopies(0, 4)


def test_a_function_of_another_signature_is_refused() -> None:
    capi = dict(bindings().__pyx_capi__)
    capi["cudaEventQuery"] = capi["cudaEventRecord"]
    with pytest.raises(ImportError, match="cudaEventQuery"):
        function_addresses(types.SimpleNamespace(__pyx_capi__=capi, __name__="stub"))  # type: ignore[arg-type]
    del capi["cudaEventQuery"]
    with pytest.raises(ImportError, match="cudaEventQuery is None"):
        function_addresses(types.SimpleNamespace(__pyx_capi__=capi, __name__="stub"))  # type: ignore[arg-type]


@pytest.mark.failure("134")
@pytest.mark.parametrize("module", ["cuda.bindings.cyruntime", "cuda.bindings.runtime"])
def test_without_cuda_python_the_error_says_what_to_install(
    fake: FakeCuda, monkeypatch: pytest.MonkeyPatch, module: str
) -> None:
    monkeypatch.setitem(__import__("sys").modules, module, None)
    with pytest.raises(ImportError, match=r"moecache\[cuda13\]"):
        cuda.CudaCopies(DEVICE, 3)
