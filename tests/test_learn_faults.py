"""Learning where something is wrong: folders, weights, logs, disks, fits that fail."""

from __future__ import annotations

import os
import signal
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from learn_helpers import (
    ENOUGH,
    RAGGED,
    make_cache,
    names,
    process_of,
    serve,
    serve_until,
    take,
)

from moecache import CacheOptions, ExpertBank, ExpertCache, History, learning
from moecache.errors import HistoryFormatError, LearnError, TraceFormatError
from moecache.lab import Trace, read_trace

pytestmark = pytest.mark.usefixtures("quick_fits")


def test_killed_fit_is_logged_once(tmp_path: Path, trace: Trace, caplog: pytest.LogCaptureFixture) -> None:
    with make_cache(tmp_path) as cache:
        serve(cache, trace, range(ENOUGH))
        os.kill(process_of(cache), signal.SIGKILL)
        serve_until(cache, lambda: cache.stats().fits_failed == 1)
        assert cache.history.forecaster is None
        assert [r.getMessage().split(" (")[0] for r in caplog.records] == [
            "a fit in the background failed, the forecaster stays as it was"
        ]
        assert "signal 9" in caplog.text
        assert not list(tmp_path.glob("fitted-*"))
        # The log has it all: when that has doubled, the next fit sees everything.
        serve(cache, trace, range(ENOUGH, 3 * ENOUGH))
        serve_until(cache, lambda: cache.stats().fits == 1)
        assert cache.history.forecaster is not None
        assert cache.stats().fits_failed == 1


def test_too_few_requests_are_kept_for_a_later_fit(
    tmp_path: Path, trace: Trace, caplog: pytest.LogCaptureFixture
) -> None:
    for begin, end in ((0, 3), (3, 6), (6, ENOUGH)):
        with make_cache(tmp_path) as cache:
            serve(cache, trace, range(begin, end))
            if end < ENOUGH:
                assert not cache._learner._fit.running
                assert not (tmp_path / "fit.log").exists()
                continue
            serve_until(cache, lambda: cache.stats().fits == 1)
    assert caplog.records == []


def test_refusal_of_a_fit_is_logged(tmp_path: Path, trace: Trace, caplog: pytest.LogCaptureFixture) -> None:
    # Enough tokens, but nearly all in the request that is held out.
    with make_cache(tmp_path) as cache:
        for rows in (range(10), range(10, 20), range(20, 30), range(30, 40), range(40, 1400)):
            with cache.request() as request:
                for row in rows:
                    take(request, trace, row)
        serve_until(cache, lambda: cache.stats().fits_failed == 1)
        assert "too few" in caplog.text
        assert len(caplog.records) == 1
        assert cache.history.forecaster is None


@pytest.mark.failure("125")
@pytest.mark.parametrize("what", ["log", "fitted"])
def test_another_model_s_folder_is_refused(tmp_path: Path, trace: Trace, what: str) -> None:
    with make_cache(tmp_path) as cache:
        serve(cache, trace, range(ENOUGH))
        serve_until(cache, lambda: cache.stats().fits == 1)
    for path in tmp_path.glob("log-*" if what == "fitted" else "fitted-*"):
        path.unlink()
    before = {path: path.read_bytes() for path in tmp_path.iterdir()}
    expected: type[Exception] = TraceFormatError if what == "log" else HistoryFormatError
    for other in ((5, 3, 7), (5, 3)):
        with pytest.raises(expected, match="another model"):
            make_cache(tmp_path, other)
    # The same numbers of experts, but other weights' shapes.
    bank = ExpertBank.from_tensors([{"w": torch.zeros(n, 2, 2)} for n in RAGGED])
    with pytest.raises(expected, match="another model"):
        ExpertCache(bank, 8, learn=tmp_path, top_k=2)
    assert {path: path.read_bytes() for path in tmp_path.iterdir()} == before
    make_cache(tmp_path).close()


@pytest.mark.parametrize("fault", ["cut", "NaN", "foreign"])
def test_invalid_weights_are_not_used(
    tmp_path: Path, trace: Trace, caplog: pytest.LogCaptureFixture, fault: str
) -> None:
    from safetensors.numpy import load_file, save_file

    cache = make_cache(tmp_path)
    serve(cache, trace, range(ENOUGH))
    assert cache._learner._fit._process.wait(240) == 0
    (fitted,) = tmp_path.glob("fitted-*")
    if fault == "cut":
        fitted.write_bytes(fitted.read_bytes()[:-100])
    elif fault == "foreign":
        History(cache.history.fingerprint._replace(digest="other")).save(fitted)
    else:
        from safetensors import safe_open

        with safe_open(fitted, "np") as file:
            metadata = file.metadata()
        tensors = load_file(fitted)
        tensors["forecaster.use_bias"][0, 0] = np.nan
        save_file(tensors, fitted, metadata)
    cache.request().close()
    assert (cache.stats().fits, cache.stats().fits_failed) == (0, 1)
    assert cache.history.forecaster is None
    assert len(caplog.records) == 1
    cache.close()
    if fault == "foreign":
        with pytest.raises(HistoryFormatError, match="another model"):
            make_cache(tmp_path)
        return
    with make_cache(tmp_path) as cache:
        assert cache.history.forecaster is None
    assert len(caplog.records) == 2
    assert "set aside" in caplog.text
    assert not fitted.exists()


@pytest.mark.failure("F21c")
def test_a_damaged_part_of_the_log_is_set_aside(tmp_path: Path, trace: Trace, caplog: pytest.LogCaptureFixture) -> None:
    for n in range(3):
        with make_cache(tmp_path) as cache:
            serve(cache, trace, range(n, n + 1))
    whole, cut, _ = sorted(tmp_path.glob("log-*"))
    cut.write_bytes(cut.read_bytes()[:-100])
    with make_cache(tmp_path) as cache:
        serve(cache, trace, range(3, 4))
        assert cache.stats().fits_failed == 0
    assert [r.levelname for r in caplog.records] == ["WARNING"]
    assert "set aside" in caplog.text
    assert len(sorted(tmp_path.glob("log-*.safetensors"))) == 3
    assert (tmp_path / f"{cut.name}.damaged").exists()
    assert read_trace(whole).requests == 1


@pytest.mark.failure("F21c")
@pytest.mark.skipif(sys.platform != "linux", reason="stops a process")
def test_the_log_forgets_while_a_fit_is_starved(tmp_path: Path, trace: Trace, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(learning, "LOG_TOKENS", 2_000)
    monkeypatch.setattr(learning, "_PART_TOKENS", 300)
    with make_cache(tmp_path) as cache:
        serve(cache, trace, range(ENOUGH))
        pid = process_of(cache)
        os.kill(pid, signal.SIGSTOP)
        try:
            for number in (*range(ENOUGH, 4 * ENOUGH), *range(2 * ENOUGH)):
                serve(cache, trace, range(number, number + 1))
                logged = [read_trace(path).tokens for path in tmp_path.glob("log-*")]
                assert sum(logged) <= 2_000
        finally:
            os.kill(pid, signal.SIGCONT)
        # What it reads is there for it, however late it comes to it.
        serve_until(cache, lambda: cache.stats().fits == 1)
    assert not list(tmp_path.glob("input-*"))


def test_learning_that_cannot_begin_says_why(tmp_path: Path) -> None:
    with pytest.raises(LearnError, match="give history=PATH, or learn=FOLDER"):
        make_cache(True)
    with pytest.raises(LearnError, match="lru has no use"):
        make_cache(tmp_path / "a", policy="lru")
    with make_cache(tmp_path / "a"), pytest.raises(LearnError, match="another cache learns"):
        make_cache(tmp_path / "a")
    # A cache that cannot be made releases the folder.
    with pytest.raises(TypeError, match="_Link"):
        make_cache(tmp_path / "a", options=CacheOptions(link=object()))
    make_cache(tmp_path / "a").close()
    (tmp_path / "file").write_text("")
    with pytest.raises(LearnError, match="cannot keep its log"):
        make_cache(tmp_path / "file")
    assert {path.name for path in tmp_path.iterdir()} == {"a", "file"}


@pytest.mark.failure("126")
def test_a_full_disk_ends_learning_not_the_model(
    tmp_path: Path, trace: Trace, caplog: pytest.LogCaptureFixture
) -> None:
    with make_cache(tmp_path) as cache:
        tokens = serve(cache, trace, range(1))
        recorder = cache._learner._recorder
        recorder._spill.close()
        recorder._spill = open("/dev/full", "w+b", buffering=0)  # noqa: SIM115
        serve(cache, trace, range(1, ENOUGH))
    assert [r.getMessage()[:13] for r in caplog.records] == ["learning ends"]
    (part,) = tmp_path.glob("log-*")
    assert read_trace(part).tokens == tokens
    assert names(tmp_path) == {"lock", "log"}
