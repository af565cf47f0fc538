"""The process that fits: its priority, its end however the cache or the interpreter ends, whose code it runs."""

from __future__ import annotations

import gc
import os
import signal
import subprocess
import sys
import threading
from pathlib import Path

import pytest
from learn_helpers import (
    ENOUGH,
    alive,
    make_cache,
    names,
    process_of,
    serve,
    serve_until,
    until_gone,
)

from moecache import learning
from moecache.lab import Trace, read_trace

pytestmark = pytest.mark.usefixtures("quick_fits")


LOWER_PRIORITY = learning._lower_priority


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
from dataclasses import asdict
from learn_helpers import ENOUGH, SMALL, follows, make_cache, process_of, serve
from moecache import learning
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
