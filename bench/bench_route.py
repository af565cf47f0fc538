"""One ``route()`` whose experts are all in their slots: 26 layers x 64 experts, top-6, 1,000 stored requests.

    make bench

What a decode step pays when nothing has to move: checks, counting, match, chances of use, hits and the lease.
"""

from collections.abc import Iterator
from itertools import cycle

import numpy as np
import pytest
import torch

from moecache import ExpertBank, ExpertCache, Fingerprint, History, Request

LAYERS, EXPERTS, TOP_K, STORED = 26, 64, 6, 1_000


@pytest.fixture(scope="module")
def request_() -> Iterator[Request]:
    """A running request of a cache that holds every expert."""
    bank = ExpertBank.from_tensors([{"weight": torch.zeros(EXPERTS, 16)} for _ in range(LAYERS)])
    history = History(Fingerprint.of(bank, TOP_K), STORED)
    random = np.random.default_rng(0)
    for _ in range(STORED):
        counts = random.poisson(8 * random.gamma(0.5, size=LAYERS * EXPERTS)).astype(np.int64)
        history.add(np.zeros_like(counts), counts, 100)
    with ExpertCache(bank, 1.0, history=history, top_k=TOP_K) as cache:
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
