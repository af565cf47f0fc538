"""Steps whose rows belong to several requests: each learns from its own rows, the slots see one step."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from cache_helpers import check, make_bank, run
from core_helpers import Twins, id_rows, make_core
from hypothesis import given, settings
from hypothesis import strategies as st
from reference_core import SETTINGS, call_route, call_route_batch, run_step

from moecache import ExpertCache, Request, RequestBatch
from moecache.errors import ClosedError, RoutingError
from moecache.lab import read_trace

# The core


@given(data=st.data())
@settings(SETTINGS, max_examples=30)
def test_each_request_learns_from_its_own_rows(data: st.DataObject) -> None:
    num_experts = data.draw(st.sampled_from([(6,), (4, 4), (3, 6, 4)]))
    twins = Twins(num_experts, history=4)
    for _ in range(3):
        twins.begin()
    batch = twins.core.begin_batch()
    for n in range(data.draw(st.integers(1, 12))):
        layer = n % len(num_experts)
        members = data.draw(st.permutations(range(3)))[: data.draw(st.integers(1, 3))]
        k = data.draw(st.integers(1, 2))
        parts = []
        for member in members:
            rows = data.draw(id_rows(num_experts[layer], st.integers(1, 3), st.just(k)))
            parts.append((member, rows, len(rows) == 1 and data.draw(st.booleans())))
        counted = [data.draw(st.booleans()) for _, rows, _ in parts for _ in rows]
        step = twins.route_batch(batch, layer, parts, counted)
        assert step.expert_list() == sorted({e for _, rows, _ in parts for row in rows for e in row if e >= 0})
        if data.draw(st.booleans()):
            twins.route(members[0], layer, [[0] * k], True)
        twins.check()
    for _ in range(3):
        twins.end(0)
    twins.check()


@given(data=st.data())
@settings(SETTINGS, max_examples=20)
def test_a_batch_of_one_is_what_the_request_is_alone(data: st.DataObject) -> None:
    num_experts = (6, 5, 6)
    alone, batched = (make_core(num_experts, 9, policy="expected-next-use", prefetch=True) for _ in range(2))
    for core in (alone, batched):
        core.prefetcher.set_pace(1e-3, 1e-3, 1e-4)
    one, other, batch = alone.begin_request(), batched.begin_request(), batched.begin_batch()
    for n in range(data.draw(st.integers(1, 40))):
        layer = n % 3
        rows = data.draw(id_rows(num_experts[layer], st.just(1), st.just(2)))
        decode = data.draw(st.sampled_from([True, True, True, False]))
        first = call_route(alone, one, layer, rows, decode)
        second = call_route_batch(batched, batch, layer, [(other, rows, decode)])
        for name in ("fetches", "prefetches", "drops"):
            np.testing.assert_array_equal(getattr(first.plan, name), getattr(second.plan, name))
        for core, step in ((alone, first), (batched, second)):
            run_step(core, step)
            core.release(step)
        np.testing.assert_array_equal(alone.slots.occupants, batched.slots.occupants)
    counters = [
        {name: n for name, n in core.counters().items() if not name.endswith("_ns")} for core in (alone, batched)
    ]
    assert counters[0] == counters[1]


@pytest.mark.parametrize(("chances", "fetched"), [((0.4, 0.4), [8 + 6]), ((0.4, 0.0), []), ((0.0, 0.6), [8 + 6])])
def test_chances_of_all_requests_join_before_anything_is_fetched_ahead(
    chances: tuple[float, float], fetched: list[int]
) -> None:
    # Without a clock an expert is worth a transfer from a chance of 0.5 on.
    core = make_core((8, 8), 8, policy="expected-next-use", prefetch=True)
    requests, batch = [core.begin_request() for _ in range(2)], core.begin_batch()
    for request, chance in zip(requests, chances, strict=True):
        request.hint(1, np.eye(8)[6] * chance)
    step = call_route_batch(core, batch, 0, [(request, [[0, 1]], True) for request in requests])
    assert step.plan.prefetches[:, 0].tolist() == fetched
    run_step(core, step)
    core.release(step)
    step = call_route_batch(core, batch, 1, [(request, [[6, 1]], True) for request in requests])
    assert step.hits == len(fetched)
    assert core.counters()["prefetch_useful"] == len(fetched)


# The public API


def use(
    cache: ExpertCache,
    batch: RequestBatch,
    requests: list[Request | None],
    layer: int,
    ids: list[list[int]],
    **options: object,
) -> None:
    with batch.route(layer, torch.tensor(ids), requests=requests, **options) as lease:  # type: ignore[arg-type]
        for expert, slot, _ in lease.ready():
            check(cache, lease, layer, expert, slot)


def test_every_request_enters_the_history_with_its_own_rows() -> None:
    with ExpertCache(make_bank((8, 8)), 6) as cache, cache.batch() as batch:
        a, b = cache.request(), cache.request()
        for layer in (0, 1):
            use(cache, batch, [a, b], layer, [[0, 1], [0, 2], [7, 6]], lengths=[2, 1], decode=False)
        for layer in (0, 1):
            use(cache, batch, [a, b], layer, [[1, 2], [5, 6]])
        assert [counts.tolist() for counts in a.counts] == [[2, 2, 2, 0, 0, 0, 0, 0]] * 2
        assert [counts.tolist() for counts in b.counts] == [[0, 0, 0, 0, 0, 1, 2, 1]] * 2
        assert (a.stats().prompt_tokens, a.stats().decode_tokens, b.stats().decode_tokens) == (2, 1, 1)
        stats = cache.stats()
        assert stats.misses > 0
        assert stats.evictions > 0
        assert stats.resident_bytes < stats.expert_bytes_total
        whole = batch.stats()
        assert (whole.demands, whole.hits, stats.tokens) == (stats.demands, stats.hits, 5)
        assert a.stats().demands + b.stats().demands == 2 * (3 + 2) + 2 * (2 + 2)
        a.close()
        b.close(keep=False)
        assert len(cache.history) == 1


def test_rows_of_nobody_are_computed_and_not_counted() -> None:
    with ExpertCache(make_bank((8, 8)), 6) as cache, cache.batch() as batch, cache.request() as request:
        use(cache, batch, [None, request, None], 0, [[0, 1], [2, 3], [4, 5]])
        assert request.counts[0].tolist() == [0, 0, 1, 1, 0, 0, 0, 0]
        assert cache.stats().tokens == 1
        use(cache, batch, [None, None], 1, [[0, 1], [2, 3]])
        use(cache, batch, [request, None], 1, [[0, 1], [2, 3]], token_mask=torch.tensor([False, True]))
        assert request.counts[1].sum() == 0


def test_what_a_batch_cannot_take_changes_nothing() -> None:
    with ExpertCache(make_bank((8, 8)), 6) as cache, ExpertCache(make_bank((8, 8)), 6) as other:
        batch, a, b, foreign, closed = cache.batch(), cache.request(), cache.request(), other.request(), cache.request()
        closed.close()
        ids = torch.tensor([[0, 1], [2, 3], [4, 5]])
        refused: list[tuple[dict[str, object], type[Exception], str]] = [
            ({"requests": [a, b]}, RoutingError, "add up"),
            ({"requests": [a, b], "lengths": [1, 1]}, RoutingError, "add up"),
            ({"requests": [a, b], "lengths": [4, -1]}, RoutingError, "add up"),
            ({"requests": []}, RoutingError, "0 requests"),
            ({"requests": [a, a, b]}, RoutingError, "twice"),
            ({"requests": [a, b, foreign]}, RoutingError, "another cache"),
            ({"requests": [a, b, closed]}, ClosedError, "None in its place"),
            ({"requests": [a, b], "lengths": [2, 1], "decode": [True]}, RoutingError, "1 values for 2"),
            ({"requests": [a], "token_mask": torch.ones(2, dtype=torch.bool)}, RoutingError, "token_mask"),
        ]
        for arguments, error, text in refused:
            with pytest.raises(error, match=text):
                batch.route(0, ids, **arguments)  # type: ignore[arg-type]
        with pytest.raises(RoutingError, match="out of range"):
            batch.route(0, ids + 6, requests=[a], lengths=[3])
        with pytest.raises(RoutingError, match="layer 2"):
            batch.route(2, ids, requests=[a])
        assert cache.stats().demands == 0
        assert sum(counts.sum() for counts in a.counts) == 0
        use(cache, batch, [a, b], 0, [[0, 1], [2, 3]])
        batch.close()
        batch.close()
        with pytest.raises(ClosedError, match="batch is closed"):
            batch.route(0, ids, requests=[a])
        run(a, 1, [[0, 1]])


def test_a_batch_goes_on_after_a_resize_and_ends_with_its_leases() -> None:
    with ExpertCache(make_bank((8, 8)), 6) as cache:
        batch, requests = cache.batch(), [cache.request() for _ in range(3)]
        for n in range(4):
            for layer in (0, 1):
                use(cache, batch, list(requests), layer, [[n, n + 1], [n + 2, 7], [5, n]])
            cache.resize(5 + n % 2)
        demands = batch.stats().demands
        assert demands == cache.stats().demands
        lease = batch.route(0, torch.tensor([[0], [1], [2]]), requests=requests)
        batch.close()
        assert not lease._step.open
        cache.resize(4)
        for request in requests:
            assert request.counts[0].sum() == 4 * 2 + 1
            request.close()
        assert len(cache.history) == 3


def test_a_recording_keeps_the_requests_of_a_batch_apart(tmp_path: Path) -> None:
    with ExpertCache(make_bank((8, 8)), 6) as cache, cache.batch() as batch:
        requests = [cache.request() for _ in range(2)]
        with cache.record(tmp_path / "a.safetensors"):
            for layer in (0, 1):
                use(cache, batch, list(requests), layer, [[0, 1], [0, 2], [7, 6]], lengths=[2, 1], decode=False)
            for layer in (0, 1):
                use(cache, batch, [requests[0], None], layer, [[1, 2], [5, 6]])
    trace = read_trace(tmp_path / "a.safetensors")
    assert trace.request.tolist() == [0, 0, 1, 0]
    assert trace.decode.tolist() == [0, 0, 0, 1]
    assert trace.experts[:, 0].tolist() == [[0, 1], [0, 2], [7, 6], [1, 2]]
