"""Cores to test, what a router may give them, and a core beside its reference."""

from __future__ import annotations

from typing import Any

import numpy as np
from hypothesis import strategies as st
from reference_core import (
    Estimates,
    HistoryReference,
    call_route,
    call_route_batch,
    run_step,
)

from moecache._core import Core, HistoryStore, RunningMatch

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

    def route_batch(
        self, batch: Any, layer: int, parts: list[tuple[int, list[list[int]], bool]], counted: list[bool]
    ) -> Any:
        """One step of several requests: number, rows and whether they are decoded of each; `counted` by row."""
        step = call_route_batch(
            self.core, batch, layer, [(self.pairs[n][0], rows, decode) for n, rows, decode in parts], counted
        )
        run_step(self.core, step)
        self.core.release(step)
        first = np.cumsum([0, *(len(rows) for _, rows, _ in parts)])
        self.estimates.observe_all(
            layer,
            [
                (self.pairs[n][1], rows, decode, counted[first[i] : first[i + 1]])
                for i, (n, rows, decode) in enumerate(parts)
            ],
        )
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


def fill(core: Any, request: Any, layer: int, experts: list[int]) -> None:
    for e in experts:
        step = call_route(core, request, layer, [[e]])
        run_step(core, step)
        core.release(step)
