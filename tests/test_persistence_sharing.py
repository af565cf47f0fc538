"""Several caches, threads and processes on one history file."""

from __future__ import annotations

import threading
from pathlib import Path

import numpy as np
import pytest
from scenes import PATIENCE_S, Scenes, names, requests_of
from zygote import make_cache, routed, serve

from moecache import History
from moecache.errors import HistoryFormatError
from moecache.files import FileLock


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
            np.testing.assert_array_equal(history.store.learned()[name], alone.history.store.learned()[name])


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
def test_lock_held_for_ever_is_an_error_not_a_hang(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
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
def test_history_file_removed_damaged_or_replaced_between_saves(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
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


def test_links_and_relative_paths_keep_their_meaning(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
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
