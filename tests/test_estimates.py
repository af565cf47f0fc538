"""What a core learns from steps: pairs, frequencies, chances, reuse times, against the reference."""

from __future__ import annotations

import numpy as np
from core_helpers import LAYOUTS, Twins, id_rows, make_core
from hypothesis import given, settings
from hypothesis import strategies as st
from reference_core import (
    SETTINGS,
    Estimates,
    HistoryReference,
    call_route,
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
