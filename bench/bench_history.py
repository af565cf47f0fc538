"""Many matches at once, and what a merge keeps.

    make bench
    python bench/bench_history.py TRACE...

The first compares 200 activation matrices with 1,000 stored requests. The second cuts a trace's requests into a history
and others that come later (request number % 10 >= 7), thins the history to an eighth, a quarter and half, and prints how
near the later ones find something: their mean largest cosine similarity to a kept request.
"""

import argparse
from collections.abc import Callable

import numpy as np
import pytest

from moecache import Fingerprint, History
from moecache.lab import read_trace

LAYERS, EXPERTS, STORED, QUERIES = 26, 64, 1_000, 200


def activation_matrices(count: int, seed: int) -> np.ndarray:
    random = np.random.default_rng(seed)
    liking = random.gamma(0.3, size=(count, LAYERS, EXPERTS)) + 1e-3
    counts = random.poisson(random.integers(50, 400, size=(count, 1, 1)) * 6 * liking / liking.sum(-1, keepdims=True))
    return counts.astype(np.int64).reshape(count, -1)


def history_of(counts: np.ndarray, capacity: int, fingerprint: Fingerprint) -> History:
    history = History(fingerprint, capacity)
    for row in counts:
        history.add(np.zeros_like(row), row, 1)
    return history


@pytest.fixture(scope="module")
def history() -> History:
    return history_of(activation_matrices(STORED, 0), STORED, Fingerprint((EXPERTS,) * LAYERS, 6, ""))


@pytest.mark.benchmark(group=f"{QUERIES} activation matrices against {STORED:,} stored requests")
@pytest.mark.parametrize(
    "how", ["match_many", "match_many-parallel", "best_matches-3", "one-by-one", "numpy-float64", "numpy-float32"]
)
def test_match_many(benchmark, history: History, how: str) -> None:
    queries = activation_matrices(QUERIES, 1)
    stored = history.store.decode_counts.astype(np.float64)
    unit = stored / np.linalg.norm(stored, axis=1, keepdims=True)
    narrow = unit.astype(np.float32)

    def by_numpy(rows: np.ndarray) -> np.ndarray:
        queried = queries.astype(rows.dtype)
        return queried @ rows.T / np.linalg.norm(queried, axis=1, keepdims=True)

    ways: dict[str, Callable[[], np.ndarray]] = {
        "match_many": lambda: history.match_many(queries),
        "match_many-parallel": lambda: history.match_many(queries, parallel=True),
        "best_matches-3": lambda: history.best_matches(queries, 3)[1],
        "one-by-one": lambda: np.array([history.match(row) for row in queries]),
        "numpy-float64": lambda: by_numpy(unit),
        "numpy-float32": lambda: by_numpy(narrow),
    }
    found = ways[how]()
    if found.shape == (QUERIES, STORED):
        np.testing.assert_allclose(found, by_numpy(unit), rtol=1e-4 if how == "numpy-float32" else 1e-12)
    benchmark(ways[how])


# What a merge keeps


def requests_of(path: str) -> tuple[np.ndarray, Fingerprint]:
    """int64 [requests, experts of all layers]"""
    trace = read_trace(path)
    tokens, layers, k = trace.experts.shape
    experts = int(trace.num_experts[0])
    gids = trace.experts.astype(np.int64) + np.arange(layers)[:, None] * experts
    counts = np.zeros((int(trace.request.max()) + 1, layers * experts), np.int64)
    used = trace.experts >= 0
    np.add.at(counts, (np.broadcast_to(trace.request[:, None, None], (tokens, layers, k))[used], gids[used]), 1)
    return counts[counts.any(1)], Fingerprint((experts,) * layers, k, "")


def merged(counts: np.ndarray, capacity: int, fingerprint: Fingerprint) -> History:
    """Through `History.merge`, of files of 20 requests each."""
    first, *others = (history_of(counts[n : n + 20], 20, fingerprint) for n in range(0, len(counts), 20))
    result = History(fingerprint, capacity)
    result.merge(first, *others)
    return result


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("traces", nargs="+")
    for path in parser.parse_args().traces:
        counts, fingerprint = requests_of(path)
        later = np.arange(len(counts)) % 10 >= 7
        past, later_counts = counts[~later], counts[later]
        print(f"{path}: {len(past)} requests, {len(later_counts)} that come later")
        for share in (8, 4, 2, 1):
            capacity = len(past) // share
            random = np.random.default_rng(0)
            ways: dict[str, list[History]] = {
                "merge": [merged(past, capacity, fingerprint)],
                "one by one": [history_of(past, capacity, fingerprint)],
                "newest": [history_of(past[-capacity:], capacity, fingerprint)],
                "at random": [
                    history_of(past[random.permutation(len(past))[:capacity]], capacity, fingerprint) for _ in range(20)
                ],
            }
            found = {
                name: float(np.mean([history.match_many(later_counts).max(1).mean() for history in histories]))
                for name, histories in ways.items()
            }
            print(f"  {capacity:4} kept  " + "  ".join(f"{name} {value:.4f}" for name, value in found.items()))


if __name__ == "__main__":
    main()
