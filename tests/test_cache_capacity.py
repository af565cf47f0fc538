"""Capacities as people write them: what they come to, and which are refused."""

from __future__ import annotations

import logging
import math
import threading
from typing import Any

import numpy as np
import pytest
import torch
from cache_helpers import make_bank, run

from moecache import ExpertBank, ExpertCache, pool
from moecache.errors import (
    CapacityError,
    ClosedError,
)


@pytest.mark.parametrize(
    ("capacity", "slots"),
    [
        (1, 1),
        (16, 16),
        (np.int64(3), 3),
        (0.25, 4),
        (1.0, 16),
        (np.float32(0.5), 8),
        ("8GiB", 16),
        ("2KB", 5),
        ("auto", 16),
    ],
    ids=str,
)
def test_capacities(bank: ExpertBank, capacity: Any, slots: int) -> None:
    # An expert has 45 float32 in slots that are multiples of 64 bytes.
    each = pool.slot_nbytes(bank.shape_groups[0])
    with ExpertCache(bank, capacity) as cache:
        assert cache.capacity == (2000 // each if capacity == "2KB" else slots)
        assert cache.resident_nbytes == 0
        assert sum(t.shape[0] for t in (kind["down"] for kind in cache.pool.tensors)) == cache.capacity


@pytest.mark.parametrize(
    "capacity",
    [0, -1, 17, 0.0, -0.5, 1.5, math.nan, math.inf, True, False, None, "8 GB", "GiB", "", "0GiB", "-1GiB", "1B", "8", "1e3B", "lots",
     [4], 1j, 0.001],
    ids=repr,
)  # fmt: skip
def test_capacities_that_cannot_work(bank: ExpertBank, capacity: Any) -> None:
    threads = threading.active_count()
    with pytest.raises(CapacityError, match="capacity"):
        ExpertCache(bank, capacity)
    assert threading.active_count() == threads


@pytest.mark.failure("45")
def test_a_capacity_below_top_k_is_refused(bank: ExpertBank) -> None:
    with pytest.raises(CapacityError, match="one token needs 4 at once: ask for at least 4"):
        ExpertCache(bank, 3, top_k=4)
    with ExpertCache(bank, 4, top_k=4):
        pass


@pytest.mark.parametrize("top_k", [0, -2])
def test_a_top_k_below_one_is_refused(bank: ExpertBank, top_k: int) -> None:
    with pytest.raises(CapacityError, match="top_k"):
        ExpertCache(bank, 4, top_k=top_k)


def test_a_device_without_addresses_is_refused(bank: ExpertBank) -> None:
    with pytest.raises(CapacityError, match="no slots can be made on meta"):
        ExpertCache(bank, 4, device="meta")


def test_a_bank_that_is_closed_is_refused(bank: ExpertBank) -> None:
    bank.close()
    with pytest.raises(ClosedError, match="bank is closed"):
        ExpertCache(bank, 4)


@pytest.mark.failure("105")
def test_bytes_are_never_exceeded() -> None:
    with make_bank((6, 6, 3), sizes=[4, 7, 4]) as bank:
        small, large = bank.expert_nbytes(0), bank.expert_nbytes(1)
        for nbytes in range(2 * small + 2 * large, bank.nbytes, 97):
            with ExpertCache(bank, f"{nbytes}B") as cache:
                assert cache.pool.nbytes <= nbytes


@pytest.mark.failure("101")
def test_more_than_the_machine_has_is_refused_before_allocating(
    bank: ExpertBank, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(pool, "available_memory", lambda device: 1000)
    monkeypatch.setattr(torch, "empty", None)
    with pytest.raises(CapacityError, match=r"16 experts needs .* bytes and cpu has 1,000 free"):
        ExpertCache(bank, 16)


@pytest.mark.failure("13")
def test_a_small_capacity_is_logged_once(bank: ExpertBank, caplog: pytest.LogCaptureFixture) -> None:
    with (
        caplog.at_level(logging.WARNING, "moecache"),
        ExpertCache(bank, 3, top_k=2) as cache,
        cache.request() as request,
    ):
        for n in range(8):
            run(request, n % 2, [[n % 8, (n + 1) % 8]])
        cache.resize(4)
        run(request, 0, [[1, 2]])
    assert len(caplog.records) == 1
    nbytes = 2 * (bank.expert_nbytes(0) + bank.expert_nbytes(1))
    assert "capacity of 3 experts is below the 4 that one token uses" in caplog.text
    assert f"{nbytes:,} bytes a token" in caplog.text


def test_enough_capacity_is_silent(bank: ExpertBank, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.DEBUG), ExpertCache(bank, 4, top_k=2) as cache, cache.request() as request:
        run(request, 0, [[1, 2]])
    assert caplog.records == []
