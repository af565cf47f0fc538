"""A forecaster that knows nothing, or other traffic, costs next to nothing: the counts beside it outvote it within a request."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace

import numpy as np
import pytest
from core_helpers import make_core
from learn_helpers import SMALL, follows
from reference_core import call_route, land
from test_forecaster import made
from test_lab_replay import shared

from moecache import Forecaster, History
from moecache.lab import Settings, Trace, fit, replay
from moecache.lab.replay import trained_history

MOST_LOST = 0.005  # of the hit rate
QUICK = Settings(rank=32, distances=1, epochs=1)


def requests(trace: Trace, numbers: np.ndarray) -> Trace:
    """Some requests as a trace of their own."""
    rows = np.isin(trace.request, numbers)
    _, request = np.unique(trace.request[rows], return_inverse=True)
    return replace(
        trace,
        experts=trace.experts[rows],
        request=request.astype(np.int32),
        decode=trace.decode[rows],
        forward=None,
        counted=None,
        weights=None,
        token=None,
        request_group=None,
    )


def shuffled(trace: Trace) -> Trace:
    """Each request's tokens in another order: what is used stays, what follows what is gone."""
    random, order = np.random.default_rng(0), np.arange(trace.tokens)
    for number in range(trace.requests):
        own = np.flatnonzero(trace.request == number)
        order[own] = random.permutation(own)
    return replace(trace, experts=trace.experts[order])


def noise(trace: Trace, scale: float = 1) -> Forecaster:
    weights = made(trace.fingerprint, rank=16, distances=1)
    return replace(
        weights, use_read=(scale * weights.use_read).astype(np.float16), use_bias=np.float32(scale) * weights.use_bias
    )


def contrary(forecaster: Forecaster) -> Forecaster:
    """Says the opposite, as surely."""
    return replace(
        forecaster,
        use_read=-forecaster.use_read,
        use_bias=-forecaster.use_bias,
        use_weights=-forecaster.use_weights,
    )


def gained(forecaster: Forecaster, played: Trace, known: Trace | None = None) -> np.ndarray:
    """What the forecaster adds to the hit rate of the counts, at several capacities."""
    history = History(played.fingerprint, 1000)
    if known is not None:
        history = trained_history(known, np.arange(known.requests))
    believing = history.copy()
    believing.forecaster = forecaster
    capacities = (0.1, 0.2, 0.3, 0.5)
    counts = replay(played, ["counts"], capacities, history=history)
    default = replay(played, ["expected-next-use"], capacities, history=believing)
    return np.array([b.hit_rate - a.hit_rate for a, b in zip(counts, default, strict=True)])


# Traffic made of subjects that change, and layers that follow each other.
WIDE = (24,) * 4


@pytest.fixture(scope="module")
def known() -> Trace:
    return follows(12, 150, WIDE)


@pytest.fixture(scope="module")
def played() -> Trace:
    # Other subjects altogether: another seed draws them anew.
    return follows(96, 150, WIDE, seed=5)


@pytest.fixture(scope="module")
def fitted(known: Trace) -> Forecaster:
    return fit(known, settings=SMALL, max_tokens=100).forecaster


def test_weights_fitted_to_other_traffic_cost_next_to_nothing(known: Trace, played: Trace, fitted: Forecaster) -> None:
    assert gained(fitted, played).min() > -MOST_LOST
    assert gained(fitted, played, known).min() > -MOST_LOST


def test_weights_fitted_to_shuffled_tokens_cost_next_to_nothing(known: Trace, played: Trace) -> None:
    forecaster = fit(shuffled(known), settings=SMALL, max_tokens=100).forecaster
    assert gained(forecaster, played).min() > -MOST_LOST


@pytest.mark.parametrize("scale", [0.2, 1, 5])
def test_weights_of_noise_cost_next_to_nothing(played: Trace, scale: float) -> None:
    assert gained(noise(played, scale), played).min() > -MOST_LOST


def test_weights_that_say_the_opposite_cost_next_to_nothing(played: Trace, fitted: Forecaster) -> None:
    assert gained(contrary(fitted), played).min() > -MOST_LOST


def test_weights_that_fit_keep_their_gain(fitted: Forecaster) -> None:
    # The same seed draws the same subjects, other requests.
    same = requests(follows(36, 150, WIDE), np.arange(12, 36))
    assert gained(fitted, same).max() > MOST_LOST


@pytest.fixture(scope="module")
def domains() -> tuple[Trace, Trace]:
    """Of gpt-oss-20b: questions with known answers, and another kind that is left out, requests that ought to be declined."""
    trace = shared("gpt-oss-20b")
    assert trace.request_group is not None
    names = json.loads(trace.metadata["groups"])
    left_out = np.array([names[group].startswith("sorry_bench") for group in trace.request_group])
    return requests(trace, np.flatnonzero(~left_out)[::22]), requests(trace, np.flatnonzero(left_out)[:8])


@pytest.mark.parametrize("alter", [lambda trace: trace, shuffled], ids=["other domains", "shuffled"])
def test_weights_fitted_to_other_or_shuffled_domains_cost_next_to_nothing(
    domains: tuple[Trace, Trace], alter: Callable[[Trace], Trace]
) -> None:
    learned, asked = domains
    forecaster = fit(alter(learned), settings=QUICK, max_tokens=10).forecaster
    for gain in (gained(forecaster, asked), gained(forecaster, asked, learned)):
        assert gain.min() > -MOST_LOST


def test_weights_of_noise_cost_next_to_nothing_on_a_real_trace(domains: tuple[Trace, Trace]) -> None:
    learned, asked = domains
    assert gained(noise(asked), asked, learned).min() > -MOST_LOST


# Fetching ahead


def contrary_ahead(forecaster: Forecaster) -> Forecaster:
    """Says the opposite of coming layers."""
    return replace(
        forecaster,
        ahead_gain=-forecaster.ahead_gain,
        ahead_bias=-forecaster.ahead_bias,
        ahead_weights=-forecaster.ahead_weights,
        ahead_pairs=-forecaster.ahead_pairs,
    )


def lead_after(forecaster: Forecaster, played: Trace) -> float:
    """How far ahead of the counts a forecaster is seen to be, by a core that fetches ahead."""
    history = History(played.fingerprint, 1000)
    history.forecaster = forecaster
    core = make_core(WIDE, 48, policy="expected-next-use", prefetch=True, store=history.store)
    for number in range(played.requests):
        request = core.begin_request()
        for row in played.experts[played.request == number]:
            for layer, ids in enumerate(row):
                step = call_route(core, request, layer, ids[None], True)
                land(core, step.plan)
                core.release(step)
        core.end_request(request)
    return core.prefetcher.trust.lead


def test_a_forecaster_that_is_wrong_of_coming_layers_is_not_listened_to() -> None:
    fitted = fit(follows(24, 150, WIDE), settings=SMALL).forecaster
    same = requests(follows(28, 150, WIDE), np.arange(24, 28))
    right, wrong, random = (
        lead_after(forecaster, same) for forecaster in (fitted, contrary_ahead(fitted), noise(same, 5))
    )
    assert wrong < -5
    assert random < -5
    assert right > -0.5
