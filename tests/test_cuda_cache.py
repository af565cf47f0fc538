"""The cache on a device, over the mock CUDA runtime: what `tests/test_cuda_device.py` asks of a real one, and what only a
mock can be made to do.

The pool is host memory, and what computes is the caller; the copies run late and beside it, as on a device.
"""

from __future__ import annotations

import gc
import os
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from fake_cuda import NOTHING, FakeCuda, installed

import moecache
from moecache import cuda
from moecache.errors import CaptureError, TransferError
from moecache.runtime import Runtime

pytestmark = pytest.mark.timeout(120)

TINY = Path(__file__).parent.parent / "examples" / "tiny_moe" / "model"
LAYERS, EXPERTS, TOP_K = 6, 16, 4


@pytest.fixture
def fake(monkeypatch: pytest.MonkeyPatch) -> Iterator[FakeCuda]:
    with installed(monkeypatch) as fake:

        def copies_for(runtime: Runtime, sources: Any) -> cuda.CudaCopies:
            made = cuda.copies_for(sources, torch.device("cuda", 1), sum(runtime.pool.slots), runtime.setup.bank)
            fake.delay(150)
            return made

        monkeypatch.setattr(Runtime, "_copies_for", copies_for)
        yield fake


def weights_of(seed: int = 0) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn((EXPERTS, 67, 29), generator=generator) for _ in range(LAYERS)]


def bank_of(weights: list[torch.Tensor]) -> moecache.ExpertBank:
    return moecache.ExpertBank.from_tensors([{"w": w} for w in weights])


def ids_of(tokens: int, generator: torch.Generator) -> torch.Tensor:
    return torch.rand((tokens, EXPERTS), generator=generator).argsort(1)[:, :TOP_K]


def run(
    cache: moecache.ExpertCache, weights: list[torch.Tensor], steps: int, seed: int = 0, prompts: bool = True
) -> None:
    generator = torch.Generator().manual_seed(seed)
    with cache.request() as request:
        for step in range(steps):
            for layer in range(LAYERS):
                ids = ids_of(40 if prompts and step % 20 == 0 else 1, generator)
                with request.route(layer, ids) as lease:
                    for expert, slot, _ in lease.ready():
                        assert torch.equal(lease.weights["w"][slot], weights[layer][expert])


@pytest.mark.parametrize("capacity", [TOP_K, 20, 48])
def test_slots_hold_the_right_bytes(fake: FakeCuda, capacity: int) -> None:
    weights = weights_of(capacity)
    with moecache.ExpertCache(bank_of(weights), capacity, top_k=TOP_K) as cache:
        run(cache, weights, 41)
        stats = cache.stats()
    assert stats.misses > 0
    assert stats.evictions > 0
    assert stats.waves > 0 or capacity > EXPERTS
    assert stats.host_locked_bytes >= stats.expert_bytes_total
    assert stats.host_pageable_bytes == 0
    assert fake.held() == NOTHING


def test_a_lease_with_nothing_missing_may_be_read_without_the_loop(fake: FakeCuda) -> None:
    weights = weights_of()
    generator = torch.Generator().manual_seed(1)
    read = 0
    with moecache.ExpertCache(bank_of(weights), 48, top_k=TOP_K) as cache, cache.request() as request:
        for _ in range(60):
            for layer in range(LAYERS):
                with request.route(layer, ids_of(1, generator)) as lease:
                    if lease.missing == 0:
                        read += 1
                        for expert, slot in zip(lease.experts, lease.slots, strict=True):
                            assert torch.equal(lease.weights["w"][slot], weights[layer][expert])
                        continue
                    for expert, slot, _ in lease.ready():
                        assert torch.equal(lease.weights["w"][slot], weights[layer][expert])
    assert read > 10


@pytest.mark.failure("24")
@pytest.mark.parametrize("bank", ["ram", "disk"])
def test_a_model_decodes_to_the_same_tokens_and_logits(fake: FakeCuda, bank: str) -> None:
    transformers = pytest.importorskip("transformers")
    import moecache.hf

    def decode(model: Any) -> tuple[torch.Tensor, torch.Tensor]:
        out = model.generate(ids, max_new_tokens=6, do_sample=False, output_logits=True, return_dict_in_generate=True)
        return out.sequences, torch.stack(out.logits)

    ids = torch.randint(0, 256, (1, 20), generator=torch.Generator().manual_seed(0))
    load = transformers.AutoModelForCausalLM.from_pretrained
    expected = decode(load(TINY, dtype="auto"))
    model = load(TINY, dtype="auto", experts_implementation="moecache")
    with moecache.attach(model, capacity=0.25, bank=bank) as cache:
        found = decode(model)
        stats = cache.stats()
    assert torch.equal(found[0], expected[0])
    assert torch.equal(found[1], expected[1])
    assert stats.misses > 0
    assert stats.evictions > 0
    assert (stats.host_locked_bytes > 0) == (bank == "ram")
    assert fake.held() == NOTHING


def test_two_threads_and_their_requests(fake: FakeCuda) -> None:
    weights = weights_of()
    failed: list[BaseException] = []

    def work(seed: int) -> None:
        try:
            run(cache, weights, 25, seed, prompts=False)
        except BaseException as error:
            failed.append(error)

    with moecache.ExpertCache(bank_of(weights), 24, top_k=TOP_K) as cache:
        threads = [threading.Thread(target=work, args=(seed,)) for seed in range(2)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    assert not failed
    assert fake.held() == NOTHING


def test_resizing_keeps_the_memory_locked(fake: FakeCuda) -> None:
    weights = weights_of()
    with moecache.ExpertCache(bank_of(weights), 20, top_k=TOP_K) as cache:
        run(cache, weights, 10)
        before = fake.held()
        locked = cache.bank.page_lock
        cache.resize(40)
        assert cache.bank.page_lock is locked
        assert fake.held()["registrations"] == before["registrations"] > 0
        assert fake.held()["streams"] == 1
        assert len(cache.resident()) > 10
        run(cache, weights, 10, seed=1)
        cache.resize(TOP_K)
        run(cache, weights, 5, seed=2)
    assert fake.held() == NOTHING


def test_two_caches_over_one_bank_share_the_lock(fake: FakeCuda) -> None:
    weights = weights_of()
    bank = bank_of(weights)
    one = moecache.ExpertCache(bank, 20, top_k=TOP_K)
    two = moecache.ExpertCache(bank, 20, top_k=TOP_K)
    registrations = fake.held()["registrations"]
    run(one, weights, 3)
    one.close()
    assert fake.held()["registrations"] == registrations > 0
    run(two, weights, 3)
    two.close()
    two.close()
    assert fake.held() == NOTHING
    with moecache.ExpertCache(bank, 20, top_k=TOP_K) as three:
        run(three, weights, 3)
        assert fake.held()["registrations"] == registrations
    assert fake.held() == NOTHING


@pytest.mark.failure("26")
def test_memory_the_system_refuses_to_lock_is_counted(fake: FakeCuda, caplog: pytest.LogCaptureFixture) -> None:
    weights = weights_of()
    fake.fail("host_register", 2)
    with moecache.ExpertCache(bank_of(weights), 20, top_k=TOP_K) as cache:
        run(cache, weights, 5)
        stats = cache.stats()
    assert stats.host_locked_bytes == 0
    assert stats.host_pageable_bytes >= stats.expert_bytes_total
    assert len([record for record in caplog.records if "refused the rest" in record.message]) == 1
    assert fake.held() == NOTHING


def test_a_copy_that_fails_is_an_error_and_the_next_call_works(fake: FakeCuda) -> None:
    weights = weights_of()
    with moecache.ExpertCache(bank_of(weights), 20, top_k=TOP_K) as cache:
        fake.fail("memcpy_async", 801)
        with pytest.raises(TransferError, match="CUDA error 801"):
            run(cache, weights, 1)
        fake.fail("memcpy_async", 0)
        run(cache, weights, 5)
    assert fake.held() == NOTHING


@pytest.mark.failure("101")
def test_a_cache_that_cannot_be_made_leaves_nothing_behind(fake: FakeCuda) -> None:
    for function in ("stream_create", "event_create"):
        fake.fail(function, 2)
        with pytest.raises(TransferError, match="cudaErrorMemoryAllocation"):
            moecache.ExpertCache(bank_of(weights_of()), 20)
        fake.fail(function, 0)
        gc.collect()
        assert fake.held() == NOTHING


# ---- graphs


@pytest.mark.failure("33")
def test_calls_under_capture_are_refused_and_change_nothing(fake: FakeCuda) -> None:
    weights = weights_of()
    with moecache.ExpertCache(bank_of(weights), 20, top_k=TOP_K) as cache, cache.request() as request:
        ids = torch.tensor([[1, 2, 3, 4]])
        fake.capturing = True
        for _ in range(2):
            with pytest.raises(CaptureError, match=r"layer 2: experts were asked for while .* captures a CUDA graph"):
                request.route(2, ids)
        with pytest.raises(CaptureError, match=r"resize\(\) was called"):
            cache.resize(30)
        with pytest.raises(CaptureError):
            moecache.ExpertCache(bank_of(weights), 20)
        fake.capturing = False
        assert cache.stats().steps == 0
        assert not cache.resident()
        run(cache, weights, 3)


def test_a_lease_from_before_the_capture_is_refused_and_gives_its_slots_back(fake: FakeCuda) -> None:
    weights = weights_of()
    with moecache.ExpertCache(bank_of(weights), TOP_K, top_k=TOP_K) as cache, cache.request() as request:
        lease = request.route(0, torch.tensor([[1, 2, 3, 4]]))
        list(lease.ready())
        fake.capturing = True
        with pytest.raises(CaptureError):
            _ = lease.slots
        with pytest.raises(CaptureError):
            lease.release()
        fake.capturing = False
        lease.release()
        run(cache, weights, 3)


@pytest.mark.failure("32")
def test_nothing_moves_while_the_cache_is_paused(fake: FakeCuda) -> None:
    weights = weights_of()
    ids = torch.tensor([[1, 2, 3, 4]])
    # A step waits as long in vain as everything else may take.
    with moecache.ExpertCache(bank_of(weights), 20, top_k=TOP_K, timeout=3.0) as cache, cache.request() as request:
        run(cache, weights, 3)
        with cache.paused():
            before = fake.counts()["locked"]
            lease = request.route(0, ids)
            if lease.missing:
                with pytest.raises(TransferError, match="not complete"):
                    list(lease.ready())
            assert fake.counts()["locked"] == before
        for expert, slot, _ in lease.ready():
            assert torch.equal(lease.weights["w"][slot], weights[0][expert])
        lease.release()
        with cache.paused():
            cache.resize(30)  # a new engine, which nobody paused
        run(cache, weights, 3, seed=1)
        with pytest.raises(RuntimeError, match="mine"), cache.paused():
            raise RuntimeError("mine")
        run(cache, weights, 3, seed=2)
        with cache.paused():
            cache.close()


def test_a_stream_without_capture_is_asked_cheaply_and_only_on_cuda(monkeypatch: pytest.MonkeyPatch) -> None:
    def asked() -> bool:
        raise AssertionError("asked for a capture on the CPU")

    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", asked)
    weights = weights_of()
    with moecache.ExpertCache(bank_of(weights), 20, top_k=TOP_K) as cache:
        run(cache, weights, 3)


# ---- the end


SCRIPT = """
import atexit
last = []
atexit.register(lambda: last[0]())  # registered before any finalizer: it runs after them all
import gc, os, sys
import pytest, torch
from fake_cuda import NOTHING, FakeCuda, installed
import moecache
from moecache import cuda

fake = FakeCuda()
patch = pytest.MonkeyPatch()
fake.install(patch)
last.append(lambda: print(fake.held(), fake.counts()["violations"]))
copies = lambda runtime, sources: cuda.copies_for(sources, torch.device("cuda", 1), sum(runtime.pool.slots), runtime.setup.bank)
patch.setattr(moecache.runtime.Runtime, "_copies_for", copies)
bank = moecache.ExpertBank.from_tensors([{"w": torch.randn(16, 300, 100)} for _ in range(4)])
cache = moecache.ExpertCache(bank, 12, top_k=2)
fake.delay(3000)
request = cache.request()
lease = request.route(1, torch.tensor([[3, 5]]))
"""


@pytest.mark.failure("133")
@pytest.mark.parametrize(
    "end",
    [
        "",
        "cycle = [cache]; cycle.append(cycle); del cache, bank, cycle, lease, request",
        "fake.c.fake_sticky(4)",
    ],
    ids=["in use", "dropped", "driver gone"],
)
def test_the_interpreter_ends_silently(end: str) -> None:
    code = SCRIPT + end + "\n"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, env=environment())
    assert done.stderr == ""
    assert done.returncode == 0
    if "sticky" not in end:
        assert done.stdout.splitlines()[-1] == f"{NOTHING} 0"


@pytest.mark.failure("131")
def test_a_forked_child_leaves_everything_to_its_parent() -> None:
    code = (
        SCRIPT
        + """
list(lease.ready()); lease.release()
child = os.fork()
if child == 0:
    try:
        cache.request().route(0, torch.tensor([[0, 1]]))
    except moecache.errors.ClosedError:
        cache.close()
        del cache
        gc.collect()
        sys.exit(7)
_, status = os.waitpid(child, 0)
assert os.waitstatus_to_exitcode(status) == 7, status
with request.route(2, torch.tensor([[3, 5]])) as lease:
    for expert, slot, _ in lease.ready():
        assert torch.equal(lease.weights["w"][slot], bank.expert(2, expert)["w"])
request.close()
cache.close()
"""
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, env=environment())
    assert done.stderr == ""
    assert done.returncode == 0
    lines = done.stdout.splitlines()
    assert lines[-1] == f"{NOTHING} 0"
    assert len(lines) == 2
    assert lines[0] != lines[-1]  # the child's: it has given nothing back


def environment() -> dict[str, str]:
    here = Path(__file__).parent
    return {**os.environ, "PYTHONPATH": os.pathsep.join((str(here), str(here.parent)))}


@pytest.mark.failure("79", "80")
def test_float8_is_locked_and_copied_as_bytes(fake: FakeCuda) -> None:
    raw = torch.randint(0, 256, (EXPERTS, 33, 65), dtype=torch.uint8, generator=torch.Generator().manual_seed(1))
    with moecache.ExpertCache(bank_of([raw.view(torch.float8_e4m3fn)]), 2) as cache:
        with cache.request() as request:
            for n in range(12):
                with request.route(0, torch.tensor([[n * 5 % EXPERTS]])) as lease:
                    for expert, slot, _ in lease.ready():
                        assert torch.equal(lease.weights["w"][slot].view(torch.uint8), raw[expert])
        assert cache.stats().host_locked_bytes >= raw.nbytes
