"""The public face with real banks and the real engine: every expert handed out holds its own bytes, whatever was asked of the cache."""

from __future__ import annotations

import errno
import logging
import math
import re
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from reference_core import SETTINGS

import moecache
from moecache import CacheOptions, ExpertBank, ExpertCache, History, Request, pool
from moecache._engine import FaultyLink, HostLink, ThrottledLink
from moecache.errors import (
    CapacityError,
    ClosedError,
    HistoryFormatError,
    LeaseError,
    OptionError,
    PolicyError,
    RoutingError,
    TransferError,
)


def make_bank(num_experts: Sequence[int] = (8, 8), *, sizes: Sequence[int] | None = None, salt: int = 0) -> ExpertBank:
    """Every expert's tensors hold numbers that no other expert has."""
    layers = []
    for layer, experts in enumerate(num_experts):
        size = 5 if sizes is None else sizes[layer]
        code = torch.arange(experts, dtype=torch.float32).reshape(-1, 1, 1) + 1000 * (layer + 1) + 100_000 * salt
        layers.append(
            {
                "gate_up": code + torch.linspace(0, 0.5, 2 * size * 3).reshape(1, 2 * size, 3),
                "down": -code - torch.linspace(0, 0.5, 3 * size).reshape(1, 3, size),
            }
        )
    return ExpertBank.from_tensors(layers)


@pytest.fixture
def bank() -> Iterator[ExpertBank]:
    with make_bank() as bank:
        yield bank


def run(request: Request, layer: int, ids: Any, **options: Any) -> list[int]:
    """One step, every expert's bytes checked; returns the experts in the order they came."""
    cache = request.cache
    order = []
    with request.route(layer, torch.as_tensor(ids), **options) as lease:
        for expert, slot, tokens in lease.ready():
            check(cache, lease, layer, expert, slot)
            assert len(tokens) == len(lease.positions)
            order.append(expert)
            assert len(cache.resident()) <= cache.capacity
    return order


def check(cache: ExpertCache, lease: Any, layer: int, expert: int, slot: int) -> None:
    for name, tensor in cache.bank.expert(layer, expert).items():
        assert torch.equal(lease.weights[name][slot], tensor), f"layer {layer} expert {expert}: {name} is another's"


# Steps


@pytest.mark.failure("1")
@given(data=st.data())
@settings(SETTINGS, max_examples=15)
def test_any_steps_get_their_own_bytes(data: st.DataObject) -> None:
    num_experts = data.draw(st.sampled_from([(8,), (3, 6, 4), (5, 5, 5, 5)]))
    alike = data.draw(st.booleans())
    sizes = [4 if alike else 3 + layer % 2 for layer in range(len(num_experts))]
    with make_bank(num_experts, sizes=sizes) as bank:
        capacity = data.draw(st.integers(2 * len(bank.kinds), sum(num_experts)))
        policy = data.draw(st.sampled_from(moecache.policy.NAMES))
        with ExpertCache(bank, capacity, policy=policy, prefetch=data.draw(st.booleans())) as cache:
            assert cache.capacity == capacity
            requests = [cache.request(), cache.request()]
            for n in range(data.draw(st.integers(1, 24))):
                layer = n // 2 % len(num_experts)
                shape = data.draw(st.tuples(st.integers(0, 5), st.integers(1, 3)))
                row = st.lists(st.integers(-1, num_experts[layer] - 1), min_size=shape[1], max_size=shape[1])
                ids = data.draw(st.lists(row, min_size=shape[0], max_size=shape[0]))
                seen = run(requests[n % 2], layer, torch.tensor(ids, dtype=torch.int64).reshape(shape))
                assert sorted(seen) == sorted({e for r in ids for e in r if e >= 0})
            stats = cache.stats()
            assert stats.hits + stats.misses == stats.demands
            assert sum(stats.layer_demands) == stats.demands
            for request in requests:
                request.close()


@pytest.mark.failure("2")
@pytest.mark.parametrize("capacity", [1, 2, 5, 16])
def test_a_step_larger_than_the_pool_is_exact(bank: ExpertBank, capacity: int) -> None:
    with ExpertCache(bank, capacity) as cache, cache.request() as request:
        for layer in (0, 1, 0, 1):
            assert sorted(run(request, layer, [[e, (e + 3) % 8] for e in range(8)])) == list(range(8))
        stats = cache.stats()
        assert (stats.waves > 0) == (capacity < 8)
        assert stats.resident_experts <= capacity


@pytest.mark.failure("43")
def test_tokens_and_positions_are_those_of_the_one_hot_mask(bank: ExpertBank) -> None:
    ids = torch.tensor([[3, 1], [1, 3], [3, 3], [-1, 1]])
    mask = torch.nn.functional.one_hot(ids + 1, 9).permute(2, 1, 0)[1:]
    with ExpertCache(bank, 4) as cache, cache.request() as request, request.route(0, ids) as lease:
        assert lease.experts == [1, 3]
        assert lease.missing == 2
        assert lease.positions.tolist() == []
        for expert, _, tokens in lease.ready():
            position, token = torch.where(mask[expert])
            assert tokens.dtype == torch.int64
            assert torch.equal(tokens, token)
            assert torch.equal(lease.positions, position)


def test_resident_experts_come_first(bank: ExpertBank) -> None:
    link = FaultyLink(HostLink(), delay_s=0.05)
    with ExpertCache(bank, 8, options=CacheOptions(link=link)) as cache, cache.request() as request:
        run(request, 0, [[5, 2]])
        assert run(request, 0, [[0, 5, 1, 2]])[:2] == [2, 5]


def test_one_token_gives_row_zero_for_each_place(bank: ExpertBank) -> None:
    with (
        ExpertCache(bank, 4) as cache,
        cache.request() as request,
        request.route(0, torch.tensor([[2, 6, 2]])) as lease,
    ):
        got = {expert: (tokens.tolist(), lease.positions.tolist()) for expert, _, tokens in lease.ready()}
    assert got == {2: ([0, 0], [0, 2]), 6: ([0], [1])}


# Ids


DTYPES = [torch.int8, torch.uint8, torch.int16, torch.int32, torch.int64, torch.uint16, torch.uint32, torch.uint64]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_ids_of_every_integer_dtype(bank: ExpertBank, dtype: torch.dtype) -> None:
    with ExpertCache(bank, 4) as cache, cache.request() as request:
        assert sorted(run(request, 0, torch.tensor([[1, 7], [0, 1]]).to(dtype))) == [0, 1, 7]


@pytest.mark.parametrize(
    "ids",
    [
        torch.tensor([[0, 9, 1], [2, 9, 3]])[:, ::2],
        torch.tensor([[0, 2], [1, 3]]).t(),
        torch.tensor([[0], [1], [2], [3]]).repeat(1, 2)[::1, 1:],
        torch.tensor([0, 1, 2, 3]).expand(3, 4),
        torch.nn.Parameter(torch.tensor([[0, 1], [2, 3]]), requires_grad=False),
    ],
    ids=["columns", "transposed", "narrowed", "expanded", "subclass"],
)
def test_ids_need_not_be_contiguous(bank: ExpertBank, ids: torch.Tensor) -> None:
    with ExpertCache(bank, 4) as cache, cache.request() as request:
        assert sorted(run(request, 0, ids)) == [0, 1, 2, 3]


META = torch.zeros((1, 2), dtype=torch.int64, device="meta")


@pytest.mark.failure("38", "42")
@pytest.mark.parametrize(
    ("ids", "options", "message"),
    [
        ([[0, 8]], {}, "layer 1: expert id 8 of token 0, position 1, is out of range: expected 0..7"),
        ([[0, 1], [-2, 1]], {}, "expert id -2 of token 1"),
        ([[10**9, 0]], {}, "expert id 1000000000"),
        (torch.tensor([[0.0, 1.0]]), {}, "torch.float32"),
        (torch.tensor([[True, False]]), {}, "torch.bool"),
        (torch.tensor([0, 1]), {}, r"shape \(2,\); expected \[tokens, k\]"),
        (torch.tensor([[[0, 1]]]), {}, r"shape \(1, 1, 2\)"),
        (torch.tensor(3), {}, r"shape \(\)"),
        ([[0], [1, 2]], {}, "cannot be made a tensor"),
        (None, {}, "cannot be made a tensor"),
        ("01", {}, "cannot be made a tensor"),
        (META, {}, "meta"),
        ([[0, 1]], {"topk_weights": torch.tensor([[0.5, math.nan]])}, "NaN"),
        ([[0, 1]], {"topk_weights": torch.tensor([[0.5]])}, "gate weights"),
        ([[0, 1]], {"topk_weights": torch.tensor([[1, 2]])}, "gate weights are torch.int64"),
        ([[0, 1]], {"topk_weights": torch.zeros((1, 2), device="meta")}, "meta"),
        ([[0, 1]], {"token_mask": torch.tensor([1])}, "`token_mask` is torch.int64"),
        ([[0, 1]], {"token_mask": torch.tensor([True, True])}, "`token_mask`"),
        ([[0, 1]], {"token_mask": torch.ones(1, dtype=torch.bool, device="meta")}, "meta"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_bad_routing_changes_nothing(bank: ExpertBank, ids: Any, options: dict[str, Any], message: str) -> None:
    with ExpertCache(bank, 3) as cache, cache.request() as request:
        run(request, 1, [[2, 3]])
        before = cache.stats().as_dict(), cache.resident(), [c.tolist() for c in request.counts]
        with pytest.raises(RoutingError, match=message):
            request.route(1, ids, **options)
        after = cache.stats().as_dict(), cache.resident(), [c.tolist() for c in request.counts]
        assert before == after
        assert sorted(run(request, 1, [[4, 5]])) == [4, 5]


@pytest.mark.parametrize("layer", [-1, 2, 99])
def test_a_layer_that_is_not_there(bank: ExpertBank, layer: int) -> None:
    with ExpertCache(bank, 3) as cache, cache.request() as request, pytest.raises(RoutingError, match=r"0\.\.1"):
        request.route(layer, torch.tensor([[0]]))


@pytest.mark.failure("37", "39", "40")
def test_padding_duplicates_and_empty_batches_just_work(bank: ExpertBank) -> None:
    with ExpertCache(bank, 3) as cache, cache.request() as request:
        assert run(request, 0, [[0, -1], [-1, -1]]) == [0]
        assert run(request, 0, [[3, 3, 3]]) == [3]
        assert run(request, 0, torch.zeros((0, 2), dtype=torch.int64)) == []
        assert run(request, 0, torch.full((2, 2), -1)) == []
        assert request.counts[0].tolist() == [1, 0, 0, 1, 0, 0, 0, 0]
        stats = cache.stats()
        assert (stats.demands, stats.misses, stats.tokens) == (2, 2, 2)


@pytest.mark.failure("38")
def test_the_padding_id_is_padding_when_configured(bank: ExpertBank) -> None:
    with ExpertCache(bank, 3, options=CacheOptions(padding_id=8)) as cache, cache.request() as request:
        assert run(request, 0, [[8, 0], [-1, 8]]) == [0]


@pytest.mark.parametrize("padding_id", [0, 3, 7])
def test_a_padding_id_that_is_an_expert_is_refused(bank: ExpertBank, padding_id: int) -> None:
    with pytest.raises(RoutingError, match=f"padding_id {padding_id} is an expert"):
        ExpertCache(bank, 3, options=CacheOptions(padding_id=padding_id))


def test_good_gate_weights_and_uncounted_rows_pass(bank: ExpertBank) -> None:
    with ExpertCache(bank, 4) as cache, cache.request() as request:
        weights = torch.tensor([[0.5, 0.5], [math.inf, 0.0]], dtype=torch.bfloat16)
        run(request, 0, [[0, 1], [2, 3]], topk_weights=weights, token_mask=torch.tensor([True, False]))
        assert request.counts[0].tolist() == [1, 1, 0, 0, 0, 0, 0, 0]
        assert cache.stats().tokens == 1
        run(request, 0, torch.zeros((0, 2), dtype=torch.int64), topk_weights=torch.zeros(0, 2))


@pytest.mark.failure("45")
@pytest.mark.parametrize("k", [1, 4, 8])
def test_top_k_up_to_all_experts(k: int) -> None:
    with make_bank((8, 1)) as bank, ExpertCache(bank, 8) as cache, cache.request() as request:
        assert sorted(run(request, 0, [list(range(k))])) == list(range(k))
        assert run(request, 1, [[0] * k]) == [0]


# Capacity


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
    each = pool.slot_nbytes(bank.kinds[0])
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
def test_a_small_capacity_is_said_once(bank: ExpertBank, caplog: pytest.LogCaptureFixture) -> None:
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


# Leases and the end of things


@pytest.mark.failure("19")
def test_an_exception_inside_a_lease_gives_the_slots_back(bank: ExpertBank) -> None:
    with ExpertCache(bank, 2) as cache, cache.request() as request:
        for _ in range(3):
            with pytest.raises(ZeroDivisionError), request.route(0, torch.tensor([[0], [1], [2]])) as lease:  # noqa: PT012
                for _ in lease.ready():
                    raise ZeroDivisionError
        assert cache._core.holders() == []
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
            assert cache._core.holders() == [(0, 0)]
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
    """A core whose first look for slots finds none, with the holder letting go right after it."""

    def __init__(self, core: Any, let_go: Callable[[], None]) -> None:
        self.core, self.let_go, self.looks = core, let_go, 0

    def retry(self, step: Any) -> bool:
        found = bool(self.core.retry(step))
        self.looks += 1
        if self.looks == 1:
            assert not found
            self.let_go()
        return found

    def __getattr__(self, name: str) -> Any:
        return getattr(self.core, name)


def test_a_slot_that_is_let_go_during_the_look_is_found(bank: ExpertBank) -> None:
    with ExpertCache(bank, 1, timeout=60) as cache, cache.request() as one, cache.request() as two:
        held = []

        def hold() -> None:
            held.append(one.route(0, torch.tensor([[0]])))
            list(held[0].ready())

        other = threading.Thread(target=hold)
        other.start()
        other.join(60)
        with two.route(0, torch.tensor([[1]])) as lease:
            lease._core = ReleasesLate(cache._core, held[0].release)
            assert [expert for expert, _, _ in lease.ready()] == [1]


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
        assert cache._core.holders() == []


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


# Copies that fail, and copies that are slow


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
        assert cache._core.holders() == []
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
            assert cache._core.holders() == []
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
        assert cache._core.pinned() == 0


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


def test_a_hint_is_prefetched_and_believed_until_its_layer_comes() -> None:
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


# Threads


@pytest.mark.failure("114")
def test_two_threads_with_two_requests() -> None:
    with make_bank((8, 8, 8)) as bank, ExpertCache(bank, 7, top_k=2, timeout=60) as cache:
        errors: list[BaseException] = []

        def work(seed: int) -> None:
            rng = np.random.default_rng(seed)
            try:
                for _ in range(3):
                    with cache.request() as request:
                        for n in range(120):
                            tokens = 1 if n % 10 else 6
                            run(request, n % 3, torch.from_numpy(rng.integers(0, 8, (tokens, 2))))
            except BaseException as error:
                errors.append(error)

        threads = [threading.Thread(target=work, args=(seed,)) for seed in (1, 2)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(120)
        assert not any(thread.is_alive() for thread in threads)
        assert errors == []
        stats = cache.stats()
        assert stats.steps == 720
        assert stats.hits + stats.misses == stats.demands
        assert stats.prefetch_issued == stats.prefetch_useful + stats.prefetch_late + stats.prefetch_wasted
        assert cache._core.holders() == []
        assert len(cache.history) == 6


@pytest.mark.failure("115")
def test_two_caches_in_one_process_are_independent() -> None:
    with make_bank() as one, make_bank((8, 8), salt=1) as two, ExpertCache(one, 3) as a, ExpertCache(two, 5) as b:
        with a.request() as first, b.request() as second:
            for n in range(20):
                run(first, n % 2, [[n % 8]])
                run(second, n % 2, [[(3 * n) % 8, 0]])
            assert first.counts[0].sum() == 10
            assert second.counts[1].sum() == 20
        assert (a.stats().steps, b.stats().steps) == (20, 20)
        assert (len(a.history), len(b.history)) == (1, 1)


def test_two_caches_on_one_bank_and_one_history(bank: ExpertBank) -> None:
    with ExpertCache(bank, 3) as a, ExpertCache(bank, 4, history=a.history) as b:
        with a.request() as first, b.request() as second:
            for n in range(16):
                run(first, n % 2, [[n % 8]])
                run(second, n % 2, [[7 - n % 8]])
        assert len(a.history) == 2


@pytest.mark.failure("137")
def test_nothing_global_is_touched() -> None:
    program = """
import logging, os, sys, threading, warnings
import torch
filters, environment, threads = list(warnings.filters), dict(os.environ), threading.active_count()
modules = set(sys.modules)
import moecache
assert threading.active_count() == threads
bank = moecache.ExpertBank.from_tensors([{"w": torch.rand(8, 4)}])
with moecache.ExpertCache(bank, 2) as cache, cache.request() as request, request.route(0, torch.tensor([[1]])) as lease:
    list(lease.ready())
assert logging.getLogger().handlers == []
assert logging.getLogger("moecache").handlers == []
assert list(warnings.filters) == filters
assert dict(os.environ) == environment
assert "transformers" not in sys.modules
assert not any(name.startswith("cuda") for name in set(sys.modules) - modules)
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=120, check=False)
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")


# Resize


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
def test_resizing_layers_of_two_kinds() -> None:
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


# Statistics


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


# Decisions seen from outside


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
        assert len(bank.kinds) == 2
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


# History through the cache


def test_the_history_is_written_at_close_and_read_again(bank: ExpertBank, tmp_path: Path) -> None:
    path = tmp_path / "chat.history"
    with ExpertCache(bank, 4, history=path, top_k=2) as cache:
        with cache.request() as request:
            run(request, 0, [[0, 1], [2, 3]])
            run(request, 1, [[4, 5], [6, 7]])
        assert not path.exists()
    assert path.exists()
    with ExpertCache(bank, 4, history=str(path), top_k=2) as cache:
        assert len(cache.history) == 1
        assert cache.history.store.prompt_counts[0].tolist() == [1, 1, 1, 1, 0, 0, 0, 0, 0, 0, 0, 0, 1, 1, 1, 1]
        with cache.request() as request:
            run(request, 0, [[5, 6]])
    assert len(History.load(path)) == 2
    assert [p.name for p in tmp_path.iterdir()] == ["chat.history"]


@pytest.mark.failure("56")
def test_a_history_of_another_model_is_refused(bank: ExpertBank, tmp_path: Path) -> None:
    path = tmp_path / "chat.history"
    with ExpertCache(bank, 4, history=path, top_k=2) as cache, cache.request() as request:
        run(request, 0, [[0, 1]])
    content = path.read_bytes()
    threads = threading.active_count()
    for other, top_k in [
        (make_bank((8, 4)), 2),
        (make_bank((8, 8, 8)), 2),
        (make_bank((8, 8), sizes=[6, 6]), 2),
        (bank, 3),
    ]:
        with pytest.raises(HistoryFormatError, match=r"another model: expected .*found"):
            ExpertCache(other, 4, history=path, top_k=top_k)
        with pytest.raises(HistoryFormatError, match="another model"):
            ExpertCache(other, 4, history=History.load(path), top_k=top_k)
    assert threading.active_count() == threads
    assert path.read_bytes() == content


def test_a_history_that_cannot_be_written_anywhere_is_refused_at_the_start(bank: ExpertBank, tmp_path: Path) -> None:
    with pytest.raises(HistoryFormatError, match="no folder"):
        ExpertCache(bank, 4, history=tmp_path / "missing" / "chat.history")


@pytest.mark.failure("50")
def test_many_requests_do_not_grow_the_cache(bank: ExpertBank) -> None:
    with ExpertCache(bank, 4, options=CacheOptions(history_capacity=3)) as cache:
        for n in range(60):
            with cache.request() as request:
                run(request, n % 2, [[n % 8]])
        assert len(cache.history) == 3
        assert cache.stats().requests == 60
        assert cache.history.store.replaced == 57
