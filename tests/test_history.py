"""Histories: what they hold, how they match, merge and are copied."""

from __future__ import annotations

import copy
import pickle
from itertools import combinations
from pathlib import Path

import numpy as np
import pytest
from cache_helpers import make_bank
from history_helpers import MODEL, assert_same, filled
from hypothesis import given, settings
from hypothesis import strategies as st
from reference_core import SETTINGS, HistoryReference

from moecache import Fingerprint, History
from moecache.errors import HistoryFormatError
from moecache.history_file import LEARNED


@given(requests=st.integers(0, 12), seed=st.integers(0, 100), largest=st.sampled_from([2, 300, 90_000]))
@settings(SETTINGS, max_examples=20)
def test_what_was_saved_comes_back(
    requests: int, seed: int, largest: int, tmp_path_factory: pytest.TempPathFactory
) -> None:
    path = tmp_path_factory.mktemp("history") / "a.history"
    saved = filled(requests, seed=seed, largest=largest)
    saved.save(path)
    loaded = History.load(path, MODEL)
    assert_same(saved, loaded)
    assert loaded.capacity == 10
    counts = np.random.default_rng(seed).integers(0, 9, 12)
    np.testing.assert_allclose(
        loaded.match(counts)[loaded.store.order()], saved.match(counts)[saved.store.order()], rtol=1e-14
    )


def test_match_is_the_flat_cosine() -> None:
    found = filled(6)
    reference = HistoryReference(MODEL.num_experts, 10)
    for n in range(6):
        reference.prompt.append(found.store.prompt_counts[n].astype(np.int64))
        reference.decode.append(found.store.decode_counts[n].astype(np.int64))
    counts = np.arange(12)
    np.testing.assert_allclose(found.match(counts), reference.similarities(counts), rtol=1e-6)
    assert found.match(np.zeros(12, np.int64)).tolist() == [0] * 6
    assert History(MODEL).match(counts).shape == (0,)


@given(
    requests=st.integers(0, 30),
    queries=st.integers(0, 5),
    largest=st.sampled_from([2, 300, 90_000]),
    seed=st.integers(0, 100),
)
@settings(SETTINGS, max_examples=25)
def test_many_matches_at_once_are_those_of_each(requests: int, queries: int, largest: int, seed: int) -> None:
    rng = np.random.default_rng(seed)
    found, reference = filled(0, capacity=20), HistoryReference(MODEL.num_experts, 20)
    for _ in range(requests):
        prompt, decode = rng.integers(0, largest, (2, 12)) * (rng.random((2, 12)) < 0.5)
        assert found.add(prompt, decode, 1) == reference.add(prompt, decode, 1)
    counts = rng.integers(0, largest, (queries, 12)) * (rng.random((queries, 12)) < 0.5)
    expected = np.array([reference.similarities(row) for row in counts]).reshape(queries, len(found))
    np.testing.assert_allclose(found.match_many(counts), expected, rtol=1e-14)
    entries, similarities = found.best_matches(counts, 3)
    assert entries.shape == similarities.shape == (queries, 3)
    for n, row in enumerate(counts):
        ranked = reference.ranked(row)[:3]
        assert entries[n].tolist() == ranked + [-1] * (3 - len(ranked))
        np.testing.assert_allclose(similarities[n, : len(ranked)], expected[n, ranked], rtol=1e-14)
        assert not similarities[n, len(ranked) :].any()


def test_many_matches_in_threads_are_the_same() -> None:
    found = filled(40, Fingerprint((64, 64), 2, "abc"), capacity=40)
    counts = np.random.default_rng(1).integers(0, 40, (9, 128))
    np.testing.assert_array_equal(found.match_many(counts, parallel=True), found.match_many(counts))


@pytest.mark.parametrize("counts", [np.zeros(12, int), np.zeros((2, 11), int), np.zeros((2, 12)), np.full((2, 12), -1)])
def test_counts_that_are_no_activation_matrices(counts: np.ndarray) -> None:
    with pytest.raises(HistoryFormatError, match=r"expected non-negative integers \[n, 12\]"):
        filled(2).match_many(counts)


def test_add_says_where() -> None:
    one = History(MODEL, 2)
    assert one.add(np.zeros(12, int), np.ones(12, int), 3) == 0
    assert one.add(np.zeros(12, int), np.zeros(12, int), 3) == -1
    assert len(one) == 1


@pytest.mark.parametrize("capacity", [0, -3])
def test_a_history_of_no_requests_is_refused(capacity: int) -> None:
    with pytest.raises(HistoryFormatError, match="at least 1"):
        History(MODEL, capacity)


def test_another_capacity_when_loading(tmp_path: Path) -> None:
    path = tmp_path / "a.history"
    saved = filled(8)
    saved.save(path)
    assert History.load(path, capacity=20).capacity == 20
    smaller = History.load(path, capacity=3)
    assert (len(smaller), smaller.capacity) == (3, 3)
    # What is known of all requests stays.
    np.testing.assert_array_equal(smaller.store.total, saved.store.total)
    assert smaller.store.tokens == saved.store.tokens


# Merging


def test_merging_adds_everything_once() -> None:
    one, two = filled(3, seed=1), filled(4, seed=2)
    total, tokens = one.store.total + two.store.total, one.store.tokens + two.store.tokens
    learned = {name: one.store.learned()[name] + two.store.learned()[name] for name in LEARNED}
    one.merge(two)
    assert len(one) == 7
    np.testing.assert_array_equal(one.store.total, total)
    for name, table in learned.items():
        np.testing.assert_array_equal(one.store.learned()[name], table)
    assert one.store.tokens == tokens
    np.testing.assert_array_equal(one.store.prompt_counts[3:7], two.store.prompt_counts[:4])


def test_merging_weighs_what_was_learned_by_how_sure_it_is() -> None:
    one, two, fresh = filled(2), filled(2, seed=1), History(MODEL, 10)
    curvature = [h.store.weights.counts_curvature.copy() for h in (one, two)]
    weights = [h.store.weights.counts.copy() for h in (one, two)]
    one.merge(two, fresh)
    joined = one.store.weights
    for i in range(6):
        sure = curvature[0][i] + curvature[1][i]
        mean = np.linalg.solve(sure, curvature[0][i] @ weights[0][i] + curvature[1][i] @ weights[1][i])
        np.testing.assert_allclose(joined.counts[i], np.clip(mean, -10, 10), rtol=0.02, atol=0.02)
        np.testing.assert_allclose(joined.counts_curvature[i], sure)
    # Where nobody has learned anything, nothing changes.
    first = History(MODEL, 10)
    before = first.store.weights.counts.copy()
    first.merge(fresh, History(MODEL, 10))
    np.testing.assert_allclose(first.store.weights.counts, before, rtol=1e-12)


def representation(kept: np.ndarray, rows: np.ndarray) -> float:
    """How well some of the rows stand for all: the sum of each row's largest cosine to a kept one."""
    unit = rows / np.linalg.norm(rows.astype(np.float64), axis=1, keepdims=True)
    return float((unit @ unit[kept].T).max(1).sum())


@given(st.lists(st.integers(0, 12), min_size=2, max_size=4), st.integers(1, 4), st.integers(0, 1000))
@settings(SETTINGS, max_examples=25)
def test_a_merge_of_more_than_fits_keeps_those_that_stand_for_all(
    requests: list[int], capacity: int, seed: int
) -> None:
    histories = [filled(n, capacity=capacity if not i else 12, seed=seed + i) for i, n in enumerate(requests)]
    pooled = [
        (h.store.prompt_counts[e].astype(int), h.store.decode_counts[e].astype(int))
        for h in histories
        for e in h.store.order()
    ]
    total = sum(h.store.total for h in histories)
    histories[0].merge(*histories[1:])
    merged = histories[0].store
    assert len(histories[0]) == min(capacity, len(pooled))
    np.testing.assert_array_equal(merged.total, total)
    if not pooled:
        return
    rows = np.array([p + d for p, d in pooled])
    place = {(p.tobytes(), d.tobytes()): n for n, (p, d) in enumerate(pooled)}
    kept = [
        place[merged.prompt_counts[e].astype(int).tobytes(), merged.decode_counts[e].astype(int).tobytes()]
        for e in range(len(histories[0]))
    ]
    # The documented bound, against every choice there is.
    best = max(representation(np.array(c), rows) for c in combinations(range(len(rows)), len(kept)))
    assert representation(np.array(kept), rows) >= (1 - 1 / np.e) * best - 1e-9
    # Taken one after the other, each where it adds most.
    greedy: list[int] = []
    for _ in kept:
        gains = [-1.0 if n in greedy else representation(np.array([*greedy, n]), rows) for n in range(len(rows))]
        greedy.append(int(np.argmax(gains)))
    assert representation(np.array(kept), rows) == pytest.approx(representation(np.array(greedy), rows), rel=1e-3)


def test_of_equal_requests_a_merge_keeps_the_newest() -> None:
    one, two = History(MODEL, 2), History(MODEL, 4)
    nothing = np.zeros(12, int)
    first, second = np.eye(12, dtype=int)[0], np.eye(12, dtype=int)[1]
    one.add(first, nothing, 1)
    one.add(second, nothing, 1)
    two.add(3 * first, nothing, 1)
    one.merge(two)
    kept = one.store.prompt_counts[one.store.order()]
    np.testing.assert_array_equal(kept, [second, 3 * first])


def test_merging_several_is_all_or_nothing() -> None:
    one, before = filled(3), filled(3)
    with pytest.raises(HistoryFormatError):
        one.merge(filled(2, seed=5), filled(2, MODEL._replace(digest="abd")))
    assert_same(one, before)


def test_counts_that_would_not_fit_are_halved_together() -> None:
    # A layer's table and origins, so that every share stays; other layers keep theirs.
    one, two = filled(1), filled(1)
    for history_ in (one, two):
        history_.store.transitions.origins[:7] = 1 << 30
        history_.store.transitions.counts[:27] = np.arange(27) << 20
    rest = one.store.transitions.origins[7:] + two.store.transitions.origins[7:]
    one.merge(two)
    assert one.store.transitions.origins[:7].tolist() == [1 << 30] * 7
    np.testing.assert_array_equal(one.store.transitions.counts[:27], np.arange(27) << 20)
    np.testing.assert_array_equal(one.store.transitions.origins[7:], rest)


def test_merging_into_a_full_history_keeps_its_size(tmp_path: Path) -> None:
    one = filled(3, capacity=3)
    one.merge(filled(5, seed=3))
    assert len(one) == 3
    one.save(tmp_path / "a")
    assert_same(one, History.load(tmp_path / "a"))


def test_merging_another_model_is_refused_and_changes_nothing() -> None:
    one, before = filled(3), filled(3)
    for other in (Fingerprint((4, 3, 4), 2, "abc"), Fingerprint((4, 3, 5), 3, "abc"), Fingerprint((4, 3, 5), 2, "abd")):
        with pytest.raises(HistoryFormatError, match=r"expected .*4 layers|expected 3 layers .*found 3 layers"):
            one.merge(filled(2, other))
        assert_same(one, before)


# Fingerprints


@pytest.mark.failure("56")
def test_fingerprints_tell_models_apart() -> None:
    base = Fingerprint.of(make_bank((8, 8)), 2)
    assert base.fits(base)
    assert base.fits(Fingerprint.of(make_bank((8, 8), salt=1), 2)), "other weights are the same model to a history"
    assert base.fits(base._replace(top_k=0))
    assert base._replace(top_k=0).fits(base)
    assert not base.fits(base._replace(top_k=3))
    assert not base.fits(Fingerprint.of(make_bank((8, 16)), 2))
    assert not base.fits(Fingerprint.of(make_bank((8, 8), sizes=[6, 6]), 2))
    assert not base.fits(Fingerprint.of(make_bank((8, 8), sizes=[5, 6]), 2))
    assert "2 layers of 8 experts, top-2" in str(base)


@pytest.mark.failure("B6")
def test_a_history_can_be_copied_and_pickled() -> None:
    history = History(Fingerprint((4, 3), 2, ""), 5)
    history.add(np.array([1, 0, 2, 0, 0, 3, 0]), np.array([0, 1, 0, 0, 1, 0, 300]), 4)
    for other in (copy.deepcopy(history), copy.copy(history), pickle.loads(pickle.dumps(history))):
        other.add(np.array([0, 0, 0, 5, 5, 0, 0]), np.zeros(7, int), 5)
        assert (len(history), len(other)) == (1, 2)
        assert np.array_equal(other.store.decode_counts[0], history.store.decode_counts[0])
        assert other.match(np.array([1, 1, 2, 0, 1, 3, 300])).max() == pytest.approx(1)


@pytest.mark.failure("56", "125")
@pytest.mark.parametrize(
    "other",
    [
        Fingerprint((4, 16), 2, "abc"),
        Fingerprint((5, 8), 2, "abc"),
        MODEL._replace(digest="xyz"),
        MODEL._replace(top_k=4),
    ],
)
def test_a_file_of_another_model_is_refused_with_both_shown(tmp_path: Path, other: Fingerprint) -> None:
    path = tmp_path / "a.history"
    filled(2).save(path)
    with pytest.raises(HistoryFormatError) as caught:
        History.load(path, other)
    assert str(MODEL) in str(caught.value)
    assert str(other) in str(caught.value)


def test_a_copy_is_the_same_and_apart() -> None:
    history = filled(4)
    copy = history.copy()
    assert_same(history, copy)
    copy.add(np.ones(12, np.int64), np.ones(12, np.int64), 5)
    copy.store.weights.counts[:] = 0
    assert (len(history), len(copy)) == (4, 5)
    assert history.store.weights.counts.any()
