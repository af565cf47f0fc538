"""Learning as it runs: the log, the fits, and the weights that requests get, through the public API of a cache."""

from __future__ import annotations

import logging
import threading
from pathlib import Path

import numpy as np
import pytest
import torch
from cache_helpers import make_bank
from learn_helpers import (
    ENOUGH,
    RAGGED,
    make_cache,
    names,
    serve,
    serve_until,
    take,
)

from moecache import ExpertCache, History, learning
from moecache.lab import Trace, read_trace

pytestmark = pytest.mark.usefixtures("quick_fits")


def test_off_by_default(tmp_path: Path, trace: Trace) -> None:
    with ExpertCache(make_bank(RAGGED), 8, history=tmp_path / "a.history") as cache:
        serve(cache, trace, range(2))
        assert (cache.stats().fits, cache.stats().fits_failed) == (0, 0)
    assert [path.name for path in tmp_path.iterdir()] == ["a.history"]


def test_a_cache_learns_and_the_next_one_knows(tmp_path: Path, trace: Trace, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "moecache")
    path, folder = tmp_path / "a.history", tmp_path / "a.history.learn"
    with make_cache(True, history=path) as cache:
        assert cache.history.forecaster is None
        tokens = serve(cache, trace, range(ENOUGH))
        serve_until(cache, lambda: cache.stats().fits == 1)
        assert cache.history.forecaster is not None
        with cache.request() as request:
            assert request._state.forecast is not None
        tokens += serve(cache, trace, range(ENOUGH, ENOUGH + 1))
        assert cache.stats().fits_failed == 0
    assert [r.levelname for r in caplog.records] == ["INFO"]
    assert "hits in %" in caplog.text
    assert names(folder) == {"lock", "fit.log", "log", "fitted"}

    logged = [read_trace(part) for part in sorted(folder.glob("log-*"))]
    assert sum(part.tokens for part in logged) == tokens
    np.testing.assert_array_equal(np.concatenate([part.experts for part in logged]), trace.experts[:tokens])
    assert History.load(path).forecaster is not None
    # The folder alone is enough, too.
    with make_cache(folder) as cache:
        assert cache.history.forecaster is not None


def test_a_fit_comes_when_the_log_has_doubled(tmp_path: Path, trace: Trace) -> None:
    with make_cache(tmp_path) as cache:
        tokens = serve(cache, trace, range(ENOUGH))
        serve_until(cache, lambda: cache.stats().fits == 1)
        first = cache.history.forecaster
        (fitted,) = tmp_path.glob("fitted-*")
        begun_at = int(fitted.stem.partition("-")[2])
        assert 1_250 <= begun_at <= tokens
        number = ENOUGH
        while tokens < 2 * begun_at - 250:
            tokens += serve(cache, trace, range(number, number + 1))
            number += 1
        assert not cache._learner._fit.running
        serve(cache, trace, range(number, number + 3))
        serve_until(cache, lambda: cache.stats().fits == 2)
        assert cache.history.forecaster is not first
        assert [int(path.stem.partition("-")[2]) for path in tmp_path.glob("fitted-*")] >= [2 * begun_at]
        cache.reset_stats()
        assert cache.stats().fits == 0


def test_a_request_keeps_the_weights_it_began_with(tmp_path: Path, trace: Trace) -> None:
    with make_cache(tmp_path) as cache, make_cache(False) as still:
        without = cache.request()
        serve(cache, trace, range(ENOUGH))
        serve_until(cache, lambda: cache.stats().fits == 1)
        # A cache whose weights never change beside the one that learns.
        still.history.forecaster = cache.history.forecaster
        old, twin = cache.request(), still.request()
        for row in range(20):
            take(twin, trace, row)
        for row in range(10):
            take(old, trace, row)
        serve(cache, trace, range(ENOUGH, 3 * ENOUGH))
        serve_until(cache, lambda: cache.stats().fits == 2)
        for row in range(10, 20):
            take(old, trace, row)
        new = cache.request()
        for row in range(20):
            take(new, trace, row)
            take(without, trace, row)
        assert without._state.forecast is None
        moved = 0.0
        for layer in range(trace.layers):
            expected = twin._state.forecast.use_odds(layer)
            np.testing.assert_array_equal(old._state.forecast.use_odds(layer), expected)
            moved = max(moved, np.abs(new._state.forecast.use_odds(layer) - expected).max())
        assert moved > 0.05
        for request in (without, old, new, twin):
            request.close()


@pytest.mark.failure("50")
def test_the_log_forgets_its_oldest(tmp_path: Path, trace: Trace, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(learning, "LOG_TOKENS", 1_000)
    monkeypatch.setattr(learning, "_PART_TOKENS", 300)
    with make_cache(tmp_path) as cache:
        tokens = 0
        for number in range(2 * ENOUGH):
            tokens += serve(cache, trace, range(number, number + 1))
            parts = [read_trace(path).tokens for path in tmp_path.glob("log-*")]
            assert sum(parts) <= 1_000
        assert tokens > 2_000
        assert sum(parts) > 500
        # One that never ends is logged as far as the log has capacity.
        with cache.request() as request:
            for row in range(1_500):
                take(request, trace, row)
            assert cache._learner._recorder.tokens <= 1_000


def test_requests_in_several_threads(tmp_path: Path, trace: Trace) -> None:
    with make_cache(tmp_path) as cache:
        errors: list[BaseException] = []

        def decode(first: int) -> None:
            try:
                serve(cache, trace, range(first, ENOUGH, 3))
            except BaseException as error:
                errors.append(error)

        threads = [threading.Thread(target=decode, args=(n,), daemon=True) for n in range(3)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(200)
        assert errors == []
        serve_until(cache, lambda: cache.stats().fits == 1)
    logged = [read_trace(part) for part in tmp_path.glob("log-*")]
    tokens = int((trace.request < ENOUGH).sum())
    assert sum(part.tokens for part in logged) == tokens
    rows = np.concatenate([part.experts.reshape(part.tokens, -1) for part in logged])
    expected = trace.experts[:tokens].reshape(tokens, -1)
    np.testing.assert_array_equal(*(x[np.lexsort(x.T)] for x in (rows, expected)))


def test_an_attached_model_learns(tmp_path: Path) -> None:
    pytest.importorskip("transformers")
    import moecache

    model = moecache.load(
        Path(__file__).parent.parent / "examples" / "tiny_moe" / "model", history=tmp_path / "tiny.history", learn=True
    )
    with torch.inference_mode():
        model.generate(torch.tensor([list(b"import os")]), max_new_tokens=4, do_sample=False)
    moecache.detach(model)
    (part,) = (tmp_path / "tiny.history.learn").glob("log-*")
    logged = read_trace(part)
    assert (logged.tokens, logged.requests, logged.layers) == (9 + 3, 1, 8)
