"""What a cache owes to files is there however its process ends, and soon after each request."""

from __future__ import annotations

import os
import signal
import threading
import time
from pathlib import Path

import numpy as np
import pytest
from scenes import OPENED, PATIENCE_S, Scenes, names, requests_of
from zygote import make_cache, serve

from moecache.errors import OptionError
from moecache.lab import read_trace

ENDS = {
    "normal": ("", 0),
    "exit": ("sys.exit(3)", 3),
    "exception": ("raise RuntimeError", 1),
    "interrupt": ("signal.raise_signal(signal.SIGINT)", -signal.SIGINT),
    "terminated": ("signal.raise_signal(signal.SIGTERM)", -signal.SIGTERM),
    "hung up": ("signal.raise_signal(signal.SIGHUP)", -signal.SIGHUP),
    "terminated while it waits": (
        "threading.Timer(0.2, os.kill, (os.getpid(), signal.SIGTERM)).start()\ntime.sleep(100)",
        -signal.SIGTERM,
    ),
    "deleted": ("del cache, left\nimport gc\ngc.collect()\nos._exit(0)", 0),
    "deleted in a cycle": ("cache.itself = cache\ndel cache, left\nimport gc\ngc.collect()\nos._exit(0)", 0),
    "other threads": ("threading.Thread(target=time.sleep, args=(100,), daemon=True).start()", 0),
}


@pytest.mark.failure("F20", "133")
@pytest.mark.parametrize("how", ENDS)
def test_nothing_is_lost_however_a_process_ends(scenes: Scenes, tmp_path: Path, how: str) -> None:
    code, expected = ENDS[how]
    exit_code, said = scenes.run(OPENED + code, tmp_path)
    assert exit_code == expected, said
    assert ("Error" in said) == (how == "exception"), said
    assert requests_of(tmp_path / "a.history") == 4
    trace = read_trace(tmp_path / "a.safetensors")
    assert (trace.tokens, trace.requests) == (13, 4)
    (part,) = (tmp_path / "a.history.learn").glob("log-*")
    np.testing.assert_array_equal(read_trace(part).experts, trace.experts)
    assert names(tmp_path) == ["a.history", "a.history.learn", "a.safetensors"]
    assert names(tmp_path / "a.history.learn") == ["lock", part.name]


@pytest.mark.failure("F20")
def test_signals_are_taken_only_where_nobody_else_has_them(scenes: Scenes, tmp_path: Path) -> None:
    code = """
import signal, threading
default = signal.SIG_DFL
def found():
    return [signal.getsignal(n) is default for n in (signal.SIGTERM, signal.SIGHUP)]
make_cache(history="a.history", save_on_signals=False).close()
off = make_cache(history="a.history", save_on_signals=False)
nothing_to_save = make_cache()
assert found() == [True, True]
in_thread = []
thread = threading.Thread(target=lambda: in_thread.append(make_cache(history="b.history")))
thread.start(); thread.join()
assert found() == [True, True]
with make_cache(history="c.history"), make_cache(history="d.history"):
    assert found() == [False, False]
off.close(); in_thread[0].close()
assert found() == [True, True]
mine = lambda number, frame: print("mine", flush=True)
signal.signal(signal.SIGTERM, mine)
cache = make_cache(history="e.history")
assert signal.getsignal(signal.SIGTERM) is mine and not found()[1]
serve(cache, 1)
signal.raise_signal(signal.SIGTERM)
signal.signal(signal.SIGHUP, signal.SIG_IGN)
cache.close()
assert signal.getsignal(signal.SIGTERM) is mine and signal.getsignal(signal.SIGHUP) is signal.SIG_IGN
"""
    assert scenes.run(code, tmp_path) == (0, "mine\n")


@pytest.mark.failure("F20")
def test_a_request_is_in_the_file_soon_after_it_ended(scenes: Scenes, tmp_path: Path) -> None:
    pid = scenes.start(
        "cache = make_cache(history='a.history', autosave=0)\nserve(cache, 2)\nprint('served', flush=True)\n"
        "import time; time.sleep(100)",
        tmp_path,
    )
    scenes.printed(pid, "served")
    deadline = time.monotonic() + PATIENCE_S
    while not (tmp_path / "a.history").exists() or requests_of(tmp_path / "a.history") < 2:
        assert time.monotonic() < deadline
        time.sleep(0.02)
    os.kill(pid, signal.SIGKILL)
    assert scenes.wait(pid)[0] == -signal.SIGKILL
    assert requests_of(tmp_path / "a.history") == 2


@pytest.mark.parametrize("autosave", [3600, None])
def test_autosave_waits_as_long_as_it_was_told(tmp_path: Path, autosave: float | None) -> None:
    with make_cache(history=tmp_path / "a.history", autosave=autosave) as cache:
        threads = threading.active_count()
        serve(cache, 5)
        assert threading.active_count() == threads
        assert names(tmp_path) == []
    assert requests_of(tmp_path / "a.history") == 5


@pytest.mark.failure("F20", "F22")
def test_failed_autosave_is_logged_once_and_retried(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    folder = tmp_path / "there"
    folder.mkdir()
    with make_cache(history=folder / "a.history", autosave=0) as cache:
        folder.rename(tmp_path / "away")
        for n in range(3):
            serve(cache, 1, first=n)
            time.sleep(0.05)
        (tmp_path / "away").rename(folder)
        deadline = time.monotonic() + PATIENCE_S
        while not (folder / "a.history").exists():
            assert time.monotonic() < deadline
            serve(cache, 1, first=3)
            time.sleep(0.01)
    assert [r.levelname for r in caplog.records] == ["WARNING"]
    assert "cannot be saved now" in caplog.text


@pytest.mark.parametrize("autosave", [-1, float("nan")])
def test_invalid_autosave_seconds_are_refused(tmp_path: Path, autosave: float) -> None:
    with pytest.raises(OptionError, match="autosave is"):
        make_cache(history=tmp_path / "a.history", autosave=autosave)
