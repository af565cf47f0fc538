"""Hazards and the weights that are learned online: step by step against NumPy, and under anything a router may do."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from core_helpers import Twins, check_estimates, make_core
from hypothesis import given, settings
from hypothesis import strategies as st
from reference_core import SETTINGS, WeightsReference, call_route, reuse_times

from moecache._core import Core, OnlineWeights, RequestState


def favourites(random: np.random.Generator, tokens: int, experts: int, k: int) -> np.ndarray:
    """``[tokens, k]`` with favourites that change every 40 tokens."""
    rows = []
    for t in range(tokens):
        if t % 40 == 0:
            chance = np.log(random.dirichlet(np.full(experts, 0.3)) + 1e-30)
        rows.append(np.argsort(-chance - random.gumbel(size=experts))[:k])
    return np.array(rows)


@pytest.mark.parametrize("layers", [(8, 8), (5, 12, 3)])
def test_weights_are_learned_as_the_reference_learns_them(layers: tuple[int, ...]) -> None:
    # Three requests of 90 tokens, each step checked: whole snapshots, those a prompt cuts off, those open at the end.
    twins = Twins(layers, history=4)
    random = np.random.default_rng(3)
    first = twins.core.store.weights.counts.copy()
    learned = 0
    for n in range(3):
        twins.begin()
        ids = [favourites(random, 90, experts, 2) for experts in layers]
        for t in range(90):
            prompt = t == 0 or (n == 1 and t == 50)
            for layer in range(len(layers)):
                before = twins.core.store.weights.counts.copy()
                twins.route(0, layer, ids[layer][t : t + 1 + prompt].tolist(), decode=not prompt)
                learned += (twins.core.store.weights.counts != before).any()
                check_estimates(twins.core, twins.estimates)
        twins.end(0)
        twins.check()
    # 89 visits hold two whole snapshots; the one cut after 50 tokens leaves 49 and 39.
    assert learned == len(layers) * 2 * 3
    assert np.abs(twins.core.store.weights.counts - first).max() > 0.05


def test_float32_features_do_not_drift_from_the_reference() -> None:
    # 600 tokens without a look at the core's weights.
    twins = Twins((10,), history=4)
    twins.begin()
    for row in favourites(np.random.default_rng(0), 600, 10, 2):
        twins.route(0, 0, [row.tolist()], decode=True)
    learned, reference = twins.core.store.weights, twins.estimates.weights
    np.testing.assert_allclose(learned.counts, reference.weights, atol=2e-3)
    np.testing.assert_allclose(twins.core.estimates.probability, twins.estimates.chance, rtol=5e-3)


def test_two_requests_learn_into_one_set_of_weights() -> None:
    twins = Twins((6, 6), history=4)
    random = np.random.default_rng(1)
    for _ in range(2):
        twins.begin()
    for row in favourites(random, 70, 6, 2):
        for n in (0, 1):
            for layer in (0, 1):
                twins.route(n, layer, [((row + n) % 6).tolist()], decode=True)
                check_estimates(twins.core, twins.estimates)
    twins.end(0, keep=False)
    twins.check()


def test_learning_finds_what_each_expert_does() -> None:
    # Half of the experts are used every other token exactly, the others at random: hazards become what comes true.
    core = make_core((8,), top_k=2)
    request = core.begin_request()
    random = np.random.default_rng(0)
    for t in range(3000):
        call_route(core, request, 0, [[t % 2, int(random.integers(2, 8))]], True)
    hazards = request.predictor.hazards
    # Expert 1 has just been used and comes after the next token; each of the others comes once in six.
    assert hazards[0, 1] < 0.15
    assert hazards[0, 0] > 0.85
    assert hazards[0, 2:].mean() == pytest.approx(1 / 6, abs=0.08)


@given(seed=st.integers(0, 10_000), layers=st.integers(1, 70), n=st.integers(1, 200))
@settings(SETTINGS, max_examples=30)
def test_reuse_times_are_the_inverse_of_the_best_rate(seed: int, layers: int, n: int) -> None:
    random = np.random.default_rng(seed)
    hazards = 1 / (1 + np.exp(-random.uniform(-15, 15, (6, n))))
    found = reuse_times(hazards, layers)
    # By its definition: the index is the price of a slot at which no horizon pays any more.
    price = 1 / (found / layers + 1)
    lengths = np.array([1, 1, 2, 4, 8, 16])
    worth, alive, spent = np.full(n, -np.inf), np.ones(n), np.zeros(n)
    for i in range(6):
        spent += alive * (hazards[i] * (lengths[i] + 1) / 2 + (1 - hazards[i]) * lengths[i])
        alive *= 1 - hazards[i]
        worth = np.maximum(worth, (1 - alive) - price * spent)
    np.testing.assert_allclose(worth[price > 1.01e-5], 0, atol=1e-9)


# Whatever is routed


def check_bounds(core: Core, requests: list[RequestState]) -> None:
    weights = core.store.weights
    for name, value in weights.arrays().items():
        assert np.isfinite(value).all(), name
    assert np.abs(weights.counts).max() <= 10
    assert np.abs(weights.blend).max() <= 10
    assert OnlineWeights.faults(weights.arrays()) is None
    for request in requests:
        assert ((request.predictor.hazards >= 0) & (request.predictor.hazards <= 1)).all()
    assert ((core.estimates.probability >= 0) & (core.estimates.probability <= 1)).all()
    assert ((core.estimates.reuse_times >= 0) & (core.estimates.reuse_times <= core.layout.num_layers * 1e5)).all()


KINDS = ["one for ever", "in turn", "any", "none", "padded", "empty", "prompt", "all", "batch"]


def adversary(kind: str, t: int, experts: int, random: np.random.Generator) -> np.ndarray:
    """Ids ``[rows, k]`` of one step."""
    k = int(random.integers(1, experts + 1))
    some = random.permutation(experts)[:k]
    return {
        "one for ever": np.array([[experts - 1]]),
        "in turn": np.array([[t % experts]]),
        "any": some[None],
        "none": np.full((1, k), -1),
        "padded": np.where(random.random(k) < 0.5, some, -1)[None],
        "empty": np.zeros((0, k), np.int64),
        "prompt": random.integers(-1, experts, (3000, k)),
        "all": np.arange(experts)[None],
        "batch": random.integers(0, experts, (5, k)),
    }[kind]


@given(
    layers=st.sampled_from([(1,), (3, 9), (70, 2, 65)]),
    plan=st.lists(
        st.tuples(st.sampled_from(KINDS), st.integers(1, 80), st.booleans(), st.booleans()), min_size=1, max_size=6
    ),
    seed=st.integers(0, 10_000),
    sure=st.sampled_from([0, 1e3, 9e11]),
)
@settings(SETTINGS, max_examples=30)
def test_nothing_routed_makes_anything_leave_its_bounds(
    layers: tuple[int, ...], plan: list[tuple[str, int, bool, bool]], seed: int, sure: float
) -> None:
    random = np.random.default_rng(seed)
    core = make_core(layers, policy="expected-next-use", slots=max(2, sum(layers) // 3), top_k=1, history=2)
    if sure:
        # What a file may hold: the largest weights, and curvatures of any rank.
        for kind in ("counts", "blend"):
            weights, curvature = getattr(core.store.weights, kind), getattr(core.store.weights, f"{kind}_curvature")
            rows = random.normal(size=(6, weights.shape[1], int(random.integers(1, weights.shape[1] + 1))))
            full = rows @ rows.transpose(0, 2, 1)
            weights[:] = random.choice([-10.0, 0.0, 10.0], weights.shape)
            curvature[:] = full * (sure / np.abs(full).max())
        assert OnlineWeights.faults(core.store.weights.arrays()) is None
    requests = [core.begin_request()]
    for kind, steps, another, decode in plan:
        for t in range(2 if kind == "prompt" else steps):
            for layer, experts in enumerate(layers):
                ids = adversary(kind, t, experts, random)
                core.release(call_route(core, requests[-1], layer, ids, decode or kind not in ("prompt", "batch")))
        check_bounds(core, requests)
        if another:
            requests.append(core.begin_request())
        elif len(requests) > 1:
            core.end_request(requests.pop(0))
        check_bounds(core, requests)


@pytest.mark.parametrize("kind", ["one for ever", "in turn", "all", "any"])
def test_hazards_stay_finite_over_thousands_of_steps_alike(kind: str) -> None:
    core = make_core((6, 6), policy="expected-next-use", slots=4, top_k=1)
    random = np.random.default_rng(0)
    request = core.begin_request()
    for t in range(4000):
        for layer in (0, 1):
            core.release(call_route(core, request, layer, adversary(kind, t, 6, random), True))
    check_bounds(core, [request])
    if kind == "one for ever":
        assert core.estimates.probability[5] > 0.99
        assert core.estimates.probability[:5].max() < 0.01


def test_first_weights_are_the_documented_ones() -> None:
    np.testing.assert_array_equal(OnlineWeights().counts, WeightsReference().weights)


@pytest.mark.parametrize("change", [{"counts": np.nan}, {"blend": 10.1}, {"counts_curvature": -1.0}])
def test_faults_are_named(change: dict[str, Any]) -> None:
    arrays = {name: value.copy() for name, value in OnlineWeights().arrays().items()}
    assert OnlineWeights.faults(arrays) is None
    for name, value in change.items():
        arrays[name][:] = value
        assert name in str(OnlineWeights.faults(arrays))
