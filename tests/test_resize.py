"""Changing the size of a cache at any moment: what it runs on is swapped whole, or stays whole."""

from __future__ import annotations

import threading
import time
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch
from cache_helpers import check, make_bank, run
from safetensors.torch import save_file

import moecache.runtime
from moecache import CacheOptions, ExpertBank, ExpertCache, Request
from moecache._engine import HostLink, ThrottledLink
from moecache.errors import CapacityError, ClosedError, LeaseError, MoeCacheError, TransferError


def hits(request: Request, layer: int, ids: Any) -> int:
    """One step, its bytes checked: how many of its experts were there."""
    before = request.stats().hits
    run(request, layer, ids)
    return request.stats().hits - before


class Unlucky:
    """Stands in for a class whose construction fails."""

    def __init__(self, error: BaseException) -> None:
        self.error = error

    def __call__(self, *_: Any, **__: Any) -> Any:
        raise self.error


@pytest.mark.failure("A1")
@pytest.mark.parametrize("larger", [False, True], ids=["shrinking", "growing"])
@pytest.mark.parametrize("part", ["Engine", "Core", "Pool", "copy"])
def test_a_resize_that_fails_half_way_leaves_the_cache_as_it_was(
    bank: ExpertBank, monkeypatch: pytest.MonkeyPatch, part: str, larger: bool
) -> None:
    with ExpertCache(bank, 8, policy="lru") as cache, cache.request() as request:
        for expert in range(8):
            run(request, expert % 2, [[expert]])
        pool = cache.pool
        with monkeypatch.context() as patch:
            if part == "copy":
                patch.setattr(moecache.runtime.Runtime, "_adopt", Unlucky(OSError(5, "no luck")))
            else:
                patch.setattr(moecache.runtime, part, Unlucky(OSError(24, "too many open files")))
                if part == "Pool":
                    patch.setattr(pool, "narrowed", Unlucky(OSError(24, "too many open files")))
            with pytest.raises(TransferError, match="keeps its size"):
                cache.resize(12 if larger else 5)
        assert cache.capacity == 8
        assert cache.pool is pool
        assert sum(hits(request, expert % 2, [[expert]]) for expert in range(8)) == 8
        for expert in range(8):
            run(request, 1 - expert % 2, [[expert]])
        cache.resize(12 if larger else 5)
        for expert in range(8):
            run(request, expert % 2, [[expert]])


@pytest.mark.failure("A1")
def test_a_resize_over_a_file_that_changed_is_refused_whole(tmp_path: Path) -> None:
    names = [f"layers.0.experts.{e}.w" for e in range(8)]
    save_file({name: torch.full((64,), float(e)) for e, name in enumerate(names)}, tmp_path / "model.safetensors")
    layout = {"w": "layers.{layer}.experts.{expert}.w"}
    with (
        ExpertBank.from_safetensors(tmp_path, layout) as bank,
        ExpertCache(bank, 4, policy="lru") as cache,
        cache.request() as request,
    ):
        run(request, 0, [[0, 1, 2]])
        save_file({name: torch.full((64,), -1.0) for name in names}, tmp_path / "model.safetensors")
        with pytest.raises(MoeCacheError, match=r"model\.safetensors"):
            cache.resize(6)
        assert cache.capacity == 4
        with request.route(0, torch.tensor([[0, 1, 2]])) as lease:  # what is resident is still right
            assert lease.missing == 0
            for expert, slot, _ in lease.ready():
                assert lease.weights["w"][slot].eq(expert).all()


@pytest.mark.failure("A2")
def test_a_resize_waits_for_the_steps_of_other_threads_and_they_for_it(bank: ExpertBank) -> None:
    with ExpertCache(bank, 8) as cache, cache.request() as first, cache.request() as second:
        lease = first.route(0, torch.tensor([[1, 2]]))
        sizes: list[int] = []

        def resize() -> None:
            cache.resize(5)

        def route() -> None:
            run(second, 0, [[3, 4]])
            sizes.append(cache.capacity)

        threads = [threading.Thread(target=resize)]
        threads[0].start()
        while not cache._core.frozen:
            time.sleep(0.001)
        threads.append(threading.Thread(target=route))
        threads[1].start()
        threads[1].join(0.2)
        assert sizes == []
        inner = first.route(1, torch.tensor([[5]]))  # a thread inside a step may begin another
        inner.release()
        for expert, slot, _ in lease.ready():
            check(cache, lease, 0, expert, slot)
        lease.release()
        for thread in threads:
            thread.join(10)
        assert sizes == [5]


@pytest.mark.failure("A2")
def test_a_lease_that_does_not_end_stops_a_resize_not_the_cache(bank: ExpertBank) -> None:
    with ExpertCache(bank, 8, timeout=0.3) as cache, cache.request() as request:
        holding, done = threading.Event(), threading.Event()

        def hold() -> None:
            with cache.request() as other, other.route(0, torch.tensor([[1]])):
                holding.set()
                done.wait(10)

        holder = threading.Thread(target=hold)
        holder.start()
        holding.wait(10)
        with pytest.raises(LeaseError, match="1 leases of other threads did not end within"):
            cache.resize(4)
        assert cache.capacity == 8
        run(request, 0, [[2, 3]])
        done.set()
        holder.join(10)
        cache.resize(4)
        run(request, 0, [[2, 3]])


@pytest.mark.failure("A2")
@pytest.mark.parametrize("link", [False, True], ids=["memory", "limited link"])
def test_threads_that_route_while_another_resizes(link: bool) -> None:
    # Every expert's bytes are checked at every use; no error may reach an innocent thread.
    with make_bank((12, 12, 12)) as bank:
        options = CacheOptions(link=ThrottledLink(HostLink(), 200e6)) if link else CacheOptions()
        with ExpertCache(bank, 20, top_k=2, options=options) as cache:
            stop, wrong = threading.Event(), []

            def route(seed: int) -> None:
                draw = torch.Generator().manual_seed(seed)
                try:
                    while not stop.is_set():
                        with cache.request() as request:
                            for step in range(12):
                                run(request, step % 3, torch.randint(0, 12, (1, 2), generator=draw))
                except BaseException as error:
                    wrong.append(error)

            threads = [threading.Thread(target=route, args=(seed,)) for seed in range(3)]
            for thread in threads:
                thread.start()
            try:
                for n in range(60):
                    cache.resize((6, 30, 7, 20, 36, 8)[n % 6])
            finally:
                stop.set()
                for thread in threads:
                    thread.join(30)
            assert wrong == []
            assert cache._core.slots.pinned() == 0
            stats = cache.stats()
            assert stats.hits + stats.misses == stats.demands
            assert stats.misses > 0


@pytest.mark.failure("A2")
def test_closing_while_another_thread_resizes(bank: ExpertBank) -> None:
    for _ in range(10):
        cache = ExpertCache(bank, 8)
        errors: list[BaseException] = []

        def resize(cache: ExpertCache = cache, errors: list[BaseException] = errors) -> None:
            try:
                for n in range(100):
                    cache.resize(5 + n % 5)
            except ClosedError:
                pass
            except BaseException as error:
                errors.append(error)

        thread = threading.Thread(target=resize)
        thread.start()
        time.sleep(0.005)
        cache.close()
        thread.join(10)
        assert errors == []
        assert cache._engine.closed


@pytest.mark.failure("A3")
def test_the_same_size_changes_nothing(bank: ExpertBank) -> None:
    with ExpertCache(bank, 8) as cache, cache.request() as request:
        run(request, 0, [[0, 1]])
        pool, engine = cache.pool, cache._engine
        with request.route(1, torch.tensor([[2]])):
            cache.resize(8)
            cache.resize(0.5)
        assert cache.pool is pool
        assert cache._engine is engine


@pytest.mark.failure("A3")
def test_shrinking_keeps_the_most_wanted_in_the_memory_that_is_there() -> None:
    with (
        make_bank((64,), sizes=[4096]) as bank,
        ExpertCache(bank, 40, policy="lru") as cache,
        cache.request() as request,
    ):
        for expert in range(40):
            run(request, 0, [[expert]])
        tensor, before = cache.pool.tensors[0]["down"], psutil.Process().memory_info().rss
        nbytes = cache.pool.nbytes
        cache.resize(10)
        assert cache.pool.tensors[0]["down"].data_ptr() == tensor.data_ptr()
        assert cache.pool.nbytes * 4 == nbytes
        assert psutil.Process().memory_info().rss < before - nbytes // 2
        assert cache.resident() == {(0, expert) for expert in range(30, 40)}
        assert sum(hits(request, 0, [[expert]]) for expert in range(30, 40)) == 10
        cache.resize(20)
        assert sum(hits(request, 0, [[expert]]) for expert in range(30, 40)) == 10
        for expert in range(64):
            run(request, 0, [[expert]])


@pytest.mark.failure("A3", "A4")
def test_what_was_fetched_ahead_and_is_still_to_come_survives_a_resize() -> None:
    with make_bank((8, 8, 8)) as bank, ExpertCache(bank, 10, top_k=1) as cache, cache.request() as request:
        request.hint(1, torch.eye(8)[6])
        request.hint(2, torch.zeros(8))
        run(request, 0, [[0]])
        cache._engine.drain(10)
        assert cache.stats().prefetch_pending >= 1
        cache.resize(6)
        cache.reset_stats()
        assert (1, 6) in cache.resident()
        before = cache.stats()
        assert before.prefetch_pending == before.prefetch_issued >= 1
        run(request, 1, [[6]])
        stats = cache.stats()
        assert stats.prefetch_useful == 1
        ended = stats.prefetch_useful + stats.prefetch_late + stats.prefetch_wasted
        assert stats.prefetch_issued == ended + stats.prefetch_pending


@pytest.mark.failure("A3")
def test_resizing_where_it_cannot_be_is_refused(bank: ExpertBank) -> None:
    with ExpertCache(bank, 8) as cache, cache.request() as request:
        with request.route(0, torch.tensor([[1]])), pytest.raises(LeaseError, match="while a lease is open"):
            cache.resize(4)
        with pytest.raises(CapacityError):
            cache.resize(0)
        assert cache.capacity == 8
        cache.resize(4)
    with pytest.raises(ClosedError):
        cache.resize(8)


@pytest.mark.failure("E18")
def test_pausing_or_resizing_in_the_middle_of_a_resize_is_refused(
    bank: ExpertBank, monkeypatch: pytest.MonkeyPatch
) -> None:
    # As a signal handler would: in the same thread, which holds what it would wait for.
    with ExpertCache(bank, 8) as cache:
        for inner in (lambda: cache.resize(7), lambda: cache.paused().__enter__()):
            with monkeypatch.context() as patch:
                patch.setattr(moecache.runtime.Runtime, "_adopt", lambda *_, inner=inner, **__: inner())
                with pytest.raises(LeaseError, match="inside a resize"):
                    cache.resize(5)
            assert cache.capacity == 8
        cache.resize(5)


def test_a_pause_goes_on_through_a_resize_and_ends_after_it(bank: ExpertBank) -> None:
    with ExpertCache(bank, 8, timeout=0.2) as cache, cache.request() as request:
        with cache.paused():
            cache.resize(6)
            cache.resize(9)
            with pytest.raises(TransferError, match="not complete"):
                run(request, 0, [[1]])
        run(request, 0, [[1]])


@pytest.mark.failure("I35b")
def test_slot_generations_begin_anew_before_their_numbers_run_out(bank: ExpertBank) -> None:
    with ExpertCache(bank, 4, policy="lru") as cache, cache.request() as request:
        run(request, 0, [[0, 1]])
        cache._core.slots.generations[:] = 0x7F000000 - 2
        cache._core.slots.complete[:] = cache._core.slots.generations
        for expert in range(8):
            run(request, 1, [[expert]])
            run(request, 0, [[expert]])
        assert int(cache._core.slots.generations.max()) < 100
