"""Counting, matching and chances of use against NumPy, with every shape and dtype that a router's ids can have."""

from __future__ import annotations

import ast
import functools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from reference_core import (
    SETTINGS,
    Estimates,
    HistoryReference,
    SlotTable,
    call_match,
    call_route,
    make_score,
    run_step,
)

from moecache import _core
from moecache._core import Core, HistoryStore, RunningMatch
from moecache.errors import LeaseError, RoutingError
from moecache.policy import Score
from moecache.policy import score as make_user_score

LAYOUTS = st.sampled_from([(4,), (3, 3), (5, 2, 7), (1, 4), (8, 16, 4)])


def make_core(
    num_experts: tuple[int, ...],
    slots: int | list[int] | None = None,
    *,
    policy: str = "lru",
    groups: list[int] | None = None,
    prefetch: bool = False,
    history: int = 8,
    top_k: int = 2,
    store: HistoryStore | None = None,
    score: int = 0,
) -> Core:
    store = store or HistoryStore(np.array(num_experts, np.int32), history)
    per_kind = [sum(num_experts)] if slots is None else slots if isinstance(slots, list) else [slots]
    return Core(
        store,
        np.array(groups or [0] * len(num_experts), np.int32),
        np.array(per_kind, np.int32),
        np.zeros(sum(per_kind), np.int32),
        policy,
        score,
        prefetch,
        top_k,
    )


def matrix(draw: st.DrawFn, total: int, largest: int) -> np.ndarray:
    counts = draw(
        st.lists(st.one_of(st.just(0), st.integers(0, 3), st.integers(0, largest)), min_size=total, max_size=total)
    )
    return np.array(counts, np.int64)


@st.composite
def stores(draw: st.DrawFn, largest: int = 300) -> tuple[HistoryStore, HistoryReference]:
    """A store filled through `add`, beside its reference."""
    num_experts = draw(LAYOUTS)
    capacity = draw(st.integers(1, 5))
    store = HistoryStore(np.array(num_experts, np.int32), capacity)
    reference = HistoryReference(num_experts, capacity)
    for _ in range(draw(st.integers(0, 9))):
        prompt, decode = matrix(draw, reference.layout.total, largest), matrix(draw, reference.layout.total, largest)
        tokens = draw(st.integers(0, 1000))
        assert store.add(prompt, decode, tokens) == reference.add(prompt, decode, tokens)
    return store, reference


def loaded(store: HistoryStore, counts: np.ndarray) -> RunningMatch:
    match = RunningMatch(store)
    match.load(counts)
    return match


# The store


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


# What a core learns from steps


# Features are kept in float32, and the log odds of a share near 1 have the fewest of its digits.
RELATIVE = 1e-3


def check_estimates(core: Core, estimates: Estimates) -> None:
    """Weights, chances and reuse times are the reference's; from here on it takes the core's weights, so that no drift adds up."""
    learned, reference = core.store.weights, estimates.weights
    np.testing.assert_allclose(learned.counts, reference.weights, rtol=0, atol=1e-4)
    curvature = np.tril(learned.counts_curvature)
    np.testing.assert_allclose(curvature, np.tril(reference.curvature), rtol=RELATIVE, atol=1e-2)
    reference.weights[:] = learned.counts
    reference.curvature[:] = curvature + np.tril(curvature, -1).transpose(0, 2, 1)
    np.testing.assert_allclose(core.estimates.probability, estimates.chance, rtol=RELATIVE)
    # A reuse time is the inverse of an index that is as exact as the hazards; near 0 it is a difference.
    layers = estimates.layout.layers
    np.testing.assert_allclose(
        core.estimates.reuse_times / layers + 1, estimates.reuse_time / layers + 1, rtol=RELATIVE
    )


class Twins:
    """A core and its reference, fed the same steps."""

    def __init__(self, num_experts: tuple[int, ...], history: int, top_k: int = 2) -> None:
        self.core = make_core(num_experts, history=history, top_k=top_k)
        self.reference = HistoryReference(num_experts, history)
        self.estimates = Estimates(self.reference, top_k)
        self.pairs: list[tuple[Any, Any]] = []

    def begin(self) -> None:
        self.pairs.append((self.core.begin_request(), self.estimates.begin()))

    def end(self, n: int, keep: bool = True) -> None:
        state, request = self.pairs.pop(n)
        self.core.end_request(state, keep)
        self.estimates.end(request, keep)
        reference, store = self.reference, self.core.store
        for entry, (prompt, decode) in enumerate(zip(reference.prompt, reference.decode, strict=True)):
            np.testing.assert_array_equal(store.prompt_counts[entry], prompt)
            np.testing.assert_array_equal(store.decode_counts[entry], decode)

    def route(self, n: int, layer: int, ids: list[list[int]], decode: bool, counted: list[bool] | None = None) -> Any:
        state, request = self.pairs[n]
        step = call_route(self.core, state, layer, ids, decode, counted)
        run_step(self.core, step)
        self.core.release(step)
        self.estimates.observe(request, layer, ids, decode, counted)
        return step

    def check(self) -> None:
        check_estimates(self.core, self.estimates)
        for state, request in self.pairs:
            np.testing.assert_allclose(state.predictor.hazards, request.hazards, rtol=RELATIVE)
            np.testing.assert_array_equal(state.match.prompt_counts, request.prompt)
            np.testing.assert_array_equal(state.match.decode_counts, request.decode)
            assert (state.prompt_tokens, state.decode_tokens) == (request.prompt_tokens, request.decode_tokens)
            np.testing.assert_allclose(
                state.match.similarities(), self.reference.similarities(request.counts), rtol=1e-6, atol=1e-12
            )
        store = self.core.store
        np.testing.assert_array_equal(
            store.transitions.counts, np.concatenate([t.ravel() for t in self.reference.transitions])
        )
        np.testing.assert_array_equal(store.transitions.origins, self.reference.origins)
        np.testing.assert_array_equal(
            store.successions.counts, np.concatenate([t.ravel() for t in self.reference.successions])
        )
        np.testing.assert_array_equal(store.successions.origins, self.reference.followed)


def id_rows(
    experts: int, tokens: st.SearchStrategy[int], k: st.SearchStrategy[int]
) -> st.SearchStrategy[list[list[int]]]:
    """Rows of equal length, with padding and repeated ids."""
    one = st.one_of(st.integers(0, experts - 1), st.integers(-1, experts - 1))
    return st.tuples(tokens, k).flatmap(
        lambda shape: st.lists(
            st.lists(one, min_size=shape[1], max_size=shape[1]), min_size=shape[0], max_size=shape[0]
        )
    )


@given(st.data())
@settings(SETTINGS, max_examples=50)
def test_interleaved_requests_learn_what_the_reference_learns(data: st.DataObject) -> None:
    num_experts = data.draw(LAYOUTS)
    twins = Twins(num_experts, history=data.draw(st.integers(1, 3)), top_k=data.draw(st.integers(0, 3)))
    at: list[int] = []
    for _ in range(data.draw(st.integers(1, 25))):
        what = data.draw(st.sampled_from(["begin", "end", "route", "route", "route", "route"]))
        if (what == "begin" and len(at) < 3) or not at:
            twins.begin()
            at.append(0)
        elif what == "end":
            n = data.draw(st.integers(0, len(at) - 1))
            twins.end(n, keep=data.draw(st.booleans()))
            at.pop(n)
        else:
            n = data.draw(st.integers(0, len(at) - 1))
            # Mostly layer after layer, as models go, at times anywhere.
            layer = data.draw(st.sampled_from([at[n], at[n], at[n], data.draw(st.integers(0, len(num_experts) - 1))]))
            ids = data.draw(id_rows(num_experts[layer], st.integers(0, 4), st.integers(1, 3)))
            if not ids:
                continue
            counted = data.draw(st.one_of(st.none(), st.lists(st.booleans(), min_size=len(ids), max_size=len(ids))))
            twins.route(n, layer, ids, data.draw(st.booleans()), counted)
            at[n] = (layer + 1) % len(num_experts)
        twins.check()


def test_finished_requests_reach_the_matches_of_running_ones() -> None:
    twins = Twins((4, 4), history=2)
    for _ in range(3):
        twins.begin()
    for n in range(3):
        for layer in range(2):
            twins.route(n, layer, [[n, 3], [n, n]], decode=False)
    twins.end(0)
    twins.check()
    assert twins.pairs[0][0].match.similarities()[0] > 0
    twins.end(0)
    twins.check()
    twins.route(0, 0, [[0, 3]], decode=True)
    twins.end(0)  # replaces under nobody; the store stays whole
    twins.begin()
    twins.route(0, 0, [[1, 3]], decode=True)
    twins.check()


def test_counts_of_what_followed_never_wrap() -> None:
    core = make_core((4, 4), history=2)
    store = core.store
    request = core.begin_request()
    call_route(core, request, 0, [[1, 2]])
    largest = 2**31 - 1
    store.transitions.origins[:4] = [10, largest, 8, 0]
    store.transitions.counts[:16] = np.arange(16) * 1000
    store.transitions.counts[7] = largest
    call_route(core, request, 1, [[0, 3]])
    # The layer is halved before the count that would not fit, and counts on.
    assert store.transitions.origins[:4].tolist() == [5, 2**30, 5, 0]
    expected = np.arange(16) * 500
    expected[[4, 7, 8, 11]] = 2001, 2**30, 4001, 5501
    np.testing.assert_array_equal(store.transitions.counts[:16], expected)


def by_hand(slow: float, fast: float, prior: float, lift: float) -> float:
    """Chance of the next token with the first weights."""
    odds = [np.log(p / (1 - p)) for p in (slow, fast, prior)]
    z = 0.2 + 0.5 * odds[0] + 0.05 * odds[1] + 0.5 * odds[2] + 0.45 * np.log(lift)
    return float(1 / (1 + np.exp(-z)))


def test_chances_of_several_requests_join() -> None:
    # 1 - (1 - p) (1 - q), by hand: one request has just used expert 0, the other expert 1. Nothing has followed anything yet: no lift.
    core = make_core((2,), top_k=1)
    first, second = core.begin_request(), core.begin_request()
    alone = by_hand(0.5, 0.5, 0.5, 1)
    used = by_hand(0.98 * 0.5 + 0.02, 0.7 * 0.5 + 0.3, 0.5, 1)
    unused = by_hand(0.98 * 0.5, 0.7 * 0.5, 0.5, 1)
    np.testing.assert_allclose(core.estimates.probability, 1 - (1 - np.full(2, alone)) ** 2, rtol=1e-5)
    call_route(core, first, 0, [[0]])
    call_route(core, second, 0, [[1]])
    np.testing.assert_allclose(core.estimates.probability, 1 - (1 - used) * (1 - unused), rtol=1e-5)
    core.end_request(second, False)
    np.testing.assert_allclose(core.estimates.probability, [used, unused], rtol=1e-5)


def test_a_batch_of_rows_uses_more_than_one_row() -> None:
    core = make_core((4,), top_k=1)
    request = core.begin_request()
    call_route(core, request, 0, [[0], [1], [0]], decode=True)
    estimates = Estimates(HistoryReference((4,), 8), 1)
    reference = estimates.begin()
    estimates.observe(reference, 0, [[0], [1], [0]], True)
    assert reference.rows == 3
    np.testing.assert_allclose(core.estimates.probability, estimates.chance, rtol=1e-5)


def test_reuse_time_of_a_constant_chance_is_geometric() -> None:
    # Nobody runs: every token uses an expert with the chance of the prior, whatever was before.
    core = make_core((4, 8), top_k=2)
    core.end_request(core.begin_request(), False)
    np.testing.assert_allclose(core.estimates.probability, [0.5] * 4 + [0.25] * 8, rtol=1e-6)
    np.testing.assert_allclose(core.estimates.reuse_times, [2 * (2 - 1)] * 4 + [2 * (4 - 1)] * 8, rtol=1e-5)


def test_steps_over_several_layers_of_one_prompt_are_transitions() -> None:
    twins = Twins((3, 2, 4), history=2)
    twins.begin()
    for layer, ids in enumerate([[[0, 1], [2, -1]], [[1, 0], [1, 1]], [[3, 0], [-1, -1]]]):
        twins.route(0, layer, ids, decode=False)
    twins.route(0, 0, [[0, 2]], decode=True)  # another number of tokens: not the same ones
    for layer, ids in enumerate([[[1, 0]], [[2, 3]]], start=1):
        twins.route(0, layer, ids, decode=True)
    twins.route(0, 0, [[1, 1]], decode=True)  # the next token follows the last layer
    twins.check()
    wrap = twins.reference.transitions[2]
    assert wrap[2, 1] == wrap[3, 1] == 1
    assert wrap.sum() == 2


# Reading ids


INTEGERS = [np.int8, np.uint8, np.int16, np.int32, np.int64]


@pytest.mark.parametrize("dtype", INTEGERS)
@pytest.mark.parametrize("layout", ["C", "F", "sliced", "broadcast", "reversed"])
def test_ids_of_every_dtype_and_stride(dtype: type, layout: str) -> None:
    plain = np.array([[5, 1, 2], [0, 5, 3], [7, 7, 6], [2, 4, 0]])
    if layout == "broadcast":
        plain = np.broadcast_to(plain[:1], plain.shape)
    ids = plain.astype(dtype)
    if layout == "F":
        ids = np.asfortranarray(ids)
    elif layout == "sliced":
        wide = np.full((8, 9), 99, dtype)
        wide[::2, 1::3] = plain
        ids = wide[::2, 1::3]
    elif layout == "broadcast":
        ids = np.broadcast_to(ids[:1], ids.shape)
    elif layout == "reversed":
        ids = ids[::-1].copy()[::-1]
    core = make_core((8, 8))
    request = core.begin_request()
    step = call_route(core, request, 1, ids)
    assert step.expert_list() == sorted(set(plain.ravel().tolist()))
    counts = np.zeros((2, 8), np.int64)
    for row in plain:
        counts[1, list(set(row.tolist()))] += 1
    np.testing.assert_array_equal(request.match.counts.reshape(2, 8), counts)


@given(st.data())
@settings(SETTINGS, max_examples=50)
def test_pairs_are_grouped_as_torch_where_lists_the_one_hot_mask(data: st.DataObject) -> None:
    experts = data.draw(st.integers(1, 9))
    ids = data.draw(id_rows(experts, st.integers(1, 7), st.integers(1, 5)))
    core = make_core((experts,))
    step = call_route(core, core.begin_request(), 0, ids)
    # -1 gets a class of its own, which is dropped.
    mask = torch.nn.functional.one_hot(torch.tensor(ids) + 1, experts + 1).permute(2, 1, 0)[1:]
    present = [e for e in range(experts) if mask[e].any()]
    assert step.expert_list() == present
    for i, e in enumerate(present):
        expert, _, begin, end = step.item(i)
        position, token = torch.where(mask[e])
        assert expert == e
        np.testing.assert_array_equal(step.topk_position[begin:end], position)
        if len(ids) > 1:
            np.testing.assert_array_equal(step.token_index[begin:end], token)
        else:
            assert step.token_index is None
            assert not token.any()


def test_a_long_prompt_is_grouped_the_same_way() -> None:
    # Above 4,096 pairs the ids are read without the GIL.
    ids = np.random.default_rng(0).integers(-1, 16, (1500, 4))
    core = make_core((16,))
    step = call_route(core, core.begin_request(), 0, ids)
    mask = torch.nn.functional.one_hot(torch.from_numpy(ids) + 1, 17).permute(2, 1, 0)[1:]
    for i in range(16):
        expert, _, begin, end = step.item(i)
        position, token = torch.where(mask[expert])
        np.testing.assert_array_equal(step.topk_position[begin:end], position)
        np.testing.assert_array_equal(step.token_index[begin:end], token)
    ids[1400, 2] = 16
    with pytest.raises(RoutingError, match="token 1400, position 2"):
        call_route(core, core.begin_request(), 0, ids)


@pytest.mark.failure("38")
@pytest.mark.parametrize("bad", [-2, 8, 10**9, -(10**12), 2**31, 2**32, 2**63 - 1])
def test_ids_out_of_range_change_nothing(bad: int) -> None:
    core = make_core((8, 8), 4)
    request = core.begin_request()
    step = call_route(core, request, 0, [[1, 2]])
    run_step(core, step)
    core.release(step)
    before = (
        core.counters(),
        request.match.counts.copy(),
        core.estimates.probability.copy(),
        core.slots.occupants.copy(),
        core.estimates.last_use.copy(),
    )
    with pytest.raises(RoutingError, match=f"layer 1: expert id {bad} of token 1, position 0.*0..7"):
        call_route(core, request, 1, [[3, 4], [bad, 5]])
    after = (
        core.counters(),
        request.match.counts,
        core.estimates.probability,
        core.slots.occupants,
        core.estimates.last_use,
    )
    assert before[0] == after[0]
    for a, b in zip(before[1:], after[1:], strict=True):
        np.testing.assert_array_equal(a, b)
    with pytest.raises(IndexError):
        call_route(core, request, 1, [[bad]])


@pytest.mark.failure("38")
@pytest.mark.failure("37")
@pytest.mark.parametrize("layer", [-1, 2, 10**6])
def test_a_layer_out_of_range_is_refused(layer: int) -> None:
    core = make_core((8, 8), 4)
    with pytest.raises(RoutingError, match=f"layer {layer} is out of range.*0..1"):
        call_route(core, core.begin_request(), layer, [[1]])
    assert core.counters()["steps"] == 0


@pytest.mark.failure("37")
def test_padding_is_neither_loaded_nor_counted() -> None:
    core = make_core((4,), 4)
    request = core.begin_request()
    step = call_route(core, request, 0, [[0, -1], [-1, -1]])
    assert step.expert_list() == [0]
    assert (step.tokens, step.counted_tokens) == (2, 1)
    np.testing.assert_array_equal(request.match.counts, [1, 0, 0, 0])
    assert core.counters()["tokens"] == 1


@pytest.mark.failure("38")
def test_a_padding_id_counts_as_padding_only_when_named() -> None:
    core = make_core((4,), 4)
    request = core.begin_request()
    assert call_route(core, request, 0, [[4, 0], [2, -1]], padding_id=4).expert_list() == [0, 2]
    with pytest.raises(RoutingError):
        call_route(core, request, 0, [[4, 0]])
    # An unsigned byte has no -1; 255 is what it looks like.
    assert call_route(core, request, 0, np.array([[255, 0]], np.uint8), padding_id=255).expert_list() == [0]
    with pytest.raises(RoutingError, match="expert id 255"):
        call_route(core, request, 0, np.array([[255, 0]], np.uint8))


@pytest.mark.failure("39", "40")
@pytest.mark.parametrize("shape", [(0, 2), (3, 0), (0, 0)])
def test_empty_batches(shape: tuple[int, int]) -> None:
    core = make_core((4,), 4)
    request = core.begin_request()
    step = call_route(core, request, 0, np.zeros(shape, np.int64))
    assert (step.unique, step.expert_list(), step.plan.empty, step.done) == (0, [], True, 0)
    assert step.topk_position.shape == (0,)
    assert run_step(core, step) == []
    core.release(step)
    assert not request.match.counts.any()
    assert core.counters()["demands"] == 0


@pytest.mark.failure("39")
def test_an_expert_named_twice_in_a_row_is_served_twice_and_counted_once() -> None:
    core = make_core((4,), 4)
    request = core.begin_request()
    step = call_route(core, request, 0, [[2, 2], [3, 2]])
    assert step.plan.fetches[:, 0].tolist() == [2, 3]
    assert step.item(0)[2:] == (0, 3)
    np.testing.assert_array_equal(step.token_index, [0, 0, 1, 1])
    np.testing.assert_array_equal(request.match.counts, [0, 0, 2, 1])
    assert core.counters()["demands"] == 2


def test_rows_that_are_not_counted_are_served_all_the_same() -> None:
    core = make_core((4,), 4)
    request = core.begin_request()
    step = call_route(core, request, 0, [[0, 1], [2, 3], [0, 3]], counted=[True, False, True])
    assert step.expert_list() == [0, 1, 2, 3]
    np.testing.assert_array_equal(step.token_index, [0, 2, 0, 1, 1, 2])
    np.testing.assert_array_equal(request.match.counts, [2, 1, 0, 1])
    assert (step.counted_tokens, core.counters()["tokens"]) == (2, 2)


@pytest.mark.failure("45")
def test_one_expert_a_layer_and_all_experts_a_token() -> None:
    core = make_core((1, 3), 4)
    request = core.begin_request()
    assert call_route(core, request, 0, [[0]]).expert_list() == [0]
    assert call_route(core, request, 1, [[2, 0, 1]]).expert_list() == [0, 1, 2]
    assert call_route(core, request, 1, [[2, 0, 1, 1, 2]]).expert_list() == [0, 1, 2]
    np.testing.assert_array_equal(request.match.counts, [1, 2, 2, 2])


# Leases at the level of the core


def test_positions_are_handed_out_and_finished_once() -> None:
    core = make_core((4,), 4)
    step = call_route(core, core.begin_request(), 0, [[0, 1]])
    for i in (-1, 0, 2):
        with pytest.raises(LeaseError):
            core.dispatcher.finish(step, i)
    run_step(core, step)
    with pytest.raises(LeaseError):
        core.dispatcher.finish(step, 0)
    assert core.dispatcher.next_ready(step) == -1


def test_policies_and_scores_that_do_not_fit_are_refused() -> None:
    for policy, score in [("nonsense", 0), ("user", 0), ("lru", 1)]:
        with pytest.raises(ValueError, match="policy"):
            make_core((4,), 2, policy=policy, score=score)


def test_the_stub_lists_what_there_is() -> None:
    tree = ast.parse(Path(_core.__file__).with_name("_core.pyi").read_text())
    typed = {
        node.name: {member.target.id if isinstance(member, ast.AnnAssign) else member.name for member in node.body}  # type: ignore[union-attr, attr-defined]
        for node in tree.body
        if isinstance(node, ast.ClassDef)
    }
    for name, members in typed.items():
        public = {member for member in vars(getattr(_core, name)) if not member.startswith("_")}
        assert members - {"__init__"} == public, name
    assert set(typed) == {name for name in _core.__all__ if isinstance(getattr(_core, name), type)}


# Victims


FEATURES = ("now", "request_frequency", "fast", "slow", "prior")


@functools.cache
def feature_alone(name: str) -> Score:
    namespace: dict[str, Any] = {}
    exec(f"def alone({name}): return {name}", namespace)
    return make_user_score(namespace["alone"])


@pytest.mark.parametrize("policy", ["lru", "lfu", "expected-next-use", "moe-infinity", *FEATURES])
@given(data=st.data())
@settings(SETTINGS, max_examples=15)
def test_hits_and_victims_of_a_trace(policy: str, data: st.DataObject) -> None:
    """Every copy lands at once; hits, misses, evictions and the order of victims equal those of a dict."""
    num_experts = data.draw(st.sampled_from([(6,), (4, 4), (3, 6, 4)]))
    groups = data.draw(st.sampled_from([[0] * len(num_experts), [n % 2 for n in range(len(num_experts))]]))
    capacity = [data.draw(st.integers(2, 5)) for _ in range(max(groups) + 1)]
    if policy in FEATURES:
        core = make_core(num_experts, capacity, policy="user", score=feature_alone(policy).address, groups=groups)
    else:
        core = make_core(num_experts, capacity, policy=policy, groups=groups)
    history = HistoryReference(num_experts, 8)
    estimates = Estimates(history, 2)
    table = SlotTable(history.layout)
    for _ in range(data.draw(st.integers(1, 3))):
        pairs = [(core.begin_request(), estimates.begin()) for _ in range(data.draw(st.integers(1, 2)))]
        for n in range(data.draw(st.integers(1, 14))):
            state, request = pairs[n % len(pairs)]
            layer = n // len(pairs) % len(num_experts)
            rows, k = data.draw(st.sampled_from([(1, 1), (1, 2), (2, 1)]))
            ids = data.draw(id_rows(num_experts[layer], st.just(rows), st.just(k)))
            decode = data.draw(st.booleans())
            step = call_route(core, state, layer, ids, decode)
            estimates.observe(request, layer, ids, decode)
            check_estimates(core, estimates)
            gids = table.touch(layer, ids)
            candidates = [g for g in range(history.layout.total) if groups[history.layout.layer_of[g]] == groups[layer]]
            shares = request.ratios() if policy == "moe-infinity" else None
            score = make_score(policy, table, estimates, layer, request, shares)
            assume(not table.ambiguous(gids, candidates, score))
            check_fetches(step, table, gids, candidates, capacity[groups[layer]], score)
            run_step(core, step)
            core.release(step)
            assert {int(g): s for s, g in enumerate(core.slots.occupants) if g >= 0} == table.slots
            assert (core.demands, core.hits, core.slots.evictions) == (table.demands, table.hits, table.evictions)
        for state, request in pairs:
            keep = data.draw(st.booleans())
            core.end_request(state, keep)
            estimates.end(request, keep)
    assert core.misses == core.demands - core.hits


def check_fetches(
    step: Any, table: SlotTable, gids: list[int], candidates: list[int], capacity: int, score: Callable[[int], float]
) -> None:
    """What a step fetches, and in whose place; then the table does the same."""
    missing = [gid for gid in gids if gid not in table.slots]
    wanted = max(0, len(missing) - (capacity - sum(gid in table.slots for gid in candidates)))
    fetched = step.plan.fetches
    assert fetched[:, 0].tolist() == missing
    occupant = {slot: gid for gid, slot in table.slots.items()}
    victims = [occupant[slot] for slot in fetched[:, 1].tolist() if slot in occupant]
    assert victims == table.victims(gids, candidates, wanted, score)
    assert all(slot not in occupant for slot in fetched[: len(missing) - wanted, 1].tolist())
    for gid, slot, _ in fetched.tolist():
        table.place(gid, slot)
    table.demands += len(gids)
    table.hits += len(gids) - len(missing)


@pytest.mark.failure("1")
def test_an_expert_loaded_in_a_step_is_not_a_victim_of_the_step() -> None:
    # lfu, and the residents have been used more often than the newcomers.
    core = make_core((8,), 3, policy="lfu")
    request = core.begin_request()
    for _ in range(3):
        step = call_route(core, request, 0, [[0, 1, 2]])
        run_step(core, step)
        core.release(step)
    step = call_route(core, request, 0, [[5, 6, 7]])
    assert sorted(core.slots.occupants) == [5, 6, 7]
    assert len(set(step.slot_list())) == 3


def test_all_is_classified_as_it_stood_before_the_step() -> None:
    # 3 evicts one of 0..2; which of them, the step's own 0 and 1 must both be hits.
    core = make_core((8,), 3, policy="lru")
    request = core.begin_request()
    for expert in (0, 1, 2):
        step = call_route(core, request, 0, [[expert]])
        run_step(core, step)
        core.release(step)
    step = call_route(core, request, 0, [[3, 0, 1]])
    assert (step.hits, step.missing) == (2, 1)
    assert sorted(core.slots.occupants) == [0, 1, 3]
