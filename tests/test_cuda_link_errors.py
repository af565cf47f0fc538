"""Errors of the CUDA runtime, as a copy and an engine report them."""

import gc
from typing import Any

import numpy as np
import pytest
from cuda_world import DEVICE, WAIT, world
from fake_cuda import NOTHING, FakeCuda

from moecache import cuda
from moecache.errors import TransferError
from moecache.page_lock import PageLock, lock_pages

pytestmark = pytest.mark.timeout(60)


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
def test_failed_construction_leaves_nothing_on_the_device(fake: FakeCuda, function: str, after: int) -> None:
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
