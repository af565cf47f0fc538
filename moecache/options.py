"""Rare options of a cache, in one object: what most users never set."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from .errors import OptionError

__all__ = ["CacheOptions"]

_MOST_THREADS = 64  # what an engine has place for


@dataclass(frozen=True)
class CacheOptions:
    """What most users of :class:`moecache.ExpertCache` never set.

    Parameters
    ----------
    history_capacity : int
        Requests kept in a history made here.
    prefetch_waste : float
        Bytes that wrong prefetches may move at most, as a share of those that steps needed moved.
    autosave : float, optional
        Seconds after which a request that has ended is in the history's file, at the latest; a thread writes it meanwhile. None:
        not before the end.
    save_on_signals : bool
        Whether SIGTERM and SIGHUP, where they have their default effect when the first cache with files is made in the main
        thread, save histories, recordings and logs first. Handlers that the program has set are never replaced.
    threads : int, optional
        I/O threads; by default two for a bank on disk, so that one reads while the other copies out, and one otherwise.
    padding_id : int, optional
        An expert id that means "no expert", besides -1; ``attach`` takes it from the model.
    link : engine link, optional
        What the bytes travel over; by default what bank and device need.
    reserve : int or str, optional
        Bytes, or such as "2GiB", that ``capacity="auto"`` leaves free for what is still to come; by default none, and with
        ``attach`` what the model will still take.

    Raises
    ------
    OptionError
        A number that cannot be.
    """

    history_capacity: int = 1000
    prefetch_waste: float = 0.25
    autosave: float | None = 60.0
    save_on_signals: bool = True
    threads: int | None = None
    padding_id: int | None = None
    link: Any = None
    reserve: int | str | None = None

    def __post_init__(self) -> None:
        if not self.prefetch_waste >= 0:
            raise OptionError(
                f"prefetch_waste {self.prefetch_waste} is no share: expected a number from 0 on, such as 0.25"
            )
        if self.history_capacity < 1:
            raise OptionError(f"history_capacity {self.history_capacity} is no number of requests: expected at least 1")
        if self.threads is not None and not 1 <= self.threads <= _MOST_THREADS:
            raise OptionError(f"threads is {self.threads}: expected 1 to {_MOST_THREADS} I/O threads, or None")
        if self.autosave is not None and not self.autosave >= 0:
            raise OptionError(
                f"autosave is {self.autosave!r}: expected seconds from 0 on, or None to save at the end only"
            )
