"""One step of the history match against full scans of the same store: 26 layers x 64 experts, top-6.

    make bench

A step counts one token's experts at one layer and finds the stored request that is most similar by cosine over the
whole activation matrix. The scans do what a search library can do: compare the query with every stored request. All
look at the same steps in the same run; the bracketed numbers of the table are the ratios to the fastest.
"""

import contextlib
from collections.abc import Callable, Iterator
from itertools import cycle, islice

import numpy as np
import pytest
import torch

from moecache._core import HistoryStore, RequestState

with contextlib.suppress(ImportError):
    import simsimd  # noqa: F401  once usearch is loaded, simsimd no longer recognises arrays

LAYERS, EXPERTS, TOP_K = 26, 64, 6
STORED = (120, 1_000, 10_000)


def activation_matrices(count: int) -> np.ndarray:
    """int64 [count, LAYERS * EXPERTS]: requests of 50 to 400 tokens, a few experts of each layer liked best."""
    random = np.random.default_rng(count)
    liking = random.gamma(0.3, size=(count, LAYERS, EXPERTS)) + 1e-3
    tokens = random.integers(50, 400, size=(count, 1, 1))
    counts = np.minimum(np.rint(tokens * TOP_K * liking / liking.sum(-1, keepdims=True)), tokens)
    return counts.astype(np.int64).reshape(count, -1)


class Setting:
    """A store, the same requests as rows of unit length, and the steps of a new request."""

    def __init__(self, stored: int) -> None:
        self.counts = activation_matrices(stored)
        self.store = HistoryStore(np.full(LAYERS, EXPERTS, np.int32), stored)
        for row in self.counts:
            self.store.add(np.zeros_like(row), row, 0)
        self.rows = (self.counts / np.linalg.norm(self.counts, axis=1, keepdims=True)).astype(np.float32)
        random = np.random.default_rng(7)
        self.ids = [random.choice(EXPERTS, TOP_K, replace=False).astype(np.int32) for _ in range(LAYERS * 40)]

    def steps(self) -> Iterator[tuple[int, np.ndarray]]:
        return ((i % LAYERS, ids) for i, ids in enumerate(cycle(self.ids)))

    def scan(self, search: Callable[[np.ndarray], int]) -> Callable[[], int]:
        """A step by full scan: count the experts, then search with the whole activation matrix."""
        query = np.zeros(LAYERS * EXPERTS, np.float32)
        steps = self.steps()

        def step() -> int:
            layer, ids = next(steps)
            query[layer * EXPERTS + ids] += 1
            return search(query)

        return step

    def incremental(self) -> Callable[[], int]:
        request, steps = RequestState(self.store, 0), self.steps()

        def step() -> int:
            layer, ids = next(steps)
            return request.match_step(layer, ids)[0]

        return step


def numpy_scan(rows: np.ndarray) -> Callable[[np.ndarray], int]:
    return lambda query: int((rows @ query).argmax())


def torch_scan(rows: np.ndarray) -> Callable[[np.ndarray], int]:
    stored = torch.from_numpy(rows)
    return lambda query: int(torch.mv(stored, torch.from_numpy(query)).argmax())


def faiss_scan(rows: np.ndarray) -> Callable[[np.ndarray], int]:
    faiss = pytest.importorskip("faiss")
    index = faiss.IndexFlatIP(rows.shape[1])
    index.add(rows)
    return lambda query: int(index.search(query[None], 1)[1][0, 0])


def usearch_scan(rows: np.ndarray) -> Callable[[np.ndarray], int]:
    usearch = pytest.importorskip("usearch.index")
    return lambda query: int(usearch.search(rows, query, 1, usearch.MetricKind.Cos, exact=True).keys[0])


def simsimd_scan(rows: np.ndarray) -> Callable[[np.ndarray], int]:
    simsimd = pytest.importorskip("simsimd")
    return lambda query: int(np.asarray(simsimd.cdist(query[None], rows, "cosine")).argmin())


SCANS = {
    "numpy": numpy_scan,
    "torch": torch_scan,
    "faiss": faiss_scan,
    "usearch": usearch_scan,
    "simsimd": simsimd_scan,
}


@pytest.fixture(scope="module", params=STORED, ids=lambda stored: f"{stored}")
def setting(request: pytest.FixtureRequest) -> Setting:
    return Setting(request.param)


@pytest.mark.parametrize("how", ["moecache", *SCANS])
def test_match_step(benchmark, setting: Setting, how: str) -> None:
    def make() -> Callable[[], int]:
        return setting.incremental() if how == "moecache" else setting.scan(SCANS[how](setting.rows))

    # The same answer first. Where two stored requests are equally near in float32, either will do.
    step, reference = make(), setting.scan(numpy_scan(setting.rows))
    agreed = sum(step() == reference() for _ in islice(range(LAYERS * 4), LAYERS * 4))
    assert agreed >= 0.98 * LAYERS * 4

    benchmark.group = f"match one step, {len(setting.counts):,} stored requests"
    benchmark(make())
