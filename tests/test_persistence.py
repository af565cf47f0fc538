"""What a cache owes to files is there however its process ends: scenes run as processes of their own (``zygote.py``)."""

from __future__ import annotations

import gc
import json
import logging
import os
import random
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from zygote import EXPERTS, LAYERS, TOP_K, make_cache, routed, serve

from moecache import ExpertCache, History
from moecache.errors import HistoryFormatError, LearnError, OptionError, TraceFormatError
from moecache.files import FileLock
from moecache.lab import read_trace

KILLS = int(os.environ.get("MOECACHE_KILLS", "30"))
PATIENCE_S = 200


class Scenes:
    """Starts scenes and says how they ended."""

    def __init__(self, folder: Path) -> None:
        here = Path(__file__).parent
        path = os.pathsep.join([str(here.parent), str(here), *filter(None, [os.environ.get("PYTHONPATH")])])
        self._process = subprocess.Popen(
            [sys.executable, str(here / "zygote.py")],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env={**os.environ, "PYTHONPATH": path, "OMP_NUM_THREADS": "1"},
        )
        self._outputs = folder
        self._output: dict[int, Path] = {}

    def start(self, code: str, folder: Path) -> int:
        output = self._outputs / f"{len(self._output)}.txt"
        pid = int(self._ask(code=code, output=str(output), cwd=str(folder)))
        self._output[pid] = output
        return pid

    def wait(self, pid: int) -> tuple[int, str]:
        """Exit code, and what was printed."""
        killer = threading.Timer(PATIENCE_S, os.kill, (pid, signal.SIGKILL))
        killer.start()
        try:
            code = int(self._ask(wait=pid))
        finally:
            killer.cancel()
        return code, self._output[pid].read_text()

    def run(self, code: str, folder: Path) -> tuple[int, str]:
        return self.wait(self.start(code, folder))

    def printed(self, pid: int, word: str) -> None:
        """Wait until a scene has printed something."""
        deadline = time.monotonic() + PATIENCE_S
        while word not in (self._output[pid].read_text() if self._output[pid].exists() else ""):
            assert time.monotonic() < deadline, self._output[pid].read_text()
            time.sleep(0.005)

    def _ask(self, **job: Any) -> str:
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        print(json.dumps(job), file=self._process.stdin, flush=True)
        return self._process.stdout.readline()

    def close(self) -> None:
        assert self._process.stdin is not None
        self._process.stdin.close()
        self._process.wait(PATIENCE_S)


@pytest.fixture(scope="module")
def scenes(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Scenes]:
    found = Scenes(tmp_path_factory.mktemp("output"))
    yield found
    found.close()


def requests_of(path: Path) -> int:
    return len(History.load(path))


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


OPENED = """
import os, signal, sys, threading, time
cache = make_cache(history="a.history", learn=True)
cache.record("a.safetensors")
serve(cache, 3)
left = cache.request()
one_token(left, 1)
"""
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
def test_autosave_that_fails_is_said_once_and_tried_again(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
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
def test_seconds_that_cannot_be(tmp_path: Path, autosave: float) -> None:
    with pytest.raises(OptionError, match="autosave is"):
        make_cache(history=tmp_path / "a.history", autosave=autosave)


# Several caches and processes on one file


def total(numbers: range) -> list[int]:
    return sum(routed(n) for n in numbers).tolist()  # type: ignore[union-attr]


@pytest.mark.failure("F21")
def test_two_caches_on_one_file_add_up(tmp_path: Path) -> None:
    path = tmp_path / "a.history"
    with make_cache(history=path) as cache:
        serve(cache, 1)
    one, two = make_cache(history=path), make_cache(history=path)
    serve(one, 5, first=1)
    serve(two, 2, first=6)
    one.close()
    two.close()
    history = History.load(path)
    assert len(history) == 8
    assert history.store.total.tolist() == total(range(8))
    assert history.store.tokens == 8 * 4
    kept = sorted((history.store.prompt_counts + history.store.decode_counts)[:8].tolist())
    assert kept == sorted(routed(n).tolist() for n in range(8))
    with make_cache() as alone:
        serve(alone, 8)
        # Nothing follows from one request to the next, so what followed what adds up, too.
        for name in ("transitions", "origins", "successions", "followed"):
            np.testing.assert_array_equal(getattr(history.store, name), getattr(alone.history.store, name))


@pytest.mark.failure("F21")
def test_several_saves_beside_another_cache_s_count_nothing_twice(tmp_path: Path) -> None:
    path = tmp_path / "a.history"
    one, two = make_cache(history=path, autosave=None), make_cache(history=path, autosave=None)
    for n in range(0, 8, 2):
        serve(one, 1, first=n)
        one._files._file.save()
        serve(two, 1, first=n + 1)
        two._files._file.save()
        assert requests_of(path) == n + 2
    one.close()
    two.close()
    history = History.load(path)
    assert len(history) == 8
    assert history.store.total.tolist() == total(range(8))
    assert history.store.tokens == 32


@pytest.mark.failure("F21")
def test_processes_on_one_file_add_up(scenes: Scenes, tmp_path: Path) -> None:
    code = """
for n in range(5):
    cache = make_cache(history="a.history", autosave=0)
    serve(cache, 5, first={first} + 5 * n)
    if n != 3:
        cache.close()
    else:
        del cache
"""
    pids = [scenes.start(code.format(first=25 * n), tmp_path) for n in range(4)]
    for pid in pids:
        assert scenes.wait(pid) == (0, "")
    history = History.load(tmp_path / "a.history")
    assert len(history) == 100
    assert history.store.total.tolist() == total(range(100))
    assert names(tmp_path) == ["a.history"]


@pytest.mark.failure("F21")
def test_threads_on_one_file_add_up(tmp_path: Path) -> None:
    path = tmp_path / "a.history"

    def work(first: int) -> None:
        for n in range(first, first + 5):
            with make_cache(history=path, autosave=0) as cache:
                serve(cache, 1, first=n)

    threads = [threading.Thread(target=work, args=(5 * n,)) for n in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(PATIENCE_S)
    history = History.load(path)
    assert len(history) == 15
    assert history.store.total.tolist() == total(range(15))


def test_full_histories_that_meet_keep_their_size(tmp_path: Path) -> None:
    path = tmp_path / "a.history"
    one, two = (make_cache(history=path, history_capacity=4) for _ in range(2))
    serve(one, 6)
    serve(two, 6, first=6)
    one.close()
    two.close()
    history = History.load(path)
    assert (len(history), history.capacity) == (4, 4)
    assert history.store.total.tolist() == total(range(12))


@pytest.mark.failure("F21")
def test_a_lock_that_is_never_given_up_is_an_error_not_a_hang(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "a.history"
    monkeypatch.setattr("moecache.files.LOCK_TIMEOUT_S", 0.1)
    cache = make_cache(history=path)
    serve(cache, 1)
    with FileLock(path), pytest.raises(TimeoutError, match="another process has held this lock"):
        cache.close()
    assert not path.exists()
    cache.close()  # tries again
    assert requests_of(path) == 1
    assert names(tmp_path) == ["a.history"]


@pytest.mark.failure("F21", "125")
def test_what_became_of_the_file_meanwhile(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    path = tmp_path / "a.history"
    with make_cache(history=path) as cache:
        serve(cache, 2)
    # Removed: all of it is written anew.
    with make_cache(history=path) as cache:
        path.unlink()
    assert requests_of(path) == 2
    # Damaged: set aside.
    with make_cache(history=path) as cache:
        serve(cache, 1, first=2)
        path.write_bytes(b"damaged")
    assert requests_of(path) == 3
    assert (tmp_path / "a.history.damaged").read_bytes() == b"damaged"
    assert len(caplog.records) == 1
    # Another model's: refused, and left alone.
    cache = make_cache(history=path)
    serve(cache, 1, first=3)
    History(cache.history.fingerprint._replace(digest="other")).save(path)
    before = path.read_bytes()
    with pytest.raises(HistoryFormatError, match="another model"):
        cache.close()
    assert path.read_bytes() == before
    path.unlink()
    cache.close()
    assert requests_of(path) == 4


def test_the_file_that_was_meant_is_the_one_that_is_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "store").mkdir()
    (tmp_path / "link.history").symlink_to(tmp_path / "store" / "a.history")
    monkeypatch.chdir(tmp_path)
    cache, other = make_cache(history="link.history"), make_cache(history="b.history", learn="b.learn")
    recorder = other.record("b.safetensors")
    monkeypatch.chdir("/")
    for each in (cache, other):
        serve(each, 1)
        each.close()
    assert (tmp_path / "link.history").is_symlink()
    assert requests_of(tmp_path / "store" / "a.history") == 1
    assert recorder.path == tmp_path / "b.safetensors"
    assert names(tmp_path) == ["b.history", "b.learn", "b.safetensors", "link.history", "store"]


# What cannot be written


@pytest.mark.failure("F22", "J39")
def test_what_cannot_be_written_is_said_when_it_begins(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    cases: dict[str, tuple[type[Exception], str]] = {
        "/sys/a.history": (HistoryFormatError, "cannot be|not be written"),
        "missing/a.history": (HistoryFormatError, "no folder"),
    }
    for path, (error, message) in cases.items():
        with pytest.raises(error, match=message):
            make_cache(history=path)
    for learn in ("/sys/learn", "", 1):
        with pytest.raises(LearnError):
            make_cache(learn=learn)
    with make_cache() as cache:
        for path in ("", ".", str(tmp_path), "trace.csv", "trace"):
            with pytest.raises(TraceFormatError, match=r"ends in \.safetensors"):
                cache.record(path)
        for path in ("/sys/trace.safetensors", "missing/trace.safetensors"):
            with pytest.raises(OSError):
                cache.record(path)
        serve(cache, 1)
    assert names(tmp_path) == []


@pytest.mark.failure("F22")
def test_a_history_without_a_file_is_not_written(tmp_path: Path) -> None:
    with make_cache(history=tmp_path / "a.history") as cache:
        serve(cache, 1)
    with make_cache(history=History.load(tmp_path / "a.history"), autosave=0) as cache:
        serve(cache, 1, first=1)
        assert len(cache.history) == 2
    assert requests_of(tmp_path / "a.history") == 1


FULL = """
import resource, os
def limit(nbytes):
    resource.setrlimit(resource.RLIMIT_FSIZE, (nbytes, resource.RLIM_INFINITY))
def sizes():
    return {name: os.stat(name).st_size for name in sorted(os.listdir()) if os.path.isfile(name)}
"""


@pytest.mark.failure("F21b", "126")
@pytest.mark.parametrize("when", ["while it records", "as it is closed"])
def test_a_full_disk_costs_only_what_was_on_it(scenes: Scenes, tmp_path: Path, when: str) -> None:
    code = (
        FULL
        + """
cache = make_cache(history="a.history", learn="learn")
recorder = cache.record("a.safetensors", model="x" * 60_000)
if {early}:
    limit(60_000 + 900)
serve(cache, 20)
limit(40_000)
for attempt in range(2):
    try:
        cache.close()
    except OSError as error:
        print("OSError", error.strerror.split(":")[0])
    assert cache.closed
    assert "a.history" in os.listdir(), sizes()
    assert sum(name.endswith(".part") for name in os.listdir()) == 1
limit(resource.RLIM_INFINITY)
cache.close()
print(sorted(os.listdir()), recorder.tokens)
cache.close()
"""
    )
    early = when == "while it records"
    exit_code, said = scenes.run(code.replace("{early}", str(early)), tmp_path)
    assert exit_code == 0, said
    assert said.splitlines()[-1].startswith("['a.history', 'a.safetensors', 'learn']"), said
    assert said.count("OSError") == 2, said
    assert requests_of(tmp_path / "a.history") == 20
    trace = read_trace(tmp_path / "a.safetensors")
    assert trace.tokens == int(said.split()[-1])
    assert (trace.tokens < 80) == early
    (part,) = (tmp_path / "learn").glob("log-*")
    assert read_trace(part).tokens == 80
    np.testing.assert_array_equal(trace.experts, read_trace(part).experts[: trace.tokens])


# Killed


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
def test_the_next_start_rescues_what_a_killed_one_left(
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


def test_what_is_no_recording_is_left_and_said(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
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


# Forked


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


# Signals


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


# Surroundings that lack something


@pytest.mark.failure("G23")
@pytest.mark.parametrize("how", ["no place", "full disk"])
def test_numba_s_kernels_run_where_it_can_keep_nothing(tmp_path: Path, how: str) -> None:
    code = (
        "import resource, logging; logging.basicConfig()\n"
        "import moecache.lab, numpy as np\nfrom moecache import Fingerprint, History\n"
        "resource.setrlimit(resource.RLIMIT_FSIZE, (NBYTES, resource.RLIM_INFINITY))\n"
        "history = History(Fingerprint((4, 4), 1, ''), 8)\n"
        "history.add(np.zeros(8, int), np.ones(8, int), 1)\n"
        "print(history.match_many(np.ones((1, 8), int)).round(6))"
    )
    surroundings = {
        # A locator that suits no ordinary file, as none does where neither the package nor a home can be written.
        "no place": {"NUMBA_CACHE_LOCATOR_CLASSES": "ZipCacheLocator"},
        "full disk": {"NUMBA_CACHE_DIR": str(tmp_path)},
    }
    environment = {key: value for key, value in os.environ.items() if key != "HOME"}
    done = subprocess.run(
        [sys.executable, "-O", "-c", code.replace("NBYTES", "64" if how == "full disk" else "resource.RLIM_INFINITY")],
        capture_output=True,
        text=True,
        timeout=PATIENCE_S,
        env={**environment, **surroundings[how], "PYTHONPATH": os.pathsep.join(p for p in sys.path if p)},
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout == "[[1.]]\n"
    assert done.stderr.count("Numba cannot keep what it compiles") == 1, done.stderr


@pytest.mark.failure("50")
def test_a_recording_holds_only_what_runs(tmp_path: Path) -> None:
    import tracemalloc

    with make_cache() as cache, cache.record(tmp_path / "a.safetensors") as recorder:
        serve(cache, 50)
        gc.collect()
        tracemalloc.start()
        serve(cache, 50)
        gc.collect()
        before = tracemalloc.get_traced_memory()[0]
        serve(cache, 400)
        gc.collect()
        grown = tracemalloc.get_traced_memory()[0] - before
        tracemalloc.stop()
        assert recorder.requests == 500
    # Less than one entry of a list for each request.
    assert grown < 400 * 8 + 20_000
    assert read_trace(tmp_path / "a.safetensors").requests == 500


def test_requests_in_coroutines(tmp_path: Path) -> None:
    import asyncio

    async def chat(cache: ExpertCache, number: int) -> None:
        with cache.request() as request:
            for n in range(4):
                for layer in range(LAYERS):
                    with request.route(layer, torch.full((1, TOP_K), (number + n) % EXPERTS)):
                        pass
                    await asyncio.sleep(0)

    async def chats(cache: ExpertCache) -> None:
        await asyncio.gather(*(chat(cache, n) for n in range(5)))

    with (
        make_cache(history=tmp_path / "a.history", learn=True, autosave=0) as cache,
        cache.record(tmp_path / "a.safetensors"),
    ):
        asyncio.run(chats(cache))
    assert requests_of(tmp_path / "a.history") == 5
    trace = read_trace(tmp_path / "a.safetensors")
    assert (trace.tokens, trace.requests) == (20, 5)
    for number in range(5):
        first = trace.experts[trace.request == trace.request[trace.experts[:, 0, 0] == number][0]]
        assert len(first) == 4
