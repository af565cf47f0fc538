"""Learning as it runs: the log, the process that fits, and the weights that requests get, through a cache's public face."""

from __future__ import annotations

import gc
import logging
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from cache_helpers import make_bank
from test_lab_fit import RAGGED, SMALL, follows

from moecache import CacheOptions, ExpertBank, ExpertCache, History, Request, learning
from moecache.errors import HistoryFormatError, LearnError, TraceFormatError
from moecache.lab import Trace, read_trace

LOWER_PRIORITY = learning._lower_priority
ENOUGH = 12  # requests of follows()


@pytest.fixture(autouse=True)
def _quick(monkeypatch: pytest.MonkeyPatch) -> None:
    # Fits of seconds, and not at a priority that a busy machine never gets to.
    monkeypatch.setattr(learning, "_SETTINGS", asdict(SMALL))
    monkeypatch.setattr(learning, "_lower_priority", lambda pid: None)


@pytest.fixture(scope="module")
def trace() -> Trace:
    return follows(4 * ENOUGH)


def make_cache(learn: Any, num_experts: tuple[int, ...] = RAGGED, **options: Any) -> ExpertCache:
    return ExpertCache(make_bank(num_experts), 8, learn=learn, top_k=2, **options)


def take(request: Request, trace: Trace, row: int) -> None:
    for layer in range(trace.layers):
        with request.route(layer, torch.from_numpy(trace.experts[row, layer][None].astype(np.int64))):
            pass


def serve(cache: ExpertCache, trace: Trace, numbers: range) -> int:
    """Play whole requests; returns their tokens."""
    rows = 0
    for number in numbers:
        with cache.request() as request:
            for row in np.flatnonzero(trace.request == number).tolist():
                take(request, trace, row)
                rows += 1
    return rows


def serve_until(cache: ExpertCache, done: Callable[[], bool]) -> None:
    """Requests that route nothing, until something has happened."""
    deadline = time.monotonic() + 240
    while not done():
        assert time.monotonic() < deadline, (cache.stats(), sorted(cache._learner.folder.iterdir()))
        cache.request().close()
        time.sleep(0.05)


def process_of(cache: ExpertCache) -> int:
    assert cache._learner is not None
    assert cache._learner._fit._process is not None, "no fit is under way"
    return cache._learner._fit._process.pid


def alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def until_gone(pid: int) -> None:
    deadline = time.monotonic() + 60
    while alive(pid):
        assert time.monotonic() < deadline
        time.sleep(0.05)


def names(folder: Path) -> set[str]:
    return {path.name.split("-")[0] for path in folder.iterdir()}


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


def test_a_fit_that_is_killed_is_said_once(tmp_path: Path, trace: Trace, caplog: pytest.LogCaptureFixture) -> None:
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


def test_too_little_is_kept_for_later(tmp_path: Path, trace: Trace, caplog: pytest.LogCaptureFixture) -> None:
    for begin, end in ((0, 3), (3, 6), (6, ENOUGH)):
        with make_cache(tmp_path) as cache:
            serve(cache, trace, range(begin, end))
            if end < ENOUGH:
                assert not cache._learner._fit.running
                assert not (tmp_path / "fit.log").exists()
                continue
            serve_until(cache, lambda: cache.stats().fits == 1)
    assert caplog.records == []


def test_what_a_fit_refuses_is_said(tmp_path: Path, trace: Trace, caplog: pytest.LogCaptureFixture) -> None:
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


def test_close_ends_a_fit_and_the_next_run_goes_on(tmp_path: Path, trace: Trace) -> None:
    cache = make_cache(tmp_path)
    tokens = serve(cache, trace, range(ENOUGH))
    pid = process_of(cache)
    cache.close()
    assert not alive(pid)
    assert cache.history.forecaster is None
    assert names(tmp_path) == {"lock", "fit.log", "log"}
    assert sum(read_trace(part).tokens for part in tmp_path.glob("log-*")) == tokens
    with make_cache(tmp_path) as cache:
        assert not cache._learner._fit.running
        serve_until(cache, lambda: cache.stats().fits == 1)


def test_a_cache_left_behind_leaves_no_process(tmp_path: Path, trace: Trace) -> None:
    cache = make_cache(tmp_path)
    serve(cache, trace, range(ENOUGH))
    pid, threads = process_of(cache), threading.active_count()
    del cache
    gc.collect()
    assert not alive(pid)
    assert threading.active_count() <= threads


SCRIPT = """
import os, signal, sys, time
sys.path[:0] = {path!r}
from test_learn import ENOUGH, asdict, follows, learning, make_cache, process_of, serve, SMALL
from pathlib import Path
learning._SETTINGS = dict(asdict(SMALL), epochs=10_000)
learning._lower_priority = lambda pid: None
cache = make_cache(Path({folder!r}))
serve(cache, follows(ENOUGH), range(ENOUGH))
print(process_of(cache), flush=True)
if {killed}:
    os.kill(os.getpid(), signal.SIGKILL)
"""


@pytest.mark.parametrize("killed", [False, True])
def test_an_interpreter_that_ends_leaves_no_process(tmp_path: Path, killed: bool) -> None:
    here = Path(__file__).parent
    script = SCRIPT.format(path=[str(here), str(here.parent)], folder=str(tmp_path), killed=killed)
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=240)
    assert done.returncode == (-signal.SIGKILL if killed else 0), done.stderr
    until_gone(int(done.stdout))


@pytest.mark.skipif(not hasattr(os, "fork"), reason="no fork here")
def test_a_forked_child_leaves_the_fit_to_its_parent(tmp_path: Path, trace: Trace) -> None:
    with make_cache(tmp_path) as cache:
        serve(cache, trace, range(ENOUGH))
        pid, before = process_of(cache), sorted(tmp_path.glob("log-*"))
        child = os.fork()
        if not child:
            try:
                cache._learner.between_requests()
                cache._learner.close()
                cache._learner._fit.kill()
            finally:
                os._exit(0)
        assert os.waitpid(child, 0)[1] == 0
        assert alive(pid)
        assert sorted(tmp_path.glob("log-*")) == before
        serve_until(cache, lambda: cache.stats().fits == 1)


@pytest.mark.skipif(sys.platform != "linux", reason="idle scheduling is Linux's")
def test_the_fit_is_of_the_lowest_priority(tmp_path: Path, trace: Trace, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(learning, "_lower_priority", LOWER_PRIORITY)
    with make_cache(tmp_path) as cache:
        serve(cache, trace, range(ENOUGH))
        pid = process_of(cache)
        assert os.getpriority(os.PRIO_PROCESS, pid) == 19
        assert os.sched_getscheduler(pid) == os.SCHED_IDLE


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
def test_weights_that_cannot_be_are_not_taken_up(
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


@pytest.mark.failure("G27b")
def test_no_code_of_the_current_folder_is_run(tmp_path: Path, trace: Trace, monkeypatch: pytest.MonkeyPatch) -> None:
    hostile = tmp_path / "here"
    hostile.mkdir()
    for name in (
        "hashlib",
        "json",
        "numpy",
        "torch",
        "moecache",
        "threading",
        "sitecustomize",
        "usercustomize",
        "numba",
    ):
        (hostile / f"{name}.py").write_text(f"open({str(tmp_path / name)!r}, 'w').close()\nraise SystemExit(9)\n")
    monkeypatch.chdir(hostile)
    # As in an interactive session, a notebook or `python -m`.
    for where in ("", ".", str(hostile), "../here"):
        monkeypatch.syspath_prepend(where)
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(["", str(hostile)]))
    monkeypatch.setenv("PYTHONSTARTUP", str(hostile / "json.py"))
    with make_cache(tmp_path / "learn") as cache:
        serve(cache, trace, range(ENOUGH))
        serve_until(cache, lambda: cache.stats().fits + cache.stats().fits_failed == 1)
        assert cache.stats().fits == 1, (tmp_path / "learn" / "fit.log").read_text()
    assert names(tmp_path) == {"here", "learn"}


def test_what_cannot_begin_says_why(tmp_path: Path) -> None:
    with pytest.raises(LearnError, match="give history=PATH, or learn=FOLDER"):
        make_cache(True)
    with pytest.raises(LearnError, match="lru has no use"):
        make_cache(tmp_path / "a", policy="lru")
    with make_cache(tmp_path / "a"), pytest.raises(LearnError, match="another cache learns"):
        make_cache(tmp_path / "a")
    # A cache that cannot be made lets go of the folder.
    with pytest.raises(TypeError, match="_Link"):
        make_cache(tmp_path / "a", options=CacheOptions(link=object()))
    make_cache(tmp_path / "a").close()
    (tmp_path / "file").write_text("")
    with pytest.raises(LearnError, match="cannot keep its log"):
        make_cache(tmp_path / "file")
    assert {path.name for path in tmp_path.iterdir()} == {"a", "file"}


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
        # One that never ends is taken down as far as there is room.
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
