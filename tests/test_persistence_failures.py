"""Files that cannot be written, disks that are full, surroundings that lack something."""

from __future__ import annotations

import gc
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from scenes import PATIENCE_S, Scenes, names, requests_of
from zygote import EXPERTS, LAYERS, TOP_K, make_cache, serve

from moecache import ExpertCache, History
from moecache.errors import HistoryFormatError, LearnError, TraceFormatError
from moecache.lab import read_trace


@pytest.mark.failure("F22", "J39")
def test_unwritable_paths_are_refused_at_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
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
def test_full_disk_keeps_what_was_written_before(scenes: Scenes, tmp_path: Path, when: str) -> None:
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
