"""Counters of known traces, and decisions seen from outside."""

from __future__ import annotations

import threading

import numpy as np
import pytest
import torch
from cache_helpers import make_bank, run

from moecache import ExpertBank, ExpertCache
from moecache.errors import (
    PolicyError,
)


@pytest.mark.failure("138")
def test_a_known_trace_has_exact_numbers(bank: ExpertBank) -> None:
    each = bank.expert_nbytes(0)
    with ExpertCache(bank, 2, policy="lru", prefetch=False) as cache:
        with cache.request() as request:
            for layer, expert in [(0, 0), (1, 0), (0, 0), (0, 1), (1, 0), (0, 0)]:
                run(request, layer, [[expert]])
        stats = cache.stats()
        # 0:0 miss, 1:0 miss, 0:0 hit, 0:1 evicts 1:0, 1:0 evicts 0:0, 0:0 evicts 0:1.
        assert (stats.demands, stats.hits, stats.misses, stats.evictions) == (6, 1, 5, 3)
        assert (stats.layer_demands, stats.layer_hits) == ((4, 2), (1, 0))
        assert (stats.bytes_demand, stats.bytes_prefetch) == (5 * each, 0)
        assert (stats.requests, stats.steps, stats.tokens, stats.waves) == (1, 6, 4, 0)
        assert (stats.capacity_experts, stats.resident_experts, stats.resident_bytes) == (2, 2, 2 * each)
        assert stats.expert_bytes_total == bank.nbytes == 16 * each
        assert stats.stall_s >= 0
        assert stats.hit_rate == 1 / 6
        cache.reset_stats()
        clean = cache.stats()
        for name in (
            "demands",
            "hits",
            "misses",
            "evictions",
            "bytes_demand",
            "steps",
            "tokens",
            "requests",
            "requests_s",
            "deciding_s",
            "stall_s",
        ):
            assert getattr(clean, name) == 0
        assert clean.layer_demands == (0, 0)
        assert clean.resident_experts == 2
        with cache.request() as request:
            run(request, 0, [[0]])
        assert (cache.stats().demands, cache.stats().hits) == (1, 1)


@pytest.mark.failure("105")
def test_the_pool_never_holds_more_than_its_slots(bank: ExpertBank) -> None:
    rng = np.random.default_rng(0)
    with ExpertCache(bank, 3, top_k=1) as cache, cache.request() as request:
        addresses = {tensor.data_ptr() for kind in cache.pool.tensors for tensor in kind.values()}
        for n in range(150):
            with request.route(n % 2, torch.from_numpy(rng.integers(0, 8, (1 + n % 5, 2)))) as lease:
                for _ in lease.ready():
                    assert len(cache.resident()) <= 3
                    assert cache.resident_nbytes <= 3 * bank.expert_nbytes(0)
        assert {tensor.data_ptr() for kind in cache.pool.tensors for tensor in kind.values()} == addresses
        assert cache.stats().evictions > 0


@pytest.mark.failure("10")
def test_a_prompt_over_all_experts_leaves_the_decode_set_warm() -> None:
    # Eight experts are hot by decode; a prompt of another request touches all; then decode goes on.
    with make_bank((16, 16)) as bank:

        def hits_after_prompt(policy: str) -> int:
            with ExpertCache(bank, 12, policy=policy, prefetch=False) as cache, cache.request() as chat:
                for n in range(120):
                    run(chat, n % 2, [[n // 2 % 4]])
                with cache.request() as prompt:
                    for layer in (0, 1):
                        run(prompt, layer, [[e, (e + 1) % 16] for e in range(16)])
                before = cache.stats().hits
                for n in range(8):
                    run(chat, n % 2, [[n // 2 % 4]])
                return cache.stats().hits - before

        assert hits_after_prompt("expected-next-use") > hits_after_prompt("lru")


@pytest.mark.failure("15")
def test_no_layer_starves_when_the_pool_is_a_little_too_small() -> None:
    # Cyclic use of 32 layers with slots for 30: recency alone misses always.
    num_experts = (4,) * 32
    with make_bank(num_experts) as bank:

        def layer_hits(policy: str) -> tuple[int, ...]:
            with ExpertCache(bank, 30, policy=policy, top_k=1, prefetch=False) as cache, cache.request() as request:
                for _ in range(12):
                    for layer in range(32):
                        run(request, layer, [[layer % 4]])
                return cache.stats().layer_hits

        assert sum(layer_hits("lru")) == 0
        default = layer_hits("expected-next-use")
        assert sum(default) > 0.5 * 32 * 12
        assert len(default) == 32


@pytest.mark.failure("60")
def test_a_skewed_trace_is_prefetched_through_the_real_engine() -> None:
    with make_bank((8, 8, 8, 8)) as bank, ExpertCache(bank, 8, top_k=1) as cache:
        rng = np.random.default_rng(0)
        for _ in range(3):
            with cache.request() as request:
                for _ in range(60):
                    e = int(rng.integers(8))
                    for layer in range(4):
                        run(request, layer, [[(e + layer) % 8]])
                        cache._engine.drain(60)
            cache.resize(9)
        stats = cache.stats()
        assert stats.prefetch_issued > 0
        assert stats.prefetch_issued == stats.prefetch_useful + stats.prefetch_late + stats.prefetch_wasted
        assert stats.prefetch_useful > 0.5 * stats.prefetch_issued
        assert stats.bytes_prefetch > 0
        with ExpertCache(bank, 8, top_k=1, prefetch=False) as without, without.request() as request:
            for n in range(40):
                run(request, n % 4, [[n % 8]])
            assert without.stats().prefetch_issued == without.stats().bytes_prefetch == 0


@pytest.mark.failure("11")
def test_layers_of_differing_bytes_do_not_disturb_each_other() -> None:
    bank = make_bank((4, 4, 4, 4), sizes=[4, 8, 4, 8])
    with bank, ExpertCache(bank, 8, prefetch=False) as cache, cache.request() as request:
        assert len(bank.shape_groups) == 2
        for _ in range(10):
            for layer in range(4):
                run(request, layer, [[layer % 4]])
        stats = cache.stats()
        assert (stats.misses, stats.hits, stats.evictions) == (4, 36, 0)


def test_a_policy_that_does_not_exist(bank: ExpertBank) -> None:
    threads = threading.active_count()
    with pytest.raises(PolicyError, match="did you mean lru"):
        ExpertCache(bank, 4, policy="lruu")
    assert threading.active_count() == threads
