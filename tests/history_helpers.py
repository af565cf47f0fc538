"""Histories to test."""

from __future__ import annotations

import numpy as np

from moecache import Fingerprint, History
from moecache.history_file import LEARNED

MODEL = Fingerprint((4, 3, 5), 2, "abc")


def filled(
    requests: int, fingerprint: Fingerprint = MODEL, capacity: int = 10, seed: int = 0, largest: int = 300
) -> History:
    rng = np.random.default_rng(seed)
    result = History(fingerprint, capacity)
    experts = sum(fingerprint.num_experts)
    for n in range(requests):
        prompt, decode = rng.integers(0, largest, (2, experts)) * (rng.random((2, experts)) < 0.5)
        # Some of prompt only, some of answer only.
        result.add(prompt * (n % 3 != 1), decode * (n % 3 != 2), int(rng.integers(1, 100)))
    for name in LEARNED:
        table = result.store.learned()[name]
        table[:] = rng.integers(0, 50, len(table))
    for kind in ("counts", "blend"):
        weights = getattr(result.store.weights, kind)
        rows = rng.normal(size=(*weights.shape, 2 * weights.shape[1]))
        weights[:] = rng.uniform(-10, 10, weights.shape)
        getattr(result.store.weights, f"{kind}_curvature")[:] = rows @ rows.transpose(0, 2, 1)
    return result


def assert_same(a: History, b: History) -> None:
    assert len(a) == len(b)
    assert a.fingerprint == b.fingerprint
    # Entries may lie elsewhere; their order by age is what a file keeps.
    for name in ("prompt_counts", "decode_counts"):
        np.testing.assert_array_equal(getattr(a.store, name)[a.store.order()], getattr(b.store, name)[b.store.order()])
    np.testing.assert_array_equal(a.store.total, b.store.total)
    for name in LEARNED:
        np.testing.assert_array_equal(a.store.learned()[name], b.store.learned()[name])
    assert a.store.tokens == b.store.tokens
    for name, value in a.store.weights.arrays().items():
        np.testing.assert_array_equal(value, b.store.weights.arrays()[name])
