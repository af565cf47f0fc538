"""One ``route()``: 26 layers x 64 experts, top-6, 1,000 stored requests; and a large model with several requests at once.

    make bench

What a decode step pays when nothing has to move: checks, counting, chances of use, hits and the lease; then with one
expert missing, and with experts fetched ahead.
"""

from collections.abc import Iterator
from itertools import count, cycle, islice

import numpy as np
import pytest
import torch

from moecache import ExpertBank, ExpertCache, Fingerprint, History, Request
from moecache.forecaster import Forecaster

LAYERS, EXPERTS, TOP_K, STORED = 26, 64, 6, 1_000


def bank() -> ExpertBank:
    return ExpertBank.from_tensors([{"weight": torch.zeros(EXPERTS, 16)} for _ in range(LAYERS)])


@pytest.fixture(scope="module")
def request_() -> Iterator[Request]:
    """A running request of a cache that holds every expert."""
    experts = bank()
    history = History(Fingerprint.of(experts, TOP_K), STORED)
    random = np.random.default_rng(0)
    for _ in range(STORED):
        counts = random.poisson(8 * random.gamma(0.5, size=LAYERS * EXPERTS)).astype(np.int64)
        history.add(np.zeros_like(counts), counts, 100)
    with ExpertCache(experts, 1.0, history=history, top_k=TOP_K) as cache:
        with cache.request() as request:
            for layer in range(LAYERS):
                with request.route(layer, torch.arange(EXPERTS)[None]) as lease:
                    assert len(list(lease.ready())) == EXPERTS
        cache.reset_stats()
        with cache.request() as request:
            yield request
            assert cache.stats().hit_rate == 1.0


def steps() -> Iterator[tuple[int, torch.Tensor]]:
    generator = torch.Generator().manual_seed(0)
    ids = [torch.randperm(EXPERTS, generator=generator)[None, :TOP_K].contiguous() for _ in range(LAYERS * 40)]
    return ((i % LAYERS, step) for i, step in enumerate(cycle(ids)))


@pytest.mark.benchmark(group="route(), all hits, 1,000 stored requests")
def test_route(benchmark, request_: Request) -> None:
    """The call and the end of its lease."""
    todo = steps()

    def step() -> None:
        layer, ids = next(todo)
        with request_.route(layer, ids):
            pass

    benchmark(step)


@pytest.mark.benchmark(group="route(), all hits, 1,000 stored requests")
def test_route_and_ready(benchmark, request_: Request) -> None:
    """With the loop over the experts, as a layer runs it."""
    todo = steps()

    def step() -> None:
        layer, ids = next(todo)
        with request_.route(layer, ids) as lease:
            for _ in lease.ready():
                pass

    benchmark(step)


@pytest.mark.benchmark(group="route(), something to move")
def test_route_with_one_miss(benchmark) -> None:
    """Five experts of every layer stay, the sixth never is there."""
    with ExpertCache(bank(), LAYERS * (TOP_K + 2), top_k=TOP_K, prefetch=False) as cache, cache.request() as request:
        todo = (
            (layer, torch.tensor([[0, 1, 2, 3, 4, 5 + token % (EXPERTS - 5)]]))
            for token in count()
            for layer in range(LAYERS)
        )
        ready = cycle(list(islice(todo, LAYERS * (EXPERTS - 5))))

        def step() -> None:
            layer, ids = next(ready)
            with request.route(layer, ids):
                pass

        for _ in range(LAYERS * EXPERTS):
            step()
        cache.reset_stats()
        benchmark(step)
        stats = cache.stats()
        benchmark.extra_info["misses_per_step"] = round(stats.misses / stats.steps, 2)


@pytest.mark.benchmark(group="route(), something to move")
@pytest.mark.parametrize("prefetch", [False, True], ids=["demand", "prefetch"])
def test_route_of_a_predictable_model(benchmark, prefetch: bool) -> None:
    """Six experts of every layer that change together with each token, half of all on the device: with prefetching they
    are asked for a layer ahead, without it when they are missing."""
    with ExpertCache(bank(), 0.5, top_k=TOP_K, prefetch=prefetch) as cache, cache.request() as request:
        random = np.random.default_rng(0)
        sets = [
            [torch.from_numpy(random.permutation(EXPERTS)[None, :TOP_K].copy()) for _ in range(LAYERS)]
            for _ in range(12)
        ]
        todo = cycle([(layer, sets[n][layer]) for n in random.integers(12, size=200) for layer in range(LAYERS)])

        def step() -> None:
            layer, ids = next(todo)
            with request.route(layer, ids) as lease:
                for _ in lease.ready():
                    pass

        for _ in range(LAYERS * 60):
            step()
        cache.reset_stats()
        benchmark(step)
        stats = cache.stats()
        benchmark.extra_info["misses_per_step"] = round(stats.misses / stats.steps, 2)
        benchmark.extra_info["prefetches_per_step"] = round(stats.prefetch_issued / stats.steps, 2)


def forecaster(fingerprint: Fingerprint, rank: int, distances: int) -> Forecaster:
    """Weights of the right sizes that foresee nothing."""
    random = np.random.default_rng(0)
    experts = np.array(fingerprint.num_experts)
    total, pairs = int(experts.sum()), sum(int((experts * np.roll(experts, -d)).sum()) for d in range(1, distances + 1))
    half = lambda *shape: random.normal(0, 0.05, shape).astype(np.float16)  # noqa: E731
    return Forecaster(
        fingerprint=fingerprint,
        decay=np.array([1, 0.45, 0.2, 0.02], np.float32),
        prior=np.full(total, 0.05, np.float32),
        rectified=rank // 2,
        write=half(4, total, rank),
        use_read=half(6, total, rank),
        use_bias=np.full((6, total), -2, np.float32),
        use_weights=np.full((6, 3), 0.3, np.float32),
        ahead_read=half(total, rank),
        ahead_gain=np.ones((distances, rank), np.float32),
        ahead_bias=np.full((distances, total), -9, np.float32),
        ahead_weights=np.full((distances, 3), 0.1, np.float32),
        ahead_pairs=half(pairs),
    )


@pytest.mark.benchmark(group="route() and what it foresees, all hits, half of all experts on the device")
@pytest.mark.parametrize(("layers", "experts", "top_k"), [(26, 64, 6), (61, 256, 8)], ids=["26x64", "61x256"])
@pytest.mark.parametrize("known", ["counts, demand", "counts", "forecaster"])
def test_route_with_a_forecaster(benchmark, layers: int, experts: int, top_k: int, known: str) -> None:
    """From counts without looking ahead, with, and from a forecaster of rank 96 that looks 4 layers ahead."""
    one = ExpertBank.from_tensors([{"weight": torch.zeros(experts, 4)} for _ in range(layers)])
    history = History(Fingerprint.of(one, top_k), STORED)
    random = np.random.default_rng(0)
    for _ in range(STORED):
        history.add(np.zeros(layers * experts, np.int64), random.poisson(1, layers * experts), 100)
    if known == "forecaster":
        history.forecaster = forecaster(history.fingerprint, 96, 4)
    hot = [random.permutation(experts)[: 2 * top_k] for _ in range(layers)]
    todo = cycle(
        [
            (layer, torch.from_numpy(random.permutation(hot[layer])[None, :top_k].copy()))
            for _ in range(30)
            for layer in range(layers)
        ]
    )
    cache = ExpertCache(one, 0.5, history=history, top_k=top_k, prefetch=known != "counts, demand")
    with cache, cache.request() as request:

        def step() -> None:
            layer, ids = next(todo)
            with request.route(layer, ids):
                pass

        for _ in range(layers * 40):
            step()
        cache.reset_stats()
        benchmark(step)
        benchmark.extra_info["hit_rate"] = round(cache.stats().hit_rate, 4)
        benchmark.extra_info["prefetches_per_step"] = round(cache.stats().prefetch_issued / cache.stats().steps, 3)


@pytest.mark.benchmark(group="route() of a large model, 61x256, k = 8, 10,000 stored requests, 8 requests at once")
@pytest.mark.parametrize("policy", ["expected-next-use", "moe-infinity", "lru"])
def test_route_at_scale(benchmark, policy: str) -> None:
    """Nothing moves but what half the experts' slots ask for; steps of eight requests take turns."""
    layers, experts, top_k, stored = 61, 256, 8, 10_000
    random = np.random.default_rng(0)
    large = ExpertBank.from_tensors([{"weight": torch.zeros(experts, 4)} for _ in range(layers)])
    history = History(Fingerprint.of(large, top_k), stored)
    popularity = random.dirichlet(np.full(experts, 0.2), layers)
    nothing = np.zeros(layers * experts, np.int64)
    for _ in range(stored):
        history.add(nothing, random.poisson(800 * popularity).ravel(), 100)
    ids = [
        (layer, torch.from_numpy(np.argsort(-popularity[layer] * random.gamma(1, size=experts))[None, :top_k].copy()))
        for _ in range(40)
        for layer in range(layers)
    ]
    with ExpertCache(large, 0.5, history=history, top_k=top_k, policy=policy) as cache:
        requests = [cache.request() for _ in range(8)]
        todo = cycle([(requests[n % 8], *ids[(n // 8 + 61 * 5 * (n % 8)) % len(ids)]) for n in range(8 * len(ids))])

        def step() -> None:
            request, layer, chosen = next(todo)
            with request.route(layer, chosen) as lease:
                for _ in lease.ready():
                    pass

        for _ in range(8 * layers * 4):
            step()
        cache.reset_stats()
        benchmark(step)
        stats = cache.stats()
        benchmark.extra_info["misses_per_step"] = round(stats.misses / stats.steps, 2)
        benchmark.extra_info["store_bytes"] = history.store.nbytes
        for request in requests:
            request.close(keep=False)
