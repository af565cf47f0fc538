"""The forecaster as the core runs it, against plain NumPy in float64."""

import numpy as np
import pytest
from reference_core import call_route
from reference_forecaster import ForecastReference, sigmoid

from moecache import Fingerprint, History
from moecache._core import Core
from moecache.forecaster import Forecaster

SHAPES = [
    pytest.param((8, 5, 17, 64), 3, 4, 12, 3, id="ragged"),
    pytest.param((64,) * 6, 6, 4, 96, 5, id="64 wide"),
    pytest.param((3, 4), 2, 2, 1, 1, id="tiny"),
    pytest.param((130, 80), 4, 3, 17, 1, id="wider than a block"),
]


def bytes_like(random: np.random.Generator, *shape: int) -> np.ndarray:
    """float16 weights [..., r] that eight bits hold exactly."""
    whole = random.integers(-127, 128, shape)
    whole[..., 0] = 127
    return (whole / 1024).astype(np.float16)


def make_forecaster(
    experts: tuple[int, ...], scales: int, rank: int, distances: int, exact: bool = True, seed: int = 0
) -> Forecaster:
    random = np.random.default_rng(seed)
    total, widths = sum(experts), np.array(experts)
    pairs = sum(int((widths * np.roll(widths, -d)).sum()) for d in range(1, distances + 1))

    def half(*shape: int) -> np.ndarray:
        return bytes_like(random, *shape) if exact else random.normal(0, 0.1, shape).astype(np.float16)

    def single(*shape: int) -> np.ndarray:
        return random.normal(0, 0.5, shape).astype(np.float32)

    return Forecaster(
        fingerprint=Fingerprint(experts, 0, "made"),
        decay=np.array([1, 0.45, 0.2, 0.02][:scales], np.float32),
        prior=random.uniform(0.01, 0.3, total).astype(np.float32),
        rectified=rank // 2,
        write=random.normal(0, 0.3, (scales, total, rank)).astype(np.float16),
        use_read=half(6, total, rank),
        use_bias=single(6, total),
        use_weights=single(6, scales - 1),
        ahead_read=half(total, rank),
        ahead_gain=single(distances, rank),
        ahead_bias=single(distances, total),
        ahead_weights=single(distances, scales - 1),
        ahead_pairs=random.normal(0, 0.3, pairs).astype(np.float16),
    )


def make_core(forecaster: Forecaster | None, experts: tuple[int, ...], policy: str = "expected-next-use") -> Core:
    history = History(Fingerprint(experts, 0, "made"), 4)
    history.forecaster = forecaster
    slots = sum(experts)
    layers = len(experts)
    return Core(
        history.store, np.zeros(layers, np.int32), np.array([slots], np.int32), np.zeros(slots, np.int32), policy
    )


@pytest.mark.parametrize(("experts", "top_k", "scales", "rank", "distances"), SHAPES)
def test_read_outs_are_those_of_the_formula(
    experts: tuple[int, ...], top_k: int, scales: int, rank: int, distances: int
) -> None:
    forecaster = make_forecaster(experts, scales, rank, distances)
    core, reference = make_core(forecaster, experts), ForecastReference(forecaster)
    request = core.begin_request()
    random = np.random.default_rng(1)
    for token in range(40):
        for layer, width in enumerate(experts):
            ids = random.choice(width, top_k, replace=False)
            if token % 7 == 3:
                ids[-1] = -1
            core.release(call_route(core, request, layer, ids[None]))
            reference.visit(layer, ids)
            found = sigmoid(request.forecast.use_odds(layer).astype(np.float64))
            np.testing.assert_allclose(found, reference.hazards(layer), atol=2e-4)
            for distance in range(1, distances + 1):
                coming = request.forecast.ahead_chances(layer, distance, ids.astype(np.int32))
                np.testing.assert_allclose(coming, reference.coming(distance), atol=2e-4)


def test_a_prompt_is_its_tokens_one_after_another() -> None:
    experts = (8, 12, 8)
    forecaster = make_forecaster(experts, 4, 16, 2)
    core, reference = make_core(forecaster, experts), ForecastReference(forecaster)
    request = core.begin_request()
    random = np.random.default_rng(2)
    for layer, width in enumerate(experts):
        ids = np.stack([random.choice(width, 2, replace=False) for _ in range(50)])
        counted = [t % 5 != 4 for t in range(50)]
        core.release(call_route(core, request, layer, ids, decode=False, counted=counted))
        for row, counts in zip(ids, counted, strict=True):
            if counts:
                reference.visit(layer, row)
        found = sigmoid(request.forecast.use_odds(layer).astype(np.float64))
        np.testing.assert_allclose(found, reference.hazards(layer), atol=2e-4)


def test_eight_bits_are_enough_for_any_weights() -> None:
    experts = (64, 64, 64)
    forecaster = make_forecaster(experts, 4, 96, 2, exact=False)
    core, reference = make_core(forecaster, experts), ForecastReference(forecaster)
    request = core.begin_request()
    random = np.random.default_rng(3)
    for _ in range(30):
        for layer in range(3):
            ids = random.choice(64, 6, replace=False)
            core.release(call_route(core, request, layer, ids[None]))
            reference.visit(layer, ids)
            found = sigmoid(request.forecast.use_odds(layer).astype(np.float64))
            np.testing.assert_allclose(found, reference.hazards(layer), atol=0.02)


def test_a_fresh_request_expects_what_the_forecaster_says() -> None:
    experts = (8, 8)
    forecaster = make_forecaster(experts, 4, 8, 1)
    core, reference = make_core(forecaster, experts), ForecastReference(forecaster)
    core.begin_request()
    expected = np.concatenate([reference.hazards(layer)[0] for layer in range(2)])
    np.testing.assert_allclose(core.estimates.probability, expected, atol=1e-4)


def test_only_the_default_policy_listens_and_a_request_keeps_its_weights() -> None:
    experts = (8, 8)
    first, second = (make_forecaster(experts, 4, 8, 1, seed=seed) for seed in (0, 1))
    assert make_core(first, experts, "counts").begin_request().forecast is None
    core = make_core(first, experts)
    running = core.begin_request()
    before = running.forecast.use_odds(0)
    history = History(Fingerprint(experts, 0, "made"), 4)
    history.forecaster = second
    core.store.forecaster = history.store.forecaster
    np.testing.assert_array_equal(running.forecast.use_odds(0), before)
    assert not np.array_equal(core.begin_request().forecast.use_odds(0), before)
    core.store.forecaster = None
    assert core.begin_request().forecast is None
