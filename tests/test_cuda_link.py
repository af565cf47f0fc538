"""The CUDA link over the mock CUDA runtime, whose streams run late and beside the caller: which bytes, in which order.

No GPU is needed, and nothing here shows that one works.
"""

import types
from pathlib import Path

import numpy as np
import pytest
import torch
from cuda_world import DEVICE, NBYTES, WAIT, one, world
from fake_cuda import NOTHING, FakeCuda, reference_sum

from moecache import cuda
from moecache._engine import Engine, Sources
from moecache.errors import RoutingError, TransferError

pytestmark = pytest.mark.timeout(60)


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
