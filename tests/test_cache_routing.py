"""Steps through the public API, with real banks and the real engine: every expert handed out holds its own bytes."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from cache_helpers import make_bank, run
from hypothesis import given, settings
from hypothesis import strategies as st
from reference_core import SETTINGS

import moecache
from moecache import CacheOptions, ExpertBank, ExpertCache
from moecache._engine import FaultyLink, HostLink
from moecache.errors import (
    RoutingError,
)


@pytest.mark.failure("1")
@given(data=st.data())
@settings(SETTINGS, max_examples=15)
def test_any_steps_get_their_own_bytes(data: st.DataObject) -> None:
    num_experts = data.draw(st.sampled_from([(8,), (3, 6, 4), (5, 5, 5, 5)]))
    alike = data.draw(st.booleans())
    sizes = [4 if alike else 3 + layer % 2 for layer in range(len(num_experts))]
    with make_bank(num_experts, sizes=sizes) as bank:
        capacity = data.draw(st.integers(2 * len(bank.shape_groups), sum(num_experts)))
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
