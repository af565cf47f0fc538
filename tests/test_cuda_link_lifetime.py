"""Which device is current, what is given back when, and captures of graphs."""

import gc
import threading

import numpy as np
import pytest
import torch
from cuda_world import DEVICE, WAIT, one, world
from fake_cuda import NOTHING, FakeCuda

from moecache import cuda
from moecache.errors import CapacityError, CaptureError, ClosedError

pytestmark = pytest.mark.timeout(60)


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
