"""Histories through a cache: written at close, read again, refused."""

from __future__ import annotations

import threading
from pathlib import Path

import pytest
from cache_helpers import make_bank, run

from moecache import CacheOptions, ExpertBank, ExpertCache, History
from moecache.errors import (
    HistoryFormatError,
)


def test_the_history_is_written_at_close_and_read_again(bank: ExpertBank, tmp_path: Path) -> None:
    path = tmp_path / "chat.history"
    with ExpertCache(bank, 4, history=path, top_k=2) as cache:
        with cache.request() as request:
            run(request, 0, [[0, 1], [2, 3]])
            run(request, 1, [[4, 5], [6, 7]])
        assert not path.exists()
    assert path.exists()
    with ExpertCache(bank, 4, history=str(path), top_k=2) as cache:
        assert len(cache.history) == 1
        assert cache.history.store.prompt_counts[0].tolist() == [1, 1, 1, 1, 0, 0, 0, 0, 0, 0, 0, 0, 1, 1, 1, 1]
        with cache.request() as request:
            run(request, 0, [[5, 6]])
    assert len(History.load(path)) == 2
    assert [p.name for p in tmp_path.iterdir()] == ["chat.history"]


@pytest.mark.failure("56")
def test_a_history_of_another_model_is_refused(bank: ExpertBank, tmp_path: Path) -> None:
    path = tmp_path / "chat.history"
    with ExpertCache(bank, 4, history=path, top_k=2) as cache, cache.request() as request:
        run(request, 0, [[0, 1]])
    content = path.read_bytes()
    threads = threading.active_count()
    for other, top_k in [
        (make_bank((8, 4)), 2),
        (make_bank((8, 8, 8)), 2),
        (make_bank((8, 8), sizes=[6, 6]), 2),
        (bank, 3),
    ]:
        with pytest.raises(HistoryFormatError, match=r"another model: expected .*found"):
            ExpertCache(other, 4, history=path, top_k=top_k)
        with pytest.raises(HistoryFormatError, match="another model"):
            ExpertCache(other, 4, history=History.load(path), top_k=top_k)
    assert threading.active_count() == threads
    assert path.read_bytes() == content


def test_a_history_that_cannot_be_written_anywhere_is_refused_at_the_start(bank: ExpertBank, tmp_path: Path) -> None:
    with pytest.raises(HistoryFormatError, match="no folder"):
        ExpertCache(bank, 4, history=tmp_path / "missing" / "chat.history")


@pytest.mark.failure("50")
def test_many_requests_do_not_grow_the_cache(bank: ExpertBank) -> None:
    with ExpertCache(bank, 4, options=CacheOptions(history_capacity=3)) as cache:
        for n in range(60):
            with cache.request() as request:
                run(request, n % 2, [[n % 8]])
        assert len(cache.history) == 3
        assert cache.stats().requests == 60
        assert cache.history.store.replaced == 57
