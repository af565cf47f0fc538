"""Leases and requests: who may use them how long, and what is left when they end."""

from __future__ import annotations

import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from cache_helpers import check, make_bank, run

from moecache import ExpertBank, ExpertCache
from moecache.errors import (
    ClosedError,
    LeaseError,
)


@pytest.mark.failure("19")
def test_an_exception_inside_a_lease_gives_the_slots_back(bank: ExpertBank) -> None:
    with ExpertCache(bank, 2) as cache, cache.request() as request:
        for _ in range(3):
            with pytest.raises(ZeroDivisionError), request.route(0, torch.tensor([[0], [1], [2]])) as lease:  # noqa: PT012
                for _ in lease.ready():
                    raise ZeroDivisionError
        assert cache._core.slots.pinned_experts() == []
        assert sorted(run(request, 1, [[e] for e in range(8)])) == list(range(8))
        assert sorted(run(request, 0, [[6, 7]])) == [6, 7]


@pytest.mark.failure("19")
def test_releasing_twice_does_nothing(bank: ExpertBank) -> None:
    with ExpertCache(bank, 2) as cache, cache.request() as request:
        lease = request.route(0, torch.tensor([[0, 1]]))
        with request.route(0, torch.tensor([[0]])) as second:
            lease.release()
            lease.release()
            assert [e for e, _, _ in second.ready()] == [0]
            assert cache._core.slots.pinned_experts() == [(0, 0)]
        cache.resize(3)  # no lease is thought to be open


def test_a_lease_cannot_be_used_after_its_end(bank: ExpertBank) -> None:
    with ExpertCache(bank, 2) as cache, cache.request() as request:
        with request.route(0, torch.tensor([[0, 1]])) as lease:
            pass
        with pytest.raises(LeaseError, match="has ended"):
            list(lease.ready())
        with request.route(0, torch.tensor([[0, 1]])) as lease:
            assert len(list(lease.ready())) == 2
        with pytest.raises(LeaseError, match="has ended"):
            list(lease.ready())
        with request.route(0, torch.tensor([[0, 1]])) as lease:
            items = lease.ready()
            next(items)
        with pytest.raises(LeaseError, match="has ended"):
            next(items)


def test_a_loop_that_was_left_can_be_taken_up_again(bank: ExpertBank) -> None:
    with (
        ExpertCache(bank, 2) as cache,
        cache.request() as request,
        request.route(0, torch.tensor([[e] for e in range(5)])) as lease,
    ):
        seen = []
        while len(seen) < 5:
            expert, slot, _ = next(lease.ready())
            seen.append(expert)
            check(cache, lease, 0, expert, slot)  # still its own until the next one is asked for
        assert sorted(seen) == list(range(5))
        assert list(lease.ready()) == []


@pytest.mark.failure("3")
def test_routing_inside_an_open_lease_until_no_slot_is_left(bank: ExpertBank) -> None:
    with ExpertCache(bank, 4) as cache, cache.request() as request:
        with request.route(0, torch.tensor([[0, 1]])) as first:
            held = [(e, slot) for e, slot, _ in first.ready()]
            with request.route(1, torch.tensor([[2, 3]])) as second:
                assert len(list(second.ready())) == 2
                with request.route(0, torch.tensor([[5]])) as third:
                    message = "needs slots for 1 more experts, and all 4 are held by leases"
                    with pytest.raises(LeaseError, match=message):
                        list(third.ready())
                with request.route(0, torch.tensor([[1]])) as shared:
                    assert [e for e, _, _ in shared.ready()] == [1]
                for expert, slot in held:
                    check(cache, first, 0, expert, slot)
        assert sorted(run(request, 0, [[5, 6, 7]])) == [5, 6, 7]


@pytest.mark.failure("3")
def test_a_lease_waits_for_a_slot_that_another_thread_holds(bank: ExpertBank) -> None:
    with ExpertCache(bank, 1, timeout=60) as cache:
        inside, asked = threading.Event(), threading.Event()

        def hold() -> None:
            with cache.request() as request, request.route(0, torch.tensor([[0]])) as lease:
                list(lease.ready())
                inside.set()
                asked.wait(60)

        other = threading.Thread(target=hold)
        other.start()
        assert inside.wait(60)
        with cache.request() as request, request.route(0, torch.tensor([[1]])) as lease:
            asked.set()
            [(expert, slot, _)] = lease.ready()
            check(cache, lease, 0, expert, slot)
        other.join(60)
        assert not other.is_alive()


class ReleasesLate:
    """A core's dispatcher whose first look for slots finds none, while the holder releases them right after it."""

    def __init__(self, core: Any, release_slot: Callable[[], None]) -> None:
        self.core, self.release_slot, self.looks = core, release_slot, 0
        self.dispatcher = self

    def retry(self, step: Any) -> bool:
        found = bool(self.core.dispatcher.retry(step))
        self.looks += 1
        if self.looks == 1:
            assert not found
            self.release_slot()
        return found

    def __getattr__(self, name: str) -> Any:
        return getattr(self.core.dispatcher if hasattr(self.core.dispatcher, name) else self.core, name)


def test_waiter_finds_slot_released_during_retry(bank: ExpertBank) -> None:
    with ExpertCache(bank, 1, timeout=60) as cache, cache.request() as one, cache.request() as two:
        held = []

        def hold() -> None:
            held.append(one.route(0, torch.tensor([[0]])))
            list(held[0].ready())

        other = threading.Thread(target=hold)
        other.start()
        other.join(60)
        with two.route(0, torch.tensor([[1]])) as lease:
            late = lease._core = ReleasesLate(cache._core, held[0].release)
            assert [expert for expert, _, _ in lease.ready()] == [1]
        assert late.looks > 1


def test_three_threads_with_steps_larger_than_the_pool() -> None:
    with make_bank((8, 8, 8)) as bank, ExpertCache(bank, 3, timeout=60) as cache:
        errors: list[BaseException] = []

        def work(seed: int) -> None:
            rng = np.random.default_rng(seed)
            try:
                with cache.request() as request:
                    for n in range(60):
                        run(request, n % 3, torch.from_numpy(rng.integers(0, 8, (int(rng.integers(1, 9)), 2))))
            except BaseException as error:
                errors.append(error)

        threads = [threading.Thread(target=work, args=(seed,)) for seed in range(3)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(120)
        assert not any(thread.is_alive() for thread in threads)
        assert errors == []
        assert cache.stats().waves > 0
        assert cache._core.slots.pinned_experts() == []


def test_use_after_close(bank: ExpertBank, tmp_path: Path) -> None:
    cache = ExpertCache(bank, 4)
    request = cache.request()
    run(request, 0, [[0, 1]])
    lease = request.route(0, torch.tensor([[2, 3]]))
    cache.close()
    cache.close()
    assert cache.closed
    for call in (
        lambda: request.route(0, torch.tensor([[0]])),
        cache.request,
        lambda: cache.resize(3),
        cache.reset_stats,
        lambda: cache.record(tmp_path / "trace.safetensors"),
    ):
        with pytest.raises(ClosedError, match="closed"):
            call()
    lease.release()
    request.close()
    request.close()
    assert cache.stats().demands == 4
    assert "closed" in repr(cache)
    assert all(len(kind) == 0 for kind in cache.pool.tensors)


def test_a_closed_request_is_refused_and_its_counts_remain(bank: ExpertBank) -> None:
    with ExpertCache(bank, 4) as cache:
        with cache.request() as request:
            run(request, 0, [[0, 1]])
        with pytest.raises(ClosedError, match="this request is closed"):
            request.route(0, torch.tensor([[0]]))
        assert request.counts[0].tolist() == [1, 1, 0, 0, 0, 0, 0, 0]
        assert len(cache.history) == 1
        with pytest.raises(RuntimeError), cache.request() as request:  # noqa: PT012
            run(request, 0, [[0, 1]])
            raise RuntimeError
        assert len(cache.history) == 1
        assert cache.stats().requests == 2


@pytest.mark.failure("133")
def test_leaving_without_close_is_silent() -> None:
    program = """
import torch, moecache
bank = moecache.ExpertBank.from_tensors([{"w": torch.rand(8, 4)}])
cache = moecache.ExpertCache(bank, 2)
request = cache.request()
lease = request.route(0, torch.tensor([[1, 2, 3]]))
items = lease.ready()
next(items)
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=120, check=False)
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")
