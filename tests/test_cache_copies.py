"""Copies that fail, are slow or come ahead of need, as a cache sees them."""

from __future__ import annotations

import errno
import math
import re
import time
from typing import Any

import numpy as np
import pytest
import torch
from cache_helpers import make_bank, run

from moecache import CacheOptions, ExpertBank, ExpertCache
from moecache._engine import FaultyLink, HostLink, ThrottledLink
from moecache.errors import (
    ClosedError,
    OptionError,
    RoutingError,
    TransferError,
)


@pytest.mark.failure("30")
def test_a_failed_copy_reaches_the_caller_and_the_next_call_works(bank: ExpertBank) -> None:
    link = FaultyLink(HostLink(), fail_at=1, fails=1, error=errno.EIO)
    with ExpertCache(bank, 2, options=CacheOptions(link=link)) as cache, cache.request() as request:
        with pytest.raises(TransferError) as caught:
            run(request, 0, [[3]])
        cause = caught.value.__cause__
        assert isinstance(cause, OSError)
        assert cause.errno == errno.EIO
        assert cache.resident() == set()
        assert cache._core.slots.pinned_experts() == []
        for n in range(12):
            run(request, n % 2, [[3], [n % 8]])
        stats = cache.stats()
        assert stats.failed == 1
        assert stats.hits + stats.misses == stats.demands


def test_failures_at_any_chunk_lose_no_slot(bank: ExpertBank) -> None:
    for fail_at in range(1, 12):
        link = FaultyLink(HostLink(), fail_at=fail_at, fails=2)
        with ExpertCache(bank, 3, options=CacheOptions(link=link)) as cache, cache.request() as request:
            failed = 0
            for n in range(16):
                ids = [[(n * 3) % 8, n % 8], [7 - n % 8, 0]]
                for _ in range(4):
                    try:
                        run(request, n % 2, ids)
                        break
                    except TransferError:
                        failed += 1
            assert 0 < failed <= 2
            assert cache._core.slots.pinned_experts() == []
            assert len(cache.resident()) == 3
            assert sorted(run(request, 0, [[e] for e in range(8)])) == list(range(8))


@pytest.mark.failure("30")
def test_an_io_thread_that_ended_is_an_error(bank: ExpertBank) -> None:
    link = FaultyLink(HostLink(), end_thread_at=1)
    with ExpertCache(bank, 2, options=CacheOptions(link=link), timeout=60) as cache, cache.request() as request:
        with pytest.raises(TransferError), request.route(0, torch.tensor([[0]])) as lease:  # noqa: PT012
            for _ in range(10_000):  # until the thread has taken the job, and is gone
                if link.chunks:
                    break
                time.sleep(0.001)
            list(lease.ready())
        with pytest.raises(TransferError):
            request.route(1, torch.tensor([[1]]))
        # What could not even be asked for holds nothing.
        assert cache._core.slots.pinned() == 0


@pytest.mark.failure("18")
def test_a_prefetch_that_is_still_on_its_way_is_joined_once() -> None:
    with make_bank((8, 8, 8), sizes=[64] * 3) as bank:
        link = ThrottledLink(HostLink(), 1e9, 2e-3)
        with ExpertCache(bank, 6, options=CacheOptions(link=link), top_k=1, policy="lru") as cache:
            for _ in range(4):
                with cache.request() as request:
                    for token in range(40):
                        for layer in range(3):
                            request.hint(layer, np.eye(8)[(token * 3 + layer) % 8])
                        for layer in range(3):
                            run(request, layer, [[(token * 3 + layer) % 8]])
            stats = cache.stats()
            assert stats.prefetch_issued > 0
            assert stats.prefetch_late + stats.prefetch_useful > 0
            assert stats.prefetch_issued == stats.prefetch_useful + stats.prefetch_late + stats.prefetch_wasted
            # One copy of each: no more bytes than one expert for each miss and each prefetch that was not late.
            copies = stats.misses + stats.prefetch_issued - stats.prefetch_late
            assert stats.bytes_demand + stats.bytes_prefetch <= copies * bank.expert_nbytes(0)


def test_a_hint_is_prefetched_and_used_until_its_layer_comes() -> None:
    with make_bank((8, 8, 8)) as bank, ExpertCache(bank, 6, top_k=1) as cache, cache.request() as request:
        for token in range(12):
            for layer in range(3):
                known = (5 * token + layer) % 8
                request.hint((layer + 1) % 3, torch.eye(8)[(known + 1) % 8 if layer < 2 else (5 * token + 5) % 8])
                run(request, layer, [[known]])
                cache._engine.drain(60)
        stats = cache.stats()
        assert stats.prefetch_useful >= 30
        assert stats.prefetch_wasted <= 1
        before = stats.prefetch_issued
        # Used up: nothing is known of layer 1 now, and a hint of nothing at all asks for nothing.
        request.hint(1, np.zeros(8))
        run(request, 0, [[0]])
        assert cache.stats().prefetch_issued == before


@pytest.mark.parametrize(
    ("layer", "chances", "message"),
    [
        (3, np.zeros(8), "layer 3 is out of range"),
        (-1, np.zeros(8), "out of range"),
        (0, np.zeros(7), "7 chances; expected one for each of its 8"),
        (0, np.full(8, np.nan), "chance of expert 0 is nan"),
        (0, np.full(8, 1.5), "expected 0 to 1"),
        (0, torch.tensor([0.5] * 7 + [-0.1]), "chance of expert 7"),
        (0, np.zeros((2, 8)), "expected [experts]"),
    ],
)
def test_a_bad_hint_changes_nothing(layer: int, chances: Any, message: str) -> None:
    with make_bank((8, 8, 8)) as bank, ExpertCache(bank, 6, top_k=1) as cache:
        with cache.request() as request:
            with pytest.raises(RoutingError, match=re.escape(message)):
                request.hint(layer, chances)
            run(request, 0, [[0]])
            assert cache.stats().prefetch_issued == 0
        with pytest.raises(ClosedError):
            request.hint(0, np.zeros(8))


@pytest.mark.parametrize(
    "option",
    [{"prefetch_waste": -0.5}, {"prefetch_waste": math.nan}, {"history_capacity": 0}, {"threads": 0}, {"threads": 65}],
)
def test_options_that_cannot_be_are_refused(option: dict[str, Any]) -> None:
    with pytest.raises(OptionError, match=next(iter(option))):
        CacheOptions(**option)
