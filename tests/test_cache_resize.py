"""Changing the capacity between steps."""

from __future__ import annotations

import math

import pytest
import torch
from cache_helpers import check, make_bank, run

from moecache import CacheOptions, ExpertBank, ExpertCache, pool
from moecache._engine import HostLink, ThrottledLink
from moecache.errors import (
    CapacityError,
    LeaseError,
)


def test_resizing_between_steps_of_an_open_request(bank: ExpertBank) -> None:
    with ExpertCache(bank, 6, policy="lru") as cache, cache.request() as request:
        for e in (0, 1, 2, 3, 4, 5):
            run(request, 0, [[e]])
        counters = cache.stats()
        cache.resize(3)
        assert cache.capacity == 3
        assert cache.resident() == {(0, 3), (0, 4), (0, 5)}
        after = cache.stats()
        for name in ("demands", "hits", "misses", "evictions", "steps", "tokens", "bytes_demand", "layer_demands"):
            assert getattr(after, name) == getattr(counters, name)
        run(request, 0, [[3, 4, 5]])
        assert cache.stats().hits == counters.hits + 3
        cache.resize(16)
        assert cache.resident() == {(0, 3), (0, 4), (0, 5)}
        for layer in (0, 1):
            for e in range(8):
                run(request, layer, [[e]])
        assert cache.stats().evictions == counters.evictions
        assert cache.stats().resident_experts == 16
        cache.resize(0.25)
        assert sorted(run(request, 1, [[e] for e in range(8)])) == list(range(8))
        assert request.counts[0].sum() == 6 + 3 + 8
    assert len(cache.history) == 1


@pytest.mark.failure("65")
def test_resizing_layers_of_two_shape_groups() -> None:
    with make_bank((6, 6, 6), sizes=[4, 7, 4]) as bank, ExpertCache(bank, 18) as cache, cache.request() as request:
        for _ in range(2):
            for capacity in (18, 3, 9, 6, 18):
                cache.resize(capacity)
                assert cache.capacity == capacity
                for layer in range(3):
                    run(request, layer, [[0, 5], [3, 1]])


def test_resizing_is_refused_while_a_lease_is_open(bank: ExpertBank) -> None:
    with ExpertCache(bank, 4) as cache, cache.request() as request:
        with request.route(0, torch.tensor([[0, 1]])) as lease:
            with pytest.raises(LeaseError, match="resize"):
                cache.resize(6)
            for expert, slot, _ in lease.ready():
                check(cache, lease, 0, expert, slot)
        for capacity in (0, 17, "8 GB", math.nan):
            with pytest.raises(CapacityError):
                cache.resize(capacity)
        assert cache.capacity == 4
        assert cache.resident() == {(0, 0), (0, 1)}
        run(request, 0, [[0, 1]])
        assert cache.stats().hits == 2


def test_resizing_with_a_link_of_ones_own(bank: ExpertBank) -> None:
    with (
        ExpertCache(bank, 4, options=CacheOptions(link=ThrottledLink(HostLink(), 1e9))) as cache,
        cache.request() as request,
    ):
        run(request, 0, [[0, 1]])
        cache.resize(6)
        run(request, 0, [[0, 1], [2, 3]])
        assert cache.stats().hits == 2


def test_a_resize_that_finds_no_memory_leaves_the_cache_as_it_was(
    bank: ExpertBank, monkeypatch: pytest.MonkeyPatch
) -> None:
    with ExpertCache(bank, 4) as cache, cache.request() as request:
        run(request, 0, [[0, 1]])
        with monkeypatch.context() as patch:
            patch.setattr(pool, "available_memory", lambda device: 10)
            with pytest.raises(CapacityError, match="10 free"):
                cache.resize(8)
        assert cache.capacity == 4
        run(request, 0, [[0, 1]])
        assert cache.stats().hits == 2
