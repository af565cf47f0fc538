"""Whom to evict, and what a finished request costs: ranking by slots, beside NumPy on ready scores; history insert.

    make bench

NumPy is given the score of every slot in an array, which is less than half of the work: from Python, `numpy-scores` also
makes them, from each expert's expected wait and its layer's distance, as the default policy does.
"""

from collections.abc import Callable
from itertools import cycle

import numpy as np
import pytest

from moecache._core import Core, HistoryStore

LAYERS, EXPERTS, TOP_K = 61, 256, 8


def filled_core(slots: int) -> Core:
    """Every slot taken, some experts used more than others."""
    store = HistoryStore(np.full(LAYERS, EXPERTS, np.int32), 1)
    complete = np.zeros(slots, np.int32)
    core = Core(store, np.zeros(LAYERS, np.int32), np.array([slots], np.int32), complete, prefetch=False, top_k=TOP_K)
    request, random = core.begin_request(), np.random.default_rng(0)
    popularity = random.dirichlet(np.full(EXPERTS, 0.3), LAYERS) + 1e-6
    step = 0
    while (core.slots.occupants < 0).any() or step < 2000:
        layer = step % LAYERS
        ids = random.choice(EXPERTS, TOP_K, replace=False, p=popularity[layer] / popularity[layer].sum())
        lease = core.route(request, layer, ids.ctypes.data, 8, 1, TOP_K, TOP_K, 1, True)
        complete[:] = core.slots.generations
        core.release(lease)
        step += 1
    return core


@pytest.fixture(scope="module", params=[64, 256, 1024, 4096], ids=lambda slots: f"{slots}")
def core(request: pytest.FixtureRequest) -> Core:
    return filled_core(request.param)


@pytest.mark.parametrize("wanted", [1, 8])
@pytest.mark.parametrize("how", ["moecache", "numpy", "numpy-scores"])
def test_victims(benchmark, core: Core, how: str, wanted: int) -> None:
    layers = cycle(range(LAYERS))
    layer_of = np.repeat(np.arange(LAYERS), EXPERTS)[core.slots.occupants]
    gids = core.slots.occupants

    def scores() -> np.ndarray:
        return core.estimates.reuse_times[gids] + (layer_of - next(layers) - 1) % LAYERS

    ready = scores()

    def best(score: np.ndarray) -> list[int]:
        if wanted == 1:
            return [int(score.argmax())]
        return np.argpartition(score, -wanted)[-wanted:].tolist()

    ways: dict[str, Callable[[], list[int]]] = {
        "moecache": lambda: core.evictor.victims(0, wanted, next(layers)),
        "numpy": lambda: best(ready),
        "numpy-scores": lambda: best(scores()),
    }
    layers = cycle([7])
    assert sorted(scores()[core.evictor.victims(0, wanted, 7)]) == pytest.approx(
        sorted(scores()[best(scores())]), rel=1e-5
    )
    layers = cycle(range(LAYERS))
    benchmark.group = f"{wanted} of {core.slots.num_slots} slots to evict"
    benchmark(ways[how])


@pytest.mark.parametrize("running", [True, False], ids=["running", "counts"])
@pytest.mark.parametrize("stored", [1_000, 10_000])
def test_history_insert(benchmark, stored: int, running: bool) -> None:
    """A full store of 26x64 takes in a request: a running one, whose match is known, or one that is only counts."""
    store = HistoryStore(np.full(26, 64, np.int32), stored)
    random = np.random.default_rng(1)
    counts = random.poisson(8 * random.gamma(0.5, size=(200, 26 * 64)))
    nothing = np.zeros(26 * 64, np.int64)
    for n in range(stored):
        store.add(nothing, np.roll(counts[n % 200], n), 100)
    core = Core(store, np.zeros(26, np.int32), np.array([4], np.int32), np.zeros(4, np.int32), top_k=6)
    request = core.begin_request()
    request.match.load(counts[7])
    some = cycle(counts)
    benchmark.group = f"history insert, 26x64, {stored:,} stored requests"
    if running:
        benchmark(lambda: store.add(nothing, next(some), 100, request.match))
    else:
        benchmark(lambda: store.add(nothing, next(some), 100))
