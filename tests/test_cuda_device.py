"""What must hold on a real CUDA device. Skipped where there is none; `tests/test_cuda_cache.py` asks much the same of the mock runtime."""

from __future__ import annotations

import gc
import os
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import moecache
from moecache._engine import Engine, Sources
from moecache.cuda import CudaCopies
from moecache.errors import CapacityError, CaptureError, ClosedError
from moecache.page_lock import lock_pages

if not torch.cuda.is_available():
    pytest.skip("no CUDA device", allow_module_level=True)
runtime = pytest.importorskip("cuda.bindings.runtime", reason="cuda-python is not installed")

pytestmark = pytest.mark.timeout(120)

TINY = Path(__file__).parent.parent / "examples" / "tiny_moe" / "model"
LAYERS, EXPERTS, TOP_K = 6, 16, 4
SHAPE = (257, 129)  # no round number of pages, sectors or chunks
SLOW = 300_000  # clock cycles that a reader sleeps before it reads


@pytest.fixture(autouse=True)
def nothing_is_left() -> Iterator[None]:
    """The device has no error waiting, and is the current one as before."""
    device = torch.cuda.current_device()
    yield
    torch.cuda.synchronize()
    assert torch.cuda.current_device() == device
    assert int(runtime.cudaPeekAtLastError()[0]) == 0


def weights_of(seed: int, shape: tuple[int, ...] = SHAPE, layers: int = LAYERS) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn((EXPERTS, *shape), generator=generator) for _ in range(layers)]


def bank_of(weights: list[torch.Tensor]) -> moecache.ExpertBank:
    return moecache.ExpertBank.from_tensors([{"w": w} for w in weights])


def ids_of(tokens: int, generator: torch.Generator) -> torch.Tensor:
    return torch.rand((tokens, EXPERTS), generator=generator).argsort(1)[:, :TOP_K]


def is_locked(tensor: torch.Tensor) -> bool:
    code, attributes = runtime.cudaPointerGetAttributes(tensor.data_ptr())
    return int(code) == 0 and int(attributes.type) == 1


def run(cache: moecache.ExpertCache, weights: list[torch.Tensor], steps: int, seed: int = 0, slow: int = SLOW) -> None:
    """Steps of one request whose readers are slow; every expert's bits are compared on the device."""
    generator = torch.Generator().manual_seed(seed)
    device = cache.device
    found: list[tuple[torch.Tensor, int, int]] = []
    with cache.request() as request:
        for step in range(steps):
            for layer in range(len(weights)):
                ids = ids_of(40 if step % 20 == 0 else 1, generator).to(device)
                with request.route(layer, ids) as lease:
                    for expert, slot, _ in lease.ready():
                        if slow:
                            torch.cuda._sleep(slow)  # the slot's next copy has to wait for this reader
                        found.append((lease.weights["w"][slot].clone(), layer, expert))
            for copy, layer, expert in found:
                assert torch.equal(copy.cpu(), weights[layer][expert])
            found.clear()


# ---- bytes and order


@pytest.mark.failure("6")
@pytest.mark.parametrize("capacity", [TOP_K, 20, 48])
def test_slots_hold_the_right_bytes_while_kernels_still_read_the_old_ones(capacity: int) -> None:
    weights = weights_of(capacity)
    with moecache.ExpertCache(bank_of(weights), capacity, device="cuda", top_k=TOP_K) as cache:
        run(cache, weights, 30)
        stats = cache.stats()
    assert stats.misses > 0
    assert stats.evictions > 0
    assert stats.resident_bytes < stats.expert_bytes_total
    assert stats.host_locked_bytes >= stats.expert_bytes_total
    assert stats.host_pageable_bytes == 0


@pytest.mark.failure("23")
def test_large_experts_are_read_right_after_they_were_asked_for() -> None:
    """A copy takes longer than the launch of its reader: the reader's stream has to wait."""
    weights = weights_of(0, (1024, 4096), layers=2)  # 16 MiB each
    with moecache.ExpertCache(bank_of(weights), 8, device="cuda", top_k=TOP_K) as cache:
        for tensors in cache.pool.tensors:
            tensors["w"].fill_(float("nan"))
        torch.cuda.synchronize()
        run(cache, weights, 12, slow=0)
        assert cache.stats().misses > 20


def test_a_lease_with_nothing_missing_may_be_read_without_the_loop() -> None:
    weights = weights_of(1)
    generator = torch.Generator().manual_seed(1)
    read = 0
    with moecache.ExpertCache(bank_of(weights), 60, device="cuda", top_k=TOP_K) as cache, cache.request() as request:
        for _ in range(60):
            for layer in range(LAYERS):
                with request.route(layer, ids_of(1, generator).cuda()) as lease:
                    if lease.missing:
                        list(lease.ready())
                        continue
                    read += 1
                    for expert, slot in zip(lease.experts, lease.slots, strict=True):
                        assert torch.equal(lease.weights["w"][slot].cpu(), weights[layer][expert])
    assert read > 10


@pytest.mark.failure("36")
@pytest.mark.parametrize("numel", [1, 3, 4097, 1_048_577])
def test_odd_sizes_are_exact(numel: int) -> None:
    weights = [torch.randint(0, 256, (EXPERTS, numel), dtype=torch.uint8) for _ in range(2)]
    with moecache.ExpertCache(bank_of(weights), 8, device="cuda", top_k=TOP_K) as cache:
        run(cache, weights, 10)


@pytest.mark.failure("26")
@pytest.mark.parametrize("limit", [0, 1 << 20])
def test_pageable_memory_is_staged(monkeypatch: pytest.MonkeyPatch, limit: int) -> None:
    monkeypatch.setenv("MOECACHE_PAGE_LOCK", str(limit))
    monkeypatch.setattr("moecache.page_lock.PIECE_NBYTES", 1 << 18)
    weights = weights_of(2)
    with moecache.ExpertCache(bank_of(weights), 20, device="cuda", top_k=TOP_K) as cache:
        run(cache, weights, 10)
        stats = cache.stats()
        assert cache._copies is not None
        assert cache._copies.staging_nbytes > 0
    assert stats.host_pageable_bytes > 0
    assert stats.host_locked_bytes <= limit


def test_memory_in_many_registrations(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("moecache.page_lock.PIECE_NBYTES", 8192)
    weights = weights_of(3)
    with moecache.ExpertCache(bank_of(weights), 20, device="cuda", top_k=TOP_K) as cache:
        assert cache._copies is not None
        assert cache._copies.lock is not None
        assert len(cache._copies.lock.locked) > 100
        run(cache, weights, 10)


@pytest.mark.failure("22")
def test_memory_that_torch_pinned_is_used_as_it_is() -> None:
    weights = [w.pin_memory() for w in weights_of(4)]
    with moecache.ExpertCache(bank_of(weights), 20, device="cuda", top_k=TOP_K) as cache:
        run(cache, weights, 10)
        stats = cache.stats()
    assert stats.host_locked_bytes == stats.expert_bytes_total
    assert all(is_locked(w) for w in weights)


def test_experts_in_files(tmp_path: Path) -> None:
    safetensors = pytest.importorskip("safetensors.torch")
    weights = weights_of(5)
    tensors = {f"layers.{i}.experts.{e}.w": weights[i][e].clone() for i in range(LAYERS) for e in range(EXPERTS)}
    safetensors.save_file(tensors, tmp_path / "model.safetensors")
    layout = [{"w": [f"layers.{i}.experts.{e}.w" for e in range(EXPERTS)]} for i in range(LAYERS)]
    bank = moecache.ExpertBank.from_safetensors(tmp_path, layout)
    with moecache.ExpertCache(bank, 20, device="cuda", top_k=TOP_K) as cache:
        run(cache, weights, 20)
        stats = cache.stats()
    assert stats.direct_reads + stats.buffered_reads > 0
    assert stats.host_locked_bytes == 0


# ---- streams


@pytest.mark.failure("24")
def test_readers_on_a_stream_of_their_own() -> None:
    weights = weights_of(6)
    with moecache.ExpertCache(bank_of(weights), 8, device="cuda", top_k=TOP_K) as cache:
        with torch.cuda.stream(torch.cuda.Stream()):
            run(cache, weights, 15)
        run(cache, weights, 5, seed=1)
        with torch.cuda.stream(torch.cuda.Stream()):
            run(cache, weights, 5, seed=2)


def test_two_threads_with_a_stream_each() -> None:
    weights = weights_of(7)
    failed: list[BaseException] = []

    def work(seed: int) -> None:
        try:
            with torch.cuda.stream(torch.cuda.Stream()):
                run(cache, weights, 15, seed)
        except BaseException as error:
            failed.append(error)

    with moecache.ExpertCache(bank_of(weights), 40, device="cuda", top_k=TOP_K) as cache:
        threads = [threading.Thread(target=work, args=(seed,)) for seed in range(2)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    assert not failed


@pytest.mark.failure("25")
def test_a_pool_in_memory_that_kernels_still_write() -> None:
    """The allocator gives memory away in the order of its stream, of which the copies know nothing by themselves."""
    weights = weights_of(8, layers=2)
    for _ in range(5):
        former = torch.empty(2 * EXPERTS * weights[0][0].numel(), device="cuda")
        torch.cuda._sleep(20_000_000)
        former.fill_(1.0)
        del former
        with moecache.ExpertCache(bank_of(weights), 2 * EXPERTS, device="cuda", top_k=TOP_K) as cache:
            run(cache, weights, 3)


def test_resizing_between_steps() -> None:
    weights = weights_of(9)
    bank = bank_of(weights)
    with moecache.ExpertCache(bank, 20, device="cuda", top_k=TOP_K) as cache:
        for step, capacity in enumerate((48, TOP_K, 30, 20)):
            run(cache, weights, 5, seed=step)
            lock = bank.page_lock
            cache.resize(capacity)
            assert bank.page_lock is lock
            assert is_locked(weights[0])
        run(cache, weights, 5, seed=9)


# ---- memory and lifetime


@pytest.mark.failure("94")
def test_locked_memory_is_counted_and_given_back() -> None:
    weights = weights_of(10)
    bank = bank_of(weights)
    one = moecache.ExpertCache(bank, 20, device="cuda", top_k=TOP_K)
    two = moecache.ExpertCache(bank, 20, device="cuda", top_k=TOP_K)
    assert one.stats().host_locked_bytes >= bank.nbytes
    assert all(is_locked(w) for w in weights)
    one.close()
    assert all(is_locked(w) for w in weights)
    run(two, weights, 3)
    two.close()
    two.close()
    assert not any(is_locked(w) for w in weights)
    with pytest.raises(ClosedError):
        two.request()


def test_what_nobody_closed_is_given_back() -> None:
    weights = weights_of(11)
    cache = moecache.ExpertCache(bank_of(weights), 20, device="cuda", top_k=TOP_K)
    request = cache.request()
    request.route(0, torch.tensor([[1, 2, 3, 4]], device="cuda"))
    del cache, request
    gc.collect()
    assert not any(is_locked(w) for w in weights)


def test_device_memory_is_given_back() -> None:
    weights = weights_of(12)
    torch.cuda.synchronize()
    gc.collect()
    before = torch.cuda.memory_allocated()
    cache = moecache.ExpertCache(bank_of(weights), 20, device="cuda", top_k=TOP_K)
    assert torch.cuda.memory_allocated() >= before + 20 * weights[0][0].nbytes
    run(cache, weights, 2)
    cache.close()
    gc.collect()
    assert torch.cuda.memory_allocated() == before


@pytest.mark.parametrize("end", ["", "cache.close(); cache.close()", "del cache"])
def test_the_interpreter_ends_silently(end: str) -> None:
    code = f"""
import torch, moecache
bank = moecache.ExpertBank.from_tensors([{{"w": torch.randn(16, 999, 1001)}} for _ in range(4)])
cache = moecache.ExpertCache(bank, 12, device="cuda", top_k=2)
request = cache.request()
lease = request.route(1, torch.tensor([[3, 5]], device="cuda"))
{end}
"""
    environment = {**os.environ, "PYTHONPATH": str(Path(__file__).parent.parent)}
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=100, env=environment)
    assert done.stderr == ""
    assert done.returncode == 0


def test_a_device_that_is_not_there_is_refused() -> None:
    with pytest.raises(CapacityError, match=f"sees {torch.cuda.device_count()} CUDA devices"):
        moecache.ExpertCache(bank_of(weights_of(13)), 20, device=f"cuda:{torch.cuda.device_count()}")


@pytest.mark.failure("102", "103")
@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two CUDA devices")
def test_the_device_need_not_be_the_current_one() -> None:
    weights = weights_of(14)
    bank = bank_of(weights)
    torch.cuda.set_device(0)
    with (
        moecache.ExpertCache(bank, 20, device="cuda:1", top_k=TOP_K) as other,
        moecache.ExpertCache(bank, 20, device="cuda:0", top_k=TOP_K) as here,
    ):
        assert torch.cuda.current_device() == 0
        run(here, weights, 5, slow=0)
        run(other, weights, 5, slow=0)
        with torch.cuda.device(1):
            run(other, weights, 5)
            run(here, weights, 5, slow=0)
        assert other.pool.tensors[0]["w"].device == torch.device("cuda:1")


# ---- graphs


@pytest.mark.failure("33")
def test_calls_under_capture_are_refused_and_the_capture_goes_on() -> None:
    weights = weights_of(15)
    x = torch.ones(1000, device="cuda")
    with moecache.ExpertCache(bank_of(weights), 20, device="cuda", top_k=TOP_K) as cache, cache.request() as request:
        ids = torch.tensor([[1, 2, 3, 4]], device="cuda")
        run(cache, weights, 3)
        x.mul_(1)
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            y = x * 2
            with pytest.raises(CaptureError):
                request.route(0, ids)
            with pytest.raises(CaptureError):
                cache.resize(30)
            z = y + 1
        x.fill_(4.0)
        graph.replay()
        torch.cuda.synchronize()
        assert (z == 9).all()
        run(cache, weights, 3, seed=1)


@pytest.mark.failure("32")
def test_copies_go_on_beside_captures() -> None:
    """The I/O thread's calls neither fail nor break what another thread captures in the strictest mode."""
    source = torch.randint(0, 256, (16, 8 << 20), dtype=torch.uint8)
    target = torch.zeros((16, 8 << 20), dtype=torch.uint8, device="cuda")
    sources = Sources(
        segment_start=np.arange(17),
        segment_file=np.full(16, -1, np.int32),
        segment_source=(source.data_ptr() + np.arange(16) * (8 << 20)).astype(np.uint64),
        segment_nbytes=np.full(16, 8 << 20),
        segment_region=np.zeros(16, np.int32),
        segment_offset=np.zeros(16, np.int64),
    )
    copies = CudaCopies(
        torch.cuda.current_device(), 16, lock=lambda runtime: lock_pages(runtime, [(source.data_ptr(), source.nbytes)])
    )
    engine = Engine(
        sources,
        np.array([target.data_ptr()], np.uint64),
        np.array([8 << 20]),
        np.zeros(16, np.int32),
        link=copies.link,
        owner=(source, target),
    )
    failed: list[BaseException] = []
    stop = threading.Event()

    def copy_all_the_time() -> None:
        slots, generation = np.arange(16), 0
        try:
            while not stop.is_set():
                generation += 1
                rows = np.stack([(slots + generation) % 16, slots, np.full(16, generation)], axis=1).astype(np.int32)
                engine.submit(fetch=rows)
                engine.drain(60)
        except BaseException as error:
            failed.append(error)

    x = torch.ones(1000, device="cuda")
    x.mul_(1)
    thread = threading.Thread(target=copy_all_the_time)
    thread.start()
    try:
        for _ in range(5):
            before = engine.counters()["bytes_demand"]
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph, capture_error_mode="global"):
                y = x
                for _ in range(200):
                    y = y + 1
                time.sleep(0.05)
            assert engine.counters()["bytes_demand"] > before
            graph.replay()
            torch.cuda.synchronize()
            assert (y == 201).all()
    finally:
        stop.set()
        thread.join()
    assert not failed
    rows = np.stack([np.arange(16), np.arange(16), np.full(16, 1 << 30)], axis=1).astype(np.int32)
    engine.submit(fetch=rows)
    engine.drain(60)
    assert torch.equal(target.cpu(), source)
    engine.close()
    copies.close()


def test_paused_copies_wait() -> None:
    weights = weights_of(17)
    with moecache.ExpertCache(bank_of(weights), 20, device="cuda", top_k=TOP_K) as cache:
        run(cache, weights, 3)
        with cache.paused():
            graph = torch.cuda.CUDAGraph()
            x = torch.ones(10, device="cuda")
            torch.cuda.synchronize()
            with torch.cuda.graph(graph):
                y = x + 1
        graph.replay()
        run(cache, weights, 3, seed=1)
        assert (y == 2).all()


# ---- a model


@pytest.mark.parametrize("bank", ["ram", "disk"])
def test_a_model_decodes_to_the_same_tokens_and_logits(bank: str) -> None:
    transformers = pytest.importorskip("transformers")
    pytest.importorskip("accelerate", reason="device_map needs accelerate")
    import moecache.hf

    def decode(model: Any) -> tuple[torch.Tensor, torch.Tensor]:
        out = model.generate(ids, max_new_tokens=24, do_sample=False, output_logits=True, return_dict_in_generate=True)
        return out.sequences, torch.stack(out.logits)

    ids = torch.randint(0, 256, (1, 40), generator=torch.Generator().manual_seed(0)).cuda()
    load = transformers.AutoModelForCausalLM.from_pretrained
    expected = decode(load(TINY, dtype="auto").cuda())
    model = load(TINY, dtype="auto", experts_implementation="moecache", device_map="cuda")
    with moecache.attach(model, capacity=0.25, bank=bank) as cache:
        found = decode(model)
        stats = cache.stats()
    assert torch.equal(found[0], expected[0])
    assert torch.equal(found[1], expected[1])
    assert stats.misses > 0
    assert stats.evictions > 0
