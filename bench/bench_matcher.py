"""One step of the history match against full scans of the same store.

    make bench

A step counts one token's experts at one layer and finds the stored request that is most similar by cosine over the
whole activation matrix. The scans do what a search library can do: compare the query with every stored request. All
look at the same steps in the same run, the scans as well set up as their libraries allow: rows of float32 and unit
length, the query ready in the library's own form, outputs given where it takes them, one thread or all, whichever is
faster. `ratio_over_fastest_peer` in the extra information is the fastest scan's time over the step's, by median and by
best.
"""

import contextlib
import os
import time
from collections.abc import Callable, Iterator
from itertools import cycle, starmap
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch

from moecache._core import HistoryStore, RunningMatch

with contextlib.suppress(ImportError):
    import simsimd  # noqa: F401  once usearch is loaded, simsimd no longer recognises arrays

MAX_CELLS = 200_000_000  # stored requests x experts: about 2 GB for the store and the scans' rows


class Shape(NamedTuple):
    layers: int
    experts: int
    top_k: int

    def __str__(self) -> str:
        return f"{self.layers}x{self.experts}k{self.top_k}"

    @property
    def width(self) -> int:
        return self.layers * self.experts


SHAPES = Shape(26, 64, 6), Shape(24, 32, 4), Shape(48, 128, 8), Shape(61, 256, 8)
STORED = 120, 1_000, 10_000, 100_000
SETTINGS = [(shape, stored) for shape in SHAPES for stored in STORED if shape.width * stored <= MAX_CELLS]


def activation_matrices(shape: Shape, count: int) -> Iterator[np.ndarray]:
    """int64 [layers * experts]: requests of 50 to 400 tokens, a few experts of each layer liked best."""
    random = np.random.default_rng(count)
    for _ in range(count):
        liking = random.gamma(0.3, size=(shape.layers, shape.experts)) + 1e-3
        tokens = random.integers(50, 400)
        counts = np.minimum(np.rint(tokens * shape.top_k * liking / liking.sum(1, keepdims=True)), tokens)
        yield counts.astype(np.int64).ravel()


class Setting:
    """A store, the same requests as rows of unit length, and the steps of a new request."""

    def __init__(self, shape: Shape, stored: int) -> None:
        self.shape, self.stored = shape, stored
        self.store = HistoryStore(np.full(shape.layers, shape.experts, np.int32), stored)
        self.rows = np.empty((stored, shape.width), np.float32)
        nothing = np.zeros(shape.width, np.int64)
        for n, row in enumerate(activation_matrices(shape, stored)):
            self.store.add(nothing, row, 0)
            self.rows[n] = row / np.linalg.norm(row)
        random = np.random.default_rng(7)
        self.ids = [
            random.choice(shape.experts, shape.top_k, replace=False).astype(np.int32) for _ in range(shape.layers * 8)
        ]
        self.queries = np.zeros((len(self.ids), shape.width), np.float32)
        for n, ids in enumerate(self.ids):
            self.queries[n] = self.queries[n - 1] if n else 0
            self.queries[n, n % shape.layers * shape.experts + ids] += 1
        self.peers: dict[str, Any] = {}

    def steps(self) -> Callable[[], tuple[int, float]]:
        """A step by moecache: the ids' addresses are at hand, as they are in `route()`."""
        match = RunningMatch(self.store)
        steps = [(n % self.shape.layers, ids.ctypes.data, len(ids)) for n, ids in enumerate(self.ids)]
        return starmap(match.match_step, cycle(steps)).__next__

    def steps_of_tensors(self) -> Callable[[], tuple[int, float]]:
        """The same where the router's ids are tensors."""
        match_step = RunningMatch(self.store).match_step
        steps = cycle([(n % self.shape.layers, torch.from_numpy(ids)) for n, ids in enumerate(self.ids)])

        def step() -> tuple[int, float]:
            layer, ids = next(steps)
            return match_step(layer, ids.data_ptr(), ids.shape[0])

        return step

    def scan(self, make: Callable[[np.ndarray, int], "Scan"]) -> Callable[[], int]:
        """A step by full scan, with as many threads as are best for it."""
        best, fastest = float("inf"), None
        for threads in {1, len(os.sched_getaffinity(0))}:
            scan = make(self.rows, threads)
            step = map(scan.search, cycle([scan.query(query) for query in self.queries])).__next__
            for _ in range(7):
                begin = time.perf_counter()
                step()
                if (taken := time.perf_counter() - begin) < best:
                    best, fastest = taken, make
                    chosen = threads
        assert fastest is not None
        scan = make(self.rows, chosen)
        return map(scan.search, cycle([scan.query(query) for query in self.queries])).__next__


class Scan(NamedTuple):
    """A library's search over all rows: its own form of a query, and the number of the nearest row."""

    query: Callable[[np.ndarray], Any]
    search: Callable[[Any], int]


def numpy_scan(rows: np.ndarray, threads: int) -> Scan:
    pytest.importorskip("threadpoolctl").threadpool_limits(threads, "blas")
    scores = np.empty(len(rows), np.float32)
    return Scan(lambda query: query, lambda query: np.dot(rows, query, out=scores).argmax())


def torch_scan(rows: np.ndarray, threads: int) -> Scan:
    torch.set_num_threads(threads)
    stored, scores = torch.from_numpy(rows), torch.empty(len(rows))
    return Scan(torch.from_numpy, lambda query: torch.mv(stored, query, out=scores).argmax().item())


def faiss_scan(rows: np.ndarray, threads: int) -> Scan:
    faiss = pytest.importorskip("faiss")
    faiss.omp_set_num_threads(threads)
    index = faiss.IndexFlatIP(rows.shape[1])
    index.add(rows)
    score, nearest = np.empty((1, 1), np.float32), np.empty((1, 1), np.int64)

    def search(query: np.ndarray) -> int:
        index.search(query, 1, D=score, I=nearest)
        return nearest[0, 0]

    return Scan(lambda query: query[None], search)


def usearch_scan(rows: np.ndarray, threads: int) -> Scan:
    usearch = pytest.importorskip("usearch.index")
    inner = usearch.MetricKind.IP
    return Scan(
        lambda query: query, lambda query: usearch.search(rows, query, 1, inner, exact=True, threads=threads).keys[0]
    )


def simsimd_scan(rows: np.ndarray, threads: int) -> Scan:
    simsimd = pytest.importorskip("simsimd")
    return Scan(
        lambda query: query[None],
        lambda query: np.asarray(simsimd.cdist(query, rows, "dot", threads=threads)).argmax(),
    )


SCANS = {
    "numpy": numpy_scan,
    "torch": torch_scan,
    "faiss": faiss_scan,
    "usearch": usearch_scan,
    "simsimd": simsimd_scan,
}


@pytest.fixture(scope="module", params=SETTINGS, ids=lambda setting: f"{setting[0]}-{setting[1]}")
def setting(request: pytest.FixtureRequest) -> Setting:
    return Setting(*request.param)


def group(setting: Setting) -> str:
    return f"match one step, {setting.shape}, {setting.stored:,} stored requests"


@pytest.mark.parametrize("how", SCANS)
def test_scan(benchmark, setting: Setting, how: str) -> None:
    step = setting.scan(SCANS[how])
    benchmark.group = group(setting)
    benchmark(step)
    setting.peers[how] = benchmark.stats.stats


@pytest.mark.parametrize("ids", ["address", "tensor"])
def test_match_step(benchmark, setting: Setting, ids: str) -> None:
    make = setting.steps if ids == "address" else setting.steps_of_tensors

    # The same answer first. Where two stored requests are equally near in float32, either will do.
    step, scan = make(), numpy_scan(setting.rows, 1)
    agreed = sum(step()[0] == scan.search(query) for query in setting.queries)
    assert agreed >= 0.98 * len(setting.queries)

    benchmark.group = group(setting)
    benchmark(make())
    benchmark.extra_info["store_bytes"] = setting.store.nbytes
    if setting.peers:
        own = benchmark.stats.stats
        name, fastest = min(setting.peers.items(), key=lambda peer: peer[1].median)
        benchmark.extra_info["fastest_peer"] = name
        benchmark.extra_info["ratio_over_fastest_peer"] = round(fastest.median / own.median, 1)
        benchmark.extra_info["ratio_by_best"] = round(min(peer.min for peer in setting.peers.values()) / own.min, 1)


@pytest.mark.parametrize("layout", ["rows", "columns"])
def test_read_the_match_back(benchmark, setting: Setting, layout: str) -> None:
    """The activation matrix of one stored request, from the rows that are kept for it or out of the columns."""
    store, entries = setting.store, cycle(np.random.default_rng(0).integers(setting.stored, size=1000).tolist())
    benchmark.group = f"read a match back, {setting.shape}, {setting.stored:,} stored requests"
    if layout == "rows":
        prompt, decode = store.prompt_counts, store.decode_counts
        benchmark(lambda: np.add(prompt[entry := next(entries)], decode[entry]))
    else:
        columns = np.ascontiguousarray(np.minimum(store.decode_counts.T, 255).astype(np.uint8))
        benchmark(lambda: columns[:, next(entries)].astype(np.uint16))
