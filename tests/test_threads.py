"""Several threads in one core and one store: with the GIL released in the middle of steps, nothing gets mixed up."""

from __future__ import annotations

import sys
import threading
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch
from cache_helpers import make_bank
from reference_core import HistoryReference, call_match, call_route, run_step

from moecache import CacheOptions, ExpertCache, History
from moecache._core import Core, HistoryStore, RequestState
from moecache.errors import RoutingError

LAYERS, EXPERTS, TOP_K = 3, 8, 2


@pytest.fixture(autouse=True)
def _many_switches() -> Iterator[None]:
    before = sys.getswitchinterval()
    sys.setswitchinterval(1e-5)
    yield
    sys.setswitchinterval(before)


def filled_store(stored: int, capacity: int, release: int) -> HistoryStore:
    rng = np.random.default_rng(0)
    store = HistoryStore(np.full(LAYERS, EXPERTS, np.int32), capacity)
    store.gil.mode = release
    for counts in rng.integers(0, 400, (stored, LAYERS * EXPERTS)) * (rng.random((stored, LAYERS * EXPERTS)) < 0.4):
        store.add(counts // 2, counts - counts // 2, 1)
    return store


def in_threads(*functions: Any) -> None:
    errors: list[BaseException] = []
    start = threading.Barrier(len(functions))

    def run(function: Any) -> None:
        try:
            start.wait()
            function()
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=run, args=(function,), daemon=True) for function in functions]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(120)
        assert not thread.is_alive()
    if errors:
        raise errors[0]


def stored_counts(store: HistoryStore) -> np.ndarray:
    joined = store.prompt_counts.astype(np.int64) + store.decode_counts
    return joined[: store.size]


@pytest.mark.parametrize("release", [0, 1, 2])
def test_requests_that_run_while_others_enter_the_history(release: int) -> None:
    """Every dot product is exact afterwards, whichever entry was replaced under whichever scan."""
    store = filled_store(3000, 3000, release)
    core = Core(
        store, np.zeros(LAYERS, np.int32), np.array([LAYERS * EXPERTS], np.int32), np.zeros(24, np.int32), top_k=TOP_K
    )
    running: list[tuple[RequestState, np.ndarray]] = []

    def decode(seed: int) -> None:
        rng = np.random.default_rng(seed)
        request, counts = core.begin_request(), np.zeros(LAYERS * EXPERTS, np.int64)
        for n in range(400):
            layer = n % LAYERS
            tokens = 1 if n % 7 else int(rng.integers(2, 20))
            ids = np.argsort(rng.random((tokens, EXPERTS)))[:, :TOP_K]
            step = call_route(core, request, layer, ids)
            run_step(core, step)
            core.release(step)
            np.add.at(counts, ids.ravel() + layer * EXPERTS, 1)
        running.append((request, counts))

    def finish(seed: int) -> None:
        rng = np.random.default_rng(seed)
        for _ in range(60):
            request = core.begin_request()
            for layer in range(LAYERS):
                step = call_route(core, request, layer, np.argsort(rng.random((5, EXPERTS)))[:, :TOP_K])
                core.release(step)
            core.end_request(request)

    in_threads(*(lambda n=n: decode(n) for n in range(3)), lambda: finish(10), lambda: finish(11))
    assert store.replaced == 120
    assert core.open_steps.routing == 0
    assert core.demands == core.hits + core.misses
    stored = stored_counts(store)
    norms = np.linalg.norm(stored.astype(np.float64), axis=1)
    for request, counts in running:
        np.testing.assert_array_equal(request.match.counts, counts)
        dots = request.match.similarities() * norms * np.linalg.norm(counts)
        np.testing.assert_allclose(dots, stored @ counts, rtol=1e-12)
        reference = HistoryReference((EXPERTS,) * LAYERS, 3000)
        reference.prompt, reference.decode = list(stored), [np.zeros_like(row) for row in stored]
        reference.written = store.written.tolist()
        assert request.match.matches(5)[0].tolist() == reference.ranked(counts)[:5]
    # What followed what, over all threads: each step but the first of a request follows the one of the layer before.
    assert store.transitions.origins.sum() > 0
    assert (
        store.transitions.counts.reshape(LAYERS * EXPERTS, EXPERTS).sum(1) == TOP_K * store.transitions.origins
    ).all()


def test_a_long_prompt_in_one_thread_and_steps_in_others() -> None:
    store = filled_store(50, 50, 2)
    core = Core(
        store, np.zeros(LAYERS, np.int32), np.array([LAYERS * EXPERTS], np.int32), np.zeros(24, np.int32), top_k=TOP_K
    )
    prompt = np.argsort(np.random.default_rng(3).random((20_000, EXPERTS)))[:, :TOP_K]

    def long() -> None:
        request = core.begin_request()
        for layer in range(LAYERS):
            step = call_route(core, request, layer, prompt)
            for i in range(step.unique):
                expert, _, first, end = step.item(i)
                token, place = np.nonzero((prompt == expert).T)[::-1]
                np.testing.assert_array_equal(step.token_index[first:end], token)
                np.testing.assert_array_equal(step.topk_position[first:end], place)
            core.release(step)
        core.end_request(request)

    def short(seed: int) -> None:
        rng = np.random.default_rng(seed)
        request = core.begin_request()
        for n in range(300):
            step = call_route(core, request, n % LAYERS, np.argsort(rng.random((1, EXPERTS)))[:, :TOP_K])
            core.release(step)
        assert request.match.counts.sum() == 300 * TOP_K
        core.end_request(request)

    in_threads(long, long, lambda: short(1), lambda: short(2))
    assert store.replaced == 4


def test_bad_ids_leave_nothing_under_way() -> None:
    core = Core(filled_store(3, 3, 2), np.zeros(LAYERS, np.int32), np.array([4], np.int32), np.zeros(4, np.int32))
    request = core.begin_request()
    with pytest.raises(RoutingError):
        call_route(core, request, 0, [[EXPERTS]])
    assert core.open_steps.routing == 0


@pytest.mark.failure("114")
def test_a_cache_used_by_many_threads() -> None:
    """Through the public face, with a pool that is too small and steps that let others in."""
    bank = make_bank((EXPERTS,) * LAYERS)
    with ExpertCache(bank, 6, top_k=TOP_K, options=CacheOptions(history_capacity=4)) as cache:
        cache.history.store.gil.mode = 2

        def decode(seed: int) -> None:
            generator = torch.Generator().manual_seed(seed)
            for _ in range(6):
                with cache.request() as request:
                    for n in range(12):
                        layer = n % LAYERS
                        ids = torch.randperm(EXPERTS, generator=generator)[None, :TOP_K]
                        with request.route(layer, ids) as lease:
                            served = [expert for expert, _, _ in lease.ready()]
                        assert sorted(served) == sorted(ids[0].tolist())

        in_threads(*(lambda n=n: decode(n) for n in range(3)))
        assert len(cache.history) == 4
        assert cache.stats().requests == 18


def test_a_match_is_the_same_with_and_without_the_gil() -> None:
    results = []
    for release in (0, 2):
        store = filled_store(200, 200, release)
        core = Core(store, np.zeros(LAYERS, np.int32), np.array([24], np.int32), np.zeros(24, np.int32), top_k=TOP_K)
        request, rng = core.begin_request(), np.random.default_rng(5)
        for n in range(30):
            core.release(call_route(core, request, n % LAYERS, np.argsort(rng.random((4, EXPERTS)))[:, :TOP_K]))
        results.append(
            (
                request.match.matches(16)[0].tolist(),
                core.estimates.probability.tolist(),
                call_match(request.match, 0, [1, 2]),
            )
        )
    assert results[0] == results[1]


def test_histories_shared_by_two_caches_stay_whole() -> None:
    bank = make_bank((EXPERTS,) * LAYERS)
    with ExpertCache(bank, 24, top_k=TOP_K, options=CacheOptions(history_capacity=3)) as one:
        history: History = one.history
        history.store.gil.mode = 2
        with ExpertCache(bank, 24, top_k=TOP_K, history=history) as two:

            def decode(cache: ExpertCache, seed: int) -> None:
                generator = torch.Generator().manual_seed(seed)
                for _ in range(20):
                    with cache.request() as request:
                        for layer in range(LAYERS):
                            ids = torch.randperm(EXPERTS, generator=generator)[None, :TOP_K]
                            with request.route(layer, ids) as lease:
                                list(lease.ready())

            in_threads(lambda: decode(one, 1), lambda: decode(two, 2))
            assert (len(history), history.store.finished) == (3, 40)
            assert history.store.total.sum() == 40 * LAYERS * TOP_K
