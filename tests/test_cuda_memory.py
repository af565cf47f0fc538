"""Page-locking, over a counter of registrations: in pieces, with a limit, shared, and always given back."""

from __future__ import annotations

import logging
from typing import Any

import pytest

from moecache import cuda_runtime, page_lock

pytestmark = pytest.mark.timeout(60)


class FakeLocker:
    """Registers up to a number of bytes, like a system with a limit; some pages it refuses for what they are."""

    def __init__(self, limit: int = 1 << 60, raise_at: int = -1, refuse: dict[int, int] | None = None) -> None:
        self.limit, self.raise_at, self.refuse = limit, raise_at, refuse or {}
        self.held: dict[int, int] = {}
        self.cleared = 0
        self.seen = 0

    def register(self, address: int, nbytes: int) -> int:
        self.seen += 1
        if self.seen == self.raise_at:
            raise KeyboardInterrupt
        assert address % 4096 == nbytes % 4096 == 0
        assert not any(start < address + nbytes and address < start + size for start, size in self.held.items())
        if address in self.refuse:
            return self.refuse[address]
        if sum(self.held.values()) + nbytes > self.limit:
            return 2
        self.held[address] = nbytes
        return 0

    def unregister(self, address: int) -> int:
        return 713 if self.held.pop(address, None) is None else 0

    def clear(self) -> None:
        self.cleared += 1

    def lock(self, *ranges: tuple[int, int], **options: Any) -> page_lock.PageLock:
        return page_lock.PageLock(ranges, self.register, self.unregister, self.clear, **options)


@pytest.mark.failure("85")
def test_memory_is_locked_in_pieces_and_each_page_once() -> None:
    locker = FakeLocker()
    lock = locker.lock((40_000, 30), (4096 * 20 + 7, 50_000), (36_864, 4000), (0, 0), piece_nbytes=16_384)
    assert locker.held == {36_864: 4096, 81_920: 16_384, 98_304: 16_384, 114_688: 16_384, 131_072: 4096}
    assert lock.locked.tolist() == [
        [36_864, 40_960],
        [81_920, 98_304],
        [98_304, 114_688],
        [114_688, 131_072],
        [131_072, 135_168],
    ]
    assert (lock.locked_nbytes, lock.pageable_nbytes) == (57_344, 0)
    lock.close()
    lock.close()
    assert not locker.held


@pytest.mark.failure("86", "87", "90")
def test_what_the_system_refuses_stays_pageable_and_is_logged_once(caplog: pytest.LogCaptureFixture) -> None:
    locker = FakeLocker(limit=100_000)
    lock = locker.lock((0, 4096 * 100), (4096 * 500, 4096), piece_nbytes=40_960)
    assert (lock.locked_nbytes, lock.pageable_nbytes) == (81_920, 4096 * 101 - 81_920)
    assert locker.seen == 3  # once it is out of memory it is not asked again
    assert locker.cleared == 1
    assert len(caplog.records) == 1
    assert "refused the rest" in caplog.text
    assert "error 2" in caplog.text
    lock.close()
    assert not locker.held


@pytest.mark.failure("86", "95")
@pytest.mark.parametrize("code", [1, 712])
def test_a_piece_refused_for_what_it_is_does_not_stop_the_others(caplog: pytest.LogCaptureFixture, code: int) -> None:
    locker = FakeLocker(refuse={4096: code})
    lock = locker.lock((0, 4096 * 4), piece_nbytes=4096)
    assert lock.locked.tolist() == [[0, 4096], [8192, 12_288], [12_288, 16_384]]
    assert (lock.locked_nbytes, lock.pageable_nbytes, locker.cleared) == (12_288, 4096, 1)
    assert len(caplog.records) == 1
    lock.close()
    assert not locker.held


@pytest.mark.failure("90")
def test_not_permitted_means_nothing_is_locked(caplog: pytest.LogCaptureFixture) -> None:
    locker = FakeLocker(refuse={0: 800})
    lock = locker.lock((0, 4096 * 4), piece_nbytes=4096)
    assert lock.locked.shape == (0, 2)
    assert (lock.locked_nbytes, lock.pageable_nbytes, locker.seen) == (0, 16_384, 1)
    assert "error 800" in caplog.text
    lock.close()


@pytest.mark.parametrize("raise_at", [1, 2, 57])
def test_an_exception_while_locking_unlocks_everything(raise_at: int) -> None:
    locker = FakeLocker(raise_at=raise_at)
    with pytest.raises(KeyboardInterrupt):
        locker.lock((0, 4096 * 100), piece_nbytes=4096)
    assert not locker.held


@pytest.mark.failure("87", "97", "98")
def test_the_environment_limits_what_is_locked(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    locker = FakeLocker()
    assert locker.lock((0, 40_960), piece_nbytes=4096, limit_nbytes=9000).locked_nbytes == 8192
    monkeypatch.setenv("MOECACHE_PAGE_LOCK", "0")
    lock = locker.lock((0, 40_960), piece_nbytes=4096)
    assert (lock.locked_nbytes, lock.pageable_nbytes) == (0, 40_960)
    assert not caplog.records
    monkeypatch.setenv("MOECACHE_PAGE_LOCK", "8GiB")
    with pytest.raises(ValueError, match="MOECACHE_PAGE_LOCK='8GiB' is no number of bytes"):
        locker.lock((0, 40_960))


@pytest.mark.failure("22")
def test_memory_locked_by_somebody_else_is_used_and_left_to_them() -> None:
    locker = FakeLocker()
    pinned = [(8192, 5000), (40_960, 100), (13_192, 4000)]
    lock = locker.lock(
        *pinned,
        (20_480, 4096),
        is_locked=lambda address: 8192 <= address < 17_192 or 40_960 <= address < 41_000,
        limit_nbytes=8192,
    )
    # Ranges that only touch stay two, for they may be two registrations; one that ends outside is not taken for locked.
    assert lock.locked.tolist() == [[8192, 13_192], [13_192, 17_192], [20_480, 24_576], [40_960, 45_056]]
    assert set(locker.held) == {20_480, 40_960}
    assert (lock.locked_nbytes, lock.pageable_nbytes) == (9000 + 8192, 0)
    lock.close()
    assert not locker.held


@pytest.mark.failure("94")
def test_a_lock_holds_until_its_last_user_closes_it() -> None:
    locker = FakeLocker()
    lock = locker.lock((0, 8192))
    assert lock.share()
    assert lock.share()
    lock.close()
    lock.close()
    assert locker.held
    lock.close()
    assert not locker.held
    assert not lock.share()
    lock.close()


def test_a_driver_that_is_gone_is_no_error_when_unlocking(caplog: pytest.LogCaptureFixture) -> None:
    lock = page_lock.PageLock([(0, 8192)], lambda *_: 0, lambda _: cuda_runtime.UNLOADING, lambda: None)
    lock.close()
    assert not caplog.records
    lock = page_lock.PageLock([(0, 8192)], lambda *_: 0, lambda _: 1, lambda: None)
    lock.close()
    assert "could not be unlocked" in caplog.text


@pytest.mark.failure("G28", "97")
def test_locking_that_takes_long_is_logged_once_and_an_interrupt_gives_all_back(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    clock = iter(range(0, 1000))
    monkeypatch.setattr(page_lock.time, "monotonic", lambda: float(next(clock)))
    locker = FakeLocker(raise_at=6)
    with caplog.at_level(logging.INFO), pytest.raises(KeyboardInterrupt):
        locker.lock((4096, 10 * 4096), piece_nbytes=4096)
    assert not locker.held
    assert len(caplog.records) == 1
    assert "after 2 s, about 8 s to go" in caplog.text
    assert "MOECACHE_PAGE_LOCK" in caplog.text


def test_locking_that_is_quick_is_silent(caplog: pytest.LogCaptureFixture, capsys: pytest.CaptureFixture[str]) -> None:
    with caplog.at_level(logging.INFO):
        FakeLocker().lock((4096, 10 * 4096), piece_nbytes=4096).close()
    assert not caplog.records
    assert capsys.readouterr() == ("", "")


@pytest.mark.failure("97")
def test_a_terminal_gets_a_bar(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(page_lock, "SHOWN_AFTER_S", 0.0)
    monkeypatch.setattr(page_lock, "tqdm", _always)  # as where stderr is a terminal
    FakeLocker().lock((4096, 10 * 4096), piece_nbytes=4096).close()
    assert "locking host memory" in capsys.readouterr().err


def _always(**options: Any) -> Any:
    from tqdm import tqdm

    return tqdm(**{**options, "disable": False})
