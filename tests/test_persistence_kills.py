"""Processes that are killed, forked, or taken over by a signal handler: files stay whole."""

from __future__ import annotations

import logging
import os
import random
import signal
import time
from pathlib import Path

import numpy as np
import pytest
from scenes import OPENED, Scenes, names, requests_of
from zygote import make_cache, serve

from moecache import History
from moecache.lab import read_trace

KILLS = int(os.environ.get("MOECACHE_KILLS", "30"))


def test_a_living_recording_is_left_alone(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    path = tmp_path / "a.safetensors"
    with make_cache() as one, make_cache() as two:
        first = one.record(path)
        serve(one, 1)
        second = two.record(path)
        serve(two, 2)
        first.close()
        assert read_trace(path).requests == 1
        second.close()
        assert read_trace(path).requests == 2
    assert caplog.records == []
    assert names(tmp_path) == ["a.safetensors"]


@pytest.mark.failure("F22", "99")
def test_next_start_rescues_recording_and_log_of_killed_process(
    scenes: Scenes, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, "moecache")
    exit_code, said = scenes.run(OPENED + "os.kill(os.getpid(), signal.SIGKILL)", tmp_path)
    assert exit_code == -signal.SIGKILL, said
    (tmp_path / "a.history.0123abcd.tmp").write_bytes(b"torn")
    (tmp_path / "a.safetensors.0123abcd.tmp").write_bytes(b"torn")
    (tmp_path / "a.history.lock").write_bytes(b"")
    assert not (tmp_path / "a.history").exists()
    with make_cache(history=tmp_path / "a.history", learn=True) as cache:
        assert "13 tokens of a run that was killed" in caplog.text
        cache.record(tmp_path / "a.safetensors")
        assert "13 tokens of 4 requests" in caplog.text
        assert len(caplog.records) == 2
        serve(cache, 1)
    rescued = read_trace(tmp_path / "a.recovered-1.safetensors")
    assert (rescued.tokens, rescued.requests, rescued.fingerprint) == (
        13,
        4,
        read_trace(tmp_path / "a.safetensors").fingerprint,
    )
    assert names(tmp_path) == ["a.history", "a.history.learn", "a.recovered-1.safetensors", "a.safetensors"]
    parts = [read_trace(part) for part in sorted((tmp_path / "a.history.learn").glob("log-*"))]
    assert [part.tokens for part in parts] == [13, 4]
    np.testing.assert_array_equal(parts[0].experts, rescued.experts)


@pytest.mark.parametrize("fault", ["cut", "zeros", "changed"])
def test_a_recording_that_a_crash_has_torn_is_rescued_up_to_there(tmp_path: Path, scenes: Scenes, fault: str) -> None:
    scenes.run(OPENED + "os.kill(os.getpid(), signal.SIGKILL)", tmp_path)
    (spill,) = tmp_path.glob("*.part")
    data = bytearray(spill.read_bytes())
    if fault == "cut":
        del data[-7:]
    elif fault == "zeros":
        data += bytes(4096)
    else:
        data[-20] ^= 1
    spill.write_bytes(data)
    with make_cache() as cache:
        cache.record(tmp_path / "a.safetensors")
    assert read_trace(tmp_path / "a.recovered-1.safetensors").tokens == (13 if fault == "zeros" else 12)


def test_file_that_is_no_recording_is_left_and_logged(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    for n, data in enumerate((b"", b"no recording", b"moespill\xff\xff\xff\x00{}", b"moespill\x02\x00\x00\x00{}")):
        (tmp_path / f"a.safetensors.{n}.part").write_bytes(data)
    with make_cache() as cache:
        cache.record(tmp_path / "a.safetensors")
        serve(cache, 1)
    assert [r.getMessage()[:45] for r in caplog.records] == ["an unfinished recording cannot be recovered: "] * 4
    assert len(names(tmp_path)) == 5


@pytest.mark.failure("F20", "F22", "99")
def test_kills_at_random_moments_tear_nothing(scenes: Scenes, tmp_path: Path) -> None:
    code = """
for n in range(10**6):
    with make_cache(history="a.history", learn=True, autosave=0) as cache:
        with cache.record("a.safetensors"):
            serve(cache, 3, first=3 * n)
        print("round", flush=True)
"""
    moment = random.Random(0)
    traces = 0
    for _ in range(KILLS):
        pid = scenes.start(code, tmp_path)
        scenes.printed(pid, "round")
        time.sleep(moment.random() * 0.05)
        os.kill(pid, signal.SIGKILL)
        assert scenes.wait(pid)[0] == -signal.SIGKILL
        history = History.load(tmp_path / "a.history")
        assert history.store.tokens % 4 == 0
        for path in tmp_path.glob("*.safetensors"):
            traces += read_trace(path).tokens > 0
    assert traces >= KILLS
    with make_cache(history=tmp_path / "a.history", learn=True) as cache, cache.record(tmp_path / "a.safetensors"):
        serve(cache, 1)
    left = {name.split(".")[-1] for name in names(tmp_path)}
    assert left == {"history", "learn", "safetensors"}
    assert not list((tmp_path / "a.history.learn").glob("*.part"))


def test_a_kill_before_a_recording_has_its_header_leaves_nothing(scenes: Scenes, tmp_path: Path) -> None:
    code = """
import os, signal
import moecache.spill
moecache.spill.write_all = lambda file, data: os.kill(os.getpid(), signal.SIGKILL)
make_cache().record("a.safetensors")
"""
    assert scenes.run(code, tmp_path)[0] == -signal.SIGKILL
    assert len(names(tmp_path)) == 1
    with make_cache() as cache, cache.record(tmp_path / "a.safetensors"):
        serve(cache, 1)
    assert names(tmp_path) == ["a.safetensors"]


CHILDREN = {
    "ends": "",
    "closes": "recorder.close(); cache.close()",
    "deletes": "del cache, recorder\nimport gc\ngc.collect()",
    "leaves at once": "os._exit(0)",
    "is terminated": "signal.raise_signal(signal.SIGTERM)",
    "has a cache of its own": "with make_cache(history='b.history') as other:\n    serve(other, 2)",
}


@pytest.mark.failure("E19")
@pytest.mark.parametrize("what", [*CHILDREN, "multiprocessing"])
def test_a_forked_child_leaves_its_parent_s_files_alone(scenes: Scenes, tmp_path: Path, what: str) -> None:
    code = """
import multiprocessing, os, signal, sys, time
cache = make_cache(history="a.history", learn=True, autosave=0)
recorder = cache.record("a.safetensors")
serve(cache, 3)
before = cache.request()
one_token(before, 0)
"""
    if what == "multiprocessing":
        code += "child = multiprocessing.get_context('fork').Process(target=serve, args=(cache, 0))\n"
        code += "child.start(); child.join()\nassert child.exitcode == 0\n"
    else:
        code += f"child = os.fork()\nif not child:\n    exec({CHILDREN[what]!r}); sys.exit()\nos.waitpid(child, 0)\n"
    code += "before.close()\nserve(cache, 3, first=3)\ncache.close()\n"
    exit_code, said = scenes.run(code, tmp_path)
    assert (exit_code, said) == (0, "")
    assert requests_of(tmp_path / "a.history") == 7
    trace = read_trace(tmp_path / "a.safetensors")
    assert (trace.tokens, trace.requests) == (25, 7)
    (part,) = (tmp_path / "a.history.learn").glob("log-*")
    np.testing.assert_array_equal(read_trace(part).experts, trace.experts)
    if what == "has a cache of its own":
        assert requests_of(tmp_path / "b.history") == 2


@pytest.mark.failure("E18")
def test_a_signal_handler_may_finish_the_files_at_any_moment(scenes: Scenes, tmp_path: Path) -> None:
    code = """
import random, shutil, signal
from moecache import History
from moecache.lab import read_trace
moment = random.Random(1)
closed = rounds = 0
class Ended(Exception): pass
def end(number, frame):
    cache._files.close()
    if leave:
        raise Ended
signal.signal(signal.SIGALRM, end)
for n in range({rounds}):
    leave = n % 2
    cache = make_cache(history="a.history", learn="learn", autosave=0)
    recorder = cache.record("a.safetensors")
    done = ended = 0
    try:
        signal.setitimer(signal.ITIMER_REAL, moment.random() * 0.03 + 1e-5)
        while not recorder.closed:
            serve(cache, 1, first=done, tokens=2)
            done += 1
    except Ended:
        pass
    signal.setitimer(signal.ITIMER_REAL, 0)
    cache.close()
    assert recorder.closed
    if done > 1:
        trace = read_trace("a.safetensors")
        assert 2 * done - 3 <= trace.tokens <= 2 * done + 2, (trace.tokens, done)
        assert done - 1 <= len(History.load("a.history")) <= done + 1
    for path in ("a.history", "a.safetensors"):
        import os
        if os.path.exists(path):
            os.unlink(path)
    shutil.rmtree("learn")
    assert os.listdir() == [], os.listdir()
print("all")
"""
    exit_code, said = scenes.run(code.replace("{rounds}", "150"), tmp_path)
    assert (exit_code, said) == (0, "all\n"), said


def test_a_log_message_under_way_does_not_hold_up_a_signal_handler(scenes: Scenes, tmp_path: Path) -> None:
    # The handler comes while the main thread holds the lock of a logging handler, and there is something to say.
    code = """
import logging, os, signal
class Interrupted(logging.Handler):
    def emit(self, record):
        if "now" in record.getMessage():
            os.kill(os.getpid(), signal.SIGTERM)
logging.getLogger().addHandler(Interrupted())
cache = make_cache(history="a.history", learn=True)
serve(cache, 2)
open("a.history", "w").write("damaged")
logging.getLogger().warning("now")
"""
    exit_code, said = scenes.run(code, tmp_path)
    assert exit_code == -signal.SIGTERM, said
    assert requests_of(tmp_path / "a.history") == 2
    assert "a.history.damaged" in names(tmp_path)
