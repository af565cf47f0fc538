"""Stored requests and the match with a running one, against NumPy."""

from __future__ import annotations

import numpy as np
import pytest
from core_helpers import loaded, matrix, stores
from hypothesis import given, settings
from hypothesis import strategies as st
from reference_core import (
    SETTINGS,
    HistoryReference,
    call_match,
)

from moecache._core import HistoryStore, RunningMatch
from moecache.errors import RoutingError


@given(stores(), st.data())
@settings(SETTINGS, max_examples=40)
def test_similarities_are_the_flat_cosine(pair: tuple[HistoryStore, HistoryReference], data: st.DataObject) -> None:
    store, reference = pair
    counts = data.draw(st.composite(matrix)(reference.layout.total, 300))
    found = loaded(store, counts).similarities()
    np.testing.assert_allclose(found, reference.similarities(counts), rtol=1e-6, atol=1e-12)
    assert store.size == len(reference.prompt)


@given(stores(largest=200_000), st.data())
@settings(SETTINGS, max_examples=40)
def test_counts_above_a_byte_and_above_sixteen_bits(
    pair: tuple[HistoryStore, HistoryReference], data: st.DataObject
) -> None:
    # Replacing entries exercises the side table of large counts in both directions.
    store, reference = pair
    counts = data.draw(st.composite(matrix)(reference.layout.total, 200_000))
    np.testing.assert_allclose(loaded(store, counts).similarities(), reference.similarities(counts), rtol=1e-6)
    for entry, (prompt, decode) in enumerate(zip(reference.prompt, reference.decode, strict=True)):
        np.testing.assert_array_equal(store.prompt_counts[entry], prompt)
        np.testing.assert_array_equal(store.decode_counts[entry], decode)
    np.testing.assert_array_equal(store.total, reference.total)
    assert (store.tokens, store.replaced) == (reference.tokens, reference.replaced)


@pytest.mark.failure("59")
def test_a_full_store_evicts_the_most_similar_entry() -> None:
    store = HistoryStore(np.array([4, 4], np.int32), 3)
    nothing = np.zeros(8, np.int64)
    entries = np.eye(8, dtype=np.int64)[[0, 2, 5]] * 10
    for entry in entries:
        store.add(nothing, entry, 10)
    new = np.array([0, 0, 7, 1, 0, 0, 0, 0], np.int64)
    assert store.add(nothing, new, 8) == 1
    assert (store.size, store.replaced, store.finished) == (3, 1, 4)
    np.testing.assert_array_equal(store.decode_counts, [entries[0], new, entries[2]])


@pytest.mark.failure("48")
def test_of_equally_similar_entries_the_newest_matches_and_the_oldest_goes() -> None:
    store = HistoryStore(np.array([4], np.int32), 3)
    one, nothing = np.array([1, 2, 0, 0], np.int64), np.zeros(4, np.int64)
    query = np.array([3, 1, 0, 0], np.int64)
    for n in range(3):
        assert store.add(one * (n + 1), nothing, 1) == n
    assert loaded(store, query).matches(3)[0].tolist() == [2, 1, 0]
    # Replaced in place, entry 0 becomes the newest.
    assert store.add(one * 7, nothing, 1) == 0
    assert loaded(store, query).matches(2)[0].tolist() == [0, 2]
    assert store.order().tolist() == [1, 2, 0]
    assert store.add(one, nothing, 1) == 1
    # Nothing in common with any: the oldest goes.
    assert store.add(np.array([0, 0, 1, 0], np.int64), nothing, 1) == 2


@given(st.integers(0, 10_000), st.sampled_from([3, 64, 65, 200, 700]), st.sampled_from([2, 40, 3000, 200_000]))
@settings(SETTINGS, max_examples=40)
def test_the_best_matches_of_many_entries(seed: int, stored: int, largest: int) -> None:
    # More entries than one block of the scan, few distinct ones among them, so that many are equally similar.
    rng = np.random.default_rng(seed)
    store, reference = HistoryStore(np.array([7, 5], np.int32), stored), HistoryReference((7, 5), stored)
    patterns = rng.integers(0, largest, (max(2, stored // 4), 12)) * (rng.random((max(2, stored // 4), 12)) < 0.5)
    for counts in patterns[rng.integers(0, len(patterns), stored)]:
        nothing = np.zeros_like(counts)
        assert store.add(counts, nothing, 1) == reference.add(counts, nothing, 1)
    match, counts = RunningMatch(store), np.zeros(12, np.int64)
    for _ in range(6):
        layer = int(rng.integers(2))
        ids = rng.permutation((7, 5)[layer])[: rng.integers(1, 4)]
        counts[ids + 7 * layer] += 1
        entry, _ = call_match(match, layer, ids)
        ranked = reference.ranked(counts)
        assert entry == (ranked or [-1])[0]
        for p in (1, 4, 16):
            assert match.matches(p)[0].tolist() == ranked[:p]
    counts = rng.integers(0, largest, 12)
    assert loaded(store, counts).matches(16)[0].tolist() == reference.ranked(counts)[:16]


def test_a_number_of_matches_that_cannot_be_asked_for() -> None:
    match = RunningMatch(HistoryStore(np.array([3], np.int32), 2))
    for p in (0, 17):
        with pytest.raises(ValueError, match=r"expected 1\.\.16"):
            match.matches(p)
    assert match.matches(3)[0].shape == (0,)


def test_a_request_without_routing_is_not_stored() -> None:
    store = HistoryStore(np.array([3, 2], np.int32), 2)
    assert store.add(np.zeros(5, np.int64), np.zeros(5, np.int64), 17) == -1
    assert (store.size, store.finished, store.tokens) == (0, 0, 0)


@pytest.mark.failure("47", "48")
def test_an_empty_store_and_an_empty_request_have_similarity_zero() -> None:
    store = HistoryStore(np.array([3, 2], np.int32), 6)
    assert loaded(store, np.ones(5, np.int64)).similarities().shape == (0,)
    assert call_match(RunningMatch(store), 0, [1]) == (-1, 0.0)
    for entry in np.eye(5, dtype=np.int64)[:3]:
        store.add(entry, np.zeros(5, np.int64), 1)
    np.testing.assert_array_equal(RunningMatch(store).similarities(), [0, 0, 0])


@pytest.mark.failure("47")
def test_empty_entries_never_win_the_search() -> None:
    # Three of six rooms are filled; the query equals the second.
    store = HistoryStore(np.array([3, 3], np.int32), 6)
    entries = np.array([[5, 0, 0, 1, 0, 0], [0, 3, 0, 0, 3, 0], [0, 0, 2, 0, 0, 9]], np.int64)
    for entry in entries:
        store.add(entry, np.zeros(6, np.int64), 5)
    match = RunningMatch(store)
    assert call_match(match, 0, [1])[0] == 1
    entry, similarity = call_match(match, 1, [1])
    assert (entry, similarity) == (1, pytest.approx(1.0, rel=1e-6))


def test_wrong_number_of_counts_is_refused() -> None:
    store = HistoryStore(np.array([3, 2], np.int32), 2)
    with pytest.raises(ValueError, match="expected 5 counts, got 4"):
        store.add(np.ones(4, np.int64), np.ones(5, np.int64), 1)
    assert store.size == 0


@pytest.mark.failure("48")
@given(stores(largest=20), st.data())
@settings(SETTINGS, max_examples=40)
def test_the_running_match_equals_a_search_from_scratch(
    pair: tuple[HistoryStore, HistoryReference], data: st.DataObject
) -> None:
    store, reference = pair
    match = RunningMatch(store)
    counts = np.zeros(reference.layout.total, np.int64)
    for _ in range(data.draw(st.integers(1, 12))):
        layer = data.draw(st.integers(0, reference.layout.layers - 1))
        experts = reference.layout.num_experts[layer]
        ids = data.draw(st.lists(st.integers(0, experts - 1), min_size=1, max_size=min(4, experts), unique=True))
        counts[np.array(ids) + reference.layout.offset[layer]] += 1
        entry, similarity = call_match(match, layer, ids)
        ranked = reference.ranked(counts)
        assert entry == (ranked[0] if ranked else -1)
        assert similarity == pytest.approx(reference.similarities(counts)[entry] if ranked else 0.0, rel=1e-14)
        if data.draw(st.booleans()):
            p = data.draw(st.integers(1, 16))
            entries, similarities = match.matches(p)
            assert entries.tolist() == ranked[:p]
            np.testing.assert_allclose(similarities, reference.similarities(counts)[entries], rtol=1e-14)
        np.testing.assert_array_equal(match.counts, counts)


def test_match_step_refuses_bad_numbers() -> None:
    match = RunningMatch(HistoryStore(np.array([3, 2], np.int32), 2))
    for layer, ids in [(2, [0]), (-1, [0]), (1, [2]), (0, [-1]), (0, [0] * 65)]:
        with pytest.raises(RoutingError):
            call_match(match, layer, ids)
    # Every id is checked before the first is counted.
    with pytest.raises(RoutingError):
        call_match(match, 0, [1, 9])
    assert not match.counts.any()
